"""Describe the workload of runs in words, from the configuration and statistics of the requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vajra_py.metrics.runs.differences import ABSENT, axes, flatten, is_rate
from vajra_py.metrics.runs.run_data import REQUESTS_FILE, RunData

_FILES = ("azure", "csv", "jsonl", "mooncake", "burstgpt", "lengths", "agentic")
_ARRIVALS = {
    "poisson": "Poisson arrivals",
    "gamma": "gamma-distributed gaps",
    "closed_loop": "users who wait for their answers",
}
_MAX_PARTS = 4


def workload_words(runs: Sequence[RunData]) -> list[str]:
    """Return one or two sentences on the common workload of these runs; an empty list if their configurations do not
    record it.
    """
    workload = runs[0].config.get("workload")
    if not isinstance(workload, Mapping) or "type" not in workload:
        return []
    rates = next((axis for axis in axes(runs) if is_rate(axis) and axis.path == "workload.rate"), None)
    pace = ""
    if rates is not None:
        known = [level for level in rates.levels if level != ABSENT]
        pace = f", at {known[0]} to {known[-1]} requests/s"
    elif workload.get("rate"):
        pace = f", at {workload['rate']:g} requests/s"
    return [f"Workload: {_part(workload)}{pace}.", *_lengths(runs[0])]


def _part(workload: Mapping[str, Any]) -> str:
    kind = str(workload["type"])
    if kind == "merge":
        parts = [part for part in workload.get("workloads") or [] if isinstance(part, Mapping) and "type" in part]
        named = [f"{part.get('name') or f'part {i + 1}'} ({_part(part)})" for i, part in enumerate(parts[:_MAX_PARTS])]
        return " beside ".join(named) + (" and others" if len(parts) > _MAX_PARTS else "")
    if kind == "profile":
        return (
            f"{_count(workload, 'num_requests', 'requests')} like those of the public trace {workload.get('profile')}"
        )
    if kind in _FILES:
        return f"requests of the {kind} file {workload.get('path')}{_sampled(workload)}"
    unit = "sessions" if kind == "sessions" else "requests"
    words = [_arrivals(workload, unit)]
    for key, noun in (("num_requests", "requests"), ("num_sessions", "sessions")):
        if workload.get(key):
            words.append(_count(workload, key, noun))
    if workload.get("duration_s"):
        words.append(f"for {workload['duration_s']:g} s")
    for key, noun in (("prompt_tokens", "prompts"), ("output_tokens", "outputs")):
        if isinstance(workload.get(key), Mapping):
            words.append(f"{noun} {_distribution(workload[key])}")
    return ", ".join(word for word in words if word)


def _sampled(workload: Mapping[str, Any]) -> str:
    """Return words on how requests were selected from a file."""
    words = []
    blocks, kept = workload.get("bootstrap"), workload.get("thin")
    if isinstance(blocks, Mapping):
        of = f"{blocks['block_s']:g} s" if blocks.get("block_s") else _count(blocks, "block_requests", "requests")
        words.append(f"put together by the seed from blocks of {of} (bootstrap)")
    if isinstance(kept, Mapping):
        to = f"to {kept['rate']:g} requests/s" if kept.get("rate") else f"to {kept['fraction']:.0%} of them"
        words.append(f"thinned by the seed {to}")
    first = f"{workload['first']:,}" if isinstance(workload.get("first"), int) else ""
    if workload.get("window") == "random":
        length = f"{first} in a row" if first else f"those of {workload['window_s']:g} s"
        words.append(f"{length} from a place that the seed draws")
    elif first:
        words.append(f"the first {first}")
    return "".join(f", {one}" for one in words)


def _arrivals(workload: Mapping[str, Any], unit: str) -> str:
    arrivals = workload.get("arrivals")
    if not isinstance(arrivals, Mapping):
        return str(workload["type"])
    kind = str(arrivals.get("type") or "")
    words = _ARRIVALS.get(kind, f"{kind.replace('_', ' ')} arrivals")
    if isinstance(arrivals.get("rate"), int | float):
        words += f" of {arrivals['rate']:g} {unit}/s"
    if isinstance(arrivals.get("num_users"), int):
        words = f"{arrivals['num_users']:,} {words}"
    return words


def _distribution(settings: Mapping[str, Any]) -> str:
    low, high, value = (settings.get(key) for key in ("min", "max", "value"))
    if isinstance(value, int | float):
        return f"of {value:,.0f} tokens"
    between = (
        f" from {low:,.0f} to {high:,.0f} tokens"
        if isinstance(low, int | float) and isinstance(high, int | float)
        else ""
    )
    return f"{str(settings.get('type') or '').replace('_', ' ')}{between}".strip()


def _count(workload: Mapping[str, Any], key: str, noun: str) -> str:
    count = flatten({key: workload.get(key)}).get(key, "")
    return f"{int(count):,} {noun}" if count.isdigit() else noun


def _lengths(run: RunData) -> list[str]:
    """Return a sentence with statistics of a run's requests, per SLO class if there are few classes; an empty list if
    no requests are known.
    """
    if not (run.path / REQUESTS_FILE).exists():
        return []
    columns = run.measured("num_prompt_tokens", "num_output_tokens", "slo_class")
    if not columns["slo_class"].size:
        return []
    classes = sorted(set(columns["slo_class"].tolist()))
    groups = classes if 1 < len(classes) <= _MAX_PARTS else [None]
    parts = []
    for name in groups:
        inside = slice(None) if name is None else columns["slo_class"] == name
        prompts, outputs = columns["num_prompt_tokens"][inside], columns["num_output_tokens"][inside]
        who = "" if name is None else f"{name or 'no class'}: "
        parts.append(
            f"{who}prompts of {np.median(prompts):,.0f} tokens in the median and {prompts.max():,} at most, outputs of {np.median(outputs):,.0f} and {outputs.max():,}"
        )
    return [f"Its requests: {'; '.join(parts)}." if groups != [None] else f"Its requests have {parts[0]}."]
