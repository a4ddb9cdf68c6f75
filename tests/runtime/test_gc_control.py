"""Garbage of a run is collected in proportion to the run's own objects, and not to what was there before."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from vajra_py.runtime.support.gc_control import existing_objects_frozen, infrequent_collections, put_off_collections


@pytest.fixture(autouse=True)
def nothing_is_frozen() -> None:
    """Begin as in a process of its own, also in one that has frozen what it imported."""
    gc.unfreeze()


class Node:
    """Refers to itself, so that only the collector ends it."""

    num_alive = 0

    def __init__(self) -> None:
        self.me = self
        Node.num_alive += 1

    def __del__(self) -> None:
        Node.num_alive -= 1


def test_old_objects_do_not_put_collections_off(monkeypatch: pytest.MonkeyPatch) -> None:
    old = [[] for _ in range(1_500_000)]  # type: ignore[var-annotated]
    gc.collect()
    if not gc.isenabled() or gc.get_freeze_count():
        pytest.skip("the collector is not as it is by default")
    monkeypatch.setattr(Node, "num_alive", 0)
    most, under_way = 0, deque[Node](maxlen=20_000)  # each outlives the collector's younger generations
    with existing_objects_frozen():
        for _ in range(250_000):
            under_way.append(Node())
            most = max(most, Node.num_alive)
    under_way.clear()
    gc.collect()
    assert most < 150_000
    assert len(old) == 1_500_000


@pytest.fixture
def default_threshold() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    gc.set_threshold(700, *before[1:])
    yield gc.get_threshold()
    gc.set_threshold(*before)


def test_collections_are_rarer_for_as_long_as_asked(default_threshold: tuple[int, int, int]) -> None:
    with infrequent_collections():
        assert gc.get_threshold()[0] > default_threshold[0]
        assert gc.get_threshold()[1:] == default_threshold[1:]
    assert gc.get_threshold() == default_threshold


def test_runs_that_overlap_leave_the_collector_as_it_was(default_threshold: tuple[int, int, int]) -> None:
    first, second = ExitStack(), ExitStack()
    first.enter_context(infrequent_collections())
    second.enter_context(infrequent_collections())
    first.close()
    second.close()
    assert gc.get_threshold() == default_threshold


def test_a_collector_that_never_runs_is_left_so() -> None:
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with infrequent_collections():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)


def test_a_loop_after_a_start_collects_as_rarely_as_any() -> None:
    before = gc.get_threshold()
    put_off_collections()
    put_off_collections()  # the second call changes nothing
    try:
        assert gc.get_threshold()[0] > 100 * before[0]
        with infrequent_collections():
            during = gc.get_threshold()[0]
        assert before[0] < during < 100_000
        assert gc.get_threshold() == before
    finally:
        gc.set_threshold(*before)
