"""Swapping beside steps in whole runs: times of copies, blocks that they hold, and requests that nothing loses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vajra_py.config.replica import MemoryConfig, ReplicaConfig
from vajra_py.contract import (
    BatchBuilder,
    Layer,
    LocalReplicaView,
    PolicyConfig,
    PolicySpec,
    PreemptionMode,
    RequestView,
    SchedulerTraits,
)
from vajra_py.contract.observer import EndReason, Observer
from vajra_py.engine.refusals import check_replica
from vajra_py.errors import ConfigError
from vajra_py.runtime.records.input_log import CacheReset, Failure, Restart
from vajra_py.runtime.serving.controller import Controller
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.support.clock import to_ticks
from vajra_py.testing.simulated import STEP_S, simulated_system
from vajra_py.workload import RequestSpec

BLOCK = 16
BYTES_PER_TOKEN = 1_000_000
BLOCK_S = 0.016
"""Time that a block takes on a link of 1 GB/s."""


class SwapsOutOnce:
    """Everyone runs who can; a request whose name begins with `victim` is swapped out once, when it has three tokens."""

    traits = SchedulerTraits()

    def __init__(self) -> None:
        self._were_out: set[str] = set()

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        for request in list(replica.running()):
            name = request.request_id
            if name.startswith("victim") and request.num_output_tokens == 3 and name not in self._were_out:
                assert batch.preempt(request, PreemptionMode.SWAP) is None
                self._were_out.add(name)
        batch.add_running()
        for request in list(replica.waiting()):
            batch.add(request, batch.max_chunk(request))


SWAPS_OUT_ONCE = PolicySpec(
    layer=Layer.REPLICA_SCHEDULER,
    name="swaps_out_once",
    config=PolicyConfig,
    build=lambda config, context: SwapsOutOnce(),
    summary="For this test.",
    source="test",
)


class Watch(Observer):
    """When requests were admitted and preempted, and how they ended."""

    def __init__(self) -> None:
        self.admitted: dict[str, list[float]] = {}
        self.preempted: list[tuple[str, str, float]] = []
        self.reasons: dict[str, EndReason] = {}
        self.ended: dict[str, float] = {}

    def on_admitted(self, request: RequestView, replica_id: int, now: float) -> None:
        self.admitted.setdefault(request.request_id, []).append(now)

    def on_preempted(self, request: RequestView, mode: str, now: float) -> None:
        self.preempted.append((request.request_id, mode, now))

    def on_ended(self, request: RequestView, reason: EndReason, detail: str, now: float) -> None:
        self.reasons[request.request_id] = reason
        self.ended[request.request_id] = now


def link(**more: Any) -> dict[str, Any]:
    return {"bandwidth_gb_s": 1.0, "kv_bytes_per_token": BYTES_PER_TOKEN, **more}


def built(
    swap_link: Mapping[str, Any] | None,
    scheduler: Any = "swaps_out_once",
    num_blocks: int = 20,
    prioritizer: str = "fcfs",
    **changes: Any,
) -> tuple[Controller, Any, Watch]:
    memory = {"num_blocks": num_blocks, "host_blocks": 30, "watermark_fraction": 0.0, **changes.pop("memory", {})}
    if swap_link is not None:
        memory["swap_link"] = dict(swap_link)
    replica = {"max_batch_size": 8, "max_model_len": 400, "memory": memory}
    scheduling = {"replica_scheduler": scheduler, "request_prioritizer": prioritizer}
    controller, simulator = simulated_system(SWAPS_OUT_ONCE, scheduling, {"replica": replica, **changes})
    watch = Watch()
    controller.watch([watch])
    return controller, simulator, watch


def served(requests: Sequence[RequestSpec], swap_link: Mapping[str, Any] | None, **changes: Any) -> Watch:
    controller, simulator, watch = built(swap_link, **changes)
    simulator.run(requests)
    controller.check_conservation()
    assert controller.num_alive == 0
    return watch


VICTIM = RequestSpec("victim", 0.0, 4 * BLOCK, 10)
"""It has 4 blocks and 3 tokens when it is swapped out, thus 5 blocks."""


def test_a_request_is_back_after_both_copies() -> None:
    """A lone request: out, and at once in again, each latency and bytes by bandwidth."""
    watch = served([VICTIM], link(latency_s=0.5))
    ((_, mode, at),) = watch.preempted
    assert mode == "swap"
    first, second = watch.admitted["victim"]
    assert first == 0.0
    assert at == pytest.approx(3 * STEP_S)
    assert second == pytest.approx(at + 2 * (0.5 + 5 * BLOCK_S))
    assert watch.ended["victim"] == pytest.approx(second + 7 * STEP_S)


def test_others_compute_meanwhile_as_if_nothing_were_copied() -> None:
    other = RequestSpec("other", 0.0, BLOCK, 30)
    alone, beside = (served(each, link(latency_s=0.1)) for each in ([other], [VICTIM, other]))
    assert beside.ended["other"] == alone.ended["other"] == pytest.approx(30 * STEP_S)
    out_s = 0.1 + 5 * BLOCK_S
    back = next(step * STEP_S for step in range(100) if step * STEP_S >= 3 * STEP_S + out_s)
    resumed = next(step * STEP_S for step in range(100) if step * STEP_S >= back + out_s)
    assert beside.admitted["victim"][1] == pytest.approx(resumed)


@pytest.mark.parametrize(("frees", "waits_s"), [("copied", 0.5 + 5 * BLOCK_S), ("at_once", 0.0)])
def test_blocks_are_held_until_they_are_copied_unless_a_buffer_takes_them(frees: str, waits_s: float) -> None:
    late = RequestSpec("late", 0.01, 6 * BLOCK - 8, 4, priority=-1)
    watch = served([VICTIM, late], link(latency_s=0.5, frees=frees), num_blocks=10, prioritizer="priority")
    swapped_at = watch.preempted[0][2]
    assert watch.admitted["late"][0] == pytest.approx(swapped_at + waits_s)


def test_host_blocks_are_held_until_the_request_is_back() -> None:
    controller, simulator, watch = built(link(latency_s=1.0))
    memory = controller.replicasets["default"].replicas[0].memory
    seen: list[int] = []

    class Looks(Observer):
        def on_admitted(self, request: RequestView, replica_id: int, now: float) -> None:
            seen.append(memory.free_host_blocks)

    out_s = 1.0 + 5 * BLOCK_S
    controller.watch([watch, Looks()])
    during = RequestSpec("during", 3 * STEP_S + out_s + 0.5, BLOCK, 2)
    simulator.run([VICTIM, during])
    assert seen == [30, 25, 30]
    memory.check()


def test_a_copy_goes_on_with_the_whole_link_when_the_other_is_called_off() -> None:
    controller, simulator, watch = built(link())
    simulator.abort_at(3 * STEP_S + 8 * BLOCK_S, "victim 2")
    simulator.run([VICTIM, replace(VICTIM, request_id="victim 2")])
    out_s = 9 * BLOCK_S  # 4 of 5 blocks are gone while they share the link
    assert watch.admitted["victim"][1] == pytest.approx(3 * STEP_S + out_s + 5 * BLOCK_S)
    assert watch.reasons == {"victim": EndReason.STOP, "victim 2": EndReason.ABORTED}
    controller.check_conservation()


@pytest.mark.parametrize("delay_s", [0.2, 0.5 + 5 * BLOCK_S + 0.2])
def test_a_request_aborted_on_its_way_gives_everything_back(delay_s: float) -> None:
    """On its way out, and on its way back."""
    controller, simulator, watch = built(link(latency_s=0.5))
    simulator.abort_at(3 * STEP_S + delay_s, "victim")
    simulator.run([VICTIM, RequestSpec("later", 5.0, 19 * BLOCK, 3)])
    controller.check_conservation()
    assert watch.reasons == {"victim": EndReason.ABORTED, "later": EndReason.STOP}
    memory = controller.replicasets["default"].replicas[0].memory
    memory.check()
    assert (memory.free_blocks, memory.free_host_blocks) == (20, 30)


@pytest.mark.parametrize("delay_s", [0.2, 0.5 + 5 * BLOCK_S + 0.2])
@pytest.mark.parametrize("frees", ["copied", "at_once"])
def test_a_replica_lost_meanwhile_serves_the_request_again(delay_s: float, frees: str) -> None:
    controller, simulator, watch = built(link(latency_s=0.5, frees=frees))
    failure = Failure(to_ticks(3 * STEP_S + delay_s), "default", 0, "test", max_reruns=1)
    restart = Restart(to_ticks(4.0), "default", 0)
    simulator.inject(failure.tick, Phase.FAILURE, failure)
    simulator.inject(restart.tick, Phase.FAILURE, restart)
    simulator.run([VICTIM])
    controller.check_conservation()
    assert watch.reasons == {"victim": EndReason.STOP}
    memory = controller.replicasets["default"].replicas[0].memory
    assert (memory.free_blocks, memory.free_host_blocks) == (20, 30)


def test_a_reset_of_the_cache_lets_a_request_on_its_way_back_compute_again() -> None:
    controller, simulator, watch = built(link(latency_s=0.5))
    tick = to_ticks(3 * STEP_S + 0.5 + 5 * BLOCK_S + 0.2)
    simulator.inject(tick, Phase.FAILURE, CacheReset(tick, "default", 0))
    simulator.run([VICTIM])
    controller.check_conservation()
    assert watch.reasons == {"victim": EndReason.STOP}


SCHEDULERS = (
    {"policy": "fixed_chunk", "preemption": "swap"},
    {"policy": "preemptive", "preemption": "swap"},
    {"policy": "nano_vllm_rs"},
)
worlds = st.fixed_dictionaries(
    {
        "scheduler": st.sampled_from(SCHEDULERS),
        "frees": st.sampled_from(["copied", "at_once"]),
        "bandwidth_gb_s": st.sampled_from([0.05, 1.0, 50.0]),
        "latency_s": st.sampled_from([0.0, 0.03]),
        "contention": st.sampled_from(["max_min", "exclusive"]),
        "publish": st.sampled_from(["schedule", "step_end"]),
        "requests": st.lists(
            st.tuples(st.integers(0, 40), st.integers(1, 150), st.integers(1, 60), st.integers(0, 2)),
            min_size=3,
            max_size=14,
        ),
        "aborts": st.lists(st.tuples(st.integers(0, 13), st.integers(0, 400)), max_size=4),
        "losses": st.lists(st.integers(0, 200), max_size=2),
    }
)


def lived(world: Mapping[str, Any], *, fast_forward: bool) -> tuple[Watch, int]:
    """Serve a world to its end, every account checked after each step."""
    swap_link = link(**{name: world[name] for name in ("frees", "bandwidth_gb_s", "latency_s", "contention")})
    memory = {"reservation": "incremental", "prefix_cache": {"publish": world["publish"]}}
    chosen = dict(world["scheduler"])
    scheduler = chosen if len(chosen) == 1 else {"policy": chosen.pop("policy"), "params": chosen}
    controller, simulator, watch = built(swap_link, scheduler, 16, num_replicas=2, memory=memory)
    if not fast_forward:
        for one in simulator._driver.replicas_of("default"):
            one.runs = None
    requests = [
        RequestSpec(f"r{index}", at * 0.05, prompt, min(output, 200 - prompt), priority=priority)
        for index, (at, prompt, output, priority) in enumerate(sorted(world["requests"]))
    ]
    for index, at in world["aborts"]:
        simulator.abort_at(at * 0.013, f"r{index}")
    for replica_id, at in enumerate(world["losses"]):
        lost, back = to_ticks(at * 0.0171), to_ticks(at * 0.0171 + 0.2)
        simulator.inject(lost, Phase.FAILURE, Failure(lost, "default", replica_id, "test", max_reruns=5))
        simulator.inject(back, Phase.FAILURE, Restart(back, "default", replica_id))
    simulator.run(requests)
    controller.check_conservation()
    for replica in controller.replicasets["default"].replicas:
        replica.memory.check()
        assert replica.memory.free_blocks == 16
        assert replica.memory.free_host_blocks == 30
    assert set(watch.reasons) == {one.request_id for one in requests}
    return watch, simulator.now


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(worlds)
def test_nothing_is_lost_whatever_happens_and_equal_runs_are_equal(world: Mapping[str, Any]) -> None:
    """Preemptions, aborts and losses in every state; with and without steps worked out at once."""
    (one, ended_at), (other, other_ended_at) = (lived(world, fast_forward=each) for each in (True, False))
    assert (one.admitted, one.preempted, one.reasons, one.ended) == (
        other.admitted,
        other.preempted,
        other.reasons,
        other.ended,
    )
    assert ended_at == other_ended_at
    aborted = {f"r{index}" for index, _ in world["aborts"]}
    assert all(reason is EndReason.STOP for name, reason in one.reasons.items() if name not in aborted)


def test_a_policy_that_preempts_to_admit_does_not_swap_two_requests_in_turns() -> None:
    """The urgent one gets no blocks before the other has left, which comes back first: that one computes each time."""
    requests = [
        RequestSpec("plain", 0.0, 8 * BLOCK, 40, priority=1),
        RequestSpec("urgent", 0.1, 12 * BLOCK, 3, priority=0),
    ]
    watch = served(requests, link(), scheduler={"policy": "nano_vllm_rs"}, num_blocks=16)
    assert watch.reasons == dict.fromkeys(("plain", "urgent"), EndReason.STOP)
    assert 1 < sum(one[0] == "plain" for one in watch.preempted) < 40


# Settings


def test_a_link_without_host_memory_and_other_backends_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got host_blocks: 0"):
        MemoryConfig.model_validate({"swap_link": link()})
    replica = ReplicaConfig.model_validate({"memory": {"host_blocks": 4, "swap_link": link()}})
    (problem,) = check_replica("replica", replica)
    assert str(problem).startswith("replica.memory.swap_link: swapped blocks are copied between two steps")
    with pytest.raises(ConfigError, match=r"swap_link.kv_bytes_per_token: is missing"):
        built({"bandwidth_gb_s": 1.0})


def test_without_a_link_files_say_nothing_of_it() -> None:
    assert "swap_link" not in MemoryConfig().model_dump()
    assert "swap_link" in MemoryConfig.model_validate({"host_blocks": 1, "swap_link": link()}).model_dump()
