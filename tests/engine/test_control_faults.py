"""One request never harms another: what fails by itself ends by itself, with an error that names it."""

from __future__ import annotations

import asyncio
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
    runner_that_dies_on_long_prompts,
)
from vajra_py import LLM, AsyncLLM, SamplingParams
from vajra_py.config import config_from_mapping
from vajra_py.engine.compute import RunnerOptions, StepInput, StepOutput
from vajra_py.engine.worker import ReplicaKey
from vajra_py.experiment.runs.backend import Backend, Run
from vajra_py.experiment.runs.engined import EngineRun
from vajra_py.experiment.runs.replay import replay
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.runtime.records.json_lines import read_rows

POISON = 77
DEADLY = 501
BATCHERS: list[Any] = [
    {"policy": "fixed_chunk", "params": {"chunk_size": 48, "preemption": "swap"}},
    "vllm_v1",
    {"policy": "nano_vllm_rs", "params": {"preemption": True}},
]


class Poisonable(FakeRunner):
    """Rows that would give a token divisible by 23 give none; chunks of prompts that hold a deadly token are not computed."""

    def run(self, step: StepInput) -> StepOutput:
        output = super().run(step)
        faults = {slot: "its logits are poisoned" for slot, token in by_slot(output) if token % 23 == 0}
        faults |= {chunk.slot: "its logits are poisoned" for chunk in step.chunks if DEADLY in chunk.token_ids}
        return replace(output, faults=faults)


def by_slot(output: StepOutput) -> list[tuple[int, int]]:
    return list(zip(output.slots, output.token_ids, strict=True))


def experiment(batcher: Any, look_ahead: bool) -> dict[str, Any]:
    return {
        "version": 1,
        "seed": 11,
        "num_replicas": 2,
        "scheduling": {
            "request_prioritizer": "fcfs",
            "replicaset_scheduler": "least_loaded",
            "replica_scheduler": batcher,
        },
        "replica": {
            "max_batch_size": 6,
            "max_model_len": 200,
            "memory": {"block_size": 8, "num_blocks": 40, "host_blocks": 24, "reservation": "incremental"},
        },
        "workload": {
            "type": "sessions",
            "arrivals": {"type": "poisson", "rate": 60.0},
            "num_sessions": 24,
            "turns": {"type": "uniform", "min": 1, "max": 3},
            "first_turn_tokens": {"type": "uniform", "min": 1, "max": 60},
            "turn_tokens": {"type": "uniform", "min": 1, "max": 12},
            "output_tokens": {"type": "uniform", "min": 1, "max": 24},
            "system_prompts": {"count": 2, "tokens": {"type": "constant", "value": 20}},
            "max_total_tokens": 180,
        },
        "backend": {"engine": {"random_weights": True, "look_ahead": look_ahead, "time_scale": 0.2}},
    }


@pytest.mark.parametrize("look_ahead", [False, True], ids=["plain", "look-ahead"])
@pytest.mark.parametrize("number", range(len(BATCHERS)))
def test_a_row_that_fails_ends_its_request_alone_and_replays(
    number: int, look_ahead: bool, hollow_model: Path, tmp_path: Path
) -> None:
    mapping = experiment(BATCHERS[number], look_ahead)
    mapping["backend"]["engine"]["model"] = str(hollow_model)
    made: list[EngineRun] = []

    def backend(run: Run) -> Backend:
        runner: Callable[[ReplicaKey, RunnerOptions], Any] = lambda key, options: Poisonable(options)  # noqa: E731
        world = SteppedWorld(np.random.default_rng(number), mean_step_s=0.002, runner=runner)
        made.append(EngineRun(run, make_worker=world.worker, make_clock=world.clock))
        return made[0]

    run = run_experiment(config_from_mapping(mapping), folder=tmp_path / "run", backend=backend)
    rows = run.requests().to_pylist()
    details = {row["request_id"]: (row["reason"], row["detail"]) for row in rows}
    counts = {row["request_id"]: row["num_output_tokens"] for row in rows}
    specs = {spec.request_id: spec for spec in made[0]._run.workload}
    reasons: list[str] = []
    for row in read_rows(tmp_path / "run" / "outputs.jsonl.gz"):
        name = row["request_id"]
        prompt = made[0]._prompts.prompt(specs[name]).token_ids
        whole = expected_output(prompt, specs[name].num_output_tokens)
        lethal = next((place for place, token in enumerate(whole) if token % 23 == 0), None)
        if DEADLY in prompt:
            lethal = 0
        elif lethal is not None and DEADLY in whole[:lethal]:
            lethal = whole.index(DEADLY) + 1
        assert row["token_ids"] == whole[:lethal]
        assert counts[name] == len(row["token_ids"])
        assert row["reason"] == ("stop" if lethal is None else "failed")
        if lethal is not None:
            assert details[name] == ("failed", f"{name}: its logits are poisoned")
        reasons.append(row["reason"])
    assert reasons.count("failed") >= 3
    assert reasons.count("stop") >= 10
    made[0].controller.check_conservation()
    for replica in made[0].controller.replicas():
        assert replica.memory.free_blocks == replica.memory.num_blocks
    report = replay(tmp_path / "run")
    assert report.difference is None


