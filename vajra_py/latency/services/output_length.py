"""Output-length predictors: what a scheduler may know of the tokens to come.

Estimates are of the whole output. A request that has outlived its estimate gets one that is not below what it has generated, and none
exceeds what the request may generate. The truth is read by the oracles alone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from math import exp
from statistics import NormalDist, fmean
from typing import cast

from vajra_py.contract.latency import LengthEstimate
from vajra_py.contract.requests import EndReason, RequestView
from vajra_py.errors import ConfigError, Problem

ORACLES = ("oracle", "noisy_oracle")
"""Types of predictors that read the truth."""

_P90 = NormalDist().inv_cdf(0.9)
_BY_ITSELF = frozenset({EndReason.STOP, EndReason.LENGTH})


@dataclass(frozen=True, slots=True)
class NoLengths:
    """Predictor without predictions: every length is unknown."""

    def predict(self, request: object) -> LengthEstimate | None:
        """Always None."""
        return None


class UnansweredLengths:
    """Predictor without predictions that records which policies ask for lengths."""

    def __init__(self, policy: str, asked: set[str]) -> None:
        self._policy = policy
        self._asked = asked

    def predict(self, request: object) -> LengthEstimate | None:
        """None; the policy's name is in the set afterwards."""
        self._asked.add(self._policy)
        return None


@dataclass(frozen=True, slots=True)
class ConstantLengths:
    """Predictor with one estimate for every request."""

    estimate: LengthEstimate

    def predict(self, request: object) -> LengthEstimate | None:
        """The estimate, within what the request has generated and may generate."""
        return _within(self.estimate, cast(RequestView, request))


class QuantileLengths:
    """Lengths follow one distribution, given by its quantiles; what a request has generated already rules out shorter ones.

    Between quantiles the distribution is linear. `quantiles` maps fractions to tokens and must reach from 0 to 1.
    """

    def __init__(self, quantiles: Mapping[float, float]) -> None:
        self._fractions = sorted(quantiles)
        self._tokens = [quantiles[fraction] for fraction in self._fractions]

    def predict(self, request: object) -> LengthEstimate | None:
        """Mean, median and 90th percentile of the lengths above what the request has generated."""
        view = cast(RequestView, request)
        passed = self._fraction(view.num_output_tokens)
        if passed >= 1.0:
            known = float(view.num_output_tokens)
            return _within(LengthEstimate(known, known, known), view)
        left = 1.0 - passed
        estimate = LengthEstimate(
            self._mean_above(passed), self._value(passed + 0.5 * left), self._value(passed + 0.9 * left)
        )
        return _within(estimate, view)

    def _fraction(self, tokens: float) -> float:
        """Share of requests that are no longer than `tokens`; where many have one length, all of them."""
        index = bisect_right(self._tokens, tokens)
        if index == 0 or index == len(self._tokens):
            return 0.0 if index == 0 else 1.0
        low, high = self._tokens[index - 1], self._tokens[index]
        share = (tokens - low) / (high - low)
        return self._fractions[index - 1] + share * (self._fractions[index] - self._fractions[index - 1])

    def _value(self, fraction: float) -> float:
        return _interpolate(self._fractions, self._tokens, fraction)

    def _mean_above(self, fraction: float) -> float:
        """Mean length of the requests above a fraction: the area under the quantile curve there."""
        points = [(fraction, self._value(fraction))]
        points += [(f, t) for f, t in zip(self._fractions, self._tokens, strict=True) if f > fraction]
        area = sum((f2 - f1) * (t1 + t2) / 2 for (f1, t1), (f2, t2) in pairwise(points))
        return area / (1.0 - fraction)


