"""Compare runs metric by metric, overall and per class of requests.

One number per run, metric and scope (all requests, one SLO class, one tenant), taken from the runs' summaries. In each row the best value is marked:
the lowest latency, the highest throughput; a mark is a fact about that row, not a verdict, so the first row says whether the run was stable.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vajra_py.errors import RunError
from vajra_py.metrics.differences import SEED_PATH, axes, is_workload, natural
from vajra_py.metrics.run_data import RunData, distinct

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
    from rich.table import Table as RichTable

OVERALL = "overall"
_CAPTION = "* best of its metric"
_WIDE_RUNS = 6
"""Up to this many runs are columns; more are rows, of fewer metrics."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of a comparison."""

    key: str
    """Column name in data frames and CSV, with the unit of the raw value."""
    label: str
    path: str
    """Where a group of the summary has it; a path that starts with `.` starts at the summary's top and exists for all requests only."""
    unit: str = ""
    """Unit that is shown."""
    scale: float = 1.0
    """Raw value times this is in the unit shown."""
    lower_is_better: bool | None = None
    """None: neither is."""
    level: int = 1
    """0: shown even when there are many runs; 1: shown when there are few; 2: in data frames, CSV and full tables only."""


def _latency(key: str, label: str, section: str, unit: str, main: Iterable[str]) -> list[Metric]:
    levels = {"mean": 1, "p50": 1, "p90": 1, "p99": 1} | dict.fromkeys(main, 0)
    scale = 1000.0 if unit == "ms" else 1.0
    names = {"mean": "mean", "p50": "P50", "p90": "P90", "p95": "P95", "p99": "P99", "max": "max"}
    return [
        Metric(f"{key}_{stat}_s", f"{label} {name}", f"{section}.{stat}", unit, scale, True, levels.get(stat, 2))
        for stat, name in names.items()
    ]


METRICS: tuple[Metric, ...] = (
    Metric("num_arrived", "Requests", "counts.arrived"),
    Metric("num_completed", "Completed", "counts.completed", lower_is_better=False),
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
    Metric("jain_index", "Jain index (tenants)", ".fairness.jain_index", "", 1.0, False),
)
"""Every metric, in the order of reports."""

