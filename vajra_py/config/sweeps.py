"""Points of a sweep: which ones, in which order, and how each is named.

    sweep: {scheduling.request_prioritizer.policy: [fcfs, lrs], workload.rate: [4, 8]}   # grid: every combination, the last axis fastest
    sweep: {zip: {seed: [1, 2], workload.rate: [4, 8]}}                                   # side by side; may stand beside axes of a grid
    sweep: [{seed: 1}, {seed: 2, workload.rate: 8}]                                       # just these points; {} is the experiment as it stands

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

from vajra_py.config.nodes import Finding, KeyPath, Node, dotted, leaves, parse_path, plain
from vajra_py.config.overrides import PathError, put

MAX_POINTS = 10_000
ZIP = "zip"
BASELINE = "baseline"
"""What a listed point is called that sets nothing: the experiment as it stands."""
SEED = "seed"
FORMS = "Write `path: [values]`, `zip: {path: [values]}`, or a list of points `- {path: value}`"

Assignment: TypeAlias = tuple[str, Node]
Row: TypeAlias = tuple[Assignment, ...]


@dataclass(frozen=True, eq=False)
class SweepPoint(Mapping[str, Any]):
    """One point: the dotted paths that it sets, and their values."""

    values_by_path: Mapping[str, Any]
    label: str
    """For tables and plots: `replica_scheduler=fixed_chunk rate=8`."""
    point_id: str
    """Usable as a folder's name; the same for the same values, whatever else the sweep holds."""
    assignments: Row = field(repr=False, default=())

    def __getitem__(self, path: str) -> Any:
        return self.values_by_path[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_path)

    def __len__(self) -> int:
        return len(self.values_by_path)

    def apply(self, root: Node) -> tuple[Node, list[Finding]]:
        """The tree with this point's values, and the paths that lead nowhere in it."""
        findings: list[Finding] = []
        for path, node in self.assignments:
            try:
                root = put(root, parse_path(path), node)
            except PathError as error:
                findings.append(Finding(node.place, ("sweep", path), str(error)))
        return root, findings


def sweep_points(sweep: Node) -> tuple[list[SweepPoint], list[Finding]]:
    """The points of a `sweep:` section in order, and what is wrong with it; no points when anything is wrong."""
    findings: list[Finding] = []
    if sweep.items is not None:
        rows = _listed(sweep, findings)
    elif sweep.entries is not None:
        rows = _grid(sweep, findings)
    else:
        return [], [Finding(sweep.place, ("sweep",), f"must be a mapping or a list (got {sweep.value!r})", FORMS)]
    if not rows and not findings:
        findings.append(Finding(sweep.place, ("sweep",), "has no points", FORMS))
    if findings:
        return [], findings
    names = short_names(list(dict.fromkeys(path for row in rows for path, _ in row)))
    points = [_point(row, names) for row in rows]
    seen: set[str] = set()
    for point in points:
        if point.point_id in seen:
            findings.append(
                Finding(sweep.place, ("sweep",), f"has a point twice ({point.label})", "Each point stands once")
            )
        seen.add(point.point_id)
    return ([] if findings else points), findings


def replicated(points: Sequence[SweepPoint], seeds: Sequence[Node]) -> list[SweepPoint]:
    """Each point once under each of these seeds, the seeds fastest. Raises `ValueError` where a point sets the seed itself."""
    if any(SEED in point for point in points):
        raise ValueError("replications and a sweep of the seed say the same twice")
    rows = [(*point.assignments, (SEED, seed)) for point in points for seed in seeds]
    names = short_names(list(dict.fromkeys(path for row in rows for path, _ in row)))
    return [_point(row, names) for row in rows]


def _listed(sweep: Node, findings: list[Finding]) -> list[Row]:
    rows: list[Row] = []
    for index, item in enumerate(sweep.items or ()):
        if item.entries is None:
            findings.append(Finding(item.place, ("sweep", index), "must be a mapping of paths to values", FORMS))
            continue
        for path, node in item.entries.items():
            _check_path(path, node, ("sweep", index), findings)
        rows.append(tuple(item.entries.items()))
    return rows


