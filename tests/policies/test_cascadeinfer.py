"""CascadeInfer: ranges of the least cost, who is placed where, and who moves on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.routing_views import Replica, context
from tests.policies.test_llumnix import Asked
from vajra_policies.routers.length_ranges import Stage, partition
from vajra_py.contract import Layer
from vajra_py.latency import AffineModel
from vajra_py.plugins import build_policy
from vajra_py.testing.harness import Harness, HarnessOptions
from vajra_py.workload.request import RequestSpec


def cost(lengths: list[int], stages: list[Stage], own_tokens: float) -> float:
    """Cost of ranges, requests counted one by one."""
    total, above = 0.0, 0.0
    for stage in stages:
        members = [one for one in lengths if above < one <= stage.up_to]
        if members:
            total += len(members) ** 2 / stage.num_replicas * (own_tokens + max(members))
        above = stage.up_to
    return total


def every_way(lengths: list[int], num_replicas: int) -> Iterator[list[Stage]]:
    """All ranges that end at one of the lengths, with all numbers of replicas."""
    distinct = sorted(set(lengths))

    def ways(begin: int, left: int) -> Iterator[list[Stage]]:
        yield [Stage(math.inf, left)]
        for end in range(begin, len(distinct) - 1):
            for own in range(1, left):
                for rest in ways(end + 1, left - own):
                    yield [Stage(distinct[end], own), *rest]

    return ways(0, num_replicas)


@given(
    st.lists(st.integers(1, 10_000), min_size=1, max_size=5, unique=True),
    st.integers(1, 4),
    st.sampled_from([0.0, 500.0]),
)
def test_ranges_have_the_least_cost_of_all(lengths: list[int], num_replicas: int, own_tokens: float) -> None:
    stages = partition(lengths, num_replicas, own_tokens)
    assert sum(stage.num_replicas for stage in stages) == num_replicas
    assert stages[-1].up_to == math.inf
    assert [one.up_to for one in stages] == sorted({one.up_to for one in stages})
    best = min(cost(lengths, way, own_tokens) for way in every_way(lengths, num_replicas))
    assert cost(lengths, stages, own_tokens) == pytest.approx(best)


def test_without_requests_every_replica_takes_all_and_many_equal_lengths_are_one_range() -> None:
    assert partition([], 3, 500.0) == [Stage(math.inf, 3)]
    assert partition([700] * 100, 3, 500.0) == [Stage(math.inf, 3)]


def views(*loads: int, free: int = 1000, **more: Any) -> list[Any]:
    return [Replica(index, num_context_tokens=load, free_blocks=free, **more) for index, load in enumerate(loads)]


def running(made: Any, where: dict[int, list[int]]) -> dict[int, Any]:
    """Requests of these lengths that run on these replicas, by length."""
    found = {one: Asked(one, is_resident=True) for lengths in where.values() for one in lengths}
    for replica_id, lengths in where.items():
        for one in lengths:
            made.on_admission(found[one], replica_id, 0.0)
    return found


def cascade(**params: Any) -> Any:
    return build_policy(Layer.REPLICASET_SCHEDULER, "cascadeinfer", params, context(3))


def test_each_goes_to_the_least_loaded_for_its_length_and_moves_on_when_it_has_outgrown_that() -> None:
    made = cascade()
    requests = running(made, {0: [100, 9000], 1: [110, 120], 2: [9100]})
    assert [(one.request, one.target) for one in made.moves(views(0, 10, 5), 1.0)] == [(requests[9000], 1)]
    assert [made.assign(Asked(one), views(900, 300, 0), 1.0) for one in (50, 8500, 9500)] == [0, 1, 2]
    made.on_moved(requests[9000], 0, 1, 1.1)
    assert list(made.moves(views(0, 0, 0), 1.2)) == []
    requests[100].num_known_tokens = 8000
    requests[9000].num_known_tokens = 9001
    targets = {one.request: one.target for one in made.moves(views(0, 0, 0), 1.3)}
    assert targets == {requests[100]: 1, requests[9000]: 2}


def test_nobody_moves_down_without_room_before_its_prompt_is_there_or_to_another_pool() -> None:
    made = cascade()
    requests = running(made, {0: [100, 110, 9000], 1: [120], 2: [130]})
    assert [one.target for one in made.moves(views(0, 0, 0), 1.0)] == [2]
    assert list(made.moves(views(0, 0, 0, free=500), 1.0)) == [], "8,000 of 9,000 tokens fit"
    requests[9000].is_prefill_complete = False
    assert list(made.moves(views(0, 0, 0), 1.0)) == []
    requests[9000].is_prefill_complete = True
    apart = [Replica(0, pool="a"), Replica(1, pool="b"), Replica(2, pool="b")]
    assert list(made.moves(apart, 1.0)) == []
    assert made.assign(Asked(10), [Replica(0, is_up=False)], 1.0) is None


def test_ranges_are_chosen_anew_after_a_while_and_when_a_replica_goes() -> None:
    made = cascade(plan_s=10.0)
    assert made.assign(Asked(9000), views(0, 2, 1), 0.0) == 0, "nothing is known yet"
    running(made, {1: [100, 110, 120, 130]})
    assert made.assign(Asked(9001), views(0, 2, 1), 9.0) == 0
    assert made.assign(Asked(9002), views(0, 2, 1), 10.0) == 2
    assert made.assign(Asked(9003), views(0, 2, 1)[:2], 10.1) == 1


def test_those_that_grow_end_where_long_ones_are() -> None:
    specs = [RequestSpec(f"short{index}", 0.02 * index, 50, 20) for index in range(150)]
    specs += [RequestSpec(f"long{index}", 0.3 * index, 60, 900) for index in range(5)]
    params = {"interval_s": 0.05, "plan_s": 0.5, "own_tokens": 20.0}
    options = HarnessOptions(num_replicas=3, num_blocks=400, latency=AffineModel(0.005, 0.0001))
    harness = Harness("fcfs", ("cascadeinfer", params), "fixed_chunk", options)
    harness.run(sorted(specs, key=lambda one: one.arrived_at))
    assert all(harness.request(one.request_id).num_output_tokens == one.num_output_tokens for one in specs)
    places: dict[str, list[int]] = {one.request_id: [] for one in specs}
    for step in harness.steps:
        for entry in step.entries:
            places[entry.request_id].append(step.replica_id)
    assert all(list(one) == sorted(one) for one in places.values())
    assert sum(len(set(places[f"long{index}"])) > 1 for index in range(5)) >= 3