_QUIET_ZEROS = ("num_unfinished", "num_rejected", "num_expired", "num_aborted", "num_failed")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The numbers of several runs side by side."""

    names: tuple[str, ...]
    stability: tuple[str, ...]
    values: Mapping[str, Mapping[str, tuple[float | None, ...]]]
    """By scope (`overall`, `slo_class gold`, `tenant a`), then by metric key: a raw value per run, None where it has none."""
    loads: tuple[str, ...]
    """What each run's workload has of its own, as text; empty for all when they share one. Runs are better or worse under the same load only."""

    @property
    def scopes(self) -> tuple[str, ...]:
        """All requests first, then each class, then each tenant."""
        return tuple(self.values)

    def best(self, key: str, scope: str = OVERALL) -> frozenset[int]:
        """Positions of the runs with the best value among those of the same load, and of runs that read the same as it.

        Nothing is best among values that all read the same, in a single one, or in a metric without a direction.
        """
        metric = _BY_KEY[key]
        row = self.values[scope][key]
        found: set[int] = set()
        for load in dict.fromkeys(self.loads):
            known = {i: row[i] for i in range(len(row)) if self.loads[i] == load and row[i] is not None}
            found |= _best_of(metric, known)
        return frozenset(found)

    def by_load(self) -> list[int]:
        """Positions of the runs, those of one load together, in natural order of the loads."""
        return sorted(range(len(self.names)), key=lambda i: (natural(self.loads[i]), i))

    def load_starts(self) -> frozenset[int]:
        """The first run of each load, in that order."""
        order = self.by_load()
        return frozenset(
            i
            for before, i in zip([None, *order], order, strict=False)
            if before is None or self.loads[i] != self.loads[before]
        )

    def shown(self, scope: str = OVERALL, level: int = 1) -> list[Metric]:
        """Metrics up to this level that are worth a row: those with a value, without counts of what never happened."""
        rows = self.values[scope]
        return [
            metric
            for metric in METRICS
            if metric.level <= level
            and any(value is not None for value in rows[metric.key])
            and not (metric.key in _QUIET_ZEROS and not any(rows[metric.key]))
        ]

    def frame(self) -> pd.DataFrame:
        """One row per scope and run, one column per metric, raw values (seconds, fractions)."""
        import pandas as pd

        return pd.DataFrame(self._records())

    def to_csv(self) -> str:
        """The same rows as `frame` as CSV text; no value is an empty field."""
        text = io.StringIO()
        writer = csv.DictWriter(text, ["scope", "run", "stability", *_BY_KEY], lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._records())
        return text.getvalue()

    def to_markdown(self, scope: str = OVERALL) -> str:
        """A Markdown table, one row per metric, the best value of each in bold."""
        lines = [
            "| " + " | ".join(["metric", *(_escaped(name) for name in self.names)]) + " |",
            "|---|" + "---:|" * len(self.names),
            "| " + " | ".join(["stability", *self.stability]) + " |",
        ]
        for metric in self.shown(scope):
            best = self.best(metric.key, scope)
            cells = [
                f"**{metric_text(metric, value)}**" if i in best else metric_text(metric, value)
                for i, value in enumerate(self._row(scope, metric))
            ]
            lines.append("| " + " | ".join([titled(metric), *cells]) + " |")
        return "\n".join(lines) + "\n"

    def render(self, scope: str = OVERALL) -> RenderableType:
        """What to print on a terminal with rich; the best value of each metric is bold and marked with an asterisk.

        A few runs are columns. More runs are rows; metrics that the terminal has no room for go to a second table, and a third.
        """
        if len(self.names) <= _WIDE_RUNS:
            return self._by_metric(scope)
        return _ByRun(self, scope)

    def _by_metric(self, scope: str) -> RichTable:
        from rich.markup import escape
        from rich.table import Table as RichTable

        table = RichTable(title=escape(scope_title(scope)), caption=_CAPTION if len(self.names) > 1 else None)
        table.add_column("metric")
        for name in self.names:
            table.add_column(escape(name), justify="right", overflow="fold")
        table.add_row("stability", *self.stability)
        for metric in self.shown(scope):
            table.add_row(titled(metric), *self._marked(scope, metric))
        return table

    def run_tables(self, scope: str, width: int) -> list[RichTable]:
        """Tables with a row per run, each at most `width` characters wide if its first metric fits at all."""
        columns = [("stability", list(self.stability))]
        columns += [(titled(metric), self._marked(scope, metric)) for metric in self.shown(scope, level=0)]
        room = width - max(map(len, (*self.names, "run"))) - 4
        pages: list[list[tuple[str, list[str]]]] = []
        left = -1
        for title, cells in columns:
            needed = _needed_width(title, cells) + 3
            if left < needed:
                pages.append([])
                left = room
            pages[-1].append((title, cells))
            left -= needed
        return [self._page(scope if not i else None, page, i == len(pages) - 1) for i, page in enumerate(pages)]

    def _page(self, scope: str | None, columns: Sequence[tuple[str, list[str]]], is_last: bool) -> RichTable:
        from rich.markup import escape
        from rich.table import Table as RichTable

        title = None if scope is None else escape(scope_title(scope))
        table = RichTable(title=title, caption=_CAPTION if is_last else None)
        table.add_column("run", no_wrap=True)
        for name, cells in columns:
            justify: JustifyMethod = "left" if name == "stability" else "right"
            table.add_column(name, justify=justify, width=_needed_width(name, cells))
        for i in self.by_load():
            if i in self.load_starts():
                table.add_section()
            table.add_row(escape(self.names[i]), *(cells[i] for _, cells in columns))
        return table

    def _marked(self, scope: str, metric: Metric) -> list[str]:
        best = self.best(metric.key, scope)
        texts = [metric_text(metric, value) for value in self._row(scope, metric)]
        return [f"[bold]{text}*[/bold]" if i in best else text for i, text in enumerate(texts)]

    def _row(self, scope: str, metric: Metric) -> tuple[float | None, ...]:
        return self.values[scope][metric.key]

    def _records(self) -> list[dict[str, Any]]:
        return [
            {"scope": scope, "run": name, "stability": self.stability[i]}
            | {metric.key: rows[metric.key][i] for metric in METRICS}
            for scope, rows in self.values.items()
            for i, name in enumerate(self.names)
        ]


