"""Write tables and summary of a run from its recorded data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct, field, structs

from vajra_py.config import ExperimentConfig
from vajra_py.experiment.device_figures import pools_of
from vajra_py.metrics.comparison.intervals import mser5
from vajra_py.metrics.definitions import Floats, Window
from vajra_py.metrics.summary.costs import ReplicasetDevices, cost_sections
from vajra_py.metrics.summary.drafts import drafts_section
from vajra_py.metrics.summary.movement import movement_section
from vajra_py.metrics.summary.pools import Pool, PoolInputs, pools_section
from vajra_py.metrics.summary.programs import programs_section
from vajra_py.metrics.summary.rates import steady_window
from vajra_py.metrics.summary.summary import STEPS_READ, Summary, summarise
from vajra_py.metrics.summary.tiers import tiers_section
from vajra_py.metrics.summary.warnings import rate_warnings
from vajra_py.metrics.tables.columns import write_table
from vajra_py.metrics.tables.emitted import EMITTED_FILE, ArrowTable, emitted_section
from vajra_py.metrics.tables.programs import PROGRAMS_FILE, programs_table
from vajra_py.metrics.tables.replicas import REPLICAS_FILE, active_times, replicas_section, scaled_replicasets
from vajra_py.metrics.tables.requests import RequestsBuilder, TbtBuilder, write_parquet
from vajra_py.metrics.tables.steps import StepsBuilder, expand_steps
from vajra_py.metrics.tables.tier_log import TierLog
from vajra_py.metrics.tables.transfers import TRANSFERS_FILE, TransfersBuilder
from vajra_py.runtime.records.arrow_arrays import numpy_array

IdealMakespans: TypeAlias = Callable[[ArrowTable], Mapping[str, float]]
_WARMUP_OFF = (0.0, 0)


class Tables(Struct, frozen=True):
    """Recorded tables of a run."""

    requests: RequestsBuilder
    steps: StepsBuilder
    tbt: TbtBuilder
    emitted: ArrowTable | None = None
    """Values that policies emitted (`emitted_table`)."""
    notes: Collection[str] = ()
    """Sentences about the policies for the summary's warnings."""
    devices: Mapping[str, ReplicasetDevices] = field(default_factory=dict)
    """Known devices by replicaset, for cost and energy."""
    replicas: ArrowTable | None = None
    """States of replicas (`ReplicaStates.table`); None without a scaler."""
    transfers: TransfersBuilder | None = None
    """KV transfers between replicas; None if requests cannot move."""
    ideal_makespans: IdealMakespans | None = None
    """Function that returns the ideal makespans of programs, given the requests table; None if unavailable. It calls
    latency models, which count their predictions. It is called last, so that its predictions are not in the recorded
    counts.
    """
    tiers: TierLog | None = None
    """Prefix hits by memory tier and traffic on the tiers' links; None without tiers."""


def write_results(
    path: Path, config: ExperimentConfig, tables: Tables, ended_at: float, step_times: Mapping[str, Any]
) -> None:
    """Write a run's tables and summary to its folder.

    `ended_at` is in seconds on the run's clock; `step_times` is the origin of step times, for the summary.
    """
    tables.requests.ended_at = ended_at
    requests, tbt = tables.requests.to_table(), tables.tbt.to_table()
    records = tables.steps.records()
    with ThreadPoolExecutor(1) as beside:  # tables are encoded mostly without the GIL, while the summary is computed
        writing = beside.submit(_write_tables, path, tables)
        steps = expand_steps(records, STEPS_READ, encoded=True)
        summary = _summary(config, requests, steps, tbt, ended_at)
        window = Window(summary.data["window"]["start_s"], summary.data["window"]["end_s"])
        steady = steady_window(window, summary.data["rates"])
        if tables.replicas is not None:
            write_table(tables.replicas, path / REPLICAS_FILE)
            summary = summary.with_sections(replicas_section(tables.replicas, window, steady))
        devices = _while_active(tables.devices, tables.replicas)
        if devices:
            summary = summary.with_sections(cost_sections(devices, summary.data, steps))
        inputs = PoolInputs(steps, window, steady, tables.replicas, devices)
        summary = summary.with_sections(pools_section(_pools(config), inputs))
        if tables.transfers is not None:
            inside = window.holds(numpy_array(requests.column("arrived_at")))
            summary = summary.with_sections(movement_section(tables.transfers.to_table(), requests, inside))
        if tables.tiers is not None:
            inside = window.holds(numpy_array(requests.column("arrived_at")))
            summary = summary.with_sections(tiers_section(tables.tiers, requests, inside, ended_at))
        if tables.requests.has_drafts:
            inside = window.holds(numpy_array(requests.column("arrived_at")))
            summary = summary.with_sections(drafts_section(requests, inside))
        summary = summary.with_step_times(step_times).with_warnings([*tables.notes])
        programs = with_programs(summary, requests, path, ended_at, tables.ideal_makespans)
        summary = summary if programs is None else programs
        if tables.emitted is not None and tables.emitted.num_rows:
            write_table(tables.emitted, path / EMITTED_FILE)
            summary = summary.with_sections(emitted_section(tables.emitted))
        writing.result()
    (path / "summary.json").write_text(summary.to_json())


