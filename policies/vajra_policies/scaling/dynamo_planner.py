"""Dynamo's planner as a scaler: the rules of `planner` with figures of the pools' views, of arrivals and of departures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from pydantic import Field, model_validator

from vajra_policies.scaling.device_budget import Budget
from vajra_policies.scaling.engine_predictions import EnginePredictions
from vajra_policies.scaling.planner import (
    PlannerRules,
    PoolRules,
    PoolState,
    Traffic,
    decide_by_load,
    decide_by_throughput,
)
from vajra_policies.scaling.planner_rules import (
    DECODE_THRESHOLDS,
    PREFILL_THRESHOLDS,
    EngineLoad,
    EngineSizes,
    Promises,
    Target,
    Thresholds,
)
from vajra_policies.scaling.pools import replicas_in, shared_tokens, within_bounds
from vajra_py.contract import (
    EndReason,
    PolicyConfig,
    PolicyContext,
    PoolRole,
    PoolView,
    ReplicaId,
    ReplicaState,
    RequestView,
    ScalerSpec,
)

THROUGHPUT, LOAD = "throughput", "load"


class DynamoPlannerConfig(PolicyConfig):
    """Parameters of `dynamo_planner`."""

    target: Target = Field(
        "throughput",
        description=(
            "Rule by which load decides: `throughput` and `latency` have fixed thresholds, `load` those given here, `sla` the promised "
            "latencies."
        ),
    )
    by_load: bool = Field(True, description="One replica up or down for each pool, every `load_interval_s`.")
    by_throughput: bool = Field(
        True, description="Replicas for the expected requests, every `throughput_interval_s`; with target `sla` only."
    )
    load_interval_s: float = Field(5.0, gt=0, description="Time between decisions on load, seconds.")
    throughput_interval_s: float = Field(180.0, gt=0, description="Time between decisions on throughput, seconds.")
    ttft_slo_s: float = Field(0.5, gt=0, description="Promised time to first token, seconds.")
    itl_slo_s: float = Field(0.05, gt=0, description="Promised time between tokens, seconds.")
    down_sensitivity_fraction: float = Field(
        0.8, gt=0, le=1, description="Part of a promise that the remaining replicas may need after one is stopped."
    )
    max_change: int = Field(8, ge=1, description="Most replicas by which one decision on throughput changes a pool.")
    max_devices: int | None = Field(None, ge=1, description="Most devices of all pools; null: any number.")
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
        if not self.by_load and not (self.by_throughput and self.target == "sla"):
            raise ValueError("nothing decides: by_load is false, and by_throughput needs target `sla`")
        if self.max_devices is not None and self.min_devices is not None and self.min_devices > self.max_devices:
            raise ValueError(f"min_devices ({self.min_devices}) is above max_devices ({self.max_devices})")
        if self.target == "load" and None in (self.kv_up_fraction, self.kv_down_fraction):
            raise ValueError("target `load` needs kv_up_fraction and kv_down_fraction")
        return self

    @property
    def intervals_s(self) -> Mapping[str, float]:
        """Time between decisions of each kind that is made, in the order in which they are made."""
        has_throughput = self.by_throughput and self.target == "sla"
        both = {THROUGHPUT: self.throughput_interval_s, LOAD: self.load_interval_s}
        return {key: time for key, time in both.items() if (has_throughput if key == THROUGHPUT else self.by_load)}

    def thresholds(self, role: PoolRole) -> Thresholds | None:
        """Return the thresholds of load of a pool; None where latencies decide, or none are given."""
        if self.target == "sla":
            return None
        if self.target != "load":
            return (PREFILL_THRESHOLDS if role is PoolRole.PREFILL else DECODE_THRESHOLDS)[self.target]
        is_prefill = role is PoolRole.PREFILL
        up, down = (
            (self.prefill_up_tokens, self.prefill_down_tokens)
            if is_prefill
            else (self.kv_up_fraction, self.kv_down_fraction)
        )
        return None if up is None or down is None else Thresholds(up, down, up_at_equal=True, down_at_equal=True)


class Observed:
    """Requests since the last decision on throughput."""

    def __init__(self, config: DynamoPlannerConfig) -> None:
        self.since = 0.0
        self.num_requests = 0
        self.prompt_tokens = float(config.expected_prompt_tokens)
        """Mean of the last interval in which any arrived."""
        self.output_tokens = float(config.expected_output_tokens)
        self.hit_fraction = 0.0
        self._prompts = self._outputs = self._ended = self._admitted = self._cached = 0

    def arrive(self, requests: Sequence[RequestView]) -> None:
        """Count requests that have arrived."""
        self.num_requests += len(requests)
        self._prompts += sum(one.num_prompt_tokens for one in requests)

    def admit(self, request: RequestView) -> None:
        """Count a request's prompt and how much of it was in the prefix cache, the first time that it is admitted."""
        if request.num_preemptions == 0:
            self._admitted += request.num_prompt_tokens
            self._cached += min(request.num_cached_tokens, request.num_prompt_tokens)

    def depart(self, requests: Sequence[RequestView]) -> None:
        """Count the outputs of requests that have come to their end."""
        for request in requests:
            if request.end_reason in (EndReason.STOP, EndReason.LENGTH):
                self._ended += 1
                self._outputs += request.num_output_tokens

    def close(self, now: float) -> Traffic | None:
        """Return the traffic since the last call, which is the forecast; None if no time has passed."""
        duration_s, count = now - self.since, self.num_requests
        if duration_s <= 0:
            return None
        if count:
            self.prompt_tokens = self._prompts / count
        if self._ended:
            self.output_tokens = max(1.0, self._outputs / self._ended)
        if self._admitted:
            self.hit_fraction = self._cached / self._admitted
        self.since, self.num_requests = now, 0
        self._prompts = self._outputs = self._ended = self._admitted = self._cached = 0
        return Traffic(count / duration_s, self.prompt_tokens, self.output_tokens, self.hit_fraction)


