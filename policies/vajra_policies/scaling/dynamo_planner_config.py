"""Parameters of `dynamo_planner`, and the rules of the planner that they determine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from pydantic import Field, model_validator

from vajra_policies.scaling.device_budget import Budget
from vajra_policies.scaling.planner_rules import (
    DECODE_THRESHOLDS,
    PREFILL_THRESHOLDS,
    LatencySlos,
    PlannerRules,
    Target,
    Thresholds,
)
from vajra_py.contract import PolicyConfig, PoolRole

THROUGHPUT, LOAD = "throughput", "load"
"""Kinds of decisions."""


class DynamoPlannerConfig(PolicyConfig):
    """Parameters of `dynamo_planner`."""

    target: Target = Field(
        "throughput",
        description=(
            "Rule by which load decides: `throughput` and `latency` use fixed thresholds, `load` the thresholds "
            "given by the options below, `sla` the latency SLOs."
        ),
    )
    by_load: bool = Field(True, description="Start or stop one replica of each pool every `load_interval_s`, by load.")
    by_throughput: bool = Field(
        True,
        description="Set the number of replicas for the expected requests every `throughput_interval_s`; with target `sla` only.",
    )
    load_interval_s: float = Field(5.0, gt=0, description="Time between decisions on load, seconds.")
    throughput_interval_s: float = Field(180.0, gt=0, description="Time between decisions on throughput, seconds.")
    ttft_slo_s: float = Field(0.5, gt=0, description="TTFT SLO, seconds.")
    itl_slo_s: float = Field(0.05, gt=0, description="TBT SLO, seconds.")
    down_sensitivity_fraction: float = Field(
        0.8,
        gt=0,
        le=1,
        description=(
            "A replica is stopped only if the remaining ones are then predicted to need at most this fraction of an "
            "SLO."
        ),
    )
    max_change: int = Field(
        8, ge=1, description="Maximum number of replicas by which one decision on throughput changes a pool."
    )
    max_devices: int | None = Field(None, ge=1, description="Maximum number of devices of all pools; null: any number.")
    min_devices: int | None = Field(None, ge=0, description="Devices below which nothing is stopped; null: any number.")
    devices_per_replica: dict[str, int] = Field(
        default_factory=dict, description="Devices of a replica, by pool; 1 where a pool is left out."
    )
    prefill_up_tokens: int | None = Field(
        None, ge=0, description="Queued prompt tokens of a replica from which one more is started; target `load`."
    )
    prefill_down_tokens: int | None = Field(
        None, ge=0, description="Queued prompt tokens of every replica up to which one is stopped; target `load`."
    )
    kv_up_fraction: float | None = Field(
        None, gt=0, description="KV usage of a replica from which one more is started; target `load`."
    )
    kv_down_fraction: float | None = Field(
        None, ge=0, description="KV usage of every replica up to which one is stopped; target `load`."
    )
    expected_prompt_tokens: int = Field(3000, ge=1, description="Mean prompt before any has arrived.")
    expected_output_tokens: int = Field(150, ge=1, description="Mean output before any has ended.")

    @model_validator(mode="after")
    def _decides(self) -> Self:
        if not self.by_load and not self._scales_by_throughput:
            raise ValueError("no rule is active: by_load is false, and by_throughput needs target `sla`")
        if self.max_devices is not None and self.min_devices is not None and self.min_devices > self.max_devices:
            raise ValueError(f"min_devices ({self.min_devices}) is above max_devices ({self.max_devices})")
        if self.target == "load" and None in (self.kv_up_fraction, self.kv_down_fraction):
            raise ValueError("target `load` needs kv_up_fraction and kv_down_fraction")
        return self

    @property
    def intervals_s(self) -> Mapping[str, float]:
        """Interval in seconds of each kind of decision that is made; the kinds are in the order in which they are
        decided.
        """
        intervals_s = {THROUGHPUT: self.throughput_interval_s} if self._scales_by_throughput else {}
        return intervals_s | ({LOAD: self.load_interval_s} if self.by_load else {})

    @property
    def _scales_by_throughput(self) -> bool:
        return self.by_throughput and self.target == "sla"

    def rules(self) -> PlannerRules:
        """Return the rules of the deployment."""
        slos = LatencySlos(self.ttft_slo_s, self.itl_slo_s, self.down_sensitivity_fraction)
        budget = Budget(self.max_devices, self.min_devices)
        return PlannerRules(self.target, slos, budget, self.by_load, self._scales_by_throughput, self.max_change)

    def thresholds(self, role: PoolRole) -> Thresholds | None:
        """Return the load thresholds of a pool; None if latency SLOs decide, or no thresholds are given."""
        if self.target == "sla":
            return None
        if self.target != "load":
            return (PREFILL_THRESHOLDS if role is PoolRole.PREFILL else DECODE_THRESHOLDS)[self.target]
        up, down = self.kv_up_fraction, self.kv_down_fraction
        if role is PoolRole.PREFILL:
            up, down = self.prefill_up_tokens, self.prefill_down_tokens
        return None if up is None or down is None else Thresholds(up, down, up_at_equal=True, down_at_equal=True)
