"""Comparison of policies on several workloads and loads: best values by metric, and differences from a baseline.

This module tests no differences: values, intervals, marks and verdicts come from the workloads' comparisons.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vajra_py.metrics.comparison.compared_settings import OVERALL
from vajra_py.metrics.comparison.comparison import Comparison
from vajra_py.metrics.comparison.intervals import Interval
from vajra_py.metrics.comparison.metrics import BY_KEY, Metric
from vajra_py.metrics.comparison.significance import OVERLOADED, Versus
from vajra_py.metrics.comparison.table_renderers import csv_text
from vajra_py.metrics.comparison.tables import difference_records, records

BASELINE = "baseline"
"""Name of the map's entry with which all other policies are compared."""

PRIMARY: Sequence[str] = (
    "ttft_mean_s",
    "ttft_p99_s",
    "tbt_p99_s",
    "slo_attainment_fraction",
    "worst_tenant_ttft_p99_s",
    "makespan_mean_s",
)
"""Default metrics of a map; a workload shows those for which it has values."""


@dataclass(frozen=True, slots=True)
class WorkloadComparison:
    """Comparison of policies under the loads of one workload."""

    name: str
    description: str
    comparison: Comparison
    policies: Sequence[str]
    """Names of the policies in the order of the map, with the baseline first."""
    loads: Sequence[str]
    """Loads in ascending order."""
    positions: Mapping[tuple[str, str], int]
    """Position of each setting in the comparison, by (policy, load); no entry for a setting whose runs failed."""
    _marks: dict[str, dict[int, str]] = field(default_factory=dict, repr=False, compare=False)
    """Marks by metric, computed once."""

    def position(self, policy: str, load: str) -> int | None:
        """Return the position that a policy under a load has in the comparison; None if the policy's runs under this
        load failed.
        """
        return self.positions.get((policy, load))

    @property
    def metrics(self) -> Sequence[Metric]:
        """Primary metrics for which the workload has values."""
        rows = self.comparison.values[OVERALL]
        return [BY_KEY[key] for key in self.comparison.primary if any(value is not None for value in rows[key])]

    @property
    def main_load(self) -> str:
        """Highest load with which the baseline kept up; the lowest load if the baseline kept up with none."""
        steady = [
            load
            for load in self.loads
            if self.position(BASELINE, load) is not None and not self.is_overloaded(BASELINE, load)
        ]
        return steady[-1] if steady else self.loads[0]

    def value(self, policy: str, load: str, key: str) -> float | None:
        """Return a policy's raw value of a metric under a load, as a mean over seeds; None if there is no value."""
        position = self.position(policy, load)
        return None if position is None else self.comparison.values[OVERALL][key][position]

    def interval(self, policy: str, load: str, key: str) -> Interval | None:
        """Return the 95 % confidence interval of the mean that `value` returns; None if there is none."""
        position = self.position(policy, load)
        return None if position is None else self.comparison.interval(key, position)

    def is_overloaded(self, policy: str, load: str) -> bool:
        """Return whether a policy was overloaded by a load under any seed."""
        position = self.position(policy, load)
        return position is not None and self.comparison.stability[position] == OVERLOADED

    def mark(self, policy: str, load: str, key: str) -> str:
        """Return the mark of a policy's value (best, lowest, highest or worse) among the values under the load; an
        empty text if it has none.
        """
        position = self.position(policy, load)
        if key not in self._marks:
            self._marks[key] = self.comparison.marks(key)
        return "" if position is None else self._marks[key].get(position, "")

    def versus(self, policy: str, load: str, key: str) -> Versus | None:
        """Return the comparison of a policy with the baseline in a metric under a load; None for the baseline itself,
        or if the runs of either failed.
        """
        position, base = self.position(policy, load), self.position(BASELINE, load)
        if position is None or base is None or position == base:
            return None
        return self.comparison.versus(position, base, key)

    def winners(self, load: str, key: str) -> Sequence[str]:
        """Return the policies with the best value of a metric under a load; empty if fewer than two policies kept up
        with the load, or if all their values are equal.
        """
        best = self.comparison.best(key)
        return [policy for policy in self.policies if self.position(policy, load) in best]

    def offered(self, load: str) -> float | None:
        """Return the arrival rate under a load in requests per second, as a mean over the policies."""
        values = [self.value(policy, load, "offered_requests_per_s") for policy in self.policies]
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None


