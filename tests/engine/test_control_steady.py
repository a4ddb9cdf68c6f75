"""Does the steady clock take the machine's pace out of an engine's times, and nothing else?"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest
from steady import NormalizedClock, SteadyRunner

from tests.engine.fake_runner import FakeRunner
from vajra_py.config import config_from_mapping
from vajra_py.engine.clock import TICKS_PER_NANOSECOND
from vajra_py.engine.compute import ModelRunner, RunnerOptions, StepInput, StepOutput
from vajra_py.experiment.profiling.bench import Reference, paces
from vajra_py.experiment.runs.engined import EngineRun
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.runtime.support.clock import to_seconds

TYPICAL_S = 0.010


class Machine:
    """A machine whose time passes only when it computes, and whose pace changes every so many steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slowness: Iterator[float]) -> None:
        self._now_ns = 0
        self._slowness = slowness
        self.pace = 1.0
        monkeypatch.setattr(time, "perf_counter_ns", lambda: self._now_ns)
        monkeypatch.setattr(time, "perf_counter", lambda: self._now_ns / 1e9)

    def compute(self, seconds: float) -> None:
        self._now_ns += round(seconds * self.pace * 1e9)

    def change(self) -> None:
        self.pace = next(self._slowness)

    def reference_s(self) -> float:
        self.compute(TYPICAL_S)
        return TYPICAL_S * self.pace


def seconds_of(clock: NormalizedClock) -> float:
    return to_seconds(clock.now())


@pytest.mark.parametrize("pace", [0.5, 1.0, 1.7])
def test_a_step_counts_as_on_the_typical_machine(pace: float, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, iter([]))
    machine.pace = pace
    clock = NormalizedClock(machine.reference_s, TYPICAL_S)
    for step in range(1, 4):
        clock.settle()
        machine.compute(0.020)
        assert clock.measure() == pytest.approx(pace)
        assert seconds_of(clock) == pytest.approx(0.020 * step)  # and nothing for the reference


def test_a_disturbed_reference_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, iter([]))
    clock = NormalizedClock(machine.reference_s, TYPICAL_S)
    machine.pace = 9.0
    clock.settle()
    assert clock.measure() == 1.0


def test_time_never_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, iter([]))
    clock = NormalizedClock(machine.reference_s, TYPICAL_S)
    machine.pace = 4.0  # from the third reference on, the clock detects that less time has passed than it reported
    before = 0
    for _ in range(6):
        clock.settle()
        machine.compute(0.001)
        for told in (clock.now(), (clock.measure(), clock.now())[1]):
            assert told >= before
            before = told


@pytest.mark.parametrize("pace", [0.5, 1.0, 2.0])
def test_it_waits_until_its_own_time(pace: float, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, iter([]))
    machine.pace = pace
    clock = NormalizedClock(machine.reference_s, TYPICAL_S)

    class Inbox(SimpleQueue[str]):
        waited: list[float] = []  # noqa: RUF012 - of the one inbox of this test

        def get(self, block: bool = True, timeout: float | None = None) -> str:
            assert timeout is not None
            self.waited.append(timeout)
            machine.compute(timeout / machine.pace)  # sleeping takes as long on every machine
            return super().get(block=False)

    inbox = Inbox()
    assert clock.wait(inbox, 10**9 * TICKS_PER_NANOSECOND) is None
    assert seconds_of(clock) == pytest.approx(1.0, rel=1e-6)
    assert sum(inbox.waited) == pytest.approx(pace, rel=1e-6)


def test_paces_of_a_profile_leave_single_disturbances_out() -> None:
    assert paces([1.0, 1.0, 5.0, 1.0, 1.0, 2.0, 2.0, 2.0], 1.5) == pytest.approx(
        [1 / 1.5, 1 / 1.5, 1 / 1.5, 1 / 1.5, 2 / 1.5, 2 / 1.5, 2 / 1.5, 2 / 1.5]
    )


class Paced(FakeRunner):
    """Takes 5 ms a step and 1 ms a token, times the machine's pace, which changes now and then."""

    machine: Machine
    num_runs = 0

    def run(self, step: StepInput) -> StepOutput:
        if self.num_runs % 75 == 0:
            self.machine.change()
        self.num_runs += 1
        self.machine.compute(0.005 + 0.001 * (len(step.decodes) + sum(len(chunk.token_ids) for chunk in step.chunks)))
        self._take_changes(step)
        slots = [*step.decodes, *(chunk.slot for chunk in step.chunks if chunk.samples)]
        return StepOutput(slots, [5] * len(slots), 1e-6)


def e2e_of_a_run(folder: Path, slowness: Iterator[float], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    config = config_from_mapping(
        {
            "version": 1,
            "preset": "vajra",
            "replica": {"max_batch_size": 8, "max_model_len": 128, "memory": {"num_blocks": 64}},
            "workload": {
                "type": "synthetic",
                "arrivals": {"type": "at_once"},
                "num_requests": 12,
                "prompt_tokens": {"type": "uniform", "min": 2, "max": 60},
                "output_tokens": {"type": "uniform", "min": 1, "max": 20},
            },
            "backend": {
                "engine": {
                    "model": str(folder.parent),
                    "random_weights": True,
                    "latency": {"type": "affine", "base_s": 0.005, "per_token_s": 0.001},
                }
            },
        }
    )
    machine = Machine(monkeypatch, slowness)
    clocks: list[NormalizedClock] = []

    def load(options: RunnerOptions) -> ModelRunner:
        runner = Paced(Reference.room(options))
        runner.machine = machine
        runner.allocate(64 + Reference.num_blocks(options))
        clocks.append(NormalizedClock(Reference(runner, options, 64).time_s, 0.013))
        return SteadyRunner(runner, clocks[0])

    run = run_experiment(
        config, folder=folder, backend=lambda run: EngineRun(run, load=load, make_clock=lambda: clocks[0].start())
    )
    e2e: list[float] = run.requests().column("e2e_s").to_pylist()
    return e2e


def test_an_engine_on_an_unsteady_machine_has_the_times_of_a_steady_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    steady = e2e_of_a_run(tmp_path / "steady", iter([1.0] * 99), monkeypatch)
    unsteady = e2e_of_a_run(tmp_path / "unsteady", iter([2.0, 3.0, 1.5, 2.5] * 25), monkeypatch)
    assert len(steady) == 12
    assert unsteady == pytest.approx(steady, rel=0.15)  # the clock notices a new pace with the third step
    assert max(steady) > 0.3
