"""Compare runs by setting; values are means over a setting's replications."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import structs

from vajra_py.errors import RunError
from vajra_py.metrics.comparison.compared_settings import OVERALL, ComparedSettings, Row
from vajra_py.metrics.comparison.intervals import floats
from vajra_py.metrics.comparison.metrics import DEFAULT_PRIMARY, METRICS, Metric, named_metrics
from vajra_py.metrics.comparison.reason_table import reasons_of
from vajra_py.metrics.comparison.significance import OVERLOADED, Samples
from vajra_py.metrics.comparison.table_renderers import TerminalTable, latex, markdown
from vajra_py.metrics.comparison.tables import (
    DIFFERENCE_COLUMNS,
    WIDE,
    difference_records,
    json_text,
    origins,
    records,
    value_csv,
    value_table,
)
from vajra_py.metrics.runs.replications import Setting, group_replications, load_labels, workload_differences
from vajra_py.metrics.runs.run_data import RunData

if TYPE_CHECKING:
    import pandas as pd

_LABELS = ("stable", "unknown", "backlogged", OVERLOADED)
"""Stability labels from the least to the most serious."""


class Comparison(ComparedSettings, frozen=True):
    """Comparison of several settings, with exports to data frames, CSV, JSON, Markdown, LaTeX and terminal tables."""

    def frame(self, scope: str | None = None) -> pd.DataFrame:
        """Return a data frame with a row per scope and setting. Each metric has columns for its raw value (seconds,
        fractions), the ends of its interval (`_low`, `_high`), and the p-values of the difference from the best setting
        of the load (`_p_value`, `_p_adjusted`).
        """
        import pandas as pd

        return pd.DataFrame(records(self, scope))

    def difference_frame(self, scope: str | None = None, baseline: str | None = None) -> pd.DataFrame:
        """Return a data frame with a row per scope, metric and pair of settings under the same load (with a baseline,
        only the pairs that contain it): values, difference, ends of their intervals, p-values and verdict.
        """
        import pandas as pd

        position = None if baseline is None else self.position(baseline)
        return pd.DataFrame(difference_records(self, scope, position), columns=list(DIFFERENCE_COLUMNS))

    def to_csv(self, scope: str | None = None) -> str:
        """Return the rows of `frame` as CSV text, for one scope or all; a missing value is an empty field."""
        return value_csv(self, scope)

    def to_json(self, scope: str | None = None) -> str:
        """Return JSON text with the settings, their values, all differences, and a sentence on the comparisons whose
        p-values are adjusted together.
        """
        return json_text(self, scope)

    def to_markdown(self, scope: str = OVERALL) -> str:
        """Return a Markdown table with a row per metric and the best value of each in bold."""
        table = value_table(self, scope, self.shown(scope), by_setting=False)
        return markdown(structs.replace(table, notes=(*table.notes, *origins(self))))

    def to_latex(self, scope: str = OVERALL, columns: Sequence[str] = ()) -> str:
        """Return a LaTeX table (package booktabs) that fits a page, with its legend in the caption.

        Up to `WIDE` settings are shown as columns. If there are more, settings are rows, with a rule between loads, and
        the primary metrics are columns. If `columns` names metrics, settings are rows and these metrics the columns, in
        that order.
        """
        metrics = named_metrics(columns, "--columns") if columns else None
        if metrics is None and len(self.names) > WIDE:
            metrics = [metric for metric in self.shown(scope, 2) if metric.key in self.primary]
        table = value_table(self, scope, metrics, by_setting=True if columns else None)
        return latex(structs.replace(table, notes=(*table.notes, *origins(self))))

    def render(self, scope: str = OVERALL, columns: Sequence[str] = ()) -> TerminalTable:
        """Return a table to print with rich on a terminal; the best value of each metric is bold and marked.

        Up to `WIDE` settings are shown as columns. If there are more, settings are rows, and the table is split if its
        metrics do not fit the terminal. If `columns` names metrics, settings are rows and these metrics the columns.
        """
        metrics = named_metrics(columns, "--columns") if columns else None
        return TerminalTable(value_table(self, scope, metrics, by_setting=True if columns else None))


def compare(runs: Sequence[RunData], *, each_run: bool = False, metrics: Sequence[str] = ()) -> Comparison:
    """Compare the summaries of these runs. Raises `RunError` if there are no runs or a metric is unknown.

    Runs that differ only in their seed form one setting, unless `each_run` is set. `metrics` names the primary metrics,
    which are tested; by default P99 TTFT, P99 TBT and SLO attainment.
    """
    if not runs:
        raise RunError("compare: no run was given. Name at least one run folder.")
    settings = group_replications(runs, each_run=each_run)
    scopes: dict[str, tuple[str, str | None]] = {OVERALL: (OVERALL, None)}
    for section, noun in (("by_slo_class", "slo_class"), ("by_tenant", "tenant"), ("pools", "pool")):
        names = dict.fromkeys(name for run in runs for name in run.summary.value(section) or {})
        ordered = list(names) if section == "pools" else sorted(names)  # pools keep the configuration's order
        scopes |= {f"{noun} {name}": (section, name) for name in ordered}
    samples = {
        scope: {metric.key: tuple(_sampled(setting, place, metric) for setting in settings) for metric in METRICS}
        for scope, place in scopes.items()
    }
    values = {scope: {key: tuple(map(_mean, own)) for key, own in by_key.items()} for scope, by_key in samples.items()}
    firsts = [setting.first for setting in settings]
    return Comparison(
        names=tuple(setting.name for setting in settings),
        stability=tuple(_label(setting) for setting in settings),
        values=values,
        loads=load_labels(firsts),
        samples=samples if any(len(setting.runs) > 1 for setting in settings) else {},
        replications=tuple(len(setting.runs) for setting in settings),
        copied=tuple(setting.num_seeds if setting.is_copied else 0 for setting in settings),
        step_times=tuple(map(_step_times, settings)),
        primary=_primary(metrics, values[OVERALL]),
        one_sample=tuple(setting.one_sample for setting in settings),
        workloads=workload_differences(firsts),
        reasons=reasons_of(settings),
    )


def _primary(given: Sequence[str], values: Mapping[str, Row]) -> tuple[str, ...]:
    if given:
        return tuple(metric.key for metric in named_metrics(given))
    return tuple(key for key in DEFAULT_PRIMARY if any(value is not None for value in values[key]))


def _sampled(setting: Setting, place: tuple[str, str | None], metric: Metric) -> Samples:
    values = {seed: _value(run, place, metric) for seed, run in zip(setting.seeds, setting.runs, strict=False)}
    return {seed: value for seed, value in values.items() if value is not None}


def _mean(samples: Samples) -> float | None:
    if len(samples) == 1:
        return next(iter(samples.values()))
    return float(floats(list(samples.values())).mean()) if samples else None


def _step_times(setting: Setting) -> str:
    sentences = (str(run.summary.value("step_times.sentence") or "") for run in setting.runs)
    return " or ".join(dict.fromkeys(filter(None, sentences)))


def _label(setting: Setting) -> str:
    labels = [str(run.summary.value("stability.label") or "unknown") for run in setting.runs]
    return max(labels, key=lambda label: _LABELS.index(label) if label in _LABELS else 0)


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
