"""Figures: each draws one run, many runs and nothing, with units, and shows the data that it says it shows."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from vajra_py.metrics import plots
from vajra_py.metrics.definitions import ServiceWeights
from vajra_py.metrics.plots import data
from vajra_py.metrics.plots.layout import arrange_runs, select, series_by_system
from vajra_py.metrics.plots.style import COLOURS
from vajra_py.metrics.plots.ticks import ReadableLogLocator
from vajra_py.metrics.runs.run_data import RunData

Make = Callable[..., RunData]
FIGURES = [name for name in plots.__all__ if not name.startswith("has_") and name != "workload_figure"]


def grid(make_run: Make, rates: Sequence[float] = (6.0, 40.0)) -> list[RunData]:
    """Two orders, three chunk sizes and some rates: a grid of twelve runs."""
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
        for rate in rates
    ]


def drawn(figure: Any) -> bytes:
    """Render it: what is wrong with a figure often shows only then."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("kind", ["one", "many", "empty", "cut"])
def test_every_figure_draws(name: str, kind: str, make_run: Make) -> None:
    runs = {
        "one": lambda: [make_run(name="one")],
        "many": lambda: grid(make_run),
        "empty": lambda: [make_run(name="empty", num_requests=0)],
        "cut": lambda: [make_run(name="cut", horizon_at=2.5, rate_per_s=20.0), make_run(name="empty", num_requests=0)],
    }[kind]()
    figure = getattr(plots, name)(runs)
    assert len(drawn(figure)) > 5000
    labels = [axes.get_xlabel() for axes in figure.axes if axes.get_visible()]
    assert any("(" in label or "requests/s" in label or label == "SLO attainment" for label in labels), labels


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_leaves_the_users_settings_alone(name: str, make_run: Make) -> None:
    import matplotlib

    matplotlib.rcParams["font.size"] = 17.0
    try:
        getattr(plots, name)([make_run(name="one")])
        assert matplotlib.rcParams["font.size"] == 17.0
    finally:
        matplotlib.rcdefaults()


def test_cdfs_end_where_requests_were_left_unanswered(make_run: Make) -> None:
    whole, cut = make_run(name="one"), make_run(name="cut", horizon_at=2.5, rate_per_s=20.0)
    assert data.request_cdf(whole, "e2e_s").shares[-1] == 1.0
    counts = cut.summary.value("overall.counts")
    assert data.request_cdf(cut, "e2e_s").shares[-1] == pytest.approx(counts["completed"] / counts["arrived"])


def test_cdfs_pass_through_the_quantiles_of_the_summary(make_run: Make) -> None:
    run = make_run(name="one")
    for curve, path in ((data.request_cdf(run, "ttft_s"), "ttft_s"), (data.gap_cdf(run), "tbt_s")):
        assert (np.diff(curve.values) >= 0).all()
        assert (np.diff(curve.shares) > 0).all()
        median = run.summary.value(f"overall.{path}.p50")
        assert curve.shares[curve.values <= median][-1] >= 0.5 > curve.shares[curve.values < median][-1]


def test_waiting_over_time_adds_up_to_the_time_waited(make_run: Make) -> None:
    run = make_run(name="busy", rate_per_s=40.0)
    edges = data.time_edges(run)
    waited = float((data.waiting_over_time(run, edges) * np.diff(edges)).sum())
    assert waited == pytest.approx(float(run.requests_frame("queue_s").queue_s.sum()))


def test_kv_use_over_time_is_bounded_and_ends_idle(make_run: Make) -> None:
    run = make_run(name="one")
    use = data.kv_use_over_time(run, np.linspace(0.0, run.window.end_at + 5.0, 300))
    assert use.min() >= 0.0
    assert 0.05 < use.max() <= 1.1
    assert use[-1] == 0.0


def test_tokens_per_step_keep_the_total(make_run: Make) -> None:
    run = make_run(name="one")
    table = run.steps("decode_tokens", "prefill_tokens")
    decode, prefill = data.tokens_per_step(run, np.array([0.0, 1e9]))
    assert decode[0] * table.num_rows == pytest.approx(sum(table.column("decode_tokens").to_pylist()))
    assert prefill[0] * table.num_rows == pytest.approx(sum(table.column("prefill_tokens").to_pylist()))


def test_service_over_time_ends_at_the_service_attained(make_run: Make) -> None:
    run = make_run(name="one")
    edges = data.time_edges(run)
    lines = data.service_over_time(run, edges, ServiceWeights())
    frame = run.requests_frame("tenant", "num_prompt_tokens", "num_output_tokens")
    for tenant, own in frame.groupby("tenant"):
        assert lines[str(tenant)][0] == 0.0
        assert (np.diff(lines[str(tenant)]) >= -1e-6).all()
        assert lines[str(tenant)][-1] == pytest.approx(own.num_prompt_tokens.sum() + 2 * own.num_output_tokens.sum())


def test_the_service_difference_over_time_peaks_at_that_of_the_summary(make_run: Make) -> None:
    run = make_run(name="busy", rate_per_s=40.0)
    gaps = data.service_gaps(run, ServiceWeights())
    assert gaps is not None
    largest = run.summary.value("fairness.max_service_difference")
    assert gaps.by_end.max() == gaps.largest == pytest.approx(largest)
    assert largest > 0
    line = next(line for line in plots.service_difference([run]).axes[0].get_lines() if line.get_label() == run.name)
    assert max(line.get_ydata()) == pytest.approx(largest)
    assert data.service_gaps(make_run(name="one tenant", tenants=("acme",)), ServiceWeights()) is None


