"""Is a policy whose keys break the contract named, with the request, and is the queue unharmed?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from vajra_py.contract import FallenRequests, KeyMotion
from vajra_py.errors import PolicyError, place_of_definition
from vajra_py.runtime.queues import (
    ArbitraryQueue,
    KineticQueue,
    NamedFallsQueue,
    PrefixHitsQueue,
    SortedQueue,
    make_queue,
)


@dataclass(eq=False)
class Waiting:
    index: int
    answer: Any
    arrived_at: float = 0.0
    num_known_tokens: int = 5
    num_computed_tokens: int = 2

    @property
    def request_id(self) -> str:
        return f"req-{self.index}"


class Quirky:
    """Answers whatever the request says."""

    def __init__(self, motion: Any) -> None:
        self.key_motion = motion
        self.fallen_requests = FallenRequests()

    def key(self, request: Any, now: float) -> Any:
        return request.answer(now) if callable(request.answer) else request.answer

    line = key


class Linear(Quirky):
    def line(self, request: Any) -> Any:
        return request.answer() if callable(request.answer) else request.answer


def boom(*_: float) -> float:
    raise ZeroDivisionError("no deadline")


def ids(queue: Any, now: float) -> list[str]:
    return [request.request_id for request in queue.ordered(now)]


BY_KEY = [
    KeyMotion.STATIC,
    KeyMotion.PROGRESS,
    KeyMotion.NAMED_FALLS,
    KeyMotion.PREFIX_HITS,
    KeyMotion.ARBITRARY,
    KeyMotion.VOLATILE,
]
BAD_NUMBERS = [math.nan, math.inf, -math.inf, None, "3", [1.0], (), (1.0, 2.0), 1j, np.float32("nan")]
BAD_TUPLES = [1.0, (1.0,), (1.0, 2.0, 3.0), (1.0, math.nan), (math.inf, 0.0), (1.0, None)]


@pytest.mark.parametrize("motion", BY_KEY)
@pytest.mark.parametrize(
    ("good", "bad"), [*((1.0, bad) for bad in BAD_NUMBERS), *(((1.0, 2.0), bad) for bad in BAD_TUPLES), (1.0, boom)]
)
def test_bad_key_is_refused_and_nothing_changes(motion: KeyMotion, good: Any, bad: Any) -> None:
    queue: Any = make_queue(Quirky(motion))  # type: ignore[arg-type]
    fine, offender = Waiting(0, good), Waiting(1, bad)
    queue.add(fine, 0.0)
    for act in (queue.add, queue.urgency):
        with pytest.raises(PolicyError) as caught:
            act(offender, 0.0)
        assert caught.value.policy == "Quirky"
        assert caught.value.request_id == "req-1"
    fine.answer = bad
    with pytest.raises(PolicyError, match="request req-0"):
        queue.refresh(fine, 0.0)
    fine.answer = good
    assert (len(queue), queue.num_tokens, ids(queue, 0.0)) == (1, 3, ["req-0"])


@pytest.mark.parametrize(
    "bad",
    [
        1.0,
        None,
        (1.0,),
        (1.0, 2.0, 3.0),
        [1.0, 2.0],
        (math.nan, 0.0),
        (0.0, -math.inf),
        (0.0, "x"),
        (10**400, 0.0),
        boom,
    ],
)
def test_bad_line_is_refused_and_nothing_changes(bad: Any) -> None:
    queue: Any = make_queue(Linear(KeyMotion.TIME_LINEAR))  # type: ignore[arg-type]
    fine, offender = Waiting(0, (1.0, -1)), Waiting(1, bad)
    queue.add(fine, 0.0)
    for act in (queue.add, queue.urgency):
        with pytest.raises(PolicyError, match=r"policy Linear, request req-1: line\(\)"):
            act(offender, 0.0)
    fine.answer = bad
    with pytest.raises(PolicyError, match="request req-0"):
        queue.refresh(fine, 0.0)
    assert (len(queue), queue.num_tokens, ids(queue, 0.0)) == (1, 3, ["req-0"])


def test_the_message_says_what_was_given_and_what_is_allowed() -> None:
    queue: Any = make_queue(Quirky(KeyMotion.STATIC))  # type: ignore[arg-type]
    queue.add(Waiting(0, (1.0, 2.0)), 0.0)
    expected = (
        "policy Quirky, request req-1: key() changed its shape (got a number: 3.0). "
        "Allowed: a tuple of length 2, as its first key here."
    )
    with pytest.raises(PolicyError) as caught:
        queue.add(Waiting(1, 3.0), 0.0)
    place = place_of_definition(Quirky.key)
    assert place is not None
    assert place.startswith("tests/runtime/test_queues_bad_keys.py:")
    assert str(caught.value) == f"{expected} ({place})"
    with pytest.raises(PolicyError, match=r"key\(\) raised ZeroDivisionError: no deadline") as caught:
        queue.add(Waiting(2, boom), 0.0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_error_that_already_names_the_policy_passes_unchanged() -> None:
    error = PolicyError("edf", "has no prefill times", request_id="other")

    def fail(*_: float) -> float:
        raise error

    for motion, kind in ((KeyMotion.STATIC, Quirky), (KeyMotion.TIME_LINEAR, Linear)):
        with pytest.raises(PolicyError) as caught:
            make_queue(kind(motion)).add(Waiting(0, fail), 0.0)  # type: ignore[arg-type]
        assert caught.value is error


@pytest.mark.parametrize("motion", BY_KEY)
def test_all_sorts_of_finite_numbers_are_keys(motion: KeyMotion) -> None:
    queue: Any = make_queue(Quirky(motion))  # type: ignore[arg-type]
    ascending = [-(10**400), -0.0, True, np.float64(1.5), np.int64(2), np.float32(2.5), 3, 3.5, 10**400]
    waiting = [Waiting(index, key) for index, key in enumerate(ascending)]
    for request in waiting[::-2] + waiting[-2::-2]:
        queue.add(request, 0.0)
    assert list(queue.ordered(0.0)) == waiting


def test_a_key_that_turns_bad_while_waiting_is_named_and_can_be_taken_out() -> None:
    queue: Any = make_queue(Quirky(KeyMotion.ARBITRARY))  # type: ignore[arg-type]
    turning: Callable[[float], float] = lambda now: 0.0 if now < 1.0 else math.nan  # noqa: E731
    fine, offender = Waiting(0, 1.0), Waiting(1, turning)
    queue.add(fine, 0.0)
    queue.add(offender, 0.0)
    assert queue.peek(0.0) is offender
    for look in (queue.peek, lambda now: next(queue.ordered(now))):
        with pytest.raises(PolicyError, match="request req-1"):
            look(2.0)
    assert ids(queue, 0.5) == ["req-1", "req-0"]
    queue.remove(offender)
    assert ids(queue, 2.0) == ["req-0"]
    assert queue.num_tokens == 3


def test_a_line_that_leaves_the_range_of_floats_is_named_and_can_be_taken_out() -> None:
    queue: Any = make_queue(Linear(KeyMotion.TIME_LINEAR))  # type: ignore[arg-type]
    fine, offender = Waiting(0, (0.0, 0.0)), Waiting(1, (0.0, -1e300))
    queue.add(fine, 0.0)
    queue.add(offender, 0.0)
    assert queue.peek(1.0) is offender
    for look in (queue.peek, lambda now: next(queue.ordered(now)), lambda now: queue.urgency(offender, now)):
        with pytest.raises(PolicyError, match=r"policy Linear, request req-1: its key is not finite at 1000000000.0 s"):
            look(1e9)
    queue.remove(offender)
    assert queue.peek(1e9) is fine
    assert ids(queue, 1e9) == ["req-0"]


def test_an_overflowing_key_at_the_end_is_found_when_its_turn_comes() -> None:
    queue: Any = make_queue(Linear(KeyMotion.TIME_LINEAR))  # type: ignore[arg-type]
    queue.add(Waiting(0, (0.0, 0.0)), 0.0)
    queue.add(Waiting(1, (0.0, 1e300)), 0.0)
    reader = queue.ordered(1e9)
    assert next(reader).request_id == "req-0"
    with pytest.raises(PolicyError, match="request req-1"):
        next(reader)


@pytest.mark.parametrize("motion", list(KeyMotion))
def test_misuse_by_the_caller(motion: KeyMotion) -> None:
    queue: Any = make_queue(Linear(motion))  # type: ignore[arg-type]
    request = Waiting(0, (1.0, 2.0))
    with pytest.raises(KeyError):
        queue.remove(request)
    with pytest.raises(KeyError):
        queue.refresh(request, 0.0)
    queue.add(request, 0.0)
    with pytest.raises(ValueError, match="req-0 waits already"):
        queue.add(request, 1.0)
    queue.remove(request)
    assert (len(queue), queue.num_tokens, queue.peek(1.0), list(queue.ordered(1.0))) == (0, 0, None, [])
    queue.add(request, 1.0)
    assert queue.peek(1.0) is request


def test_the_declared_motion_chooses_the_queue() -> None:
    kinds = {motion: type(make_queue(Linear(motion))) for motion in KeyMotion}  # type: ignore[arg-type]
    assert kinds == {
        KeyMotion.STATIC: SortedQueue,
        KeyMotion.PROGRESS: SortedQueue,
        KeyMotion.TIME_LINEAR: KineticQueue,
        KeyMotion.NAMED_FALLS: NamedFallsQueue,
        KeyMotion.PREFIX_HITS: PrefixHitsQueue,
        KeyMotion.ARBITRARY: ArbitraryQueue,
        KeyMotion.VOLATILE: ArbitraryQueue,
    }
    with pytest.raises(PolicyError, match="policy Quirky: its key_motion is not a KeyMotion"):
        make_queue(Quirky("static"))  # type: ignore[arg-type]

    class NoLine:
        key_motion = KeyMotion.TIME_LINEAR

        def key(self, request: Any, now: float) -> float:
            return 0.0

    with pytest.raises(PolicyError, match=r"policy NoLine: .* no method line"):
        make_queue(NoLine())


class OfGroups(Quirky):
    """One group for each text; the groups' keys are what a test says."""

    def __init__(self, motion: KeyMotion = KeyMotion.STATIC) -> None:
        super().__init__(motion)
        self.keys: dict[Any, Any] = {"a": 1.0, "b": 2.0}

    def group(self, request: Any) -> Any:
        return request.group() if callable(request.group) else request.group

    def group_key(self, group: str) -> Any:
        answer = self.keys[group]
        return answer() if callable(answer) else answer


