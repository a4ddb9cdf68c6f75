"""What a workload asks for in the long run, whatever the requests of one draw of it happened to be."""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from vajra_py.workload.arrivals import AtOnce, PiecewiseConstant
from vajra_py.workload.build import build_workload
from vajra_py.workload.config import MergeConfig, ProfileConfig, SyntheticConfig, WorkloadConfig
from vajra_py.workload.synthetic import ClosedLoop, named_streams

_NUM_DRAWN = 50_000
"""Requests whose rate and mean length are taken for those of the long run."""
_NO_CUTS = {"start_s": None, "end_s": None, "skip": 0, "first": None, "duration_s": None}


@dataclass(frozen=True, slots=True)
class Demand:
    """The long run of a workload."""

    requests_per_s: float
    prompt_tokens_per_request: float
    gap_variation: float
    """Squared coefficient of variation of the gaps between arrivals; 1 of Poisson arrivals."""

    @property
    def prompt_tokens_per_s(self) -> float:
        """Tokens that arrive to be prefilled."""
        return self.requests_per_s * self.prompt_tokens_per_request


def demand_of(workload: Any) -> Demand | None:
    """The long run of the workload that an experiment's effective configuration describes.

    None where it cannot be told: requests of a file, requests that follow one another, arrivals that change by a plan, what another version wrote.
    """
    try:
        return _demand(TypeAdapter[Any](WorkloadConfig).validate_python(workload))
    except ValidationError:
        return None


@singledispatch
def _demand(config: Any) -> Demand | None:
    return None


@_demand.register
def _(config: SyntheticConfig) -> Demand | None:
    return None if isinstance(config.arrivals, AtOnce | PiecewiseConstant | ClosedLoop) else _drawn(config)


@_demand.register
def _(config: ProfileConfig) -> Demand | None:
    return _drawn(config)


@_demand.register
def _(config: MergeConfig) -> Demand | None:
    parts = [_demand(one) for one in config.workloads]
    known = [one for one in parts if one is not None]
    if len(known) < len(parts) or config.max_prompt_tokens is not None or config.max_total_tokens is not None:
        return None
    requests_per_s = sum(one.requests_per_s for one in known)
    tokens = sum(one.prompt_tokens_per_s for one in known) / requests_per_s
    # Of superposed arrivals, seen over a long time, it is the mean over arrivals of the parts' (Whitt 1982).
    variation = sum(one.gap_variation * one.requests_per_s for one in known) / requests_per_s
    return Demand(config.rate or requests_per_s / (config.time_scale or 1.0), tokens, variation)


def _drawn(config: SyntheticConfig | ProfileConfig) -> Demand | None:
    """By many requests of the same kind, always the same ones."""
    number = max(_NUM_DRAWN, config.num_requests or 0)
    changes = {name: value for name, value in _NO_CUTS.items() if name in type(config).model_fields}
    columns = build_workload(
        config.model_copy(update={**changes, "num_requests": number}), named_streams(0), Path()
    ).columns
    gaps = np.diff(columns.arrived_at)
    if columns.session_id is not None or not gaps.mean() > 0:
        return None
    mean_s = float(gaps.mean())
    return Demand(config.rate or 1 / mean_s, float(columns.num_prompt_tokens.mean()), float(gaps.var()) / mean_s**2)
