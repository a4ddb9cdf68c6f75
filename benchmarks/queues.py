"""Measure the CPU time of the request queues, as ratios within one run.

- add, pop and abort of one request with 100,000 waiting, over the same with 100 waiting;
- a step (look at the head, admit it, take an arrival, let time pass) with 100,000 waiting under time-linear keys, over
  the same step in order of arrival.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import process_time

import numpy as np

from vajra_py.contract import KeyMotion, RequestView
from vajra_py.runtime.queues import RequestQueue, make_queue

_FEW, _MANY = 100, 100_000
_NUM_SAMPLES = 2_000
_STEP_S = 0.02
_NUM_ROUNDS = 5


@dataclass(eq=False, slots=True)
class Waiting:
    """The facts of a request that the queues and these two prioritizers read."""

    index: int
    arrived_at: float
    allowed_s: float
    prefill_s: float
    num_known_tokens: int = 1000
    num_computed_tokens: int = 0
    request_id: str = field(default="")


class Fcfs:
    """First come, first served."""

    key_motion = KeyMotion.STATIC

    def key(self, request: RequestView, now: float) -> float:
        """Arrival."""
        return request.arrived_at


class RelativeSlack:
    """Least relative slack, as LRS computes it: (arrival + D - now - prefill time) / D."""

    key_motion = KeyMotion.TIME_LINEAR

    def key(self, request: Waiting, now: float) -> float:
        """Relative slack."""
        intercept, slope = self.line(request)
        return intercept + slope * now

    def line(self, request: Waiting) -> tuple[float, float]:
        """Its intercept and slope in time."""
        allowed_s = request.allowed_s
        return (request.arrived_at + allowed_s - request.prefill_s) / allowed_s, -1.0 / allowed_s


def _requests(num_deadlines: int | None) -> Iterator[Waiting]:
    """Arrivals at 50/s; prompts of that many lengths (None: of a length of its own each), deadlines 1.5 times prefill, 0.5 s at least."""
    rng = np.random.default_rng(7)
    index = 0
    while True:
        draws = (
            rng.uniform(0.05, 60.0, 10_000)
            if num_deadlines is None
            else rng.integers(1, num_deadlines + 1, 10_000) * 0.05
        )
        for prefill_s in draws.tolist():
            yield Waiting(index, index / 50.0, max(1.5 * prefill_s, 0.5), prefill_s)
            index += 1


def _filled(
    prioritizer: Fcfs | RelativeSlack, num_deadlines: int | None, size: int
) -> tuple[RequestQueue, Iterator[Waiting], list[Waiting]]:
    arrivals = _requests(num_deadlines)
    queue = make_queue(prioritizer)  # type: ignore[arg-type]  # reads fewer facts than a whole request view has
    requests = [next(arrivals) for _ in range(size)]
    for request in requests:
        queue.add(request, request.arrived_at)  # type: ignore[arg-type]
    queue.peek(requests[-1].arrived_at)
    return queue, arrivals, requests


def _timed(action: Callable[[], object], num_times: int = _NUM_SAMPLES) -> float:
    """Seconds per call."""
    start = process_time()
    for _ in range(num_times):
        action()
    return (process_time() - start) / num_times


def _costs(prioritizer: Fcfs | RelativeSlack, num_deadlines: int | None, size: int) -> dict[str, float]:
    """Seconds per operation at that many waiting; the size is kept by undoing, off the clock."""
    queue, arrivals, requests = _filled(prioritizer, num_deadlines, size)
    rng = np.random.default_rng(11)
    now = requests[-1].arrived_at + 1.0
    queue.peek(now)
    costs: dict[str, list[float]] = {"add": [], "abort": [], "pop": []}
    batch = min(size // 4, 200)
    for _ in range(max(5, _NUM_SAMPLES // batch)):
        fresh = iter([next(arrivals) for _ in range(batch)])
        added: list[Waiting] = []

        def add(fresh: Iterator[Waiting] = fresh, added: list[Waiting] = added) -> None:
            request = next(fresh)
            queue.add(request, now)  # type: ignore[arg-type]
            added.append(request)

        def pop() -> None:
            head = queue.peek(now)
            assert head is not None
            queue.remove(head)

        costs["add"].append(_timed(add, batch))
        waiting = list(queue)
        aborted = iter([waiting[i] for i in rng.choice(len(waiting), batch, replace=False).tolist()])
        costs["abort"].append(_timed(lambda aborted=aborted: queue.remove(next(aborted)), batch))  # type: ignore[misc]
        costs["pop"].append(_timed(pop, batch))
        for _ in range(size - len(queue)):
            queue.add(next(arrivals), now)  # type: ignore[arg-type]
        queue.peek(now)
    return {name: min(values) for name, values in costs.items()}


def _step_cost(prioritizer: Fcfs | RelativeSlack, num_deadlines: int | None, size: int) -> float:
    """Seconds per step that admits the head and takes one arrival, time passing."""
    queue, arrivals, requests = _filled(prioritizer, num_deadlines, size)
    now = requests[-1].arrived_at
    fresh = [next(arrivals) for _ in range(_NUM_SAMPLES)]
    start = process_time()
    for request in fresh:
        now += _STEP_S
        queue.add(request, now)  # type: ignore[arg-type]
        queue.remove(next(queue.ordered(now)))
    return (process_time() - start) / _NUM_SAMPLES


def measure() -> dict[str, float]:
    """Costs in microseconds (`*_us`) and ratios (`*_ratio`), the best of a few rounds, since noise only adds."""
    figures: dict[str, float] = {}
    gc.disable()
    try:
        for name, prioritizer, num_deadlines in _KINDS:
            few, many = (_costs(prioritizer, num_deadlines, size) for size in (_FEW, _MANY))
            for action in many:
                figures[f"queue_{name}_{action}_us"] = many[action] * 1e6
                figures[f"queue_{name}_{action}_ratio"] = many[action] / few[action]
        steps: dict[str, list[float]] = {name: [] for name, _, _ in _KINDS}
        for _ in range(_NUM_ROUNDS):
            for name, prioritizer, num_deadlines in _KINDS:
                steps[name].append(_step_cost(prioritizer, num_deadlines, _MANY))
        fcfs = min(steps["fcfs"])
        for name, values in steps.items():
            figures[f"queue_{name}_step_us"] = min(values) * 1e6
            figures[f"queue_{name}_step_over_fcfs_ratio"] = min(values) / fcfs
    finally:
        gc.enable()
    return figures


_KINDS: tuple[tuple[str, Fcfs | RelativeSlack, int | None], ...] = (
    ("fcfs", Fcfs(), 40),
    ("lrs", RelativeSlack(), 40),
    ("lrs_distinct", RelativeSlack(), None),
)


def main() -> None:
    """Print the figures as a table."""
    for name, value in measure().items():
        print(f"{name:40s} {value:10.2f}")


if __name__ == "__main__":
    main()
