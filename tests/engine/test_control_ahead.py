"""Steps that are begun before they are decided: the same decisions and the same tokens, whether foreseen rightly or not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.fake_runner import FakeRunner, SteppedWorld, expected_output
from vajra_py import LLM, SamplingParams
from vajra_py.config import config_from_mapping
from vajra_py.engine.compute import LookaheadStep, RunnerOptions, StepInput
from vajra_py.engine.worker import ReplicaKey, Worker
from vajra_py.experiment.runs.backend import Backend, Run
from vajra_py.experiment.runs.engined import EngineRun
from vajra_py.experiment.runs.replay import replay
from vajra_py.experiment.runs.run import run_experiment

POLICIES: list[Any] = [
    {"policy": "fixed_chunk", "params": {"chunk_size": 48, "preemption": "swap"}},
    {"policy": "fixed_chunk", "params": {"chunk_size": 20}},
    "vllm_v1",
    "nano_vllm",
    "orca",
]
CACHES: list[dict[str, Any]] = [{"enabled": True}, {"enabled": True, "reuse_order": "fifo"}, {"enabled": False}]
FILES = ("requests.parquet", "decisions.parquet", "outputs.jsonl.gz", "inputs.jsonl.gz")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a tokenizer."""
    pytest.importorskip("transformers")
    from vajra_py.engine.tiny import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def experiment(model: Path, number: int, look_ahead: bool) -> dict[str, Any]:
    """Little memory, shared prompts, ends that nobody knew of, and clients that leave."""
    sharing = {"count": 2, "tokens": {"type": "constant", "value": 24}}
    return {
        "version": 1,
        "seed": number,
        "num_replicas": 2,
        "scheduling": {
            "request_prioritizer": "fcfs",
            "replicaset_scheduler": "pull" if number % 2 else "round_robin",
            "replica_scheduler": POLICIES[number % len(POLICIES)],
        },
        "replica": {
            "max_batch_size": 6,
            "memory": {
                "block_size": 4,
                "num_blocks": 60,
                "host_blocks": 24,
                "reservation": "incremental",
                "watermark_fraction": 0.0,
                "prefix_cache": CACHES[number % len(CACHES)],
            },
        },
        "workload": {
            "type": "sessions",
            "arrivals": {"type": "poisson", "rate": 20.0},
            "num_sessions": 10,
            "turns": {"type": "uniform", "min": 1, "max": 3},
            "first_turn_tokens": {"type": "uniform", "min": 1, "max": 40},
            "turn_tokens": {"type": "uniform", "min": 1, "max": 20},
            "output_tokens": {"type": "uniform", "min": 1, "max": 60},
            "think_time_s": {"type": "uniform", "min": 0, "max": 0.04},
            "system_prompts": sharing,
            "max_prompt_tokens": 120,
            "max_total_tokens": 180,
        },
        "backend": {
            "engine": {
                "model": str(model),
                "random_weights": True,
                "time_scale": 0.2,
                "look_ahead": look_ahead,
                "sampling": {"ignore_eos": number % 2 == 0},
            }
        },
    }


def backend(run: Run, told: Counter[str]) -> Backend:
    """Fake runners, on which no time passes, and clients that now and then take a request back; counts what is told ahead."""
    stream = np.random.default_rng(run.config.seed)
    world = SteppedWorld(stream, mean_step_s=0.002)

    def worker(key: ReplicaKey, options: RunnerOptions) -> Worker:
        made = world.worker(key, options)
        submit = made.submit

        def noted(work: StepInput | LookaheadStep) -> None:
            if isinstance(work, LookaheadStep):
                told["begun, with chunks besides"] += bool(work.begun and work.step.chunks)
                told["needs a block"] += work.ahead is not None and bool(work.ahead.growing)
            submit(work)

        made.submit = noted  # type: ignore[method-assign]
        return made

    made = EngineRun(run, make_worker=worker, make_clock=world.clock)

    def leave() -> None:
        if made.loop is not None and stream.random() < 0.01:
            alive = [request.request_id for request, _ in made.loop.alive()]
            if alive:
                made.loop.abort(alive[int(stream.integers(len(alive)))])

    world.on_read = leave
    return made


