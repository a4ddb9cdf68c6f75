"""Do greedy tokens equal those of transformers' own `generate`, token for token, whatever the policies make of the schedule?

`pytest tests/engine/test_control_exactness.py` runs 104 fuzzed schedules over four families of models, and 208 with
`VAJRA_FUZZ_SCHEDULES=52`: the engine's own loop, executor and runner, under built-in policies and presets drawn at random, on little memory, with requests taken back.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.fake_runner import SteppedWorld
from tests.engine.oracle import Oracle
from vajra_py.config import config_from_mapping
from vajra_py.engine.compute import ModelRunner, RunnerOptions, StepInput, StepOutput
from vajra_py.engine.prompts import PromptMaker
from vajra_py.engine.worker import ReplicaKey
from vajra_py.experiment.runs.backend import Backend, Run
from vajra_py.experiment.runs.engined import EngineRun
from vajra_py.experiment.runs.run import load_workload, run_experiment
from vajra_py.plugins import load_registry
from vajra_py.runtime.records.decision_reader import read_decisions
from vajra_py.runtime.records.json_lines import read_rows

FAMILIES = ["llama", "qwen3", "gemma2", "mixtral"]
NUM_SCHEDULES = int(os.environ.get("VAJRA_FUZZ_SCHEDULES", "26"))
NUM_WORKLOADS = 3
BLOCK_SIZE = 8
MAX_LEN = 192
MAX_BLOCKS = 96
HOST_BLOCKS = 32
VOCAB_SIZE = 1024

PRIORITIZERS = ["fcfs", "edf", "lrs", "priority"]
CHOOSERS = ["round_robin", "pull", "least_loaded", "power_of_two", "random", "prefix_affinity"]
TARGET = {"target_batch_time_s": 0.008}


def batcher(rng: np.random.Generator) -> Any:
    """A replica scheduler of any kind, chunks of any size."""
    chunks = {"chunk_size": int(rng.integers(3, 90))}
    gives_way = {"preemption": str(rng.choice(["swap", "swap", "recompute"]))}
    choices: list[Any] = [
        {"policy": "fixed_chunk", "params": {**chunks, **gives_way}},
        {"policy": "dynamic_chunk", "params": {**TARGET, **gives_way}},
        {"policy": "space_sharing", "params": {**TARGET, "long_seq_kv_cache_len_threshold": 40}},
        "vllm_v1",
        "nano_vllm",
        "minivllm",
        "orca",
        {"policy": "nano_vllm_rs", "params": {"preemption": True}},
    ]
    return choices[int(rng.integers(len(choices)))]


ONE_POOL = sorted(name for name, offer in load_registry().presets.items() if not offer.spec.replicaset)
"""Presets whose requests stay where they are; tests of pools have the others."""


def schedule(model: str, number: int) -> dict[str, Any]:
    """An experiment with policies, sizes and one of a few workloads drawn at random."""
    rng = np.random.default_rng(number)
    memory = {
        "block_size": BLOCK_SIZE,
        "num_blocks": int(rng.integers(18, 28)),
        "host_blocks": int(rng.integers(20, HOST_BLOCKS + 1)),
        "reservation": "incremental",
        "watermark_fraction": 0.0,
    }
    latency = {"type": "affine", "base_s": 0.004, "per_token_s": 1e-4}
    mapping: dict[str, Any] = {
        "version": 1,
        "seed": number % NUM_WORKLOADS,
        "num_replicas": int(rng.integers(1, 3)),
        "replica": {"max_batch_size": int(rng.integers(2, 9)), "max_model_len": MAX_LEN, "memory": memory},
        "workload": {
            "type": "sessions",
            "arrivals": {"type": "poisson", "rate": 60.0},
            "num_sessions": 6,
            "turns": {"type": "uniform", "min": 1, "max": 3},
            "first_turn_tokens": {"type": "uniform", "min": 1, "max": 90},
            "turn_tokens": {"type": "uniform", "min": 1, "max": 12},
            "output_tokens": {"type": "uniform", "min": 1, "max": 14},
            "system_prompts": {"count": 2, "tokens": {"type": "constant", "value": 20}},
            "max_total_tokens": 136,
        },
        "backend": {"engine": {"model": model, "num_threads": 1, "latency": latency, "time_scale": 0.2}},
    }
    if rng.random() < 0.25:
        return {**mapping, "preset": ONE_POOL[int(rng.integers(len(ONE_POOL)))]}
    chosen = {"request_prioritizer": PRIORITIZERS, "replicaset_scheduler": CHOOSERS}
    drawn = {layer: names[int(rng.integers(len(names)))] for layer, names in chosen.items()}
    scheduler = batcher(rng)
    if "space_sharing" in str(scheduler) and drawn["request_prioritizer"] not in ("lrs", "edf"):
        drawn["request_prioritizer"] = "lrs"  # it needs slack
    return {**mapping, "scheduling": {**drawn, "replica_scheduler": scheduler}}


class LoadedOnce:
    """A runner that serves one engine after the other: what an earlier one left in its slots is freed."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._used: set[int] = set()
        self._left: list[int] = []
        self.facts = runner.facts

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        assert num_blocks <= MAX_BLOCKS
        assert num_host_blocks <= HOST_BLOCKS
        self._left, self._used = sorted(self._used), set()

    def run(self, step: StepInput) -> StepOutput:
        self._used = (self._used - set(step.freed)) | {row.slot for row in step.new}
        left, self._left = self._left, []
        return self._runner.run(replace(step, freed=[*left, *step.freed]))

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