@pytest.fixture(scope="module")
def poisoned_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with one token whose embedding is not a number: whoever reads it has no logits from then on."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from vajra_py.engine.compute.model.loading import quiet
    from vajra_py.engine.tiny import write_tiny_model

    folder = write_tiny_model(tmp_path_factory.mktemp("poisoned") / "model", "qwen3")
    with quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        model.model.embed_tokens.weight.data[POISON] = float("nan")
        model.save_pretrained(folder)
    return folder


PROMPTS: list[list[int]] = [[*range(100, 140), index, 200 + index] for index in range(8)]
HOSTILE: list[list[int]] = [[POISON], [*range(100, 140), POISON, 7], [*PROMPTS[0], POISON], [POISON] * 30]
SIZES = {"replica": {"max_model_len": 256, "max_batch_size": 32, "memory": {"block_size": 8, "num_blocks": 90}}}
KINDS = (
    SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0.9, top_p=0.9, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=1.0, repetition_penalty=1.2, logprobs=2, seed=4, ignore_eos=True),
)


@pytest.mark.parametrize("engine", [{}, {"fused": False}, {"workers": "process"}], ids=["fused", "modules", "process"])
def test_a_poisonous_prompt_among_innocents_fails_alone(poisoned_model: Path, engine: dict[str, Any]) -> None:
    config = {**SIZES, "backend": {"engine": {"num_threads": 1, **engine}}}
    with LLM(poisoned_model, config) as llm:
        kinds = [KINDS[index % 3] for index in range(len(PROMPTS))]
        expected = [output.token_ids for output in llm.generate(PROMPTS, kinds)]
        for _ in range(2):  # the second time over a prefix cache that has seen the first
            mixed = [one for pair in zip(PROMPTS, HOSTILE * 2, strict=True) for one in pair]
            outputs = llm.generate(mixed, [kind for kind in kinds for _ in range(2)])
            assert [output.token_ids for output in outputs[::2]] == expected
            assert {output.finish_reason for output in outputs[::2]} == {"length"}
            for output in outputs[1::2]:
                assert (output.finish_reason, output.token_ids) == ("failed", [])
                assert "its logits are not finite numbers" in output.detail
                assert output.request_id in output.detail


def test_a_request_that_fails_leaves_nothing_in_the_prefix_cache(poisoned_model: Path) -> None:
    config = {**SIZES, "backend": {"engine": {"num_threads": 1}}}
    with LLM(poisoned_model, config) as llm:
        poisonous = [POISON] * 30
        for _ in range(2):
            (failed,) = llm.generate([poisonous], KINDS[0])
            assert (failed.finish_reason, failed.metrics.num_cached_tokens) == ("failed", 0)
        first, second = (llm.generate([PROMPTS[0]], KINDS[0])[0] for _ in range(2))
        assert (first.metrics.num_cached_tokens, second.metrics.num_cached_tokens) == (0, 40)


