"""Actions that wait until a replica is between two of its steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vajra_py.runtime.movement.links import LinkOptions
from vajra_py.runtime.serving.transfers import Transfers


def transfers() -> Transfers[Any]:
    rules: Any = SimpleNamespace(links=LinkOptions())
    unused: Any = None
    return Transfers(unused, rules, unused, is_timed=True, asks=False)


def replica(num_in_flight: int) -> Any:
    return SimpleNamespace(replica=SimpleNamespace(replica_id=3, num_in_flight=num_in_flight))


def test_actions_wait_for_the_step_the_lowest_number_first() -> None:
    moved, one, done = transfers(), replica(1), list[int]()
    for number in (2, -1, 1):
        moved.between_steps(one, number, lambda number=number: done.append(number))  # type: ignore[misc]
    moved.step_ended(one)
    assert (done, moved.has_waiting(one)) == ([], True), "another step is in flight"
    one.replica.num_in_flight = 0
    moved.step_ended(one)
    assert (done, moved.has_waiting(one)) == ([-1, 1, 2], False)
    moved.between_steps(one, 0, lambda: done.append(0))
    assert done == [-1, 1, 2, 0], "at once between steps"


def test_actions_of_a_lost_replica_are_dropped() -> None:
    moved, one, done = transfers(), replica(1), list[int]()
    moved.between_steps(one, 0, lambda: done.append(0))
    moved.forget_waiting(one)
    one.replica.num_in_flight = 0
    moved.step_ended(one)
    assert not done
