"""Pools on the engine: requests leave replicas with their KV, tokens and replays are as they should be, and nothing is lost on the way."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.fake_runner import FakeRunner, SteppedWorld, expected_output
from tests.engine.test_control_replay import SINGLES, layers, settings
from vajra_py.config import config_from_mapping
from vajra_py.config.hand_off import PRESETS
from vajra_py.contract import (
    Layer,
    Move,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    QueueView,
    ReplicaLoadView,
    RequestView,
)
from vajra_py.engine.compute import RunnerOptions
from vajra_py.engine.worker import ReplicaKey
from vajra_py.errors import ConfigError, ExecutorError
from vajra_py.experiment.runs.backend import Backend, Run
from vajra_py.experiment.runs.engined import EngineRun
from vajra_py.experiment.runs.replay import replay
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.plugins import Registry, load_registry
from vajra_py.runtime.records.decision_reader import read_decisions
from vajra_py.runtime.records.input_log import Abandonment, Failure, TransferEnd, WakeUp, read_inputs, read_rows

POOLS = {"prefill": {"num_replicas": 2}, "decode": {"num_replicas": 2}}
RECOVERS = {"max_reruns": 50, "max_restarts": 50}
RARELY = 0.02


class Wanderer:
    """Places at random, and moves some request to another replica every few milliseconds."""

    def __init__(self, context: PolicyContext) -> None:
        self._random = random.Random(7)
        self._wake = context.wake
        self._alive: dict[str, RequestView] = {}
        self._wake.at(0.004, "look")

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        self._alive.update({one.request_id: one for one in requests})

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        for one in requests:
            self._alive.pop(one.request_id, None)

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> int:
        return self._random.choice([one.replica_id for one in replicas if one.is_up])

    def pull(self, replica: ReplicaLoadView, queued: QueueView, now: float) -> Iterable[str]:
        return [one.request_id for one in queued]

    def on_wake(self, key: str, now: float) -> None:
        if self._alive:
            self._wake.at(now + 0.004, "look")

    def moves(self, replicas: Sequence[ReplicaLoadView], now: float) -> Iterable[Move]:
        if not self._alive:
            return ()
        one: Any = self._alive[self._random.choice(sorted(self._alive))]
        others = [each.replica_id for each in replicas if each.is_up and each.replica_id != one.replica_id]
        return [Move(one, self._random.choice(others))] if one.state.value == "running" and others else ()


class Placer(Wanderer):
    """Decides where requests are computed and where they go on: anywhere, or nowhere else."""

    def place_after_prompt(
        self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float
    ) -> int | None:
        return self._random.choice([None, *(one.replica_id for one in replicas if one.is_up)])

    def moves(self, replicas: Sequence[ReplicaLoadView], now: float) -> Iterable[Move]:
        return ()


def registry() -> Registry:
    def spec(name: str, policy: Callable[[PolicyContext], Any]) -> PolicySpec:
        make = lambda config, context: policy(context)  # noqa: E731
        return PolicySpec(name, Layer.REPLICASET_SCHEDULER, PolicyConfig, make, "Moves requests about.")

    return load_registry().with_policies([spec("wanderer", Wanderer), spec("placer", Placer)])


def split(model: Path, batcher: Any = "vllm_v1", **sections: Any) -> dict[str, Any]:
    """An experiment with two pools of two replicas, whose KV memory is short."""
    mapping = settings(model, layers("fcfs", "round_robin", batcher), SINGLES, **{"pools": POOLS, **sections})
    del mapping["num_replicas"]
    return mapping


def mixed(model: Path, chooser: str, batcher: Any = "vllm_v1", **sections: Any) -> dict[str, Any]:
    """An experiment with three replicas of one kind, between which a policy moves requests."""
    return settings(model, layers("fcfs", chooser, batcher), SINGLES, **{"num_replicas": 3, **sections})


def run_it(
    mapping: dict[str, Any], folder: Path, *, abort_rate: float = 0.0, fails: float = 0.0, lives: Sequence[int] = ()
) -> tuple[RunData, EngineRun]:
    """Run in a world without time. `fails`: how many runners fail, at a random step; `lives`: replicas whose first runner fails soon."""
    stream = np.random.default_rng(mapping["seed"])
    made: list[EngineRun] = []
    first = set(lives)

    def runner(key: ReplicaKey, options: RunnerOptions) -> FakeRunner:
        if key[1] in first:
            first.discard(key[1])
            return FakeRunner(options, 2)
        return FakeRunner(options, int(stream.integers(1, 60)) if stream.random() < fails else None)

    def backend(run: Run) -> Backend:
        world = SteppedWorld(np.random.default_rng(mapping["seed"]), mean_step_s=0.002, runner=runner)
        one = EngineRun(run, make_worker=world.worker, make_clock=world.clock, make_restarter=world.restarter)

        def now_and_then() -> None:
            if one.loop is not None and stream.random() < abort_rate:
                alive = [request.request_id for request, _ in one.loop.alive()]
                if alive:
                    one.loop.abort(alive[int(stream.integers(len(alive)))])

        world.on_read = now_and_then
        made.append(one)
        return one

    run_experiment(config_from_mapping(mapping, registry=registry()), folder=folder, backend=backend, registry=registry())
    return RunData.load(folder), made[0]


def check(made: EngineRun, folder: Path) -> Counter[str]:
    """Compare every token, block and decision with what it has to be; returns what happened."""
    happened: Counter[str] = Counter()
    prompts, specs = made._prompts, {spec.request_id: spec for spec in made._run.workload}
    rows = list(read_rows(folder / "outputs.jsonl.gz"))
    assert len(rows) == len(specs)
    for row in rows:
        spec = specs[row["request_id"]]
        expected = expected_output(prompts.prompt(spec).token_ids, spec.num_output_tokens)
        assert row["token_ids"] == expected[: len(row["token_ids"])], row["request_id"]
        assert row["reason"] != "stop" or row["token_ids"] == expected
        happened[row["reason"]] += 1
    made.controller.check_conservation()
    assert made.controller.num_alive == 0
    for replica in made.controller.replicas():
        assert replica.memory.free_blocks == replica.memory.num_blocks
        assert not replica.lifecycle.held
    happened.update(type(one).__name__ for one in read_inputs(folder / "inputs.jsonl.gz"))
    for step in read_decisions(folder / "decisions.parquet"):
        happened.update(chunk[3] for chunk in step["chunks"])
        happened.update(mode for _, mode in step["preempted"])
    assert replay(folder, registry()).difference is None
    return happened


# Hand-off


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_requests_leave_with_their_kv(preset: str, hollow_model: Path, tmp_path: Path) -> None:
    _, made = run_it(split(hollow_model, hand_off=preset), tmp_path / "run", abort_rate=RARELY)
    happened = check(made, tmp_path / "run")
    assert happened["moved"] > 5
    assert min(happened["stop"], happened["aborted"], happened["expired"]) > 0


def test_a_prompt_waits_for_the_blocks_that_its_decodes_need(hollow_model: Path, tmp_path: Path) -> None:
    hand_off = {"reserve": "before_prompt", "when_full": "hold", "first_token": "recompute"}
    pools = {"prefill": {}, "decode": {"replica": {"memory": {"num_blocks": 24}}}}
    _, made = run_it(split(hollow_model, hand_off=hand_off, pools=pools), tmp_path / "run", abort_rate=RARELY)
    assert check(made, tmp_path / "run")["moved"] > 5


def test_pools_have_sizes_and_schedulers_of_their_own(hollow_model: Path, tmp_path: Path) -> None:
    pools = {
        "prefill": {"replica": {"max_batch_size": 2}, "replica_scheduler": "fixed_chunk"},
        "decode": {"replica": {"memory": {"num_blocks": None}, "max_model_len": 200}},
    }
    _, made = run_it(split(hollow_model, pools=pools), tmp_path / "run")
    blocks = {one.replica_id: one.memory.num_blocks for one in made.controller.replicas()}
    assert blocks == {0: 34, 1: 64}  # the second one is what the worker has room for
    assert check(made, tmp_path / "run")["moved"] > 5
    sizes: dict[int, int] = {}
    for step in read_decisions(tmp_path / "run" / "decisions.parquet"):
        sizes[step["replica_id"]] = max(sizes.get(step["replica_id"], 0), len(step["chunks"]))
    assert sizes[0] == 2 < sizes[1]


@pytest.mark.parametrize("first_token", ["source", "recompute"])
def test_a_request_may_stay_after_all(first_token: str, hollow_model: Path, tmp_path: Path) -> None:
    mapping = mixed(hollow_model, "placer", hand_off={"first_token": first_token}, replica={"max_batch_size": 6})
    mapping["replica"]["memory"] = {"block_size": 8, "num_blocks": 80}
    _, made = run_it(mapping, tmp_path / "run", abort_rate=RARELY)
    happened = check(made, tmp_path / "run")
    assert happened["moved"] > 5
    assert happened["stop"] > happened["TransferEnd"] / 4


# Moves


@pytest.mark.parametrize("batcher", ["vllm_v1", {"policy": "fixed_chunk", "params": {"preemption": "swap"}}])
def test_running_requests_move(batcher: Any, hollow_model: Path, tmp_path: Path) -> None:
    migration = {"max_stages": 3, "last_stage_max_blocks": 0, "max_per_replica": 4}
    _, made = run_it(
        mixed(hollow_model, "wanderer", batcher, migration=migration), tmp_path / "run", abort_rate=RARELY
    )
    happened = check(made, tmp_path / "run")
    assert happened["TransferEnd"] > happened["moved"] > 10  # some moved in several stages
    assert happened["WakeUp"] > 50
    assert happened["swap" if isinstance(batcher, dict) else "recompute"] > 0


@pytest.mark.parametrize("seed", range(3))
def test_replicas_are_lost_while_requests_move(seed: int, hollow_model: Path, tmp_path: Path) -> None:
    mapping = mixed(hollow_model, "wanderer", engine={"recovery": RECOVERS}, seed=seed)
    _, made = run_it(mapping, tmp_path / "run", abort_rate=RARELY, fails=0.6)
    happened = check(made, tmp_path / "run")
    assert min(happened["Failure"], happened["moved"]) > 0


# Losses


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_lost_end_costs_a_computation_and_no_request(preset: str, hollow_model: Path, tmp_path: Path) -> None:
    mapping = split(hollow_model, hand_off=preset, engine={"recovery": RECOVERS}, seed=23)
    mapping["workload"] = {**SINGLES, "slo_classes": []}
    _, made = run_it(mapping, tmp_path / "run", lives=[0, 2])
    happened = check(made, tmp_path / "run")
    assert happened["Failure"] == happened["Restart"] == 2
    assert happened["stop"] + happened["rejected"] == 24  # what comes while a pool is down is turned away
    assert happened["stop"] > 12


def test_requests_end_when_no_replica_is_left_that_decodes(hollow_model: Path, tmp_path: Path) -> None:
    pools = {"prefill": {"num_replicas": 2}, "decode": {}}
    mapping = split(hollow_model, pools=pools, engine={"time_scale": 1.0})
    run, made = run_it(mapping, tmp_path / "run", lives=[2])
    happened = check(made, tmp_path / "run")
    assert happened["Abandonment"] == 1
    rows = run.requests().to_pylist()
    assert {row["reason"] for row in rows} <= {"stop", "failed", "rejected", "expired"}
    assert happened["failed"] > 0
    assert any("could go on after its prompt" in row["detail"] for row in rows if row["reason"] == "rejected")


def test_requests_end_when_a_pool_does_not_come_back_in_time(hollow_model: Path, tmp_path: Path) -> None:
    recovery = {"max_reruns": 9, "max_restarts": 0, "wait_s": 0.01}
    pools = {"prefill": {}, "decode": {}}
    mapping = split(hollow_model, pools=pools, engine={"recovery": recovery, "time_scale": 1.0})
    run, made = run_it(mapping, tmp_path / "run", lives=[0])
    check(made, tmp_path / "run")
    inputs = read_inputs(tmp_path / "run" / "inputs.jsonl.gz")
    assert sum(isinstance(one, Failure | Abandonment) for one in inputs) == 2
    rejected = [row["detail"] for row in run.requests().to_pylist() if row["reason"] == "rejected"]
    assert any("could compute its prompt" in detail for detail in rejected)