def _grid(sweep: Node, findings: list[Finding]) -> list[Row]:
    axes: list[list[Row]] = []
    for key, node in _flat(sweep):
        if key == ZIP:
            axes.append(_zipped(node, findings))
        else:
            axes.append([((key, value),) for value in _values(key, node, ("sweep",), findings)])
    _check_once([*_paths(sweep), *_paths(sweep.get(ZIP))], findings)
    if math.prod(map(len, axes)) > MAX_POINTS:
        message = f"has too many points (got {math.prod(map(len, axes))})"
        findings.append(Finding(sweep.place, ("sweep",), message, f"At most {MAX_POINTS}"))
    if findings or not axes:
        return []
    return [tuple(itertools.chain.from_iterable(combination)) for combination in itertools.product(*axes)]


def _zipped(node: Node, findings: list[Finding]) -> list[Row]:
    if not node.entries:
        findings.append(Finding(node.place, ("sweep", ZIP), "must be a mapping of paths to lists", FORMS))
        return []
    columns = {path: _values(path, values, ("sweep", ZIP), findings) for path, values in _flat(node)}
    lengths = {path: len(values) for path, values in columns.items()}
    if len(set(lengths.values())) > 1:
        got = ", ".join(f"{path}: {length}" for path, length in lengths.items())
        findings.append(Finding(node.place, ("sweep", ZIP), f"lists must be of one length (got {got})"))
        return []
    return [tuple(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _flat(node: Node, prefix: str = "") -> Iterator[Assignment]:
    """The axes below a mapping; `{workload: {rate: [1]}}` says the same as `{workload.rate: [1]}`."""
    for key, child in (node.entries or {}).items():
        if child.entries and (prefix or key != ZIP):
            yield from _flat(child, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", child


def _paths(node: Node | None) -> list[Assignment]:
    return [] if node is None else [(path, child) for path, child in _flat(node) if path != ZIP]


def _check_once(axes: Sequence[Assignment], findings: list[Finding]) -> None:
    seen: set[str] = set()
    for path, node in axes:
        if path in seen:
            findings.append(Finding(node.place, ("sweep", path), "is swept twice", "Each path stands once in a sweep"))
        seen.add(path)


def _values(path: str, node: Node, base: KeyPath, findings: list[Finding]) -> Sequence[Node]:
    _check_path(path, node, base, findings)
    if not node.items:
        got = "an empty list" if node.items is not None else repr(plain(node))
        findings.append(Finding(node.place, (*base, path), f"must be a list of values (got {got})", FORMS))
        return ()
    return node.items


def _check_path(path: str, node: Node, base: KeyPath, findings: list[Finding]) -> None:
    steps = parse_path(path)
    if not all(steps):
        findings.append(Finding(node.place, (*base, path), "is not a path", "Write keys joined by dots: workload.rate"))
    elif steps[0] in ("sweep", "version", "replications", "capacity"):
        findings.append(Finding(node.place, (*base, path), f"{steps[0]!r} cannot be swept"))


def _point(row: Row, names: Mapping[str, str]) -> SweepPoint:
    values = {path: plain(node) for path, node in row}
    label = " ".join(f"{names[path]}={_value_text(node)}" for path, node in row) or BASELINE
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(_value_text(node) for _, node in row)).strip("-.")[:60]
    slug = slug or (BASELINE if not row else "")
    return SweepPoint(values, label, f"{slug}-{digest}" if slug else digest, row)


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """The shortest endings that tell the paths apart; a policy's axis is named after its layer."""
    steps = {path: [step for step in parse_path(path) if step not in ("policy", "params")] or [path] for path in paths}
    names: dict[str, str] = {}
    for path, own in steps.items():
        others = [other for key, other in steps.items() if key != path]
        length = next(
            (count for count in range(1, len(own) + 1) if all(other[-count:] != own[-count:] for other in others)), None
        )
        names[path] = path if length is None else dotted(own[-length:])
    return names


def _value_text(node: Node) -> str:
    """A value in a label; a policy with parameters reads `lrs(deadline_multiplier=1.5)`."""
    if node.entries is None and node.items is None:
        return (
            "null"
            if node.value is None
            else str(node.value).lower()
            if isinstance(node.value, bool)
            else str(node.value)
        )
    name = next((str(child.value) for key in ("policy", "type") if (child := node.get(key)) is not None), "")
    inside = [
        f"{'.'.join(str(step) for step in path if step != 'params')}={_value_text(leaf)}"
        for path, leaf in leaves(node)
        if path not in (("policy",), ("type",))
    ]
    return f"{name}({', '.join(inside)})" if inside else name
