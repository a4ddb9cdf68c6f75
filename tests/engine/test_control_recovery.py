"""Do requests outlive the replicas that they run on, with the tokens that they would have had, and can it all be replayed?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.fake_runner import FakeRunner, SteppedRestarter, SteppedWorld, expected_output
from vajra_py.config import PolicyChoice, config_from_mapping
from vajra_py.contract import Layer
from vajra_py.engine.compute import RunnerOptions
from vajra_py.engine.worker import ReplicaKey
from vajra_py.errors import ExecutorError
from vajra_py.experiment.runs.backend import Backend, Run
from vajra_py.experiment.runs.engined import EngineRun
from vajra_py.experiment.runs.replay import replay
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.runtime.records.input_log import Failure, PolicyChange, Restart, read_inputs
from vajra_py.runtime.records.json_lines import read_rows

BATCHERS: list[Any] = [
    {"policy": "fixed_chunk", "params": {"chunk_size": 48, "preemption": "swap"}},
    {"policy": "fixed_chunk", "params": {"chunk_size": 20}},
    "vllm_v1",
    "nano_vllm",
]
CHOOSERS = ["round_robin", "pull", "least_loaded", "power_of_two", "random", "prefix_affinity"]


def experiment(model: Path, chooser: str, batcher: Any, recovery: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "seed": 5,
        "num_replicas": 2,
        "scheduling": {
            "request_prioritizer": "fcfs",
            "replicaset_scheduler": chooser,
            "replica_scheduler": batcher,
        },
        "replica": {
            "max_batch_size": 6,
            "max_model_len": 200,
            "memory": {"block_size": 8, "num_blocks": 40, "host_blocks": 24, "reservation": "incremental"},
        },
        "workload": {
            "type": "synthetic",
            "arrivals": {"type": "poisson", "rate": 60.0},
            "num_requests": 30,
            "prompt_tokens": {"type": "uniform", "min": 1, "max": 100},
            "output_tokens": {"type": "uniform", "min": 4, "max": 60},
        },
        "backend": {"engine": {"model": str(model), "random_weights": True, "recovery": recovery}},
        **sections,
    }


@dataclass
class Lives:
    """Runners that fail after so many steps, one life after another; the last one for ever."""

    lives: dict[int, list[int]]
    made: list[EngineRun] = field(default_factory=list)

    def runner(self, key: ReplicaKey, options: RunnerOptions) -> FakeRunner:
        left = self.lives.get(key[1], [])
        return FakeRunner(options, left.pop(0) if left else None)

    def backend(self, run: Run) -> Backend:
        world = SteppedWorld(np.random.default_rng(run.config.seed), mean_step_s=0.002, runner=self.runner)
        made = EngineRun(run, make_worker=world.worker, make_clock=world.clock, make_restarter=world.restarter)
        self.made.append(made)
        return made


def run_it(mapping: dict[str, Any], lives: dict[int, list[int]], folder: Path) -> tuple[RunData, EngineRun]:
    world = Lives(lives)
    run = run_experiment(config_from_mapping(mapping), folder=folder, backend=world.backend)
    return run, world.made[0]


def check_outputs(made: EngineRun, folder: Path) -> Counter[str]:
    """Every output is what the request would have got alone on a replica that never fails. Returns how many ended for each reason."""
    prompts, specs = made._prompts, {spec.request_id: spec for spec in made._run.workload}
    rows = list(read_rows(folder / "outputs.jsonl.gz"))
    assert len(rows) == len(specs)
    for row in rows:
        spec = specs[row["request_id"]]
        expected = expected_output(prompts.prompt(spec).token_ids, spec.num_output_tokens)
        assert row["token_ids"] == expected[: len(row["token_ids"])]
        assert row["reason"] != "stop" or row["token_ids"] == expected
    return Counter(row["reason"] for row in rows)


def check_nothing_is_left(made: EngineRun) -> None:
    made.controller.check_conservation()
    assert made.controller.num_alive == 0
    for replica in made.controller.replicas():
        assert replica.memory.free_blocks == replica.memory.num_blocks
        assert not replica.lifecycle.held


@pytest.mark.parametrize("chooser", CHOOSERS)
@pytest.mark.parametrize("number", range(len(BATCHERS)))
def test_requests_of_a_lost_replica_run_on_elsewhere(
    chooser: str, number: int, hollow_model: Path, tmp_path: Path
) -> None:
    recovery = {"max_reruns": 5, "max_restarts": 4}
    mapping = experiment(hollow_model, chooser, BATCHERS[number], recovery)
    run, made = run_it(mapping, {0: [17, 45], 1: [30]}, tmp_path / "run")
    requests = run.requests().to_pylist()
    assert {row["reason"] for row in requests} == {"stop"}
    check_outputs(made, tmp_path / "run")
    check_nothing_is_left(made)
    inputs = read_inputs(tmp_path / "run" / "inputs.jsonl.gz")
    num_lost = sum(isinstance(one, Failure) for one in inputs)
    assert num_lost >= 3
    assert sum(isinstance(one, Restart) for one in inputs) == num_lost
    assert any(row["num_preemptions"] for row in requests)
    report = replay(tmp_path / "run")
    assert report.difference is None


def test_requests_wait_for_the_only_replica_to_come_back(hollow_model: Path, tmp_path: Path) -> None:
    mapping = experiment(
        hollow_model, "round_robin", "fixed_chunk", {"max_reruns": 9, "max_restarts": 3}, num_replicas=1
    )
    run, made = run_it(mapping, {0: [20, 20, 20]}, tmp_path / "run")
    reasons = run.requests().column("reason").to_pylist()
    assert set(reasons) <= {"stop", "rejected"}  # requests that arrive while no replica is up are rejected
    assert reasons.count("stop") > 10
    check_outputs(made, tmp_path / "run")
    check_nothing_is_left(made)
    assert replay(tmp_path / "run").is_equal


def test_a_worker_lost_in_its_first_step_has_computed_nothing(hollow_model: Path, tmp_path: Path) -> None:
    recovery = {"max_reruns": 9, "max_restarts": 9}
    mapping = experiment(hollow_model, "round_robin", "fixed_chunk", recovery, num_replicas=1)
    _, made = run_it(mapping, {0: [20, 1, 1, 6]}, tmp_path / "run")
    assert made.loop is not None
    assert isinstance(made.loop.restarter, SteppedRestarter)
    assert made.loop.restarter.losses == [True, False, False, True]


def test_losses_that_are_nobodys_fault_use_up_nobodys_reruns(hollow_model: Path, tmp_path: Path) -> None:
    mapping = experiment(hollow_model, "pull", "fixed_chunk", {"max_reruns": 2, "max_restarts": 50})
    run, made = run_it(mapping, {0: [6] * 12, 1: [6] * 12}, tmp_path / "run")
    rows = run.requests().to_pylist()
    assert {row["reason"] for row in rows} <= {"stop", "failed", "rejected"}
    failed = [row for row in rows if row["reason"] == "failed"]
    assert all("no replica of default came up again" in row["detail"] for row in failed)
    assert max(row["num_preemptions"] for row in rows) > 2
    check_outputs(made, tmp_path / "run")
    check_nothing_is_left(made)
    assert replay(tmp_path / "run").is_equal


def test_what_waits_for_a_replica_that_never_comes_ends_in_time(hollow_model: Path, tmp_path: Path) -> None:
    mapping = experiment(hollow_model, "pull", "fixed_chunk", {"max_reruns": 9, "max_restarts": 1, "wait_s": 0.01})
    with pytest.raises(ExecutorError, match="every replica failed"):
        run_it(mapping, {0: [10, 1], 1: [10, 1]}, tmp_path / "run")
    run = RunData.load(tmp_path / "run")
    rows = run.requests().to_pylist()
    assert len(rows) == 30
    assert {row["reason"] for row in rows} <= {"stop", "failed", "rejected"}
    assert all(row["detail"] for row in rows if row["reason"] != "stop")
    assert replay(tmp_path / "run").is_equal


def test_aborts_and_expiries_while_replicas_come_and_go(hollow_model: Path, tmp_path: Path) -> None:
    mapping = experiment(hollow_model, "pull", BATCHERS[0], {"max_reruns": 9, "max_restarts": 50})
    mapping["workload"]["slo_classes"] = [{"name": "brief", "expires_after_s": 0.05}, {"name": "patient"}]
    stream = np.random.default_rng(3)

    def hook(made: EngineRun) -> Callable[[], None]:
        def come_and_go() -> None:
            if made.loop is not None and stream.random() < 0.05:
                alive = [request.request_id for request, _ in made.loop.alive()]
                if alive:
                    made.loop.abort(alive[int(stream.integers(len(alive)))])

        return come_and_go

    def backend(run: Run) -> Backend:
        lives = Lives({0: [9] * 6, 1: [14] * 6})
        world = SteppedWorld(np.random.default_rng(1), mean_step_s=0.002, runner=lives.runner)
        made = EngineRun(run, make_worker=world.worker, make_clock=world.clock, make_restarter=world.restarter)
        world.on_read = hook(made)
        backends.append(made)
        return made

    backends: list[EngineRun] = []
    run = run_experiment(config_from_mapping(mapping), folder=tmp_path / "run", backend=backend)
    reasons = set(run.requests().column("reason").to_pylist())
    assert {"stop", "aborted", "expired"} <= reasons
    check_nothing_is_left(backends[0])
    assert replay(tmp_path / "run").is_equal


OTHERS: list[tuple[Layer, Any]] = [
    *[(Layer.REQUEST_PRIORITIZER, one) for one in ("priority", "fcfs")],
    *[(Layer.REPLICASET_SCHEDULER, one) for one in (*CHOOSERS, "pull")],
    *[(Layer.REPLICA_SCHEDULER, one) for one in (*BATCHERS, "orca", {"policy": "nano_vllm_rs", "params": {"preemption": True}})],
]  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_losses_swaps_and_aborts_together(seed: int, hollow_model: Path, tmp_path: Path) -> None:
    stream = np.random.default_rng(seed)
    mapping = experiment(hollow_model, "round_robin", BATCHERS[0], {"max_reruns": 50, "max_restarts": 50}, seed=seed)
    mapping |= {"num_replicas": 3}
    changes = [OTHERS[index] for index in stream.permutation(len(OTHERS))]
    backends: list[EngineRun] = []
    answers: list[object] = []

    def backend(run: Run) -> Backend:
        def runner(key: ReplicaKey, options: RunnerOptions) -> FakeRunner:
            return FakeRunner(options, int(stream.integers(1, 60)) if stream.random() < 0.7 else None)

        world = SteppedWorld(np.random.default_rng(seed), mean_step_s=0.002, runner=runner)
        made = EngineRun(run, make_worker=world.worker, make_clock=world.clock, make_restarter=world.restarter)

        def now_and_then() -> None:
            if made.loop is None:
                return
            if changes and stream.random() < 0.05:
                layer, given = changes.pop(0)
                change = PolicyChange("default", layer, PolicyChoice.model_validate(given))
                made.loop.swap_policy(change, answers.append)
            alive = [request.request_id for request, _ in made.loop.alive()]
            if alive and stream.random() < 0.01:
                made.loop.abort(alive[int(stream.integers(len(alive)))])

        world.on_read = now_and_then
        backends.append(made)
        return made

    run_experiment(config_from_mapping(mapping), folder=tmp_path / "run", backend=backend)
    assert len(answers) == len(OTHERS)
    check_outputs(backends[0], tmp_path / "run")
    check_nothing_is_left(backends[0])
    assert replay(tmp_path / "run").is_equal
