"""Compute the rate of a random workload on average over seeds.

To set a rate, every seed's workload is stretched by the same factor: the mean over seeds is the given rate, while the
workload of one seed keeps its deviation from the mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch
from typing import Any

from vajra_py.workload.arrivals import AtOnce, PiecewiseConstant
from vajra_py.workload.config import LengthsConfig, MergeConfig, ProfileConfig, SyntheticConfig, WorkloadOptions
from vajra_py.workload.profiles import own_rate
from vajra_py.workload.synthetic import ClosedLoop

__all__ = ["expected_rate"]

_CUTS = ("start_s", "end_s", "first", "max_prompt_tokens", "max_total_tokens")


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Mean number of requests, and mean duration in seconds."""

    num_requests: float
    duration_s: float


@singledispatch
def expected_rate(config: Any) -> float | None:
    """Return the mean rate of the source in requests per second, before common options are applied.

    None if the rate does not depend on the seed, or if its mean is unknown.
    """
    return None


@expected_rate.register
def _(config: SyntheticConfig) -> float | None:
    if isinstance(config.arrivals, PiecewiseConstant):  # the mean over all pieces
        return config.arrivals.rate if config.num_requests is None and config.duration_s is None else None
    return None if isinstance(config.arrivals, AtOnce | ClosedLoop) else config.arrivals.rate


@expected_rate.register
def _(config: LengthsConfig) -> float | None:
    is_drawn = config.arrivals is not None and not isinstance(config.arrivals, AtOnce | PiecewiseConstant)
    return config.arrivals.rate if is_drawn else None  # type: ignore[union-attr]


@expected_rate.register
def _(config: ProfileConfig) -> float | None:
    return config.rate if config.rate is not None else own_rate(config.profile)


@expected_rate.register
def _(config: MergeConfig) -> float | None:
    parts = [_stretch(one) for one in config.workloads]
    known = [one for one in parts if one is not None]
    if len(known) < len(parts):
        return None
    return sum(one.num_requests for one in known) / max(one.duration_s for one in known)


def _stretch(config: WorkloadOptions) -> _Stretch | None:
    """Return mean requests and seconds of one part of a merged workload; None if they are unknown."""
    rate = expected_rate(config)
    if rate is None or config.skip or any(getattr(config, name) is not None for name in _CUTS):
        return None
    number, duration_s = getattr(config, "num_requests", None), getattr(config, "duration_s", None)
    if isinstance(config, SyntheticConfig) and isinstance(config.arrivals, PiecewiseConstant):
        duration_s = config.arrivals.duration_s
    lengths_s = [one for one in (duration_s, None if number is None else number / rate) if one is not None]
    if not lengths_s:
        return None
    pace = rate / config.rate if config.rate is not None else config.time_scale or 1.0
    return _Stretch(min(lengths_s) * rate, min(lengths_s) * pace)
