"""Comparisons: the right numbers, marks that mean something, and the same content in every form."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable

import pytest
from msgspec import structs
from rich.console import Console

from vajra_py.errors import RunError
from vajra_py.metrics.comparison.comparison import Comparison, compare
from vajra_py.metrics.comparison.metrics import METRICS, metric_text, significant
from vajra_py.metrics.runs.run_data import RunData

Make = Callable[..., RunData]


def rendered(comparison: Comparison, width: int = 200, scope: str = "overall") -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(comparison.render(scope))
    return console.export_text()


def test_numbers_are_those_of_the_summaries(make_run: Make) -> None:
    runs = [make_run(name="small", chunk_tokens=64), make_run(name="large", chunk_tokens=512)]
    comparison = compare(runs)
    assert comparison.names == ("small", "large")
    for i, run in enumerate(runs):
        assert comparison.values["overall"]["ttft_p99_s"][i] == run.summary.value("overall.ttft_s.p99")
        assert comparison.values["tenant acme"]["e2e_p50_s"][i] == run.summary.data["by_tenant"]["acme"]["e2e_s"]["p50"]
        assert comparison.values["overall"]["jain_index"][i] == run.summary.value("fairness.jain_index")
    assert comparison.scopes[:3] == ("overall", "slo_class batch", "slo_class interactive")


def test_the_best_is_the_lowest_latency_and_the_highest_throughput(make_run: Make) -> None:
    comparison = compare([make_run(name="small", chunk_tokens=64), make_run(name="large", chunk_tokens=512)])
    ttft = comparison.values["overall"]["ttft_p50_s"]
    assert comparison.best("ttft_p50_s") == {ttft.index(min(ttft))}
    assert comparison.best("ttft_p50") == comparison.best("ttft_p50_s")
    with pytest.raises(RunError, match=r"no metric has that name \('tftt_p50'\)\. Did you mean 'ttft_p50_s'"):
        comparison.best("tftt_p50")
    assert comparison.best("kv_used_mean_fraction") == frozenset()
    text = rendered(comparison)
    assert f"{metric_text(next(m for m in METRICS if m.key == 'ttft_p50_s'), min(ttft))}↓" in text


def test_a_setting_is_found_by_its_values() -> None:
    comparison = structs.replace(fixed([0.1, 0.2], ("", "")), names=("a-1", "fixed-chunk-8"))
    assert comparison.position("weights=(a=1)") == 0
    assert comparison.position("rate=8 replica_scheduler=fixed_chunk") == 1


def fixed(values: list[float | None], loads: tuple[str, ...]) -> Comparison:
    rows = {metric.key: tuple(values) if metric.key == "ttft_p50_s" else (None,) * len(values) for metric in METRICS}
    return Comparison(tuple("abcdef"[: len(values)]), ("stable",) * len(values), {"overall": rows}, loads)


@pytest.mark.parametrize(
    ("values", "loads", "best"),
    [
        ([0.2, 0.1, 0.3], ("", "", ""), {1}),
        ([0.2, 0.1000001, 0.1], ("", "", ""), {1, 2}),
        ([0.2, 0.2], ("", ""), set()),
        ([0.2, None], ("", ""), set()),
        ([None, None], ("", ""), set()),
        ([0.9, 0.8, 0.1, 0.2], ("high", "high", "low", "low"), {1, 2}),
        ([0.9, 0.1], ("high", "low"), set()),
    ],
)
def test_marks_compare_runs_under_one_load_as_they_read(
    values: list[float | None], loads: tuple[str, ...], best: set[int]
) -> None:
    assert fixed(values, loads).best("ttft_p50_s") == best


def test_runs_of_one_load_stand_together(make_run: Make) -> None:
    runs = [
        make_run(name=f"r{rate}-{chunk}", rate_per_s=rate, chunk_tokens=chunk)
        for chunk in (64, 256)
        for rate in (16.0, 4.0)
    ]
    comparison = compare(runs)
    assert comparison.loads == ("rate per s 16", "rate per s 4") * 2
    assert comparison.by_load() == [1, 3, 0, 2]
    assert comparison.load_starts() == {1, 0}


def test_a_load_that_was_varied_together_with_a_policy_is_a_load(make_run: Make) -> None:
    runs = [make_run(name="first", rate_per_s=4.0), make_run(name="short", rate_per_s=16.0, shortest_first=True)]
    comparison = compare(runs)
    assert comparison.loads == ("rate per s 4", "rate per s 16")
    assert comparison.best("ttft_p50_s") == set()


def test_every_form_holds_the_same(make_run: Make) -> None:
    comparison = compare([make_run(name="a|b", chunk_tokens=64), make_run(name="[x]", chunk_tokens=512)])
    frame = comparison.frame()
    assert list(frame[frame.scope == "overall"].run) == ["a|b", "[x]"]
    rows = list(csv.DictReader(io.StringIO(comparison.to_csv())))
    assert len(rows) == len(frame) == 2 * len(comparison.scopes)
    assert float(rows[0]["ttft_p99_s"]) == comparison.values["overall"]["ttft_p99_s"][0]
    assert rows[0]["goodput_requests_per_s"] == str(comparison.values["overall"]["goodput_requests_per_s"][0])
    markdown = comparison.to_markdown("tenant acme").splitlines()
    assert markdown[0] == "| metric | a\\|b | [x] |"
    assert {line.count(" | ") for line in markdown if line.startswith("| ")} == {2}
    assert "[x]" in rendered(comparison)


def test_every_table_says_where_step_times_come_from(make_run: Make) -> None:
    runs = [make_run(name=name, chunk_tokens=tokens) for name, tokens in (("a", 64), ("b", 128), ("c", 512))]
    origins = ["analytic: roofline of X on L40_S", "analytic: roofline of X on L40_S", "real: computed by the engine"]
    for run, text in zip(runs, origins, strict=True):
        file = run.path / "summary.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"step_times": {"sentence": text}}))
    told = [RunData(run.path, run.name) for run in runs]
    comparison = compare(told)
    rows = list(csv.DictReader(io.StringIO(comparison.to_csv("overall"))))
    assert [row["step_times"] for row in rows] == origins
    lines = [f"Step times of a, b: {origins[0]}.", f"Step times of c: {origins[2]}."]
    assert comparison.to_markdown().splitlines()[-4:] == ["", lines[0], "", lines[1]]
    assert r"Step times of a, b: analytic: roofline of X on L40\_S." in comparison.to_latex()
    assert r"\end{tabular}" in comparison.to_latex()
    alike = compare(told[:2])
    assert alike.to_markdown().endswith(f"\n\nStep times: {origins[0]}.\n")
    silent = compare([make_run(name="d")])
    assert "Step times" not in silent.to_markdown() + silent.to_latex()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_narrow_terminal_gets_more_tables_and_no_cut_numbers(make_run: Make, width: int) -> None:
    runs = [make_run(name=f"run{chunk}", chunk_tokens=chunk, num_requests=20) for chunk in range(64, 64 * 9, 64)]
    comparison = compare(runs)
    text = rendered(comparison, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for metric in comparison.shown(level=0):
        assert all(metric_text(metric, value) in text for value in comparison.values["overall"][metric.key])


def test_many_runs_are_rows(make_run: Make) -> None:
    runs = [make_run(name=f"run{chunk}", chunk_tokens=chunk, num_requests=20) for chunk in range(64, 64 * 9, 64)]
    text = rendered(compare(runs))
    assert all(f"run{chunk}" in text for chunk in range(64, 64 * 9, 64))
    assert "TTFT" in text
    assert "Queueing" not in text


def test_what_never_happened_takes_no_row(make_run: Make) -> None:
    comparison = compare([make_run(name="whole")])
    shown = [metric.key for metric in comparison.shown()]
    assert "num_rejected" not in shown
    assert "deadline_attainment_fraction" not in shown
    cut = compare([make_run(name="cut", horizon_at=2.5, rate_per_s=20.0)])
    assert "num_unfinished" in [metric.key for metric in cut.shown()]


def test_no_run_is_an_error() -> None:
    with pytest.raises(RunError, match="no run was given"):
        compare([])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.000"),
        (0.01234, "0.012"),
        (1.234, "1.23"),
        (12.34, "12.3"),
        (123.4, "123"),
        (12345.6, "12,346"),
        (1e-5, "1.0e-05"),
    ],
)
def test_numbers_read_well(value: float, text: str) -> None:
    assert significant(value) == text