@dataclass(frozen=True)
class Family:
    """A small model of one family, loaded on two replicas and by transformers."""

    numbers: range
    """Its schedules."""
    path: str
    runners: Mapping[int, LoadedOnce]
    oracle: Oracle


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    from transformers import AutoModelForCausalLM

    from vajra_py.engine.compute import load_runner
    from vajra_py.engine.compute.model.loading import quiet
    from vajra_py.engine.tiny import write_tiny_model

    path = str(write_tiny_model(tmp_path_factory.mktemp("exact") / request.param, request.param))
    options = RunnerOptions(path, block_size=BLOCK_SIZE, max_model_len=MAX_LEN, max_requests=16, num_threads=1)
    runners = {}
    for replica_id in range(2):
        runner = load_runner(options)
        runner.allocate(MAX_BLOCKS, HOST_BLOCKS)
        runners[replica_id] = LoadedOnce(runner)
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    first = FAMILIES.index(request.param) * NUM_SCHEDULES
    return Family(range(first, first + NUM_SCHEDULES), path, runners, Oracle(model))


def run_schedule(family: Family, number: int, folder: Path) -> Counter[str]:
    """One schedule on the engine, every output compared; what happened in it."""
    config = config_from_mapping(schedule(family.path, number))

    def make(run: Run) -> Backend:
        stream = np.random.default_rng(number)
        runner: Callable[[ReplicaKey, RunnerOptions], Any] = lambda key, options: family.runners[key[1]]  # noqa: E731
        world = SteppedWorld(stream, mean_step_s=0.002, runner=runner)
        backend = EngineRun(run, make_worker=world.worker, make_clock=world.clock)

        def take_back() -> None:
            if backend.loop is not None and stream.random() < 0.008:
                alive = [request.request_id for request, _ in backend.loop.alive()]
                if alive:
                    backend.loop.abort(alive[int(stream.integers(len(alive)))])

        world.on_read = take_back
        return backend

    run = run_experiment(config, folder=folder, backend=make)
    happened: Counter[str] = Counter()
    outputs = {row["request_id"]: row for row in read_rows(folder / "outputs.jsonl.gz")}
    answers = {name: row["token_ids"] for name, row in outputs.items()}
    maker = PromptMaker(config.seed, VOCAB_SIZE, answers)
    specs = {spec.request_id: spec for spec in load_workload(config)}
    for name, row in outputs.items():
        spec = specs[name]
        prompt = list(maker.prompt(spec).token_ids)
        expected = family.oracle.tokens(prompt, spec.num_output_tokens)
        got = row["token_ids"]
        assert got == expected[: len(got)], f"schedule {number}, request {name}"
        assert row["reason"] in ("stop", "aborted"), f"schedule {number}, request {name}: {row['reason']}"
        assert row["reason"] == "aborted" or len(got) == len(expected)
        happened[row["reason"]] += 1
    for request in run.requests().to_pylist():
        happened["cached"] += request["num_cached_tokens"] > 0
    for step in read_decisions(folder / "decisions.parquet"):
        happened.update(mode for _, mode in step["preempted"])
        happened["resumed"] += any(kind == "resumed" for *_, kind in step["chunks"])
        happened["together"] += len(step["chunks"]) > 2
    return happened


@pytest.mark.slow
def test_greedy_tokens_equal_generate_under_every_policy(family: Family, tmp_path: Path) -> None:
    happened: Counter[str] = Counter()
    for number in family.numbers:
        happened += run_schedule(family, number, tmp_path / str(number))
    wanted = ("stop", "aborted", "cached", "swap", "recompute", "resumed", "together")
    assert min(happened[what] for what in wanted) >= 5, f"the schedules were too tame to show anything ({happened})"


def test_the_schedules_draw_every_policy_and_preset() -> None:
    drawn = [schedule("model", number) for number in range(len(FAMILIES) * NUM_SCHEDULES)]
    assert len(drawn) >= 100
    assert {mapping["preset"] for mapping in drawn if "preset" in mapping} == set(ONE_POOL)
    for layer, at_least in (("request_prioritizer", 4), ("replicaset_scheduler", 6), ("replica_scheduler", 8)):
        chosen = [mapping["scheduling"][layer] for mapping in drawn if "scheduling" in mapping]
        assert len({one if isinstance(one, str) else one["policy"] for one in chosen}) == at_least


def test_wrong_tokens_show(family: Family, tmp_path: Path) -> None:
    """The comparison can fail: answers of another model are noticed."""
    family.oracle.model.lm_head.weight.data.mul_(-1.0)
    known = dict(family.oracle.known)
    family.oracle.known.clear()
    try:
        with pytest.raises(AssertionError, match=r"schedule 0, request"):
            run_schedule(family, 0, tmp_path / "run")
    finally:
        family.oracle.model.lm_head.weight.data.mul_(-1.0)
        family.oracle.known.update(known)
