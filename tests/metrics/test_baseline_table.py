"""Differences from a baseline: what is tested, what is only shown, and every form of the table."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable

import pytest
from click.testing import CliRunner

from vajra_py.cli.main import vajra
from vajra_py.errors import RunError
from vajra_py.metrics import baseline_table
from vajra_py.metrics.comparison import Comparison, compare
from vajra_py.metrics.run_data import RunData

Make = Callable[..., RunData]


def replicated(make_run: Make) -> list[RunData]:
    return [
        make_run(name=f"{order}-{seed}", rate_per_s=12.0, seed=seed, shortest_first=order == "spt")
        for order in ("fcfs", "spt")
        for seed in range(4)
    ]


@pytest.fixture
def comparison(make_run: Make) -> Comparison:
    return compare(replicated(make_run))


def test_a_row_says_how_far_a_setting_is_from_the_baseline_and_whether_that_is_chance(comparison: Comparison) -> None:
    head, *rows = baseline_table.difference_rows(comparison, "fcfs")
    assert head[0] == "setting"
    assert {row[0] for row in rows} == {"spt"}
    by_metric = {row[1]: row for row in rows}
    mean = by_metric["TTFT mean (s)"]
    base, value = comparison.values["overall"]["ttft_mean_s"]
    assert base is not None
    assert value is not None
    assert mean[4].startswith("-" if value < base else "+")
    assert "±" in mean[4]
    assert float(mean[5].rstrip("%")) / 100 == pytest.approx(value / base - 1, abs=0.001)
    versus = {
        one.key: one
        for one in comparison.against(0, [m.key for m in comparison.shown() if m.lower_is_better is not None])
    }
    assert (mean[7] != "no") == versus["ttft_mean_s"].is_significant
    assert not any("Requests" in name for name in by_metric)  # nothing is better about a count of arrivals


def test_the_sign_turns_with_the_baseline(comparison: Comparison) -> None:
    forth = baseline_table.difference_rows(comparison, "fcfs")[1:]
    back = baseline_table.difference_rows(comparison, "spt")[1:]
    flipped = {"+": "-", "-": "+"}
    assert [row[4] for row in back] == [
        flipped[row[4][0]] + row[4][1:] if row[4].strip("+-0. ±") else row[4] for row in forth
    ]
    opposite = {"better": "worse", "worse": "better", "no": "no"}
    assert [row[7] for row in back] == [opposite[row[7]] for row in forth]


def test_one_seed_is_shown_and_not_tested(make_run: Make) -> None:
    runs = [make_run(name=order, rate_per_s=12.0, shortest_first=order == "spt") for order in ("fcfs", "spt")]
    rows = baseline_table.difference_rows(compare(runs), "fcfs")[1:]
    assert {row[7] for row in rows} == {"not tested"}
    assert not any("±" in row[4] for row in rows)


def test_settings_under_another_load_are_not_compared(make_run: Make) -> None:
    runs = [make_run(name=f"r{rate}-{seed}", rate_per_s=rate, seed=seed) for rate in (4.0, 12.0) for seed in range(2)]
    comparison = compare(runs)
    assert baseline_table.difference_rows(comparison, comparison.names[0])[1:] == []


def test_a_baseline_that_is_not_there_is_said(comparison: Comparison) -> None:
    with pytest.raises(RunError, match=r"--baseline: no setting has that name \('fcf'\). Did you mean 'fcfs'"):
        baseline_table.difference_rows(comparison, "fcf")


def test_every_form_has_the_same_rows(comparison: Comparison) -> None:
    rows = baseline_table.difference_rows(comparison, "fcfs")
    markdown = baseline_table.markdown(comparison, "fcfs").splitlines()
    assert [
        tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in (markdown[0], *markdown[2:])
    ] == rows
    found = list(csv.reader(io.StringIO(baseline_table.csv_text(comparison, "fcfs", "overall"))))
    assert [tuple(row[1:]) for row in found] == rows
    latex = baseline_table.latex(comparison, "fcfs")
    assert latex.count(r"\\") == len(rows)
    assert r"\%" in latex
    assert {row[0] for row in csv.reader(io.StringIO(baseline_table.csv_text(comparison, "fcfs")))} == {
        "scope",
        *comparison.scopes,
    }


@pytest.mark.parametrize("form", ["table", "markdown", "latex", "csv"])
def test_the_command_shows_differences(make_run: Make, form: str) -> None:
    paths = [str(run.path) for run in replicated(make_run)]
    result = CliRunner().invoke(
        vajra, ["compare", *paths, "--baseline", "fcfs", "--format", form], standalone_mode=False
    )
    assert result.exception is None
    assert "TTFT mean" in result.output
    assert "spt" in result.output
    assert ("difference from fcfs" in result.output) == (form == "table")
