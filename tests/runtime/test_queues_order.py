"""Is the order of every queue that of a plain sort, at every time, through any history?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vajra_py.contract import FallenGroups, FallenRequests, KeyMotion
from vajra_py.errors import PolicyError
from vajra_py.runtime.queues import GroupedQueue, NamedFallsQueue, RequestQueue, make_queue, ranks


@dataclass(eq=False)
class Waiting:
    """The few facts of a request that queues and these prioritizers read."""

    index: int
    arrived_at: float = 0.0
    line: tuple[float, float] = (0.0, 0.0)
    num_known_tokens: int = 1
    num_computed_tokens: int = 0
    tenant: str = "a"
    request_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.request_id = f"r{self.index}"


class Prioritizer:
    """Keys from the request's line, read in one of the four ways."""

    def __init__(self, motion: KeyMotion) -> None:
        self.key_motion = motion
        self.num_reads = 0
        self.twist = 1.0

    def line(self, request: Any) -> tuple[float, float]:
        return request.line

    def key(self, request: Any, now: float) -> Any:
        self.num_reads += 1
        intercept, slope = request.line
        if self.key_motion is KeyMotion.TIME_LINEAR:
            return intercept + slope * now
        if self.key_motion in (KeyMotion.ARBITRARY, KeyMotion.VOLATILE):
            return (math.floor(self.twist * slope * math.sin(now)), intercept)
        return (slope, intercept)


def expected(requests: Any, prioritizer: Prioritizer, now: float) -> list[Waiting]:
    return sorted(requests, key=lambda r: (prioritizer.key(r, now), r.arrived_at, r.index))


CROSSINGS = st.sampled_from([(1.0, 0.25), (3.0, -1.0), (1e6 / 3, 0.1), (1e-7, 1.0), (0.0, 0.0)])
SLOPES = st.one_of(
    st.sampled_from([-1.0, -0.01, -2.0, 0.0, -1 / 3, 1.0, -math.nextafter(1.0, 2.0), 5e-324, -1e-310]),
    st.floats(-10, 10).map(lambda x: round(x, 3)),
    st.floats(-1e12, 1e12),
)


def nudged(value: float, ulps: int) -> float:
    for _ in range(abs(ulps)):
        value = math.nextafter(value, math.copysign(math.inf, ulps))
    return value


@st.composite
def lines(draw: st.DrawFn) -> tuple[float, float]:
    """Lines that meet, but for a few last bits, at a handful of points; and any lines."""
    slope = draw(SLOPES)
    if draw(st.integers(0, 4)) == 0:
        return draw(st.floats(-1e12, 1e12)), slope
    at, key = draw(CROSSINGS)
    return nudged(key - slope * at, draw(st.integers(-2, 2))), slope


@st.composite
def times(draw: st.DrawFn) -> float:
    kind = draw(st.integers(0, 5))
    if kind < 3:
        return nudged(draw(CROSSINGS)[0], draw(st.integers(-3, 3)))
    return draw(st.floats(0, 10) if kind == 3 else st.floats(-1e3, 1e7) if kind == 4 else st.floats(-1e270, 1e270))


