"""Schema of `hand_off:`: how requests leave one pool with their KV and continue in another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vajra_py.contract.latency import LAST_S

HandOffPreset: TypeAlias = Literal["vllm-pd", "sglang-pd", "dynamo-pd", "distserve", "splitwise"]

PRESETS: Mapping[HandOffPreset, Mapping[str, str | float]] = {
    "vllm-pd": {"reserve": "at_admission", "first_token": "recompute", "takes_effect": "at_step_boundary"},
    "sglang-pd": {"reserve": "before_prompt", "first_token": "source", "takes_effect": "at_step_boundary"},
    "dynamo-pd": {
        "reserve": "after_prompt",
        "reservations": "one_at_a_time",
        "first_token": "recompute",
        "takes_effect": "at_step_boundary",
        "moves": "whole_prompt",
    },
    "distserve": {"reserve": "after_prompt", "first_token": "source", "takes_effect": "at_once"},
    "splitwise": {
        "reserve": "after_prompt",
        "reserve_ahead_tokens": 1,
        "when_full": "retry",
        "retry_interval_s": 1.0,
        "first_token": "source",
        "takes_effect": "at_once",
    },
}
"""Keys that each preset sets; other keys have their defaults."""


class HandOffConfig(BaseModel):
    """Rules of a hand-off: when memory of the target is allocated, and what happens if it is full."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    preset: HandOffPreset | None = Field(
        None,
        description="Rules of a system (vLLM, SGLang, Dynamo's replay, DistServe, Splitwise); explicit keys override them.",
    )
    reserve: Literal["before_prompt", "after_prompt", "at_admission"] = Field(
        "after_prompt",
        description=(
            "Time at which the target's blocks are allocated: before the prompt is computed, which waits for them; once it is computed; or when the target's scheduler admits the request, which then waits for its KV."
        ),
    )
    reserve_ahead_tokens: Annotated[int, Field(strict=True, ge=0)] = Field(
        0,
        description=(
            "Number of tokens beyond the computed ones for which blocks are reserved at the target (at most as many as the request may come to hold); not with `at_admission`."
        ),
    )
    reservations: Literal["all_that_fit", "one_at_a_time"] = Field(
        "all_that_fit",
        description=(
            "Number of waiting requests for which a target allocates blocks at a time: all that fit; or one after each of its steps and one after each arrival, and none while its batch is full."
        ),
    )
    when_full: Literal["wait", "hold", "retry", "drop"] = Field(
        "wait",
        description=(
            "Treatment of a request whose target is full: it waits for this target, in order; its source holds it until any target has room; it tries this target again after `retry_interval_s`; or it ends. The source keeps its KV meanwhile."
        ),
    )
    retry_interval_s: Annotated[float, Field(strict=True, gt=0, le=LAST_S)] = Field(
        1.0, description="Time between two tries at a full target, with `when_full: retry`, seconds."
    )
    first_token: Literal["source", "recompute"] = Field(
        "source",
        description=(
            "Use of the token that the source samples: the client gets it; or it is dropped, and the target computes the prompt's last token again."
        ),
    )
    takes_effect: Literal["at_once", "at_step_boundary"] = Field(
        "at_once",
        description="Time at which a replica sends and receives KV: at any time, or between two of its steps, as engines that poll do.",
    )
    moves: Literal["missing", "whole_prompt"] = Field(
        "missing",
        description=(
            "Blocks that a simulation transfers: those that the target's prefix cache lacks, or all of the prompt's; the engine copies the missing ones."
        ),
    )
    overlap: Literal["none", "by_chunk", "by_layer"] = Field(
        "none",
        description=(
            "KV that is sent while the prompt is computed: none; that of each chunk when its step ends; or that of each layer when the layer is computed. Needs `reserve: before_prompt` and a simulation."
        ),
    )
    overlap_min_tokens: Annotated[int, Field(strict=True, ge=0)] = Field(
        0, description="Number of tokens below which a prompt is sent only once it is computed (Splitwise: 512)."
    )
    num_layers: Annotated[int, Field(strict=True, gt=0)] | None = Field(
        None, description="Number of layers of the model, for `overlap: by_layer`; null: that of the latency model."
    )
    kv_bytes_per_token: Annotated[int, Field(strict=True, gt=0)] | None = Field(
        None, description="Size of a token's KV, bytes; null: that of the latency model or the engine's model."
    )

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.when_full == "retry" and (self.takes_effect != "at_once" or self.reservations != "all_that_fit"):
            given = f"{self.takes_effect}, {self.reservations}"
            raise ValueError(
                f"when_full: retry needs takes_effect: at_once and reservations: all_that_fit (got {given})"
            )
        if self.overlap != "none" and self.reserve != "before_prompt":
            raise ValueError(
                f"overlap: {self.overlap} needs the target's blocks before_prompt (got reserve: {self.reserve})"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"preset": value}
        if isinstance(value, Mapping) and value.get("preset") in PRESETS:
            return {**PRESETS[value["preset"]], **value}
        return value


class MigrationConfig(BaseModel):
    """Rules of live migration: running requests move to another replica while they decode. Defaults as in Llumnix."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    max_stages: Annotated[int, Field(strict=True, gt=0)] = Field(
        3, description="Number of copies of a request's KV; the request stops for the last one."
    )
    last_stage_max_blocks: Annotated[int, Field(strict=True, ge=0)] = Field(
        16, description="Number of full blocks not yet copied at or below which the last copy is made."
    )
    max_per_replica: Annotated[int, Field(strict=True, gt=0)] = Field(
        1, description="Maximum number of concurrent migrations from and to one replica."
    )
