"""Policies that ask to be woken, on the engine and in its replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_control_replay import layers, on_fake_runners, settings
from vajra_py.config import config_from_mapping
from vajra_py.contract import (
    BatchBuilder,
    KeyMotion,
    Layer,
    LocalReplicaView,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    QueueView,
    ReplicaLoadView,
    RequestView,
    fill,
)
from vajra_py.experiment.runs.replay import replay
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.plugins import Registry, load_registry
from vajra_py.runtime.records.decision_reader import read_decisions
from vajra_py.runtime.records.input_log import WakeUp, read_inputs

WINDOW_S, TURN_S = 0.05, 0.06
"""Many times the steps of a run, in which no time passes but what the clock's readers take."""
WORKLOAD = {
    "type": "synthetic",
    "arrivals": {"type": "poisson", "rate": 20.0},
    "num_requests": 24,
    "prompt_tokens": {"type": "uniform", "min": 1, "max": 60},
    "output_tokens": {"type": "uniform", "min": 1, "max": 12},
}


class Window:
    """Replica scheduler that waits for company: an idle replica begins a while after the first arrival."""

    def __init__(self, context: PolicyContext) -> None: ...

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        oldest = min((one.arrived_at for one in replica.waiting()), default=None)
        if oldest is not None and not replica.num_running and now < oldest + WINDOW_S:
            batch.idle_until(oldest + WINDOW_S)
            return
        fill(replica, batch, lambda request, batch, replica: batch.max_chunk(request))


class Turns:
    """Prioritizer whose order is turned about every few milliseconds."""

    key_motion = KeyMotion.ARBITRARY

    def __init__(self, context: PolicyContext) -> None:
        self._sign, self._wake = 1.0, context.wake
        self._wake.at(TURN_S, "turn")

    def key(self, request: RequestView, now: float) -> float:
        return self._sign * request.arrived_at

    def on_wake(self, key: str, now: float) -> None:
        self._sign = -self._sign
        self._wake.at(now + TURN_S, key)


class Gates:
    """Replicaset scheduler that lets one replica after the other pull, and takes back a wake-up that it had asked for."""

    def __init__(self, context: PolicyContext) -> None:
        self._open, self._num_replicas, self._wake = 0, context.num_replicas, context.wake
        self._wake.at(TURN_S, "next")

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> None:
        return None

    def pull(self, replica: ReplicaLoadView, queued: QueueView, now: float) -> Iterable[str]:
        return [one.request_id for one in queued] if replica.replica_id == self._open else ()

    def on_wake(self, key: str, now: float) -> None:
        assert key == "next"
        self._open = (self._open + 1) % self._num_replicas
        self._wake.at(now + TURN_S, "next")
        self._wake.at(now + TURN_S / 2, "never")
        self._wake.cancel("never")


def registry() -> Registry:
    made: list[tuple[str, Layer, Any]] = [
        ("window", Layer.REPLICA_SCHEDULER, Window),
        ("turns", Layer.REQUEST_PRIORITIZER, Turns),
        ("gates", Layer.REPLICASET_SCHEDULER, Gates),
    ]

    def spec(name: str, layer: Layer, policy: Any) -> PolicySpec:
        return PolicySpec(name, layer, PolicyConfig, lambda config, context: policy(context), "Is woken.")

    return load_registry().with_policies([spec(*one) for one in made])


@pytest.mark.parametrize(
    ("prioritizer", "chooser", "batcher"),
    [("fcfs", "round_robin", "window"), ("turns", "pull", "fixed_chunk"), ("turns", "gates", "fixed_chunk")],
)
def test_wake_ups_are_replayed(
    prioritizer: str, chooser: str, batcher: str, hollow_model: Path, tmp_path: Path
) -> None:
    mapping = settings(hollow_model, layers(prioritizer, chooser, batcher), WORKLOAD, engine={"time_scale": 1.0})
    policies, folder = registry(), tmp_path / "run"
    config = config_from_mapping(mapping, registry=policies)
    run_experiment(config, folder=folder, backend=on_fake_runners(), registry=policies)
    woken = Counter(one.slot for one in read_inputs(folder / "inputs.jsonl.gz") if isinstance(one, WakeUp))
    used = {"turns": "request_prioritizer", "gates": "replicaset_scheduler", "window": "replica_scheduler"}
    assert set(woken) == {used[name] for name in (prioritizer, chooser, batcher) if name in used}
    assert min(woken.values()) > 3
    assert replay(folder, policies).difference is None


def test_a_window_is_over_when_its_time_has_come(hollow_model: Path, tmp_path: Path) -> None:
    mapping = settings(hollow_model, layers("fcfs", "round_robin", "window"), WORKLOAD, engine={"time_scale": 1.0})
    policies = registry()
    config = config_from_mapping(mapping, registry=policies)
    run = run_experiment(config, folder=tmp_path / "run", backend=on_fake_runners(aborts=False), registry=policies)
    arrived = {row["request_id"]: row["arrived_at"] for row in run.requests().to_pylist()}
    began = 0
    last_end: dict[int, float] = {}
    for step in read_decisions(tmp_path / "run" / "decisions.parquet"):
        kinds = {kind for _, _, _, kind in step["chunks"]}
        if kinds == {"admitted"} and step["formed_at"] > last_end.get(step["replica_id"], -1.0):
            began += 1
            first = min(arrived[name] for name, _, _, _ in step["chunks"])
            assert step["formed_at"] >= first + WINDOW_S
        last_end[step["replica_id"]] = step["ended_at"]
    assert began > 1
