"""Differences from a baseline: what is tested, what is only shown, and every form of the table."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable

import pytest
from click.testing import CliRunner

from vajra_py.cli.main import vajra
from vajra_py.errors import RunError
from vajra_py.metrics.comparison.baseline_table import difference_table
from vajra_py.metrics.comparison.compared_settings import OVERALL
from vajra_py.metrics.comparison.comparison import Comparison, compare
from vajra_py.metrics.comparison.tables import DIFFERENCE_COLUMNS
from vajra_py.metrics.runs.run_data import RunData

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


def shown(comparison: Comparison, baseline: str) -> list[dict[str, str]]:
    """The rows of the table as texts by heading."""
    table = difference_table(comparison, baseline, OVERALL)
    return [
        {"setting": row.head} | {head: cell.plain for head, cell in zip(table.heads, row.cells, strict=True)}
        for row in table.rows
    ]


def test_a_row_says_how_far_a_setting_is_from_the_baseline_and_whether_that_is_chance(comparison: Comparison) -> None:
    rows = shown(comparison, "fcfs")
    assert {row["setting"] for row in rows} == {"spt"}
    by_metric = {row["metric"]: row for row in rows}
    assert [row["metric"] for row in rows[:3]] == ["TTFT P99 (s)", "TBT P99 (ms)", "SLO attainment (%)"]
    mean = by_metric["TTFT mean (s)"]
    base, value = comparison.values["overall"]["ttft_mean_s"]
    assert base is not None
    assert value is not None
    assert mean["difference"].startswith("-" if value < base else "+")
    assert "±" in mean["difference"]
    assert float(mean["change"].rstrip("%")) / 100 == pytest.approx(value / base - 1, abs=0.001)
    versus = comparison.versus(1, 0, "ttft_mean_s")
    assert float(mean["p"].lstrip("<")) == pytest.approx(versus.p_value, rel=0.05)
    assert (mean["adjusted p"], mean["significant"]) == ("", "secondary")
    assert by_metric["TTFT P99 (s)"]["significant"] in ("no", "better", "worse")
    assert not any("Requests" in name for name in by_metric)  # nothing is better about a count of arrivals


def test_the_sign_turns_with_the_baseline(comparison: Comparison) -> None:
    forth, back = shown(comparison, "fcfs"), shown(comparison, "spt")
    flipped = {"+": "-", "-": "+"}
    assert [row["difference"] for row in back] == [
        flipped.get(row["difference"][0], row["difference"][0]) + row["difference"][1:] for row in forth
    ]
    opposite = {"better": "worse", "worse": "better"}
    assert [row["significant"] for row in back] == [
        opposite.get(row["significant"], row["significant"]) for row in forth
    ]
    assert [row["p"] for row in back] == [row["p"] for row in forth]


def test_one_seed_is_shown_and_not_tested(make_run: Make) -> None:
    runs = [make_run(name=order, rate_per_s=12.0, shortest_first=order == "spt") for order in ("fcfs", "spt")]
    rows = shown(compare(runs), "fcfs")
    assert {row["significant"] for row in rows} == {"not tested: fewer than two replications"}
    assert not any("±" in row["difference"] for row in rows)


def test_settings_under_another_load_are_not_compared(make_run: Make) -> None:
    runs = [make_run(name=f"r{rate}-{seed}", rate_per_s=rate, seed=seed) for rate in (4.0, 12.0) for seed in range(2)]
    comparison = compare(runs)
    assert shown(comparison, comparison.names[0]) == []


def test_a_baseline_that_is_not_there_is_said(comparison: Comparison) -> None:
    with pytest.raises(RunError, match=r"--baseline: no setting has that name \('fcf'\). Did you mean 'fcfs'"):
        shown(comparison, "fcf")


def said(make_run: Make, form: str, *options: str) -> str:
    paths = [str(run.path) for run in replicated(make_run)]
    result = CliRunner().invoke(
        vajra, ["compare", *paths, "--baseline", "fcfs", "--format", form, *options], standalone_mode=False
    )
    assert result.exception is None
    return result.stdout


def test_csv_is_of_plain_numbers(make_run: Make, comparison: Comparison) -> None:
    rows = list(csv.DictReader(io.StringIO(said(make_run, "csv"))))
    assert tuple(rows[0]) == DIFFERENCE_COLUMNS
    assert {row["scope"] for row in rows} == set(comparison.scopes)
    words = {"scope", "load", "setting", "baseline", "metric", "family", "significant", "verdict"}
    for row in rows:
        for name in set(row) - words:
            assert row[name] == "" or float(row[name]) == float(row[name]), (name, row[name])
    row = next(row for row in rows if row["metric"] == "ttft_mean_s" and row["scope"] == "overall")
    base, value = comparison.values["overall"]["ttft_mean_s"]
    assert (float(row["baseline_value"]), float(row["value"])) == (base, value)
    assert float(row["difference_low"]) < float(row["difference"]) < float(row["difference_high"])
    assert float(row["low"]) < float(row["value"]) < float(row["high"])


@pytest.mark.parametrize("form", ["table", "markdown", "latex"])
def test_the_command_shows_differences(make_run: Make, form: str) -> None:
    text = said(make_run, form)
    assert "TTFT mean" in text
    assert "spt" in text
    assert ("difference from fcfs" in text) == (form != "markdown")
    assert "Holm" in text
    assert "TTFT mean" not in said(make_run, form, "--columns", "ttft_p99") if form != "markdown" else True
