"""How much do equal steps differ? What single steps take, as multiples of what is predicted for their shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose, isfinite

import numpy as np
import numpy.typing as npt

_MOST_FACTORS = 100


@dataclass(frozen=True, slots=True)
class Variation:
    """Multiples that are equally likely, ascending, 1 on average: predictions are of the mean.

    Raises `ValueError` for anything else.
    """

    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        factors = self.factors
        if not factors or not all(isfinite(one) and one > 0 for one in factors) or list(factors) != sorted(factors):
            raise ValueError("the factors of the variation are not positive numbers in ascending order")
        if not isclose(sum(factors) / len(factors), 1.0, rel_tol=1e-6):
            raise ValueError("the factors of the variation are not 1 on average")

    @classmethod
    def among(cls, multiples: Sequence[float]) -> Variation:
        """That of a sample, whatever its mean: the means of its hundredths (of every value, where there are fewer)."""
        ascending = np.sort(np.array(multiples, np.float64))
        parts = np.array_split(ascending, min(len(ascending), _MOST_FACTORS))
        means = np.array([part.mean() for part in parts])
        return cls(tuple((means / means.mean()).tolist()))

    def draw(self, stream: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
        """Factors of so many steps, independent of each other."""
        factors = np.array(self.factors)
        drawn: npt.NDArray[np.float64] = factors[stream.integers(0, len(factors), count)]
        return drawn
