"""Source locations (file and line) of configuration values.

Between reading and validation a configuration is plain data: dicts and lists that also remember where their values were
written, so that a file, overrides, a preset and a point of a sweep can be merged and a mistake is still reported where it
was made. A place is looked up when an error is reported. Trees never change; edits return a new tree that shares the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias, cast

from vajra_py.errors import Problem

Step: TypeAlias = str | int
KeyPath: TypeAlias = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value was written."""

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


class _Written:
    """What `Entries` and `Items` have in common."""

    place: Place
    places: Mapping[Step, Place]
    """Of the values that were written elsewhere than the whole."""

    def place_of(self, step: Step) -> Place:
        """Where the value at a key or index was written."""
        return self.places.get(step, self.place)

    def replaced(self, step: Step, value: Any, place: Place) -> Self:
        """A copy with one value set, which was written at `place`."""
        places: dict[Step, Place] = {**self.places, step: place}
        copy = cast(Any, type(self))(self, self.place, places)
        copy[step] = value
        return cast(Self, copy)


class Entries(_Written, dict[str, Any]):
    """A mapping, and where its values were written."""

    def __init__(self, values: Mapping[str, Any], place: Place, places: Mapping[Step, Place] | None = None) -> None:
        super().__init__(values)
        self.place, self.places = place, places or {}

    def completed(self, under: Entries) -> Entries:
        """A copy with the entries of another mapping that this one lacks."""
        lacking = [key for key in under if key not in self]
        places: dict[Step, Place] = {**self.places, **{key: under.place_of(key) for key in lacking}}
        return Entries({**self, **{key: under[key] for key in lacking}}, self.place, places)

    def without(self, *keys: str) -> Entries:
        """A copy without some entries."""
        return Entries({key: value for key, value in self.items() if key not in keys}, self.place, self.places)


class Items(_Written, list[Any]):
    """A list, and where its values were written."""

    def __init__(self, values: Iterable[Any], place: Place, places: Mapping[Step, Place] | None = None) -> None:
        super().__init__(values)
        self.place, self.places = place, places or {}


class PathError(ValueError):
    """A path leads nowhere in a tree."""


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


def written_at(place: Place, value: Any) -> Any:
    """An ordinary value as a tree that was written in one place."""
    if isinstance(value, Mapping):
        return Entries({str(key): written_at(place, child) for key, child in value.items()}, place)
    if isinstance(value, list | tuple):
        return Items([written_at(place, child) for child in value], place)
    return str(value) if isinstance(value, Path) else value


def plain(tree: Any) -> Any:
    """A copy of the tree in ordinary dicts and lists."""
    if isinstance(tree, dict):
        return {key: plain(child) for key, child in tree.items()}
    return [plain(child) for child in tree] if isinstance(tree, list) else tree


def has(tree: Any, step: Step) -> bool:
    """Whether the tree is a mapping with this key, or a list with this index."""
    if isinstance(tree, list):
        return isinstance(step, int) and 0 <= step < len(tree)
    return isinstance(tree, dict) and step in tree


def get(tree: Any, *path: Step) -> Any:
    """The value at a path, None when there is none."""
    for step in path:
        if not has(tree, step):
            return None
        tree = tree[step]
    return tree


def locate(tree: Entries, path: KeyPath) -> Place:
    """The place of the value at `path`, or of the nearest thing around it that was written."""
    place, at = tree.place, tree
    for step in path:
        if not has(at, step):
            break
        place, at = at.place_of(step), at[step]  # type: ignore[index]
    return place


def put(tree: Any, path: KeyPath, value: Any, place: Place, above: KeyPath = ()) -> Any:
    """The tree with another value at `path`, written at `place`; mappings that are not there are made. Raises `PathError`.

    Indices of lists may be given as text; `above` is the path of the tree itself.
    """
    if not path:
        return value
    step = path[0]
    if isinstance(tree, Items):
        step = _index(step, len(tree), dotted(above))
    elif tree is None:
        tree = Entries({}, place)
    elif not isinstance(tree, Entries):
        raise PathError(f"{dotted(above)!r} is neither a mapping nor a list (it is {tree!r})")
    before = get(tree, step)
    child = put(before, path[1:], value, place, (*above, step))
    return tree.replaced(step, child, place if before is None or len(path) == 1 else tree.place_of(step))


def _index(step: Step, length: int, inside: str) -> int:
    text = str(step)
    if not text.isdigit() or int(text) >= length:
        allowed = f"0 to {length - 1}" if length else "nothing, as the list is empty"
        raise PathError(f"{inside!r} is a list, and {text!r} is not an index of it; allowed: {allowed}")
    return int(text)


def merged(over: Any, under: Any) -> Any:
    """`over` completed from `under`: mappings are merged key by key at every level, anything else of `over` stands."""
    if not isinstance(over, Entries) or not isinstance(under, Entries):
        return over
    both = {key: merged(value, under[key]) if key in under else value for key, value in over.items()}
    return Entries(both, over.place, over.places).completed(under)


def dotted(path: Iterable[Step]) -> str:
    """A path as users write it: `replicasets.chat.num_replicas`, lists by index."""
    return ".".join(map(str, path))


def parse_path(text: str) -> KeyPath:
    """The steps of a dotted path; what is an index is found out where it is used."""
    return tuple(part.strip() for part in text.split("."))


def leaves(tree: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every value that is neither mapping nor list, with its path."""
    if not isinstance(tree, dict | list):
        yield path, tree
        return
    for step, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from leaves(child, (*path, step))
