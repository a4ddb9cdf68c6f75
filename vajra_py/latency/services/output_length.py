"""Output-length predictors: estimates of a request's output tokens for policies.

An estimate is the length of the whole output. It is never below the number of tokens that the request has generated,
and never above the request's maximum. Only the oracles read true lengths.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from math import exp
from statistics import NormalDist, fmean
from typing import cast

from msgspec import Struct

from vajra_py.contract.latency import LengthEstimate
from vajra_py.contract.requests import EndReason, RequestView
from vajra_py.errors import ConfigError, Problem

ORACLES = ("oracle", "noisy_oracle")
"""Types of predictors that read true lengths."""

_P90 = NormalDist().inv_cdf(0.9)
_BY_ITSELF = frozenset({EndReason.STOP, EndReason.LENGTH})


class NoLengths(Struct, frozen=True):
    """Predictor without estimates."""

    def predict(self, request: object) -> LengthEstimate | None:
        """Return None."""
        return None


class UnansweredLengths:
    """Predictor without estimates that records which policies request an estimate."""

    def __init__(self, policy: str, asked: set[str]) -> None:
        self._policy = policy
        self._asked = asked

    def predict(self, request: object) -> LengthEstimate | None:
        """Return None, and record the name of the policy that requests an estimate."""
        self._asked.add(self._policy)
        return None


class ConstantLengths(Struct, frozen=True):
    """Predictor with one estimate for all requests."""

    estimate: LengthEstimate

    def predict(self, request: object) -> LengthEstimate | None:
        """Return the estimate: at least the number of tokens that the request has generated, at most the number that it
        may generate.
        """
        return _within(self.estimate, cast(RequestView, request))


class QuantileLengths:
    """Predictor from one distribution of lengths, conditioned on the tokens that a request has generated.

    `quantiles` maps fractions of requests (0 to 1) to numbers of tokens, with linear interpolation in between.
    """

    def __init__(self, quantiles: Mapping[float, float]) -> None:
        self._fractions = sorted(quantiles)
        self._tokens = [quantiles[fraction] for fraction in self._fractions]

    def predict(self, request: object) -> LengthEstimate | None:
        """Return mean, median and 90th percentile of those lengths that are above the number of generated tokens.

        For a request that has generated at least the largest length, all three are the number of tokens that it has
        generated.
        """
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
        """Return the fraction of requests with at most `tokens` tokens, including all requests of exactly this
        length.
        """
        index = bisect_right(self._tokens, tokens)
        if index == 0 or index == len(self._tokens):
            return 0.0 if index == 0 else 1.0
        low, high = self._tokens[index - 1], self._tokens[index]
        share = (tokens - low) / (high - low)
        return self._fractions[index - 1] + share * (self._fractions[index] - self._fractions[index - 1])

    def _value(self, fraction: float) -> float:
        return _interpolate(self._fractions, self._tokens, fraction)

    def _mean_above(self, fraction: float) -> float:
        """Return the mean length of the requests above the quantile at `fraction`: the area under the quantile curve
        between `fraction` and 1, divided by the width `1 - fraction`.
        """
        points = [(fraction, self._value(fraction))]
        points += [(f, t) for f, t in zip(self._fractions, self._tokens, strict=True) if f > fraction]
        area = sum((f2 - f1) * (t1 + t2) / 2 for (f1, t1), (f2, t2) in pairwise(points))
        return area / (1.0 - fraction)


def _interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Return the piecewise-linear value at x through (xs, ys), xs ascending; constant outside."""
    index = bisect_left(xs, x)
    if index == 0 or index == len(xs):
        return ys[0] if index == 0 else ys[-1]
    share = (x - xs[index - 1]) / (xs[index] - xs[index - 1])
    return ys[index - 1] + share * (ys[index] - ys[index - 1])


class HistoryLengths:
    """Predictor from the outputs that ended most recently, conditioned on the tokens that a request has generated.

    `window` is the number of lengths kept, per tenant or over all tenants. There is no estimate before the first output
    has ended, nor for a request that has generated at least as many tokens as the longest of these outputs.
    """

    def __init__(self, window: int, *, by_tenant: bool) -> None:
        self._window = window
        self._by_tenant = by_tenant
        self._recent: dict[str, deque[int]] = {}

    def predict(self, request: object) -> LengthEstimate | None:
        """Return mean, median and 90th percentile of the kept lengths that are above the number of generated tokens."""
        view = cast(RequestView, request)
        generated = view.num_output_tokens
        longer = sorted(length for length in self._recent.get(self._owner(view), ()) if length > generated)
        if not longer:
            return None
        last = len(longer) - 1
        estimate = LengthEstimate(fmean(longer), float(longer[last // 2]), float(longer[round(0.9 * last)]))
        return _within(estimate, view)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Record the lengths of outputs that ended at a stop token or at their maximum length."""
        for request in requests:
            if request.end_reason in _BY_ITSELF:
                recent = self._recent.setdefault(self._owner(request), deque(maxlen=self._window))
                recent.append(request.num_output_tokens)

    def _owner(self, request: RequestView) -> str:
        return request.tenant if self._by_tenant else ""


class OracleLengths(Struct, frozen=True):
    """Predictor with the true lengths, an upper bound for the benefit of predictions."""

    num_output_tokens: Mapping[str, int]

    def predict(self, request: object) -> LengthEstimate | None:
        """Return the true length, at most the number of tokens that the request may generate; None for a request
        without a known length.
        """
        view = cast(RequestView, request)
        truth = self.num_output_tokens.get(view.request_id)
        return None if truth is None else _within(LengthEstimate(float(truth), float(truth), float(truth)), view)


class NoisyOracleLengths(Struct, frozen=True):
    """Predictor with the true length times exp(sigma z).

    The standard normal number z depends only on the seed and the request's id, so a request's estimate does not change
    with other requests, or with the order of calls.
    """

    num_output_tokens: Mapping[str, int]
    sigma: float
    seed: int

    def predict(self, request: object) -> LengthEstimate | None:
        """Return an estimate whose median is the true length times the request's random factor.

        Mean and 90th percentile are those of the log-normal distribution with this median.
        """
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
    """Raise `ConfigError` if `kind` is an oracle, since the output lengths of clients' requests are unknown.

    `where` is the name of the setting that selects `kind`.
    """
    if kind in ORACLES:
        message = f"the output lengths of clients' requests are not known in advance (got {kind!r})"
        advice = "Allowed: none, constant, histogram, history; oracles need a simulation, or a workload on the engine"
        raise ConfigError(Problem(where, message, advice))


def seed_from(random_stream: Callable[[str], object]) -> int:
    """Return the seed of the noisy oracle, drawn from the oracle's own random stream."""
    stream = random_stream("output_length.noisy_oracle")
    return int(stream.integers(0, 2**62))  # type: ignore[attr-defined]


def _within(estimate: LengthEstimate, request: RequestView) -> LengthEstimate:
    """Return the estimate, raised to the number of generated tokens and limited to the request's maximum."""
    low, high = request.num_output_tokens, request.max_tokens
    return LengthEstimate(
        min(max(estimate.mean_tokens, low), high),
        min(max(estimate.p50_tokens, low), high),
        min(max(estimate.p90_tokens, low), high),
    )
