"""Schema of `replica.memory.tiers`: memory below the device, for cached KV that is offloaded and loaded again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from vajra_py.config.sections import NAME_PATTERN, Count, PolicyChoice, PositiveCount, Seconds, Section, Switch

_Bandwidth = Annotated[float, Field(strict=True, ge=1e-9, le=1e9)]


TIER_PRESETS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "vllm_offloading": (
        {"prefetch": "wait_complete", "prefetch_from": "admission", "prompts_only": True, "loads": "reserved"},
        {"write": "write_through", "retention": {"policy": "lru"}},
    ),
    "sglang_hicache": (
        {
            "prefetch": "timeout",
            "prefetch_from": "arrival",
            "prefetch_timeout_s": 1.0,
            "prefetch_timeout_s_per_1k_tokens": 0.25,
            "min_prefetch_tokens": 256,
            "min_load_tokens": 10,
        },
        {"write": "write_through", "retention": {"policy": "lru"}},
    ),
}
"""Presets by name of a system: settings of `tiers` as a whole, and settings of each tier.

Sources: vLLM 0.33 `OffloadingConnector` with its CPU and secondary tiers; SGLang 0.5.23 HiCache and its defaults.
"""


class TierConfig(Section):
    """One tier: its size, its link to the memory above it, and its retention rules."""

    name: str = Field(pattern=NAME_PATTERN, description="Name in results and for policies, such as `host`.")
    num_blocks: PositiveCount = Field(description="Number of KV blocks that it holds; for a shared tier, in total.")
    bandwidth_gb_s: _Bandwidth = Field(
        description="Bandwidth of each replica's link to it, each way, GB/s (of 10^9 bytes).",
        json_schema_extra={"unit": "GB/s"},
    )
    shared_bandwidth_gb_s: _Bandwidth | None = Field(
        None,
        description="Bandwidth that all transfers of a shared tier have together, GB/s (of 10^9 bytes); null: no limit.",
        json_schema_extra={"unit": "GB/s"},
    )
    latency_s: Seconds = Field(0.0, description="Time from a transfer's start until its first byte flows, seconds.")
    contention: Literal["max_min", "none", "fixed_share", "exclusive"] = Field(
        "max_min", description="Effect of transfers on its link on each other; as for `links`."
    )
    write: Literal["write_back", "write_through", "write_through_selective"] = Field(
        "write_back",
        description=(
            "Time at which content of the memory above is copied to it: when it is evicted there; as soon as it is stored there; or when it has been used `after_uses` times."
        ),
    )
    after_uses: PositiveCount = Field(
        2, description="Number of uses from which `write_through_selective` copies; the first computation is one."
    )
    exclusive: Switch = Field(
        False, description="Remove content from the tier when it is loaded; only with `write_back`."
    )
    shared: Switch = Field(
        False, description="One tier for all replicas of the replicaset; only the last tier, and not exclusive."
    )
    retention: PolicyChoice = Field(
        default_factory=lambda: PolicyChoice(policy="lru"),
        description="Retention policy of its content, by name.",
    )

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.exclusive and self.write != "write_back":
            raise ValueError(
                f"exclusive cannot be combined with {self.write}, which keeps content in both; allowed: write_back"
            )
        if self.exclusive and self.shared:
            raise ValueError("a shared tier cannot be exclusive: other replicas find its content")
        if self.shared_bandwidth_gb_s is not None and not self.shared:
            raise ValueError("shared_bandwidth_gb_s applies only to a shared tier; set shared: true, or leave it out")
        if self.after_uses != 2 and self.write != "write_through_selective":
            raise ValueError(f"after_uses applies only to write: write_through_selective (got {self.write})")
        return self


class SwapLinkConfig(Section):
    """Link over which preempted requests are swapped between a replica's device and host memory while steps run."""

    bandwidth_gb_s: _Bandwidth = Field(
        description="Bandwidth each way, GB/s (of 10^9 bytes).", json_schema_extra={"unit": "GB/s"}
    )
    latency_s: Seconds = Field(0.0, description="Time from a copy's start until its first byte flows, seconds.")
    contention: Literal["max_min", "none", "fixed_share", "exclusive"] = Field(
        "max_min", description="Effect of copies in one direction on each other; as for `links`."
    )
    frees: Literal["copied", "at_once"] = Field(
        "copied",
        description=(
            "Time at which a preempted request's device blocks are free: when they have been copied; or at once, since a buffer holds their content."
        ),
    )
    kv_bytes_per_token: PositiveCount | None = Field(
        None, description="Size of a token's KV on the link, bytes; null: the model's."
    )


