"""Pools on the engine: requests leave replicas with their KV, tokens and replays are as they should be, and nothing is lost on the way."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.fake_runner import (
    FakeRunner,
    SteppedWorld,
    runner_that_dies_exporting,
    runner_that_dies_importing,
)
from tests.engine.test_control_recovery import check_nothing_is_left, check_outputs
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
from vajra_py.engine.build import _dry_controller
from vajra_py.engine.compute import RunnerOptions
from vajra_py.engine.config import EngineConfig
from vajra_py.engine.kv_copy import SharedBuffer
from vajra_py.engine.kv_transfers import check_transfers
from vajra_py.engine.services import engine_services
from vajra_py.engine.worker import ReplicaKey
from vajra_py.errors import ConfigError
from vajra_py.experiment.runs.backend import Backend, Run
from vajra_py.experiment.runs.engined import EngineRun
from vajra_py.experiment.runs.replay import replay
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.plugins import Registry, load_registry
from vajra_py.runtime.records.decision_reader import read_decisions
from vajra_py.runtime.records.input_log import Abandonment, Failure, TransferEnd, read_inputs
from vajra_py.runtime.records.json_lines import read_rows
from vajra_py.runtime.serving.build import ModelFacts

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

    def place_after_prompt(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> int | None:
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
    mapping: dict[str, Any],
    folder: Path,
    *,
    abort_rate: float = 0.0,
    fails: float = 0.0,
    fails_moving: float = 0.0,
    lives: Sequence[int] = (),
) -> tuple[RunData, EngineRun]:
    """Run in a world without time.

    `fails`, `fails_moving`: how many runners fail, at a random step or copy to or from the host; `lives`: replicas whose first runner
    fails soon.
    """
    stream = np.random.default_rng(mapping["seed"])
    made: list[EngineRun] = []
    first = set(lives)

    def runner(key: ReplicaKey, options: RunnerOptions) -> FakeRunner:
        if key[1] in first:
            first.discard(key[1])
            return FakeRunner(options, 2)
        at = int(stream.integers(1, 60)) if stream.random() < fails else None
        fails_soon = fails_moving > 0.0 and stream.random() < fails_moving
        return FakeRunner(options, at, int(stream.integers(1, 12)) if fails_soon else None)

    def backend(run: Run) -> Backend:
        world = SteppedWorld(np.random.default_rng(mapping["seed"]), mean_step_s=0.002, runner=runner)
        one = EngineRun(run, make_worker=world.worker, make_clock=world.clock, make_restarter=world.restarter)

        def now_and_then() -> None:
            if one.loop is None:
                return
            one.controller.check_conservation()  # between two turns: of requests, and of the blocks of each replica
            if stream.random() < abort_rate:
                alive = [request.request_id for request, _ in one.loop.alive()]
                if alive:
                    one.loop.abort(alive[int(stream.integers(len(alive)))])

        world.on_read = now_and_then
        made.append(one)
        return one

    run_experiment(
        config_from_mapping(mapping, registry=registry()), folder=folder, backend=backend, registry=registry()
    )
    return RunData.load(folder), made[0]


def check(made: EngineRun, folder: Path) -> Counter[str]:
    """Compare every token, block and decision with what it has to be; returns what happened."""
    happened = check_outputs(made, folder)
    check_nothing_is_left(made)
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
        "prefill": {
            "replica": {"max_batch_size": 2, "memory": {"tenant_salt": True}},
            "replica_scheduler": "fixed_chunk",
        },
        "decode": {"replica": {"memory": {"num_blocks": None}, "max_model_len": 200}},
    }
    _, made = run_it(split(hollow_model, pools=pools), tmp_path / "run")
    blocks = {one.replica_id: one.memory.num_blocks for one in made.controller.replicas()}
    assert blocks == {0: 34, 1: 64}  # the second one is what the worker has room for
    assert made._engine.tenant_salt
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
    _, made = run_it(mixed(hollow_model, "wanderer", batcher, migration=migration), tmp_path / "run", abort_rate=RARELY)
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
    assert happened["stop"] + happened["rejected"] == 24  # requests that arrive while a pool is down are rejected
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


# Processes


def on_processes(load: Callable[[RunnerOptions], FakeRunner], made: list[EngineRun]) -> Callable[[Run], Backend]:
    def backend(run: Run) -> Backend:
        made.append(EngineRun(run, load=load))
        return made[0]

    return backend


@pytest.mark.parametrize("load", [runner_that_dies_exporting, runner_that_dies_importing])
def test_a_process_killed_in_the_middle_of_a_transfer_costs_no_request(
    load: Callable[[RunnerOptions], FakeRunner],
    hollow_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # processes find the runner
    model = tmp_path / "model"
    shutil.copytree(hollow_model, model)
    before = {path.name for path in Path("/dev/shm").iterdir()} if Path("/dev/shm").is_dir() else set()
    engine = {"workers": "process", "recovery": {**RECOVERS, "backoff_s": 0.01}}
    mapping = split(model, pools={"prefill": {}, "decode": {"num_replicas": 2}}, engine=engine)
    mapping["workload"] = {**SINGLES, "slo_classes": [], "num_requests": 12, "arrivals": {"type": "at_once"}}
    made: list[EngineRun] = []
    run_experiment(config_from_mapping(mapping), folder=tmp_path / "run", backend=on_processes(load, made))
    happened = check(made[0], tmp_path / "run")
    assert happened["Failure"] == 1
    assert happened["stop"] == 12
    assert happened["moved"] > 5
    after = {path.name for path in Path("/dev/shm").iterdir()} if Path("/dev/shm").is_dir() else set()
    assert not {name for name in after - before if "vajra" in name}


def test_memory_that_nobody_takes_is_freed_with_its_last_descriptor() -> None:
    ours, theirs = Pipe()
    with closing(SharedBuffer.of_size(4096)) as buffer:
        buffer.array()[:] = 7
        buffer.send(ours)
    with closing(SharedBuffer.receive(theirs)) as received:
        contents = received.array()
    assert contents.size == 4096
    assert set(contents.tolist()) == {7}
    descriptor = received._descriptor
    assert descriptor == -1
    ours.close()
    with pytest.raises((EOFError, OSError)):
        SharedBuffer.receive(theirs)
    theirs.close()


# A real model


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from vajra_py.engine.tiny import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def real(model: Path, chooser: str = "round_robin", **engine: Any) -> dict[str, Any]:
    mapping = split(model, engine={"num_threads": 1, "random_weights": False, **engine})
    mapping["scheduling"]["replicaset_scheduler"] = chooser
    mapping["replica"] |= {"max_batch_tokens": 64, "max_model_len": 200}
    mapping["replica"]["memory"]["num_blocks"] = 60
    mapping["workload"] = {**SINGLES, "slo_classes": [], "num_requests": 16}
    return mapping


def tokens(folder: Path) -> dict[str, list[int]]:
    return {row["request_id"]: row["token_ids"] for row in read_rows(folder / "outputs.jsonl.gz")}


def num_transfers(folder: Path) -> int:
    return sum(isinstance(one, TransferEnd) for one in read_inputs(folder / "inputs.jsonl.gz"))


def test_a_real_model_gives_the_tokens_that_it_gives_without_pools(tiny_model: Path, tmp_path: Path) -> None:
    one_pool = real(tiny_model)
    del one_pool["pools"]
    run_experiment(config_from_mapping(one_pool), folder=tmp_path / "one pool")
    expected = tokens(tmp_path / "one pool")
    for preset in ("distserve", "vllm-pd"):
        run_experiment(config_from_mapping(real(tiny_model) | {"hand_off": preset}), folder=tmp_path / preset)
        assert tokens(tmp_path / preset) == expected
        assert num_transfers(tmp_path / preset) > 10
        assert replay(tmp_path / preset).difference is None
    moving = {**one_pool, "num_replicas": 2, "migration": {"last_stage_max_blocks": 0, "max_per_replica": 4}}
    moving["scheduling"] = {**one_pool["scheduling"], "replicaset_scheduler": "wanderer"}
    config = config_from_mapping(moving, registry=registry())
    run_experiment(config, folder=tmp_path / "moving", registry=registry())
    assert tokens(tmp_path / "moving") == expected
    assert num_transfers(tmp_path / "moving") > 5
    assert replay(tmp_path / "moving", registry()).difference is None


def test_processes_move_a_real_models_kv(tiny_model: Path, tmp_path: Path) -> None:
    in_processes = real(tiny_model, workers="process") | {"pools": {"prefill": {}, "decode": {}}}
    run_experiment(config_from_mapping(in_processes), folder=tmp_path / "processes")
    run_experiment(config_from_mapping(real(tiny_model)), folder=tmp_path / "threads")
    assert tokens(tmp_path / "processes") == tokens(tmp_path / "threads")
    assert num_transfers(tmp_path / "processes") > 10
    assert replay(tmp_path / "processes").difference is None


# Refused configurations


def test_what_cannot_move_is_refused_when_the_engine_is_built(hollow_model: Path, tmp_path: Path) -> None:
    stages = {"prefill": {"replica": {"pipeline_stages": 2}}, "decode": {}}
    with pytest.raises(ConfigError, match="pools: KV does not move between replicas of different pipeline_stages"):
        run_it(split(hollow_model, pools=stages), tmp_path / "stages")
    keeps = {"memory": {"prefix_cache": {"unscheduled": "keep"}}}
    with pytest.raises(ConfigError, match=r"pools\.decode\.replica\.memory\.prefix_cache\.unscheduled"):
        run_it(split(hollow_model, pools={"prefill": {}, "decode": {"replica": keeps}}), tmp_path / "keeps")
    groups = {"kv_parallel": {"groups": 2, "group_tokens": 64}, "memory": {"prefix_cache": {"enabled": False}}}
    with pytest.raises(ConfigError, match="KV-parallel groups does not move between replicas"):
        run_it(split(hollow_model, pools={"prefill": {}, "decode": {"replica": groups}}), tmp_path / "groups")


def test_a_backend_that_keeps_its_kv_refuses_schedulers_that_move_it(hollow_model: Path, tmp_path: Path) -> None:
    mapping = mixed(hollow_model, "wanderer")
    config = config_from_mapping(mapping, registry=registry())
    services = engine_services(config, registry(), {})
    controller = _dry_controller(config, services, {"default": {"default": ModelFacts(lambda size, fraction: 40)}})
    with pytest.raises(ConfigError) as error:
        check_transfers(controller, Stays(**config.backend.settings.model_dump()))
    assert "scheduling.replicaset_scheduler: wanderer moves requests with their KV" in str(error.value)


def test_kv_that_is_sent_beside_computing_is_refused(hollow_model: Path) -> None:
    mapping = mixed(hollow_model, "wanderer", hand_off={"reserve": "before_prompt", "overlap": "by_chunk"})
    config = config_from_mapping(mapping, registry=registry())
    services = engine_services(config, registry(), {})
    controller = _dry_controller(config, services, {"default": {"default": ModelFacts(lambda size, fraction: 40)}})
    with pytest.raises(
        ConfigError, match=r"hand_off\.overlap: the engine sends KV when its prompt is computed .got by_chunk"
    ):
        check_transfers(controller, config.backend.settings)


class Stays(EngineConfig):
    can_move_kv = False
