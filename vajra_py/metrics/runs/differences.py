"""Differences between the configurations of several runs, and the axes along which the runs form a grid.

Configurations are compared as flat `dotted.path -> text` mappings. A path whose value is determined by the values of
other paths (such as a parameter that only one policy has, or an output folder) is not an axis.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from vajra_py.config.sweeps import short_names
from vajra_py.metrics.runs.run_data import RunData

WORKLOAD_PREFIX = "workload"
SEED_PATH = "seed"
POOLS_PATH = "pools"
ABSENT = "–"
"""Placeholder for a value that a configuration does not have."""

# Output locations, names and descriptions have no effect on results; `sweep` and `replications` only list runs.
_IGNORED = ("name", "output", "out", "run_dir", "output_dir", "results", "sweep", "replications", "description")


class Axis(Struct, frozen=True):
    """One configuration path that was varied between runs."""

    path: str
    label: str
    """Short name, unique among the axes of one comparison."""
    values: tuple[str, ...]
    """Value in each run, in the order of the runs."""

    @property
    def levels(self) -> tuple[str, ...]:
        """Distinct values in natural order (numbers by size)."""
        return tuple(sorted(set(self.values), key=natural))


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return a nested configuration as a mapping from dotted path to text; a list becomes one JSON text unless it holds
    mappings.
    """
    flat: dict[str, str] = {}
    for key, value in config.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, path)
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) and item for item in value):
            flat |= flatten({str(index): item for index, item in enumerate(value)}, path)
        else:
            flat[path] = value if isinstance(value, str) else _number_or_json(value)
    return flat


def _number_or_json(value: object) -> str:
    """Return the text of a value that is not a string; 12 and 12.0 give the same text."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value, default=str)


def differences(runs: Sequence[RunData]) -> dict[str, tuple[str, ...]]:
    """Return each path whose value differs between the runs, with its value in each run. Paths are in the order of the
    first configuration.
    """
    if len(runs) < 2:
        return {}
    flats = [flatten(run.config) for run in runs]
    paths = dict.fromkeys(path for flat in flats for path in flat)
    values = {path: tuple(flat.get(path, ABSENT) for flat in flats) for path in paths}
    return {path: found for path, found in values.items() if len(set(found)) > 1}


def axes(runs: Sequence[RunData]) -> list[Axis]:
    """Return an axis for each difference whose values are not determined by the values of other axes. Axes of replica
    counts of pools come first, then those of policies, parameters, the workload and the seed; within each kind the
    order is that of the configuration.
    """
    differing = _differing(runs)
    pools = tuple(_composition(run.config.get("pools")) for run in runs) if len(runs) > 1 else ()
    if len(set(pools)) > 1:
        differing[POOLS_PATH] = pools
    return _axes_of(differing)


def workload_axes(runs: Sequence[RunData]) -> list[Axis]:
    """Return the axes of the workload, without the seed. Differences of the system are left out of account, so a
    setting of the workload that was varied together with a policy is an axis, unlike in `axes`.
    """
    return _axes_of({path: values for path, values in _differing(runs).items() if _is_of_workload(path)})


def _differing(runs: Sequence[RunData]) -> dict[str, tuple[str, ...]]:
    """Return the differences that affect results."""
    return {path: values for path, values in differences(runs).items() if path.split(".")[0] not in _IGNORED}


def _axes_of(differing: Mapping[str, tuple[str, ...]]) -> list[Axis]:
    """Return an axis for each of these differences whose values are not determined by the values of other axes."""
    kept: dict[str, tuple[str, ...]] = {}
    joined: dict[str, list[str]] = {}
    for path in sorted(differing, key=_rank):
        if not _follows(differing[path], list(kept.values())):
            kept[path] = differing[path]
        elif path.endswith(".policy"):
            _join(kept, joined, path, differing[path])
    labels = short_names([*kept, *(path for paths in joined.values() for path in paths)])
    names = {path: "+".join(labels[own] for own in (path, *joined.get(path, ()))) for path in kept}
    return [Axis(path, names[path].replace("_", " "), _short(values)) for path, values in kept.items()]


def _composition(pools: object) -> str:
    """Return a text such as `6 prefill + 2 decode`."""
    if not isinstance(pools, Mapping) or not pools:
        return ABSENT
    return " + ".join(f"{pool.get('num_replicas', 1)} {name}" for name, pool in pools.items())


def _short(values: tuple[str, ...]) -> tuple[str, ...]:
    """Return shortened values (file names without folders, a dash for null), or the values unchanged if shortening
    would make two of them equal.
    """
    found = tuple(ABSENT if value == "null" else value.rsplit("/", 1)[-1] for value in values)
    return found if len(set(found)) == len(set(values)) else values


def _join(kept: dict[str, tuple[str, ...]], joined: dict[str, list[str]], path: str, values: tuple[str, ...]) -> None:
    """Append a policy to the name of another policy that was varied together with it: `lrs+space_sharing`."""
    for other_path, own in kept.items():
        if other_path.endswith(".policy") and _follows(values, [own]):
            kept[other_path] = tuple(f"{one}+{other}" for one, other in zip(own, values, strict=True))
            joined.setdefault(other_path, []).append(path)
            return


def is_workload(axis: Axis) -> bool:
    """Return whether this axis varies the workload or the seed, not the system."""
    return axis.path == SEED_PATH or _is_of_workload(axis.path)


def _is_of_workload(path: str) -> bool:
    return path.split(".")[0] in (WORKLOAD_PREFIX, "workloads")


_RATE_WORDS = ("rate", "rate_per_s", "time_scale", "num_users")


def is_rate(axis: Axis) -> bool:
    """Return whether this axis sets the amount of load: the request rate, a time scale, or the number of users of a
    closed loop.
    """
    return is_workload(axis) and axis.path.split(".")[-1] in _RATE_WORDS


def _follows(values: Sequence[str], kept: Sequence[Sequence[str]]) -> bool:
    """Return whether the values are determined by the kept axes: runs with equal values on all kept axes have equal
    `values`.
    """
    if not kept:
        return False
    seen: dict[tuple[str, ...], str] = {}
    return all(seen.setdefault(key, value) == value for key, value in zip(zip(*kept, strict=True), values, strict=True))


IDENTITIES = ("type", "profile", "path")
"""Settings that identify a workload; its other settings are parameters."""


def _rank(path: str) -> int:
    """Return the sort rank of a path. Of two axes that determine each other, the one with the lower rank is kept."""
    if path == SEED_PATH:
        return 7
    if path == POOLS_PATH:
        return -1
    parts = path.split(".")
    if _is_of_workload(path):
        return 2 + IDENTITIES.index(parts[1]) if parts[1:2] and parts[1] in IDENTITIES else 6
    return 0 if path.endswith(".policy") else 1


def natural(text: str) -> tuple[tuple[int, float, str], ...]:
    """Return a sort key that compares numbers inside texts by value."""
    parts = re.split(r"(\d+(?:\.\d+)?)", text)
    return tuple((0, float(part), "") if i % 2 else (1, 0.0, part) for i, part in enumerate(parts) if part)
