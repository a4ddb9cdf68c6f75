"""Values of several settings, the best settings, and the differences between settings.

The scopes are all requests, each SLO class, each tenant and each pool. Settings are ranked only against settings under
the same load, and only if they kept up with it. With replications, differences in the primary metrics are tested
(`vajra_py.metrics.comparison.significance`); without replications a mark only shows the lowest or highest value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import combinations

from msgspec import Struct, field

from vajra_py.config.sweeps import values_of_label
from vajra_py.errors import RunError, did_you_mean
from vajra_py.metrics.comparison.intervals import Interval, positive_interval, proportion_interval
from vajra_py.metrics.comparison.metrics import BY_KEY, DEFAULT_PRIMARY, METRICS, Metric, metric_text, named_metrics
from vajra_py.metrics.comparison.significance import OVERLOADED, Field, Samples, Versus, adjust, groups, versus
from vajra_py.metrics.comparison.table_model import BEST, HIGHEST, LOWEST, WORSE
from vajra_py.metrics.runs.differences import natural

OVERALL = "overall"
_POOL = "pool "
_QUIET_ZEROS = (
    *("num_unfinished", "num_rejected", "num_expired", "num_aborted", "num_failed"),
    *("num_shed", "num_queue_full", "num_cannot_run", "num_degraded", "num_deferred"),
    *("num_hand_offs", "num_migrations", "num_moves", "num_called_off"),
)
Row = tuple[float | None, ...]


class ComparedSettings(Struct, frozen=True, dict=True):
    """Values of several settings by scope and metric."""

    names: tuple[str, ...]
    stability: tuple[str, ...]
    """Stability label of each setting: the most serious one among its replications."""
    values: Mapping[str, Mapping[str, Row]]
    """Raw value of each setting (the mean over its replications; None if undefined), by scope (`overall`, `slo_class
    gold`, `tenant a`) and metric key.
    """
    loads: tuple[str, ...]
    """For each setting, the values of the workload parameters in which the settings differ, as text; empty texts if
    the settings differ in no workload parameter.
    """
    samples: Mapping[str, Mapping[str, tuple[Samples, ...]]] = field(default_factory=dict)
    """Each setting's values by seed, by scope and metric key as in `values`; empty if no setting has several
    replications.
    """
    replications: tuple[int, ...] = ()
    """Number of runs of each setting."""
    copied: tuple[int, ...] = ()
    """For each setting whose seeds all give the same run, the number of its seeds; 0 for other settings. A setting
    whose seeds all give the same run is not tested and has no interval.
    """
    step_times: tuple[str, ...] = ()
    """Origin of each setting's step times, as a sentence without its full stop; an empty text for runs that do not
    record it. An empty tuple if no run records it.
    """
    primary: tuple[str, ...] = DEFAULT_PRIMARY
    """Keys of the metrics that are tested."""
    one_sample: tuple[str, ...] = ()
    """Reason why each setting's runs count as one observation; an empty text if each run is a replication. An empty
    tuple if every run of every setting is a replication.
    """
    workloads: str = ""
    """Sentence without its full stop on how the workloads differ; empty if they differ in nothing but their rate."""
    reasons: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """For each reason for a move, deferral or refusal, its count in each setting (mean over the setting's
    replications).
    """

    @property
    def scopes(self) -> tuple[str, ...]:
        """Names of all scopes: all requests, then each class, tenant and pool."""
        return tuple(self.values)

    @property
    def pools(self) -> tuple[str, ...]:
        """Scopes of pools, whose values describe replicas instead of requests."""
        return tuple(scope for scope in self.values if scope.startswith(_POOL))

    @property
    def groups(self) -> tuple[str, ...]:
        """Scopes of classes and tenants."""
        return tuple(scope for scope in self.scopes[1:] if scope not in self.pools)

    @property
    def is_replicated(self) -> bool:
        """True if any setting was run with several seeds."""
        return any(count > 1 for count in self.replications)

    def scope(self, given: str) -> str:
        """Return the full name of the scope `given`. The prefix `slo_class`, `tenant` or `pool` may be omitted if the
        name is unambiguous. Raises `RunError` for an unknown or ambiguous name.
        """
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
        """Return the position of the setting with this name; if there is none, of the only setting whose name has the
        same values: `8` also finds `rate=8`, since a sweep and its folders may name a setting in different ways. Raises
        `RunError` for an unknown name.
        """
        if name in self.names:
            return self.names.index(name)
        words = _words(name)
        found = [i for i, own in enumerate(self.names) if words and _words(own) == words]
        if len(found) == 1:
            return found[0]
        raise RunError(f"--baseline: no setting has that name ({name!r}). {did_you_mean(name, self.names)}")

    def interval(self, key: str, position: int, scope: str = OVERALL) -> Interval | None:
        """Return the 95 % confidence interval of a setting's mean over its replications; None for a single run, or if
        all replications have the same value.
        """
        samples = self._samples(key, scope)
        if not samples:
            return None
        make = proportion_interval if BY_KEY[key].is_proportion else positive_interval
        return make(list(samples[position].values()))

    def is_copied(self, position: int) -> bool:
        """Return True if a setting has several seeds and all of them give the same run."""
        return bool(self.copied) and self.copied[position] > 0

    def best(self, key: str, scope: str = OVERALL) -> frozenset[int]:
        """Return the positions of the best settings of all loads: for each load, those with the best value among the
        settings that kept up with the load.

        Without replications, all settings whose displayed value equals the best one are included. There is no best
        setting if all values are equal, if there is only one value, or if neither lower nor higher values of the metric
        are better. `key` may be any name that `named_metrics` accepts; raises `RunError` for an unknown name.
        """
        metric = BY_KEY.get(key) or named_metrics([key], "best")[0]
        row = self.values[scope][metric.key]
        found: set[int] = set()
        for members in groups(self.loads):
            known = {i: value for i in members if self.stability[i] != OVERLOADED and (value := row[i]) is not None}
            found |= _best_of(metric, known, as_read=not self._is_tested(members))
        return frozenset(found)

    def best_of(self, key: str, position: int, scope: str = OVERALL) -> int | None:
        """Return the lowest position among the best settings under the load of the setting at `position`; None if there
        is no best setting.
        """
        return min(self.best(key, scope) & set(self.of_load(position)), default=None)

    def marks(self, key: str, scope: str = OVERALL) -> dict[int, str]:
        """Return the marks of values by position of the setting; `vajra_py.metrics.comparison.tables.value_notes`
        explains them.

        Settings with replications are marked in primary metrics only. The best value of a load has a star if it is
        significantly better than the values of all other settings that are not overloaded, else an arrow; values that
        are significantly worse than the best are marked too. There are no marks under a load if the runs of any of its
        settings count as one observation. Nothing is claimed about a value without a mark.
        """
        arrow = LOWEST if BY_KEY[key].lower_is_better else HIGHEST
        best = self.best(key, scope)
        found: dict[int, str] = {}
        for members in groups(self.loads):
            own = sorted(best & set(members))
            if self.one_sample and any(self.one_sample[i] for i in members):
                continue  # no mark: a mark would suggest significance, which is unknown
            if not self._is_tested(members):
                found |= dict.fromkeys(own, arrow)
            elif own and key in self.primary:
                others = [i for i in members if i not in own and self.stability[i] != OVERLOADED]
                worse = [i for i in others if self.versus(i, own[0], key, scope).is_significant]
                is_alone = len(own) == 1 and len(worse) == len(others)
                found |= dict.fromkeys(own, BEST if is_alone else arrow) | dict.fromkeys(worse, WORSE)
        return found

    @cached_property
    def _adjusted(self) -> dict[str, dict[tuple[str, int, int], float]]:
        """Adjusted p-values by scope and by (metric, lower position, higher position), computed once."""
        return {}

    def versus(self, position: int, baseline: int, key: str, scope: str = OVERALL) -> Versus:
        """Return the comparison of a setting with a baseline in one metric. All tables and files use this one
        result.
        """
        own = self._field(scope)
        if scope not in self._adjusted:
            self._adjusted[scope] = adjust(own)
        return versus(own, self._adjusted[scope], (baseline, position), key)

    def against(self, baseline: int, keys: Sequence[str], scope: str = OVERALL) -> list[Versus]:
        """Compare the baseline with each other setting under the baseline's load, in each metric in `keys`. Comparisons
        that cannot be tested are left out.
        """
        found = [self.versus(i, baseline, key, scope) for _, i in self.pairs(baseline) for key in keys]
        return [one for one in found if not one.untested]

    def pairs(self, baseline: int | None = None) -> list[tuple[int, int]]:
        """Return the pairs of settings under the same load, as positions, with loads in natural order. If `baseline` is
        given, return only the pairs that contain it.
        """
        if baseline is not None:
            return [(baseline, i) for i in self.of_load(baseline) if i != baseline]
        starts = [i for i in self.by_load() if i in self.load_starts()]
        return [pair for start in starts for pair in combinations(self.of_load(start), 2)]

    def family_words(self, scope: str = OVERALL) -> str:
        """Return a sentence without its full stop on the comparisons whose p-values are adjusted together; empty if
        nothing is tested.
        """
        self.versus(0, 0, METRICS[0].key, scope)
        tested = self._adjusted[scope]
        if not tested:
            return ""
        keys = [key for key in self.primary if any(key == own for own, *_ in tested)]
        counts = sorted({len([1 for _, i, _ in tested if i in members]) for members in groups(self.loads)} - {0})
        count = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        each = " under each load" if len(groups(self.loads)) > 1 else ""
        names = ", ".join(BY_KEY[key].label for key in keys)
        return f"Significance at 5 % after Holm's correction for {count} comparisons{each}: {names}, between all pairs of settings"

    def one_sample_notes(self) -> dict[str, list[str]]:
        """Return, for each reason why a setting's runs count as one observation, the names of its settings."""
        found: dict[str, list[str]] = {}
        for name, reason in zip(self.names, self.one_sample, strict=False):
            if reason:
                found.setdefault(reason, []).append(name)
        return found

    def of_load(self, position: int) -> list[int]:
        """Return the positions of the settings under the same load as the setting at `position`."""
        return [i for i, load in enumerate(self.loads) if load == self.loads[position]]

    def by_load(self) -> list[int]:
        """Return the positions of the settings, grouped by load, with loads in natural order."""
        return sorted(range(len(self.names)), key=lambda i: (natural(self.loads[i]), i))

    def load_starts(self) -> frozenset[int]:
        """Return the position of the first setting of each load."""
        order = self.by_load()
        return frozenset(
            i
            for before, i in zip([None, *order], order, strict=False)
            if before is None or self.loads[i] != self.loads[before]
        )

    def shown(self, scope: str = OVERALL, level: int = 1) -> list[Metric]:
        """Return the metrics to show, up to this `Metric.level`: those for which any setting has a value, except counts
        listed in `_QUIET_ZEROS` that are 0 for every setting.
        """
        rows = self.values[scope]
        return [
            metric
            for metric in METRICS
            if metric.level <= level
            and any(value is not None for value in rows[metric.key])
            and not (metric.key in _QUIET_ZEROS and not any(rows[metric.key]))
        ]

    def _samples(self, key: str, scope: str) -> tuple[Samples, ...]:
        return self.samples.get(scope, {}).get(key, ())

    def _field(self, scope: str) -> Field:
        return Field(self.names, self.loads, self.stability, self.primary, self.samples.get(scope, {}), self.one_sample)

    def _is_tested(self, members: Sequence[int]) -> bool:
        """Return whether any of these settings has replications."""
        return any(self.replications[i] > 1 for i in members) if self.replications else False


def _best_of(metric: Metric, known: Mapping[int, float], *, as_read: bool) -> set[int]:
    """Return the positions with the best value; with `as_read`, also positions whose displayed value is the same."""
    if metric.lower_is_better is None or len(known) < 2:
        return set()
    target = min(known.values()) if metric.lower_is_better else max(known.values())
    text = metric_text(metric, target)
    best = {i for i, value in known.items() if value == target or (as_read and metric_text(metric, value) == text)}
    return set() if len(best) == len(known) else best


def _words(name: str) -> list[str]:
    """Return the sorted words of a setting's name; axes and the characters between values are left out."""
    return sorted(re.findall(r"[A-Za-z0-9.]+", values_of_label(name)))


def scope_title(scope: str) -> str:
    """Return the heading of a scope."""
    if scope == OVERALL:
        return "All requests"
    if scope.startswith(_POOL):
        return f"Pool {scope.removeprefix(_POOL)}"
    return scope.replace("slo_class ", "SLO class ", 1)
