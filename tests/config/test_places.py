"""Trees of plain data that remember where their values were written."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vajra_py.config.places import (
    Entries,
    Items,
    KeyPath,
    PathError,
    Place,
    get,
    has,
    leaves,
    locate,
    merged,
    plain,
    put,
    written_at,
)

FILE, PRESET, OVERRIDE = Place("exp.yaml", 3), Place("preset p"), Place("--set a.b", path="a.b")

SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
KEYS = st.sampled_from("abcd")
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner), max_leaves=12)
MAPPINGS = st.dictionaries(KEYS, VALUES)


def union(over: Any, under: Any) -> Any:
    """What `merged` should say, on ordinary values."""
    if not isinstance(over, dict) or not isinstance(under, dict):
        return over
    return {key: union(over[key], under.get(key)) if key in over else under[key] for key in {**over, **under}}


@given(MAPPINGS)
def test_a_tree_is_the_plain_value_it_was_made_from(value: dict[str, Any]) -> None:
    tree = written_at(FILE, value)
    assert tree == value
    assert repr(tree) == repr(value)
    copy = plain(tree)
    assert copy == value
    assert not any(isinstance(each, Entries | Items) for each in (copy, *copy.values()))
    again = pickle.loads(pickle.dumps(tree))
    assert (again, again.place) == (tree, FILE)


@given(MAPPINGS, MAPPINGS)
def test_merging_keeps_what_is_over_and_where_each_value_was_written(
    over: dict[str, Any], under: dict[str, Any]
) -> None:
    tree = merged(written_at(FILE, over), written_at(PRESET, under))
    assert tree == union(over, under)
    assert list(tree) == [*over, *(key for key in under if key not in over)]
    for path, value in leaves(tree):
        place = FILE if path in dict(leaves(over)) else PRESET
        assert (locate(tree, path), get(tree, *path)) == (place, value)


@given(MAPPINGS, st.lists(KEYS, min_size=1, max_size=3), SCALARS)
def test_putting_a_value_changes_nothing_but_its_path(value: dict[str, Any], steps: list[str], scalar: Any) -> None:
    tree, path = written_at(FILE, value), tuple(steps)
    try:
        changed = put(tree, path, scalar, OVERRIDE)
    except PathError:
        assert any(get(value, *path[:length]) is not None for length in range(1, len(path)))
        return
    assert tree == value, "trees never change"
    assert get(changed, *path) == scalar
    assert locate(changed, path) == OVERRIDE
    kept: dict[KeyPath, Any] = {each: leaf for each, leaf in leaves(value) if each[: len(path)] != path}
    kept = {each: leaf for each, leaf in kept.items() if path[: len(each)] != each}
    for each, leaf in kept.items():
        assert (get(changed, *each), locate(changed, each)) == (leaf, FILE)


def test_lists_are_addressed_by_index_given_as_text() -> None:
    tree = written_at(FILE, {"a": [1, {"b": 2}]})
    changed = put(tree, ("a", "1", "b"), 3, OVERRIDE)
    assert changed == {"a": [1, {"b": 3}]}
    assert locate(changed, ("a", 1, "b")) == OVERRIDE
    assert locate(changed, ("a", 0)) == locate(changed, ("a", 1)) == FILE
    for index, allowed in (("2", "0 to 1"), ("x", "0 to 1"), ("-1", "0 to 1")):
        with pytest.raises(PathError, match=f"'a' is a list, and '{index}' is not an index of it; allowed: {allowed}"):
            put(tree, ("a", index), 3, OVERRIDE)
    with pytest.raises(PathError, match="nothing, as the list is empty"):
        put(written_at(FILE, {"a": []}), ("a", "0"), 3, OVERRIDE)
    with pytest.raises(PathError, match=r"'a\.0' is neither a mapping nor a list \(it is 1\)"):
        put(tree, ("a", "0", "b"), 3, OVERRIDE)


def test_the_place_of_what_is_missing_is_that_of_the_nearest_thing_around_it() -> None:
    tree = Entries({"a": Entries({"b": 1}, FILE)}, Place("exp.yaml", 1), {"a": FILE})
    assert locate(tree, ("a", "x", "y")) == FILE
    assert locate(tree, ("x",)) == Place("exp.yaml", 1)
    assert not has(tree, "x")
    assert not has(tree["a"]["b"], "c")
    assert get(tree, "a", "b", "c") is None


def test_paths_of_files_become_text() -> None:
    assert written_at(Place(), {"path": Path("x/y"), "sizes": (1, 2)}) == {"path": "x/y", "sizes": [1, 2]}


@pytest.mark.parametrize(
    ("place", "path", "text"),
    [
        (FILE, ("a", 0), "exp.yaml:3: a.0"),
        (FILE, (), "exp.yaml:3"),
        (Place(), ("a",), "a"),
        (Place(), (), "configuration"),
        (OVERRIDE, ("a", "b"), "--set a.b"),
        (OVERRIDE, ("a", "b", "c"), "--set a.b: a.b.c"),
    ],
)
def test_a_place_as_errors_show_it(place: Place, path: KeyPath, text: str) -> None:
    assert place.where(path) == text
