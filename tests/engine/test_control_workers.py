"""What becomes of requests when a worker fails, dies, or the run is interrupted, and does a process compute what a thread does?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.fake_runner import (
    FakeRunner,
    SteppedWorld,
    expected_output,
    runner_that_cannot_load,
    runner_that_dies_on_long_prompts,
)
from vajra_py import LLM, SamplingParams
from vajra_py.config import config_from_mapping
from vajra_py.engine.compute.interface import ModelFacts, RunnerOptions
from vajra_py.engine.config import SLOTS_PER_BATCH_ENTRY
from vajra_py.errors import ConfigError, ExecutorError, RunInterrupted
from vajra_py.experiment.runs.backend import Backend, Run
from vajra_py.experiment.runs.engined import EngineRun
from vajra_py.experiment.runs.replay import replay
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.metrics.runs.run_data import RunData

PROMPTS = [[index, 2, 3] for index in range(6)]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def settings(num_replicas: int = 2, **engine: Any) -> dict[str, Any]:
    return {
        "num_replicas": num_replicas,
        "replica": {"max_model_len": 200, "memory": {"block_size": 8, "num_blocks": 60}},
        "backend": {"engine": {"random_weights": True, **engine}},
    }


def experiment(model: Path, chooser: str = "round_robin", **sections: Any) -> dict[str, Any]:
    mapping = {
        "version": 1,
        **settings(model=str(model)),
        "scheduling": {
            "request_prioritizer": "fcfs",
            "replicaset_scheduler": chooser,
            "replica_scheduler": "fixed_chunk",
        },
        "workload": {
            "type": "synthetic",
            "arrivals": {"type": "poisson", "rate": 60.0},
            "num_requests": 30,
            "prompt_tokens": {"type": "uniform", "min": 1, "max": 60},
            "output_tokens": {"type": "uniform", "min": 4, "max": 40},
        },
        **sections,
    }
    return mapping


Hook = Callable[[EngineRun], None]


def stepped(fail_at: dict[int, int], hook: Hook | None = None) -> Callable[[Run], Backend]:
    """A backend whose replicas fail at the steps given; `hook` is called whenever the clock is read."""

    def make(run: Run) -> Backend:
        world = SteppedWorld(
            np.random.default_rng(run.config.seed),
            mean_step_s=0.002,
            runner=lambda key, options: FakeRunner(options, fail_at.get(key[1])),
        )
        backend = EngineRun(run, make_worker=world.worker, make_clock=world.clock)
        if hook is not None:
            world.on_read = lambda: hook(backend)
        return backend

    return make


@pytest.mark.parametrize("chooser", ["round_robin", "pull", "least_loaded"])
def test_a_replica_that_fails_takes_its_requests_with_it_and_no_others(
    chooser: str, hollow_model: Path, tmp_path: Path
) -> None:
    config = config_from_mapping(experiment(hollow_model, chooser))
    run = run_experiment(config, folder=tmp_path / "run", backend=stepped({1: 12}))
    requests = run.requests().to_pylist()
    failed = [request for request in requests if request["reason"] == "failed"]
    assert failed
    assert {request["replica_id"] for request in failed} == {1}
    for request in failed:
        assert request["detail"] == "replica 1 of default failed: step: out of memory on fake"
    assert sum(request["reason"] == "stop" for request in requests) == 30 - len(failed) > 15
    assert run.manifest["engine"]["replicas_lost"] == 1
    later = [one for one in requests if one["arrived_at"] > failed[0]["ended_at"]]
    assert later
    assert {request["replica_id"] for request in later} == {0}
    assert replay(tmp_path / "run").is_equal


def test_a_run_whose_last_replica_fails_keeps_what_it_had(hollow_model: Path, tmp_path: Path) -> None:
    config = config_from_mapping(experiment(hollow_model, "pull"))
    with pytest.raises(
        ExecutorError,
        match=r"every replica failed; the last: replica \d of default failed: step: out of memory on fake",
    ):
        run_experiment(config, folder=tmp_path / "run", backend=stepped({0: 20, 1: 6}))
    run = RunData.load(tmp_path / "run")
    reasons = run.requests().column("reason").to_pylist()
    assert len(reasons) == 30
    assert set(reasons) == {"stop", "failed", "rejected"}
    assert run.manifest["status"] == "failed"
    assert replay(tmp_path / "run").is_equal


def test_an_interrupted_run_can_be_replayed(hollow_model: Path, tmp_path: Path) -> None:
    def interrupt(backend: EngineRun) -> None:
        if backend.position()[1] > 40:
            raise KeyboardInterrupt

    config = config_from_mapping(experiment(hollow_model))
    with pytest.raises(RunInterrupted):
        run_experiment(config, folder=tmp_path / "run", backend=stepped({}, interrupt))
    run = RunData.load(tmp_path / "run")
    assert run.manifest["status"] == "interrupted"
    assert 0 < run.steps().num_rows < 100
    assert replay(tmp_path / "run").is_equal


# Threads and processes


def test_threads_of_one_process(hollow_model: Path) -> None:
    with LLM(hollow_model, settings(3), load=FakeRunner) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == [expected_output(prompt, 12) for prompt in PROMPTS]


def test_a_process_that_dies_is_reported_and_the_others_go_on(hollow_model: Path) -> None:
    with LLM(hollow_model, settings(2, workers="process"), load=runner_that_dies_on_long_prompts) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        assert [output.token_ids for output in outputs] == [expected_output(prompt, 12) for prompt in PROMPTS]
        killed, survivor = llm.generate([list(range(150)), [1, 2]], GREEDY)
        assert killed.finish_reason == "failed"
        assert "was killed by signal 9" in killed.detail
        assert survivor.token_ids == expected_output([1, 2], 12)
        again = llm.generate(PROMPTS, GREEDY)
        assert {output.finish_reason for output in again} == {"length"}


def test_an_error_while_loading_comes_from_the_process_as_it_is(hollow_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"model: is too large\. Allowed: smaller ones"):
        LLM(hollow_model, settings(1, workers="process"), load=runner_that_cannot_load)


def test_ranks_of_one_replica_are_told_the_same(hollow_model: Path) -> None:
    with LLM(hollow_model, settings(1, tensor_parallel=2), load=FakeRunner) as llm:
        outputs = llm.generate(PROMPTS[:2], GREEDY)
    assert [output.token_ids for output in outputs] == [expected_output(prompt, 12) for prompt in PROMPTS[:2]]


def test_slots_that_run_short_are_lent_out_again(hollow_model: Path, tmp_path: Path) -> None:
    mapping = experiment(hollow_model, num_replicas=1)
    mapping["replica"] = {"max_batch_size": 2, "max_model_len": 200, "memory": {"block_size": 8, "num_blocks": 200}}
    mapping["scheduling"]["replica_scheduler"] = (
        "nano_vllm"  # prompts first: more are resident than a step has room for
    )
    run = run_experiment(config_from_mapping(mapping), folder=tmp_path / "run", backend=stepped({}))
    assert max(run.steps().column("num_running").to_pylist()) > 2 * SLOTS_PER_BATCH_ENTRY
    assert set(run.requests().column("reason").to_pylist()) == {"stop"}
    assert replay(tmp_path / "run").is_equal


@pytest.mark.parametrize(
    ("devices", "blocks"),
    [
        ([("a",), ("b",), ("c",)], 900),
        ([("a",), ("a",), ("b",)], 450),
        ([("a", "b"), ("c", "a"), ("d",)], 450),
        ([("a",), ("a",), ("a",)], 300),
    ],
)
def test_only_replicas_on_the_same_device_share_its_memory(
    devices: list[tuple[str, ...]], blocks: int, hollow_model: Path, tmp_path: Path
) -> None:
    class OnDevice(FakeRunner):
        def __init__(self, options: RunnerOptions, names: tuple[str, ...]) -> None:
            super().__init__(options)
            self.names = names

        @property
        def facts(self) -> ModelFacts:
            return replace(super().facts, device="a GPU", device_ids=self.names)

        def profile_num_blocks(self, memory_fraction: float) -> int:
            return round(1000 * memory_fraction)

    def backend(run: Run) -> Backend:
        world = SteppedWorld(np.random.default_rng(0), runner=lambda key, options: OnDevice(options, devices[key[1]]))
        made.append(EngineRun(run, make_worker=world.worker, make_clock=world.clock))
        return made[0]

    made: list[EngineRun] = []
    mapping = experiment(hollow_model) | {"num_replicas": 3}
    mapping["replica"] = {"max_model_len": 200, "memory": {"block_size": 8, "memory_fraction": 0.9}}
    run_experiment(config_from_mapping(mapping), folder=tmp_path / "run", backend=backend)
    assert {one.memory.num_blocks for one in made[0].controller.replicas()} == {blocks}
