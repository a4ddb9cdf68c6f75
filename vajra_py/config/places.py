"""Source locations (file and line) of configuration values.

Between reading and validation, a configuration is plain data: dicts and lists that also store the places of their
values. A file, overrides, a preset and a point of a sweep can thus be merged, and a mistake is still reported at its
origin. A place is looked up only when an error is reported. Trees are immutable; edits return a new tree that shares
the unchanged parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TypeAlias, cast

from msgspec import Struct

from vajra_py.errors import Problem

Step: TypeAlias = str | int
KeyPath: TypeAlias = tuple[Step, ...]


class Place(Struct, frozen=True):
    """Origin of a value."""

    source: str = ""
    """File name, override as typed (`--set a.b`), or preset; empty for a mapping passed in memory."""
    line: int | None = None
    """Line of a file, from 1."""
    path: str | None = None
    """Path set by an override; errors about this path do not repeat it, because it is in `source`. None otherwise."""

    def where(self, path: KeyPath) -> str:
        """Return the place as shown in errors, with the path of the value inside the configuration."""
        text = dotted(path)
        if self.line is not None:
            return f"{self.source}:{self.line}: {text}" if text else f"{self.source}:{self.line}"
        if not self.source:
            return text or "configuration"
        return self.source if text in ("", self.path) else f"{self.source}: {text}"


class _Written:
    """Common base of `Entries` and `Items`."""

    place: Place
    places: Mapping[Step, Place]
    """Places of the values whose origin differs from the container's origin."""

    def place_of(self, step: Step) -> Place:
        """Return the place of the value at a key or index."""
        return self.places.get(step, self.place)

    def replaced(self, step: Step, value: Any, place: Place) -> Self:
        """Return a copy with the value at a key or index replaced by `value`, which comes from `place`."""
        places: dict[Step, Place] = {**self.places, step: place}
        copy = cast(Any, type(self))(self, self.place, places)
        copy[step] = value
        return cast(Self, copy)


class Entries(_Written, dict[str, Any]):
    """Mapping with the places of its values."""

    def __init__(self, values: Mapping[str, Any], place: Place, places: Mapping[Step, Place] | None = None) -> None:
        super().__init__(values)
        self.place, self.places = place, places or {}

    def completed(self, under: Entries) -> Entries:
        """Return a copy in which entries that this mapping lacks are taken from `under`."""
        lacking = [key for key in under if key not in self]
        places: dict[Step, Place] = {**self.places, **{key: under.place_of(key) for key in lacking}}
        return Entries({**self, **{key: under[key] for key in lacking}}, self.place, places)

    def without(self, *keys: str) -> Entries:
        """Return a copy without some entries."""
        return Entries({key: value for key, value in self.items() if key not in keys}, self.place, self.places)


class Items(_Written, list[Any]):
    """List with the places of its values."""

    def __init__(self, values: Iterable[Any], place: Place, places: Mapping[Step, Place] | None = None) -> None:
        super().__init__(values)
        self.place, self.places = place, places or {}


class PathError(ValueError):
    """Raised for a path that does not exist in a tree."""


class Finding(Struct, frozen=True):
    """Mistake at a path, independent of how it is shown."""

    place: Place
    path: KeyPath
    message: str
    allowed: str | None = None

    def problem(self) -> Problem:
        """Convert the mistake to a `Problem` that shows its place."""
        return Problem(self.place.where(self.path), self.message, self.allowed)


def in_order(findings: Iterable[Finding]) -> list[Problem]:
    """Return the problems in the order of the file's lines, then those without a line in the order found.

    Duplicates are dropped: a wrong value that several sections inherit, or that several points of a sweep share, is
    reported once, at its origin.
    """
    ordered = sorted(findings, key=lambda each: each.place.line if each.place.line is not None else 1 << 60)
    unique: dict[object, Problem] = {}
    for each in ordered:
        problem = each.problem()
        shared = each.place.line is not None or each.place.source.startswith("preset ")
        unique.setdefault((each.place, each.path[-1:], each.message) if shared else problem, problem)
    return list(unique.values())


def written_at(place: Place, value: Any) -> Any:
    """Return an ordinary value as a tree in which every value has this place."""
    if isinstance(value, Mapping):
        return Entries({str(key): written_at(place, child) for key, child in value.items()}, place)
    if isinstance(value, list | tuple):
        return Items([written_at(place, child) for child in value], place)
    return str(value) if isinstance(value, Path) else value


def plain(tree: Any) -> Any:
    """Return a copy of the tree in ordinary dicts and lists."""
    if isinstance(tree, dict):
        return {key: plain(child) for key, child in tree.items()}
    return [plain(child) for child in tree] if isinstance(tree, list) else tree


def has(tree: Any, step: Step) -> bool:
    """Return True if the tree is a mapping with this key, or a list with this index."""
    if isinstance(tree, list):
        return isinstance(step, int) and 0 <= step < len(tree)
    return isinstance(tree, dict) and step in tree


def get(tree: Any, *path: Step) -> Any:
    """Return the value at a path; None if there is none."""
    for step in path:
        if not has(tree, step):
            return None
        tree = tree[step]
    return tree


def locate(tree: Entries, path: KeyPath) -> Place:
    """Return the place of the value at `path`, or of the value's nearest ancestor that exists."""
    place, at = tree.place, tree
    for step in path:
        if not has(at, step):
            break
        place, at = at.place_of(step), at[step]  # type: ignore[index]
    return place


def put(tree: Any, path: KeyPath, value: Any, place: Place, above: KeyPath = ()) -> Any:
    """Return the tree with `value`, which comes from `place`, at `path`; missing mappings are created.

    Raises `PathError`.

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
    if not text.isdecimal() or len(text) > 18 or int(text) >= length:
        allowed = f"0 to {length - 1}" if length else "nothing, as the list is empty"
        raise PathError(f"{inside!r} is a list, and {text!r} is not an index of it; allowed: {allowed}")
    return int(text)


def merged(over: Any, under: Any) -> Any:
    """Return `over` completed from `under`: mappings are merged recursively, any other value of `over` takes
    precedence.
    """
    if not isinstance(over, Entries) or not isinstance(under, Entries):
        return over
    both = {key: merged(value, under[key]) if key in under else value for key, value in over.items()}
    return Entries(both, over.place, over.places).completed(under)


def dotted(path: Iterable[Step]) -> str:
    """Return a path in the user's notation, such as `replicasets.chat.num_replicas` or `observers.0.type`."""
    return ".".join(map(str, path))


def parse_path(text: str) -> KeyPath:
    """Return the steps of a dotted path as text; `put` converts indices of lists."""
    return tuple(part.strip() for part in text.split("."))


def leaves(tree: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every value that is neither mapping nor list, with its path."""
    if not isinstance(tree, dict | list):
        yield path, tree
        return
    for step, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from leaves(child, (*path, step))
