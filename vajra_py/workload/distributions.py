"""Distributions of lengths, gaps and think times, and joint draws of two of them.

A distribution is defined by its inverse: it maps each standard normal number z to the value at the same quantile. So a
Gaussian copula (correlated z) can join any two distributions. Each value depends on a single z, so further draws never
change earlier values. The unit of values depends on the use: tokens for lengths, seconds for times.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from vajra_py.workload.arrays import F64, I64

__all__ = [
    "Constant",
    "Distribution",
    "Geometric",
    "Lognormal",
    "LognormalMixture",
    "QuantileTable",
    "Uniform",
    "correlated_normals",
    "normal_cdf",
    "sample",
    "to_tokens",
    "zipf_shares",
]

MIXTURE_GRID = 4096
MIXTURE_REACH = 6.0
NonNegative: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
LARGEST = float(np.iinfo(np.int32).max)
Bounded: TypeAlias = Annotated[float, Field(ge=0, le=LARGEST, allow_inf_nan=False)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class _Clipped(_Model):
    min: Bounded | None = Field(None, description="Smallest value; smaller ones are raised to it. None: no bound.")
    max: NonNegative | None = Field(None, description="Largest value; larger ones are lowered to it. None: no bound.")

    @model_validator(mode="after")
    def _ordered(self) -> _Clipped:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min is above max ({self.min:g} > {self.max:g}). Allowed: min <= max")
        return self

    def _clip(self, values: F64) -> F64:
        if self.min is None and self.max is None:
            return values
        return np.clip(values, self.min, self.max)


class Constant(_Model):
    """Always the same value."""

    type: Literal["constant"] = "constant"
    value: Bounded = Field(description="The value.")

    def quantiles(self, z: F64) -> F64:
        """Return the value for each element of z."""
        return np.full(len(z), float(self.value))


class Uniform(_Model):
    """Uniform between two bounds; for lengths, each whole number from min to max is equally likely."""

    type: Literal["uniform"] = "uniform"
    min: Bounded = Field(description="Smallest value.")
    max: Bounded = Field(description="Largest value.")

    @model_validator(mode="after")
    def _ordered(self) -> Uniform:
        if self.min > self.max:
            raise ValueError(f"min is above max ({self.min:g} > {self.max:g}). Allowed: min <= max")
        return self

    def quantiles(self, z: F64) -> F64:
        """Return the values at the quantiles of z."""
        return self.min + (self.max - self.min) * normal_cdf(z)


class Lognormal(_Clipped):
    """exp(N(mu, sigma)), clipped; before clipping, the median is exp(mu) and the mean exp(mu + sigma^2 / 2)."""

    type: Literal["lognormal"] = "lognormal"
    mu: Finite = Field(description="Mean of the natural logarithm of the value.")
    sigma: NonNegative = Field(description="Standard deviation of the natural logarithm of the value.")

    def quantiles(self, z: F64) -> F64:
        """Return the values at the quantiles of z."""
        return self._clip(np.exp(np.minimum(self.mu + self.sigma * z, math.log(LARGEST))))


class LognormalPart(_Model):
    """One part of a mixture."""

    weight: NonNegative = Field(description="Share of this part, relative to the others'.")
    mu: Finite = Field(description="Mean of the natural logarithm of the value.")
    sigma: Positive = Field(description="Standard deviation of the natural logarithm of the value.")


class LognormalMixture(_Clipped):
    """A mixture of lognormal parts, clipped; two parts describe most prompt lengths well."""

    type: Literal["mixture"] = "mixture"
    parts: tuple[LognormalPart, ...] = Field(min_length=1, description="The parts.")

    @model_validator(mode="after")
    def _weighted(self) -> LognormalMixture:
        if not sum(part.weight for part in self.parts) > 0:
            raise ValueError("all weights are 0. Allowed: at least one weight > 0")
        return self

    def quantiles(self, z: F64) -> F64:
        """Return the values at the quantiles of z, by inverting the distribution function on a logarithmic grid."""
        low = min(part.mu - MIXTURE_REACH * part.sigma for part in self.parts)
        high = max(part.mu + MIXTURE_REACH * part.sigma for part in self.parts)
        edges = [
            np.linspace(part.mu - MIXTURE_REACH * part.sigma, part.mu + MIXTURE_REACH * part.sigma, MIXTURE_GRID)
            for part in self.parts
        ]
        grid = np.unique(np.concatenate([*edges, [low, high]]))
        total = sum(part.weight for part in self.parts)
        cdf = np.zeros(len(grid))
        for part in self.parts:
            cdf += part.weight / total * normal_cdf((grid - part.mu) / part.sigma)
        return self._clip(np.exp(np.minimum(np.interp(normal_cdf(z), cdf, grid), math.log(LARGEST))))


class Geometric(_Model):
    """Number of trials up to and including the first success: 1, 2, …, with mean 1 / p."""

    type: Literal["geometric"] = "geometric"
    p: float = Field(gt=0, le=1, description="Probability that a trial is the last one.")
    max: int | None = Field(
        None, ge=1, le=2**31 - 1, description="Largest value; larger ones are lowered to it. None: no bound."
    )

    def quantiles(self, z: F64) -> F64:
        """Return the values at the quantiles of z."""
        if self.p == 1:
            return np.ones(len(z))
        survival = np.maximum(normal_cdf(-z), 1e-300)
        values = np.maximum(np.ceil(np.log(survival) / math.log1p(-self.p)), 1.0)
        return values if self.max is None else np.minimum(values, float(self.max))


class QuantileTable(_Model):
    """Values at given probabilities, interpolated in between.

    Between entries, the logarithm of the value, or with `linear` the value itself, is linear in the probability.
    """

    type: Literal["quantiles"] = "quantiles"
    probabilities: tuple[Finite, ...] = Field(min_length=2, description="Ascending, the first 0, the last 1.")
    values: tuple[Bounded, ...] = Field(min_length=2, description="Value at each probability, never descending.")
    interpolation: Literal["log", "linear"] = Field(
        "log",
        description="Interpolation between entries, linear in probability: of the logarithm of the value (values below `floor` count as `floor`), or of the value.",
    )
    floor: Positive = Field(1.0, le=LARGEST, description="Smallest value of a table that is interpolated by logarithm.")

    @model_validator(mode="after")
    def _ascending(self) -> QuantileTable:
        if len(self.probabilities) != len(self.values):
            counts = f"{len(self.probabilities)} probabilities, {len(self.values)} values"
            raise ValueError(f"the table is uneven ({counts}). Allowed: one value per probability")
        if self.probabilities[0] != 0 or self.probabilities[-1] != 1 or np.any(np.diff(self.probabilities) <= 0):
            raise ValueError(f"probabilities do not ascend from 0 to 1 ({self.probabilities}). Allowed: 0 < … < 1")
        if np.any(np.diff(self.values) < 0):
            raise ValueError(f"values descend ({self.values}). Allowed: values that never descend")
        return self

    def quantiles(self, z: F64) -> F64:
        """Return the values at the quantiles of z."""
        uniform = normal_cdf(z)
        if self.interpolation == "linear":
            return np.interp(uniform, self.probabilities, self.values)
        return np.exp(np.interp(uniform, self.probabilities, np.log(np.maximum(self.values, self.floor))))


Distribution: TypeAlias = Annotated[
    Constant | Uniform | Lognormal | LognormalMixture | Geometric | QuantileTable, Field(discriminator="type")
]
"""Any of the distributions, distinguished by `type`."""


def normal_cdf(z: F64) -> F64:
    """Return the standard normal distribution function at z, to double precision even in the tails."""
    scaled = (z * -math.sqrt(0.5)).tolist()
    return np.fromiter(map(math.erfc, scaled), dtype=np.float64, count=len(scaled)) * 0.5


def correlated_normals(rng: np.random.Generator, size: int, correlation: float) -> tuple[F64, F64]:
    """Return two arrays of shape [size] of standard normal numbers with this correlation.

    A larger `size` extends the arrays without changing their first elements.
    """
    z = rng.standard_normal((size, 2))
    first = z[:, 0]
    return first, correlation * first + math.sqrt(1.0 - correlation * correlation) * z[:, 1]


def sample(distribution: Distribution, rng: np.random.Generator, size: int) -> F64:
    """Draw `size` independent values."""
    return distribution.quantiles(rng.standard_normal(size))


def to_tokens(distribution: Distribution, z: F64, least: int = 1) -> I64:
    """Return the values at the quantiles of z, rounded to whole numbers of tokens, at least `least`."""
    if isinstance(distribution, Uniform):
        low, high = math.ceil(distribution.min), math.floor(distribution.max)
        values = low + np.floor(normal_cdf(z) * (high - low + 1))
        return _whole(np.minimum(values, high), least)
    return _whole(np.rint(distribution.quantiles(z)), least)


def zipf_shares(count: int, exponent: float) -> F64:
    """Return `count` shares that add up to 1; the k-th (from 1) is proportional to 1 / k^exponent."""
    weights = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    shares: F64 = weights / weights.sum()
    return shares


def _whole(values: F64, least: int) -> I64:
    return np.minimum(np.maximum(values, float(least)), LARGEST).astype(np.int64)
