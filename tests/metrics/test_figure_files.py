"""Figures as files: every one of the report, readable at a column's width, with the numbers that it shows."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from vajra_py.errors import RunError
from vajra_py.experiment.runs.folder import find_runs
from vajra_py.metrics import plots
from vajra_py.metrics.comparison.intervals import positive_interval
from vajra_py.metrics.plots.style import draw_at, new_figure
from vajra_py.metrics.report.figure_files import COLUMN_IN, figure_data, write_figures
from vajra_py.metrics.report.figures import FIGURES
from vajra_py.metrics.report.report import write_report
from vajra_py.metrics.runs.run_data import RunData

Make = Callable[..., RunData]


def sweep(make_run: Make, rates: Sequence[float] = (4.0, 16.0)) -> list[RunData]:
    return [
        make_run(
            name=f"{order}-{rate}-{seed}", num_requests=40, rate_per_s=rate, seed=seed, shortest_first=order == "spt"
        )
        for order in ("fcfs", "spt")
        for rate in rates
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


def test_at_a_columns_width_panels_stand_below_each_other_or_in_pairs(make_run: Make) -> None:
    wide, narrow = (draw_at(width, plots.latency_by_rate, sweep(make_run)) for width in (10.0, COLUMN_IN))
    assert narrow.get_size_inches()[0] == pytest.approx(COLUMN_IN)
    assert len(narrow.axes) == len(wide.axes) == 6
    narrow.draw_without_rendering()
    assert len({round(axes.get_position().x0, 1) for axes in narrow.axes}) == 2
    assert all(axes.get_position().width * COLUMN_IN > 1.0 for axes in narrow.axes)


def many(make_run: Make) -> list[RunData]:
    """Two orders, three chunk sizes and four loads."""
    return [
        make_run(
            name=f"{order}-{chunk}-{rate}",
            num_requests=25,
            rate_per_s=rate,
            chunk_tokens=chunk,
            shortest_first=order == "spt",
        )
        for order in ("fcfs", "spt")
        for chunk in (64, 128, 256)
        for rate in (4.0, 8.0, 20.0, 40.0)
    ]


def points(pdf: Path) -> tuple[float, float]:
    """Width and height of a PDF's page."""
    box = re.search(rb"/MediaBox \[ 0 0 ([0-9.]+) ([0-9.]+) \]", pdf.read_bytes())
    assert box is not None
    return float(box.group(1)), float(box.group(2))


@pytest.mark.parametrize("width_in", [2.5, 7.0])
def test_no_figure_is_taller_than_a_page(width_in: float, make_run: Make) -> None:
    for kind in (sweep, many):
        runs = kind(make_run)
        sizes = {spec.key: draw_at(width_in, spec.draw, spec.runs_of(runs)).get_size_inches() for spec in FIGURES}
        assert {key: size for key, size in sizes.items() if size[1] * 72 > 792} == {}
        assert {round(float(width), 6) for width, _ in sizes.values()} == {width_in}


def test_the_written_size_is_that_of_the_figure(make_run: Make, tmp_path: Path) -> None:
    write_figures(many(make_run), tmp_path, only=("latency_cdfs", "latency_by_rate"))
    for name in ("latency_cdfs", "latency_by_rate"):
        width, height = points(tmp_path / f"{name}.pdf")
        assert width == pytest.approx(72 * COLUMN_IN, abs=0.5)
        assert height <= 792


@pytest.mark.parametrize("shape", [(1, 1), (9, 1), (9, 3), (2, 3), (1, 4), (4, 2)])
@pytest.mark.parametrize("width_in", [2.0, COLUMN_IN, 7.0])
def test_a_grid_of_any_shape_fits_a_page(shape: tuple[int, int], width_in: float) -> None:
    figure, axes = draw_at(width_in, new_figure, *shape, 3.0)
    assert figure.get_size_inches()[1] <= 9.0 + 1e-9
    assert axes.shape == shape