class DynamoPlanner:
    """Scales by the expected throughput, by load, or by both, in which case throughput sets the fewest replicas.

    A pool that computes prompts and one that decodes are decided on together; any other pool by itself. Traffic is expected to go on as it
    was in the last interval (the program's predictor `constant`). While a replica starts or drains, load decides nothing.

    Source: NVIDIA Dynamo 1.6.1, planner; its correction of predictions by measurements is gone from that version.
    """

    def __init__(self, config: DynamoPlannerConfig, context: PolicyContext) -> None:
        self._config = config
        self._context = context
        self._promises = Promises(config.ttft_slo_s, config.itl_slo_s, config.down_sensitivity_fraction)
        self._rules = PlannerRules(
            config.target,
            self._promises,
            Budget(config.max_devices, config.min_devices),
            config.by_load,
            THROUGHPUT in config.intervals_s,
            config.max_change,
        )
        self._model = EnginePredictions(context, self._promises, config.expected_prompt_tokens)
        self._observed = Observed(config)
        self._due: set[str] = set()
        self._floors: dict[str, int] = {}
        self._targets: dict[str, int] = {}
        self._has_begun = False

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        """Observe traffic."""
        self._observed.arrive(requests)

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Observe cache hits."""
        self._observed.admit(request)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Observe output lengths."""
        self._observed.depart(requests)

    def on_wake(self, key: str, now: float) -> None:
        """Let the decision of this kind be made."""
        self._due.add(key)

    def targets(self, pools: Sequence[PoolView], now: float) -> Mapping[str, int]:
        """Replicas of each pool."""
        if not self._has_begun:
            self._has_begun, self._observed.since = True, now
            for key, interval_s in self._config.intervals_s.items():
                self._context.wake.at(now + interval_s, key)
        due, self._due = self._due, set()
        traffic = self._observed.close(now) if THROUGHPUT in due else None
        self._model.prompt_tokens, self._model.hit_fraction = self._observed.prompt_tokens, self._observed.hit_fraction
        for group in _groups(pools):
            states = [self._state(pool) for pool in group]
            if traffic is not None:
                planned = decide_by_throughput(self._rules, states, traffic, self._model)
                self._apply(group, planned.counts)
                self._floors.update(zip((pool.name for pool in group), planned.floors or (), strict=False))
                states = [self._state(pool) for pool in group]
            if LOAD in due:
                self._apply(group, decide_by_load(self._rules, states, self._model).counts)
        for key in due:
            self._context.wake.at(now + self._config.intervals_s[key], key)
        return dict(self._targets)

    def _apply(self, group: Sequence[PoolView], counts: Sequence[int] | None) -> None:
        if counts is not None:
            self._targets.update(
                {pool.name: within_bounds(pool, count) for pool, count in zip(group, counts, strict=True)}
            )

    def _state(self, pool: PoolView) -> PoolState:
        role, limits = PoolRole(pool.role), self._context.limits
        up = replicas_in(pool, ReplicaState.UP)
        queued = shared_tokens(pool) // len(up) if up else 0
        engines = [
            EngineLoad(one.num_pending_tokens + queued, one.num_context_tokens, 0, one.num_running) for one in up
        ]
        rules = PoolRules(
            role,
            self._config.devices_per_replica.get(pool.name, 1),
            pool.min_replicas,
            self._config.thresholds(role),
            EngineSizes(limits.max_model_len, limits.num_blocks * limits.block_size),
        )
        changing = (ReplicaState.STARTING, ReplicaState.DRAINING)
        is_changing = any(one.state in changing for one in pool.replicas)
        return PoolState(rules, len(up), engines, is_changing, self._floors.get(pool.name, 1))


def _groups(pools: Sequence[PoolView]) -> list[Sequence[PoolView]]:
    """Pools that are decided on together: one for prompts and one for decodes."""
    prompts = [pool for pool in pools if pool.role == PoolRole.PREFILL.value]
    decodes = [pool for pool in pools if pool.role == PoolRole.DECODE.value]
    if len(prompts) == len(decodes) == 1:
        others = [pool for pool in pools if pool not in (*prompts, *decodes)]
        return [(prompts[0], decodes[0]), *((pool,) for pool in others)]
    return [(pool,) for pool in pools]


SPEC = ScalerSpec(
    name="dynamo_planner",
    config=DynamoPlannerConfig,
    build=DynamoPlanner,
    summary="Replicas for the expected throughput, and one up or down by load, for prompts and decodes together.",
    source="NVIDIA Dynamo 1.6.1, planner",
    advice=(
        "Use it where times to the first token and between tokens are promised, with `target: sla`. Not where the "
        "latency model errs by much: its plan is only as good."
    ),
)
