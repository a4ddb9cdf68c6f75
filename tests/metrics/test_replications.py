"""Seeds are replications of a setting, never loads: in groups, figures, tables, findings and warnings."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from vajra_py.metrics import plots
from vajra_py.metrics.comparison.comparison import compare
from vajra_py.metrics.comparison.intervals import positive_interval
from vajra_py.metrics.report.report import render_report
from vajra_py.metrics.runs.replications import group_replications
from vajra_py.metrics.runs.run_data import RunData

Make = Callable[..., RunData]
SEEDS = range(4)


def replicated(make_run: Make, rates: tuple[float, ...] = (4.0, 12.0)) -> list[RunData]:
    return [
        make_run(name=f"{order}-{rate}-{seed}", rate_per_s=rate, seed=seed, shortest_first=order == "spt")
        for order in ("fcfs", "spt")
        for rate in rates
        for seed in SEEDS
    ]


def test_runs_that_differ_in_their_seed_are_one_setting(make_run: Make) -> None:
    runs = replicated(make_run)
    settings = group_replications(runs)
    assert [setting.name for setting in settings] == ["fcfs/4", "fcfs/12", "spt/4", "spt/12"]
    assert all(setting.seeds == ("0", "1", "2", "3") for setting in settings)
    assert [setting.positions for setting in settings][1] == (4, 5, 6, 7)


def test_the_same_seed_twice_is_no_replication(make_run: Make, tmp_path: Path) -> None:
    runs = [make_run(name="a", seed=0), make_run(name="b", seed=1)]
    again = [RunData.load(shutil.copytree(run.path, tmp_path / "again" / run.name)) for run in runs]
    first = [RunData.load(shutil.copytree(run.path, tmp_path / "first" / run.name)) for run in runs]
    assert [setting.seeds for setting in group_replications([runs[0], again[0]])] == [("0",), ("0",)]
    # Two folders with two seeds each are two settings of two replications.
    assert [setting.seeds for setting in group_replications([*first, *again])] == [("0", "1"), ("0", "1")]


def test_lines_over_the_load_have_a_point_for_each_configured_rate(make_run: Make) -> None:
    # Measured rates of the seeds of one setting lie further apart than 2 %.
    runs = replicated(make_run)
    offered = [run.summary.value("overall.offered_requests_per_s") for run in runs[:4]]
    assert max(offered) > 1.02 * min(offered)
    figure = plots.latency_by_rate(runs)
    lines = [line for line in figure.axes[0].get_lines() if len(line.get_xdata())]
    assert [len(line.get_xdata()) for line in lines] == [2, 2]
    assert lines[0].get_xdata()[0] == pytest.approx(np.mean(offered))
    p50 = [run.summary.value("overall.ttft_s.p50") for run in runs[:4]]
    assert lines[0].get_ydata()[0] == pytest.approx(np.mean(p50))
    interval = positive_interval(p50)
    assert interval is not None
    segments = figure.axes[0].collections[0].get_segments()
    assert segments[0][1][1] == pytest.approx(interval.high)


def test_seeds_alone_are_no_sweep_over_rates(make_run: Make) -> None:
    runs = [make_run(name=f"s{seed}", seed=seed) for seed in SEEDS]
    assert not plots.has_rate_sweep(runs)
    assert "against load" not in render_report(runs)


def test_a_setting_is_the_mean_of_its_replications_with_its_interval(make_run: Make) -> None:
    runs = replicated(make_run)
    comparison = compare(runs)
    p99 = [run.summary.value("overall.ttft_s.p99") for run in runs[:4]]
    assert comparison.replications == (4, 4, 4, 4)
    assert comparison.values["overall"]["ttft_p99_s"][0] == pytest.approx(np.mean(p99))
    assert comparison.interval("ttft_p99_s", 0) == positive_interval(p99)
    frame = comparison.frame("overall")
    assert list(frame.replications) == [4] * 4
    assert frame.ttft_p99_s_low[0] < frame.ttft_p99_s[0] < frame.ttft_p99_s_high[0]
    assert compare(runs, each_run=True).replications == (1,) * 16


def test_stars_and_findings_are_given_to_settings_and_only_where_seeds_bear_them_out(make_run: Make) -> None:
    runs = replicated(make_run, (12.0,))
    text = render_report(runs)
    head = text[: text.index('id="numbers"')]
    assert "2 settings of 4 seeds each that differ in request prioritizer (fcfs, spt)." in head
    assert not re.search(r"seed (is|was)|fcfs-12", head[head.index("</style>") :])
    comparison = compare(runs)
    for metric in comparison.shown():
        marks = comparison.marks(metric.key)
        assert bool(marks) <= (metric.key in comparison.primary)
        if "*" in marks.values():
            assert all(own.is_significant for own in comparison.against(0, [metric.key]))


def test_one_seed_is_warned_of_however_many_other_settings_have_more(make_run: Make) -> None:
    runs = [*replicated(make_run, (12.0,)), make_run(name="lone", chunk_tokens=64, rate_per_s=12.0)]
    text = render_report(runs)
    warnings = text[text.index("Before you trust") : text.index("<nav")]
    assert "Run with one seed: no difference is tested" in warnings
    assert "(lone)" in warnings


def test_seeds_that_disagree_are_warned_of(make_run: Make) -> None:
    # Near saturation seeds of one setting differ by a multiple.
    runs = [make_run(name=f"s{seed}", seed=seed, rate_per_s=14.0, chunk_tokens=64) for seed in SEEDS]
    values = [run.summary.value("overall.ttft_s.mean") for run in runs]
    assert max(values) > 1.5 * min(values)
    text = render_report(runs)
    assert "Its seeds disagree" in text[text.index("Before you trust") : text.index("<nav")]