def test_up_to_eight_runs_have_a_colour_each(make_run: Make) -> None:
    runs = [make_run(name=f"c{chunk}", num_requests=20, chunk_tokens=chunk) for chunk in range(64, 64 * 9, 64)]
    arrangement = arrange_runs(runs)
    assert arrangement.panels == ("",)
    assert {look.hue for look in arrangement.looks} == set(COLOURS)
    assert [label for label, _ in arrangement.legend] == [run.name for run in runs]


def test_a_grid_of_runs_makes_panels_of_its_loads(make_run: Make) -> None:
    runs = grid(make_run)
    arrangement = arrange_runs(runs)
    assert arrangement.panels == ("rate per s: 6", "rate per s: 40")
    keys = {(arrangement.panel_of[i], look.colour, look.dash) for i, look in enumerate(arrangement.looks)}
    assert len(keys) == len(runs)
    assert [label for label, _ in arrangement.legend] == [
        "chunk tokens 64", "chunk tokens 128", "chunk tokens 256", "fcfs", "spt",
    ]  # fmt: skip


def test_many_runs_without_order_show_the_best_in_colour(make_run: Make) -> None:
    runs = [make_run(name=f"c{chunk}", num_requests=20, chunk_tokens=chunk) for chunk in range(64, 64 * 13, 64)]
    arrangement = arrange_runs(runs)
    coloured = [i for i, look in enumerate(arrangement.looks) if not look.is_muted]
    ranks = [run.summary.value("overall.ttft_s.p99") for run in runs]
    assert len(coloured) == 7
    assert max(ranks[i] for i in coloured) <= min(ranks[i] for i in range(12) if i not in coloured)
    assert arrangement.legend[-1][0] == "5 others"
    assert arrangement.members(0)[:5] == [i for i in range(12) if i not in coloured]


def test_a_figure_with_room_for_few_takes_those_under_most_load(make_run: Make) -> None:
    runs = grid(make_run)
    assert [run.name for run in select(runs, 6)] == [run.name for run in runs if run.name.endswith("40.0")]
    assert select(runs, 12) == runs


def test_runs_of_one_system_are_a_line(make_run: Make) -> None:
    runs = [
        make_run(name=f"r{rate}s{seed}", num_requests=25, rate_per_s=rate, seed=seed)
        for rate in (4.0, 16.0)
        for seed in (0, 1)
    ]
    series, _ = series_by_system(runs)
    assert [[setting.seeds for setting in one.settings] for one in series] == [[("0", "1"), ("0", "1")]]
    assert plots.has_rate_sweep(runs)
    assert not plots.has_rate_sweep(runs[:1])
    figure = plots.latency_by_rate(runs)
    assert all(len(line.get_xdata()) >= 2 for axes in figure.axes for line in axes.get_lines())


def test_the_step_timeline_shows_the_stretch_asked_for(make_run: Make) -> None:
    run = make_run(name="one")
    figure = plots.step_timeline([run], start_at=2.0, duration_s=1.0)
    assert figure.axes[0].get_xlim() == (2.0, 3.0)
    formed_at = run.steps("formed_at", "duration_s").to_pandas()
    inside = ((formed_at.formed_at < 3.0) & (formed_at.formed_at + formed_at.duration_s > 2.0)).sum()
    assert sum(len(bars.get_paths()) for bars in figure.axes[0].collections) == inside


@pytest.mark.parametrize(("low", "high"), [(1e-6, 1e3), (0.1, 10.0), (2.0, 9.0), (19.0, 21.0), (0.03, 0.2), (4.0, 4.1)])
@pytest.mark.parametrize("most", [4, 8])
def test_logarithmic_axes_carry_a_few_numbers_whatever_they_span(low: float, high: float, most: int) -> None:
    ticks = ReadableLogLocator(most).tick_values(low, high)
    assert 2 <= len(ticks) <= most
    assert all(low * 0.999 <= tick <= high * 1.001 for tick in ticks)


def test_a_workload_is_drawn_with_the_numbers_that_it_has() -> None:
    from vajra_py.metrics.report.figure_files import figure_data
    from vajra_py.workload import RequestSpec, Workload

    requests = [
        RequestSpec(
            f"r{i}", arrived_at=float(i), num_prompt_tokens=100 + i, num_output_tokens=10, session_id=f"s{i // 4}"
        )
        for i in range(40)
    ]
    rows = list(figure_data(plots.workload_figure(Workload.from_requests(requests))))
    turns = [row["x"] for row in rows if row["series"] == "turns"]
    assert turns == [4.0] * 10
    assert max(row["x"] for row in rows if row["series"] == "prompt") == 139
    assert all(row["y"] < 0.5 for row in rows if row["series"] == "index of dispersion")  # evenly spaced
    assert len(drawn(plots.workload_figure(Workload.from_requests([])))) > 5000


def test_a_run_without_any_of_the_tenants_that_are_merged_has_no_line_for_them(make_run: Make) -> None:
    few, many = make_run(name="few", tenants=("a", "b")), make_run(name="many", tenants=tuple("abcdefghij"))
    drawn = plots.service_by_tenant([few, many])
    assert sorted(len(axes.lines) for axes in drawn.axes) == [2, 8]
