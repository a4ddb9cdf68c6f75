"""Replicas that a scaler starts and stops: times of starting, draining, loss, and what becomes of requests meanwhile."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.scaled import STEP_S, NoParameters, Scaled, Scripted, Watcher, requests, scaled
from vajra_policies.round_robin import RoundRobin
from vajra_py.api import load, run
from vajra_py.contract import ScalerSpec
from vajra_py.errors import ConfigError, PolicyError
from vajra_py.runtime.records.input_log import Failure, ReplicaChange, Restart
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.support.clock import to_ticks
from vajra_py.sim.simulator import SimulationOptions
from vajra_py.workload import RequestSpec


def following(script: dict[float, int], **more: Any) -> Scaled:
    """A replicaset whose scaler follows a script."""
    return scaled(lambda context: Scripted(context, script), **more)


# Starting


def test_a_replica_takes_requests_once_its_start_is_over() -> None:
    world = following({1.0: 2}, elastic={"max_replicas": 3, "startup_s": 2.5}, chooser="round_robin")
    seen = world.run(requests(60, every_s=0.1))
    assert seen.states[:3] == [(0.0, 0, "up"), (0.0, 1, "down"), (0.0, 2, "down")]
    assert seen.changes() == [(1.0, 1, "starting"), (3.5, 1, "up")]
    on_second = [at for _, replica_id, at in seen.admitted if replica_id == 1]
    assert on_second
    assert min(on_second) >= 3.5
    assert {replica_id for _, replica_id, _ in seen.admitted} == {0, 1}


def test_starts_take_unequally_long_by_the_seed_alone() -> None:
    def ups(seed: int) -> list[float]:
        elastic = {"max_replicas": 4, "startup_s": 1.0, "startup_spread_s": 0.5}
        world = following({0.5: 4}, elastic=elastic, seed=seed)
        return [at for at, _, state in world.run(requests(40, every_s=0.1)).changes() if state == "up"]

    first = ups(1)
    assert first == ups(1) != ups(2)
    assert len(set(first)) == 3
    assert all(1.5 <= at <= 2.0 for at in first)


def test_requests_that_arrive_while_every_replica_starts_wait_and_are_served() -> None:
    world = following({0.0: 0, 1.0: 2}, elastic={"min_replicas": 0, "max_replicas": 2, "startup_s": 1.0})
    seen = world.run([RequestSpec(f"r{index}", 0.5, 20, 10) for index in range(12)])
    assert {reason for _, reason, _ in seen.ends} == {"stop"}
    assert {replica_id for _, replica_id, _ in seen.admitted} == {0, 1}
    assert min(at for _, _, at in seen.admitted) == 2.0


# Stopping


def test_a_draining_replica_finishes_what_runs_and_hands_back_what_waits() -> None:
    world = following({0.05: 1}, num_replicas=2, chooser="round_robin", elastic={"max_replicas": 2})
    seen = world.run(requests(20, output=30))
    (drained_at, drained, state), (down_at, down, last) = seen.changes()
    assert (drained_at, state, last) == (0.05, "draining", "down")
    assert drained == down == 1, "of equally loaded ones the last"
    admitted = Counter(replica_id for _, replica_id, _ in seen.admitted)
    assert admitted[1] == 4, "its batch, and none of those that waited there"
    assert admitted[0] == 16
    ends = {request_id: at for request_id, _, at in seen.ends}
    own = [request_id for request_id, replica_id, _ in seen.admitted if replica_id == 1]
    assert down_at == max(ends[request_id] for request_id in own)
    assert {reason for _, reason, _ in seen.ends} == {"stop"}


def test_a_scaler_is_asked_again_when_a_replica_has_gone_down() -> None:
    class Asked(Scripted):
        def targets(self, pools: Any, now: float) -> Any:
            asked.append(now)
            return super().targets(pools, now)

    asked: list[float] = []
    world = scaled(
        lambda context: Asked(context, {0.05: 1}), num_replicas=2, chooser="round_robin", elastic={"max_replicas": 2}
    )
    _, (down_at, _, state) = world.run(requests(20, output=30)).changes()
    assert state == "down"
    assert asked == [0.0, 0.05, down_at]


def test_a_draining_replica_pulls_nothing_from_the_shared_queue() -> None:
    world = following({0.05: 1}, num_replicas=2, chooser="pull", elastic={"max_replicas": 2})
    seen = world.run(requests(40, output=30))
    assert not [one for one in seen.admitted if one[1] == 1 and one[2] > 0.05]
    assert len(seen.ends) == 40


def test_the_least_loaded_replica_drains_and_of_equal_ones_the_last() -> None:
    world = following({0.1: 2}, num_replicas=3, chooser="round_robin", elastic={"max_replicas": 3})
    long_first = [RequestSpec(f"r{index}", 0.0, 20, 40 if index % 3 else 5) for index in range(6)]
    assert world.run(long_first).changes()[0] == (0.1, 0, "draining")


def test_a_start_is_cancelled_before_anything_drains() -> None:
    world = following({0.5: 3, 1.0: 2, 1.5: 1}, num_replicas=1, elastic={"max_replicas": 3, "startup_s": 0.75})
    seen = world.run(requests(40, every_s=0.1))
    assert seen.changes() == [
        (0.5, 1, "starting"),
        (0.5, 2, "starting"),
        (1.0, 2, "down"),
        (1.25, 1, "up"),
        (1.5, 1, "draining"),
        (1.5, 1, "down"),
    ]


def test_a_stopped_replica_starts_again_with_an_empty_cache() -> None:
    world = following({1.0: 1, 2.0: 2}, num_replicas=2, chooser="round_robin", elastic={"max_replicas": 2})
    world.run(requests(40, every_s=0.1))
    assert [state for _, replica_id, state in world.watcher.states if replica_id == 1] == [
        "up", "draining", "down", "starting", "up",
    ]  # fmt: skip
    memory = world.controller.replicas()[1].memory
    assert memory.free_blocks == memory.num_blocks


# Pools


def test_each_pool_is_scaled_within_its_own_bounds() -> None:
    class Both:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def targets(self, pools: Any, now: float) -> dict[str, int]:
            self.seen += [
                (pool.name, pool.role, [one.replica_id for one in pool.replicas], pool.min_replicas, pool.max_replicas)
                for pool in pools
            ]
            return {"small": 3}

    scaler = Both()
    pools = {
        "small": {"num_replicas": 1, "elastic": {"max_replicas": 3, "startup_s": 0.2}},
        "large": {"num_replicas": 2, "elastic": {"min_replicas": 2, "max_replicas": 3, "startup_s": 5.0}},
        "fixed": {"num_replicas": 1},
    }
    world = scaled(lambda context: scaler, pools=pools, chooser="round_robin")
    seen = world.run(requests(30, every_s=0.1))
    assert scaler.seen[:3] == [
        ("small", "mixed", [0, 1, 2], 1, 3),
        ("large", "mixed", [3, 4, 5], 2, 3),
        ("fixed", "mixed", [6], 1, 1),
    ]
    assert [row[1:] for row in seen.states[:7]] == [
        (0, "up"), (1, "down"), (2, "down"), (3, "up"), (4, "up"), (5, "down"), (6, "up"),
    ]  # fmt: skip
    assert seen.states[7:] == [(0.0, 1, "starting"), (0.0, 2, "starting"), (0.2, 1, "up"), (0.2, 2, "up")]
    assert {replica_id for _, replica_id, _ in seen.admitted} == {0, 1, 2, 3, 4, 6}


# Losses


def lose_at(world: Scaled, at: float, replica_id: int, max_reruns: int | None = 3) -> None:
    failure = Failure(to_ticks(at), "default", replica_id, "pulled the plug", max_reruns)
    world.simulator.inject(to_ticks(at), Phase.FAILURE, failure)


def restore_at(world: Scaled, at: float, replica_id: int) -> None:
    world.simulator.inject(to_ticks(at), Phase.FAILURE, Restart(to_ticks(at), "default", replica_id))


def test_another_replica_takes_the_place_of_a_lost_one() -> None:
    world = following({0.0: 2}, num_replicas=2, elastic={"max_replicas": 3, "startup_s": 0.5})
    lose_at(world, 1.0, 0)
    restore_at(world, 2.0, 0)
    seen = world.run(requests(60, every_s=0.05))
    assert seen.changes()[:4] == [(1.0, 0, "down"), (1.0, 2, "starting"), (1.5, 2, "up"), (2.0, 0, "up")]
    assert [state for _, _, state in seen.changes()[4:]] == ["draining", "down"], "three are one too many"
    assert {reason for _, reason, _ in seen.ends} == {"stop"}


def test_a_replica_that_is_lost_while_it_starts_does_not_come_up() -> None:
    world = following({0.5: 2}, elastic={"max_replicas": 2, "startup_s": 1.0})
    lose_at(world, 1.0, 1)
    seen = world.run(requests(40, every_s=0.1))
    assert seen.changes() == [(0.5, 1, "starting"), (1.0, 1, "down")], "there is no third one to start"


def test_a_loss_while_draining_places_its_requests_anew() -> None:
    world = following({0.05: 1}, num_replicas=2, chooser="round_robin", elastic={"max_replicas": 2})
    lose_at(world, 0.1, 1)
    seen = world.run(requests(8, output=30))
    assert [row[1:] for row in seen.changes()] == [(1, "draining"), (1, "down")]
    assert {reason for _, reason, _ in seen.ends} == {"stop"}


def test_a_replica_that_is_down_cannot_fail() -> None:
    world = following({}, elastic={"max_replicas": 2})
    lose_at(world, 0.1, 1)
    restore_at(world, 0.2, 1)
    assert world.run(requests(10, every_s=0.1)).changes() == []


class FailsLater(RoundRobin):
    def assign(self, request: Any, replicas: Any, now: float) -> Any:
        if now >= 0.05:
            raise KeyError("later")
        return super().assign(request, replicas, now)


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_replica_goes_down_even_if_its_requests_cannot_be_placed_anew(
    is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vajra_policies.round_robin.RoundRobin", FailsLater)
    options = SimulationOptions(isolates_policies=True)
    script = {} if is_lost else {0.05: 1}
    world = following(script, num_replicas=2, chooser="round_robin", elastic={"max_replicas": 2}, options=options)
    if is_lost:
        lose_at(world, 0.05, 1)
    seen = world.run(requests(20, output=30))
    assert world.simulator.violations
    assert seen.changes()[-1] == (0.05, 1, "down")


# Contract violations


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"default": 4}, "requested 4 replicas of pool 'default' of replicaset 'default'. Allowed: whole numbers from 1 to 3"),
        ({"default": 0}, "Allowed: whole numbers from 1 to 3"),
        ({"default": 1.5}, "requested 1.5 replicas"),
        ({"default": True}, "requested True replicas"),
        ({"decode": 1}, "requested replicas of pool 'decode', which replicaset 'default' does not have. Its pools: default"),
        (2, "returned 2 for replicaset 'default'"),
    ],
)  # fmt: skip
def test_a_wrong_answer_names_policy_pool_and_bounds(answer: Any, words: str) -> None:
    class Wrong:
        def targets(self, pools: Any, now: float) -> Any:
            return answer

    world = scaled(lambda context: Wrong(), elastic={"max_replicas": 3})
    with pytest.raises(PolicyError) as caught:
        world.run(requests(3))
    assert "tested" in str(caught.value)
    assert words in str(caught.value)


def test_a_scaler_that_starts_and_stops_without_end_at_one_time_is_named() -> None:
    """Starts take no time here, and an idle replica is down at once: each change asks again."""

    class Restless:
        def __init__(self) -> None:
            self._count = 1

        def targets(self, pools: Any, now: float) -> Any:
            self._count = 3 - self._count
            return {"default": self._count}

    world = scaled(lambda context: Restless(), elastic={"max_replicas": 2})
    with pytest.raises(PolicyError, match=r"tested, at 0 s: starts and stops replicas at one time without end"):
        world.run(requests(3))


def test_an_error_of_the_scaler_is_its_own() -> None:
    class Raises:
        def targets(self, pools: Any, now: float) -> Any:
            raise ZeroDivisionError("load")

    with pytest.raises(PolicyError, match=r"tested.*ZeroDivisionError"):
        scaled(lambda context: Raises()).run(requests(3))


def test_a_scaler_without_a_replica_for_waiting_requests_is_named() -> None:
    world = following({0.0: 0}, elastic={"min_replicas": 0})
    with pytest.raises(
        PolicyError,
        match=r"tested.*leaves replicaset 'default' without an active replica that could continue although 3 requests",
    ):
        world.run([RequestSpec(f"r{index}", 0.5, 20, 10) for index in range(3)])


def test_a_broken_scaler_takes_its_replicaset_out_of_service_where_that_is_isolated() -> None:
    class RaisesLater(Scripted):
        def targets(self, pools: Any, now: float) -> Any:
            if now >= 1.0:
                raise KeyError("later")
            return {}

    options = SimulationOptions(isolates_policies=True)
    world = scaled(lambda context: RaisesLater(context, {1.0: 1}), options=options)
    world.simulator.run(requests(30, every_s=0.1, output=100))
    world.controller.check_conservation()
    assert world.simulator.violations[0][1] == "default"
    assert {reason for _, reason, _ in world.watcher.ends} == {"stop", "failed", "rejected"}


# Settings


def settings_with(**more: Any) -> dict[str, Any]:
    scheduling = {
        "request_prioritizer": "fcfs", "replicaset_scheduler": "least_loaded", "replica_scheduler": "fixed_chunk",
        "scaling": {"policy": "target_utilization", "params": {"metric": "requests", "target": 2.0}},
    }  # fmt: skip
    return {
        "version": 1,
        "scheduling": scheduling,
        "elastic": {"max_replicas": 4},
        "replica": {"max_batch_size": 8, "max_model_len": 400, "memory": {"num_blocks": 200}},
        "workload": {
            "type": "synthetic",
            "num_requests": 50,
            "arrivals": {"type": "fixed", "rate": 10},
            "prompt_tokens": {"type": "constant", "value": 20},
            "output_tokens": {"type": "constant", "value": 20},
        },
        "backend": {"simulator": {"latency": {"type": "constant", "step_time_s": 0.01}}},
        **more,
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_replicas": 5}, "num_replicas is not within elastic (5 of 1 to 4)"),
        ({"elastic": {"min_replicas": 2, "max_replicas": 4}}, "num_replicas is not within elastic (1 of 2 to 4)"),
        ({"elastic": {"max_replicas": 0}}, "elastic.max_replicas"),
        ({"elastic": None}, "scheduling.scaling names a scaler, and elastic has no bounds for it"),
        ({"pools": {"a": {}, "b": {}}}, "elastic applies to one kind of replicas; give each pool its own"),
        (
            {"elastic": None, "pools": {"a": {"num_replicas": 3, "elastic": {"max_replicas": 2}}}},
            "pools.a.num_replicas is not within pools.a.elastic (3 of 1 to 2)",
        ),
    ],
)
def test_wrong_bounds_are_told(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(settings_with(**change))
    assert words in str(caught.value)


def test_bounds_without_a_scaler_are_told() -> None:
    given = settings_with()
    del given["scheduling"]["scaling"]
    with pytest.raises(ConfigError, match=r"elastic has bounds for a scaler, and scheduling\.scaling names none"):
        load(given)


def test_an_unknown_scaler_is_told_with_the_nearest_name() -> None:
    given = settings_with()
    given["scheduling"]["scaling"] = "target_utilisation"
    with pytest.raises(ConfigError, match=r"no installed package offers a scaler.*Did you mean 'target_utilization'"):
        load(given)


def test_each_replicaset_takes_scaler_and_bounds_from_the_top(tmp_path: Any) -> None:
    given = settings_with(
        replicasets={"short": {"select": {"max_prompt_tokens": 10}}, "rest": {"elastic": {"max_replicas": 2}}}
    )
    config = load(given | {"output": {"dir": str(tmp_path)}})
    found = {
        name: (one.elastic and one.elastic.max_replicas, one.scheduling.scaling)
        for name, one in config.replicasets.items()
    }
    assert found["short"][0] == 4
    assert found["rest"][0] == 2
    assert all(scaler is not None and scaler.policy == "target_utilization" for _, scaler in found.values())


def test_a_scaler_written_in_a_notebook_runs(tmp_path: Any) -> None:
    class One:
        def targets(self, pools: Any, now: float) -> dict[str, int]:
            return {"default": 2}

    spec = ScalerSpec("mine", NoParameters, lambda config, context: One(), "Two.")
    given = settings_with(output={"dir": str(tmp_path)})
    given["scheduling"]["scaling"] = "mine"
    assert run(given, policies=[spec]).is_finished


# Agreement with theory and with other runs


def test_a_scaler_that_fixes_k_replicas_is_the_same_queue_as_k_replicas() -> None:
    """M/M/k by the recursion of Kiefer and Wolfowitz; here each wait is compared, not only their mean."""
    from tests.sim.test_sim_queueing_theory import MEAN_STEPS, Queue
    from tests.sim.test_sim_queueing_theory import STEP_S as SHORT_STEP_S

    queue = Queue(utilisation=0.8, num_servers=3, num_requests=1500, seed=4)
    at, steps = queue.arrivals_and_services()
    scale = STEP_S / SHORT_STEP_S
    specs = [
        RequestSpec(f"r{i}", float(one) * scale, 1, int(n)) for i, (one, n) in enumerate(zip(at, steps, strict=True))
    ]
    replica = {"max_batch_size": 1, "max_model_len": 1000, "memory": {"num_blocks": 100}}
    world = following({0.0: 3}, num_replicas=3, elastic={"max_replicas": 5}, chooser="pull", replica=replica)
    world.simulator.run(specs)
    begun = {request_id: at for request_id, _, at in world.watcher.admitted}
    waits = np.array([begun[spec.request_id] - spec.arrived_at for spec in specs])
    assert waits == pytest.approx(queue.recursive_waits() * scale, abs=STEP_S * MEAN_STEPS / 8)
    assert world.watcher.changes() == []


def stepped() -> list[RequestSpec]:
    """Two requests a second, forty a second for ten seconds, then two again; each takes about 0.5 s."""
    times = [*np.arange(0, 20, 0.5), *np.arange(20, 30, 0.025), *np.arange(30, 60, 0.5)]
    return [RequestSpec(f"r{index}", float(at), 20, 50) for index, at in enumerate(times)]


def test_target_utilization_follows_a_step_of_load_and_does_not_oscillate() -> None:
    from vajra_policies.scaling.target_utilization import TargetUtilization, TargetUtilizationConfig

    config = TargetUtilizationConfig(metric="requests", target=5.0, interval_s=1.0, down_window_s=5.0)
    replica = {"max_batch_size": 16, "max_model_len": 400, "memory": {"num_blocks": 400}}
    world = scaled(
        lambda context: TargetUtilization(config, context.wake),
        elastic={"max_replicas": 10, "startup_s": 1.0},
        replica=replica,
    )
    seen = world.run(stepped())
    active = active_over_time(seen)
    counts = [count for _, count in active]
    peak = counts.index(max(counts))
    expected = math.ceil(40 * 0.52 / 5)  # Little's law: requests in service by the target
    assert expected <= max(counts) <= expected + 2
    assert counts[: peak + 1] == sorted(counts[: peak + 1]), "up, and never down before the peak"
    assert counts[peak:] == sorted(counts[peak:], reverse=True), "then down, and never up again"
    assert counts[-1] == 1
    assert all(20 <= at <= 24 for at, _ in active[1 : peak + 1])
    assert all(26 <= at <= 45 for at, _ in active[peak + 1 :])


def active_over_time(seen: Watcher) -> list[tuple[float, int]]:
    """The number of replicas, starting or up, after each time at which it changed."""
    states: dict[int, str] = {}
    found: list[tuple[float, int]] = []
    for at, replica_id, state in seen.states:
        states[replica_id] = state
        count = sum(one in ("starting", "up") for one in states.values())
        if found and found[-1][0] == at:
            found[-1] = (at, count)
        elif not found or found[-1][1] != count:
            found.append((at, count))
    return found


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, Any]:
    """A random scaler, arrivals, aborts and losses."""
    most = draw(st.integers(1, 4))
    least = draw(st.integers(0, 1))
    times = st.floats(0.0, 3.0).map(lambda at: round(at, 3))
    return {
        "script": draw(st.dictionaries(times, st.integers(least, most), max_size=8))
        | {4.0: draw(st.integers(1, most))},
        "initial": draw(st.integers(1, most)),
        "elastic": {
            "min_replicas": least,
            "max_replicas": most,
            "startup_s": draw(st.sampled_from([0.0, 0.013, 0.5])),
            "startup_spread_s": draw(st.sampled_from([0.0, 0.1])),
            "drain": draw(st.sampled_from(["wait", "migrate"])),
        },
        "bandwidth_gb_s": draw(st.sampled_from([0.1, 1.0])),
        "max_per_replica": draw(st.sampled_from([1, 3])),
        "chooser": draw(st.sampled_from(["least_loaded", "pull", "round_robin", "power_of_two"])),
        "arrivals": sorted(draw(st.lists(times, min_size=1, max_size=25))),
        "outputs": draw(st.lists(st.integers(1, 60), min_size=25, max_size=25)),
        "aborts": draw(st.lists(st.tuples(times, st.integers(0, 24)), max_size=4)),
        "losses": draw(st.lists(st.tuples(times, st.integers(0, max(most - 2, 0))), max_size=3)) if most > 1 else [],
    }


def keys_of(given: dict[str, Any]) -> dict[str, Any]:
    """The sizes of a drawn case, and its rules of moving."""
    return {
        "num_replicas": given["initial"],
        "elastic": given["elastic"],
        "chooser": given["chooser"],
        "replica": {"max_batch_size": 3, "max_model_len": 120, "memory": {"num_blocks": 9}},
        "hand_off": {"kv_bytes_per_token": 1_000_000},
        "links": {"bandwidth_gb_s": given["bandwidth_gb_s"]},
        "migration": {"last_stage_max_blocks": 1, "max_per_replica": given["max_per_replica"]},
    }


def built(given: dict[str, Any], **options: Any) -> Scaled:
    """The world of a drawn case, with its aborts and losses; each loss is repaired a second later."""
    rules = SimulationOptions(check_every_steps=1, **options)
    world = following(given["script"], options=rules, **keys_of(given))
    for at, index in given["aborts"]:
        world.simulator.abort_at(at, f"r{index}")
    for at, replica_id in given["losses"]:
        lose_at(world, at, replica_id)
        restore_at(world, at + 1.0, replica_id)
    return world


def specs_of(given: dict[str, Any]) -> list[RequestSpec]:
    return [RequestSpec(f"r{i}", at, 20, given["outputs"][i]) for i, at in enumerate(given["arrivals"])]


def observed(world: Scaled) -> tuple[Any, ...]:
    return world.watcher.states, world.watcher.ends, world.watcher.admitted


@settings(deadline=None, max_examples=60)
@given(worlds())
def test_whatever_a_scaler_does_no_request_is_lost_and_equal_runs_are_equal(given: dict[str, Any]) -> None:
    world = built(given)
    seen = world.run(specs_of(given))
    assert len(seen.ends) == len(given["arrivals"]), "each ends exactly once"
    assert {reason for _, reason, _ in seen.ends} <= {"stop", "aborted"}
    for _, count in active_over_time(seen):
        assert count <= given["elastic"]["max_replicas"]
    again = built(given)
    again.run(specs_of(given))
    assert observed(again) == observed(world)
    slow = built(given, fast_forward=False)
    slow.run(specs_of(given))
    assert observed(slow) == observed(world), "steps that are worked out at once change nothing"
    for replica in world.controller.replicas():
        replica.memory.check()
        assert replica.memory.free_blocks == replica.memory.num_blocks
        assert replica.is_empty


@settings(deadline=None, max_examples=40)
@given(worlds())
def test_what_a_scaler_decided_is_done_again_without_asking_it(given: dict[str, Any]) -> None:
    world = built(given)
    world.run(specs_of(given))

    class NotAsked:
        def targets(self, pools: Any, now: float) -> Any:
            raise AssertionError("asked")

    rules = SimulationOptions(check_every_steps=1, wakes=False)
    again = scaled(lambda context: NotAsked(), options=rules, **keys_of(given))
    for at, index in given["aborts"]:
        again.simulator.abort_at(at, f"r{index}")
    for entry in world.noted:
        if isinstance(entry, Failure | Restart):
            again.simulator.inject(entry.tick, Phase.FAILURE, entry)
        elif isinstance(entry, ReplicaChange):
            again.simulator.inject(entry.tick, Phase.SCALING, entry)
    again.run(specs_of(given))
    assert again.watcher.ends == world.watcher.ends
    assert again.watcher.admitted == world.watcher.admitted
