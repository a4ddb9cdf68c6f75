"""Paired comparison: exact where the truth is known, honest about chance."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from vajra_py.metrics.comparison.pairs import difference, holm


def by_seed(values: list[float]) -> dict[str, float]:
    return {str(seed): value for seed, value in enumerate(values)}


def test_a_common_seed_cancels_what_it_does_to_both() -> None:
    rng = np.random.default_rng(0)
    luck = rng.lognormal(2, 1, 6)
    first, second = luck + rng.normal(0, 0.01, 6), luck - 0.1 + rng.normal(0, 0.01, 6)
    found = difference(by_seed(list(first)), by_seed(list(second)))
    assert found is not None
    assert found.is_paired
    reference = stats.ttest_rel(first, second)
    assert found.p_value == pytest.approx(reference.pvalue)
    low, high = reference.confidence_interval(0.95)
    assert (found.interval.low, found.interval.high) == pytest.approx((low, high))
    assert (found.p_value < 0.001, found.above_fraction) == (True, 1.0)
    assert stats.ttest_ind(first, second).pvalue > 0.5


def test_without_common_seeds_the_samples_are_independent() -> None:
    rng = np.random.default_rng(1)
    ours, theirs = rng.normal(1, 1, 5), rng.normal(0, 3, 8)
    found = difference(by_seed(list(ours)), {f"x{seed}": value for seed, value in enumerate(theirs)})
    assert found is not None
    assert not found.is_paired
    reference = stats.ttest_ind(ours, theirs, equal_var=False)
    assert found.p_value == pytest.approx(reference.pvalue)
    assert found.interval.low == pytest.approx(reference.confidence_interval(0.95).low)


def test_what_cannot_be_tested_is_not() -> None:
    assert difference(by_seed([1.0]), by_seed([2.0])) is None
    same = difference(by_seed([1.0, 2.0]), by_seed([1.0, 2.0]))
    assert same is not None
    assert (same.p_value, same.mean, same.above_fraction) == (1.0, 0.0, 0.5)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_never_lowers_and_never_rejects_more_than_bonferroni_allows_for_the_smallest(
    p_values: list[float],
) -> None:
    corrected = holm(p_values)
    assert all(own >= raw for own, raw in zip(corrected, p_values, strict=True))
    assert min(corrected) == min(1.0, len(p_values) * min(p_values))
    order = np.argsort(p_values, kind="stable")
    assert list(np.array(corrected)[order]) == sorted(corrected)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_false_findings_among_many_equal_settings_are_rare() -> None:
    rng = np.random.default_rng(2)
    wrong = 0
    for _ in range(200):
        values = rng.exponential(1, (4, 6))
        pairs = [difference(by_seed(list(values[i])), by_seed(list(values[j]))) for i in range(4) for j in range(i)]
        wrong += min(holm([one.p_value for one in pairs if one is not None])) < 0.05
    assert wrong <= 16  # 8 %; 5 % and twice its standard error