def test_decisions_and_tokens_are_those_without_looking_ahead(hollow_model: Path, tmp_path: Path) -> None:
    num_begun = num_wasted = num_dropped = num_preempted = 0
    told: Counter[str] = Counter()
    for number in range(15):
        folders = [tmp_path / f"{number}-{word}" for word in ("ahead", "plain")]
        runs = [
            run_experiment(
                config_from_mapping(experiment(hollow_model, number, look_ahead)),
                folder=folder,
                backend=lambda run: backend(run, told),
            )
            for look_ahead, folder in zip((True, False), folders, strict=True)
        ]
        for name in FILES:
            one, other = (folder / name for folder in folders)
            assert one.read_bytes() == other.read_bytes(), f"{name} of experiment {number}"
        facts, plain = (run.manifest["engine"] for run in runs)
        assert plain["steps_begun_ahead"] == plain["steps_wasted"] == plain["rows_dropped_ahead"] == 0
        num_begun += facts["steps_begun_ahead"]
        num_wasted += facts["steps_wasted"]
        num_dropped += facts["rows_dropped_ahead"]
        num_preempted += sum(runs[0].requests().column("num_preemptions").to_pylist())
    assert replay(tmp_path / "0-ahead").is_equal
    assert num_begun > 500
    assert num_dropped > 50
    assert 0 < num_wasted < num_begun // 20  # a row that ends or is preempted costs that row, not the step
    assert num_preempted > 10
    assert min(told["begun, with chunks besides"], told["needs a block"]) > 50, told


def num_begun_ahead(llm: LLM) -> int:
    assert llm.engine is not None
    return sum(one.ahead.num_used for one in llm.engine.replicas.values() if one.ahead)


@pytest.mark.parametrize("workers", ["in_process", "process"])
def test_wherever_it_computes(hollow_model: Path, workers: str) -> None:
    engine = {"random_weights": True, "look_ahead": True, "workers": workers}
    config = {"replica": {"max_model_len": 200, "memory": {"num_blocks": 60}}, "backend": {"engine": engine}}
    prompts = [[index, 2, 3] for index in range(6)]
    with LLM(hollow_model, config, load=FakeRunner) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))
        assert num_begun_ahead(llm) > 0
    assert [output.token_ids for output in outputs] == [expected_output(prompt, 40) for prompt in prompts]


@pytest.mark.slow
def test_a_real_model_puts_out_the_same(tiny_model: Path) -> None:
    every = [
        SamplingParams(max_tokens=20, temperature=0.0),
        SamplingParams(max_tokens=30, temperature=1.0, seed=3),
        SamplingParams(max_tokens=25, temperature=0.8, top_p=0.9, min_tokens=9),
        SamplingParams(max_tokens=12, temperature=0.0, stop=("e",)),
        SamplingParams(max_tokens=14, temperature=0.0, frequency_penalty=0.5),
        SamplingParams(max_tokens=22, temperature=0.0, logprobs=1),
    ]
    prompts = ["Once upon a time", "The river", "A", "In the morning", "He said", "They"] * 3
    found = []
    for look_ahead in (True, False):
        replica = {"max_batch_size": 4, "max_model_len": 128, "memory": {"num_blocks": 40, "block_size": 8}}
        with LLM(tiny_model, {"replica": replica, "backend": {"engine": {"look_ahead": look_ahead}}}) as llm:
            outputs = llm.generate(prompts, every * 3)
            assert (num_begun_ahead(llm) > 0) == look_ahead, "else a run is compared with its like"
            found.append([(output.token_ids, output.text, output.finish_reason) for output in outputs])
    assert found[0] == found[1]
