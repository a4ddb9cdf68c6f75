"""Hit rates of retention policies against what is known of them: stack distances, inclusion, Belady's bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hit_rates import POLICIES, Trace, belady_hits, hits_of, lru_hits_by_distance
from hypothesis import given, settings
from hypothesis import strategies as st

REQUESTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=60
)  # fmt: skip
"""(where it leaves the common prefix, which branch, blocks)."""
SIZES = (6, 8, 11, 16, 40)


def trace_of(requests: Sequence[tuple[int, int, int]]) -> Trace:
    """Chains of blocks that share a prefix of up to three blocks; a block's name says all that is before it."""
    chains = []
    for at, branch, length in requests:
        labels = [0] * min(at, length) + [branch + 1] * max(length - at, 0)
        chains.append([tuple(labels[: end + 1]) for end in range(length)])
    return Trace([float(index) for index in range(len(chains))], chains)


@settings(max_examples=60, deadline=None)
@given(REQUESTS)
def test_lru_hits_what_stack_distances_say(requests: list[tuple[int, int, int]]) -> None:
    trace = trace_of(requests)
    assert [hits_of(trace, "lru", size) for size in SIZES] == lru_hits_by_distance(trace, SIZES)
    assert [hits_of(trace, None, size) for size in SIZES] == lru_hits_by_distance(trace, SIZES)


@settings(max_examples=60, deadline=None)
@given(REQUESTS)
def test_stack_algorithms_hit_more_in_a_larger_cache_and_nobody_more_than_the_bound(
    requests: list[tuple[int, int, int]],
) -> None:
    trace = trace_of(requests)
    bounds = [belady_hits(trace, size) for size in SIZES]
    assert bounds == sorted(bounds)
    hits = [hits_of(trace, "lru", size) for size in SIZES]
    assert hits == sorted(hits)
    for name in (*POLICIES, "belady"):
        assert all(hits_of(trace, name, size) <= bound for size, bound in zip(SIZES, bounds, strict=True))


@pytest.mark.parametrize("name", POLICIES)
def test_what_fits_is_hit_whenever_it_comes_again(name: str) -> None:
    trace = trace_of([(2, branch, 5) for branch in range(3)] * 3)
    repeated = sum(len(chain) for chain in trace.chains) - len({one for chain in trace.chains for one in chain})
    assert hits_of(trace, name, 40) == belady_hits(trace, 40) == repeated


def test_a_loop_that_does_not_fit_defeats_lru_and_not_mru() -> None:
    """The known example: five prompts in turn where four fit."""
    trace = trace_of([(0, branch, 4) for branch in range(5)] * 10)
    hits: dict[str, Any] = {name: hits_of(trace, name, 16) for name in ("lru", "fifo", "mru", "filo")}
    assert hits["lru"] == hits["fifo"] == 0
    assert hits["mru"] > 100
    assert hits["filo"] > 100
