"""Capacity answers as plain values, for JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vajra_py.experiment.capacity.answers import CapacityAnswer
from vajra_py.experiment.capacity.differences import capacity_differences
from vajra_py.experiment.capacity.seeds import ConditionCapacity
from vajra_py.metrics.comparison.intervals import Interval


def plain_values(slo: str, answers: Sequence[CapacityAnswer]) -> dict[str, Any]:
    """Return answers, curves and differences as plain values for JSON."""
    return {
        "slo": slo,
        "answers": [_plain(one) for one in answers],
        "differences": [
            {
                "first": one.first,
                "second": one.second,
                "fraction": one.fraction,
                "interval": _ends(one.interval),
                "p_value": one.p_value,
                "corrected_p": one.corrected_p,
                "num_seeds": one.num_seeds,
                "is_paired": one.is_paired,
            }
            for one in capacity_differences(answers)
        ],
    }


def _plain(one: CapacityAnswer) -> dict[str, Any]:
    found = one.answer
    return {
        "label": one.label,
        "outcome": None if found is None else found.outcome,
        "error": one.error,
        "searched": list(one.paths),
        "setting": None if found is None else list(found.setting),
        "bound": None if found is None else found.bound,
        "interval": None if found is None else _ends(found.interval),
        "confidence": None if found is None or found.interval is None else found.confidence,
        "unit": one.unit,
        "precision_fraction": one.precision_fraction or None,
        "stop": None if found is None else found.stop,
        "decides": None if found is None or found.deciding is None else found.deciding.text,
        "conditions": [] if found is None else [_plain_condition(each, one.seeds) for each in found.conditions],
        "num_seeds": None if found is None else found.num_seeds,
        "num_runs": one.num_runs,
        "note": one.note,
        "curve": [
            {
                "setting": list(point.setting),
                "seeds": list(point.seeds),
                "values": {key: list(values) for key, values in point.values.items()},
                "slacks": list(point.slack),
                "slacks_by_condition": [list(each) for each in point.slacks],
                "num_overloaded": point.num_overloaded,
            }
            for point in one.curve
        ],
    }


def _plain_condition(one: ConditionCapacity, seeds: Sequence[int]) -> dict[str, Any]:
    return {
        "condition": one.text,
        "rate": one.rate,
        "bound": one.bound,
        "interval": _ends(one.interval),
        "confidence": one.confidence if one.interval is not None else None,
        "by_seed": [
            {"seed": seed, "rate": each.rate, "side": each.side} for seed, each in zip(seeds, one.by_seed, strict=True)
        ],
    }


def _ends(interval: Interval | None) -> list[float | None] | None:
    if interval is None:
        return None
    return [value if math.isfinite(value) else None for value in (interval.low, interval.high)]
