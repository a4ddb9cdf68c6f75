"""Does a variation keep what was measured, and does it stay 1 on average?"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vajra_py.latency import Variation

multiples = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=400)


@given(multiples)
def test_it_is_one_on_average_and_keeps_how_far_values_lie_apart(sample: list[float]) -> None:
    found = Variation.among(sample)
    assert np.mean(found.factors) == pytest.approx(1.0)
    assert len(found.factors) == min(100, len(sample))
    apart = found.factors[-1] / found.factors[0]
    assert apart <= max(sample) / min(sample) * (1 + 1e-9)
    if len(sample) <= 100:
        assert apart == pytest.approx(max(sample) / min(sample))


@given(st.integers(0, 1000))
def test_what_is_drawn_is_distributed_as_what_was_measured(seed: int) -> None:
    stream = np.random.default_rng(seed)
    sample = stream.lognormal(0.0, 0.1, 2000)
    drawn = Variation.among(sample.tolist()).draw(stream, 20_000)
    assert drawn.mean() == pytest.approx(1.0, abs=0.01)
    for part in (0.1, 0.5, 0.9):
        assert np.quantile(drawn, part) == pytest.approx(np.quantile(sample, part) / sample.mean(), abs=0.01)


@pytest.mark.parametrize("factors", [(), (0.0, 2.0), (1.5, 0.5), (float("nan"),), (1.0, 1.1)])
def test_what_is_no_variation_is_refused(factors: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="factors of the variation"):
        Variation(factors)
