"""Puts the numbers of runs side by side: one column per setting, the mean of its replications where it has several.

The scopes are all requests, each SLO class and each tenant. Settings are better or worse under the same load only. With replications, "better" is tested: settings are compared
in pairs of one seed, corrected for the number of pairs; without them a mark says only which value reads best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vajra_py.errors import RunError, did_you_mean
from vajra_py.metrics.comparison_metrics import BY_KEY, METRICS, Metric, metric_text
from vajra_py.metrics.differences import natural
from vajra_py.metrics.intervals import Interval, floats, latency_interval, replication_interval
from vajra_py.metrics.pairs import SIGNIFICANT_P, Difference, difference, holm
from vajra_py.metrics.replications import Setting, group_replications, load_labels
from vajra_py.metrics.run_data import RunData
from vajra_py.metrics.within_run import run_intervals

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

OVERALL = "overall"
_QUIET_ZEROS = ("num_unfinished", "num_rejected", "num_expired", "num_aborted", "num_failed")
_LABELS = ("stable", "unknown", "backlogged", "overloaded")
"""From the least to the most serious."""

Row = tuple[float | None, ...]
Samples = Mapping[str, float]
"""Values by seed."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The numbers of several settings side by side."""

    names: tuple[str, ...]
    stability: tuple[str, ...]
    """The most serious label among each setting's replications."""
    values: Mapping[str, Mapping[str, Row]]
    """By scope (`overall`, `slo_class gold`, `tenant a`), then by metric key: a raw value per setting (the mean of its replications), None where it has none."""
    loads: tuple[str, ...]
    """What each setting's workload has of its own, as text; empty for all when they share one."""
    samples: Mapping[str, Mapping[str, tuple[Samples, ...]]] = field(default_factory=dict)
    """The same, by seed; only of settings with several replications."""
    within: Mapping[str, tuple[Mapping[str, Interval], ...]] = field(default_factory=dict)
    """By scope: for each setting of one run, intervals of its metrics by batch means."""
    replications: tuple[int, ...] = ()
    """Runs of each setting."""
    copied: tuple[int, ...] = ()
    """Of each setting whose several seeds all give one run, their number; 0 for others. Nothing is tested of such a setting, and it has no interval."""
    step_times: tuple[str, ...] = ()
    """Where each setting's step times come from, in a sentence without its stop; empty for runs that do not say. No entries: none says."""

    @property
    def scopes(self) -> tuple[str, ...]:
        """All requests first, then each class, then each tenant."""
        return tuple(self.values)

    @property
    def is_replicated(self) -> bool:
        """Whether some setting was run with several seeds."""
        return any(count > 1 for count in self.replications)

    def scope(self, given: str) -> str:
        """The scope of that name; a class or tenant needs no `slo_class` or `tenant` in front where that is not ambiguous. Raises `RunError`."""
        if given in self.values:
            return given
        found = [scope for scope in self.values if scope.partition(" ")[2] == given]
        if len(found) == 1:
            return found[0]
        if found:
            raise RunError(f"--scope: is the name of several ({given!r}). Allowed: {', '.join(found)}.")
        names = [*self.values, *(scope.partition(" ")[2] for scope in self.scopes[1:])]
        raise RunError(f"--scope: nothing has that name ({given!r}). {did_you_mean(given, names)}")

    def position(self, name: str) -> int:
        """The setting of that name. Raises `RunError`."""
        if name in self.names:
            return self.names.index(name)
        raise RunError(f"--baseline: no setting has that name ({name!r}). {did_you_mean(name, self.names)}")

    def interval(self, key: str, position: int, scope: str = OVERALL) -> Interval | None:
        """The 95 % interval of a value: over replications, of a single run by batch means; None where there is no ground for one."""
        samples = self._samples(key, scope)
        found: Interval | None = None
        if self.is_copied(position):
            return None
        if samples and len(samples[position]) > 1:
            make = latency_interval if BY_KEY[key].is_latency else replication_interval
            found = make(list(samples[position].values()))
        elif scope in self.within:
            found = self.within[scope][position].get(key)
        if found is None:
            return None
        most = 1.0 if BY_KEY[key].unit == "%" else found.high
        return Interval(max(found.low, 0.0), min(found.high, most))

    def is_copied(self, position: int) -> bool:
        """Whether a setting is one run for several seeds, since all of them give the same."""
        return bool(self.copied) and self.copied[position] > 0

    def best(self, key: str, scope: str = OVERALL) -> frozenset[int]:
        """Positions of the settings with the best value among those of the same load, and of those that read the same as it.

        Nothing is best among values that all read the same, in a single one, or in a metric without a direction.
        """
        row = self.values[scope][key]
        found: set[int] = set()
        for members in self._by_load():
            found |= _best_of(BY_KEY[key], {i: row[i] for i in members if row[i] is not None})
        return frozenset(found)

    def ties(self, key: str, scope: str = OVERALL) -> frozenset[int]:
        """Positions of settings that replications cannot tell from the best one of their load, the best one included.

        All pairs of settings of a load are tested, and Holm's correction is made for their number. Empty where the best one is significantly better than all others, and where
        nothing can be tested.
        """
        samples = self._samples(key, scope)
        best = self.best(key, scope)
        found: set[int] = set()
        if not samples:
            return frozenset()
        for members in self._by_load():
            pairs = [(i, j) for n, i in enumerate(members) for j in members[n + 1 :]]
            tested = [(i, j, own) for i, j in pairs if (own := difference(samples[i], samples[j])) is not None]
            corrected = holm([own.p_value for *_, own in tested])
            for (i, j, _), p_value in zip(tested, corrected, strict=True):
                if p_value >= SIGNIFICANT_P and (i in best or j in best):
                    found |= {i, j}
        return frozenset(found)

    def against(self, baseline: int, keys: Sequence[str], scope: str = OVERALL) -> list[Versus]:
        """Every other setting of the baseline's load against it in these metrics, corrected together for their number (Holm)."""
        return self.versus([(baseline, i) for i in self.of_load(baseline) if i != baseline], keys, scope)

    def versus(self, pairs: Sequence[tuple[int, int]], keys: Sequence[str], scope: str = OVERALL) -> list[Versus]:
        """The second of each pair of positions against the first (the baseline) in these metrics, corrected together for their number (Holm)."""
        found = []
        for baseline, i in pairs:
            for key in keys:
                samples = self._samples(key, scope)
                own = difference(samples[i], samples[baseline]) if samples else None
                if own is not None:
                    found.append((i, baseline, key, own))
        corrected = holm([own.p_value for *_, own in found])
        return [Versus(*one, p_value) for one, p_value in zip(found, corrected, strict=True)]

    def of_load(self, position: int) -> list[int]:
        """The settings under the same load as this one."""
        return [i for i, load in enumerate(self.loads) if load == self.loads[position]]

    def by_load(self) -> list[int]:
        """Positions of the settings, those of one load together, in natural order of the loads."""
        return sorted(range(len(self.names)), key=lambda i: (natural(self.loads[i]), i))

    def load_starts(self) -> frozenset[int]:
        """The first setting of each load, in that order."""
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

    def frame(self, scope: str | None = None) -> pd.DataFrame:
        """One row per scope and setting, one column per metric, raw values (seconds, fractions), and `_low` and `_high` of each that has an interval."""
        import pandas as pd

        from vajra_py.metrics.comparison_tables import records

        return pd.DataFrame(records(self, scope))

    def to_csv(self, scope: str | None = None) -> str:
        """The same rows as `frame` as CSV text, of one scope or of all; no value is an empty field."""
        from vajra_py.metrics.comparison_tables import csv_text

        return csv_text(self, scope)

    def to_markdown(self, scope: str = OVERALL) -> str:
        """A Markdown table, one row per metric, the best value of each in bold."""
        from vajra_py.metrics.comparison_tables import markdown

        return markdown(self, scope)

    def to_latex(self, scope: str = OVERALL) -> str:
        """A LaTeX table (package booktabs), one row per metric, the best value of each in bold."""
        from vajra_py.metrics.comparison_tables import latex

        return latex(self, scope)

    def render(self, scope: str = OVERALL) -> RenderableType:
        """What to print on a terminal with rich; the best value of each metric is bold and marked.

        A few settings are columns. More are rows; metrics that the terminal has no room for go to a second table, and a third.
        """
        from vajra_py.metrics.comparison_tables import terminal

        return terminal(self, scope)

    def _by_load(self) -> list[list[int]]:
        return [[i for i, own in enumerate(self.loads) if own == load] for load in dict.fromkeys(self.loads)]

    def _samples(self, key: str, scope: str) -> tuple[Samples, ...]:
        return self.samples.get(scope, {}).get(key, ())


