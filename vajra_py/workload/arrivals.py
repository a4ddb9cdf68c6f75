"""Arrival processes of synthetic workloads.

Each process draws only from the random streams passed to it, and yields the same first arrivals for any number of
requests. Rates are in requests per second. Renewal processes draw gaps; modulated processes (on/off, piecewise, Cox)
draw a Poisson process of rate 1 in operational time and map it through the inverse of the integrated rate.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from vajra_py.errors import WorkloadError
from vajra_py.workload.arrays import F64
from vajra_py.workload.distributions import Finite, NonNegative, Positive

__all__ = [
    "ArrivalProcess",
    "AtOnce",
    "CoxGamma",
    "FixedInterval",
    "Gamma",
    "OnOff",
    "Piece",
    "PiecewiseConstant",
    "Poisson",
    "QuantileGaps",
    "Weibull",
    "arrival_times",
]

BLOCK = 4096
MAX_REQUESTS = 1_000_000_000


class _Process(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    @abstractmethod
    def blocks(self, rng: np.random.Generator, modulation: np.random.Generator) -> Iterator[F64]:
        """Yield arrays of arrival times in seconds, ascending throughout.

        Arrivals are drawn from `rng`, and changes of the rate from `modulation`.
        """


class _Renewal(_Process):
    @abstractmethod
    def gaps(self, rng: np.random.Generator, size: int) -> F64:
        """Return `size` inter-arrival times in seconds."""

    def blocks(self, rng: np.random.Generator, modulation: np.random.Generator) -> Iterator[F64]:
        """Yield the cumulative sums of the gaps."""
        now = 0.0
        while True:
            times = now + np.cumsum(self.gaps(rng, BLOCK))
            now = float(times[-1])
            yield times


class Poisson(_Renewal):
    """Independent arrivals: exponential gaps (CV 1)."""

    type: Literal["poisson"] = "poisson"
    rate: Positive = Field(description="Mean rate in requests per second.")

    def gaps(self, rng: np.random.Generator, size: int) -> F64:
        """Return `size` inter-arrival times in seconds."""
        return rng.exponential(1.0 / self.rate, size)


class Gamma(_Renewal):
    """Gamma-distributed gaps: burstier than Poisson above a CV of 1, more even below."""

    type: Literal["gamma"] = "gamma"
    rate: Positive = Field(description="Mean rate in requests per second.")
    cv: Positive = Field(
        ge=1e-3, le=1e3, description="Coefficient of variation of the gaps (standard deviation / mean); 1 is Poisson."
    )

    def gaps(self, rng: np.random.Generator, size: int) -> F64:
        """Return `size` inter-arrival times in seconds."""
        shape = 1.0 / (self.cv * self.cv)
        return rng.gamma(shape, 1.0 / (shape * self.rate), size)


class Weibull(_Renewal):
    """Weibull-distributed gaps: burstier than Poisson below a shape of 1."""

    type: Literal["weibull"] = "weibull"
    rate: Positive = Field(description="Mean rate in requests per second.")
    shape: Positive = Field(ge=0.05, le=1e3, description="Shape of the distribution of the gaps; 1 is Poisson.")

    def gaps(self, rng: np.random.Generator, size: int) -> F64:
        """Return `size` inter-arrival times in seconds."""
        gaps: F64 = rng.weibull(self.shape, size) / (self.rate * math.gamma(1.0 + 1.0 / self.shape))
        return gaps


class QuantileGaps(_Renewal):
    """Gaps drawn from a table of quantiles and scaled to the rate.

    Between entries, the logarithm of the gap is linear in the probability.
    """

    type: Literal["quantile_gaps"] = "quantile_gaps"
    rate: Positive = Field(description="Mean rate in requests per second.")
    probabilities: tuple[Finite, ...] = Field(min_length=2, description="Ascending, the first 0, the last 1.")
    gaps_s: tuple[Positive, ...] = Field(
        min_length=2, description="Gap in seconds at each probability, never descending."
    )

    @model_validator(mode="after")
    def _ascending(self) -> QuantileGaps:
        probabilities, gaps = self.probabilities, self.gaps_s
        if len(probabilities) != len(gaps) or probabilities[0] != 0 or probabilities[-1] != 1:
            raise ValueError(
                "the table is uneven or does not span 0 to 1. Allowed: one gap per probability, from 0 to 1"
            )
        if np.any(np.diff(probabilities) <= 0) or np.any(np.diff(gaps) < 0):
            raise ValueError("the table descends. Allowed: ascending probabilities, gaps that never descend")
        return self

    def gaps(self, rng: np.random.Generator, size: int) -> F64:
        """Return `size` inter-arrival times in seconds."""
        logs = np.log(self.gaps_s)
        return np.exp(np.interp(rng.random(size), self.probabilities, logs)) / (self.rate * self._mean_gap_s())

    def _mean_gap_s(self) -> float:
        """Return the mean gap of the interpolated table in seconds: the integral of the gap over the probability.

        Between entries, the gap is an exponential function of the probability.
        """
        low, high = np.array(self.gaps_s[:-1]), np.array(self.gaps_s[1:])
        ratio = np.log(high / low)
        flat = ratio < 1e-9
        means = np.where(flat, low, (high - low) / np.where(flat, 1.0, ratio))
        return float((means * np.diff(self.probabilities)).sum())


class FixedInterval(_Process):
    """One request every 1 / rate seconds, the first at 0."""

    type: Literal["fixed"] = "fixed"
    rate: Positive = Field(description="Rate in requests per second.")

    def blocks(self, rng: np.random.Generator, modulation: np.random.Generator) -> Iterator[F64]:
        """Yield the multiples of the interval."""
        start = 0
        while True:
            yield np.arange(start, start + BLOCK) / self.rate
            start += BLOCK


class AtOnce(_Process):
    """All requests at time 0, to measure how long a batch of work takes."""

    type: Literal["at_once"] = "at_once"

    def blocks(self, rng: np.random.Generator, modulation: np.random.Generator) -> Iterator[F64]:
        """Yield arrays of zeros."""
        while True:
            yield np.zeros(BLOCK)


class _Modulated(_Process):
    @abstractmethod
    def stretches(self, modulation: np.random.Generator) -> Iterator[tuple[F64, F64]]:
        """Yield arrays of durations (seconds) and rates (requests per second) of the next pieces of constant rate."""

    def blocks(self, rng: np.random.Generator, modulation: np.random.Generator) -> Iterator[F64]:
        """Yield the arrivals of a Poisson process of rate 1, mapped through the inverse of the integrated rate."""
        stretches = self.stretches(modulation)
        # `begin_s` is the start of the first piece in `durations`; `work` is the integral of the rate from 0 to
        # `begin_s`.
        begin_s = work = 0.0
        durations = rates = np.zeros(0)
        drawn = 0.0
        while True:
            targets = drawn + np.cumsum(rng.exponential(1.0, BLOCK))
            drawn = float(targets[-1])
            while work + float((durations * rates).sum()) < drawn:
                more = next(stretches, None)
                if more is None:
                    yield _inverse(targets, (begin_s, work), durations, rates)
                    return
                durations, rates = np.concatenate([durations, more[0]]), np.concatenate([rates, more[1]])
            yield _inverse(targets, (begin_s, work), durations, rates)
            done = int(np.searchsorted(work + np.cumsum(durations * rates), drawn, side="left"))
            begin_s += float(durations[:done].sum())
            work += float((durations[:done] * rates[:done]).sum())
            durations, rates = durations[done:], rates[done:]


def _inverse(targets: F64, origin: tuple[float, float], durations: F64, rates: F64) -> F64:
    """Return the times in seconds at which the integrated rate reaches each target; unreached targets are dropped."""
    begin_s, work = origin
    reached = np.concatenate([[work], work + np.cumsum(durations * rates)])
    starts = np.concatenate([[begin_s], begin_s + np.cumsum(durations)])
    targets = targets[targets <= reached[-1]]
    piece = np.searchsorted(reached, targets, side="left") - 1
    times: F64 = starts[piece] + (targets - reached[piece]) / rates[piece]
    return times


class OnOff(_Modulated):
    """Bursts: Poisson arrivals whose rate alternates between on and off times of exponential length (a two-state
    Markov-modulated process).
    """

    type: Literal["on_off"] = "on_off"
    rate: Positive = Field(description="Mean rate over on and off times, in requests per second.")
    mean_on_s: Positive = Field(description="Mean length of an on time, in seconds.")
    mean_off_s: Positive = Field(description="Mean length of an off time, in seconds.")
    off_rate_fraction: float = Field(
        0.0, ge=0, le=1, description="Rate in an off time as a fraction of that in an on time."
    )

    def stretches(self, modulation: np.random.Generator) -> Iterator[tuple[F64, F64]]:
        """Yield on and off times in turn. The first one is an on time with a probability equal to the mean fraction of
        time that is on.
        """
        cycle_s = self.mean_on_s + self.mean_off_s
        on_rate = self.rate * cycle_s / (self.mean_on_s + self.off_rate_fraction * self.mean_off_s)
        states = ((self.mean_on_s, on_rate), (self.mean_off_s, on_rate * self.off_rate_fraction))
        if modulation.random() >= self.mean_on_s / cycle_s:
            states = (states[1], states[0])
        means = np.tile([mean for mean, _ in states], BLOCK // 2)
        rates = np.tile([rate for _, rate in states], BLOCK // 2)
        while True:
            yield modulation.exponential(1.0, BLOCK) * means, rates


class Piece(BaseModel):
    """Interval of constant rate."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    duration_s: Positive = Field(description="Length of the period, seconds.")
    rate: NonNegative = Field(description="Rate in requests per second; 0 is silence.")