class TiersConfig(Section):
    """Memory tiers below the device, nearest first, and how KV is loaded from them. A list is short for `levels`."""

    preset: Literal["vllm_offloading", "sglang_hicache"] | None = Field(
        None,
        description="System whose rules hold for the keys that are left out here and in the tiers; null: the defaults of this schema.",
    )
    levels: tuple[TierConfig, ...] = Field(min_length=1, description="Tiers, nearest to the device first.")
    prefetch: Literal["wait_complete", "timeout", "best_effort"] = Field(
        "wait_complete",
        description=(
            "Treatment of a request that the scheduler reaches while its content is on the way from a lower tier to the first: it waits; it waits up to a timeout; or it goes on with what has arrived."
        ),
    )
    prefetch_from: Literal["arrival", "admission"] = Field(
        "arrival",
        description="Time at which a prefetch begins: when a request is queued at its replica, or when the scheduler first tries to admit it.",
    )
    prefetch_timeout_s: Seconds = Field(
        1.0, description="Longest wait with `timeout`, from the scheduler's first try on, seconds."
    )
    prefetch_timeout_s_per_1k_tokens: Seconds = Field(
        0.25, description="Additional wait with `timeout` for each 1024 prefetched tokens, seconds."
    )
    min_prefetch_tokens: Count = Field(0, description="Minimum number of tokens of a prefetch; fewer are computed.")
    min_load_tokens: Count = Field(
        0, description="Minimum number of tokens that are loaded from the first tier to the device; fewer are computed."
    )
    loads: Literal["in_turn", "reserved"] = Field(
        "in_turn",
        description=(
            "Blocks that a load to the device may take: all free ones; or, as in vLLM, those that running prompts do not need, where admission ends at a request whose load does not fit. Loaded requests are then offered by `load_order`."
        ),
    )
    load_order: Literal["begin", "urgency"] = Field(
        "begin",
        description=(
            "Order of loaded requests with `loads: reserved`: by the start of their load, as in vLLM with fcfs; or by the prioritizer, as in vLLM with priority."
        ),
    )
    prompts_only: Switch = Field(
        False,
        description="Keep the content of prompts only; generated tokens are kept once a later prompt contains them.",
    )
    kv_bytes_per_token: PositiveCount | None = Field(
        None, description="Size of a token's KV on a link, bytes; null: the model's."
    )

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit `loads` and `load_order` at their defaults, so that the written form of older files stays the same."""
        data: dict[str, Any] = handler(self)
        preset = {} if self.preset is None else TIER_PRESETS[self.preset][0]
        if self.loads == preset.get("loads", "in_turn") == "in_turn":
            data.pop("loads", None)
            data.pop("load_order", None)
        return data

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return {"levels": value}
        name = value.get("preset") if isinstance(value, Mapping) else None
        preset = TIER_PRESETS.get(name) if isinstance(name, str) else None
        if preset is None:
            return value
        of_all, of_each = preset
        levels = value.get("levels")
        if isinstance(levels, list | tuple):
            levels = [{**of_each, **one} if isinstance(one, Mapping) else one for one in levels]
        return {**of_all, **value, "levels": levels}

    @field_validator("levels")
    @classmethod
    def _distinct(cls, levels: tuple[TierConfig, ...]) -> tuple[TierConfig, ...]:
        names = [level.name for level in levels]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two tiers have one name ({', '.join(twice)})")
        if "device" in names:
            raise ValueError("a tier is named device, which is the memory above the first tier")
        above = [level.name for level in levels[:-1] if level.shared]
        if above:
            raise ValueError(f"{above[0]!r} is shared, and a tier comes after it; only the last tier may be shared")
        return levels

    @model_validator(mode="after")
    def _loads_in_order(self) -> Self:
        if self.load_order != "begin" and self.loads != "reserved":
            raise ValueError(
                f"load_order applies only to loads: reserved (got {self.loads}); set it, or leave load_order out"
            )
        return self

    @model_validator(mode="after")
    def _begins_in_time(self) -> Self:
        if self.prefetch == "best_effort" and self.prefetch_from == "admission":
            raise ValueError(
                "best_effort uses what has arrived at the first look, and prefetch_from: admission begins with it; "
                "allowed: prefetch_from: arrival, or another rule"
            )
        return self