def of_group(index: int, group: Any, answer: Any = 0.0) -> Any:
    waiting: Any = Waiting(index, answer)
    waiting.group = group
    return waiting


@pytest.mark.parametrize("group", [None, 3, ("a",), b"a", boom])
def test_a_group_without_a_name_is_refused_and_nothing_changes(group: Any) -> None:
    queue: Any = make_queue(OfGroups())
    queue.add(of_group(0, "a"), 0.0)
    for act in (queue.add, queue.urgency):
        with pytest.raises(PolicyError, match="request req-1: group") as caught:
            act(of_group(1, group), 0.0)
        assert caught.value.policy == "OfGroups"
    assert (len(queue), ids(queue, 0.0)) == (1, ["req-0"])


@pytest.mark.parametrize("key", [math.nan, -math.inf, None, "3", (), (1.0, 2.0), boom])
def test_a_bad_key_of_a_group_is_refused_and_nothing_changes(key: Any) -> None:
    policy = OfGroups()
    queue: Any = make_queue(policy)
    queue.add(of_group(0, "a"), 0.0)
    policy.keys["bad"] = key
    for act in (queue.add, queue.urgency):
        with pytest.raises(PolicyError, match=r"group_key\('bad'\)"):
            act(of_group(1, "bad"), 0.0)
    policy.keys["a"] = key
    with pytest.raises(PolicyError, match=r"group_key\('a'\)"):
        ids(queue, 0.0)
    policy.keys["a"] = 1.0
    queue.add(of_group(2, "b"), 0.0)
    assert (len(queue), ids(queue, 0.0)) == (2, ["req-0", "req-2"])