def _interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Piecewise linear through (xs, ys), xs ascending; flat outside."""
    index = bisect_left(xs, x)
    if index == 0 or index == len(xs):
        return ys[0] if index == 0 else ys[-1]
    share = (x - xs[index - 1]) / (xs[index] - xs[index - 1])
    return ys[index - 1] + share * (ys[index] - ys[index - 1])


class HistoryLengths:
    """Lengths to come are like the last ones, of the same tenant or of all; what a request has generated rules out shorter ones.

    `window` is how many are kept of each. None before the first has ended, and for a request that has outlived all of them.
    """

    def __init__(self, window: int, *, by_tenant: bool) -> None:
        self._window = window
        self._by_tenant = by_tenant
        self._recent: dict[str, deque[int]] = {}

    def predict(self, request: object) -> LengthEstimate | None:
        """Mean, median and 90th percentile of the lengths that are left."""
        view = cast(RequestView, request)
        generated = view.num_output_tokens
        longer = sorted(length for length in self._recent.get(self._owner(view), ()) if length > generated)
        if not longer:
            return None
        last = len(longer) - 1
        estimate = LengthEstimate(fmean(longer), float(longer[last // 2]), float(longer[round(0.9 * last)]))
        return _within(estimate, view)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Learn the lengths of outputs that ended by themselves."""
        for request in requests:
            if request.end_reason in _BY_ITSELF:
                recent = self._recent.setdefault(self._owner(request), deque(maxlen=self._window))
                recent.append(request.num_output_tokens)

    def _owner(self, request: RequestView) -> str:
        return request.tenant if self._by_tenant else ""


@dataclass(frozen=True, slots=True)
class OracleLengths:
    """The truth. For upper bounds of what knowing lengths is worth."""

    num_output_tokens: Mapping[str, int]

    def predict(self, request: object) -> LengthEstimate | None:
        """The true length; None for a request whose truth is unknown."""
        truth = self.num_output_tokens.get(cast(RequestView, request).request_id)
        return None if truth is None else LengthEstimate(float(truth), float(truth), float(truth))


@dataclass(frozen=True, slots=True)
class NoisyOracleLengths:
    """The truth times exp(sigma z) with a standard normal z that depends on the seed and the request's id alone.

    So the estimate of a request does not change with what else arrives or with the order of queries.
    """

    num_output_tokens: Mapping[str, int]
    sigma: float
    seed: int

    def predict(self, request: object) -> LengthEstimate | None:
        """The disturbed length, as median; the mean and the 90th percentile are those of the truth as seen from it."""
        view = cast(RequestView, request)
        truth = self.num_output_tokens.get(view.request_id)
        if truth is None:
            return None
        guess = truth * exp(self.sigma * self._normal(view.request_id))
        estimate = LengthEstimate(guess * exp(self.sigma * self.sigma / 2), guess, guess * exp(self.sigma * _P90))
        return _within(estimate, view)

    def _normal(self, request_id: str) -> float:
        digest = blake2b(request_id.encode(), digest_size=8, key=self.seed.to_bytes(8, "little")).digest()
        return NormalDist().inv_cdf((int.from_bytes(digest, "little") + 0.5) / 2.0**64)


def refuse_oracle(kind: str, where: str) -> None:
    """Raise `ConfigError` for an oracle of requests that come from clients, at this place of the settings: their lengths are not known."""
    if kind in ORACLES:
        message = f"the output lengths of clients' requests are not known in advance (got {kind!r})"
        advice = "Allowed: none, constant, histogram, history; oracles need a simulation, or a workload on the engine"
        raise ConfigError(Problem(where, message, advice))


def seed_from(random_stream: Callable[[str], object]) -> int:
    """The seed of the noisy oracle, drawn from the run's own stream for it."""
    stream = random_stream("output_length.noisy_oracle")
    return int(stream.integers(0, 2**62))  # type: ignore[attr-defined]


def _within(estimate: LengthEstimate, request: RequestView) -> LengthEstimate:
    """The estimate, not below what is generated and not above what may be."""
    low, high = request.num_output_tokens, request.max_tokens
    return LengthEstimate(
        min(max(estimate.mean_tokens, low), high),
        min(max(estimate.p50_tokens, low), high),
        min(max(estimate.p90_tokens, low), high),
    )
