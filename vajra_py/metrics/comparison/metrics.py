"""Metrics of comparisons: their paths in a summary, units, and number formats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from vajra_py.errors import RunError, did_you_mean


class Metric(Struct, frozen=True):
    """One row of a comparison."""

    key: str
    """Column name in data frames and CSV, with the unit of the raw value."""
    label: str
    path: str
    """Path within a group of the summary. A path that starts with `.` is relative to the whole summary, and has a value
    only in the scope of all requests.
    """
    unit: str = ""
    """Displayed unit."""
    scale: float = 1.0
    """Factor from the raw value to the displayed unit."""
    lower_is_better: bool | None = None
    """True if lower values are better, False if higher values are better, None if neither."""
    level: int = 1
    """0: always shown; 1: shown if there are so few settings that they are columns; 2: shown only in data frames, CSV
    and full tables.
    """

    @property
    def is_proportion(self) -> bool:
        """True if values lie between 0 and 1; values of other metrics are non-negative amounts."""
        return self.unit == "%" or self.key == "jain_index"


def _latency(
    key: str,
    label: str,
    section: str,
    unit: str,
    main: Iterable[str],
    shown: Iterable[str] = ("mean", "p50", "p90", "p99"),
) -> list[Metric]:
    levels = dict.fromkeys(shown, 1) | dict.fromkeys(main, 0)
    scale = 1000.0 if unit == "ms" else 1.0
    names = {"mean": "mean", "p50": "P50", "p90": "P90", "p95": "P95", "p99": "P99", "max": "max"}
    return [
        Metric(f"{key}_{stat}_s", f"{label} {name}", f"{section}.{stat}", unit, scale, True, levels.get(stat, 2))
        for stat, name in names.items()
    ]


METRICS: tuple[Metric, ...] = (
    Metric("num_arrived", "Requests", "counts.arrived"),
    Metric("num_completed", "Completed", "counts.completed", lower_is_better=False),
    Metric("delivered_fraction", "Delivered", "delivered_fraction", "%", 100.0, False, 2),
    Metric("num_unfinished", "Unfinished", "counts.unfinished", lower_is_better=True),
    Metric("num_rejected", "Rejected", "counts.rejected", lower_is_better=True),
    Metric("num_expired", "Expired", "counts.expired", lower_is_better=True),
    Metric("num_aborted", "Aborted", "counts.aborted"),
    Metric("num_failed", "Failed", "counts.failed", lower_is_better=True),
    Metric("offered_requests_per_s", "Offered load", "offered_requests_per_s", "req/s"),
    *_latency("ttft", "TTFT", "ttft_s", "s", ("p50", "p99")),
    *_latency("tbt", "TBT", "tbt_s", "ms", ("p99",)),
    *_latency("tpot", "TPOT", "tpot_s", "ms", ("p99",)),
    *_latency("e2e", "E2E", "e2e_s", "s", ("p99",)),
    *_latency("queue", "Queueing", "queue_s", "s", ()),
    Metric("slo_attainment_fraction", "SLO attainment", "slo.overall.attainment_fraction", "%", 100.0, False, 0),
    Metric("ttft_slo_attainment_fraction", "TTFT SLO attainment", "slo.ttft.attainment_fraction", "%", 100.0, False),
    Metric("tpot_slo_attainment_fraction", "TPOT SLO attainment", "slo.tpot.attainment_fraction", "%", 100.0, False),
    Metric("tbt_slo_attainment_fraction", "TBT SLO attainment", "slo.tbt.attainment_fraction", "%", 100.0, False),
    Metric(
        "deadline_attainment_fraction", "Deadline attainment", "slo.deadline.attainment_fraction", "%", 100.0, False
    ),
    Metric("goodput_requests_per_s", "Goodput", "goodput.requests_per_s", "req/s", 1.0, False, 0),
    Metric("goodput_output_tokens_per_s", "Goodput, tokens", "goodput.output_tokens_per_s", "tok/s", 1.0, False),
    Metric("throughput_requests_per_s", "Throughput", "throughput.requests_per_s", "req/s", 1.0, False, 0),
    Metric(
        "throughput_output_tokens_per_s",
        "Output throughput",
        "throughput.output_tokens_per_s",
        "tok/s",
        1.0,
        False,
    ),
    Metric("num_preemptions", "Preemptions", "preemptions.count", lower_is_better=True, level=0),
    Metric("kv_used_mean_fraction", "KV use, mean", ".resources.mean_used_fraction", "%", 100.0, None, 0),
    Metric("kv_used_max_fraction", "KV use, max", ".resources.max_used_fraction", "%", 100.0),
    Metric("prefix_hit_fraction", "Prefix hits", "tokens.prefix_hit_fraction", "%", 100.0, False),
    Metric("busy_fraction", "Replicas busy", ".resources.busy_fraction", "%", 100.0),
    Metric("mean_step_tokens", "Tokens per step", ".resources.mean_step_tokens"),
    Metric("mean_replicas", "Replicas, mean", ".replicas.mean", "", 1.0, True, 2),
    Metric("replica_seconds", "Replica-seconds", ".replicas.active_s", "s", 1.0, True, 2),
    Metric("cost", "Cost of the run", ".cost.run", "$", 1.0, True, 2),
    Metric("cost_per_hour", "Cost per hour", ".cost.per_hour", "$/h", 1.0, True, 2),
    Metric("cost_per_request", "Cost per 1,000 requests", ".cost.per_request", "$", 1000.0, True, 2),
    Metric(
        "cost_per_million_output_tokens",
        "Cost per million output tokens",
        ".cost.per_million_output_tokens",
        "$",
        1.0,
        True,
    ),
    Metric("cost_per_million_tokens", "Cost per million tokens", ".cost.per_million_tokens", "$", 1.0, True, 2),
    Metric("energy_kwh", "Energy of the run", ".energy.run_kwh", "kWh", 1.0, True, 2),
    Metric("mean_power_w", "Mean power", ".energy.mean_w", "W", 1.0, True, 2),
    Metric("energy_per_request_j", "Energy per request", ".energy.per_request_j", "J", 1.0, True, 2),
    Metric("energy_per_output_token_j", "Energy per output token", ".energy.per_output_token_j", "J", 1.0, True),
    Metric("jain_index", "Jain index of backlogged tenants", ".fairness.jain_index", "", 1.0, False),
    Metric(
        "max_service_difference",
        "Service difference of tenants, max",
        ".fairness.max_service_difference",
        "tok",
        1.0,
        True,
    ),
    Metric("worst_tenant_ttft_p99_s", "Worst tenant's TTFT P99", ".fairness.worst_ttft_p99_s", "s", 1.0, True),
    Metric("worst_tenant_e2e_p99_s", "Worst tenant's E2E P99", ".fairness.worst_e2e_p99_s", "s", 1.0, True),
    Metric("num_programs", "Programs", ".programs.arrived"),
    Metric("num_programs_completed", "Programs completed", ".programs.completed", lower_is_better=False),
    Metric("num_programs_failed", "Programs failed", ".programs.failed", lower_is_better=True),
    *_latency("makespan", "Makespan", ".programs.makespan_s", "s", ("mean", "p99")),
    Metric("slowdown_mean", "Slowdown of programs, mean", ".programs.slowdown.mean", "", 1.0, True),
    Metric("slowdown_p99", "Slowdown of programs, P99", ".programs.slowdown.p99", "", 1.0, True),
    Metric(
        "program_slo_attainment_fraction",
        "Program SLO attainment",
        ".programs.slo.attainment_fraction",
        "%",
        100.0,
        False,
        0,
    ),
    Metric(
        "program_prefix_hit_fraction", "Prefix hits of programs", ".programs.prefix_hit_fraction", "%", 100.0, False
    ),
    Metric("num_shed", "Shed by admission", ".admission.rejected.shed"),
    Metric("num_queue_full", "Found a full queue", ".admission.rejected.queue_full"),
    Metric("num_cannot_run", "Could not be run", ".admission.rejected.cannot_run"),
    Metric("num_degraded", "Degraded by admission", ".admission.degraded"),
    Metric("num_deferred", "Deferred by admission", ".admission.num_deferred"),
    *_latency("deferred", "Deferral", ".admission.deferred_s", "s", ()),
    Metric("num_hand_offs", "Hand-offs", ".movement.num_hand_offs"),
    Metric("num_migrations", "Migrations", ".movement.num_migrations"),
    Metric("num_moves", "Moves of waiting requests", ".movement.num_moves"),
    Metric("num_called_off", "Transfers called off", ".movement.num_called_off"),
    Metric("moved_bytes", "KV moved", ".movement.moved_bytes", "GB", 1e-9, None, 2),
    *_latency("held", "Held at the source", ".movement.held_s", "ms", (), ("p50", "p99")),
    *_latency("transfer", "In transfer", ".movement.transfer_s", "ms", (), ("p50", "p99")),
    *_latency("target_wait", "Waiting at the target", ".movement.target_wait_s", "ms", (), ("p50", "p99")),
    # The scope of a pool has only the following metrics.
    Metric("pool_replicas", "Replicas, mean", "replicas.mean", level=0),
    Metric("pool_max_replicas", "Replicas, most", "replicas.max", level=2),
    Metric("pool_replica_seconds", "Replica-seconds", "replicas.active_s", "s", level=0),
    Metric("pool_busy_fraction", "Busy", "busy_fraction", "%", 100.0, level=0),
    Metric("pool_kv_used_mean_fraction", "KV use, mean", "mean_used_fraction", "%", 100.0, level=0),
    Metric("pool_kv_used_max_fraction", "KV use, max", "max_used_fraction", "%", 100.0, level=2),
    Metric("pool_running", "Running in a step", "mean_num_running", level=0),
    Metric("pool_waiting", "Waiting, mean", "mean_num_waiting", level=0),
    Metric("pool_step_tokens", "Tokens per step", "mean_step_tokens", level=0),
    Metric("pool_prefill_tokens_per_s", "Prefill", "prefill_tokens_per_s", "tok/s", level=0),
    Metric("pool_decode_tokens_per_s", "Decode", "decode_tokens_per_s", "tok/s", level=0),
    Metric("num_pool_preemptions", "Preemptions", "num_preempted", level=0),
    Metric("pool_cost", "Cost", "cost.run", "$", level=0),
    Metric("pool_cost_per_hour", "Cost per hour", "cost.per_hour", "$/h", level=2),
)
"""Every metric, in the order of reports."""

BY_KEY: Mapping[str, Metric] = {metric.key: metric for metric in METRICS}

DEFAULT_PRIMARY = ("ttft_p99_s", "tbt_p99_s", "slo_attainment_fraction")
"""Keys of the metrics that are tested by default, if the runs have values for them."""


def named_metrics(given: Sequence[str], option: str = "--metrics") -> list[Metric]:
    """Return the metrics with these names, without duplicates. A name is a key with or without its unit suffix
    (`ttft_p99`). Raises `RunError` for an unknown name.
    """
    short = {key.removesuffix(unit): key for key in BY_KEY for unit in ("_s", "_fraction") if key.endswith(unit)}
    found: dict[str, Metric] = {}
    for name in given:
        key = name if name in BY_KEY else short.get(name)
        if key is None:
            raise RunError(f"{option}: no metric has that name ({name!r}). {did_you_mean(name, BY_KEY)}")
        found[key] = BY_KEY[key]
    return list(found.values())


def titled(metric: Metric) -> str:
    """Return the metric's label with its unit."""
    return f"{metric.label} ({metric.unit})" if metric.unit else metric.label


