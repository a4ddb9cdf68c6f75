"""Figures of a report with their captions and the conditions for showing them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vajra_py.metrics import plots
from vajra_py.metrics.plots.over_time import MAX_RUN_PANELS, MAX_TIMELINES
from vajra_py.metrics.plots.rates import class_names, has_slo
from vajra_py.metrics.plots.style import MAX_SERIES
from vajra_py.metrics.runs.replications import group_replications
from vajra_py.metrics.runs.run_data import RunData

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class FigureSpec:
    """Specification of a figure of the report."""

    key: str
    group: str
    title: str
    caption: str
    draw: Callable[..., Figure]
    """Called with the runs; returns the figure."""
    numbers: str | None = None
    """Key of the metric whose values are listed in the figure's text alternative."""
    wanted: Callable[[Sequence[RunData]], bool] = lambda runs: True
    most_runs: int | None = None
    """Maximum number of runs that the figure shows; None if unlimited."""
    slo_caption: str = ""
    """Text added to the caption if requests have SLOs."""
    takes_replications: bool = False
    """True if the figure shows all replications of a setting together; otherwise it shows only the first replication.
    """

    def runs_of(self, runs: Sequence[RunData]) -> Sequence[RunData]:
        """Return the runs to draw."""
        return runs if self.takes_replications else [setting.first for setting in group_replications(runs)]

    def words(self, runs: Sequence[RunData]) -> str:
        """Return the caption for these runs."""
        shown = self.runs_of(runs)
        parts = [self.caption, self.slo_caption if has_slo(runs) else ""]
        is_replicated = any(len(setting.runs) > 1 for setting in group_replications(runs))
        if not self.takes_replications and is_replicated:
            parts.append("Of each setting, the replication with the first seed.")
        elif is_replicated:
            parts.append("Points are means of the replications, bars their 95 % intervals.")
        if self.most_runs is not None and len(shown) > self.most_runs:
            parts.append(
                f"Shown of the {len(shown)} runs: at most {self.most_runs}, those under the highest load, then of the lowest P99 TTFT."
            )
        return " ".join(filter(None, parts))


def _has_several_tenants(runs: Sequence[RunData]) -> bool:
    return any(len(run.summary.value("by_tenant") or {}) > 1 for run in runs)


def _has_several_classes(runs: Sequence[RunData]) -> bool:
    return plots.has_rate_sweep(runs) and len(class_names(runs)) > 1


def _has_one_load(runs: Sequence[RunData]) -> bool:
    return not plots.has_rate_sweep(runs)


def _has_slo(runs: Sequence[RunData]) -> bool:
    return plots.has_rate_sweep(runs) and has_slo(runs)


