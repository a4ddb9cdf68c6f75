"""Decision log and steps table keep runs of steps as one record; read, they are what single steps would have written."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vajra_py.contract.observer import Observer, StepEnd, StepRecord, StepRun
from vajra_py.errors import RunError
from vajra_py.latency.models.packed_times import PackedTimes
from vajra_py.metrics.runs.run_data import STEPS_FILE, RunData
from vajra_py.metrics.tables.recorder import Recorder
from vajra_py.metrics.tables.requests import write_parquet
from vajra_py.metrics.tables.steps import STEP_COLUMNS, expand_steps
from vajra_py.runtime.records.decision_log import DecisionLog
from vajra_py.runtime.records.decision_reader import read_decisions, step_row
from vajra_py.runtime.records.step_log import PlanRepeats, StepLog
from vajra_py.runtime.step.plan import StepPlan
from vajra_py.sim.simulator import SimulationOptions
from vajra_py.testing import Harness
from vajra_py.testing.harness import PolicySource
from vajra_py.testing.scenarios import (
    INCREMENTAL,
    KV_PARALLEL,
    LEAVING,
    LIGHT,
    OVERLOADED,
    PIPELINED,
    SHARED_PREFIXES,
    STARVED,
    SWAPPING,
    Scenario,
    requests_of,
)
from vajra_py.workload import RequestSpec

SITUATIONS = (LIGHT, OVERLOADED, STARVED, INCREMENTAL, SWAPPING, LEAVING, SHARED_PREFIXES, PIPELINED, KV_PARALLEL)


class Expanded(Observer):
    """Sees every step by itself, as an observer of a plug-in does."""

    wants_steps = True

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.table: list[tuple[Any, ...]] = []
        self._open: dict[tuple[str, int, int], dict[str, Any]] = {}

    def on_step_begin(self, step: StepRecord) -> None:
        row = step_row(step)
        if step.chunks:
            self._open[step.replicaset, step.replica_id, step.step_index] = row
        else:
            self.rows.append(row)

    def on_step_end(self, step: StepEnd) -> None:
        row = self._open.pop((step.replicaset, step.replica_id, step.step_index))
        row["ended_at"] = step.ended_at
        row["finished"] = [[request.request_id, reason.value] for request, reason in step.finished]
        self.rows.append(row)
        features, duration_s = step.features, step.ended_at - step.formed_at
        figures = (features.num_decodes, features.num_prefills, features.num_decodes, features.prefill_tokens)
        waiting = (features.decode_context_tokens, step.num_running, step.num_waiting, step.free_blocks)
        place = (step.replicaset, step.replica_id, step.step_index, step.formed_at, duration_s)
        self.table.append((*place, *figures, *waiting, step.num_preempted, len(step.finished)))

    def all_rows(self) -> list[dict[str, Any]]:
        return [*self.rows, *self._open.values()]


class CountsRuns(Observer):
    """Number of steps that were fast-forwarded."""

    num_steps = 0

    def on_step_run(self, run: StepRun) -> None:
        self.num_steps += len(run.ended_at)


def run(scenario: Scenario, policy: PolicySource, observers: list[Any], *, fast_forward: bool) -> int:
    """Simulate, some of it cut off; how many steps there were."""
    options = replace(scenario.options, num_replicas=2)
    harness = Harness("fcfs", "round_robin", policy, options)
    harness.controller.watch(observers)
    simulator = harness.simulator(SimulationOptions(fast_forward=fast_forward, horizon_s=3.0, drain=False))
    specs = requests_of(scenario, 2)
    stream = np.random.default_rng(3)
    for spec in specs[: scenario.num_aborted * 2]:
        simulator.abort_at(spec.arrived_at + float(stream.uniform(0.0, 0.4)), spec.request_id)
    simulator.run(specs)
    return simulator.num_steps


@pytest.mark.parametrize("policy", ["fixed_chunk", "vllm_v1", "dynamic_chunk"])
@pytest.mark.parametrize("scenario", SITUATIONS, ids=lambda one: str(one.name))
def test_records_read_as_single_steps(scenario: Scenario, policy: str, tmp_path: Path) -> None:
    expected = Expanded()
    run(scenario, policy, [expected], fast_forward=True)
    for fast_forward in (True, False):
        recorder, runs = Recorder(lambda name, replica_id: scenario.options.num_blocks), CountsRuns()
        log = DecisionLog(tmp_path / "decisions.parquet")
        sharing = Recorder(lambda name, replica_id: scenario.options.num_blocks, log=log)
        run(scenario, policy, [recorder, log, sharing, runs], fast_forward=fast_forward)
        assert (runs.num_steps > 0) == (fast_forward and scenario not in (PIPELINED, KV_PARALLEL)), "those never repeat"
        log.close()
        rows = list(read_decisions(tmp_path / "decisions.parquet"))
        assert rows == expected.all_rows()
        table = recorder.steps.to_table()
        assert table.column_names == list(STEP_COLUMNS)
        assert sharing.steps.to_table().equals(table)
        found = [tuple(row.values()) for row in table.drop_columns("used_fraction").to_pylist()]
        assert sorted(found) == sorted(expected.table)
        assert table.column("formed_at").to_pylist() == sorted(table.column("formed_at").to_pylist())
        write_parquet(recorder.steps, tmp_path / STEPS_FILE)
        assert expand_steps(pq.read_table(tmp_path / STEPS_FILE), STEP_COLUMNS).equals(table)


def test_a_run_of_steps_is_one_record(tmp_path: Path) -> None:
    recorder = Recorder(lambda name, replica_id: LIGHT.options.num_blocks)
    num_steps = run(LIGHT, "fixed_chunk", [recorder], fast_forward=True)
    assert len(recorder.steps) == num_steps
    write_parquet(recorder.steps, tmp_path / STEPS_FILE)
    assert pq.read_metadata(tmp_path / STEPS_FILE).num_rows < num_steps / 2


class Growths(StepLog):
    """Steps of each run, and numbers of members that grow in them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[tuple[int, int]] = []

    def on_plan_repeats(
        self, replicaset: str, plan: StepPlan, repeats: PlanRepeats, num_waiting: int, now: int
    ) -> None:
        self.counts.append((len(repeats.ended_at), len(repeats.growth)))


