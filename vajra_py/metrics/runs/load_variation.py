"""Describe which parts of the load do not vary between the seeds of a setting, based on the workload facts in the
manifests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vajra_py.metrics.runs.run_data import RunData

_MUCH = 0.9
"""Windows of a trace count as overlapping if their union is shorter than this fraction of the sum of their lengths."""


def load_note(runs: Sequence[RunData]) -> str:
    """Return sentences on parts of the load that do not vary between replications: an exact rate, or windows that
    overlap in the trace. The text is empty if all parts vary, or if the manifests do not describe the load.
    """
    sources = [_operations(run.manifest.get("workload")) for run in runs]
    found = []
    rates = {str(one.get("requests_per_s")) for own in sources for one in own if one.get("op") == "at_rate"}
    if rates:
        found.append(
            "The requests of each seed are stretched to exactly the rate that is set: load does not vary between its seeds, and intervals leave that out."
        )
    held, covered = _coverage(sources)
    if covered < _MUCH * held:
        found.append(
            f"Its windows overlap: together they cover {covered / held:.0%} of what they hold. They are not independent, and intervals are too narrow; a longer trace or shorter windows help."
        )
    return " ".join(found)


def _coverage(sources: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[float, float]:
    """Return (summed length, length of the union) of the runs' windows; of each run, only the first workload with a
    window counts.
    """
    windows = [next((one for one in own if one.get("op") == "window"), None) for own in sources]
    ends = []
    for one in windows:
        if one is not None:
            start = float(one.get("skip", one.get("start_s")) or 0.0)
            ends.append((start, start + float(one.get("num_requests") or one.get("duration_s") or 0.0)))
    held, covered, reached = sum(end - start for start, end in ends), 0.0, 0.0
    for start, end in sorted(ends):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return held, covered


def _operations(source: Any) -> list[Mapping[str, Any]]:
    """Return the operations of a workload and of its parts."""
    return list(_walk(source)) if isinstance(source, Mapping) else []


def _walk(source: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from (one for one in source.get("operations") or [] if isinstance(one, Mapping))
    for part in source.get("parts") or []:
        if isinstance(part, Mapping):
            yield from _walk(part)
