"""Utilisation of a run's replicas: means over the steps formed while requests arrived."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from vajra_py.metrics.definitions import Floats, Window, covered_s
from vajra_py.metrics.tables.columns import floats_of, group_codes, ints_of
from vajra_py.runtime.records.arrow_arrays import numpy_array

if TYPE_CHECKING:
    import pyarrow as pa

    ArrowTable: TypeAlias = pa.Table
else:
    ArrowTable = "pyarrow.Table"


def resources_of(steps: ArrowTable, window: Window, steady: Window) -> dict[str, Any]:
    """Return the section `resources` of a summary: counts and maxima over the window, means and rates over the part of
    it in which requests arrived (`steady`).

    During the drain, batches are small and the memory empties, so means over the whole window would fall with the
    length of the drain. If no step was formed in the steady part, means and rates are over the whole window.
    """
    formed_at, duration_s = floats_of(steps, "formed_at"), floats_of(steps, "duration_s")
    held = window.holds(formed_at)
    measured = held & steady.holds(formed_at)
    if not measured.any():
        measured, steady = held, window
    # If all steps are kept, a slice selects them without a copy.
    counted, inside = (slice(None) if own.all() else own for own in (held, measured))
    weight = duration_s[inside]
    section: dict[str, Any] = {
        "num_steps": int(held.sum()),
        "num_preempted": int(ints_of(steps, "num_preempted")[counted].sum()),
        "mean_step_s": float(weight.mean()) if weight.size else None,
    }
    whole_s = weight.sum()
    weighted = np.empty_like(weight)
    for name in ("used_fraction", "num_running", "num_waiting", "num_decodes", "num_prefills"):
        # Integer counts are multiplied as they are: converting them to floats first would only add a copy.
        column = numpy_array(steps.column(name))
        np.multiply(column[inside], weight, out=weighted)
        section[f"mean_{name}"] = float(weighted.sum() / whole_s) if whole_s > 0 else None
        section[f"max_{name}"] = float(column[counted].max()) if held.any() else None
    tokens = {kind: int(ints_of(steps, f"{kind}_tokens")[inside].sum()) for kind in ("prefill", "decode")}
    section |= {
        f"{kind}_tokens_per_s": amount / steady.duration_s if steady.duration_s > 0 else None
        for kind, amount in tokens.items()
    }
    section["mean_step_tokens"] = sum(tokens.values()) / int(measured.sum()) if measured.any() else None
    section["busy_fraction"] = _busy(steps, formed_at, duration_s, steady)
    return section


def _busy(steps: ArrowTable, formed_at: Floats, duration_s: Floats, window: Window) -> float | None:
    """Return the fraction of the window with a step in flight, as a mean over the replicas with at least one step."""
    if not len(formed_at) or not window.duration_s > 0:
        return None
    return float(np.mean(_busy_times(steps, formed_at, duration_s, window))) / window.duration_s


def busy_seconds(steps: ArrowTable, window: Window) -> float:
    """Return the seconds of the window with a step in flight, summed over replicas."""
    if not steps.num_rows:
        return 0.0
    return sum(_busy_times(steps, floats_of(steps, "formed_at"), floats_of(steps, "duration_s"), window))


def _busy_times(steps: ArrowTable, formed_at: Floats, duration_s: Floats, window: Window) -> list[float]:
    """Return the seconds of the window with a step in flight, for each replica with at least one step."""
    sets, _ = group_codes(steps, "replicaset")
    ids = ints_of(steps, "replica_id")
    replicas = sets * (int(ids.max()) + 1) + ids
    if replicas.max() < 1 << 16:  # 16-bit integers sort many times faster
        replicas = replicas.astype(np.uint16)
    begins, ends = formed_at, formed_at + duration_s
    if begins.min() < window.start_at or ends.max() > window.end_at:
        begins, ends = (np.clip(at, window.start_at, window.end_at) for at in (begins, ends))
    in_time = bool((begins[1:] >= begins[:-1]).all())
    order = np.argsort(replicas, kind="stable") if in_time else np.lexsort((begins, replicas))
    ordered = replicas[order]
    borders = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    return [covered_s(begins[own], ends[own], window.start_at) for own in np.split(order, borders)]
