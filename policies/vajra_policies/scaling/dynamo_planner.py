"""Dynamo's planner as a scaler: scaling by the load of pools, and by the throughput that arrivals require."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vajra_policies.scaling.dynamo_planner_config import LOAD, THROUGHPUT, DynamoPlannerConfig
from vajra_policies.scaling.engine_predictions import EnginePredictions
from vajra_policies.scaling.load_scaling import decide_by_load
from vajra_policies.scaling.observed_traffic import ObservedTraffic
from vajra_policies.scaling.planner_rules import EngineLoad, EngineSizes, PoolRules, PoolState
from vajra_policies.scaling.pools import replicas_in, shared_tokens, within_bounds
from vajra_policies.scaling.throughput_scaling import decide_by_throughput
from vajra_py.contract import PolicyContext, PoolRole, PoolView, ReplicaId, ReplicaState, RequestView, ScalerSpec


class DynamoPlanner:
    """Scales by expected throughput, by load, or by both, in which case throughput sets the minimum number of replicas.

    A prompt pool and a decode pool are decided on together; any other pool alone. The forecast is the traffic of
    the last interval (Dynamo's predictor `constant`). While a replica starts or drains, there is no load-based
    decision.

    Source: NVIDIA Dynamo 1.6.1, planner; that version no longer corrects predictions by measurements.
    """

    def __init__(self, config: DynamoPlannerConfig, context: PolicyContext) -> None:
        self._config = config
        self._context = context
        self._rules = config.rules()
        self._model = EnginePredictions(context, self._rules.slos, config.expected_prompt_tokens)
        self._observed = ObservedTraffic(config.expected_prompt_tokens, config.expected_output_tokens)
        self._due: set[str] = set()
        self._floors: dict[str, int] = {}
        self._targets: dict[str, int] = {}
        self._has_begun = False

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        """Count these requests in the observed traffic."""
        self._observed.arrive(requests)

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Count the request's cached tokens in the observed traffic."""
        self._observed.admit(request)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Count the output lengths of these requests in the observed traffic."""
        self._observed.depart(requests)

    def on_wake(self, key: str, now: float) -> None:
        """Record that a decision of the kind `key` is due at the next call of `targets`."""
        self._due.add(key)

    def targets(self, pools: Sequence[PoolView], now: float) -> Mapping[str, int]:
        """Return the number of replicas of each pool, after the decisions that are due."""
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
    """Return groups of pools that are decided on together: a single prompt pool with a single decode pool, every other
    pool alone.
    """
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
    summary=(
        "Replicas for the expected throughput, and one more or less by load, for prefill and decode pools together."
    ),
    source="NVIDIA Dynamo 1.6.1, planner",
    advice=(
        "Use it where requests have SLOs for TTFT and TBT, with `target: sla`. Not where the latency model has large "
        "errors: the plan depends on it."
    ),
)
