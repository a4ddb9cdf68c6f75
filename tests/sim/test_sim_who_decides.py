"""How often a policy is asked, and that a simulation leaves the process as it was."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from vajra_py.contract.observer import Observer, StepEnd
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
        self.num_with_prompts += step.shape.num_prefills > 0


@pytest.mark.parametrize("prioritizer", ["fcfs", "lrs"])
def test_the_policy_decides_every_step_but_repetitions_of_its_own(prioritizer: str) -> None:
    policy, steps = Counting(), Steps()
    harness = Harness(prioritizer, "round_robin", policy, HarnessOptions(num_blocks=1000))
    harness.controller.watch([steps])
    requests = [RequestSpec(f"r{index}", 0.01 * (index // 3), 10 + 40 * index, 20 + index) for index in range(12)]
    harness.simulator(SimulationOptions()).run(requests)
    assert policy.num_asked_with_prompts == steps.num_with_prompts > 10
    assert policy.num_asked < steps.num_steps  # decodes that repeat are worked out at once


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
