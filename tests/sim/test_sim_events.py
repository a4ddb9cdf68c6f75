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


@given(events=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(Phase)), max_size=8))
def test_what_is_due_before_a_moment(events: list[tuple[int, Phase]]) -> None:
    queue = EventQueue()
    for tick, phase in events:
        queue.push(tick, phase, None)
    assert queue.nothing_up_to(2, Phase.ARRIVAL) == all(event > (2, Phase.ARRIVAL) for event in events)


def test_what_frees_comes_first_and_decisions_last() -> None:
    """A step's end frees memory before arrivals are looked at, whoever expires is gone before a step is formed."""
    assert Phase.STEP_END < Phase.STAGE_END < Phase.ARRIVAL < Phase.EXPIRY < Phase.ABORT < Phase.FORM