def test_a_single_panel_is_a_figure_of_its_own(make_run: Make, tmp_path: Path) -> None:
    written = write_figures(sweep(make_run), tmp_path, panels=["ttft_p99"])
    assert {path.name for path in written} >= {"latency_by_rate-ttft_p99.pdf", "latency_by_rate-ttft_p99.csv"}
    assert not [path for path in written if path.name.startswith("latency_cdfs")]
    width, height = points(tmp_path / "latency_by_rate-ttft_p99.pdf")
    assert 0.4 * width < height < 1.2 * width
    rows = list(csv.DictReader((tmp_path / "latency_by_rate-ttft_p99.csv").read_text().splitlines()))
    assert {row["y_label"] for row in rows} == {"TTFT P99 (s)"}
    assert {row["x_label"] for row in rows} == {"offered load (req/s)"}
    assert {row["panel"] for row in rows} == {"1"}


def test_a_panel_of_several_is_named_by_its_title(make_run: Make, tmp_path: Path) -> None:
    written = write_figures(many(make_run), tmp_path, only=("latency_cdfs",), panels=["ttft/rate_per_s_40"])
    assert [path.name for path in written if path.suffix == ".pdf"] == ["latency_cdfs-ttft-rate_per_s_40.pdf"]
    every = write_figures(many(make_run), tmp_path / "every", only=("latency_cdfs",), panels=["e2e"])
    assert len([path for path in every if path.suffix == ".pdf"]) == 4


def test_an_unknown_panel_is_refused_with_the_list_and_nothing_is_written(make_run: Make, tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match=r"no panel .* \('ttft_99'\)\. Did you mean 'ttft_p99'\? Allowed: .*slo_misses.*waiting"
    ):
        write_figures(sweep(make_run), tmp_path / "none", panels=["ttft_99"])
    assert not (tmp_path / "none").exists()


def test_rows_of_runs_are_in_the_order_of_their_loads(make_run: Make, tmp_path: Path) -> None:
    """Folders and names sort 10 before 4; loads are numbers."""
    runs = [make_run(name=f"r{rate}", num_requests=25, rate_per_s=rate) for rate in (10.0, 20.0, 4.0, 6.0)]
    write_figures(runs, tmp_path, only=("latency_ranges",))
    rows = list(csv.DictReader((tmp_path / "latency_ranges.csv").read_text().splitlines()))
    names = list(dict.fromkeys(row["series"].partition(",")[0] for row in rows))
    assert names == ["r4.0", "r6.0", "r10.0", "r20.0"]


def test_the_folders_of_a_sweep_are_found_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("rate-10.0-ab12", "rate-6.0-ff01", "rate-100.0-0a0b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    assert [path.name.split("-")[1] for path in find_runs(tmp_path)] == ["6.0", "10.0", "100.0"]


def test_shares_and_their_intervals_stay_between_none_and_all(make_run: Make) -> None:
    runs = sweep(make_run, rates=(60.0, 100.0))
    rows = list(figure_data(plots.attainment_by_rate(runs)))
    assert {row["y_label"] for row in rows} == {"requests that missed an SLO (%)"}
    assert any("interval" in row["series"] for row in rows)
    assert all(0 <= row["y"] <= row.get("y_high", 1.0) <= 1 for row in rows)
    point = next(row for row in rows if row["series"] == "fcfs")
    met = [run.summary.value("overall.slo.overall.attainment_fraction") for run in runs[:3]]
    assert point["y"] == pytest.approx(1 - sum(met) / 3)


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


def test_names_of_tenants_are_drawn_and_written_as_they_are(make_run: Make, tmp_path: Path) -> None:
    tenants = ("a$\\frac$b", "_u", "plain")
    run = make_run(name="tenants", tenants=tenants)
    write_report([run], tmp_path / "report.html")
    write_figures([run], tmp_path, formats=("svg",), only=["service_by_tenant"])
    rows = csv.DictReader((tmp_path / "service_by_tenant.csv").read_text().splitlines())
    assert {row["series"] for row in rows} == set(tenants)
    assert "a$\\frac$b" in (tmp_path / "service_by_tenant.svg").read_text()
