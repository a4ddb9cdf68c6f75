"""Do queues of many requests keep their order where it is hard: near crossings, under rounding, with half of them gone?"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from vajra_py.contract import KeyMotion
from vajra_py.runtime.queues import make_queue


@dataclass(eq=False)
class Waiting:
    index: int
    intercept: float
    slope: float = 0.0
    arrived_at: float = 0.0
    num_known_tokens: int = 10
    num_computed_tokens: int = 0

    @property
    def request_id(self) -> str:
        return f"r{self.index}"


class Lines:
    """Keys on straight lines; read as static where the slopes are 0."""

    def __init__(self, motion: KeyMotion = KeyMotion.TIME_LINEAR) -> None:
        self.key_motion = motion
        self.num_reads = 0

    def key(self, request: Any, now: float) -> float:
        self.num_reads += 1
        return request.intercept + request.slope * now

    def line(self, request: Any) -> tuple[float, float]:
        self.num_reads += 1
        return request.intercept, request.slope


def in_order(requests: Any, now: float) -> list[Waiting]:
    return sorted(requests, key=lambda r: (r.intercept + r.slope * now, r.arrived_at, r.index))


def nudged(value: float, ulps: int) -> float:
    for _ in range(abs(ulps)):
        value = math.nextafter(value, math.copysign(math.inf, ulps))
    return value


def ids(requests: Any) -> list[str]:
    return [request.request_id for request in requests]


def test_relative_slack_changes_places_as_time_passes() -> None:
    """A (D = 1, slack 0.9) and B (D = 100, slack 50): B first, half a second later A. A heap ordered at insertion is wrong."""
    a, b = Waiting(0, 0.9 / 1, -1 / 1), Waiting(1, 50 / 100, -1 / 100)
    queue: Any = make_queue(Lines())
    queue.add(a, 0.0)
    queue.add(b, 0.0)
    assert queue.urgency(a, 0.0) == (0.9, 0.0, 0)
    assert queue.urgency(b, 0.0) == (0.5, 0.0, 1)
    assert queue.peek(0.0) is b
    assert queue.urgency(a, 0.5)[0] == pytest.approx(0.4)
    assert queue.urgency(b, 0.5)[0] == pytest.approx(0.495)
    assert queue.peek(0.5) is a
    assert list(queue.ordered(0.5)) == [a, b]
    assert list(queue.ordered(0.0)) == [b, a]


@pytest.mark.parametrize(("num_slopes", "seed"), list(itertools.product([3, 40, 1000], range(4))))
def test_exact_where_many_lines_nearly_meet(num_slopes: int, seed: int) -> None:
    rng = np.random.default_rng([num_slopes, seed])
    meetings = [(float(rng.uniform(0, 10)), float(rng.uniform(-1, 1))) for _ in range(3)]
    slopes = (-1 / rng.uniform(0.5, 100, num_slopes)).tolist()
    near = [nudged(at, int(rng.integers(-4, 5))) for at, _ in meetings for _ in range(8)]
    queue: Any = make_queue(Lines())
    waiting: list[Waiting] = []
    indices = itertools.count()
    for now in sorted([0.0, *near, *rng.uniform(0, 12, 20).tolist(), 1e9, 1e12]):
        for _ in range(int(rng.choice([0, 5, 60]))):
            at, key = meetings[rng.integers(3)]
            slope = slopes[rng.integers(num_slopes)]
            exact = rng.random() < 0.7
            intercept = nudged(key - slope * at, int(rng.integers(-2, 3))) if exact else float(rng.uniform(-1, 1))
            request = Waiting(next(indices), intercept, slope, float(rng.integers(3)))
            waiting.append(request)
            queue.add(request, now)
        assert ids(queue.ordered(now)) == ids(in_order(waiting, now))
        for _ in range(min(len(waiting), int(rng.choice([0, 3, 30])))):
            order = in_order(waiting, now)
            assert queue.peek(now) is order[0]
            request = order[0] if rng.random() < 0.5 else waiting[rng.integers(len(waiting))]
            queue.remove(request)
            waiting.remove(request)


@pytest.mark.parametrize("now", [0.0, 1.0, 1e6, 1e15, 1e30, 1e280])
def test_parallel_lines_that_rounding_makes_equal_go_by_arrival(now: float) -> None:
    """Intercepts one last bit apart: far enough from 0 their computed keys are the same numbers, and the earlier goes first."""
    queue: Any = make_queue(Lines())
    waiting = [Waiting(i, nudged(1.0, i), -1 / 3, arrived_at=float(-i)) for i in range(20)]
    for request in waiting:
        queue.add(request, 0.0)
    assert queue.peek(0.0) is waiting[0]
    assert ids(queue.ordered(now)) == ids(in_order(waiting, now))
    for _ in range(10):
        head = in_order(waiting, now)[0]
        assert queue.peek(now) is head
        queue.remove(head)
        waiting.remove(head)
    assert queue.peek(0.0) is waiting[0]


@pytest.mark.parametrize("num_slopes", [1, 7, 3000])
def test_thousands_through_time_with_most_of_them_aborted(num_slopes: int) -> None:
    rng = np.random.default_rng(num_slopes)
    deadlines = rng.uniform(0.5, 60, num_slopes)
    waiting = []
    policy = Lines()
    queue: Any = make_queue(policy)
    for index in range(3000):
        allowed = float(deadlines[rng.integers(num_slopes)])
        arrived_at = index / 50
        request = Waiting(
            index, (arrived_at + allowed - float(rng.uniform(0, 0.3))) / allowed, -1 / allowed, arrived_at
        )
        waiting.append(request)
        queue.add(request, arrived_at)
    now = 60.0
    while len(waiting) > 300:
        now += float(rng.exponential(0.5))
        assert ids(queue.ordered(now)) == ids(in_order(waiting, now))
        for position in sorted(rng.choice(len(waiting), 200, replace=False).tolist(), reverse=True):
            queue.remove(waiting.pop(position))
        reader = queue.ordered(now)
        for expected in in_order(waiting, now)[:20]:
            assert next(reader) is expected
            queue.remove(expected)
            waiting.remove(expected)
    assert policy.num_reads == 3000
    assert queue.num_tokens == 10 * len(waiting)


def test_static_order_survives_mass_aborts_and_late_arrivals() -> None:
    rng = np.random.default_rng(3)
    queue: Any = make_queue(Lines(KeyMotion.STATIC))
    waiting = [Waiting(i, float(rng.integers(500))) for i in range(4000)]
    for request in waiting:
        queue.add(request, 0.0)
    for left in (2500, 1200, 400, 3):
        rng.shuffle(waiting)  # type: ignore[arg-type]
        while len(waiting) > left:
            queue.remove(waiting.pop())
        late = [Waiting(5000 + left + i, float(rng.integers(500))) for i in range(50)]
        for request in late:
            queue.add(request, 1.0)
        waiting += late
        assert ids(queue.ordered(1.0)) == ids(in_order(waiting, 0.0))
        assert queue.peek(1.0) is in_order(waiting, 0.0)[0]
        assert len(queue) == len(waiting)


def test_a_reader_meets_no_newcomers_while_the_queue_grows_under_it() -> None:
    rng = np.random.default_rng(5)
    queue: Any = make_queue(Lines())
    first = [Waiting(i, float(x), -float(s)) for i, (x, s) in enumerate(rng.uniform(0, 1, (50, 2)))]
    for request in first:
        queue.add(request, 1.0)
    reader = queue.ordered(1.0)
    got = [next(reader), next(reader)]
    for i, (x, s) in enumerate(rng.uniform(-1, 2, (500, 2))):
        queue.add(Waiting(100 + i, float(x), -float(s)), 1.0)
    queue.peek(7.0)
    assert ids([*got, *reader]) == ids(in_order(first, 1.0))


def test_a_call_to_ordered_fixes_what_will_be_read() -> None:
    for motion in (KeyMotion.STATIC, KeyMotion.TIME_LINEAR, KeyMotion.ARBITRARY):
        queue: Any = make_queue(Lines(motion))
        queue.add(old := Waiting(0, 1.0), 0.0)
        reader = queue.ordered(0.0)
        queue.add(Waiting(1, 0.0), 0.0)
        assert list(reader) == [old]


def test_arbitrary_keys_are_read_once_a_time_and_again_each_step() -> None:
    policy = Lines(KeyMotion.ARBITRARY)
    queue: Any = make_queue(policy)
    waiting = [Waiting(i, float(i)) for i in range(100)]
    for request in waiting:
        queue.add(request, 0.0)
    policy.num_reads = 0
    for _ in range(3):
        queue.peek(1.0)
        list(itertools.islice(queue.ordered(1.0), 10))
    assert policy.num_reads == 100
    waiting[70].intercept = -1.0  # for a reason of the policy's own
    queue.begin_step()
    assert queue.peek(1.0) is waiting[70]
    assert policy.num_reads == 200
    waiting[71].intercept = -2.0
    queue.refresh(waiting[71], 1.0)
    assert queue.peek(1.0) is waiting[71]
    assert policy.num_reads == 201
