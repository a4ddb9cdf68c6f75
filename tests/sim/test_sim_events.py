"""The order of events is total: by time, then by phase, then by who came first."""

from __future__ import annotations

from heapq import heappop

from hypothesis import given
from hypothesis import strategies as st

from vajra_py.runtime.serving.events import EventQueue, Phase


@given(events=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(Phase), st.integers(0, 2)), max_size=30))
def test_events_come_by_tick_phase_rank_and_sequence(events: list[tuple[int, Phase, int]]) -> None:
    queue = EventQueue()
    for number, (tick, phase, rank) in enumerate(events):
        queue.push(tick, phase, (rank, number, object()), rank)
    popped = []
    while queue.heap:
        tick, phase, rank, _, (same_rank, number, _) = heappop(queue.heap)
        assert rank == same_rank
        popped.append((tick, phase, rank, number))
    assert popped == sorted((*event, number) for number, event in enumerate(events))


@given(events=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(Phase)), max_size=20))
def test_what_was_due_happens_now_in_the_order_of_phases(events: list[tuple[int, Phase]]) -> None:
    """As on an engine, whose clock is read when a turn begins: of one phase, what was due first stays first."""
    queue = EventQueue()
    for number, (tick, phase) in enumerate(events):
        queue.push(tick, phase, number)
    queue.bring_forward(3)
    popped = [heappop(queue.heap) for _ in range(len(events))]
    assert [(tick, phase, events[number][0]) for tick, phase, _, _, number in popped] == sorted(
        (max(tick, 3), phase, tick) for tick, phase in events
    )


def test_events_of_a_phase_are_taken_out_in_order() -> None:
    queue = EventQueue()
    for tick, phase in ((5, Phase.POLICY), (1, Phase.ABORT), (2, Phase.POLICY)):
        queue.push(tick, phase, tick)
    assert queue.remove(Phase.POLICY) == [2, 5]
    assert [payload for *_, payload in queue.heap] == [1]


def test_what_frees_comes_first_and_decisions_last() -> None:
    """A step's end frees memory before arrivals are looked at, whoever expires is gone before a step is formed."""
    assert Phase.STEP_END < Phase.STAGE_END < Phase.ARRIVAL < Phase.EXPIRY < Phase.ABORT < Phase.FORM