class PiecewiseConstant(_Modulated):
    """Poisson arrivals whose rate changes at given times, for ramps, steps or the profile of a day."""

    type: Literal["piecewise"] = "piecewise"
    pieces: tuple[Piece, ...] = Field(
        alias="pieces", min_length=1, description="Consecutive periods, each with its rate."
    )
    repeat: bool = Field(False, description="Repeat after the last period; otherwise arrivals end with it.")

    @model_validator(mode="after")
    def _any_rate(self) -> PiecewiseConstant:
        if not any(piece.rate for piece in self.pieces):
            raise ValueError("all rates are 0. Allowed: at least one rate > 0")
        return self

    @property
    def rate(self) -> float:
        """Mean rate over the pieces, in requests per second."""
        return sum(piece.duration_s * piece.rate for piece in self.pieces) / self.duration_s

    @property
    def duration_s(self) -> float:
        """Length of all pieces in seconds."""
        return sum(piece.duration_s for piece in self.pieces)

    def stretches(self, modulation: np.random.Generator) -> Iterator[tuple[F64, F64]]:
        """Yield the given pieces, once or (with `repeat`) endlessly."""
        durations = np.array([piece.duration_s for piece in self.pieces])
        rates = np.array([piece.rate for piece in self.pieces], dtype=np.float64)
        yield durations, rates
        while self.repeat:
            yield durations, rates


