"""Assign distinct names to runs that are opened together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from vajra_py.metrics.runs.differences import axes
from vajra_py.metrics.runs.run_data import RunData

_LONG_NAME = 28


def load_runs(paths: Sequence[str | Path]) -> list[RunData]:
    """Open several runs under distinct names (see `distinct`)."""
    return distinct([RunData.load(path) for path in paths])


def distinct(runs: Sequence[RunData]) -> list[RunData]:
    """Return the same runs under distinct names that are short enough for a table.

    If two names are equal or a name is long, all names are replaced by the configuration values in which the runs
    differ (`lrs/pull/dynamic_chunk`). Names of a sweep's folders that are bare numbers (`256`) are replaced by names
    that also say what was varied (`step_tokens=256`), unless one of these is long. If two names are still equal, they
    are prefixed with the runs' parent folders, and numbered if they are equal even then.
    """
    names = [run.name for run in runs]
    if len(set(names)) < len(names) or (len(names) > 1 and max(map(len, names)) > _LONG_NAME):
        names = _names_by_difference(runs, names) or names
    elif len(names) > 1 and all(run.is_named_by_sweep and not re.search("[^0-9.-]", run.name) for run in runs):
        names = _names_with_axes(runs) or names
    if len(set(names)) < len(names):
        names = [
            f"{run.path.resolve().parent.name}/{name}" if names.count(name) > 1 else name
            for run, name in zip(runs, names, strict=True)
        ]
    seen: dict[str, int] = {}
    found = []
    for run, name in zip(runs, names, strict=True):
        seen[name] = seen.get(name, 0) + 1
        label = name if seen[name] == 1 else f"{name} #{seen[name]}"
        found.append(run if label == run.name else run.renamed(label))
    return found


def _names_by_difference(runs: Sequence[RunData], names: Sequence[str]) -> list[str] | None:
    """Return names made of the varied values; None if two would be equal, or if the given names are distinct and the
    longest would not become shorter.
    """
    varied = axes(runs)
    found = ["/".join(axis.values[i] for axis in varied) for i in range(len(runs))]
    clash = len(set(names)) < len(names)
    if len(set(found)) < len(found) or (not clash and max(map(len, found)) >= max(map(len, names))):
        return None
    return found


def _names_with_axes(runs: Sequence[RunData]) -> list[str] | None:
    """Return names such as `step_tokens=256 rate=8`; None if two would be equal or one would be long."""
    varied = axes(runs)
    found = [" ".join(f"{axis.label.replace(' ', '_')}={axis.values[i]}" for axis in varied) for i in range(len(runs))]
    return found if len(set(found)) == len(found) and max(map(len, found)) <= _LONG_NAME else None