class QueueMachine(RuleBasedStateMachine):
    """Random life of one queue beside a plain list."""

    motion = KeyMotion.STATIC
    forward = False
    block = 256
    """Small blocks make a handful of requests take the ways of many."""
    kind: type[Prioritizer] = Prioritizer

    def __init__(self) -> None:
        super().__init__()
        self.usual_block = ranks._BLOCK
        ranks._BLOCK = self.block
        self.prioritizer: Any = self.kind(self.motion)
        self.queue: RequestQueue = make_queue(self.prioritizer)
        self.waiting: list[Waiting] = []
        self.tokens: dict[Waiting, int] = {}
        self.indices = count()
        self.now = 0.0
        self.readers: list[tuple[Iterator[Any], float, list[Waiting], int]] = []

    @initialize(now=times())
    def start(self, now: float) -> None:
        self.now = now

    @rule(line=lines(), arrived_at=st.sampled_from([0.0, 0.5, 1.0, 2.0]), num_tokens=st.integers(1, 9))
    def add(self, line: tuple[float, float], arrived_at: float, num_tokens: int) -> None:
        request = Waiting(next(self.indices), arrived_at, line, num_tokens)
        self.queue.add(request, self.now)
        self.waiting.append(request)
        self.tokens[request] = num_tokens

    @rule(batch=st.lists(lines(), max_size=12))
    def add_many(self, batch: list[tuple[float, float]]) -> None:
        for line in batch:
            self.add(line, 0.0, 1)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        self.take(request)
        assert request not in self.queue
        with pytest.raises(KeyError):
            self.queue.remove(request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), line=lines(), num_computed=st.integers(0, 1))
    def refresh(self, data: st.DataObject, line: tuple[float, float], num_computed: int) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        moved = line != request.line
        request.line, request.num_computed_tokens = line, num_computed
        self.queue.refresh(request, self.now)
        self.tokens[request] = request.num_known_tokens - num_computed
        if moved:
            self.forget(request)

    @rule(now=times())
    def move_time(self, now: float) -> None:
        self.now = max(now, self.now) if self.forward else now

    @rule(step=st.floats(0, 1))
    def pass_time(self, step: float) -> None:
        self.now += step

    @precondition(lambda self: self.waiting)
    @rule()
    def pop(self) -> None:
        request = self.queue.peek(self.now)
        assert request is expected(self.waiting, self.prioritizer, self.now)[0]
        self.take(request)

    @rule(num_read=st.integers(0, 8))
    def start_reading(self, num_read: int) -> None:
        """Leave a reader half-way; the queue goes on changing under it."""
        todo = expected(self.waiting, self.prioritizer, self.now)
        reader = iter(self.queue.ordered(self.now))
        for _ in range(min(num_read, len(todo))):
            assert next(reader) is todo.pop(0)
        self.readers.append((reader, self.now, todo, num_read))

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), num_read=st.integers(1, 8))
    def go_on_reading(self, data: st.DataObject, num_read: int) -> None:
        """Empties the queue: all comes out in the order of the reader's own time."""
        reader, _, todo, _ = data.draw(st.sampled_from(self.readers))
        for _ in range(num_read):
            assert next(reader, None) is (todo.pop(0) if todo else None)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def admit_while_reading(self, data: st.DataObject) -> None:
        """What a replica scheduler does: read on, take some, pass over others; some come back."""
        todo = expected(self.waiting, self.prioritizer, self.now)
        for request in self.queue.ordered(self.now):
            assert request is todo.pop(0)
            action = data.draw(st.integers(0, 4))
            if action <= 2:
                self.take(request)
            if action == 1 and todo:
                victim = data.draw(st.sampled_from(todo))
                self.take(victim)
                todo.remove(victim)
            if action == 2:
                self.queue.add(request, self.now)
                self.waiting.append(request)
                self.tokens[request] = request.num_known_tokens - request.num_computed_tokens
            if action == 4 and len(todo) < 5:
                return
        assert not todo

    def take(self, request: Any) -> None:
        self.queue.remove(request)
        self.waiting.remove(request)
        del self.tokens[request]
        self.forget(request)

    def forget(self, request: Waiting) -> None:
        for _, _, todo, _ in self.readers:
            if request in todo:
                todo.remove(request)

    @rule()
    def same_as_a_plain_sort(self) -> None:
        order = expected(self.waiting, self.prioritizer, self.now)
        assert self.queue.peek(self.now) is (order[0] if order else None)
        assert [r.request_id for r in self.queue.ordered(self.now)] == [r.request_id for r in order]
        for request in order[:3]:
            key = (self.prioritizer.key(request, self.now), request.arrived_at, request.index)
            assert self.queue.urgency(request, self.now) == key

    def teardown(self) -> None:
        self.same_as_a_plain_sort()
        ranks._BLOCK = self.usual_block

    @invariant()
    def counts(self) -> None:
        assert len(self.queue) == len(self.waiting)
        assert set(self.queue) == set(self.waiting)
        assert all(request in self.queue for request in self.waiting)
        assert self.queue.num_tokens == sum(self.tokens.values())


