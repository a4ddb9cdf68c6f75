"""An admission policy on the engine: the same gate, and a replay that decides the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_control_replay import SESSIONS, SINGLES, layers, on_fake_runners, settings
from vajra_py.config import config_from_mapping
from vajra_py.contract import (
    Accept,
    AdmissionDecision,
    AdmissionSpec,
    Defer,
    PolicyConfig,
    PolicyContext,
    Refuse,
    ReplicasetView,
    RequestView,
)
from vajra_py.experiment.runs.replay import replay
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.plugins import load_registry


class MixedConfig(PolicyConfig):
    """No parameters."""


class Mixed:
    """Draws one of every kind of decision, and wakes itself."""

    def __init__(self, config: MixedConfig, context: PolicyContext) -> None:
        self._stream = context.random_stream("mixed")
        self._wake = context.wake
        self._num_woken = 0

    def admit(self, request: RequestView, replicasets: Sequence[ReplicasetView], now: float) -> AdmissionDecision:
        drawn = self._stream.random() + 0.05 * self._num_woken % 0.3
        running = sum(one.num_running for one in replicasets[0].replicas)
        if drawn < 0.3 or not running:
            return Accept()
        if drawn < 0.5:
            return Accept(max_tokens=3, slo_class="cheap")
        if drawn < 0.6:
            return Refuse("unlucky", 1.5)
        if drawn < 0.8:
            self._wake.at(now + 0.004)
            return Defer(now + 0.01 * drawn)
        return Defer()

    def on_wake(self, key: str, now: float) -> None:
        self._num_woken += 1


SPEC = AdmissionSpec("mixed", MixedConfig, Mixed, "Draws decisions.")
POLICIES: list[Any] = [
    "mixed",
    {"policy": "token_bucket", "params": {"capacity": 150, "refill_per_s": 4000, "when_empty": "defer", "by": "all"}},
    {"policy": "max_load", "params": {"max_requests": 2, "recheck_s": 0.002}},
    {"policy": "priority_holdback", "params": {"queue_threshold_requests": 1, "min_ceiling": 0.3}},
    {"policy": "soft_reflective_ceiling", "params": {"detector": "concurrency", "max_concurrency_requests": 3}},
    {"policy": "mooncake", "params": {"ttft_slo_s": 0.03}},
]


@pytest.mark.parametrize("number", range(2 * len(POLICIES)))
def test_admission_decisions_are_replayed(number: int, hollow_model: Path, tmp_path: Path) -> None:
    scheduling = layers("fcfs", ("pull", "round_robin", "least_loaded")[number % 3], "fixed_chunk")
    scheduling["admission"] = POLICIES[number // 2]
    mapping = settings(hollow_model, scheduling, SESSIONS if number % 2 else SINGLES, seed=number)
    registry = load_registry().with_policies([SPEC])
    config = config_from_mapping(mapping, registry=registry)
    backend = on_fake_runners(abort_rate=0.03)
    run = run_experiment(config, folder=tmp_path / "run", registry=registry, backend=backend)
    report = replay(tmp_path / "run", registry)
    assert report.difference is None
    section = run.summary.data["admission"]
    assert sum(section[name] for name in ("accepted", "degraded", "refused", "deferred")) == run.requests().num_rows
    decisions = list(run.admissions())
    assert decisions
    assert {one["policy"] for one in decisions} == {run.config["scheduling"]["admission"]["policy"]}


def test_a_replay_notices_another_admission_decision(hollow_model: Path, tmp_path: Path) -> None:
    scheduling = layers("fcfs", "round_robin", "fixed_chunk")
    scheduling["admission"] = {"policy": "token_bucket", "params": {"capacity": 200, "refill_per_s": 100, "by": "all"}}
    config = config_from_mapping(settings(hollow_model, scheduling))
    run_experiment(config, folder=tmp_path / "run", backend=on_fake_runners(aborts=False))
    path = tmp_path / "run" / "config.yaml"
    assert replay(tmp_path / "run").is_equal
    path.write_text(path.read_text().replace("refill_per_s: 100.0", "refill_per_s: 90.0"))
    difference = replay(tmp_path / "run").difference
    assert difference is not None
    assert "refuse" in difference or "step" in difference


def test_degraded_requests_end_at_their_new_length(hollow_model: Path, tmp_path: Path) -> None:
    scheduling = layers("fcfs", "round_robin", "fixed_chunk")
    scheduling["admission"] = "mixed"
    registry = load_registry().with_policies([SPEC])
    config = config_from_mapping(settings(hollow_model, scheduling), registry=registry)
    run = run_experiment(config, folder=tmp_path / "run", registry=registry, backend=on_fake_runners(aborts=False))
    rows = run.requests().to_pylist()
    degraded = [row for row in rows if row["admission"] == "degraded" and row["reason"] != "expired"]
    assert degraded
    for row in degraded:
        assert row["num_output_tokens"] <= 3
        assert row["slo_class"] == "cheap"
        assert "slo_class=cheap" in row["degraded"]


def test_a_run_without_an_admission_policy_writes_nothing_of_it(hollow_model: Path, tmp_path: Path) -> None:
    config = config_from_mapping(settings(hollow_model, layers("fcfs", "round_robin", "fixed_chunk")))
    run = run_experiment(config, folder=tmp_path / "run", backend=on_fake_runners())
    assert list(RunData(tmp_path / "run").admissions()) == []
    assert not (tmp_path / "run" / "admissions.jsonl.gz").exists()
    assert "admission" not in run.requests().column_names
    assert "admission" not in run.summary.data
    assert "admission" not in run.manifest
    assert "admission" not in json.dumps(run.config["scheduling"])
