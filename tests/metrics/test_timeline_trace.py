"""The timeline: JSON that loads, spans that match the tables and nest, nothing lost."""

from __future__ import annotations

import gzip
import json
import math
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.experiment.small import SMALL
from vajra_py.config import config_from_mapping
from vajra_py.errors import RunError
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.metrics.report.timeline import TimelineOptions, timeline_events, write_timeline
from vajra_py.metrics.runs.run_data import RunData

Make = Callable[..., RunData]
SETTING = {"name": "traced", "rate_per_s": 30.0, "num_blocks": 300}


@pytest.fixture(scope="module")
def run(make_run: Make) -> RunData:
    found = make_run(**SETTING)
    assert found.summary.value("overall.preemptions.count") > 0
    return found


def tracks(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return found


def request_spans(run: RunData, options: TimelineOptions | None = None) -> dict[str, list[dict[str, Any]]]:
    """Spans by the name of the request whose line they lie on."""
    events = list(timeline_events(run, options))
    ids = set(run.requests("request_id").column("request_id").to_pylist())
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return {names[key]: spans for key, spans in tracks(events).items() if names[key] in ids}


def test_the_file_loads_and_is_the_same_each_time(run: RunData, tmp_path: Path) -> None:
    count = write_timeline(run, tmp_path / "a.json")
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert len(events) == count
    write_timeline(run, tmp_path / "b.json.gz")
    write_timeline(run, tmp_path / "c.json.gz")
    assert gzip.decompress((tmp_path / "b.json.gz").read_bytes()) == (tmp_path / "a.json").read_bytes()
    assert (tmp_path / "b.json.gz").read_bytes() == (tmp_path / "c.json.gz").read_bytes()


def test_spans_of_a_track_nest(run: RunData) -> None:
    for spans in tracks(list(timeline_events(run))).values():
        open_until: list[float] = []
        for start, length in sorted((span["ts"], -span["dur"]) for span in spans):
            while open_until and open_until[-1] <= start + 1e-6:
                open_until.pop()
            assert not open_until or start - length <= open_until[-1] + 2e-3
            open_until.append(start - length)


def test_every_step_is_there_with_its_counters(run: RunData) -> None:
    events = list(timeline_events(run))
    steps = run.steps_frame()
    spans = [event for event in events if event["ph"] == "X" and "step_index" in event["args"]]
    assert sorted(event["ts"] for event in spans) == pytest.approx(sorted(steps.formed_at * 1e6), abs=1e-3)
    assert sum(event["dur"] for event in spans) == pytest.approx(steps.duration_s.sum() * 1e6)
    counters = [event for event in events if event["ph"] == "C"]
    assert len(counters) == 3 * len(steps)
    assert max(e["args"]["waiting"] for e in counters if e["name"] == "requests") == steps.num_waiting.max()


def test_a_requests_spans_are_those_of_its_row(run: RunData) -> None:
    frame = run.requests_frame().set_index("request_id")
    found = request_spans(run)
    assert set(found) == set(frame.index)
    for request_id, spans in found.items():
        row = frame.loc[request_id]
        by_name = {span["name"]: span for span in spans}
        whole = by_name[request_id]
        assert whole["ts"] == pytest.approx(row.arrived_at * 1e6)
        assert whole["dur"] == pytest.approx(row.e2e_s * 1e6, abs=1e-2)
        queue_us = by_name["queue"]["dur"] if "queue" in by_name else 0.0
        assert queue_us == pytest.approx(row.queue_s * 1e6, abs=1e-2)
        assert sum(span["name"].startswith("preempted") for span in spans) == row.num_preemptions
        decodes = sum(span["args"]["steps"] for span in spans if span["name"] == "decode")
        # A prefill ends with a token: the first one, and one more where tokens were there to be recomputed.
        assert row.num_output_tokens - 1 - row.num_preemptions <= decodes <= row.num_output_tokens - 1


def test_without_a_decision_log_the_table_is_enough(run: RunData, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run.path, tmp_path / "copy"))
    (folder / "decisions.parquet").unlink()
    coarse, fine = request_spans(RunData.load(folder)), request_spans(run)
    assert set(coarse) == set(fine)
    for request_id, spans in coarse.items():
        assert {span["name"] for span in spans} <= {request_id, "queue", "prefill", "decode"}
        whole = [span for span in fine[request_id] if span["name"] == request_id]
        assert [span for span in spans if span["name"] == request_id] == whole