def metric_text(metric: Metric, value: float | None) -> str:
    """Return a raw value as text in the displayed unit, rounded for reading; a dash for None."""
    if value is None:
        return "–"
    shown = value * metric.scale
    if metric.key.startswith("num_"):
        return f"{shown:,.0f}"
    if metric.unit == "%":
        return _percent(shown)
    return significant(shown)


def _percent(shown: float) -> str:
    """Return a percentage with one decimal, or with more if it would be rounded to 0 or 100 %."""
    for decimals in range(1, 4):
        if shown in (0, 100) or round(shown, decimals) not in (0, 100):
            return f"{shown:.{decimals}f}"
    return f"{shown:.4f}"


def error_text(metric: Metric, value: float) -> str:
    """Return the magnitude of a difference or of an interval's half width as text in the displayed unit, with two
    significant digits (as a whole number from 100 on) and without an exponent.
    """
    shown = abs(value * metric.scale)
    if shown == 0 or shown >= 100:
        return f"{shown:,.0f}"
    return f"{shown:.{max(0, 1 - math.floor(math.log10(shown)))}f}"


def significant(value: float) -> str:
    """Return a number as text: without decimals from 100 on, with one to three decimals below 100, and with an exponent
    below 0.001 (except 0).
    """
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 1:
        return f"{value:.2f}"
    if size >= 0.001 or size == 0:
        return f"{value:.3f}"
    return f"{value:.1e}"
