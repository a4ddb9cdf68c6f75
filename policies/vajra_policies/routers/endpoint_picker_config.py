"""Parameters of `endpoint_picker`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from vajra_py.contract import (
    DeciderChoice,
    FilterChoice,
    PickerChoice,
    PolicyConfig,
    ProducerChoice,
    ScorerChoice,
)

DEFAULT, PREFILL, DECODE = "default", "prefill", "decode"
"""Names of profiles."""


class ProfileConfig(PolicyConfig):
    """Parts of one profile."""

    filters: list[FilterChoice] = Field(default_factory=list, description="Filters in order.")
    scorers: list[ScorerChoice] = Field(default_factory=list, description="Scorers with weights.")
    picker: PickerChoice = Field(default_factory=lambda: PickerChoice(picker=_DEFAULT_PICKER), description="Picker.")


class DisaggregationConfig(PolicyConfig):
    """Order in which the two replicas are chosen, and the decider that selects the prompts to disaggregate."""

    order: Literal["decode-first", "prefill-first", "decode-after-prompt"] = Field(
        "decode-first",
        description=(
            "`decode-first`, `prefill-first`: both replicas are chosen at arrival, in this order. `decode-after-prompt`: the "
            "replica that decodes is chosen when the prompt is computed."
        ),
    )
    decider: DeciderChoice | None = Field(
        None,
        description="Decider of which prompts are computed apart, given the decode replica chosen first; none: never. Only with `decode-first`.",
    )

    @model_validator(mode="after")
    def _decides_by_decode(self) -> DisaggregationConfig:
        if self.decider is not None and self.order != "decode-first":
            raise ValueError(
                f"a decider needs order decode-first, since it depends on the decode replica (got {self.order})"
            )
        return self


_DEFAULT_SCORERS = (("queue-scorer", 2.0), ("kv-cache-utilization-scorer", 2.0), ("prefix-cache-scorer", 3.0))
_DEFAULT_PICKER = "max-score-picker"


class EndpointPickerPolicyConfig(PolicyConfig):
    """Parameters of `endpoint_picker`. If none are given, llm-d's default configuration applies."""

    producers: list[ProducerChoice] = Field(
        default_factory=list, description="Settings of producers; others that parts need have their defaults."
    )
    filters: list[FilterChoice] = Field(default_factory=list, description="Filters in order.")
    scorers: list[ScorerChoice] | None = Field(
        None,
        description=(
            "Scorers with weights: each score, clamped to 0 .. 1, times its weight is added. None given: queue-scorer 2, "
            "kv-cache-utilization-scorer 2, prefix-cache-scorer 3."
        ),
    )
    picker: PickerChoice | None = Field(None, description="Picker; none given: max-score-picker.")
    profiles: dict[Literal["prefill", "decode"], ProfileConfig] = Field(
        default_factory=dict,
        description="Profiles of a disaggregated replicaset, in place of filters, scorers and picker; `decode` is needed.",
    )
    disaggregation: DisaggregationConfig | None = Field(None, description="Order in which the profiles are applied.")

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        if given.get("profiles"):
            return {"disaggregation": {}, **given}
        scorers = [{"scorer": name, "weight": weight} for name, weight in _DEFAULT_SCORERS]
        filled = {key: value for key, value in given.items() if value is not None}
        return {"scorers": scorers, "picker": _DEFAULT_PICKER, **filled}

    @model_validator(mode="after")
    def _has_one_form(self) -> EndpointPickerPolicyConfig:
        if not self.profiles:
            if self.disaggregation is not None:
                raise ValueError("disaggregation needs profiles")
            return self
        if DECODE not in self.profiles:
            raise ValueError("profiles need one named decode")
        if self.filters or self.scorers is not None or self.picker is not None:
            raise ValueError("sets profiles, and also filters, scorers or a picker")
        return self