def with_programs(
    summary: Summary, requests: ArrowTable, path: Path, ended_at: float, ideal: IdealMakespans | None = None
) -> Summary | None:
    """Write the table of programs, and return the summary with a section on programs; None for a run without
    programs. `ended_at` is the end of the run in seconds.
    """
    if "program_id" not in requests.column_names:
        return None
    table = programs_table(requests, None if ideal is None else ideal(requests), ended_at)
    if table is None:
        return None
    write_table(table, path / PROGRAMS_FILE)
    window = Window(summary.data["window"]["start_s"], summary.data["window"]["end_s"])
    return summary.with_sections(programs_section(table, window))


def _while_active(
    devices: Mapping[str, ReplicasetDevices], replicas: ArrowTable | None
) -> Mapping[str, ReplicasetDevices]:
    """Return the devices with the periods in which replicas under a scaler occupy them."""
    if replicas is None:
        return devices
    scaled, found = scaled_replicasets(replicas), dict(devices)
    for name, one in devices.items():
        replicaset = one.replicaset or name
        if replicaset in scaled:
            found[name] = structs.replace(one, active=active_times(replicas, replicaset, replica_ids=one.replica_ids))
    return found


def _pools(config: ExperimentConfig) -> list[Pool]:
    return [pool for name, one in config.effective_replicasets.items() for pool in pools_of(name, one)]


def _write_tables(path: Path, tables: Tables) -> None:
    write_parquet(tables.requests, path / "requests.parquet")
    write_parquet(tables.steps, path / "steps.parquet")
    write_parquet(tables.tbt, path / "tbt.parquet")
    if tables.transfers is not None:
        write_parquet(tables.transfers, path / TRANSFERS_FILE)


def _summary(config: ExperimentConfig, requests: Any, steps: Any, tbt: Any, ended_at: float) -> Summary:
    """Return the summary of these pyarrow tables; `steps` needs only the columns `STEPS_READ`."""
    arrived_at, e2e_s = (numpy_array(requests.column(name)) for name in ("arrived_at", "e2e_s"))
    window = _window(config, arrived_at, e2e_s, ended_at)
    summary = summarise(requests, steps, tbt, window, ended_at=ended_at)
    return summary.with_warnings(rate_warnings(summary.data, asked_rate(config)))


def _window(config: ExperimentConfig, arrived_at: Floats, e2e_s: Floats, ended_at: float) -> Window | None:
    settings = config.backend.settings
    warmup_s, warmup_requests = getattr(settings, "warmup_s", 0.0), getattr(settings, "warmup_requests", 0)
    if not len(arrived_at) or (warmup_s, warmup_requests) == _WARMUP_OFF:
        return None
    start = float(arrived_at[0]) + warmup_s
    if warmup_requests == "auto":
        done = np.flatnonzero(np.isfinite(e2e_s))
        cut = mser5(e2e_s[done])
        warmup_requests = int(done[cut]) if cut else 0
    if warmup_requests:
        start = max(start, float(arrived_at[min(warmup_requests, len(arrived_at) - 1)]))
    return Window(start, max(start, ended_at))


def asked_rate(config: ExperimentConfig) -> float | None:
    """Return the workload's configured request rate on the run's clock, that is, divided by the backend's `time_scale`;
    None if no rate is configured.

    The configured rate is the workload's `rate`. If it is not set, a synthetic workload without a `time_scale` has the
    rate of its arrivals.
    """
    asked = config.workload.rate
    if asked is None and config.workload.type == "synthetic" and config.workload.time_scale is None:
        asked = getattr(config.workload.arrivals, "rate", None)
    time_scale: float = getattr(config.backend.settings, "time_scale", 1.0)
    return None if asked is None else asked / time_scale
