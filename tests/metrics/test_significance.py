"""One question has one answer: what is significant is so in tables, differences, the report and files, and nothing is said that the numbers do not bear."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec import structs
from scipy import stats

from vajra_py.cli.main import vajra
from vajra_py.errors import RunError
from vajra_py.metrics.comparison import comparison as comparisons
from vajra_py.metrics.comparison.baseline_table import difference_table
from vajra_py.metrics.comparison.compared_settings import OVERALL
from vajra_py.metrics.comparison.comparison import Comparison, compare
from vajra_py.metrics.comparison.metrics import BY_KEY, DEFAULT_PRIMARY, METRICS
from vajra_py.metrics.comparison.pairs import holm
from vajra_py.metrics.comparison.table_model import BEST, LOWEST, WORSE
from vajra_py.metrics.comparison.trust import warnings_of
from vajra_py.metrics.report.report import findings, render_report
from vajra_py.metrics.report.tables import versus_table
from vajra_py.metrics.runs.copies import COPIED
from vajra_py.metrics.runs.replications import group_replications
from vajra_py.metrics.runs.run_data import RunData

Make = Callable[..., RunData]
Of = Callable[..., Comparison]

# The lowest mean is `fair`; `steady` is above it under every seed; `wild` is far above it on average and below it under two seeds.
TTFT = {
    "wild": [0.9, 1.0, 1.5, 3.4, 6.35],
    "steady": [1.62, 1.83, 1.99, 2.31, 2.55],
    "fair": [1.2, 1.4, 1.6, 1.85, 2.1],
}
P99 = "ttft_p99_s"


@pytest.fixture
def comparison(comparison_of: Of) -> Comparison:
    return comparison_of({name: {P99: own, "e2e_p99_s": own} for name, own in TTFT.items()})


def replicated(make_run: Make, num_seeds: int = 5) -> list[RunData]:
    return [
        make_run(name=f"{order}-{chunk}-{seed}", rate_per_s=12.0, seed=seed, chunk_tokens=chunk, shortest_first=spt)
        for order, spt, chunk in (("fcfs", False, 256), ("spt", True, 256), ("small", False, 64))
        for seed in range(num_seeds)
    ]


# Words and marks


def test_the_lowest_is_the_lowest_and_the_furthest_is_the_furthest(comparison: Comparison) -> None:
    (sentence,) = findings(comparison)
    assert (
        sentence
        == "Lowest TTFT P99: fair – 1.63 s, not significantly lower than wild; furthest from it: wild – 2.63 s."
    )


def test_marks_claim_nothing_of_a_value_whose_difference_is_not_significant(comparison: Comparison) -> None:
    assert comparison.marks(P99) == {2: LOWEST, 1: WORSE}
    assert comparison.marks("e2e_p99_s") == {}  # a secondary metric
    alone = comparison_without(comparison, "wild")
    assert alone.marks(P99) == {1: BEST, 0: WORSE}


def comparison_without(comparison: Comparison, name: str) -> Comparison:
    kept = [i for i, own in enumerate(comparison.names) if own != name]
    return structs.replace(
        comparison,
        names=tuple(comparison.names[i] for i in kept),
        stability=tuple(comparison.stability[i] for i in kept),
        loads=tuple(comparison.loads[i] for i in kept),
        replications=tuple(comparison.replications[i] for i in kept),
        values={OVERALL: {key: tuple(row[i] for i in kept) for key, row in comparison.values[OVERALL].items()}},
        samples={OVERALL: {key: tuple(own[i] for i in kept) for key, own in comparison.samples[OVERALL].items()}},
    )


def test_nothing_overloaded_is_marked_or_tested(comparison_of: Of) -> None:
    values = {name: {P99: own} for name, own in TTFT.items()}
    found = comparison_of(values, stability=("stable", "stable", "overloaded"))
    assert 2 not in found.marks(P99)
    assert found.best(P99) == {1}
    one = found.versus(1, 2, P99)
    assert (one.p_value, one.p_adjusted, one.is_significant) == (None, None, None)
    assert one.verdict == "not tested: overloaded: fair"
    table = found.render().table
    assert [cell.is_quiet for cell in table.rows[-1].cells] == [False, False, True]
    assert any("Overloaded" in note and "fair" in note for note in table.notes)
    none = comparison_of(values, stability=("overloaded",) * 3)
    assert none.marks(P99) == {}
    assert findings(none) == [
        "Fewer than two settings kept up with any load: the averages of overloaded runs are not compared."
    ]


def test_the_highest_load_with_two_settings_that_kept_up_is_spoken_of(comparison_of: Of) -> None:
    values = {f"{name}/{load}": {P99: own} for load in (8, 12) for name, own in TTFT.items()}
    loads = ("rate 8",) * 3 + ("rate 12",) * 3
    found = findings(comparison_of(values, loads=loads, stability=("stable",) * 4 + ("overloaded",) * 2))
    assert len(found) == 2
    assert found[0].startswith(
        "Under the highest load that two settings kept up with (rate 8): lowest TTFT P99: fair/8"
    )
    assert found[1] == "Fewer than two settings kept up with rate 12: nothing is compared there."


def test_a_difference_that_is_the_same_under_every_seed_is_not_tested(comparison_of: Of) -> None:
    found = comparison_of({"a": {P99: [1.0, 2.0, 3.0]}, "b": {P99: [1.5, 2.5, 3.5]}})
    one = found.versus(1, 0, P99)
    assert one.untested == "the difference is the same under every seed"
    assert one.p_value is None
    assert found.marks(P99) == {0: LOWEST}
    assert found.family_words() == ""


def test_runs_that_count_as_one_observation_have_no_interval_no_test_and_a_reason(
    make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = replicated(make_run, 3)
    reason = COPIED
    settings = [structs.replace(one, runs=one.runs[:1], num_seeds=3, note=reason) for one in group_replications(runs)]
    monkeypatch.setattr(comparisons, "group_replications", lambda *_, **__: settings)
    found = compare(runs)
    assert found.replications == (1, 1, 1)
    assert found.interval(P99, 0) is None
    assert BEST not in {mark for key in DEFAULT_PRIMARY for mark in found.marks(key).values()}
    assert found.versus(0, 1, P99).verdict.startswith(f"not tested: {reason}")
    assert f"{reason}: {', '.join(found.names)}" in found.render().table.notes
    assert (reason, []) in warnings_of(settings, found), "of all settings"
    assert reason in json.loads(found.to_json())["notes"][-1]


# The family


def test_the_family_is_the_primary_metrics_times_the_pairs_of_a_load(comparison_of: Of) -> None:
    values = {f"{name}/{load}": {P99: own, "e2e_p99_s": own[::-1]} for load in (8, 12) for name, own in TTFT.items()}
    loads = ("rate 8",) * 3 + ("rate 12",) * 3
    found = comparison_of(values, primary=(P99, "e2e_p99_s"), loads=loads)
    own = list(TTFT.values())
    raw = [
        stats.ttest_rel(own[i][:: 1 if key == P99 else -1], own[j][:: 1 if key == P99 else -1]).pvalue
        for key in (P99, "e2e_p99_s")
        for i, j in ((0, 1), (0, 2), (1, 2))
    ]
    expected = holm(raw)
    for place, (i, j) in enumerate(((0, 1), (0, 2), (1, 2))):
        for offset in (0, 3):  # each load is a family of its own
            one = found.versus(i + offset, j + offset, P99)
            assert one.p_value == pytest.approx(raw[place])
            assert one.p_adjusted == pytest.approx(expected[place])
            assert found.versus(j + offset, i + offset, P99).p_adjusted == pytest.approx(expected[place])
    assert "6 comparisons under each load: TTFT P99, E2E P99" in found.family_words()
    assert found.versus(0, 3, P99).untested == "their loads differ"


def test_who_names_other_metrics_tests_these(make_run: Make) -> None:
    runs = replicated(make_run)
    by_default, chosen = compare(runs), compare(runs, metrics=["ttft_mean", "slo_attainment_fraction"])
    assert by_default.primary == DEFAULT_PRIMARY
    assert chosen.primary == ("ttft_mean_s", "slo_attainment_fraction")
    assert by_default.versus(1, 0, "ttft_mean_s").p_adjusted is None
    assert by_default.versus(1, 0, "ttft_mean_s").p_value == chosen.versus(1, 0, "ttft_mean_s").p_value
    assert chosen.versus(1, 0, "ttft_mean_s").p_adjusted is not None
    with pytest.raises(RunError, match=r"--metrics: no metric has that name \('ttft_p98_s'\)\. Did you mean"):
        compare(runs, metrics=["ttft_p98_s"])


# The same answer everywhere


@pytest.mark.parametrize("metrics", [(), ("tbt_p99_s",), ("ttft_mean_s", "e2e_mean_s")])
def test_every_form_gives_one_pair_one_answer(make_run: Make, metrics: tuple[str, ...]) -> None:
    runs = replicated(make_run)
    found = compare(runs, metrics=metrics)
    frame = found.difference_frame("overall")
    files = [
        row
        for name in found.names
        for row in csv.DictReader(io.StringIO(from_command(runs, metrics, "--baseline", name, "--format", "csv")))
        if row["scope"] == "overall"
    ]
    texts = json.loads(from_command(runs, metrics, "--format", "json", "--scope", "overall"))["differences"]
    assert len(files) == 2 * len(texts) == 2 * len(frame)
    num_significant = 0
    for key in found.primary:
        for i in range(3):
            for j in {0, 1, 2} - {i}:
                one = found.versus(i, j, key)
                names = {"setting": found.names[i], "baseline": found.names[j], "metric": key}
                (row,) = (row for row in files if names.items() <= row.items())
                assert float(row["p_adjusted"]) == one.p_adjusted
                assert row["significant"] == str(one.is_significant).lower()
                table = difference_table(found, found.names[j], OVERALL)
                (shown,) = (
                    own.cells[-1].text
                    for own in table.rows
                    if own.head == found.names[i] and own.cells[0].text.startswith(_label(key))
                )
                assert (shown in ("better", "worse")) == one.is_significant
                for row in texts:
                    if names.items() <= row.items():
                        assert (row["p_value"], row["p_adjusted"]) == (one.p_value, one.p_adjusted)
                num_significant += bool(one.is_significant)
        _check_marks(found, key)
    assert num_significant
    _check_report_table(found)


def _label(key: str) -> str:
    return next(metric.label for metric in METRICS if metric.key == key)


def _check_marks(found: Comparison, key: str) -> None:
    """A star is a best value that is significantly better than every other one, a dagger one that is significantly worse than the best."""
    row = found.values[OVERALL][key]
    lower = BY_KEY[key].lower_is_better
    best = (min if lower else max)(range(3), key=lambda i: row[i])
    worse = {i for i in range(3) if i != best and found.versus(i, best, key).is_significant}
    marks = found.marks(key)
    assert {i for i, mark in marks.items() if mark == WORSE} == worse
    assert (marks[best] == BEST) == (len(worse) == 2)


def _check_report_table(found: Comparison) -> None:
    for table in versus_table(found):
        for row in table.rows:
            setting, _, baseline = row.head.partition(" − ")
            for head, cell in zip(table.heads, row.cells, strict=True):
                key = next(one.key for one in METRICS if head.startswith(f"{one.label} ("))
                one = found.versus(found.position(setting), found.position(baseline), key)
                assert (cell.mark == BEST) == bool(one.is_significant)
                assert ("adjusted p" in cell.spread) == (key in found.primary)


def from_command(runs: list[RunData], metrics: tuple[str, ...], *options: str) -> str:
    named = ["--metrics", ",".join(metrics)] if metrics else []
    result = CliRunner().invoke(
        vajra, ["compare", *(str(run.path) for run in runs), *named, *options], standalone_mode=False
    )
    assert result.exception is None
    return result.stdout


def test_the_report_says_what_the_comparison_says(make_run: Make, tmp_path: Path) -> None:
    runs = replicated(make_run)
    text = render_report(runs, metrics=["ttft_mean_s"])
    assert "Holm&#39;s correction for 3 comparisons: TTFT mean" in text
    from_command(runs, ("ttft_mean_s",), "--report", str(tmp_path / "report.html"), "--format", "csv")
    assert (tmp_path / "report.html").read_text() == text
    numbers = text[text.index('id="numbers"') : text.index("All metrics")]
    rows = dict(re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', numbers))
    assert 'class="mark"' in rows["TTFT mean (s)"]
    assert 'class="mark"' not in rows["TTFT P99 (s)"]


def test_files_of_values_hold_p_values_of_the_difference_from_the_best(make_run: Make) -> None:
    runs = replicated(make_run)
    found = compare(runs)
    rows = list(csv.DictReader(io.StringIO(found.to_csv("overall"))))
    best = found.best_of(P99, 0)
    assert best is not None
    for i, row in enumerate(rows):
        one = found.versus(i, best, P99)
        assert row[f"{P99}_p_adjusted"] == ("" if i == best else str(one.p_adjusted))
        assert row["ttft_mean_s_p_value"] != "" or found.best_of("ttft_mean_s", i) == i
        assert "ttft_mean_s_p_adjusted" not in row
