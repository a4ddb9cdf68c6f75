"""Points of a sweep: their values, order and names.

    # Grid: every combination; the last axis varies fastest.
    sweep: {scheduling.request_prioritizer.policy: [fcfs, lrs], workload.rate: [4, 8]}
    # Lists whose values are paired; may be combined with axes of a grid.
    sweep: {zip: {seed: [1, 2], workload.rate: [4, 8]}}
    # Listed points; {} is the experiment as written.
    sweep: [{seed: 1}, {seed: 2, workload.rate: 8}]

A point's id depends on its values alone, so that a sweep can be extended and resumed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from vajra_py.config.places import (
    Entries,
    Finding,
    Items,
    KeyPath,
    PathError,
    Place,
    dotted,
    get,
    leaves,
    parse_path,
    plain,
    put,
)

MAX_POINTS = 10_000
ZIP = "zip"
BASELINE = "baseline"
"""Label of a listed point without settings: the experiment as written."""
SEED = "seed"
FORMS = "Write `path: [values]`, `zip: {path: [values]}`, or a list of points `- {path: value}`"

Assignment: TypeAlias = tuple[str, Any, Place]
"""Dotted path, its new value, and the value's place."""
Row: TypeAlias = tuple[Assignment, ...]


@dataclass(frozen=True, eq=False)
class SweepPoint(Mapping[str, Any]):
    """One point: the values of the dotted paths that it sets."""

    values_by_path: Mapping[str, Any]
    label: str
    """Label for tables and plots: `replica_scheduler=fixed_chunk rate=8`."""
    point_id: str
    """Identifier usable as a folder's name; equal values give equal ids in any sweep."""
    assignments: Row = field(repr=False, default=())

    def __getitem__(self, path: str) -> Any:
        return self.values_by_path[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_path)

    def __len__(self) -> int:
        return len(self.values_by_path)

    def apply(self, root: Entries) -> tuple[Entries, list[Finding]]:
        """Return the tree with this point's values, and findings for paths that do not exist."""
        findings: list[Finding] = []
        for path, value, place in self.assignments:
            try:
                root = put(root, parse_path(path), value, place)
            except PathError as error:
                findings.append(Finding(place, ("sweep", path), str(error)))
        return root, findings


def sweep_points(sweep: Any, place: Place) -> tuple[list[SweepPoint], list[Finding]]:
    """Return the points of the `sweep:` section at `place` in order, and its findings; no points if it has findings."""
    findings: list[Finding] = []
    if isinstance(sweep, Items):
        rows = _listed(sweep, findings)
    elif isinstance(sweep, Entries):
        rows = _grid(sweep, findings)
    else:
        return [], [Finding(place, ("sweep",), f"must be a mapping or a list (got {sweep!r})", FORMS)]
    if not rows and not findings:
        findings.append(Finding(place, ("sweep",), "has no points", FORMS))
    if findings:
        return [], findings
    names = short_names(list(dict.fromkeys(path for row in rows for path, _, _ in row)))
    points = [_point(row, names) for row in rows]
    seen: set[str] = set()
    for point in points:
        if point.point_id in seen:
            findings.append(Finding(place, ("sweep",), f"has a point twice ({point.label})", "Each point stands once"))
        seen.add(point.point_id)
    return ([] if findings else points), findings


def replicated(points: Sequence[SweepPoint], seeds: Sequence[int], place: Place) -> list[SweepPoint]:
    """Return each point once for each of these seeds, seeds varying fastest.

    Raises `ValueError` if a point sets the seed itself.
    """
    if any(SEED in point for point in points):
        raise ValueError("replications and a sweep of the seed are redundant; keep one of them")
    rows = [(*point.assignments, (SEED, seed, place)) for point in points for seed in seeds]
    names = short_names(list(dict.fromkeys(path for row in rows for path, _, _ in row)))
    return [_point(row, names) for row in rows]


def _listed(sweep: Items, findings: list[Finding]) -> list[Row]:
    rows: list[Row] = []
    for index, item in enumerate(sweep):
        if not isinstance(item, Entries):
            wrong = Finding(sweep.place_of(index), ("sweep", index), "must be a mapping of paths to values", FORMS)
            findings.append(wrong)
            continue
        row = tuple((path, value, item.place_of(path)) for path, value in item.items())
        for path, _, place in row:
            _check_path(path, place, ("sweep", index), findings)
        rows.append(row)
    return rows


