"""Statements on how far a comparison can be trusted: where step times, prices and power of runs come from, and whether
differences between settings exceed the known error of their step times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vajra_py.latency.hardware.device_costs import POWER_FIELDS
from vajra_py.metrics.comparison.compared_settings import OVERALL, ComparedSettings
from vajra_py.metrics.comparison.metrics import BY_KEY
from vajra_py.metrics.runs.run_data import RunData

_JUDGED = {"ttft_mean_s": "ttft_s", "tpot_mean_s": "tpot_s", "e2e_mean_s": "e2e_s"}
"""Key of a metric's known error in a summary's `step_times.errors`, by metric of a comparison."""


def step_time_origins(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """Return each origin of step times, as one sentence without its full stop, and the names of the runs with this
    origin (an empty list means all). Runs that do not record the origin are left out.
    """
    found: dict[str, list[str]] = {}
    for run in runs:
        sentence = run.summary.value("step_times.sentence")
        if sentence:
            found.setdefault(str(sentence), []).append(run.name)
    return [(sentence, names if len(names) < len(runs) else []) for sentence, names in found.items()]


def cost_origins(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """Return, for each device, a sentence without its full stop on price and power and their sources, and the names of
    the runs to which the sentence applies (an empty list means all).
    """
    found: dict[str, list[str]] = {}
    for run in runs:
        devices = (run.summary.value("cost.devices") or {}).values()
        for sentence in dict.fromkeys(_cost_origin(one) for one in devices if one["sources"]):
            found.setdefault(sentence, []).append(run.name)
    return [(sentence, names if len(names) < len(runs) else []) for sentence, names in found.items()]


def _cost_origin(device: Mapping[str, Any]) -> str:
    sources, parts = device["sources"], []
    if device["price_per_hour"] is not None:
        parts.append(f"${device['price_per_hour']:g} an hour ({sources['price_per_hour']})")
    if device["power_w"] is not None:
        idle, decode, prefill = device["power_w"]
        origin = "; ".join(dict.fromkeys(sources[name] for name in POWER_FIELDS))
        parts.append(f"{idle:g} W idle, {decode:g} W decoding one sequence, {prefill:g} W prefilling ({origin})")
    return f"Cost and energy of {device['device']}: {', '.join(parts)}"


def judged_differences(runs: Sequence[RunData], comparison: ComparedSettings) -> list[str]:
    """Return sentences without full stops on whether settings differ by more than the known error of their step times.

    The sentences cover mean TTFT, TPOT and E2E of settings under the same load. The list is empty if the errors are
    unknown or there is nothing to compare.
    """
    errors: dict[str, float] = {}
    for run in runs:
        known = run.summary.value("step_times.errors") or {}
        if run.summary.value("step_times.kind") == "real":
            continue
        for key, name in _JUDGED.items():
            error = known.get(name, known.get("step"))
            if error is None:
                return []
            errors[key] = max(errors.get(key, 0.0), float(error))
    sentences = []
    for positions in _by_load(comparison):
        sentences += [text for key, error in errors.items() if (text := _judged(comparison, key, error, positions))]
    return sentences


def _by_load(comparison: ComparedSettings) -> list[list[int]]:
    groups: dict[str, list[int]] = {}
    for position, load in enumerate(comparison.loads):
        groups.setdefault(load, []).append(position)
    return [positions for positions in groups.values() if len(positions) > 1]


def _judged(comparison: ComparedSettings, key: str, error: float, positions: Sequence[int]) -> str | None:
    row = comparison.values[OVERALL].get(key)
    values = [value for position in positions if row is not None and (value := row[position])]
    if len(values) < 2:
        return None
    spread = max(values) / min(values) - 1.0
    load = f" at {comparison.loads[positions[0]]}" if comparison.loads[positions[0]] else ""
    verdict = "more than" if spread > error else "no more than"
    return f"{BY_KEY[key].label}{load}: settings differ by up to {spread:.1%}, {verdict} the step times' known error of {error:.1%}"
