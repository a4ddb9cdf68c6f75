"""Schema of drafts (speculative decoding): `replica.draft`, and the acceptance of drafts in a simulation."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from vajra_py.config.sections import Count, Seconds, Section, Switch, Text

_Fraction = Annotated[float, Field(strict=True, ge=0, le=1)]


class DraftConfig(Section):
    """Draft tokens that a step verifies for each decode (speculative decoding)."""

    num_tokens: Count = Field(0, description="Number of draft tokens of a decode in a step where the policy sets none.")
    max_tokens: Count | None = Field(
        None, description="Maximum number of drafts that a policy may ask for, tokens; null: `num_tokens`."
    )
    lookahead_tokens: Count = Field(
        0,
        description="Tokens behind the drafts for which blocks are taken too, for drafters that write KV ahead (vLLM: as many as drafts for EAGLE, 0 for n-grams).",
    )
    rejected_blocks: Literal["free", "keep"] = Field(
        "free",
        description="Treatment of blocks that hold only rejected drafts: freed at once, or kept by their request (vLLM).",
    )
    past_max_tokens: Switch = Field(
        False,
        description="Propose drafts beyond the request's `max_tokens` too, up to the model's maximum length (vLLM).",
    )
    publish: Literal["complete", "schedule"] = Field(
        "complete",
        description="When accepted drafts can be found in the prefix cache, where `prefix_cache.publish` is `schedule`: once their step is complete (vLLM 0.33), or when the next step of their request is formed, if there is one (vLLM 0.32).",
    )
    pad_admitted: Switch = Field(
        False,
        description="In steps without a running prefill, let a request that is admitted with one token left compute `num_tokens` placeholder drafts, which are always rejected, so that steps of decodes are uniform (vLLM).",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_tokens is not None and self.max_tokens < self.num_tokens:
            raise ValueError(f"max_tokens is below num_tokens ({self.max_tokens} of {self.num_tokens})")
        return self

    @property
    def most_tokens(self) -> int:
        """Maximum number of draft tokens per decode and step; 0 without drafts."""
        return self.num_tokens if self.max_tokens is None else self.max_tokens


class SimulatedDraftsConfig(Section):
    """Model of drafts in a simulation: one of `rate`, `rates`, `table` and `trace`, and the time of drafting."""

    rate: _Fraction | None = Field(
        None, description="Probability that a draft is accepted, given that those before it are."
    )
    rates: tuple[_Fraction, ...] | None = Field(
        None, min_length=1, description="Acceptance probability by position, the first draft's first."
    )
    table: Text | None = Field(
        None,
        description="CSV file with columns `position` (from 1) and `acceptance`: the fraction of verifications in which all drafts up to this position were accepted.",
    )
    trace: Text | None = Field(
        None,
        description="`drafts.jsonl.gz` of another run with the same request ids, whose accepted drafts are repeated.",
    )
    step_s: Seconds = Field(0.0, description="Time that drafting adds to a step with drafts, seconds.")
    token_s: Seconds = Field(0.0, description="Time that each draft adds to its step, seconds.")

    @field_validator("table", "trace")
    @classmethod
    def _seen_from_base_folder(cls, path: str | None, info: ValidationInfo) -> str | None:
        from vajra_py.latency.config import resolved_path  # imported late, since it loads numpy

        return None if path is None else resolved_path(path, info)

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name in ("rate", "rates", "table", "trace") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of rate, rates, table, trace is needed (got {', '.join(given) or 'none'})")
        return self
