"""Says in words what the seeds of a setting leave out of its load, by what their manifests say of the requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vajra_py.metrics.run_data import RunData


def load_note(runs: Sequence[RunData]) -> str:
    """What does not vary between replications, or varies too little, as sentences; empty where there is nothing to say, or the manifests do not tell."""
    sources = [_operations(run.manifest.get("workload")) for run in runs]
    found = []
    rates = {str(one.get("requests_per_s")) for own in sources for one in own if one.get("op") == "at_rate"}
    if rates:
        found.append(
            "The requests of each seed are stretched to exactly the rate that is set: load does not vary between its seeds, and intervals leave that out."
        )
    windows = [one for own in sources for one in own if one.get("op") == "window" and one.get("of")]
    share = sum(float(one.get("num_requests") or one.get("duration_s") or 0.0) / float(one["of"]) for one in windows)
    if share > 1:
        found.append(
            f"Its windows are {share:.1f} times as long as the trace together: they overlap, are not independent, and intervals are too narrow. A longer trace or shorter windows help."
        )
    return " ".join(found)


def _operations(source: Any) -> list[Mapping[str, Any]]:
    """The operations of a workload and of its parts."""
    return list(_walk(source)) if isinstance(source, Mapping) else []


def _walk(source: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from (one for one in source.get("operations") or [] if isinstance(one, Mapping))
    for part in source.get("parts") or []:
        if isinstance(part, Mapping):
            yield from _walk(part)
