"""Replicas over time: table, summary, cost by replica-second, figure and timeline, each by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.metrics.test_costs import DEVICE, steps, summary
from vajra_py.api import run
from vajra_py.contract import PolicyConfig, ReplicaState, ScalerSpec
from vajra_py.metrics import plots
from vajra_py.metrics.definitions import Window
from vajra_py.metrics.report.figures import FIGURES
from vajra_py.metrics.report.timeline import timeline_events
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.metrics.summary.costs import ReplicasetDevices, cost_sections
from vajra_py.metrics.tables.replicas import ReplicaStates, active_times, replicas_section

STARTING, UP, DRAINING, DOWN = ReplicaState.STARTING, ReplicaState.UP, ReplicaState.DRAINING, ReplicaState.DOWN


def observed(*changes: tuple[float, int, ReplicaState], ended_at: float = 100.0) -> Any:
    """The table of these changes of one replicaset."""
    states = ReplicaStates()
    for at, replica_id, state in changes:
        states.on_replica_state("default", replica_id, state, at)
    return states.table(ended_at)


TABLE = observed(
    (0, 0, UP), (0, 1, DOWN), (0, 2, DOWN),
    (10, 1, STARTING), (20, 1, UP), (20, 2, STARTING), (25, 2, DOWN), (60, 1, DRAINING), (70, 1, DOWN),
)  # fmt: skip


def test_a_row_is_a_stretch_of_time_in_one_state() -> None:
    rows = [tuple(row.values())[1:] for row in TABLE.to_pylist()]
    assert rows == [
        (0, "up", 0, 100),
        (1, "down", 0, 10), (1, "starting", 10, 20), (1, "up", 20, 60), (1, "draining", 60, 70), (1, "down", 70, 100),
        (2, "down", 0, 20), (2, "starting", 20, 25), (2, "down", 25, 100),
    ]  # fmt: skip
    assert ReplicaStates().table(1.0) is None


def test_seconds_count_from_starting_to_down() -> None:
    times = active_times(TABLE, "default")
    assert times.seconds(Window(0, 100)) == 100 + 60 + 5
    assert times.seconds(Window(15, 65)) == 50 + 50 + 5
    at, counts = times.counts()
    assert dict(zip(at.tolist(), counts.tolist(), strict=True)) == {0: 1, 10: 2, 20: 3, 25: 2, 60: 2, 70: 1, 100: 0}


def test_the_summary_says_how_many_there_were() -> None:
    section = replicas_section(TABLE, Window(0, 100), Window(0, 50))["replicas"]
    assert section["mean"] == pytest.approx((50 + 40 + 5) / 50)
    own = section["by_replicaset"]["default"]
    assert (own["max"], own["active_s"], own["starting_s"], own["draining_s"]) == (3, 165, 15, 10)
    assert (own["num_starts"], own["num_stops"]) == (2, 1)


def test_only_replica_seconds_are_paid_for() -> None:
    devices = {"default": ReplicasetDevices(DEVICE, 2, 3, active=active_times(TABLE, "default"))}
    cost = cost_sections(devices, summary(), steps())["cost"]
    assert cost["run"] == pytest.approx(2 * 165 * 3.6 / 3600)
    assert cost["per_hour"] == pytest.approx(2 * 1.65 * 3.6)
    assert cost["per_request"] == pytest.approx(2 * 1.65 * 3.6 / 3600 / 2)
    assert cost["devices"]["default"]["count"] == 6
    assert cost["devices"]["default"]["mean_count"] == pytest.approx(3.3)


def test_a_token_costs_what_replicas_cost_while_requests_arrive() -> None:
    devices = {"default": ReplicasetDevices(DEVICE, 1, 3, active=active_times(TABLE, "default"))}
    cost = cost_sections(devices, summary(last_arrival_at=50.0), steps())["cost"]
    assert cost["per_million_output_tokens"] == pytest.approx((95 / 50) * 3.6 / 3600 / 50 * 1e6)
    assert cost["run"] == pytest.approx(165 * 3.6 / 3600)


def test_devices_of_replicas_that_are_down_draw_no_power() -> None:
    devices = {"default": ReplicasetDevices(DEVICE, 1, 3, active=active_times(TABLE, "default"))}
    energy = cost_sections(devices, summary(), steps(("default", 0.0, 10.0, 1, 0)))["energy"]
    assert energy["run_kwh"] == pytest.approx((10 * 200 + 155 * 50) / 3.6e6)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 3), st.sampled_from(list(ReplicaState))), max_size=20))
def test_replicas_always_up_cost_what_they_cost_without_a_scaler(changes: list[Any]) -> None:
    always = active_times(observed((0, 0, UP), (0, 1, UP)), "default")
    scaled, fixed = (ReplicasetDevices(DEVICE, 1, 2, active=active) for active in (always, None))
    sections = [cost_sections({"default": one}, summary(), steps()) for one in (scaled, fixed)]
    for key in ("run", "per_hour", "per_request"):
        assert sections[0]["cost"][key] == pytest.approx(sections[1]["cost"][key])
    ordered = sorted(changes, key=lambda change: change[0])
    table = observed((0, 0, UP), *ordered)
    window = Window(20, 80)
    seconds = active_times(table, "default").seconds(window)
    moments = np.linspace(20, 80, 601)[:-1] + 0.05
    now = {0: UP}
    total, pending = 0, list(ordered)
    for moment in moments:
        while pending and pending[0][0] <= moment:
            _, replica_id, state = pending.pop(0)
            now[replica_id] = state
        total += sum(state is not DOWN for state in now.values())
    assert seconds == pytest.approx(total * 0.1, abs=0.1 * (len(changes) + 1))


class NoParameters(PolicyConfig):
    """Nothing."""


class Script:
    """Two replicas from 1 s on, one from 3.05 s on."""

    def __init__(self, context: Any) -> None:
        context.wake.at(1.0, "up")
        context.wake.at(3.05, "down")

    def targets(self, pools: Any, now: float) -> dict[str, int]:
        return {"default": 2 if 1.0 <= now < 3.05 else 1}


@pytest.fixture(scope="module")
def scaled_run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    spec = ScalerSpec("script", NoParameters, lambda config, context: Script(context), "A script.")
    return run(
        {
            "version": 1,
            "scheduling": {
                "request_prioritizer": "fcfs",
                "replicaset_scheduler": "round_robin",
                "replica_scheduler": "fixed_chunk",
                "scaling": "script",
            },
            "elastic": {"max_replicas": 3, "startup_s": 0.5},
            "replica": {"memory": {"num_blocks": 100}, "max_model_len": 400},
            "workload": {
                "type": "synthetic",
                "num_requests": 50,
                "arrivals": {"type": "fixed", "rate": 10},
                "prompt_tokens": {"type": "constant", "value": 20},
                "output_tokens": {"type": "constant", "value": 100},
            },
            "backend": {"simulator": {"latency": {"type": "constant", "step_time_s": 0.01}}},
            "costs": {"device": "mine", "devices": {"mine": {"price_per_hour": 7.2}}},
            "output": {"dir": str(tmp_path_factory.mktemp("scaled"))},
        },
        policies=[spec],
    )


def test_a_run_keeps_its_replicas_and_pays_for_their_seconds(scaled_run: RunData) -> None:
    rows = {
        (row["replica_id"], row["state"]): (row["start_at"], row["end_at"]) for row in scaled_run.replicas().to_pylist()
    }
    end = scaled_run.window.end_at
    assert rows[0, "up"] == (0.0, end)
    assert rows[1, "starting"] == (1.0, 1.5)
    assert rows[1, "up"] == (1.5, 3.05)
    assert rows[2, "down"] == (0.0, end)
    drained_at, down_at = rows[1, "draining"]
    assert drained_at == 3.05 < down_at < 4.1
    start = scaled_run.window.start_at
    seconds = (end - start) + (down_at - 1.0)
    assert scaled_run.summary.value("cost.run") == pytest.approx(seconds * 7.2 / 3600)
    assert scaled_run.summary.value("replicas.active_s") == pytest.approx(seconds)
    assert scaled_run.summary.value("replicas.by_replicaset.default.max") == 2


def test_a_figure_shows_replicas_over_time(scaled_run: RunData) -> None:
    (spec,) = [one for one in FIGURES if one.key == "replicas_over_time"]
    assert spec.wanted([scaled_run])
    figure = plots.replicas_over_time([scaled_run, scaled_run.renamed("again")])
    (own,) = figure.axes
    assert own.get_title(loc="left") == "default"
    drawn = own.lines[0].get_ydata()
    assert max(drawn) == 2
    assert drawn[0] == 1


def test_the_timeline_counts_replicas_by_state(scaled_run: RunData) -> None:
    events = [one for one in timeline_events(scaled_run) if one["name"] == "replicas of default"]
    found = {event["ts"] / 1e6: event["args"] for event in events}
    assert found[0.0] == {"starting": 0, "up": 1, "draining": 0}
    assert found[1.0] == {"starting": 1, "up": 1, "draining": 0}
    assert found[1.5] == {"starting": 0, "up": 2, "draining": 0}
    assert found[3.05] == {"starting": 0, "up": 1, "draining": 1}


def test_a_run_without_a_scaler_has_none_of_it(tmp_path: Path, scaled_run: RunData) -> None:
    config = dict(scaled_run.config)
    config["scheduling"] = {**config["scheduling"], "scaling": None}
    plain = run(config | {"elastic": None, "output": {"dir": str(tmp_path)}})
    assert not (plain.path / "replicas.parquet").exists()
    assert plain.replicas().num_rows == 0
    assert "replicas" not in plain.summary.data
    assert not [one for one in timeline_events(plain) if str(one["name"]).startswith("replicas of")]
