"""Normalize an engine's times to a machine of constant speed.

Machines that others use too speed up and slow down by a third from second to second, unnoticed. Here the engine's
clock is stopped after every step while a reference batch is computed, and what passed since before the step counts as the
time that it would have taken at the machine's typical pace. All else is the engine's: every step is computed, and forming
it, arrivals and ends take the time that they take.

Invariants:
    - Time never goes back, and stops while the reference is computed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from statistics import median
from typing import TypeVar

from vajra_py.engine.clock import TICKS_PER_NANOSECOND, WallClock
from vajra_py.engine.compute import DoneStep, ModelFacts, ModelRunner, PendingStep, StepInput, StepOutput
from vajra_py.experiment.profiling.bench import NEIGHBOURS
from vajra_py.runtime.support.clock import TICKS_PER_SECOND

T = TypeVar("T")
_LONG_AGO = TICKS_PER_SECOND // 20
"""Idle time after which a machine that others use too may have another pace, ticks."""


class Pace:
    """Slowness of the machine by the median of the last few times of the reference, since a single one may have been disturbed."""

    def __init__(self, typical_s: float) -> None:
        self._typical_s = typical_s
        self._last = 1.0
        self._recent: deque[float] = deque(maxlen=2 * NEIGHBOURS + 1)

    @property
    def is_known(self) -> bool:
        """True with enough times for a median."""
        return len(self._recent) > NEIGHBOURS

    def note(self, reference_s: float) -> None:
        """Add the newest time."""
        self._recent.append(reference_s)

    def forget(self) -> None:
        """Drop all times as too old; until the next, the slowness stays."""
        self._last = self.slowness
        self._recent.clear()

    @property
    def slowness(self) -> float:
        """Time of the reference now as a multiple of the typical one."""
        return median(self._recent) / self._typical_s if self._recent else self._last


class NormalizedClock(WallClock):
    """An `EngineClock` that goes as much slower as the machine does.

    Attributes:
        slowness: the machine's, as a multiple of the typical time of the reference: one for each step.
    """

    def __init__(self, reference_s: Callable[[], float], typical_s: float) -> None:
        super().__init__()
        self._reference_s = reference_s
        self._pace = Pace(typical_s)
        self._learn()
        self.slowness: list[float] = []
        self._latest = 0
        self.start()

    def start(self) -> NormalizedClock:
        """Set the clock to zero."""
        self._base = self._latest = 0
        self._since_ns = time.perf_counter_ns()
        return self

    def now(self) -> int:
        """See `EngineClock`."""
        self._latest = max(self._latest, self._base + self._passed())
        return self._latest

    def wait(self, inbox: SimpleQueue[T], until: int) -> T | None:
        """See `EngineClock`."""
        begun = self.now()
        message = super().wait(inbox, until)
        while message is None and self.now() < until:
            message = super().wait(inbox, until)
        self.settle()
        if self._base - begun > _LONG_AGO:
            self._pace.forget()
        return message

    def settle(self) -> None:
        """Keep the count of the time that has passed until now."""
        self._base, self._since_ns = self.now(), time.perf_counter_ns()

    def measure(self) -> float:
        """Stop, see how slow the machine is, and count what passed since `settle` accordingly. Returns the slowness."""
        passed_ns = time.perf_counter_ns() - self._since_ns
        self._learn()
        self.slowness.append(self._pace.slowness)
        self._since_ns = time.perf_counter_ns() - passed_ns
        self.settle()
        return self.slowness[-1]

    def _learn(self) -> None:
        """See how fast the machine is; more than once where that was last seen long ago."""
        self._pace.note(self._reference_s())
        while not self._pace.is_known:
            self._pace.note(self._reference_s())

    def _wall_s(self, ticks: int) -> float:
        return super()._wall_s(ticks) * self._pace.slowness

    def _passed(self) -> int:
        passed_ns = time.perf_counter_ns() - self._since_ns
        return round(passed_ns / self._pace.slowness) * TICKS_PER_NANOSECOND


class SteadyRunner:
    """A `ModelRunner` after each of whose steps the clock is set."""

    def __init__(self, runner: ModelRunner, clock: NormalizedClock) -> None:
        self._runner = runner
        self._clock = clock

    @property
    def facts(self) -> ModelFacts:
        """See `ModelRunner`."""
        return self._runner.facts

    def profile_num_blocks(self, memory_fraction: float) -> int:
        """See `ModelRunner`."""
        return self._runner.profile_num_blocks(memory_fraction)

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Do nothing: it was done before, since the reference, and so the clock, need KV memory."""

    def submit(self, step: StepInput) -> PendingStep:
        """See `ModelRunner`; it is done at once."""
        return DoneStep(self.run(step))

    def run(self, step: StepInput) -> StepOutput:
        """See `ModelRunner`."""
        self._clock.settle()
        output = self._runner.run(step)
        return replace(output, duration_s=output.duration_s / self._clock.measure())

    def close(self) -> None:
        """See `ModelRunner`."""
        self._runner.close()