FIGURES: tuple[FigureSpec, ...] = (
    FigureSpec(
        "class_latency_by_rate",
        "Load",
        "Latency of each class against load",
        "Median and P99 TTFT, and P99 end-to-end latency of each SLO class against the offered load of all; logarithmic latency.",
        plots.class_latency_by_rate,
        None,
        _has_several_classes,
        takes_replications=True,
    ),
    FigureSpec(
        "latency_by_rate",
        "Load",
        "Latency against load",
        "P50 (upper row) and P99 (lower row) against the offered load; logarithmic latency. A line bends upwards where its system saturates.",
        plots.latency_by_rate,
        "ttft_p99_s",
        plots.has_rate_sweep,
        takes_replications=True,
    ),
    FigureSpec(
        "attainment_by_rate",
        "Load",
        "SLO attainment against load",
        "Share of requests that did not meet all their SLOs (1 − attainment), logarithmic. The load at which a line rises through 10 % or 1 % is the system's capacity under these SLOs.",
        plots.attainment_by_rate,
        "slo_attainment_fraction",
        _has_slo,
        takes_replications=True,
    ),
    FigureSpec(
        "goodput_by_rate",
        "Load",
        "Throughput against load",
        "Requests completed per second, the drain after the last arrival left out. A stable run that completed everything lies on the grey line, the offered load; one that is overloaded "
        "lies below it, at the pace of its completions.",
        plots.goodput_by_rate,
        "throughput_requests_per_s",
        plots.has_rate_sweep,
        slo_caption="Goodput is that of the requests that met their SLOs.",
        takes_replications=True,
    ),
    FigureSpec(
        "latency_ranges",
        "Latency",
        "Latency of each run",
        "From P50 (dot) to P99 (end of the bar), cross: mean; logarithmic.",
        plots.latency_ranges,
        "ttft_p99_s",
        takes_replications=True,
    ),
    FigureSpec(
        "latency_cdfs",
        "Latency",
        "Latency distributions",
        "Share of requests (of gaps, for TBT) up to each latency; logarithmic. TTFT and E2E count every request that arrived: a line that ends below 100 % left "
        "requests unanswered.",
        plots.latency_cdfs,
        "e2e_p99_s",
    ),
    FigureSpec(
        "program_makespans",
        "Programs",
        "Makespans of programs",
        "Share of programs whose last call ended so long after their first one arrived, and how many times as long as alone on the system; logarithmic. A line that ends below 100 % left programs "
        "unfinished, or failed them.",
        plots.program_makespans,
        "makespan_mean_s",
        plots.has_programs,
    ),
    FigureSpec(
        "slowdown_by_prompt_length",
        "Latency",
        "Slowdown by prompt length",
        "TTFT relative to the fastest prefill that any of these runs gave prompts of that length: median, and whisker up to P99; logarithmic. Short prompts far above "
        "long ones: they wait behind them (head-of-line blocking).",
        plots.slowdown_by_prompt_length,
        "ttft_p99_s",
    ),
    FigureSpec(
        "movement_times",
        "Latency",
        "Requests on their way between replicas",
        "Of the requests that left their replica with their KV: held at the source, in transfer, and waiting at the target, from P50 (dot) to P99 (end of the "
        "bar), cross: mean; logarithmic.",
        plots.movement_times,
        "transfer_p99_s",
        plots.has_movement,
        takes_replications=True,
    ),
    FigureSpec(
        "delivery_bars",
        "Delivery",
        "What each run delivered",
        "Requests completed per second.",
        plots.delivery_bars,
        "throughput_requests_per_s",
        _has_one_load,
        slo_caption="Solid: the goodput in it, requests that met their SLOs; beside it the share of requests that did.",
        takes_replications=True,
    ),
    FigureSpec(
        "queue_and_kv",
        "Over time",
        "Queue and KV memory",
        "Requests that wait for their first step, and KV blocks in use (mean over replicas). A queue that only rises is overload.",
        plots.queue_and_kv,
        "kv_used_mean_fraction",
    ),
    FigureSpec(
        "batch_composition",
        "Over time",
        "Batch composition",
        "Tokens of a step, mean over short bins of time: decode tokens below, prefill tokens above.",
        plots.batch_composition,
        "mean_step_tokens",
        most_runs=MAX_RUN_PANELS,
    ),
    FigureSpec(
        "step_timeline",
        "Over time",
        "Steps of each replica",
        "About seventy steps around the moment at which most requests waited; the width of a bar is the step's duration.",
        plots.step_timeline,
        most_runs=MAX_TIMELINES,
    ),
    FigureSpec(
        "pools_over_time",
        "Over time",
        "Pools",
        "Replicas of each pool that have a step in flight, and KV blocks in use (mean over the pool's replicas). A pool that is always busy while another "
        "waits is the one to enlarge.",
        plots.pools_over_time,
        wanted=plots.has_pools,
        most_runs=MAX_SERIES,
    ),
    FigureSpec(
        "replicas_over_time",
        "Over time",
        "Replicas",
        "Replicas that start, are up or drain, as the scaler asked for them: a panel for each replicaset or pool, a line for each run.",
        plots.replicas_over_time,
        "mean_replicas",
        wanted=plots.has_scaling,
    ),
    FigureSpec(
        "emitted_over_time",
        "Over time",
        "Figures of the policies' own",
        "What policies emitted of themselves, at the time at which they did; the first eight by name.",
        plots.emitted_over_time,
        wanted=plots.has_emitted,
    ),
    FigureSpec(
        "service_by_tenant",
        "Tenants",
        "Service of each tenant",
        "Prompt tokens plus twice the output tokens that each tenant has got so far, whether it waited or not.",
        plots.service_by_tenant,
        None,
        _has_several_tenants,
        MAX_RUN_PANELS,
    ),
    FigureSpec(
        "service_difference",
        "Tenants",
        "Difference of service between backlogged tenants",
        "Of all pairs of tenants that both have requests waiting, the largest difference of what they have got since both wait (prompt tokens plus twice the output tokens). A fair policy keeps it "
        "near the size of a batch; a line that rises is a tenant that is passed by.",
        plots.service_difference,
        "max_service_difference",
        _has_several_tenants,
    ),
)
