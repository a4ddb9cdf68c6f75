"""Capacity answers as sentences, tables and files.

`capacity.csv` has the runs' numbers, `capacity-answers.csv`, `capacity-seeds.csv` and `capacity-differences.csv` what was made of them, `capacity.svg` (PDF, PNG) the curves.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from vajra_py.config.capacity import CapacityConfig
from vajra_py.config.slo import Condition, parse_slo
from vajra_py.experiment.capacity.answers import CapacityAnswer, CapacityDifference, capacity_differences
from vajra_py.experiment.capacity.search import Answer
from vajra_py.experiment.capacity.seeds import FEWEST_SEEDS, Bound, ConditionCapacity, typical_curve
from vajra_py.metrics.comparison.intervals import CONFIDENCE, Interval
from vajra_py.metrics.comparison.metrics import significant
from vajra_py.metrics.plots.capacity import CapacityCurve, Limit, capacity_figure
from vajra_py.metrics.report.figure_files import save_figure

ONE_SEED = "no interval: all seeds give equal requests and nothing else is random, so it was run under one"
_MANY_PAIRS = 10
"""Pairs of settings above which only those with the highest one are printed."""


def answer_line(answer: CapacityAnswer) -> str:
    """One sentence with the answer and its interval."""
    found = answer.answer
    if found is None:
        return f"{answer.label}: failed: {answer.error}"
    text = _replicas_text(answer) if answer.costs else _rate_text(answer, found)
    is_single = found.num_seeds == 1 and answer.note
    return f"{answer.label}: {text} ({ONE_SEED}; {answer.num_runs} runs)" if is_single else f"{answer.label}: {text}"


def _rate_text(answer: CapacityAnswer, found: Answer) -> str:
    lowest, highest = answer.range
    if found.outcome == "never":
        failing = [one.text for one in found.conditions if all(each.side == "below" for each in one.by_seed)]
        what = " and ".join(failing) + " fail" + "s" * (len(failing) == 1) if len(found.conditions) > 1 else "it fails"
        return f"the SLO never holds: {what} even at the lowest rate allowed ({lowest:g} requests/s; capacity.rate.min)"
    if found.outcome == "always":
        return f"the SLO always holds: even at the highest rate allowed ({highest:g} requests/s; capacity.rate.max)"
    if found.outcome == "apart":
        still = "a condition" if found.deciding is None else found.deciding.text
        return (
            f"the SLO never holds: {still} fails up to {significant(found.setting[0])} requests/s, from where on another "
            "condition fails"
        )
    text = _bounded(found.setting[0], found.bound, "requests/s")
    if found.interval is not None:
        text += f" ({_interval_text(found)}; {found.num_seeds} seeds, {answer.num_runs} runs)"
    return text + _conditions_text(found) + _precision_text(answer, found) + _warning(answer)


def _bounded(rate: float, bound: Bound, unit: str = "") -> str:
    text = f"{significant(rate)} {unit}".rstrip()
    return {"exact": text, "unknown": f"not known, about {text}"}.get(bound, f"{bound} {text}")


def _interval_text(found: Answer) -> str:
    assert found.interval is not None
    ends = _bounds(found.interval)
    if found.confidence >= CONFIDENCE:
        return f"95 % interval {ends}"
    return f"the seeds' range {ends} is an interval of {100 * found.confidence:.3g} %, one of 95 % takes {FEWEST_SEEDS} seeds"


def _conditions_text(found: Answer) -> str:
    """The condition that decides, and where the others end to hold."""
    if len(found.conditions) < 2 or found.deciding is None:
        return ""
    others = [one for place, one in enumerate(found.conditions) if place != found.decides]
    return f"; {found.deciding.text} decides: " + ", ".join(f"{one.text} holds to {_own(one)}" for one in others)


def _own(one: ConditionCapacity) -> str:
    text = _bounded(one.rate, one.bound)
    return f"{text} ({_bounds(one.interval)})" if one.bound == "exact" and one.interval is not None else text


def _precision_text(answer: CapacityAnswer, found: Answer) -> str:
    """Whether the interval is as narrow as it was to be, and if not, why the search ended."""
    wanted = f"{100 * answer.precision_fraction:.3g} % of precision_fraction"
    if found.stop == "one seed":
        return "" if answer.note else "; one seed: no interval"
    if found.stop == "range" and found.deciding is not None:
        lowest, highest = answer.range
        above = sum(one.side == "above" and one.rate >= highest for one in found.deciding.by_seed)
        below = sum(one.side == "below" for one in found.deciding.by_seed)
        parts = [
            f"{above} of {found.num_seeds} seeds hold even at {highest:g} requests/s (capacity.rate.max)" * bool(above),
            f"{below} of {found.num_seeds} seeds fail even at {lowest:g} requests/s (capacity.rate.min)" * bool(below),
        ]
        return "; precision_fraction is not reached" + "".join(f", {part}" for part in parts if part)
    if found.interval is None or found.stop is None:
        return ""
    half = f"±{100 * found.interval.half_width / found.setting[0]:.2g} %"
    if found.stop == "precision":
        return f"; {half}, within the {wanted}"
    return f"; {half}, not within the {wanted}: stopped at max_replications ({found.num_seeds})"


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
    total = sum(len(point.seeds) for point in near)
    if not overloaded:
        return ""
    return (
        f"; {overloaded} of {total} runs just below it are overloaded: in longer runs the SLO would fail at lower rates"
    )


def answer_rows(answers: Sequence[CapacityAnswer]) -> list[tuple[str, ...]]:
    """A table of the answers: a header, and a row for each."""
    replicas = any(answer.costs for answer in answers)
    value_title = "replicas" if replicas else "rate, requests/s"
    rows: list[tuple[str, ...]] = [
        ("setting", value_title, "95 % interval", "decided by", "seeds", "runs", "new runs"),
    ]
    for answer in answers:
        found = answer.answer
        runs = str(answer.num_runs), str(answer.num_new)
        if found is None:
            rows.append((answer.label, "failed", "", "", "", *runs))
            continue
        value = _counts(answer) if answer.costs else _bounded(found.setting[0], found.bound)
        interval = found.interval
        bounds = "" if interval is None else _bounds(interval)
        if bounds and found.confidence < CONFIDENCE:
            bounds += f" ({100 * found.confidence:.3g} %)"
        if found.num_seeds == 1 and answer.note:
            bounds = "none: equal seeds"
        shown = {"found": value, "apart": "never holds"}.get(found.outcome, f"{found.outcome} holds")
        decides = "" if found.deciding is None else found.deciding.text
        rows.append((answer.label, shown, bounds, decides, str(found.num_seeds), *runs))
    return rows


def difference_lines(answers: Sequence[CapacityAnswer]) -> list[str]:
    """The settings compared in pairs, the one that takes more first; which ones may be the highest, and what says so."""
    pairs = capacity_differences(answers)
    if not pairs:
        return []
    rates = {one.label: one.answer.setting[0] for one in answers if one.by_seed is not None and one.answer is not None}
    top = max(rates, key=lambda label: rates[label])
    with_top = [one for one in pairs if top in (one.first, one.second)]
    rivals = [
        one.second if one.first == top else one.first
        for one in with_top
        if not (one.is_significant and one.first == top)
    ]
    shown = with_top if len(pairs) > _MANY_PAIRS else pairs
    lines = [_difference_line(one) for one in sorted(shown, key=lambda one: one.corrected_p)]
    seeds = "common seeds" if all(one.is_paired for one in pairs) else "seeds that are not common"
    lines.append(f"({seeds}; p corrected by Holm over {len(pairs)} {'pair' if len(pairs) == 1 else 'pairs'})")
    left_out = [one.label for one in answers if one.label not in rates]
    if left_out:
        lines.append(f"Not compared, without a capacity for every seed: {', '.join(left_out)}")
    elif rivals:
        lines.append(f"The highest is not told apart from the next: {', '.join([top, *rivals])}")
    else:
        lines.append(f"Highest, told apart from all others: {top}")
    return lines


def _difference_line(one: CapacityDifference) -> str:
    low, high = (f"{100 * end:+.1f} %" for end in (one.interval.low, one.interval.high))
    numbers = f"{100 * one.fraction:+.1f} % (95 % interval {low} to {high}; p = {one.p_value:.2g}, corrected {one.corrected_p:.2g}; {one.num_seeds} seeds)"
    if one.is_significant:
        return f"{one.first} takes more than {one.second}: {numbers}"
    return f"{one.first} and {one.second} are not told apart: {numbers}"


def _bounds(interval: Interval) -> str:
    low, high = significant(interval.low), significant(interval.high)
    if math.isinf(interval.high):
        return f"{low} or more" if interval.low > 0 else "all rates"
    return f"{low} to {high}" if interval.low > 0 else f"{high} or less"


def write_capacity_files(
    answers: Sequence[CapacityAnswer], asked: CapacityConfig, folder: Path, formats: Sequence[str]
) -> list[Path]:
    """Write the curve's numbers and its figure; returns their paths. Nothing where no search got anywhere."""
    known = [answer for answer in answers if answer.curve]
    if not known:
        return []
    paths = [_write_runs(known, folder / "capacity.csv")]
    if any(answer.answer is not None and answer.answer.conditions for answer in known):
        paths += [
            _write_rows(folder / "capacity-answers.csv", _ANSWER_COLUMNS, _answer_values(known)),
            _write_rows(folder / "capacity-seeds.csv", ("setting", "condition", "seed", "rate", "side"), _seed_values(known)),
        ]  # fmt: skip
    differences = capacity_differences(known)
    if differences:
        paths.append(_write_rows(folder / "capacity-differences.csv", _PAIR_COLUMNS, _pair_values(differences)))
    conditions = parse_slo(asked.slo).conditions
    limits = [
        Limit(text, one.metric.text, one.limit, _is_fraction(one))
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
    """(rate, value) points at which a typical seed lies: at each value the geometric mean of the rates at which the seeds reach it."""
    by_seed: list[list[tuple[float, float]]] = []
    for seed in answer.seeds:
        runs = [
            (point.setting[0], point.slacks[point.seeds.index(seed)][place])
            for point in answer.curve
            if seed in point.seeds
        ]
        by_seed.append(runs)
    return [(rate, condition.value_at(slack)) for rate, slack in typical_curve(by_seed, own)]


def _is_fraction(condition: Condition) -> bool:
    return condition.metric.path.endswith("_fraction")


_ANSWER_COLUMNS = ("setting", "condition", "decides", "rate", "bound", "low", "high", "confidence", "num_seeds", "stop", "precision_fraction")  # fmt: skip
_PAIR_COLUMNS = ("first", "second", "fraction", "low", "high", "p_value", "corrected_p", "num_seeds", "is_paired")


def _answer_values(answers: Sequence[CapacityAnswer]) -> list[tuple[object, ...]]:
    """A row for the whole SLO, whose condition is `slo`, and one for each condition."""
    rows: list[tuple[object, ...]] = []
    for answer in answers:
        found = answer.answer
        if found is None:
            continue
        is_found = found.outcome == "found"
        last = found.num_seeds, found.stop, answer.precision_fraction
        rate, bound = (found.setting[0], found.bound) if is_found else (None, found.outcome)
        confidence = found.confidence if found.interval is not None else None
        rows.append((answer.label, "slo", None, rate, bound, *_ends(found.interval), confidence, *last))
        rows += [
            (answer.label, one.text, is_found and place == found.decides, one.rate, one.bound, *_ends(one.interval), one.confidence if one.interval is not None else None, *last)
            for place, one in enumerate(found.conditions)
        ]  # fmt: skip
    return rows


def _seed_values(answers: Sequence[CapacityAnswer]) -> list[tuple[object, ...]]:
    return [
        (answer.label, one.text, seed, each.rate, each.side)
        for answer in answers
        if answer.answer is not None
        for one in answer.answer.conditions
        for seed, each in zip(answer.seeds, one.by_seed, strict=True)
    ]


def _pair_values(pairs: Sequence[CapacityDifference]) -> list[tuple[object, ...]]:
    return [
        (one.first, one.second, one.fraction, *_ends(one.interval), one.p_value, one.corrected_p, one.num_seeds, one.is_paired)
        for one in pairs
    ]  # fmt: skip


def _ends(interval: Interval | None) -> tuple[float | None, float | None]:
    return (None, None) if interval is None else (interval.low, interval.high)


def _write_rows(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(["" if value is None else value for value in row] for row in rows)
    return path


def _write_runs(answers: Sequence[CapacityAnswer], path: Path) -> Path:
    has_notes = any(answer.note for answer in answers)
    columns = ["setting", *answers[0].paths, "seed", "slack", *answers[0].curve[0].values, *["note"] * has_notes]
    return _write_rows(
        path,
        columns,
        [
            [
                answer.label,
                *point.setting,
                seed,
                slack,
                *(one[k] for one in point.values.values()),
                *[answer.note] * has_notes,
            ]
            for answer in answers
            for point in answer.curve
            for k, (seed, slack) in enumerate(zip(point.seeds, point.slack, strict=True))
        ],
    )
