"""Capacity answers as tables: for display by `table_renderers`, and with raw values for files."""

from __future__ import annotations

from collections.abc import Sequence

from vajra_py.experiment.capacity.answers import CapacityAnswer, answer_notes, bounded_text, bounds_text, counts_text
from vajra_py.experiment.capacity.differences import CapacityDifference, capacity_differences
from vajra_py.metrics.comparison.baseline_table import p_text
from vajra_py.metrics.comparison.intervals import CONFIDENCE, Interval
from vajra_py.metrics.comparison.pairs import SIGNIFICANT_P
from vajra_py.metrics.comparison.table_model import BEST, Cell, Row, Table

Raw = float | int | bool | str | None

_ANSWER_KEYS = ("cost", "bound", "low", "high", "confidence", "decided_by", "num_seeds", "num_runs")
_ANSWER_HEADS = ("cost", "bound", "low", "high", "confidence", "decided by", "seeds", "runs")
_CONDITION_KEYS = ("setting", "condition", "decides", "rate", "bound", "low", "high", "confidence", "num_seeds", "stop", "precision_fraction")  # fmt: skip
_PAIR_KEYS = ("first", "second", "fraction", "low", "high", "p_value", "corrected_p", "num_seeds", "is_paired")
_PAIR_HEADS = ("takes more than", "by", "low", "high", "p", "adjusted p", "seeds", "paired")


def answer_table(answers: Sequence[CapacityAnswer], slo: str) -> Table:
    """Return a table with a row per answer: the rate or replica counts with the interval, the deciding condition, and
    the numbers of runs and seeds.
    """
    has_replicas = any(answer.costs for answer in answers)
    notes = ["In brackets the interval over seeds, of 95 % unless it is said"] * any(map(_interval, answers))
    notes += [note.removesuffix(".") for note in answer_notes(answers)]
    return Table(
        "setting",
        ("replicas" if has_replicas else "requests/s", *_ANSWER_HEADS),
        tuple(Row(answer.label, _answer_cells(answer)) for answer in answers),
        f"Capacity under {slo}",
        tuple(notes),
        frozenset({6}),
        keys=("setting", "replicas" if has_replicas else "rate", *_ANSWER_KEYS),
        csv_only=frozenset(range(1, 6)),
    )


def _answer_cells(answer: CapacityAnswer) -> tuple[Cell, ...]:
    found = answer.answer
    if found is None:
        return (Cell("failed", value=""), _raw(None), _raw("failed"), *map(_raw, (None,) * 5), _raw(answer.num_runs))
    bound = found.bound if found.outcome == "found" else found.outcome
    decides = "" if found.deciding is None else found.deciding.text
    interval = _interval(answer)
    return (
        _value_cell(answer),
        _raw(answer.cost(found.setting) if answer.costs and found.outcome == "found" else None),
        _raw(bound),
        *map(_raw, _ends(interval)),
        _raw(found.confidence if interval is not None else None),
        Cell(decides),
        _raw(found.num_seeds),
        _raw(answer.num_runs),
    )


def _value_cell(answer: CapacityAnswer) -> Cell:
    found = answer.answer
    assert found is not None
    if found.outcome != "found":
        return Cell("never holds" if found.outcome == "apart" else f"{found.outcome} holds", value="")
    interval = _interval(answer)
    spread = "" if interval is None else f"[{bounds_text(interval)}]"
    if spread and found.confidence < CONFIDENCE:
        spread += f" ({100 * found.confidence:.3g} %)"
    if answer.costs:
        return Cell(counts_text(answer), spread)
    return Cell(bounded_text(found.setting[0], found.bound), spread, value=found.setting[0])


def _interval(answer: CapacityAnswer) -> Interval | None:
    return None if answer.answer is None else answer.answer.interval


def difference_table(answers: Sequence[CapacityAnswer]) -> Table:
    """Return a table with a row per pair of settings with known capacities; the setting with the higher capacity is
    first.
    """
    pairs = capacity_differences(answers)
    rows = tuple(Row(one.first, _pair_cells(one)) for one in pairs)
    notes = (
        "In brackets the 95 % interval of this comparison alone",
        f"* told apart at {SIGNIFICANT_P:.0%} after Holm's correction for {len(pairs)} pairs of settings",
    )
    return Table(
        "setting",
        _PAIR_HEADS,
        rows,
        "Differences of capacities",
        notes,
        frozenset({0}),
        keys=_PAIR_KEYS,
        csv_only=frozenset({2, 3, 7}),
    )


def _pair_cells(one: CapacityDifference) -> tuple[Cell, ...]:
    low, high = (f"{100 * end:+.1f} %" for end in (one.interval.low, one.interval.high))
    mark = BEST if one.is_significant else ""
    return (
        Cell(one.second),
        Cell(f"{100 * one.fraction:+.1f} %", f"[{low} to {high}]", mark, value=one.fraction),
        *map(_raw, _ends(one.interval)),
        Cell(p_text(one.p_value), value=one.p_value),
        Cell(p_text(one.corrected_p), value=one.corrected_p),
        _raw(one.num_seeds),
        _raw(one.is_paired),
    )


def condition_table(answers: Sequence[CapacityAnswer]) -> Table:
    """Return a table of raw values that has, for each answer, a row for the whole SLO (condition `slo`) and one for
    each condition.
    """
    rows: list[tuple[Raw, ...]] = []
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
    return _raw_table(_CONDITION_KEYS, rows)


def seed_table(answers: Sequence[CapacityAnswer]) -> Table:
    """Return a table of raw values with the capacity of each condition under each seed."""
    return _raw_table(
        ("setting", "condition", "seed", "rate", "side"),
        [
            (answer.label, one.text, seed, each.rate, each.side)
            for answer in answers
            if answer.answer is not None
            for one in answer.answer.conditions
            for seed, each in zip(answer.seeds, one.by_seed, strict=True)
        ],
    )


def run_table(answers: Sequence[CapacityAnswer]) -> Table:
    """Return a table of raw values with every metric of the SLO and the slack of the whole SLO, by point and seed."""
    has_notes = any(answer.note for answer in answers)
    columns = ("setting", *answers[0].paths, "seed", "slack", *answers[0].curve[0].values, *["note"] * has_notes)
    return _raw_table(
        columns,
        [
            (
                answer.label,
                *point.setting,
                seed,
                slack,
                *(one[k] for one in point.values.values()),
                *[answer.note] * has_notes,
            )
            for answer in answers
            for point in answer.curve
            for k, (seed, slack) in enumerate(zip(point.seeds, point.slack, strict=True))
        ],
    )


def _raw_table(columns: Sequence[str], rows: Sequence[Sequence[Raw]]) -> Table:
    """Return a table of raw values; the first value of each row is its heading."""
    shown = tuple(Row(str(first), tuple(map(_raw, rest))) for first, *rest in rows)
    return Table(columns[0], tuple(columns[1:]), shown)


def _raw(value: Raw) -> Cell:
    return Cell("") if value is None else Cell(str(value), value=value)


def _ends(interval: Interval | None) -> tuple[float | None, float | None]:
    return (None, None) if interval is None else (interval.low, interval.high)
