"""Figures that policies emit are kept in columns, each with its policy, its time and its request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vajra_py.runtime.records import emitted


def test_a_figure_has_its_request_or_none() -> None:
    figures = emitted.EmittedFigures()
    request: Any = SimpleNamespace(index=7)
    emit, other = figures.of("main", "fcfs"), figures.of("main", "edf")
    emit("early", 1.0, 0.0)
    assert len(figures) == 0, "nobody has asked for them"
    figures.is_kept = True
    emit("level", 2.5, 0.5, request)
    other("level", 3.0, 0.5)
    emit("level", 4.0, 1.0)
    assert figures.series == [("main", "fcfs", "level"), ("main", "edf", "level")]
    assert list(figures.numbers) == [0, 1, 0]
    assert list(figures.at) == [0.5, 0.5, 1.0]
    assert list(figures.values) == [2.5, 3.0, 4.0]
    assert list(figures.indices) == [7, -1, -1]
    assert len(figures) == 3


def test_beyond_the_most_rows_figures_are_counted_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emitted, "MAX_ROWS", 2)
    figures = emitted.EmittedFigures()
    figures.is_kept = True
    emit = figures.of("main", "fcfs")
    for number in range(5):
        emit("level", number, 0.0)
    assert (list(figures.values), figures.num_lost) == ([0.0, 1.0], 3)


@pytest.mark.parametrize(
    ("name", "value", "now"), [("level", float("nan"), 0.0), ("level", 1.0, float("inf")), ("No", 1.0, 0.0)]
)
def test_what_is_no_figure_is_refused(name: str, value: float, now: float) -> None:
    figures = emitted.EmittedFigures()
    figures.is_kept = True
    with pytest.raises(ValueError, match="emit"):
        figures.of("main", "fcfs")(name, value, now)
    assert len(figures) == 0


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("given", ["r1", ["r1"], 5])
def test_what_is_no_request_is_refused_and_leaves_no_part_of_a_row(given: Any, is_kept: bool) -> None:
    figures = emitted.EmittedFigures()
    figures.is_kept = is_kept
    with pytest.raises(ValueError, match=r"emit\('level'\): request is .*Allowed: a RequestView or None"):
        figures.of("main", "fcfs")("level", 1.0, 0.0, given)
    assert [len(one) for one in (figures.numbers, figures.at, figures.values, figures.indices)] == [0] * 4