MAP_COLUMNS = (
    "workload", "load", "policy", "metric", "value", "low", "high", "stability", "mark",
    "difference", "difference_low", "difference_high", "p_value", "p_adjusted", "verdict",
)  # fmt: skip
"""Columns of a map as CSV; differences, p-values and verdict are against the baseline."""


def map_records(workloads: Sequence[WorkloadComparison]) -> Iterator[dict[str, Any]]:
    """Yield a row of plain values for each workload, load, policy and primary metric."""
    for workload in workloads:
        for load in workload.loads:
            for policy in workload.policies:
                for metric in workload.metrics:
                    if (row := _record(workload, load, policy, metric.key)) is not None:
                        yield row


def _record(workload: WorkloadComparison, load: str, policy: str, key: str) -> dict[str, Any] | None:
    value, position = workload.value(policy, load, key), workload.position(policy, load)
    if value is None or position is None:
        return None
    interval, versus = workload.interval(policy, load, key), workload.versus(policy, load, key)
    gap = None if versus is None else versus.difference
    spread = None if gap is None else gap.interval
    ends = [(None, None) if one is None else (one.low, one.high) for one in (interval, spread)]
    tested = (None, None, "") if versus is None else (versus.p_value, versus.p_adjusted, versus.verdict)
    values = (
        workload.name, load, policy, key, value, *ends[0], workload.comparison.stability[position], workload.mark(policy, load, key),
        None if gap is None else gap.mean, *ends[1], *tested,
    )  # fmt: skip
    return dict(zip(MAP_COLUMNS, values, strict=True))


def map_csv(workloads: Sequence[WorkloadComparison]) -> str:
    """Return the map as CSV."""
    return csv_text(MAP_COLUMNS, list(map_records(workloads)))


def values_csv(workloads: Sequence[WorkloadComparison]) -> str:
    """Return, as CSV, the values of every metric over all requests, for every policy and load."""
    return _csv(row for own in workloads for row in _placed(own, records(own.comparison, OVERALL), "run"))


def differences_csv(workloads: Sequence[WorkloadComparison]) -> str:
    """Return, as CSV, the differences of the policies from the baseline in every metric."""
    return _csv(
        row
        for own in workloads
        for load in own.loads
        if (base := own.position(BASELINE, load)) is not None
        for row in _placed(own, difference_records(own.comparison, OVERALL, base), "setting")
    )


def _placed(workload: WorkloadComparison, rows: Iterator[dict[str, Any]], key: str) -> Iterator[dict[str, Any]]:
    """Yield the rows with columns for workload, load and policy in place of the setting's name (column `key`)."""
    names = {workload.comparison.names[i]: entry for entry, i in workload.positions.items()}
    for row in rows:
        policy, load = names[row[key]]
        kept = {name: value for name, value in row.items() if name not in (key, "load", "scope")}
        kept |= {"baseline": BASELINE} if "baseline" in row else {}
        yield {"workload": workload.name, "load": load, "policy": policy, **kept}


def _csv(rows: Iterator[dict[str, Any]]) -> str:
    found = list(rows)
    return csv_text(list(dict.fromkeys(name for row in found for name in row)), found)


def atlas_json(workloads: Sequence[WorkloadComparison]) -> str:
    """Return the map as JSON: workloads with their families of comparisons, winners, and values."""
    found = {
        "baseline": BASELINE,
        "workloads": [
            {
                "name": own.name,
                "description": own.description,
                "loads": [{"name": load, "offered_requests_per_s": own.offered(load)} for load in own.loads],
                "policies": list(own.policies),
                "family": own.comparison.family_words(),
                "winners": [
                    {"load": load, "metric": metric.key, "policies": list(own.winners(load, metric.key))}
                    for load in own.loads
                    for metric in own.metrics
                ],
            }
            for own in workloads
        ],
        "values": list(map_records(workloads)),
    }
    return json.dumps(found, indent=1, allow_nan=False) + "\n"
