"""Read YAML files with line numbers.

A file is one document of YAML 1.2 (`yes` and `on` are strings, `012` is twelve). Keys are names, each given once in its
mapping. Anchors, aliases and `<<` work; dates stay text; other tags are refused.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from vajra_py.config.explain import show
from vajra_py.config.places import Entries, Finding, Items, KeyPath, Place, Step, in_order
from vajra_py.errors import ConfigError, Problem

TAG = "tag:yaml.org,2002:"
MAX_DEPTH = 64
MAX_VALUES = 100_000
"""Maximum number of values in a file: a few lines of nested aliases can expand to billions."""
_LONG_ESCAPE = re.compile(r"\\U([0-9a-fA-F]{8})")
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_yaml(path: str | Path) -> Any:
    """Read the tree of a file, an `Entries` if the file contains a mapping.

    Raises `ConfigError` with every mistake that can be found without a schema.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(Problem(str(path), f"is not valid UTF-8 (byte {error.start})", "Save it as UTF-8")) from error
    except OSError as error:
        raise ConfigError(Problem(str(path), f"cannot be read ({error.strerror})")) from error
    return parse_yaml(text, Place(str(path), 1))


def read_mapping(path: str | Path) -> Entries:
    """Read the tree of a file that contains a mapping or nothing.

    Raises `ConfigError` like `read_yaml`, and if the file contains any other value.
    """
    return mapping_of(read_yaml(path), Place(str(path), 1))


def mapping_of(root: Any, place: Place) -> Entries:
    """Return a file's tree, which must be a mapping; an empty one for an empty file. Raises `ConfigError`."""
    if root is None:
        return Entries({}, place)
    if not isinstance(root, Entries):
        raise ConfigError(Finding(place, (), f"must be a mapping (got {show(root)})").problem())
    return root


def parse_yaml(text: str, place: Place) -> Any:
    """Parse a text into a tree.

    If `place` has a line, the text is a file and each value gets its own line; otherwise all values get `place`.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    yaml = YAML(typ="safe", pure=True)
    try:
        root = yaml.compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = Place(place.source, mark.line + 1, place.path) if mark and place.line is not None else place
        reason = " ".join(str(part) for part in (error.context, error.problem) if part)
        raise ConfigError(Finding(at, (), f"is not valid YAML: {reason}").problem()) from error
    except RecursionError:  # the parser recurses at each level of nesting
        raise ConfigError(Finding(place, (), "is nested too deeply").problem()) from None
    except YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(Finding(place, (), f"is not valid YAML: {reason}").problem()) from error
    except (ValueError, OverflowError) as error:  # the parser does not check what an escape stands for
        raise ConfigError(_escape(text, place, error).problem()) from error
    if root is None:
        return None
    reader = _Reader(yaml.constructor, place)
    tree = reader.value(root, (), place)
    if reader.findings:
        raise ConfigError(in_order(reader.findings))
    return tree


def _escape(text: str, place: Place, error: Exception) -> Finding:
    """Return the finding for a text whose escapes the parser cannot convert to characters."""
    for match in _LONG_ESCAPE.finditer(text):
        if int(match[1], 16) > sys.maxunicode:
            line = None if place.line is None else place.line + text.count("\n", 0, match.start())
            at = Place(place.source, line, place.path)
            return Finding(at, (), f"is not valid YAML: {match[0]} is no character", "Escapes up to \\U0010FFFF")
    return Finding(place, (), f"is not valid YAML: {error}")


class _Reader:
    """Converts the parser's nodes into values and collects mistakes."""

    def __init__(self, constructor: Any, place: Place) -> None:
        self._constructor = constructor
        self._place = place
        self._num_values = 0
        self.findings: list[Finding] = []

    def value(self, raw: Any, path: KeyPath, place: Place) -> Any:
        """Convert a node. `place`: for a value in a mapping, the place of its key; otherwise the node's own place."""
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            message = f"has more than {MAX_VALUES:,} values, including those that aliases repeat"
            raise ConfigError(Finding(place, path[:4], message).problem())
        kind = raw.tag.removeprefix(TAG) if str(raw.tag).startswith(TAG) else str(raw.tag)
        if len(path) > MAX_DEPTH:
            return self._wrong(place, path[:4], "is nested too deeply, or contains itself")
        if kind == "map" and isinstance(raw.value, list):
            return self._mapping(raw, path, place)
        if kind == "seq" and isinstance(raw.value, list):
            places: dict[Step, Place] = {index: self._at(item) for index, item in enumerate(raw.value)}
            items = [self.value(item, (*path, index), places[index]) for index, item in enumerate(raw.value)]
            return Items(items, place, places)
        if kind in ("str", "timestamp") and isinstance(raw.value, str):
            if _SURROGATE.search(raw.value):
                return self._half(place, path, raw.value)
            return raw.value
        if kind in ("null", "bool", "int", "float") and isinstance(raw.value, str):
            try:
                value = self._constructor.construct_object(raw)
                str(value)  # raises ValueError for numerals of base 8 or 16 that are too long to show as a decimal
                return value
            except (ValueError, LookupError):
                return self._wrong(place, path, f"is not a valid {kind} (got {show(raw.value)})")
        return self._wrong(place, path, f"has a tag that is not allowed (got {raw.tag})", "Write plain values")

    def _mapping(self, raw: Any, path: KeyPath, place: Place) -> Entries:
        own: dict[str, Any] = {}
        places: dict[Step, Place] = {}
        inherited = Entries({}, place)
        for raw_key, raw_value in raw.value:
            at = self._at(raw_key)
            if raw_key.tag == f"{TAG}merge":
                inherited = inherited.completed(self._inherited(raw_value, path, at))
            elif not isinstance(raw_key.value, str):
                self._wrong(at, path, "has a key that is a list or a mapping", "Keys are names")
            elif _SURROGATE.search(raw_key.value):
                self._half(at, path, raw_key.value)
            elif raw_key.value in own:
                first = places[raw_key.value].line
                also = f" (first on line {first})" if first is not None else ""
                self._wrong(at, (*path, raw_key.value), f"is given twice{also}", "Each key stands once in its mapping")
            else:
                own[raw_key.value] = self.value(raw_value, (*path, raw_key.value), at)
                places[raw_key.value] = at
        return inherited.without(*own).completed(Entries(own, place, places))

    def _inherited(self, raw: Any, path: KeyPath, at: Place) -> Entries:
        """Return the entries inherited through `<<`: one mapping or a list of them, of which the first takes
        precedence.
        """
        found = Entries({}, at)
        value = self.value(raw, (*path, "<<"), at)
        for each in value if isinstance(value, Items) else [value]:
            if isinstance(each, Entries):
                found = found.completed(each)
            else:
                allowed = "`<<` takes an alias of a mapping, or a list of them"
                self._wrong(at, (*path, "<<"), "is not a mapping", allowed)
        return found

    def _half(self, place: Place, path: KeyPath, text: str) -> Any:
        allowed = "Whole characters, such as \\U0001F600"
        return self._wrong(place, path, f"has half of a surrogate pair (got {show(text)})", allowed)

    def _at(self, raw: Any) -> Place:
        if self._place.line is None:
            return self._place
        return Place(self._place.source, raw.start_mark.line + 1, self._place.path)

    def _wrong(self, place: Place, path: KeyPath, message: str, allowed: str | None = None) -> Any:
        """Record a mistake and return None as the value."""
        self.findings.append(Finding(place, path, message, allowed))
        return None
