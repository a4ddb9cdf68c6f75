"""Does the conformance suite notice what a routing part does wrong, and do the installed parts pass it?"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from vajra_py.contract import Layer, PolicyConfig, RoutingPartKind, RoutingPartSpec
from vajra_py.errors import PluginError
from vajra_py.plugins import check_part_shape, load_registry
from vajra_py.testing import check_policy, check_routing_part, routing_parts_under_test

PARAMS: dict[str, dict[str, Any]] = {
    "utilization-filter": {
        "conditions": [{"metric": "waiting-queue", "max_value": 1}, {"metric": "active-requests", "max_value": 3}]
    },
    "by-label": {"label": "pool", "valid_values": ["default"]},
    "endpoint-attribute-scorer": {"attribute_key": "num_running", "algorithm": {"type": "linear_lower_is_better"}},
    "endpoint-attribute-filter": {
        "attribute": "num_waiting",
        "algorithm": {"threshold": {"operator": "LessThan", "value": 2}},
    },
}
"""Parameters of parts that have no defaults for all."""
STATEFUL = {"inflight-load-producer", "no-hit-lru-scorer", "prefix-cache-scorer", "weighted-random-picker"}


@pytest.mark.usefixtures("hash_seeds_at_once")
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, id=f"{spec.kind.value}-{spec.name}", marks=() if spec.name in STATEFUL else pytest.mark.slow)
        for spec in routing_parts_under_test()
    ],
)
def test_installed_parts_keep_the_contract(spec: RoutingPartSpec) -> None:
    check_routing_part(spec, PARAMS.get(spec.name))


class Part:
    """A part of any kind that is right."""

    def scores(self, request: Any, replicas: Sequence[Any], now: float) -> list[float | None]:
        return [None if one.num_running else 1.0 for one in replicas]

    def keeps(self, request: Any, replicas: Sequence[Any], now: float) -> Sequence[Any]:
        return [one for one in replicas if one.num_waiting < 4]

    def pick(self, request: Any, replicas: Sequence[Any], scores: Sequence[float], now: float) -> int:
        return int(replicas[-1].replica_id)

    def disaggregates(self, request: Any, decode: Any, now: float) -> bool:
        return bool(request.num_prompt_tokens > 50)


class Short(Part):
    def scores(self, request: Any, replicas: Sequence[Any], now: float) -> list[float | None]:
        return [1.0]


class Infinite(Part):
    def scores(self, request: Any, replicas: Sequence[Any], now: float) -> list[float | None]:
        return [float("inf") for _ in replicas]


class Fickle(Part):
    def __init__(self) -> None:
        self.count = itertools.count()

    def scores(self, request: Any, replicas: Sequence[Any], now: float) -> list[float | None]:
        return [float(next(self.count)) for _ in replicas]

    def disaggregates(self, request: Any, decode: Any, now: float) -> bool:
        return bool(next(self.count) % 2)


class Writes(Part):
    def scores(self, request: Any, replicas: Sequence[Any], now: float) -> list[float | None]:
        for one in replicas:
            one.num_running = 0
        return [1.0 for _ in replicas]


class Peeks(Part):
    def scores(self, request: Any, replicas: Sequence[Any], now: float) -> list[float | None]:
        return [float(one.replica.memory.num_blocks > 0) for one in replicas]


class Reverses(Part):
    def keeps(self, request: Any, replicas: Sequence[Any], now: float) -> Sequence[Any]:
        return list(reversed(replicas))


class Empties(Part):
    def keeps(self, request: Any, replicas: Any, now: float) -> Sequence[Any]:
        kept = list(replicas)
        replicas.clear()
        return kept


class PicksAnyId(Part):
    def pick(self, request: Any, replicas: Sequence[Any], scores: Sequence[float], now: float) -> int:
        return 99


class Says(Part):
    def disaggregates(self, request: Any, decode: Any, now: float) -> Any:
        return "yes"


class Hoards(Part):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def scores(self, request: Any, replicas: Sequence[Any], now: float) -> list[float | None]:
        if request not in self.seen:
            self.seen.append(request)
        return [1.0 for _ in replicas]


def spec(kind: RoutingPartKind, make: Callable[[], Any]) -> RoutingPartSpec:
    return RoutingPartSpec("under-test", kind, PolicyConfig, lambda config, context: make(), "Under test.")


@pytest.mark.parametrize(
    ("kind", "make", "message"),
    [
        (RoutingPartKind.SCORER, Short, "numbers for 2 replicas"),
        (RoutingPartKind.SCORER, Infinite, "are not finite numbers or None"),
        (RoutingPartKind.SCORER, Fickle, "and asked again"),
        (RoutingPartKind.SCORER, Writes, "num_running"),
        (RoutingPartKind.SCORER, Peeks, "reads replica view.replica, which policies must not read"),
        (RoutingPartKind.SCORER, Hoards, "still holds"),
        (RoutingPartKind.FILTER, Reverses, "not some of them in their order"),
        (RoutingPartKind.FILTER, Empties, "changes the sequence"),
        (RoutingPartKind.PICKER, PicksAnyId, "is 99; candidates: "),
        (RoutingPartKind.DECIDER, Says, "is 'yes'; expected True or False"),
        (RoutingPartKind.DECIDER, Fickle, "and asked again"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
@pytest.mark.filterwarnings("ignore::vajra_py.testing.ConformanceWarning")
def test_what_breaks_the_contract_is_told(kind: RoutingPartKind, make: Callable[[], Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message) as caught:
        check_routing_part(spec(kind, make))
    assert str(caught.value).startswith(f"{kind.value} 'under-test' breaks the contract:")


class ListensToCaches(Part):
    num_stored = 0

    def on_blocks_stored(self, replica_id: int, hashes: Sequence[Any], now: float) -> None:
        ListensToCaches.num_stored += len(hashes)


@pytest.mark.usefixtures("hash_seeds_at_once")
@pytest.mark.filterwarnings("ignore::vajra_py.testing.ConformanceWarning")
def test_a_part_under_test_gets_the_events_of_caches() -> None:
    check_routing_part(spec(RoutingPartKind.SCORER, ListensToCaches))
    assert ListensToCaches.num_stored


class HearsRunsAlone(Part):
    def on_step_run(self, run: Any) -> None: ...


def test_a_part_that_listens_to_runs_of_steps_alone_is_refused() -> None:
    with pytest.raises(PluginError, match="on_step_end is missing"):
        check_part_shape(RoutingPartKind.SCORER, HearsRunsAlone(), "scorer", "under test")


ROUTERS: list[tuple[str, dict[str, Any]]] = [
    (
        "endpoint_picker",
        {
            "producers": [{"producer": "approx-prefix-cache-producer", "params": {"min_block_size_tokens": 16}}],
            "filters": ["utilization-detector", "prefix-cache-affinity-filter"],
            "scorers": ["token-load-scorer", "no-hit-lru-scorer", {"scorer": "prefix-cache-scorer", "weight": 3}],
            "picker": "weighted-random-picker",
        },
    ),
    (
        "endpoint_picker",
        {
            "profiles": {
                "prefill": {"filters": ["prefill-filter"], "scorers": ["active-request-scorer"]},
                "decode": {"filters": ["decode-filter"], "scorers": ["latency-scorer", "session-affinity-scorer"]},
            },
            "disaggregation": {"decider": {"decider": "prefix-based-pd-decider", "params": {"non_cached_tokens": 40}}},
        },
    ),
    ("dynamo_kv_router", {"use_kv_events": False, "router_temperature": 0.3, "router_track_output_blocks": True}),
    ("sglang_cache_aware", {"balance_abs_threshold": 0, "max_tree_size": 200}),
    ("preble_e2", {"window_s": 0.1, "min_requests_per_replica": 0}),
]


@pytest.mark.usefixtures("hash_seeds_at_once")
@pytest.mark.parametrize(
    ("name", "params"),
    [
        pytest.param(*one, id=f"{one[0]}-{index}", marks=() if index < 2 else pytest.mark.slow)
        for index, one in enumerate(ROUTERS)
    ],
)
def test_routers_keep_the_contract_with_other_parameters(name: str, params: dict[str, Any]) -> None:
    check_policy(load_registry().policy(Layer.REPLICASET_SCHEDULER, name).spec, params)
