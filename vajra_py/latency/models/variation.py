"""Variation of equal steps: measured durations as multiples of the prediction for their shape."""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose, isfinite
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

_MOST_FACTORS = 100

Factors: TypeAlias = tuple[float, ...]
"""Equally likely multiples of the predicted duration, ascending, with mean 1, since predictions are the mean."""


class Variation(Struct, frozen=True):
    """Variation of equal steps, separately for steps that have only decodes and for steps with prompts.

    Raises `ValueError` for invalid `Factors`.
    """

    decodes: Factors
    prompts: Factors

    def __post_init__(self) -> None:
        for kind, factors in (("decodes", self.decodes), ("prompts", self.prompts)):
            if not factors or not all(isfinite(one) and one > 0 for one in factors) or list(factors) != sorted(factors):
                raise ValueError(f"the variation's factors of {kind} are not positive numbers in ascending order")
            if not isclose(sum(factors) / len(factors), 1.0, rel_tol=1e-6):
                raise ValueError(f"the variation's factors of {kind} are not 1 on average")

    def at(self, quantile: npt.NDArray[np.float64], *, has_prompts: bool) -> npt.NDArray[np.float64]:
        """Return the factors of steps at these quantiles: from 0 (the fastest) to 1 (exclusive)."""
        factors = np.array(self.prompts if has_prompts else self.decodes)
        found: npt.NDArray[np.float64] = factors[(quantile * len(factors)).astype(np.int64)]
        return found


def factors_among(multiples: Sequence[float]) -> Factors:
    """Return the factors of a sample: the means of 100 equal parts of the sorted sample, divided by the sample's mean.

    For a sample of at most 100 values, they are its values relative to their mean.
    """
    number = len(multiples)
    sums = np.concatenate([[0.0], np.sort(np.array(multiples, np.float64)).cumsum()])
    # The sorted values are divided into at most 100 equal parts. If the boundary of two parts falls on a value,
    # interpolation counts a share of it in each. The means ascend except for rounding errors, which sorting removes.
    cuts = np.linspace(0, number, min(number, _MOST_FACTORS) + 1)
    means = np.sort(np.diff(np.interp(cuts, np.arange(number + 1), sums)))
    return tuple((means / means.mean()).tolist())
