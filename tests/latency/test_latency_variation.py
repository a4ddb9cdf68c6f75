"""Does a variation keep what was measured, and does it stay 1 on average?"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vajra_py.latency import Variation, factors_among

multiples = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=400)


@given(multiples)
def test_factors_are_one_on_average_and_as_far_apart_as_what_was_measured(sample: list[float]) -> None:
    found = factors_among(sample)
    assert np.mean(found) == pytest.approx(1.0)
    assert len(found) == min(100, len(sample))
    apart = found[-1] / found[0]
    assert apart <= max(sample) / min(sample) * (1 + 1e-9)
    if len(sample) <= 100:
        assert apart == pytest.approx(max(sample) / min(sample))


@given(st.integers(0, 1000))
def test_even_luck_is_distributed_as_what_was_measured(seed: int) -> None:
    stream = np.random.default_rng(seed)
    narrow, wide = stream.lognormal(0.0, 0.1, 2000), stream.lognormal(0.0, 0.3, 149)
    variation = Variation(factors_among(narrow.tolist()), factors_among(wide.tolist()))
    quantile = stream.random(20_000)
    for has_prompts, sample in ((False, narrow), (True, wide)):
        drawn = variation.at(quantile, has_prompts=has_prompts)
        assert drawn.mean() == pytest.approx(1.0, abs=0.02)
        for part in (0.1, 0.5, 0.9):
            assert np.quantile(drawn, part) == pytest.approx(np.quantile(sample, part) / sample.mean(), rel=0.06)


def test_a_sample_that_does_not_divide_into_hundredths_keeps_its_shares() -> None:
    factors = np.array(factors_among([1.0] * 100 + [2.0] * 49))
    assert (factors > 1.2).mean() == pytest.approx(49 / 149, abs=0.01)
    assert factors.max() / factors.min() == pytest.approx(2.0)


def test_who_is_luckier_with_one_kind_is_with_the_other() -> None:
    variation = Variation((0.5, 0.75, 1.0, 1.75), (0.9, 1.1))
    quantile = np.array([0.0, 0.3, 0.6, 0.999999])
    assert variation.at(quantile, has_prompts=False).tolist() == [0.5, 0.75, 1.0, 1.75]
    assert variation.at(quantile, has_prompts=True).tolist() == [0.9, 0.9, 1.1, 1.1]


@pytest.mark.parametrize("factors", [(), (0.0, 2.0), (1.5, 0.5), (float("nan"),), (1.0, 1.1)])
def test_what_is_no_variation_is_refused(factors: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="factors of decodes"):
        Variation(factors, (1.0,))
    with pytest.raises(ValueError, match="factors of prompts"):
        Variation((1.0,), factors)
