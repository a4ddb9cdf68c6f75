"""Definitions against examples worked out by hand, and quantiles against the lists that they stand for."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vajra_py.metrics.definitions import (
    Outcomes,
    ServiceWeights,
    Slo,
    SloDefaults,
    SloStatus,
    SloTargets,
    Window,
    attained_service,
    e2e_s,
    gap_statistics,
    jain_index,
    judge_slos,
    quantiles,
    tpot_s,
    ttft_s,
    weighted_quantiles,
)

NAN = float("nan")
NONE, UNDECIDED, MISSED, MET = (int(status) for status in SloStatus)


def outcomes(*rows: tuple[float, float, float, int, str]) -> Outcomes:
    """Rows of (arrived, first token, ended, output tokens, reason)."""
    arrived, first, ended, tokens, reasons = zip(*rows, strict=True)
    return Outcomes(
        np.array(arrived, dtype=float),
        np.array(first, dtype=float),
        np.array(ended, dtype=float),
        np.array(tokens),
        np.array([reason in ("stop", "length") for reason in reasons]),
        np.array([reason in ("rejected", "expired", "failed") for reason in reasons]),
    )


def targets(ttft: float = NAN, tpot: float = NAN, deadline: float = NAN, count: int = 1) -> SloTargets:
    return SloTargets(np.full(count, ttft), np.full(count, tpot), np.full(count, deadline))


def test_latencies_of_a_request_worked_out_by_hand() -> None:
    # Arrives at 1 s, tokens at 3, 3.5 and 5 s: TTFT 2 s, E2E 4 s, two gaps that sum to 2 s.
    own = outcomes((1.0, 3.0, 5.0, 3, "stop"))
    assert ttft_s(own).tolist() == [2.0]
    assert e2e_s(own).tolist() == [4.0]
    assert tpot_s(own).tolist() == [1.0]
    gaps = gap_statistics(np.array([3.0, 3.5, 5.0]))
    assert (gaps.p50_s, gaps.p99_s, gaps.max_s) == (0.5, 1.5, 1.5)


def test_one_token_has_no_gap_and_no_tpot() -> None:
    own = outcomes((0.0, 1.0, 1.0, 1, "length"))
    assert e2e_s(own).tolist() == [1.0]
    assert math.isnan(tpot_s(own)[0])
    assert all(
        math.isnan(value) for value in (gap_statistics(np.array([1.0])).p50_s, gap_statistics(np.zeros(0)).max_s)
    )


@pytest.mark.parametrize("reason", ["aborted", "expired", "rejected", "failed", "unfinished"])
def test_requests_without_an_answer_have_no_end_to_end_latency(reason: str) -> None:
    own = outcomes((0.0, 1.0, 5.0, 4, reason))
    assert math.isnan(e2e_s(own)[0])
    assert math.isnan(tpot_s(own)[0])
    assert ttft_s(own).tolist() == [1.0]


@pytest.mark.parametrize(
    ("row", "given", "expected"),
    [
        ((0, 1, 5, 5, "stop"), {}, NONE),
        ((0, 1, 5, 5, "stop"), {"ttft": 1.0, "tpot": 1.0, "deadline": 5.0}, MET),
        ((0, 1, 5, 5, "stop"), {"ttft": 0.99}, MISSED),
        ((0, 1, 5, 5, "stop"), {"ttft": 1.0, "tpot": 0.99}, MISSED),
        ((0, 1, 5, 5, "stop"), {"deadline": 4.99}, MISSED),
        ((0, 1, 1, 1, "stop"), {"tpot": 0.001}, MET),
        ((0, NAN, 2, 0, "expired"), {"ttft": 10.0}, MISSED),
        ((0, NAN, 0, 0, "rejected"), {"deadline": 10.0}, MISSED),
        ((0, 1, 2, 3, "failed"), {"ttft": 1.0}, MISSED),
        ((0, NAN, 2, 0, "aborted"), {"ttft": 10.0}, UNDECIDED),
        ((0, NAN, 20, 0, "aborted"), {"ttft": 10.0}, MISSED),
        ((0, 1, 2, 4, "aborted"), {"ttft": 1.0}, UNDECIDED),
        ((0, 1, NAN, 4, "unfinished"), {"ttft": 0.5}, MISSED),
        ((0, 1, NAN, 4, "unfinished"), {"ttft": 1.0, "tpot": 1.0}, UNDECIDED),
    ],
)
def test_slo_verdicts(row: tuple[float, float, float, int, str], given: dict[str, float], expected: int) -> None:
    assert judge_slos(outcomes(row), targets(**given)).overall.tolist() == [expected]


def test_what_waits_at_the_end_of_the_run_has_waited_until_then() -> None:
    rows = ((0.0, NAN, NAN, 0, "unfinished"), (6.0, 7.0, 9.0, 2, "stop"))
    own = outcomes(*rows)
    assert judge_slos(own, targets(ttft=8.0, count=2)).overall.tolist() == [MISSED, MET]
    assert judge_slos(own, targets(ttft=9.0, count=2)).overall.tolist() == [UNDECIDED, MET]
    assert judge_slos(own, targets(ttft=9.0, count=2), observed_until=20.0).overall.tolist() == [MISSED, MET]


def test_a_dropped_request_meets_the_slo_of_a_first_token_that_came() -> None:
    judged = judge_slos(outcomes((0, 1, 2, 3, "failed")), targets(ttft=1.0, tpot=9.0, deadline=9.0))
    assert (judged.ttft[0], judged.tpot[0], judged.deadline[0]) == (MET, MISSED, MISSED)


def test_class_defaults_fill_in_for_what_a_class_leaves_open() -> None:
    defaults = SloDefaults(Slo(ttft_s=5.0, e2e_s=60.0, tbt_s=0.2), {"gold": Slo(ttft_s=1.0), "chat": Slo(tbt_s=0.1)})
    assert defaults.of("gold") == Slo(ttft_s=1.0, tpot_s=None, e2e_s=60.0, tbt_s=0.2)
    assert defaults.of("chat") == Slo(ttft_s=5.0, e2e_s=60.0, tbt_s=0.1)
    assert defaults.of("other") == Slo(ttft_s=5.0, e2e_s=60.0, tbt_s=0.2)


@pytest.mark.parametrize(
    ("values", "fraction", "expected"),
    [([4.0, 1.0, 3.0, 2.0], 0.5, 2.0), ([4.0, 1.0, 3.0, 2.0], 0.51, 3.0), ([1.0], 0.99, 1.0), ([2.0, 1.0], 0.0, 1.0)],
)
def test_nearest_rank_by_hand(values: list[float], fraction: float, expected: float) -> None:
    assert quantiles(np.array(values), (fraction,)) == [expected]


def test_a_fraction_that_is_not_exact_in_binary_does_not_move_the_rank() -> None:
    # 0.07 * 100 is 7.000000000000001 in floating point; the 7th of 100 values is meant.
    assert quantiles(np.arange(1.0, 101.0), (0.07, 0.29, 0.99)) == [7.0, 29.0, 99.0]


def test_quantiles_leave_out_what_did_not_happen() -> None:
    assert quantiles(np.array([NAN, 3.0, NAN, 1.0]), (0.5, 1.0)) == [1.0, 3.0]
    assert all(math.isnan(value) for value in quantiles(np.array([NAN]), (0.5, 0.9)))


@given(
    st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 9)), min_size=1, max_size=40),
    st.lists(st.integers(0, 1000), min_size=1, max_size=4),
)
def test_weighted_quantiles_are_those_of_the_list_written_out(
    pairs: list[tuple[int, int]], permille: list[int]
) -> None:
    values = np.array([float(value) for value, _ in pairs])
    weights = np.array([weight for _, weight in pairs])
    written_out = sorted(np.repeat(values, weights).tolist())
    fractions = [thousandths / 1000 for thousandths in permille]
    found = weighted_quantiles(values, weights, fractions)
    if not written_out:
        assert all(math.isnan(value) for value in found)
        return
    ranks = [max(math.ceil(Fraction(thousandths, 1000) * len(written_out)), 1) for thousandths in permille]
    assert found == [written_out[rank - 1] for rank in ranks]
    assert found == quantiles(np.array(written_out), fractions)


def test_jain_index() -> None:
    assert jain_index(np.array([3.0, 3.0, 3.0])) == pytest.approx(1.0)
    assert jain_index(np.array([9.0, 0.0, 0.0])) == pytest.approx(1 / 3)
    assert jain_index(np.array([1.0, 2.0])) == pytest.approx(9 / 10)
    assert math.isnan(jain_index(np.zeros(3)))
    assert math.isnan(jain_index(np.zeros(0)))


def test_service_counts_a_prompt_once_its_answer_begins() -> None:
    served = attained_service(np.array([100, 100]), np.array([10, 0]), np.array([True, False]), ServiceWeights())
    assert served.tolist() == [120.0, 0.0]


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="tenant 'a'"):
        ServiceWeights(tenants={"a": 0.0})


@pytest.mark.parametrize(("start", "end"), [(2.0, 1.0), (0.0, math.inf), (NAN, 1.0)])
def test_a_window_is_a_range(start: float, end: float) -> None:
    with pytest.raises(ValueError, match="window"):
        Window(start, end)


def test_a_window_holds_its_ends_and_never_a_missing_moment() -> None:
    assert Window(1.0, 2.0).holds(np.array([0.9, 1.0, 2.0, 2.1, NAN])).tolist() == [False, True, True, False, False]
