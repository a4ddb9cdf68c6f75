"""Capacity answers as sentences, tables and files: `capacity.csv` with the curve's numbers, `capacity.svg` (PDF, PNG) with the curve."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

from vajra_py.config.capacity import CapacityConfig
from vajra_py.config.slo import Condition, parse_slo
from vajra_py.experiment.capacity import CapacityAnswer
from vajra_py.metrics.comparison_metrics import significant
from vajra_py.metrics.figure_files import save_figure
from vajra_py.metrics.intervals import Interval
from vajra_py.metrics.plots.capacity import CapacityCurve, Limit, capacity_figure

ONE_SEED = "no interval: all seeds give equal requests and nothing else is random, so it was run under one"


def answer_line(answer: CapacityAnswer) -> str:
    """One sentence with the answer and its interval, and why there is none where all seeds give the same."""
    text = _answer_text(answer)
    is_single = answer.answer is not None and answer.answer.num_seeds == 1
    return f"{text} ({ONE_SEED}; {answer.num_runs} runs)" if is_single and answer.note else text


def _answer_text(answer: CapacityAnswer) -> str:
    found = answer.answer
    if found is None:
        return f"{answer.label}: failed: {answer.error}"
    if answer.costs:
        return f"{answer.label}: {_replicas_text(answer)}"
    lowest, highest = answer.range
    if found.outcome == "never":
        return f"{answer.label}: the SLO never holds: it fails even at the lowest rate allowed ({lowest:g} requests/s; capacity.rate.min)"
    if found.outcome == "always":
        return f"{answer.label}: the SLO always holds: even at the highest rate allowed ({highest:g} requests/s; capacity.rate.max)"
    text = f"{answer.label}: {significant(found.setting[0])} requests/s"
    if found.interval is not None:
        low, high = significant(found.interval.low), significant(found.interval.high)
        text += f" (95 % interval {low} to {high}; {found.num_seeds} seeds, {answer.num_runs} runs)"
    return text + _warning(answer)


def _replicas_text(answer: CapacityAnswer) -> str:
    found = answer.answer
    assert found is not None
    counts = _counts(answer)
    if found.outcome == "never":
        return f"the SLO never holds: it fails even with the most replicas allowed ({counts})"
    if found.outcome == "always":
        return f"the SLO always holds: even with the fewest replicas allowed ({counts})"
    text = counts if answer.unit == "replicas" else f"{counts}, {significant(answer.cost(found.setting))} {answer.unit}"
    interval = found.interval
    if interval is None:
        return text
    if math.isinf(interval.high):
        return f"{text} (95 % interval {significant(interval.low)} {answer.unit} to more than the range allows)"
    return f"{text} (95 % interval {significant(interval.low)} to {significant(interval.high)} {answer.unit}; {found.num_seeds} seeds, {answer.num_runs} runs)"


def _counts(answer: CapacityAnswer) -> str:
    found = answer.answer
    assert found is not None
    names = [path.removesuffix(".num_replicas").rpartition(".")[2] for path in answer.paths]
    if names == ["num_replicas"]:
        return f"{found.setting[0]:g} replicas" if found.setting[0] != 1 else "1 replica"
    return " + ".join(f"{count:g} {name}" for name, count in zip(names, found.setting, strict=True) if count)


def _warning(answer: CapacityAnswer) -> str:
    """A word where runs below the capacity did not keep up with their load: longer runs would be worse."""
    found = answer.answer
    assert found is not None
    near = [point for point in answer.curve if 0.9 * found.setting[0] <= point.setting[0] <= found.setting[0]]
    overloaded = sum(point.num_overloaded for point in near)
    total = sum(len(point.slacks) for point in near)
    if not overloaded:
        return ""
    return (
        f"; {overloaded} of {total} runs just below it are overloaded: in longer runs the SLO would fail at lower rates"
    )


def answer_rows(answers: Sequence[CapacityAnswer]) -> list[tuple[str, ...]]:
    """A table of the answers: a header, and a row for each."""
    replicas = any(answer.costs for answer in answers)
    rows: list[tuple[str, ...]] = [
        ("setting", "replicas" if replicas else "rate, requests/s", "95 % interval", "seeds", "runs", "new runs")
    ]
    for answer in answers:
        found = answer.answer
        if found is None:
            rows.append((answer.label, "failed", "", "", str(answer.num_runs), str(answer.num_new)))
            continue
        value = _counts(answer) if answer.costs else significant(found.setting[0])
        interval = found.interval
        bounds = "" if interval is None else _bounds(interval)
        if found.num_seeds == 1 and answer.note:
            bounds = "none: equal seeds"
        shown = f"{found.outcome} holds" if found.outcome != "found" else value
        rows.append((answer.label, shown, bounds, str(found.num_seeds), str(answer.num_runs), str(answer.num_new)))
    return rows


def _bounds(interval: Interval) -> str:
    low = significant(interval.low)
    return f"{low} or more" if math.isinf(interval.high) else f"{low} to {significant(interval.high)}"


def write_capacity_files(
    answers: Sequence[CapacityAnswer], asked: CapacityConfig, folder: Path, formats: Sequence[str]
) -> list[Path]:
    """Write the curve's numbers and its figure; returns their paths. Nothing where no search got anywhere."""
    known = [answer for answer in answers if answer.curve]
    if not known:
        return []
    paths = [_write_csv(known, folder / "capacity.csv")]
    conditions = {one.metric.text: one for one in parse_slo(asked.slo).conditions}
    limits = [Limit(text, one.limit, _is_fraction(one)) for text, one in conditions.items()]
    curves = [_curve(answer) for answer in known]
    unit = known[0].unit
    figure = capacity_figure(
        curves,
        limits,
        {"requests/s": "rate (requests/s)", "of cost": "cost", "$ an hour": "cost ($ an hour)"}.get(unit, unit),
    )
    return [*paths, *(save_figure(figure, folder / f"capacity.{suffix}") for suffix in formats)]


def _curve(answer: CapacityAnswer) -> CapacityCurve:
    found = answer.answer
    has_knee = found is not None and found.outcome == "found"
    points = sorted(((answer.cost(point.setting), point.values) for point in answer.curve), key=lambda one: one[0])
    knee = answer.cost(found.setting) if found is not None and has_knee else None
    interval = found.interval if found is not None and has_knee else None
    label = f"{answer.label} (one run each)" if found is not None and found.num_seeds == 1 else answer.label
    return CapacityCurve(label, points, knee, None if answer.costs else interval)


def _is_fraction(condition: Condition) -> bool:
    return condition.metric.path.endswith("_fraction")


def _write_csv(answers: Sequence[CapacityAnswer], path: Path) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        notes = any(answer.note for answer in answers)
        head = ["setting", *answers[0].paths, "seed_position", "slack", *answers[0].curve[0].values]
        writer.writerow([*head, "note"] if notes else head)
        for answer in answers:
            for point in answer.curve:
                for k, slack in enumerate(point.slacks):
                    values = ["" if one[k] is None else one[k] for one in point.values.values()]
                    row = [answer.label, *point.setting, k, slack, *values]
                    writer.writerow([*row, answer.note] if notes else row)
    return path
