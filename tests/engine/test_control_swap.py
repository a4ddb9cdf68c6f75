"""Does a policy take another's place under load without a request being lost or changed, and does the simulator follow?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.fake_runner import FakeRunner, SteppedWorld, expected_output
from vajra_py import LLM, AsyncLLM, SamplingParams
from vajra_py.config import PolicyChoice, config_from_mapping
from vajra_py.contract import Layer
from vajra_py.contract.observer import PolicySwap
from vajra_py.engine.llm import llm_config
from vajra_py.engine.requests import RequestOutput
from vajra_py.errors import ConfigError, VajraError
from vajra_py.experiment.runs.backend import Backend, Run
from vajra_py.experiment.runs.engined import EngineRun
from vajra_py.experiment.runs.replay import replay
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.plugins import load_registry
from vajra_py.runtime.records.input_log import PolicyChange, Swap, read_inputs
from vajra_py.runtime.records.json_lines import read_rows
from vajra_py.runtime.serving.policy_swap import Swapped

LATENCY = {"type": "affine", "base_s": 0.004, "per_token_s": 1e-4, "per_prefill_pair_s": 1e-7, "per_swap_byte_s": 1e-7}
OTHERS: dict[Layer, list[Any]] = {
    Layer.REQUEST_PRIORITIZER: [
        *("lrs", {"policy": "edf", "params": {"min_deadline_s": 0.01}}, "priority", "vtc", "fcfs"),
        {"policy": "deficit_round_robin", "params": {"quantum": 40}},
    ],
    Layer.REPLICASET_SCHEDULER: ["pull", "least_loaded", "random", "prefix_affinity", "round_robin", "power_of_two"],
    Layer.REPLICA_SCHEDULER: [
        {"policy": "fixed_chunk", "params": {"chunk_size": 20}},
        "vllm_v1",
        {"policy": "dynamic_chunk", "params": {"target_batch_time_s": 0.008}},
        {"policy": "space_sharing", "params": {"target_batch_time_s": 0.01, "long_seq_kv_cache_len_threshold": 64}},
        {"policy": "nano_vllm_rs", "params": {"preemption": True}},
        "orca",
        {"policy": "fixed_chunk", "params": {"chunk_size": 48, "preemption": "swap"}},
    ],
}


def experiment(model: Path, seed: int = 3) -> dict[str, Any]:
    return {
        "version": 1,
        "seed": seed,
        "num_replicas": 2,
        "scheduling": {
            "request_prioritizer": "fcfs",
            "replicaset_scheduler": "round_robin",
            "replica_scheduler": {"policy": "fixed_chunk", "params": {"chunk_size": 48, "preemption": "swap"}},
        },
        "replica": {
            "max_batch_size": 6,
            "max_model_len": 200,
            "memory": {"block_size": 8, "num_blocks": 40, "host_blocks": 24, "reservation": "incremental"},
        },
        "workload": {
            "type": "synthetic",
            "arrivals": {"type": "poisson", "rate": 80.0},
            "num_requests": 40,
            "prompt_tokens": {"type": "uniform", "min": 1, "max": 100},
            "output_tokens": {"type": "uniform", "min": 4, "max": 60},
            "tenants": {"count": 5},
            "slo_classes": [{"name": "gold", "deadline_s": 0.4, "priority": -1}, {"name": "iron", "share": 2.0}],
        },
        "backend": {"engine": {"model": str(model), "random_weights": True, "latency": LATENCY, "time_scale": 0.5}},
    }


def choice_of(given: Any) -> PolicyChoice:
    return PolicyChoice.model_validate(given)


def swapping(
    changes: list[tuple[Layer, Any]], answers: list[Swapped | VajraError], made: list[EngineRun]
) -> Callable[[Run], Backend]:
    """A backend in which, every few steps, the next of these policies is put in force."""
    left = list(changes)

    def make(run: Run) -> Backend:
        world = SteppedWorld(np.random.default_rng(run.config.seed), mean_step_s=0.002)
        backend = EngineRun(run, make_worker=world.worker, make_clock=world.clock)
        made.append(backend)

        def now_and_then() -> None:
            if left and backend.loop is not None and backend.loop.num_steps >= 8 * (1 + len(changes) - len(left)):
                layer, given = left.pop(0)
                backend.loop.swap_policy(PolicyChange("default", layer, choice_of(given)), answers.append)

        world.on_read = now_and_then
        return backend

    return make


def check(made: EngineRun, run: RunData, folder: Path) -> None:
    """Every request got what it would have got alone, and nothing is left."""
    prompts, specs = made._prompts, {spec.request_id: spec for spec in made._run.workload}
    rows = list(read_rows(folder / "outputs.jsonl.gz"))
    assert len(rows) == len(specs) == run.requests().num_rows
    for row in rows:
        spec = specs[row["request_id"]]
        assert row["token_ids"] == expected_output(prompts.prompt(spec).token_ids, spec.num_output_tokens)
    made.controller.check_conservation()
    for replica in made.controller.replicas():
        assert replica.memory.free_blocks == replica.memory.num_blocks


@pytest.mark.parametrize("layer", list(Layer))
def test_every_layer_is_swapped_under_load(layer: Layer, hollow_model: Path, tmp_path: Path) -> None:
    changes = [(layer, one) for one in OTHERS[layer]]
    answers: list[Swapped | VajraError] = []
    made: list[EngineRun] = []
    backend = swapping(changes, answers, made)
    settings = experiment(hollow_model)
    settings["scheduling"]["request_prioritizer"] = "lrs"  # space_sharing needs slack
    run = run_experiment(config_from_mapping(settings), folder=tmp_path / "run", backend=backend)
    assert [one.swap.policy for one in answers if isinstance(one, Swapped)] == [
        choice_of(one).policy for _, one in changes
    ]
    assert sum(one.swap.num_requeued for one in answers if isinstance(one, Swapped)) > 10
    check(made[0], run, tmp_path / "run")
    report = replay(tmp_path / "run")
    assert report.difference is None


@pytest.mark.parametrize("seed", range(6))
def test_swaps_of_all_layers_in_any_order(seed: int, hollow_model: Path, tmp_path: Path) -> None:
    stream = np.random.default_rng(seed)
    every = [(layer, one) for layer in Layer for one in OTHERS[layer]]
    changes = [every[index] for index in stream.permutation(len(every))]
    answers: list[Swapped | VajraError] = []
    made: list[EngineRun] = []
    backend = swapping(changes, answers, made)
    config = config_from_mapping({**experiment(hollow_model, seed), "num_replicas": 4})
    run = run_experiment(config, folder=tmp_path / "run", backend=backend)
    refused = [str(one) for one in answers if not isinstance(one, Swapped)]
    assert len(answers) == len(changes) > 3 * len(refused)
    assert all("would never run request" in one or "does not predict slack" in one for one in refused)
    check(made[0], run, tmp_path / "run")
    assert replay(tmp_path / "run").is_equal


def test_a_replay_without_the_swap_is_found_out(
    hollow_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = swapping([(Layer.REPLICA_SCHEDULER, OTHERS[Layer.REPLICA_SCHEDULER][0])], [], [])
    run_experiment(config_from_mapping(experiment(hollow_model)), folder=tmp_path / "run", backend=backend)
    inputs = read_inputs(tmp_path / "run" / "inputs.jsonl.gz")
    assert sum(isinstance(one, Swap) for one in inputs) == 1
    kept = [one for one in inputs if not isinstance(one, Swap)]
    monkeypatch.setattr("vajra_py.experiment.runs.replay.read_inputs", lambda path: kept)
    report = replay(tmp_path / "run")
    assert report.difference is not None
    assert "chunks" in report.difference


def test_a_policy_that_cannot_be_changes_nothing(hollow_model: Path, tmp_path: Path) -> None:
    wrong = [
        (Layer.REQUEST_PRIORITIZER, "fcsf"),
        (Layer.REPLICA_SCHEDULER, {"policy": "fixed_chunk", "params": {"chunk_size": -1}}),
        (Layer.REPLICASET_SCHEDULER, {"policy": "pull", "params": {"by": "tokens"}}),
    ]
    answers: list[Swapped | VajraError] = []
    made: list[EngineRun] = []
    run = run_experiment(
        config_from_mapping(experiment(hollow_model)),
        folder=tmp_path / "run",
        backend=swapping(wrong, answers, made),
    )
    assert len(answers) == 3
    assert all(isinstance(one, VajraError) for one in answers)
    assert "Did you mean 'fcfs'?" in str(answers[0])
    assert not any(isinstance(one, Swap) for one in read_inputs(tmp_path / "run" / "inputs.jsonl.gz"))
    check(made[0], run, tmp_path / "run")
    config = config_from_mapping(experiment(hollow_model))
    plain = run_experiment(config, folder=tmp_path / "plain", backend=swapping([], [], []))
    assert plain.steps().equals(run.steps())  # as if no change had been requested


def test_a_scheduler_that_would_never_run_a_request_is_refused(hollow_model: Path, tmp_path: Path) -> None:
    mapping = experiment(hollow_model)
    mapping["replica"]["max_batch_tokens"] = 64
    answers: list[Swapped | VajraError] = []
    made: list[EngineRun] = []
    backend = swapping([(Layer.REPLICA_SCHEDULER, "minivllm")], answers, made)
    run = run_experiment(config_from_mapping(mapping), folder=tmp_path / "run", backend=backend)
    assert isinstance(answers[0], ConfigError)
    assert "would never run request" in str(answers[0])
    check(made[0], run, tmp_path / "run")
    assert replay(tmp_path / "run").is_equal


# From Python


SETTINGS: dict[str, Any] = {
    "replica": {"max_batch_size": 4, "max_model_len": 200, "memory": {"block_size": 8, "num_blocks": 40}},
    "backend": {"engine": {"random_weights": True}},
}
PROMPTS = [[index, 2, 3] for index in range(8)]
GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)


def test_a_program_swaps_between_two_lists(hollow_model: Path) -> None:
    with LLM(hollow_model, SETTINGS, load=FakeRunner) as llm:
        before = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
        swap = llm.swap_policy("replica_scheduler", "fixed_chunk", {"chunk_size": 7})
        assert (swap.old_policy, swap.policy, swap.params["chunk_size"]) == ("fixed_chunk", "fixed_chunk", 7)
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == before
        for layer, policy, text in (
            ("replica_scheduler", "vllm_v2", "Did you mean 'vllm_v1'"),
            ("replica", "vllm_v1", "there is no such layer"),
        ):
            with pytest.raises(ConfigError, match=text):
                llm.swap_policy(layer, policy)
        assert llm.swap_policy(Layer.REPLICA_SCHEDULER, "vllm_v1").old_params["chunk_size"] == 7


@pytest.mark.parametrize("name", load_registry().policies(Layer.REQUEST_PRIORITIZER))
def test_a_prioritizer_that_needs_nothing_else_can_be_swapped_in(name: str, hollow_model: Path) -> None:
    with LLM(hollow_model, SETTINGS, load=FakeRunner) as llm:
        try:
            llm.swap_policy("request_prioritizer", name)
        except ConfigError:
            return  # it needs programs, predictions or another replica scheduler
        assert llm.generate(PROMPTS[:1], GREEDY)[0].finish_reason == "length"


def test_a_program_swaps_while_tasks_are_served(hollow_model: Path) -> None:
    async def serve() -> tuple[list[RequestOutput], list[PolicySwap]]:
        async with AsyncLLM(hollow_model, SETTINGS, load=FakeRunner) as llm:
            tasks = [asyncio.create_task(llm.generate(prompt, GREEDY)) for prompt in PROMPTS]
            swaps = [await llm.swap_policy(layer, name) for layer, name in (
                ("request_prioritizer", "priority"),
                ("replicaset_scheduler", "pull"),
                ("replica_scheduler", "vllm_v1"),
            )]  # fmt: skip
            with pytest.raises(ConfigError, match="Did you mean 'priority'"):
                await llm.swap_policy("request_prioritizer", "prioritty")
            return [await task for task in tasks], swaps

    outputs, swaps = asyncio.run(serve())
    assert [output.token_ids for output in outputs] == [expected_output(prompt, 30) for prompt in PROMPTS]
    assert [swap.policy for swap in swaps] == ["priority", "pull", "vllm_v1"]


def test_a_configuration_of_the_wrong_kind_is_said_so(hollow_model: Path) -> None:
    config = config_from_mapping(experiment(hollow_model))
    with pytest.raises(ConfigError, match=r"config: is neither a mapping nor a file \(ExperimentConfig\)\."):
        llm_config(hollow_model, config)  # type: ignore[arg-type]