class CoxGamma(_Modulated):
    """Poisson arrivals whose rate is drawn for each window from a gamma distribution, as observed in Azure's traces."""

    type: Literal["cox_gamma"] = "cox_gamma"
    rate: Positive = Field(description="Mean rate in requests per second.")
    shape: Positive = Field(
        ge=1e-6, le=1e6, description="Shape of the rate's gamma distribution: its CV is 1 / sqrt(shape)."
    )
    window_s: Positive = Field(60.0, description="Time for which a rate holds, seconds.")

    def stretches(self, modulation: np.random.Generator) -> Iterator[tuple[F64, F64]]:
        """Yield the windows with their drawn rates."""
        while True:
            yield np.full(64, self.window_s), modulation.gamma(self.shape, self.rate / self.shape, 64)


ArrivalProcess: TypeAlias = Annotated[
    Poisson | Gamma | Weibull | QuantileGaps | FixedInterval | AtOnce | OnOff | PiecewiseConstant | CoxGamma,
    Field(discriminator="type"),
]
"""Any of the arrival processes, distinguished by `type`."""


def arrival_times(
    process: ArrivalProcess,
    rng: np.random.Generator,
    modulation: np.random.Generator,
    *,
    num_requests: int | None = None,
    duration_s: float | None = None,
) -> F64:
    """Return arrival times in seconds: the first `num_requests` arrivals, as far as they are before `duration_s`.

    A limit that is None does not apply. Without any limit, return all arrivals of piecewise rates that end.

    Raises:
        WorkloadError: both limits are missing for a process without an end, `num_requests` is missing for arrivals at
            once, piecewise rates end before `num_requests` arrivals (without `duration_s`), or too many requests
            or no requests arrive.
    """
    ends = isinstance(process, PiecewiseConstant) and not process.repeat
    if num_requests is None and (isinstance(process, AtOnce) or (duration_s is None and not ends)):
        raise WorkloadError("arrivals", None, f"{process.type} arrivals have no end", "num_requests or duration_s")
    blocks: list[F64] = []
    count = 0
    for block in process.blocks(rng, modulation):
        blocks.append(block if duration_s is None else block[block < duration_s])
        count += len(blocks[-1])
        if (num_requests is not None and count >= num_requests) or len(blocks[-1]) < len(block):
            break
        if count > MAX_REQUESTS:
            raise WorkloadError(
                "arrivals",
                None,
                f"more than {MAX_REQUESTS} arrivals before the end",
                "A shorter duration or a lower rate",
            )
    times = np.concatenate(blocks)[:num_requests]
    if ends and duration_s is None and num_requests is not None and len(times) < num_requests:
        message = f"the rates last for {len(times)} requests only ({num_requests} requested)"
        raise WorkloadError("arrivals", None, message, "Fewer requests, longer pieces, or repeat: true")
    if not len(times):
        raise WorkloadError("arrivals", None, "no request arrives", "A longer duration or a higher rate")
    return times
