"""How often is a policy asked, and does the simulation leave the process as it was?"""

from __future__ import annotations

import gc
from typing import Any

import pytest

from vajra_py.sim.simulator import SimulationOptions
from vajra_py.testing import Harness, HarnessOptions
from vajra_py.testing.partners import PlainChunks
from vajra_py.workload import RequestSpec


class Counting(PlainChunks):
    """Fixed chunks that say what they do beside decodes, and count how often they are asked all the same."""

    def __init__(self) -> None:
        super().__init__(64)
        self.num_asked = 0

    def chunk_beside(self, num_decodes: int, num_remaining_tokens: int) -> int | None:
        return max(0, min(64 - num_decodes, num_remaining_tokens))

    def schedule(self, replica: Any, batch: Any, now: float) -> None:
        self.num_asked += 1
        super().schedule(replica, batch, now)


@pytest.mark.parametrize(("runs_ahead", "most_asked"), [(True, 3), (False, 10_000)])
def test_a_policy_that_says_what_it_does_is_asked_when_somebody_waits(runs_ahead: bool, most_asked: int) -> None:
    policy = Counting()
    harness = Harness("fcfs", "round_robin", policy, HarnessOptions(num_blocks=400))
    harness.controller.watch(())  # nobody looks at each step
    requests = [RequestSpec(f"r{index}", 2.0 * index, 1000, 20 + index) for index in range(3)]
    simulator = harness.simulator(SimulationOptions(runs_ahead=runs_ahead))
    simulator.run(requests)
    assert simulator.num_steps > 90
    assert policy.num_asked <= most_asked
    assert runs_ahead or policy.num_asked >= simulator.num_steps


class Admitting(Counting):
    """It says the same of steps that prompts wait for."""

    admits_in_turn = True


@pytest.mark.parametrize(("policy", "most_asked"), [(Admitting(), 0), (Counting(), 10_000)])
def test_a_policy_that_admits_in_turn_is_not_asked_while_prompts_wait(policy: Counting, most_asked: int) -> None:
    harness = Harness("fcfs", "round_robin", policy, HarnessOptions(num_blocks=1000))
    harness.controller.watch(())
    requests = [RequestSpec(f"r{index}", 0.01 * (index // 3), 10 + 40 * index, 20 + index) for index in range(12)]
    simulator = harness.simulator(SimulationOptions())
    simulator.run(requests)
    assert simulator.num_steps > 30
    assert policy.num_asked <= most_asked
    assert most_asked == 0 or policy.num_asked > 0


def test_what_is_short_is_asked_about() -> None:
    policy = Admitting()
    harness = Harness("fcfs", "round_robin", policy, HarnessOptions(num_blocks=10))
    harness.controller.watch(())
    harness.simulator(SimulationOptions()).run([RequestSpec(f"r{index}", 0.0, 60, 60) for index in range(4)])
    assert 0 < policy.num_asked < 200
    assert harness.controller.num_alive == 0


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
