"""Settings that were written are read back as they were."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vajra_py.config import dump_yaml
from vajra_py.config.places import Place, plain
from vajra_py.config.yaml_file import parse_yaml

texts = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(["null", "Yes", "~", "1e5", "012", ".inf", "a: b", "- a", " a", "2023-11-16", "<<", "=", "a #b", "é"])  # fmt: skip
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(texts.filter(lambda key: key != "<<"), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(values)
def test_values_are_read_back_as_they_were(value: Any) -> None:
    read = plain(parse_yaml(dump_yaml(value), Place("text", 1)))
    assert read == value
    assert repr(read) == repr(value)  # of the same types too


def test_blocks_are_easy_to_read() -> None:
    written = dump_yaml({"a": {"b": [1, {"c": 1e-05, "d": None}], "e": []}, "f": [[True], "two words", "1"], "g": {}})
    lines = [
        "a:",
        "  b:",
        "  - 1",
        "  - c: 1.0e-05",
        "    d: null",
        "  e: []",
        "f:",
        "- - true",
        "- two words",
        '- "1"',
        "g: {}",
    ]
    assert written.splitlines() == lines


def test_what_is_no_ordinary_value_is_refused() -> None:
    with pytest.raises(TypeError, match="set is no ordinary value"):
        dump_yaml({"a": {1, 2}})
