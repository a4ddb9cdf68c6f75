"""Tokens of decodes with drafts, counted for all decodes of a step together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vajra_py.runtime.requests.request import DraftedOutputs, Request, RequestFacts

NUM = 4
"""Number of requests."""
STEPS = st.lists(
    st.tuples(
        st.sampled_from([(0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3), (1, 3), (2, 0), ()]),
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=NUM, max_size=NUM),
        st.integers(0, 1),
        st.sampled_from(["", "", "read", "alone"]),
        st.integers(0, NUM - 1),
    ),
    max_size=25,
)


@given(STEPS, st.booleans())
def test_requests_have_the_logs_that_counting_each_alone_gives(
    steps: list[tuple[tuple[int, ...], list[tuple[int, int]], int, str, int]], has_two: bool
) -> None:
    """Steps of the same or of other requests, read in between or not, with requests verified alone, on two replicas."""
    requests = [Request(RequestFacts(f"r{number}", 5), number, 0.0, 1000) for number in range(NUM)]
    counters = [DraftedOutputs(), DraftedOutputs()]
    ticks: list[list[int]] = [[] for _ in requests]
    drafts: list[list[tuple[int, int, int]]] = [[] for _ in requests]
    for tick, (members, counts, num_new, event, which) in enumerate(steps):
        num_drafts = [max(counts[one]) for one in members]
        num_accepted = [min(counts[one]) for one in members]
        counter = counters[which % 2 if has_two else 0]
        counter.add([requests[one] for one in members], num_drafts, num_accepted, num_new, tick)
        for one, proposed, accepted in zip(members, num_drafts, num_accepted, strict=True):
            if proposed:
                drafts[one].append((len(ticks[one]) - (1 - num_new), proposed, accepted))
            ticks[one] += [tick] * (num_new + accepted)
        if event == "alone":
            requests[which].add_verified(2, 1, tick)
            drafts[which].append((len(ticks[which]) - 1, 2, 1))
            ticks[which].append(tick)
        if event:
            assert requests[which].token_log == ticks[which]
    for request, expected, tried in zip(requests, ticks, drafts, strict=True):
        assert request.token_log == expected
        assert request.draft_log == tried
        assert request.num_output_tokens == len(expected)
