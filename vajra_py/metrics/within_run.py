"""Confidence intervals within one run, and the test of whether it was long enough for them.

Requests in the order of their arrival are a sequence of correlated values, stationary where the system kept up with a steady load; its mean and quantiles get intervals by batch
means. A run that is too short for its load or for its correlation gets none, and P99 never does: an interval would promise too much. Replications give intervals for every metric.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vajra_py.metrics.definitions import Floats, Ints
from vajra_py.metrics.differences import flatten
from vajra_py.metrics.intervals import (
    UNLIMITED,
    Interval,
    LongRun,
    Worth,
    batch_means_interval,
    independent_by_load,
    is_long_enough,
    mser5,
    quantile_interval,
)
from vajra_py.metrics.run_data import REQUESTS_FILE, RunData
from vajra_py.workload.demand import demand_of

_LATENCIES = ("ttft", "tpot", "e2e", "queue")
_STATISTICS: Mapping[str, float] = {"p50": 0.5, "p90": 0.9, "p95": 0.95}
_WARMUP_FRACTION = 0.02
"""Part of the requests from which on a warm-up is worth a word."""


def run_intervals(run: RunData, scopes: Sequence[str]) -> dict[str, dict[str, Interval]]:
    """By scope and metric key; nothing of a run that did not keep up with its load (its averages grow with its length) or that kept no table of requests."""
    if not _is_steady(run):
        return {}
    by_load = _independent_by_load(run)
    columns = run.measured(*(f"{name}_s" for name in _LATENCIES), "slo_met", "slo_class", "tenant")
    found = {}
    for scope in scopes:
        noun, _, name = scope.partition(" ")
        inside = slice(None) if not name else columns[noun] == name
        found[scope] = _of_requests({key: column[inside] for key, column in columns.items()}, by_load)
    return found


def is_short(run: RunData) -> bool:
    """Whether a run that kept up with its load is too short to tell the long-run mean of TTFT: its requests are worth too few independent ones."""
    if not _is_steady(run):
        return False
    values = run.measured("ttft_s")["ttft_s"]
    return not is_long_enough(values[np.isfinite(values)], by_load=_independent_by_load(run))


def _is_steady(run: RunData) -> bool:
    return run.summary.value("stability.label") == "stable" and (run.path / REQUESTS_FILE).exists()


def _independent_by_load(run: RunData) -> Worth:
    """Independent requests that the run is worth by its load; a closed loop is not judged by it."""
    if flatten(run.config).get("workload.arrivals.type") == "closed_loop":
        return UNLIMITED
    columns = run.measured("arrived_at", "first_token_at", "ended_at", "replicaset", "replica_id", "num_prompt_tokens")
    served_at = np.where(np.isfinite(columns["first_token_at"]), columns["first_token_at"], columns["ended_at"])
    served_at = np.where(np.isfinite(served_at), served_at, run.window.end_at)
    sets = np.unique(columns["replicaset"].astype(str), return_inverse=True)[1]
    replica, arrived_at = sets * (1 << 32) + columns["replica_id"], columns["arrived_at"]
    return independent_by_load(arrived_at, served_at, replica, _long_run(run, arrived_at, columns["num_prompt_tokens"]))


def _long_run(run: RunData, arrived_at: Floats, num_prompt_tokens: Ints) -> LongRun | None:
    """What the run's workload asks for in the long run, by what arrived in the run; None when that is not known."""
    demand = demand_of(run.config["workload"]) if "workload" in run.config else None
    tokens = float(num_prompt_tokens[:-1].sum())
    if demand is None or not tokens:
        return None
    return LongRun(demand.prompt_tokens_per_s * float(np.ptp(arrived_at)) / tokens, demand.gap_variation)


def warmup_requests(run: RunData) -> int:
    """Requests at the start of the measurement window that MSER-5 takes for warm-up, by their end-to-end latency; 0 where they are too few to matter."""
    if not (run.path / REQUESTS_FILE).exists():
        return 0
    latencies = run.measured("e2e_s")["e2e_s"]
    known = latencies[np.isfinite(latencies)]
    found = mser5(known)
    return found if found > _WARMUP_FRACTION * len(known) else 0


def _of_requests(columns: Mapping[str, Floats], by_load: Worth) -> dict[str, Interval]:
    found: dict[str, Interval | None] = {}
    for name in _LATENCIES:
        values = columns[f"{name}_s"]
        values = values[np.isfinite(values)]
        found[f"{name}_mean_s"] = batch_means_interval(values, by_load=by_load)
        found |= {
            f"{name}_{key}_s": quantile_interval(values, fraction, by_load=by_load)
            for key, fraction in _STATISTICS.items()
        }
    met = columns["slo_met"]
    decided = np.array([value for value in met.tolist() if value is not None], dtype=np.float64)
    found["slo_attainment_fraction"] = batch_means_interval(decided, by_load=by_load)
    return {key: interval for key, interval in found.items() if interval is not None}