def _grid(sweep: Entries, findings: list[Finding]) -> list[Row]:
    axes: list[list[Row]] = []
    for axis in _flat(sweep):
        if axis[0] == ZIP:
            axes.append(_zipped(axis[1], axis[2], findings))
        else:
            axes.append([(value,) for value in _values(axis, ("sweep",), findings)])
    _check_once([axis for part in (sweep, get(sweep, ZIP)) for axis in _flat(part) if axis[0] != ZIP], findings)
    if math.prod(map(len, axes)) > MAX_POINTS:
        message = f"has too many points (got {math.prod(map(len, axes))})"
        findings.append(Finding(sweep.place, ("sweep",), message, f"At most {MAX_POINTS}"))
    if findings or not axes:
        return []
    return [tuple(itertools.chain.from_iterable(combination)) for combination in itertools.product(*axes)]


def _zipped(zipped: Any, place: Place, findings: list[Finding]) -> list[Row]:
    if not isinstance(zipped, Entries) or not zipped:
        findings.append(Finding(place, ("sweep", ZIP), "must be a mapping of paths to lists", FORMS))
        return []
    columns = {axis[0]: _values(axis, ("sweep", ZIP), findings) for axis in _flat(zipped)}
    lengths = {path: len(values) for path, values in columns.items()}
    if len(set(lengths.values())) > 1:
        got = ", ".join(f"{path}: {length}" for path, length in lengths.items())
        findings.append(Finding(place, ("sweep", ZIP), f"lists must be of one length (got {got})"))
        return []
    return list(zip(*columns.values(), strict=True))


def _flat(part: Any, prefix: str = "") -> Iterator[Assignment]:
    """Yield the axes below a mapping; `{workload: {rate: [1]}}` is equivalent to `{workload.rate: [1]}`."""
    if not isinstance(part, Entries):
        return
    for key, child in part.items():
        if isinstance(child, Entries) and child and (prefix or key != ZIP):
            yield from _flat(child, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", child, part.place_of(key)


def _check_once(axes: Sequence[Assignment], findings: list[Finding]) -> None:
    seen: set[str] = set()
    for path, _, place in axes:
        if path in seen:
            findings.append(Finding(place, ("sweep", path), "is swept twice", "Each path stands once in a sweep"))
        seen.add(path)


def _values(axis: Assignment, base: KeyPath, findings: list[Finding]) -> Sequence[Assignment]:
    path, values, place = axis
    _check_path(path, place, base, findings)
    if not isinstance(values, Items) or not values:
        got = "an empty list" if isinstance(values, Items) else repr(values)
        findings.append(Finding(place, (*base, path), f"must be a list of values (got {got})", FORMS))
        return ()
    return [(path, value, values.place_of(index)) for index, value in enumerate(values)]


def _check_path(path: str, place: Place, base: KeyPath, findings: list[Finding]) -> None:
    steps = parse_path(path)
    if not all(steps):
        findings.append(Finding(place, (*base, path), "is not a path", "Write keys joined by dots: workload.rate"))
    elif steps[0] in ("sweep", "version", "replications", "capacity"):
        findings.append(Finding(place, (*base, path), f"{steps[0]!r} cannot be swept"))


def _point(row: Row, names: Mapping[str, str]) -> SweepPoint:
    values = {path: plain(value) for path, value, _ in row}
    label = " ".join(f"{names[path]}={_value_text(value)}" for path, value, _ in row) or BASELINE
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(_value_text(value) for _, value, _ in row)).strip("-.")[:60]
    slug = slug or (BASELINE if not row else "")
    return SweepPoint(values, label, f"{slug}-{digest}" if slug else digest, row)


def values_of_label(label: str) -> str:
    """Return a point's label without its paths, for lists in which every point sets the same paths."""
    return re.sub(r"(^| )[^\s=(]+=(?![^(]*\))", r"\1", label)  # `name=` in parentheses is part of a value


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """Return, by path, the shortest suffix of the path that no other path has; a policy's axis is named after its
    layer.
    """
    steps = {path: [step for step in parse_path(path) if step not in ("policy", "params")] or [path] for path in paths}
    names: dict[str, str] = {}
    for path, own in steps.items():
        others = [other for key, other in steps.items() if key != path]
        length = next(
            (count for count in range(1, len(own) + 1) if all(other[-count:] != own[-count:] for other in others)), None
        )
        names[path] = path if length is None else dotted(own[-length:])
    return names


def _value_text(value: Any) -> str:
    """Return a value as part of a label; a policy with parameters reads `lrs(deadline_multiplier=1.5)`."""
    if not isinstance(value, dict | list):
        return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    name = next((str(name) for key in ("policy", "type") if (name := get(value, key)) is not None), "")
    inside = [
        f"{'.'.join(str(step) for step in path if step != 'params')}={_value_text(leaf)}"
        for path, leaf in leaves(value)
        if path not in (("policy",), ("type",))
    ]
    return f"{name}({', '.join(inside)})" if inside else name