def test_requests_that_did_not_end_last_until_the_run_does(make_run: Make) -> None:
    cut = make_run(name="cut", horizon_at=2.5, rate_per_s=20.0)
    frame = cut.requests_frame().set_index("request_id")
    open_ended = frame[frame.reason == "unfinished"]
    assert len(open_ended) > 0
    found = request_spans(cut)
    ends = {round(max(s["ts"] + s["dur"] for s in found[request_id]), 3) for request_id in open_ended.index}
    assert len(ends) == 1
    assert math.isfinite(ends.pop())


def test_steps_in_flight_together_lie_on_lanes(make_run: Make, tmp_path: Path) -> None:
    from vajra_py.metrics.tables.requests import write_parquet
    from vajra_py.metrics.tables.steps import StepRow, StepsBuilder

    folder = Path(shutil.copytree(make_run(**SETTING).path, tmp_path / "pipelined"))
    builder = StepsBuilder()
    for i in range(6):
        builder.append(StepRow("chat", 0, i, i * 1.0, 1.5, 1, 0, 1, 0, 0, 1, 0, 1, 0.1, 0, 0))
    write_parquet(builder, folder / "steps.parquet")
    options = TimelineOptions(max_requests=0)
    found = tracks(list(timeline_events(RunData.load(folder), options)))
    assert {key[1]: len(spans) for key, spans in found.items()} == {1: 3, 2: 3}


def test_a_step_that_never_came_back_lasts_until_the_end(
    run: RunData, tmp_path: Path, write_decisions: Callable[[Path, list[dict[str, Any]]], None]
) -> None:
    folder = Path(shutil.copytree(run.path, tmp_path / "open"))
    rows = [dict(row) for row in run.decisions()]
    rows[-1]["ended_at"] = None
    write_decisions(folder / "decisions.parquet", rows)
    assert len(request_spans(RunData.load(folder))) == 60


def test_a_stretch_of_time_and_a_number_of_requests(run: RunData) -> None:
    options = TimelineOptions(start_at=1.0, end_at=2.0, max_requests=3)
    events = list(timeline_events(run, options))
    steps = [event for event in events if event["ph"] == "X" and "step_index" in event["args"]]
    assert steps
    assert all(event["ts"] <= 2e6 and event["ts"] + event["dur"] >= 1e6 for event in steps)
    assert len(request_spans(run, options)) == 3


@pytest.mark.parametrize("options", [{"start_at": 2.0, "end_at": 1.0}, {"max_requests": -1}])
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RunError, match="timeline"):
        TimelineOptions(**options)


def test_an_empty_run_has_an_empty_timeline(make_run: Make, tmp_path: Path) -> None:
    write_timeline(make_run(name="empty", num_requests=0), tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M"}


def test_decodes_with_drafts_are_no_prefills(tmp_path: Path) -> None:
    simulator = {**SMALL["backend"]["simulator"], "drafts": {"rate": 0.5}}
    settings = {"replica": {**SMALL["replica"], "draft": {"num_tokens": 3}}, "backend": {"simulator": simulator}}
    run = run_experiment(config_from_mapping({**SMALL, **settings}), folder=tmp_path / "run")
    for row in run.requests("request_id", "num_prompt_tokens", "num_output_tokens").to_pylist():
        spans = request_spans(run)[row["request_id"]]
        prefills = [span["args"]["tokens"] for span in spans if span["name"].startswith("prefill")]
        assert sum(prefills) == row["num_prompt_tokens"]
        assert any(span["name"].startswith("decode") for span in spans) == (row["num_output_tokens"] > 1)
