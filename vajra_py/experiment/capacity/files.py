"""Capacity answers as files.

`capacity.csv` has the values of the runs; `capacity-answers.csv`, `capacity-seeds.csv` and `capacity-differences.csv`
have the results of the search; `capacity.svg` (or PDF, PNG) shows the curves.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vajra_py.config.capacity import CapacityConfig
from vajra_py.config.slo import Condition, parse_slo
from vajra_py.experiment.capacity.answers import CapacityAnswer
from vajra_py.experiment.capacity.seeds import ConditionCapacity, typical_curve
from vajra_py.experiment.capacity.tables import condition_table, difference_table, run_table, seed_table
from vajra_py.metrics.comparison.table_renderers import csv_table
from vajra_py.metrics.plots.capacity import CapacityCurve, Limit, capacity_figure
from vajra_py.metrics.report.figure_files import save_figure


def write_capacity_files(
    answers: Sequence[CapacityAnswer], asked: CapacityConfig, folder: Path, formats: Sequence[str]
) -> list[Path]:
    """Write the CSV files, and the figure in each of `formats`; return the paths. Nothing is written if no search has
    results.
    """
    known = [answer for answer in answers if answer.curve]
    if not known:
        return []
    tables = {"capacity.csv": run_table(known)}
    if any(answer.answer is not None and answer.answer.conditions for answer in known):
        tables |= {"capacity-answers.csv": condition_table(known), "capacity-seeds.csv": seed_table(known)}
    differences = difference_table(known)
    if differences.rows:
        tables["capacity-differences.csv"] = differences
    paths = []
    for name, table in tables.items():
        paths.append(folder / name)
        paths[-1].write_text(csv_table(table), encoding="utf-8", newline="")
    conditions = parse_slo(asked.slo).conditions
    limits = [
        Limit(text, one.metric.text, one.limit, _unit(one))
        for text, one in {one.text: one for one in conditions}.items()
    ]
    curves = [_curve(answer, conditions) for answer in known]
    unit = known[0].unit
    figure = capacity_figure(
        curves,
        limits,
        {"requests/s": "rate (requests/s)", "of cost": "cost", "$ an hour": "cost ($ an hour)"}.get(unit, unit),
    )
    return [*paths, *(save_figure(figure, folder / f"capacity.{suffix}") for suffix in formats)]


def _curve(answer: CapacityAnswer, conditions: Sequence[Condition]) -> CapacityCurve:
    found = answer.answer
    has_knee = found is not None and found.outcome == "found"
    points = sorted(((answer.cost(point.setting), point.values) for point in answer.curve), key=lambda one: one[0])
    knee = answer.cost(found.setting) if found is not None and has_knee else None
    interval = found.interval if found is not None and has_knee else None
    label = f"{answer.label} (one run each)" if found is not None and found.num_seeds == 1 else answer.label
    if answer.costs:
        return CapacityCurve(label, points, knee)
    own = () if found is None else found.conditions
    lines = {
        each.text: _line(answer, place, condition, each)
        for place, (condition, each) in enumerate(zip(conditions, own, strict=False))
    }
    ends = {each.text: (each.rate, each.interval) for each in own if each.bound == "exact"}
    return CapacityCurve(label, points, knee, interval, lines, ends)


def _line(
    answer: CapacityAnswer, place: int, condition: Condition, own: ConditionCapacity
) -> list[tuple[float, float]]:
    """Return the (rate, value) points of a condition's typical curve. The rate at a value is the geometric mean of the
    rates at which the seeds reach this value.
    """
    by_seed: list[list[tuple[float, float]]] = []
    for seed in answer.seeds:
        runs = [
            (point.setting[0], point.slacks[point.seeds.index(seed)][place])
            for point in answer.curve
            if seed in point.seeds
        ]
        by_seed.append(runs)
    return [(rate, condition.value_at(slack)) for rate, slack in typical_curve(by_seed, own)]


def _unit(condition: Condition) -> str:
    """Return the unit of the condition's metric; an empty string for a fraction."""
    path = condition.metric.path
    units = {"_fraction": "", ".requests_per_s": "requests/s", ".per_request": "per request"}
    return next((unit for end, unit in units.items() if path.endswith(end)), "s")