@dataclass(frozen=True, slots=True)
class Versus:
    """One setting against its baseline in one metric."""

    position: int
    baseline: int
    key: str
    difference: Difference
    """Of the setting from the baseline."""
    corrected_p: float

    @property
    def is_significant(self) -> bool:
        """Whether chance alone would rarely make such a difference, the number of comparisons considered."""
        return self.corrected_p < SIGNIFICANT_P

    @property
    def better_fraction(self) -> float | None:
        """Probability that a replication of the setting is better than one of the baseline; None in a metric without a direction."""
        lower_is_better = BY_KEY[self.key].lower_is_better
        if lower_is_better is None:
            return None
        above = self.difference.above_fraction
        return 1 - above if lower_is_better else above


def _best_of(metric: Metric, known: Mapping[int, float | None]) -> set[int]:
    values = [value for value in known.values() if value is not None]
    if metric.lower_is_better is None or len(values) < 2:
        return set()
    target = metric_text(metric, min(values) if metric.lower_is_better else max(values))
    best = {i for i, value in known.items() if metric_text(metric, value) == target}
    return set() if len(best) == len(known) else best


def compare(runs: Sequence[RunData], *, each_run: bool = False) -> Comparison:
    """Set the summaries of these runs side by side; RunError when there is no run.

    Runs that differ in their seed only are one setting, unless `each_run`.
    """
    if not runs:
        raise RunError("compare: no run was given. Name at least one run folder.")
    settings = group_replications(runs, each_run=each_run)
    scopes: dict[str, tuple[str, str | None]] = {OVERALL: (OVERALL, None)}
    for section, noun in (("by_slo_class", "slo_class"), ("by_tenant", "tenant")):
        names = dict.fromkeys(name for run in runs for name in run.summary.value(section) or {})
        scopes |= {f"{noun} {name}": (section, name) for name in sorted(names)}
    samples = {
        scope: {metric.key: tuple(_sampled(setting, place, metric) for setting in settings) for metric in METRICS}
        for scope, place in scopes.items()
    }
    return Comparison(
        names=tuple(setting.name for setting in settings),
        stability=tuple(_label(setting) for setting in settings),
        values={
            scope: {key: tuple(map(_mean, own)) for key, own in by_key.items()} for scope, by_key in samples.items()
        },
        loads=load_labels([setting.first for setting in settings]),
        samples=samples if any(len(setting.runs) > 1 for setting in settings) else {},
        within=_within(settings, list(scopes)),
        replications=tuple(len(setting.runs) for setting in settings),
        copied=tuple(setting.num_seeds if setting.is_copied else 0 for setting in settings),
        step_times=tuple(map(_step_times, settings)),
    )


def _within(settings: Sequence[Setting], scopes: Sequence[str]) -> Mapping[str, tuple[Mapping[str, Interval], ...]]:
    """Intervals within the runs of settings that have one only."""
    found = [run_intervals(setting.first, scopes) if len(setting.runs) == 1 else {} for setting in settings]
    return {scope: tuple(own.get(scope, {}) for own in found) for scope in scopes} if any(found) else {}


def _sampled(setting: Setting, place: tuple[str, str | None], metric: Metric) -> Samples:
    values = {seed: _value(run, place, metric) for seed, run in zip(setting.seeds, setting.runs, strict=True)}
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


def scope_title(scope: str) -> str:
    """How a scope is called in a heading."""
    if scope == OVERALL:
        return "All requests"
    return scope.replace("slo_class ", "SLO class ", 1)
