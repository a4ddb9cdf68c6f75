"""Actions that wait until a replica is between two of its steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vajra_py.runtime.movement.links import LinkOptions
from vajra_py.runtime.records.input_log import Retry
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.serving.transfers import Transfers


def transfers() -> Transfers[Any]:
    rules: Any = SimpleNamespace(links=LinkOptions(), bytes_per_token=1)
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


@pytest.mark.parametrize(
    ("is_timed", "asks", "pushed"),
    [(True, False, "default"), (False, True, Retry(7 + 10**12, "default")), (False, False, None)],
)
def test_what_is_postponed_is_due_by_the_clock_or_when_it_is_told(is_timed: bool, asks: bool, pushed: Any) -> None:
    events: list[Any] = []
    driver: Any = SimpleNamespace(now=7, events=SimpleNamespace(push=lambda *event: events.append(event)))
    replicaset: Any = SimpleNamespace(name="default")
    rules: Any = SimpleNamespace(links=LinkOptions(), bytes_per_token=1)
    moved: Transfers[Any] = Transfers(replicaset, rules, driver, is_timed=is_timed, asks=asks)
    done: list[int] = []
    moved.after(1.0, lambda: done.append(driver.now))
    assert events == ([] if pushed is None else [(7 + 10**12, Phase.TRANSFER, pushed)])
    for driver.now in (6 + 10**12, 7 + 10**12):
        moved.retry()
    assert done == [7 + 10**12]
