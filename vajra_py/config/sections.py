"""Base classes of all sections of an experiment file, and of sections that select an installed object by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    model_validator,
)

from vajra_py.contract import Layer
from vajra_py.contract.latency import LAST_S

Count: TypeAlias = Annotated[int, Field(strict=True, ge=0)]
Seed: TypeAlias = Annotated[int, Field(strict=True, ge=0, le=10**63)]
"""Seed with at most 64 digits, which random streams can be derived from."""
PositiveCount: TypeAlias = Annotated[int, Field(strict=True, gt=0, le=2**31 - 1)]
ReplicaCount: TypeAlias = Annotated[int, Field(strict=True, gt=0, le=1_000_000)]
StageCount: TypeAlias = Annotated[int, Field(strict=True, gt=0, le=1024)]
BlockSize: TypeAlias = Annotated[int, Field(strict=True, gt=0, le=65_536)]
Seconds: TypeAlias = Annotated[float, Field(strict=True, ge=0, le=LAST_S)]
PositiveSeconds: TypeAlias = Annotated[float, Field(strict=True, gt=0, le=LAST_S)]
Switch: TypeAlias = Annotated[bool, Field(strict=True)]
Text: TypeAlias = Annotated[str, Field(strict=True, min_length=1)]

MAX_REPLICATIONS = 1000
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class Section(BaseModel):
    """Base of all sections: frozen, no extra keys, no NaN, validated defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class Choice(BaseModel):
    """Installed object selected by name."""

    _validated: BaseModel | None = PrivateAttr(None)

    @classmethod
    def of_validated(cls, given: Mapping[str, Any], model: BaseModel) -> Self:
        """Return the choice that `given` describes; `model` holds its validated parameters."""
        choice = cls.model_validate(given)
        choice._validated = model
        return choice

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy as pydantic does; the parameters of a copy with updates do not count as validated."""
        copy = super().model_copy(update=update, deep=deep)
        if update:
            copy._validated = None
        return copy


class PolicyChoice(Section, Choice):
    """Policy selected by name, with its parameters. `lrs` alone is short for `{policy: lrs}`."""

    policy: Text = Field(description="Name (or alias) of an installed policy; `vajra policies` lists them.")
    params: dict[str, Any] = Field(
        default_factory=dict, description="The policy's own parameters; `vajra policies show NAME` lists them."
    )

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"policy": value} if isinstance(value, str) else value

    @property
    def parameters(self) -> Mapping[str, Any] | BaseModel:
        """Parameters for building the policy: the validated model if loaded from a file, else raw `params`."""
        return self.params if self._validated is None else self._validated


class TypedChoice(Choice):
    """Installed object by name, with its parameters: `{type: name, …}`, or just the name."""

    model_config = ConfigDict(frozen=True, extra="allow")

    type: Text = Field(description="Name of the installed plug-in.")

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"type": value} if isinstance(value, str) else value

    @property
    def params(self) -> Mapping[str, Any]:
        """Parameters other than `type`."""
        return self.model_extra or {}

    @property
    def parameters(self) -> Mapping[str, Any] | BaseModel:
        """Parameters for building the object, as for `PolicyChoice`."""
        return self.params if self._validated is None else self._validated


class SchedulingConfig(Section):
    """Scheduling policies: one for each layer."""

    preset: Text | None = Field(
        None, description="Preset with the settings of a whole system; explicit keys override it."
    )
    request_prioritizer: PolicyChoice = Field(description="Policy that orders waiting requests.")
    replicaset_scheduler: PolicyChoice = Field(description="Policy that selects a replica for a request.")
    replica_scheduler: PolicyChoice = Field(description="Policy that forms the batch of a step.")
    scaling: PolicyChoice | None = Field(
        None, description="Scaler that sets the number of replicas; null: always `num_replicas`."
    )
    retention: PolicyChoice | None = Field(
        None,
        description=(
            "Retention policy that selects the idle cached content to evict; null: the order of `memory.prefix_cache`, by default `lru`."
        ),
    )

    def choice(self, layer: Layer) -> PolicyChoice:
        """Return the policy of a layer."""
        choice: PolicyChoice = getattr(self, layer.value)
        return choice
