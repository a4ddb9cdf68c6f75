"""Source locations (file and line) of configuration values.

A configuration is a tree of nodes from reading to validation, so that values from a file, from overrides, from a preset
and from a point of a sweep can be merged and a mistake is still reported where it was made. Nodes never change; edits
return a new tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from vajra_py.errors import Problem

Step: TypeAlias = str | int
KeyPath: TypeAlias = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where somebody wrote a value."""

    source: str = ""
    """A file's name, an override as typed (`--set a.b`), a preset; empty for a mapping that was given in memory."""
    line: int | None = None
    """Line of a file, from 1."""
    path: str | None = None
    """For an override: the path that it sets, so that it is not said twice."""

    def where(self, path: KeyPath) -> str:
        """The place as errors show it, with the path of the value inside the configuration."""
        text = dotted(path)
        if self.line is not None:
            return f"{self.source}:{self.line}: {text}" if text else f"{self.source}:{self.line}"
        if not self.source:
            return text or "configuration"
        return self.source if text in ("", self.path) else f"{self.source}: {text}"


@dataclass(frozen=True, slots=True)
class Node:
    """A value and its place; mappings and lists hold nodes, everything else is a plain value."""

    value: Any
    place: Place

    @property
    def entries(self) -> Mapping[str, Node] | None:
        """The mapping's entries, None when it is not a mapping."""
        return self.value if isinstance(self.value, dict) else None

    @property
    def items(self) -> Sequence[Node] | None:
        """The list's items, None when it is not a list."""
        return self.value if isinstance(self.value, list) else None

    def get(self, *path: Step) -> Node | None:
        """The node at a path, None when there is none."""
        node: Node | None = self
        for step in path:
            node = None if node is None else node._child(step)
        return node

    def _child(self, step: Step) -> Node | None:
        if isinstance(self.value, dict):
            return self.value.get(step)
        if isinstance(self.value, list) and isinstance(step, int) and 0 <= step < len(self.value):
            child: Node = self.value[step]
            return child
        return None

    def with_entry(self, key: str, node: Node) -> Node:
        """This mapping with one entry set."""
        return replace(self, value={**(self.entries or {}), key: node})

    def without(self, *keys: str) -> Node:
        """This mapping without some entries."""
        return replace(self, value={key: node for key, node in (self.entries or {}).items() if key not in keys})

    def put(self, path: KeyPath, node: Node) -> Node:
        """This tree with another node at `path`; every step but the last must exist or lead through mappings."""
        if not path:
            return node
        head, rest = path[0], path[1:]
        child = self._child(head) or Node({}, node.place)
        if isinstance(self.value, list):
            items = list(self.value)
            items[int(head)] = child.put(rest, node)
            return replace(self, value=items)
        return self.with_entry(str(head), child.put(rest, node))


@dataclass(frozen=True, slots=True)
class Finding:
    """A mistake at a path, before it is known how to print it."""

    place: Place
    path: KeyPath
    message: str
    allowed: str | None = None

    def problem(self) -> Problem:
        """The mistake as errors carry it."""
        return Problem(self.place.where(self.path), self.message, self.allowed)


def in_order(findings: Iterable[Finding]) -> list[Problem]:
    """The problems in the order of the file's lines, then the others as they were found; each one once.

    A value that several sections inherit, or several points of a sweep share, is one mistake, reported where it was
    written.
    """
    ordered = sorted(findings, key=lambda each: each.place.line if each.place.line is not None else 1 << 60)
    unique: dict[object, Problem] = {}
    for each in ordered:
        problem = each.problem()
        shared = each.place.line is not None or each.place.source.startswith("preset ")
        unique.setdefault((each.place, each.path[-1:], each.message) if shared else problem, problem)
    return list(unique.values())


def plain(node: Node) -> Any:
    """The tree as ordinary dicts, lists and values."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def node_of(value: Any, place: Place) -> Node:
    """An ordinary value as a tree that was written in one place."""
    if isinstance(value, Mapping):
        return Node({str(key): node_of(child, place) for key, child in value.items()}, place)
    if isinstance(value, list | tuple):
        return Node([node_of(child, place) for child in value], place)
    return Node(str(value) if isinstance(value, Path) else value, place)


def merged(over: Node, under: Node) -> Node:
    """`over` completed from `under`: mappings are merged key by key at every level, anything else of `over` stands."""
    if not isinstance(over.value, dict) or not isinstance(under.value, dict):
        return over
    entries = dict(over.value)
    for key, node in under.value.items():
        entries[key] = merged(entries[key], node) if key in entries else node
    return replace(over, value=entries)


def locate(root: Node, path: KeyPath) -> Place:
    """The place of the value at `path`, or of the nearest thing around it that was written."""
    node = root
    for step in path:
        child = node._child(step)
        if child is None:
            break
        node = child
    return node.place


def dotted(path: Iterable[Step]) -> str:
    """A path as users write it: `replicasets.chat.num_replicas`, lists by index."""
    return ".".join(map(str, path))


def parse_path(text: str) -> KeyPath:
    """The steps of a dotted path; what is an index is found out where it is used."""
    return tuple(part.strip() for part in text.split("."))


def leaves(node: Node, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
    """Every node that is neither mapping nor list, with its path."""
    if isinstance(node.value, dict):
        for key, child in node.value.items():
            yield from leaves(child, (*path, key))
    elif isinstance(node.value, list):
        for index, child in enumerate(node.value):
            yield from leaves(child, (*path, index))
    else:
        yield path, node