def test_a_run_of_steps_says_who_grows_in_each_step_after_the_first_until_that_repeats() -> None:
    log, harness = Growths(), Harness("fcfs", "round_robin", "fixed_chunk")
    harness.controller.watch([log])
    harness.simulator(SimulationOptions()).run([RequestSpec(f"r{count}", 0.0, 10, count) for count in (8, 60)])
    size = harness.options.block_size
    assert [count for _, count in log.counts] == [min(num_steps - 1, size) for num_steps, _ in log.counts]
    assert any(1 < num_steps <= size for num_steps, _ in log.counts)
    assert any(num_steps > size + 1 for num_steps, _ in log.counts)


def test_a_log_in_several_parts_is_read_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = []
    for records_at_once in (7, 1 << 20):
        monkeypatch.setattr("vajra_py.runtime.records.step_log.RECORDS_PER_BATCH", min(3, records_at_once))
        monkeypatch.setattr("vajra_py.runtime.records.decision_log.RECORDS_AT_ONCE", records_at_once)
        log = DecisionLog(tmp_path / f"{records_at_once}.parquet")
        recorder = Recorder(lambda name, replica_id: STARVED.options.num_blocks, log=log)
        run(STARVED, "fixed_chunk", [log, recorder], fast_forward=True)
        log.close()
        rows = list(read_decisions(tmp_path / f"{records_at_once}.parquet"))
        logs.append((rows, recorder.steps.to_table()))
    assert logs[0] == logs[1]
    assert logs[0][0]


def test_a_killed_process_leaves_its_decisions_up_to_then(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
from vajra_py.config import config_from_mapping
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.runtime.records.decision_log import DecisionLog

class Killing(DecisionLog):
    num_plans = 0

    def on_plan(self, *arguments):
        super().on_plan(*arguments)
        self.num_plans += 1
        if self.num_plans == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)

import vajra_py.runtime.records.step_log as log
from vajra_py.experiment.runs.simulated import SimulatedRun
log.RECORDS_PER_BATCH = 64
SimulatedRun.decision_log = Killing
profile = {"type": "profile", "profile": "azure2023_conv", "num_requests": 150, "rate": 10}
scheduling = dict(request_prioritizer="fcfs", replicaset_scheduler="round_robin", replica_scheduler="fixed_chunk")
latency = {"type": "roofline", "model": "llama-3-8b", "device": "a100-80gb-sxm"}
settings = {"scheduling": scheduling, "workload": profile, "backend": {"simulator": {"latency": latency}}}
run_experiment(config_from_mapping({"version": 1, **settings}), folder=Path(sys.argv[1]))
"""
    for name, killed_at in (("whole", 1_000_000), ("killed", 150)):
        command = [sys.executable, "-c", script, str(tmp_path / name), str(killed_at)]
        code = subprocess.run(command, check=False).returncode
        assert code == (0 if name == "whole" else -signal.SIGKILL)
    whole, killed = RunData.load(tmp_path / "whole"), RunData.load(tmp_path / "killed")
    rows = list(killed.decisions())
    assert len(rows) >= 64
    assert rows == list(whole.decisions())[: len(rows)]
    assert killed.has_cut_decisions
    assert not whole.has_cut_decisions
    assert not list((tmp_path / "whole").glob("*.partial"))
    with pytest.raises(RunError, match="cut off"):
        killed.requests()


def test_an_unfinished_log_is_not_there_under_its_name(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "decisions.parquet")
    run(LIGHT, "fixed_chunk", [log], fast_forward=True)
    assert not (tmp_path / "decisions.parquet").exists()
    log.close()
    assert [path.name for path in tmp_path.iterdir()] == ["decisions.parquet"]


durations = st.lists(st.lists(st.integers(1, 2**40), min_size=1, max_size=6), max_size=8)


@given(durations, st.lists(st.integers(-(2**40), 2**40), min_size=8, max_size=8))
def test_packed_times_come_out_as_they_went_in(runs: list[list[int]], formed: list[int]) -> None:
    ends = [np.cumsum([first, *steps]).tolist()[1:] for first, steps in zip(formed, runs, strict=False)]
    begins = np.array(formed[: len(runs)], dtype=np.int64)
    counts = np.array([len(steps) for steps in runs], dtype=np.int64)
    flat = np.array([end for one in ends for end in one], dtype=np.int64)
    found_begins, found_ends = PackedTimes.pack(begins, counts, flat).unpack()
    assert found_ends.tolist() == flat.tolist()
    assert found_begins.tolist() == [
        tick for first, one in zip(formed, ends, strict=False) for tick in (first, *one[:-1])
    ]
