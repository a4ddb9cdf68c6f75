"""How often a policy is asked, and that a simulation leaves the process as it was."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from vajra_py.contract.observer import Observer, StepEnd
from vajra_py.latency import ConstantModel
from vajra_py.sim.simulator import SimulationOptions
from vajra_py.testing import Harness, HarnessOptions
from vajra_py.testing.reference_policies import PlainChunks
from vajra_py.workload import RequestSpec


class Counting(PlainChunks):
    """Fixed chunks that count how often they are asked, and for how many steps with a prompt."""

    def __init__(self) -> None:
        super().__init__(64)
        self.num_asked = 0
        self.num_asked_with_prompts = 0

    def schedule(self, replica: Any, batch: Any, now: float) -> None:
        super().schedule(replica, batch, now)
        self.num_asked += 1
        self.num_asked_with_prompts += batch.num_tokens > batch.num_requests


class Steps(Observer):
    """Counts steps and those with a prompt, in runs or one by one."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_with_prompts = 0

    def on_step_end(self, step: StepEnd) -> None:
        self.num_steps += 1
        self.num_with_prompts += step.features.num_prefills > 0


@pytest.mark.parametrize("prioritizer", ["fcfs", "lrs"])
def test_the_policy_decides_every_step_but_repetitions_of_its_own(prioritizer: str) -> None:
    policy, steps = Counting(), Steps()
    harness = Harness(prioritizer, "round_robin", policy, HarnessOptions(num_blocks=1000))
    harness.controller.watch([steps])
    requests = [RequestSpec(f"r{index}", 0.01 * (index // 3), 10 + 40 * index, 20 + index) for index in range(12)]
    harness.simulator(SimulationOptions()).run(requests)
    assert policy.num_asked_with_prompts == steps.num_with_prompts > 10
    assert policy.num_asked < steps.num_steps  # repeated decode steps are computed together


class Hearing(Counting):
    """Is told when requests are admitted and leave, and keeps what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[Any, ...]] = []

    def on_admission(self, request: Any, replica_id: int, now: float) -> None:
        self.heard.append(("admitted", request.request_id, replica_id, now))

    def on_departures(self, requests: Any, now: float) -> None:
        self.heard += [("left", one.request_id, one.num_output_tokens, now) for one in requests]


class HearingEachStep(Hearing):
    """Is told of every step besides."""

    def on_step_end(self, step: Any) -> None:
        self.heard.append(("step", step.step_index, step.num_tokens, step.ended_at))


def decode_alone(policy: Counting, *, fast_forward: bool = True) -> int:
    """Two requests that come together and decode for long; how many steps that took."""
    harness = Harness("fcfs", "round_robin", policy, HarnessOptions(num_blocks=400))
    harness.controller.watch(())
    simulator = harness.simulator(SimulationOptions(fast_forward=fast_forward))
    simulator.run([RequestSpec("short", 0.0, 10, 400), RequestSpec("long", 0.0, 10, 1200)])
    return simulator.num_steps


@pytest.mark.parametrize("kind", [Counting, Hearing])
def test_repetitions_of_a_steady_decode_step_are_not_decided(kind: type[Counting]) -> None:
    policy = kind()
    assert decode_alone(policy) == 1200
    assert policy.num_asked < 12  # 32 steps at once, then four times as many each time, and again after an end


def test_a_policy_that_listens_to_steps_is_asked_for_each_and_all_are_told_the_same() -> None:
    policy = HearingEachStep()
    assert decode_alone(policy) == 1200
    assert policy.num_asked == 1200
    alone = Hearing()
    decode_alone(alone)
    assert alone.heard == [one for one in policy.heard if one[0] != "step"]
    assert [one[:3] for one in alone.heard[2:]] == [("left", "short", 400), ("left", "long", 1200)]
    steps = [one for one in policy.heard if one[0] == "step"]
    assert [one[1] for one in steps] == list(range(1200))
    assert [len(one[2]) for one in steps] == [2] * 400 + [1] * 800


def test_without_running_ahead_the_policy_is_asked_for_every_step() -> None:
    policy = Counting()
    harness = Harness("fcfs", "round_robin", policy, HarnessOptions(num_blocks=400))
    harness.controller.watch(())
    requests = [RequestSpec(f"r{index}", 2.0 * index, 1000, 20 + index) for index in range(3)]
    simulator = harness.simulator(SimulationOptions(fast_forward=False))
    simulator.run(requests)
    assert policy.num_asked >= simulator.num_steps > 90


def test_the_garbage_collector_is_as_it_was_after_a_run() -> None:
    before = gc.get_threshold(), gc.isenabled(), gc.get_freeze_count()
    harness = Harness("fcfs", "round_robin", "fixed_chunk", HarnessOptions())
    harness.simulator(SimulationOptions()).run([RequestSpec("r", 0.0, 10, 5)])
    assert (gc.get_threshold(), gc.isenabled(), gc.get_freeze_count()) == before


def test_the_garbage_collector_is_as_it_was_after_a_run_that_fails() -> None:
    class Broken(PlainChunks):
        def schedule(self, replica: Any, batch: Any, now: float) -> None:
            raise ZeroDivisionError

    before = gc.get_threshold(), gc.get_freeze_count()
    harness = Harness("fcfs", "round_robin", Broken(), HarnessOptions())
    with pytest.raises(Exception, match="ZeroDivisionError"):
        harness.simulator(SimulationOptions()).run([RequestSpec("r", 0.0, 10, 5)])
    assert (gc.get_threshold(), gc.get_freeze_count()) == before


def test_a_router_sees_steps_that_end_at_the_tick_of_an_arrival() -> None:
    """Steps take 0.1 s and two requests come while the first one decodes, one just before a step's end and one with it."""

    def seen(fast_forward: bool) -> list[list[int]]:
        found: list[list[int]] = []
        held: list[Any] = []

        class Router:
            def assign(self, request: Any, replicas: Any, now: float) -> int:
                found.append([one.num_output_tokens for one in held])
                held.append(request)
                return int(request.request_id) % 2

            def pull(self, replica: Any, queued: Any, now: float) -> Any:
                return ()

        options = HarnessOptions(num_blocks=400, num_replicas=2, latency=ConstantModel(0.1))
        harness = Harness("fcfs", Router(), Counting(), options)
        harness.controller.watch(())
        simulator = harness.simulator(SimulationOptions(fast_forward=fast_forward))
        simulator.run([RequestSpec(str(index), at, 10, 60) for index, at in enumerate((0.0, 0.45, 0.5))])
        return found

    assert seen(fast_forward=True) == seen(fast_forward=False)
    assert seen(fast_forward=True)[:3] == [[], [4], [5, 0]]
