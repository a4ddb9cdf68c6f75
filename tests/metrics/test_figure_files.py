"""Figures as files: every one of the report, readable at a column's width, with the numbers that it shows."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from vajra_py.errors import RunError
from vajra_py.metrics import plots
from vajra_py.metrics.figure_files import COLUMN_IN, figure_data, write_figures
from vajra_py.metrics.intervals import positive_interval
from vajra_py.metrics.plots.style import draw_at
from vajra_py.metrics.run_data import RunData

Make = Callable[..., RunData]


def sweep(make_run: Make) -> list[RunData]:
    return [
        make_run(
            name=f"{order}-{rate}-{seed}", num_requests=40, rate_per_s=rate, seed=seed, shortest_first=order == "spt"
        )
        for order in ("fcfs", "spt")
        for rate in (4.0, 16.0)
        for seed in (0, 1, 2)
    ]


def test_every_figure_is_written_in_every_format_with_its_numbers(make_run: Make, tmp_path: Path) -> None:
    written = write_figures(sweep(make_run), tmp_path, formats=("pdf", "svg", "png"))
    assert {path.name for path in written} == {path.name for path in tmp_path.iterdir()}
    figures = {path.stem for path in written} - {"table"}
    assert len(figures) >= 9
    for name in figures:
        assert (tmp_path / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
        rows = list(csv.DictReader((tmp_path / f"{name}.csv").read_text().splitlines()))
        assert rows, name
        assert all(row["series"] for row in rows), name
    assert r"\toprule" in (tmp_path / "table.tex").read_text()


def test_the_numbers_are_those_of_the_points(make_run: Make) -> None:
    runs = sweep(make_run)
    rows = [row for row in figure_data(plots.latency_by_rate(runs)) if row["y_label"] == "TTFT P99 (s)"]
    values = [run.summary.value("overall.ttft_s.p99") for run in runs[:3]]
    point = next(row for row in rows if row["series"] == "fcfs" and "y_high" not in row)
    assert point["y"] == pytest.approx(sum(values) / 3)
    interval = positive_interval(values)
    assert interval is not None
    bar = next(row for row in rows if row["series"] == "fcfs, 95 % interval")
    assert (bar["x"], bar["y_high"]) == pytest.approx((point["x"], interval.high))


def test_at_a_columns_width_panels_stand_below_each_other(make_run: Make) -> None:
    wide, narrow = (draw_at(width, plots.latency_by_rate, sweep(make_run)) for width in (10.0, COLUMN_IN))
    assert narrow.get_size_inches()[0] == pytest.approx(COLUMN_IN)
    assert len(narrow.axes) == len(wide.axes) == 6
    narrow.draw_without_rendering()
    assert len({round(axes.get_position().x0, 1) for axes in narrow.axes}) == 1
    assert all(axes.get_position().width * COLUMN_IN > 1.8 for axes in narrow.axes)


def test_equal_runs_give_equal_files(make_run: Make, tmp_path: Path) -> None:
    runs = [make_run(name="one")]
    for folder in ("first", "again"):
        write_figures(runs, tmp_path / folder, formats=("pdf", "svg"), only=("latency_cdfs",))
    for path in (tmp_path / "first").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_what_there_is_not_is_said(make_run: Make, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"there is none of that name \('latency_cdf'\). Did you mean 'latency_cdfs'"):
        write_figures([make_run(name="one")], tmp_path, only=("latency_cdf",))
    with pytest.raises(RunError, match=r"not a format for files \('eps'\)"):
        write_figures([make_run(name="one")], tmp_path, formats=("eps",))