def test_streams_beside_a_poisonous_one_go_on(poisoned_model: Path) -> None:
    config = {**SIZES, "num_replicas": 2, "backend": {"engine": {"num_threads": 1}}}

    async def serve() -> None:
        async with AsyncLLM(poisoned_model, config) as llm:
            wanted = [await llm.generate(prompt, KINDS[1]) for prompt in PROMPTS]
            jobs = [*(llm.generate(prompt, KINDS[1]) for prompt in PROMPTS)]
            jobs += [llm.generate(prompt, KINDS[0]) for prompt in HOSTILE]
            found = await asyncio.gather(*jobs)
            assert [one.token_ids for one in found[: len(PROMPTS)]] == [one.token_ids for one in wanted]
            assert {one.finish_reason for one in found[len(PROMPTS) :]} == {"failed"}

    asyncio.run(serve())


class Deadly(FakeRunner):
    """The replica is lost with any step that computes a deadly token of a prompt."""

    def run(self, step: StepInput) -> StepOutput:
        if any(DEADLY in chunk.token_ids for chunk in step.chunks):
            raise MemoryError("killed")
        return super().run(step)


@pytest.mark.parametrize("number", range(len(BATCHERS)))
def test_requests_that_kill_replicas_are_found_and_cost_innocents_nothing(
    number: int, hollow_model: Path, tmp_path: Path
) -> None:
    mapping = experiment(BATCHERS[number], look_ahead=True)
    recovery = {"max_reruns": 1, "max_restarts": 100}  # an innocent that is blamed twice would be lost
    mapping["backend"]["engine"] |= {"model": str(hollow_model), "recovery": recovery}
    mapping["workload"]["num_sessions"] = 60
    made: list[EngineRun] = []

    def backend(run: Run) -> Backend:
        runner: Callable[[ReplicaKey, RunnerOptions], Any] = lambda key, options: Deadly(options)  # noqa: E731
        world = SteppedWorld(np.random.default_rng(number), mean_step_s=0.002, runner=runner)
        backend = EngineRun(run, make_worker=world.worker, make_clock=world.clock, make_restarter=world.restarter)
        made.append(backend)
        return backend

    run_experiment(config_from_mapping(mapping), folder=tmp_path / "run", backend=backend)
    specs = {spec.request_id: spec for spec in made[0]._run.workload}
    num_deadly = num_innocent = 0
    for row in read_rows(tmp_path / "run" / "outputs.jsonl.gz"):
        name = row["request_id"]
        prompt = made[0]._prompts.prompt(specs[name]).token_ids
        whole = expected_output(prompt, specs[name].num_output_tokens)
        if DEADLY in prompt:
            num_deadly += 1
            assert row["reason"] == "failed"
            assert row["detail"].endswith("MemoryError: killed; it had run again 1 times")
        elif DEADLY not in whole[:-1]:  # its own output may kill when it is computed again
            num_innocent += 1
            assert (row["reason"], row["token_ids"]) == ("stop", whole), row["detail"]
    assert num_deadly >= 2
    assert num_innocent >= 60
    made[0].controller.check_conservation()
    report = replay(tmp_path / "run")
    assert report.difference is None


def test_a_request_that_kills_its_process_leaves_the_others_their_tokens(hollow_model: Path) -> None:
    """Real processes: a chunk of more than 100 tokens kills the process that computes it."""
    config = {
        "num_replicas": 2,
        "replica": {"max_model_len": 250, "max_batch_size": 16, "memory": {"block_size": 8, "num_blocks": 200}},
        "backend": {
            "engine": {
                "random_weights": True,
                "workers": "process",
                "recovery": {"max_reruns": 1, "max_restarts": 20, "backoff_s": 0.0},
            }
        },
    }
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    innocent = [[number, 2, 3] for number in range(12)]

    async def serve() -> None:
        async with AsyncLLM(hollow_model, config, load=runner_that_dies_on_long_prompts) as llm:
            jobs = [llm.generate(prompt, params) for prompt in [*innocent[:6], [5] * 120, *innocent[6:]]]
            found = await asyncio.gather(*jobs)
            assert found.pop(6).finish_reason == "failed"
            assert [one.token_ids for one in found] == [expected_output(prompt, 20) for prompt in innocent]

    asyncio.run(serve())
