"""Runs of steps end as their steps do one by one, and at the clock's end at the latest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vajra_py.runtime.support.clock import NEVER
from vajra_py.sim.decode_runs import run_ends_of


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=20), st.integers(0, 10**15), st.integers(0, 10**9))
@example([0.0], 0, 0)
def test_a_run_of_steps_ends_as_its_steps_do_one_by_one(seconds: list[float], now: int, overhead: int) -> None:
    at, expected = now, []
    for time in seconds:
        at += max(1, round(time * 10**12) + overhead)
        expected.append(at)
    assert list(run_ends_of(now, seconds, overhead)) == expected
    assert list(run_ends_of(now, np.array(seconds), overhead)) == expected


@pytest.mark.parametrize("seconds", [[2.0] * 4, np.full(4, 2.0)], ids=["one by one", "at once"])
def test_a_run_of_steps_is_cut_where_the_clock_ends(seconds: Any) -> None:
    now = NEVER - 5 * 10**12
    assert list(run_ends_of(now, seconds, 0)) == [now + 2 * 10**12, now + 4 * 10**12]