def test_a_fall_that_nobody_named_breaks_the_contract() -> None:
    policy = OfGroups()
    queue: Any = make_queue(policy)
    queue.add(of_group(0, "a"), 0.0)
    queue.add(of_group(1, "b"), 0.0)
    policy.keys["a"] = 0.5
    with pytest.raises(
        PolicyError, match=r"group_key\('a'\) has decreased without being reported \(was 1.0, got 0.5\)"
    ):
        queue.peek(0.0)


@pytest.mark.parametrize(
    "motion", [KeyMotion.TIME_LINEAR, KeyMotion.PREFIX_HITS, KeyMotion.ARBITRARY, KeyMotion.VOLATILE]
)
def test_keys_that_move_by_themselves_are_ordered_within_groups_too(motion: KeyMotion) -> None:
    policy = OfGroups(motion)
    queue: Any = make_queue(policy)
    rising, fixed, other = of_group(0, "a", lambda now: now), of_group(1, "a", 5.0), of_group(2, "b", -9.0)
    for request in (rising, fixed, other):
        queue.add(request, 0.0)
    assert ids(queue, 0.0) == ["req-0", "req-1", "req-2"]
    assert ids(queue, 7.0) == ["req-1", "req-0", "req-2"]
    policy.keys["a"] = 3.0
    queue.begin_step()
    assert ids(queue, 7.0) == ["req-2", "req-1", "req-0"]
    assert queue.urgency(rising, 7.0) == ((3.0, 7.0), rising.arrived_at, 0)