class ByTenant(Prioritizer):
    """The same keys within groups, whose own keys a test moves."""

    def __init__(self, motion: KeyMotion) -> None:
        super().__init__(motion)
        self.keys = dict.fromkeys("abcdefgh", 0)

    def group(self, request: Any) -> str:
        return str(request.tenant)

    def group_key(self, group: str) -> tuple[float, float]:
        return (self.keys[group] // 2, self.keys[group])


class ByFallingTenant(ByTenant):
    """Keys that may fall as well; the fall is named."""

    def __init__(self, motion: KeyMotion) -> None:
        super().__init__(motion)
        self.fallen_groups = FallenGroups()


class GroupMachine(QueueMachine):
    """The same life with the requests in groups, whose keys move while readers are half-way."""

    kind = ByTenant

    def __init__(self) -> None:
        super().__init__()
        assert isinstance(self.queue, GroupedQueue)

    def order(self, requests: Any) -> list[Waiting]:
        def key(request: Any) -> tuple[Any, ...]:
            own = self.prioritizer.key(request, self.now)
            return (self.prioritizer.group_key(request.tenant), own, request.arrived_at, request.index)

        return sorted(requests, key=key)

    @rule(
        tenants=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=8),
        arrived_at=st.sampled_from([0.0, 1.0]),
        slope=st.sampled_from([0.0, 1.0]),
    )
    def add_to_groups(self, tenants: list[str], arrived_at: float, slope: float) -> None:
        for tenant in tenants:
            request = Waiting(next(self.indices), arrived_at, (0.0, slope), tenant=tenant)
            self.queue.add(request, self.now)
            self.waiting.append(request)
            self.tokens[request] = 1

    @rule(tenant=st.sampled_from("abcdefgh"), by=st.integers(1, 3))
    def raise_group(self, tenant: str, by: int) -> None:
        self.prioritizer.keys[tenant] += by

    @precondition(lambda self: self.kind is ByFallingTenant)
    @rule(tenant=st.sampled_from("abcdefgh"), by=st.integers(0, 3), times=st.sampled_from([1, 1, 1, 3000]))
    def lower_group(self, tenant: str, by: int, times: int) -> None:
        self.prioritizer.keys[tenant] -= by
        for _ in range(times):
            self.prioritizer.fallen_groups.add(tenant)

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), num_read=st.integers(1, 8))
    def go_on_reading(self, data: st.DataObject, num_read: int) -> None:
        """Empties the queue: all comes out in the order of the moment."""
        reader, _, todo, _ = data.draw(st.sampled_from(self.readers))
        for _ in range(num_read):
            first = self.order(todo)[0] if todo else None
            assert next(reader, None) is first
            if first is not None:
                todo.remove(first)

    @rule(num_read=st.integers(0, 8))
    def start_reading(self, num_read: int) -> None:
        todo = self.order(self.waiting)
        reader = iter(self.queue.ordered(self.now))
        for _ in range(min(num_read, len(todo))):
            assert next(reader) is todo.pop(0)
        self.readers.append((reader, self.now, todo, num_read))

    @precondition(lambda self: self.waiting)
    @rule()
    def pop(self) -> None:
        request = self.queue.peek(self.now)
        assert request is self.order(self.waiting)[0]
        self.take(request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def admit_while_reading(self, data: st.DataObject) -> None:
        """Take some, pass over others, and let the keys of groups move at each."""
        todo = list(self.waiting)
        for request in self.queue.ordered(self.now):
            assert request is self.order(todo)[0]
            todo.remove(request)
            action = data.draw(st.integers(0, 5))
            if action <= 2:
                self.take(request)
                self.prioritizer.keys[request.tenant] += data.draw(st.integers(0, 3))
            if action == 2:
                self.queue.add(request, self.now)
                self.waiting.append(request)
                self.tokens[request] = request.num_known_tokens - request.num_computed_tokens
            if action == 3:
                self.raise_group(data.draw(st.sampled_from("abcdefgh")), 1)
            if action == 4 and self.kind is ByFallingTenant:
                self.lower_group(data.draw(st.sampled_from("abcdefgh")), 1, 1)
            if action == 5 and len(todo) < 5:
                return
        assert not todo

    @rule()
    def same_as_a_plain_sort(self) -> None:
        order = self.order(self.waiting)
        assert self.queue.peek(self.now) is (order[0] if order else None)
        assert [r.request_id for r in self.queue.ordered(self.now)] == [r.request_id for r in order]
        urgencies = [self.queue.urgency(request, self.now) for request in order]
        assert urgencies == sorted(urgencies)
        stranger: Any = Waiting(next(self.indices), 0.5, (0.0, 0.0), tenant="b")
        assert self.order([*order[:3], stranger]) == sorted(
            [*order[:3], stranger], key=lambda one: self.queue.urgency(one, self.now)
        )


class NamesFalls(Prioritizer):
    """Keys that a test raises and lowers, and that rise and fall with time; falls are named or told beforehand."""

    def __init__(self, motion: KeyMotion) -> None:
        super().__init__(motion)
        self.levels: dict[str, int] = {}
        self.fallen_requests = FallenRequests()

    def key(self, request: Any, now: float) -> Any:
        self.num_reads += 1
        level = self.levels.get(request.request_id, 0)
        return (level - (now >= 2.0 * request.arrived_at) + (now >= 3.0 * request.arrived_at), *request.line)

    def falls_at(self, request: Any, now: float) -> float | None:
        """A little early, as a policy may be; from the fall on there is none to come."""
        return 1.9 * request.arrived_at if now < 2.0 * request.arrived_at else None


class NamedFallsMachine(QueueMachine):
    """The same life, with keys that move while readers are half-way."""

    kind = NamesFalls

    def __init__(self) -> None:
        super().__init__()
        assert isinstance(self.queue, NamedFallsQueue)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), by=st.integers(1, 3))
    def raise_key(self, data: st.DataObject, by: int) -> None:
        name, levels = data.draw(st.sampled_from(self.waiting)).request_id, self.prioritizer.levels
        levels[name] = levels.get(name, 0) + by

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), by=st.integers(0, 3), times=st.sampled_from([0, 1, 1, 1, 3000]))
    def lower_key(self, data: st.DataObject, by: int, times: int) -> None:
        request, levels = data.draw(st.sampled_from(self.waiting)), self.prioritizer.levels
        levels[request.request_id] = levels.get(request.request_id, 0) - by
        for _ in range(times):
            self.prioritizer.fallen_requests.add(request)
        if not times:
            self.prioritizer.fallen_requests.add_all()

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), num_read=st.integers(1, 8))
    def go_on_reading(self, data: st.DataObject, num_read: int) -> None:
        """Empties the queue: all comes out in the order of the moment, at the reader's time."""
        reader, now, todo, _ = data.draw(st.sampled_from(self.readers))
        for _ in range(num_read):
            todo[:] = expected(todo, self.prioritizer, now)
            assert next(reader, None) is (todo.pop(0) if todo else None)