def _best_of(metric: Metric, known: Mapping[int, float | None]) -> set[int]:
    values = [value for value in known.values() if value is not None]
    if metric.lower_is_better is None or len(values) < 2:
        return set()
    target = metric_text(metric, min(values) if metric.lower_is_better else max(values))
    best = {i for i, value in known.items() if metric_text(metric, value) == target}
    return set() if len(best) == len(known) else best


@dataclass(frozen=True, slots=True)
class _ByRun:
    """Lays the tables out when the terminal's width is known."""

    comparison: Comparison
    scope: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RichTable]:
        yield from self.comparison.run_tables(self.scope, options.max_width)


def _needed_width(title: str, cells: Sequence[str]) -> int:
    """Characters of the longest word of the title, or of the longest cell without its mark-up."""
    shown = (cell.removeprefix("[bold]").removesuffix("[/bold]") for cell in cells)
    return max(map(len, (*title.split(), *shown)))


_BY_KEY: Mapping[str, Metric] = {metric.key: metric for metric in METRICS}


def compare(runs: Sequence[RunData]) -> Comparison:
    """Set the summaries of these runs side by side; RunError when there is no run."""
    if not runs:
        raise RunError("compare: no run was given. Name at least one run folder.")
    runs = distinct(runs)
    scopes: dict[str, tuple[str, str | None]] = {OVERALL: (OVERALL, None)}
    for section, noun in (("by_slo_class", "slo_class"), ("by_tenant", "tenant")):
        names = dict.fromkeys(name for run in runs for name in run.summary.value(section) or {})
        scopes |= {f"{noun} {name}": (section, name) for name in sorted(names)}
    return Comparison(
        names=tuple(run.name for run in runs),
        stability=tuple(str(run.summary.value("stability.label") or "unknown") for run in runs),
        values={
            scope: {metric.key: tuple(_value(run, place, metric) for run in runs) for metric in METRICS}
            for scope, place in scopes.items()
        },
        loads=_loads(runs),
    )


def _loads(runs: Sequence[RunData]) -> tuple[str, ...]:
    """What sets each run's workload apart from the others', without the seed."""
    varied = [axis for axis in axes(runs) if is_workload(axis) and axis.path != SEED_PATH]
    return tuple(", ".join(f"{axis.label} {axis.values[i]}" for axis in varied) for i in range(len(runs)))


def _value(run: RunData, place: tuple[str, str | None], metric: Metric) -> float | None:
    section, name = place
    if metric.path.startswith("."):
        found = run.summary.value(metric.path[1:]) if name is None else None
    else:
        # A tenant's name may hold dots: its section is fetched by key, not by path.
        group = run.summary.value(section) or {}
        found = _dig(group if name is None else group.get(name, {}), metric.path)
    return None if found is None else float(found)


def _dig(group: Any, path: str) -> Any:
    for key in path.split("."):
        if not isinstance(group, Mapping):
            return None
        group = group.get(key)
    return group


def scope_title(scope: str) -> str:
    """How a scope is called in a heading."""
    if scope == OVERALL:
        return "All requests"
    return scope.replace("slo_class ", "SLO class ", 1)


def titled(metric: Metric) -> str:
    """The metric's label with its unit."""
    return f"{metric.label} ({metric.unit})" if metric.unit else metric.label


def metric_text(metric: Metric, value: float | None) -> str:
    """A raw value of this metric in its unit, with three or four significant digits; a dash for none."""
    if value is None:
        return "–"
    shown = value * metric.scale
    if metric.key.startswith("num_"):
        return f"{shown:,.0f}"
    if metric.unit == "%":
        return f"{shown:.1f}"
    return significant(shown)


def significant(value: float) -> str:
    """Four significant digits at most, never in exponent form for sizes that people read."""
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


def _escaped(name: str) -> str:
    return name.replace("|", "\\|")
