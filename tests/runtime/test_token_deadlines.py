"""What a policy may know of the tokens that a client has seen, and when the next one is due."""

from __future__ import annotations

from typing import Any

import pytest

import vajra_py as vajra
from vajra_py.contract.observer import Observer, StepRun
from vajra_py.metrics.tables.recorder import token_times
from vajra_py.sim.simulator import SimulationOptions
from vajra_py.testing import ByArrival, Harness, HarnessOptions, InTurn, PlainChunks
from vajra_py.workload import RequestSpec

OPTIONS = HarnessOptions(block_size=4, num_blocks=12, max_batch_size=3)


class Watching(ByArrival):
    """Compares, at each step's end, what the view says with what was recorded."""

    def __init__(self) -> None:
        self.num_compared = 0

    def on_step_end(self, step: Any) -> None:
        for request in step.requests:
            times = token_times(request).tolist()
            self.num_compared += 1
            assert len(times) == request.num_output_tokens
            assert request.last_token_at == (times[-1] if times else None)
            due_at = times[-1] + request.tbt_slo_s if times else request.arrived_at + request.ttft_slo_s
            assert request.next_token_due_at == due_at


def test_the_newest_token_and_the_next_ones_deadline_also_after_giving_way() -> None:
    watching = Watching()
    harness = Harness(watching, InTurn(), PlainChunks(8), OPTIONS)
    for index in range(5):
        harness.submit(f"r{index}", 6 + index, 14, ttft_slo_s=0.5, tbt_slo_s=0.05)
    harness.steps_until_idle()
    assert watching.num_compared > 60
    assert any(harness.request(f"r{index}").num_preemptions for index in range(5))


def test_without_slos_nothing_is_due() -> None:
    harness = Harness(ByArrival(), InTurn(), PlainChunks(), OPTIONS)
    harness.submit("a", 4, 3)
    assert (harness.request("a").last_token_at, harness.request("a").next_token_due_at) == (None, None)
    harness.step()
    assert harness.request("a").last_token_at == harness.now
    assert harness.request("a").next_token_due_at is None


class CountsRuns(Observer):
    """Number of steps that were fast-forwarded."""

    num_steps = 0

    def on_step_run(self, run: StepRun) -> None:
        self.num_steps += len(run.ended_at)


def test_the_newest_token_is_known_while_steps_run_ahead() -> None:
    seen: dict[bool, list[Any]] = {}
    for fast_forward in (True, False):

        class AtArrival(ByArrival):
            def __init__(self) -> None:
                self.first: Any = None

            def on_arrivals(self, requests: Any, now: float) -> None:
                self.first = self.first or requests[0]
                seen.setdefault(fast_forward, []).append(self.first.last_token_at)  # noqa: B023 - called in this round

        harness = Harness(AtArrival(), InTurn(), PlainChunks(), HarnessOptions(num_blocks=200))
        runs = CountsRuns()
        harness.controller.watch((runs,))
        specs = [RequestSpec(f"r{index}", 0.137 * index, 10, 300) for index in range(6)]
        harness.simulator(SimulationOptions(fast_forward=fast_forward)).run(specs)
        assert (runs.num_steps > 0) == fast_forward
    assert seen[True] == seen[False]
    assert seen[True][0] is None
    assert all(seen[True][1:])


@pytest.mark.parametrize(("slo_s", "attained"), [(0.02, 1.0), (0.005, 0.0)])
def test_the_slo_is_judged(tmp_path: Any, slo_s: float, attained: float) -> None:
    experiment = {
        "version": 1,
        "scheduling": {
            "request_prioritizer": "fcfs",
            "replicaset_scheduler": "pull",
            "replica_scheduler": "fixed_chunk",
        },
        "workload": {
            "type": "synthetic",
            "arrivals": {"type": "poisson", "rate": 20},
            "num_requests": 12,
            "prompt_tokens": {"type": "constant", "value": 40},
            "output_tokens": {"type": "constant", "value": 6},
            "slo_classes": [{"name": "chat", "tbt_slo_s": slo_s}],
        },
        "backend": {"simulator": {"latency": {"type": "constant", "step_time_s": 0.01}}},
        "replica": {"max_model_len": 4096, "memory": {"num_blocks": 400}},
    }
    run = vajra.run(vajra.load(experiment), folder=tmp_path / "run")
    assert run.summary.value("overall.slo.tbt.attainment_fraction") == attained
    assert run.summary.value("overall.slo.overall.attainment_fraction") == attained
    assert set(run.requests_frame("tbt_slo_s").tbt_slo_s) == {slo_s}