class CountsChanges(Prioritizer):
    """Keys that all change at times that a test chooses, and that are counted."""

    def __init__(self, motion: KeyMotion) -> None:
        super().__init__(motion)
        self.num_changes = 0

    def key_epoch(self) -> int:
        return self.num_changes

    def key(self, request: Any, now: float) -> Any:
        self.num_reads += 1
        intercept, slope = request.line
        return (slope, intercept) if self.num_changes % 2 else (-intercept, slope)


class CountedMachine(QueueMachine):
    """The same life, with keys that change between steps."""

    kind = CountsChanges

    @rule()
    def change_keys(self) -> None:
        self.prioritizer.num_changes += 1
        self.queue.begin_step()

    @rule()
    def begin_step(self) -> None:
        self.queue.begin_step()

    go_on_reading = NamedFallsMachine.go_on_reading


def machine(motion: KeyMotion, of: type[QueueMachine] = QueueMachine, **attributes: Any) -> Any:
    case = type(f"{motion.name}{attributes}", (of,), {"motion": motion, **attributes}).TestCase
    case.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
    return case


TestStatic = machine(KeyMotion.STATIC)
TestProgress = machine(KeyMotion.PROGRESS, block=2)
TestTimeLinear = machine(KeyMotion.TIME_LINEAR)
TestTimeLinearForward = machine(KeyMotion.TIME_LINEAR, forward=True, block=2)
TestArbitrary = machine(KeyMotion.ARBITRARY)
TestCounted = machine(KeyMotion.ARBITRARY, CountedMachine)
TestNamedFalls = machine(KeyMotion.NAMED_FALLS, NamedFallsMachine)
TestNamedFallsInBlocks = machine(KeyMotion.NAMED_FALLS, NamedFallsMachine, block=2)
TestGroups = machine(KeyMotion.STATIC, GroupMachine, block=2)
TestFallingGroups = machine(KeyMotion.PROGRESS, GroupMachine, kind=ByFallingTenant)
TestFallingGroupsInBlocks = machine(KeyMotion.PROGRESS, GroupMachine, kind=ByFallingTenant, block=2)


@pytest.mark.parametrize("motion", [KeyMotion.STATIC, KeyMotion.ARBITRARY])
def test_a_request_that_is_refreshed_unchanged_keeps_its_turn(motion: KeyMotion) -> None:
    queue = make_queue(Prioritizer(motion))
    waiting = [Waiting(index) for index in range(4)]
    for one in waiting:
        queue.add(one, 0.0)
    order = queue.ordered(0.0)
    assert next(order) is waiting[0]
    queue.refresh(waiting[2], 0.0)
    assert list(order) == waiting[1:]


def test_a_key_that_falls_without_a_word_is_a_breach_that_names_the_request() -> None:
    policy = NamesFalls(KeyMotion.NAMED_FALLS)
    queue = make_queue(policy, "quiet")
    waiting: list[Any] = [Waiting(index) for index in range(3)]
    for one in waiting:
        queue.add(one, 0.0)
    policy.levels["r0"] = -1
    with pytest.raises(PolicyError, match=r"quiet.*r0.*decreased without being reported"):
        queue.peek(0.0)
    policy.fallen_requests.add(waiting[0])
    assert list(queue.ordered(0.0)) == waiting


def test_keys_that_have_not_changed_are_not_read_again() -> None:
    prioritizer: Any = CountsChanges(KeyMotion.ARBITRARY)
    queue = make_queue(prioritizer)
    for index in range(50):
        queue.add(Waiting(index), 0.0)  # type: ignore[arg-type]
    assert queue.peek(0.0) is not None
    prioritizer.num_reads = 0
    for now in range(1, 9):
        queue.begin_step()
        head = queue.peek(float(now))
        assert head is not None
        queue.remove(head)
        queue.add(Waiting(100 + now), float(now))  # type: ignore[arg-type]
    assert prioritizer.num_reads == 8
    prioritizer.num_changes += 1
    queue.begin_step()
    queue.peek(9.0)
    assert prioritizer.num_reads == 8 + 50


def test_a_count_of_changes_that_is_no_number_is_named() -> None:
    prioritizer: Any = CountsChanges(KeyMotion.ARBITRARY)
    queue = make_queue(prioritizer, "mine")
    prioritizer.num_changes = None
    with pytest.raises(PolicyError, match=r"mine.*key_epoch\(\) is not a whole number"):
        queue.add(Waiting(0), 0.0)  # type: ignore[arg-type]
    assert not len(queue)


def test_keys_that_rise_or_fall_cost_a_look_at_the_heads() -> None:
    """Thousands that wait are not read again: heads are, and those that have fallen."""
    policy = NamesFalls(KeyMotion.NAMED_FALLS)
    queue = make_queue(policy)
    waiting: list[Any] = [Waiting(index, line=(float(index), 0.0)) for index in range(2000)]
    for one in waiting:
        queue.add(one, 0.0)
    policy.num_reads = 0
    policy.levels |= {"r0": 1, "r1999": -1}
    policy.fallen_requests.add(waiting[-1])
    assert queue.peek(0.0) is waiting[-1]
    queue.remove(waiting[-1])
    assert queue.peek(0.0) is waiting[1]
    assert policy.num_reads < 10


def test_a_reader_of_groups_goes_on_by_the_keys_of_the_moment() -> None:
    """A reader that has passed over requests; thousands of falls; a group that comes back; requests that come too late."""
    policy = ByFallingTenant(KeyMotion.STATIC)
    queue: Any = make_queue(policy)
    waiting = [Waiting(index, tenant="aabbc"[index]) for index in range(5)]
    policy.keys |= {"a": 2, "b": 4, "c": 6}
    for one in waiting:
        queue.add(one, 0.0)
    order = queue.ordered(0.0)
    assert next(order) is waiting[0]
    policy.keys["c"] = 0
    for index in range(5000):
        policy.fallen_groups.add("c" if index == 0 else "b")
    assert next(order) is waiting[4]
    queue.remove(waiting[4])
    late = Waiting(5, tenant="c")
    queue.add(late, 0.0)
    policy.keys["a"] = 5
    assert next(order) is waiting[2]
    policy.keys["b"] = 9
    assert list(order) == [waiting[1], waiting[3]]
    assert list(queue.ordered(0.0)) == [late, *waiting[:4]]


def test_the_second_of_few_ranks_is_known_though_others_were_removed() -> None:
    blocks = ranks.SortedRanks()
    made: Any = [(float(key), 0.0, key, key, None, 0.0, 1) for key in range(5 * ranks._BLOCK)]
    for rank in made:
        blocks.add(rank)
    for position, rank in enumerate(made[:-1]):
        first, second = blocks.first_two()
        assert first is rank
        assert second is made[position + 1]
        blocks.remove(rank)
    assert blocks.first_two() == (made[-1], None)


def test_a_walk_goes_on_where_it_was_though_ranks_come_and_go() -> None:
    sorted_ranks = ranks.SortedRanks()
    made: Any = [(float(key), 0.0, key, key, None, 0.0, 1) for key in range(12)]
    for rank in made[:10]:
        sorted_ranks.add(rank)
    walked = sorted_ranks.walk()
    assert [next(walked) for _ in range(4)] == made[:4]
    sorted_ranks.add(made[10])
    sorted_ranks.remove(made[1])
    assert list(walked) == made[4:11]
