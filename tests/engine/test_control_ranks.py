"""Pipeline stages, KV-parallel groups and their combinations give the tokens of transformers' `generate`, and are replayed.

Fuzzed schedules through the engine's own loop on processes that exchange tensors over gloo: little memory, chunks of any
size, both kinds of preemption, requests taken back.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing import active_children, get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.oracle import Oracle
from vajra_py.config import config_from_mapping
from vajra_py.engine.clock import WallClock
from vajra_py.engine.compute import ModelRunner, RunnerOptions, StepInput
from vajra_py.engine.processes import ProcessWorker
from vajra_py.engine.prompts import PromptMaker
from vajra_py.engine.worker import Deliver, Finished, LeftFirstStage, ReplicaKey
from vajra_py.experiment.runs.backend import Backend, Run
from vajra_py.experiment.runs.engined import EngineRun
from vajra_py.experiment.runs.replay import replay
from vajra_py.experiment.runs.run import load_workload, run_experiment
from vajra_py.runtime.records.decision_reader import read_decisions
from vajra_py.runtime.records.input_log import Failure, Restart, read_inputs
from vajra_py.runtime.records.json_lines import read_rows

pytest.importorskip("torch")
BLOCK_SIZE = 8
MAX_LEN = 176
MAX_BLOCKS = 80
HOST_BLOCKS = 32
VOCAB_SIZE = 1024
GROUP_TOKENS = 72
ABORT_RATE = 0.002

Split = tuple[int, int, int]
"""KV-parallel groups, pipeline stages, tensor-parallel ranks."""


def load_warmed(options: RunnerOptions) -> ModelRunner:
    """A rank that warms up with the others as on a GPU, where this compiles kernels: these are left out."""
    import torch

    from vajra_py.engine.compute.step import warm_up
    from vajra_py.engine.compute.step.runner import TorchRunner

    runner = TorchRunner.load(options)
    allocate = runner.allocate
    vars(warm_up).update(_attention=lambda *_: 0, sample_tokens=lambda *_: None)

    def allocate_and_warm_up(num_blocks: int, num_host_blocks: int = 0) -> None:
        allocate(num_blocks, num_host_blocks)
        assert runner._memory is not None
        with torch.inference_mode():
            warm_up.warm_up(runner._model, runner._memory, options, runner._ranks)

    runner.allocate = allocate_and_warm_up  # type: ignore[method-assign]
    return runner


class KeptWorker:
    """The processes of one replica, which serve one engine after another; what an earlier one left in slots is freed."""

    def __init__(self, worker: ProcessWorker) -> None:
        self._worker = worker
        self._used: set[int] = set()
        self._left: list[int] = []
        self._deliver: Deliver = lambda finished: None
        self.steps: list[StepInput] = []
        """What it was given since the last engine started."""
        worker.wait_loaded()
        self.facts = worker.facts
        worker.start(MAX_BLOCKS, HOST_BLOCKS, self._pass_on)

    def _pass_on(self, news: Finished | LeftFirstStage) -> None:
        self._deliver(news)

    def wait_loaded(self) -> None:
        pass

    def profile_num_blocks(self, memory_fraction: float) -> int:
        return MAX_BLOCKS

    def start(self, num_blocks: int, num_host_blocks: int, deliver: Deliver) -> None:
        assert num_blocks <= MAX_BLOCKS
        assert num_host_blocks <= HOST_BLOCKS
        self._left, self._used, self._deliver, self.steps = sorted(self._used), set(), deliver, []

    def submit(self, step: Any) -> None:
        assert isinstance(step, StepInput)
        self._used = (self._used - set(step.freed)) | {row.slot for row in step.new}
        self.steps.append(step)
        left, self._left = self._left, []
        self._worker.submit(replace(step, freed=[*left, *step.freed]))

    def close(self) -> None:
        pass

    def discard(self) -> None:
        pass

    def end(self) -> None:
        self._worker.close()


class TakesBack(WallClock):
    """The wall's clock, whose readings are the places where clients take requests back."""

    on_read: Callable[[], None] | None = None

    def now(self) -> int:
        if self.on_read is not None:
            self.on_read()
        return super().now()


@dataclass(frozen=True)
class Ranks:
    """A small model divided among the processes of one replica, and the same model whole."""

    split: Split
    path: str
    worker: KeptWorker
    oracle: Oracle


def name_of(split: Split) -> str:
    return "{} groups x {} stages x {} ranks".format(*split)


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServerContext]:
    """Starts processes that have imported torch already, and find this module."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["vajra_py.engine.compute.step.runner"])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2])
        yield context


@pytest.fixture(scope="module")
def divided(
    tmp_path_factory: pytest.TempPathFactory, forks: ForkServerContext
) -> Iterator[Callable[[Split, str], Ranks]]:
    from transformers import AutoModelForCausalLM

    from vajra_py.engine.compute.model.loading import quiet
    from vajra_py.engine.tiny import write_tiny_model

    made: list[KeptWorker] = []

    def make(split: Split, family: str) -> Ranks:
        groups, stages, ranks = split
        path = str(write_tiny_model(tmp_path_factory.mktemp("ranks") / family, family))
        options = RunnerOptions(
            path, block_size=BLOCK_SIZE, max_model_len=MAX_LEN, max_requests=16, num_threads=1,
            tensor_parallel_size=ranks, pipeline_stages=stages, kv_groups=groups,
            kv_group_tokens=GROUP_TOKENS if groups > 1 else 0,
        )  # fmt: skip
        made.append(KeptWorker(ProcessWorker(("default", 0), options, 0, load_warmed, forks)))
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
        return Ranks(split, path, made[-1], Oracle(model))

    yield make
    for one in made:
        one.end()


def schedule(ranks: Ranks, number: int) -> dict[str, Any]:
    """An experiment with sizes, chunks and preemption drawn at random."""
    groups, stages, tensor = ranks.split
    rng = np.random.default_rng(number)
    batchers = [
        {"policy": "fixed_chunk", "params": {"chunk_size": int(rng.integers(5, 60)), "preemption": "swap"}},
        {"policy": "fixed_chunk", "params": {"chunk_size": int(rng.integers(5, 60)), "preemption": "recompute"}},
        {"policy": "dynamic_chunk", "params": {"target_batch_time_s": 0.008}},
        {"policy": "space_sharing", "params": {"target_batch_time_s": 0.008, "long_seq_kv_cache_len_threshold": 40}},
    ]
    scheduler = batchers[number % len(batchers)]
    replica: dict[str, Any] = {
        "max_batch_size": int(rng.integers(3, 9)),
        "max_model_len": MAX_LEN,
        "pipeline_stages": stages,
        "memory": {
            "block_size": BLOCK_SIZE,
            "num_blocks": int(rng.integers(22, 27)),
            "host_blocks": HOST_BLOCKS,
            "reservation": "incremental",
            "watermark_fraction": 0.0,
            "prefix_cache": {"enabled": groups == 1},
        },
    }
    if groups > 1:
        replica["kv_parallel"] = {"groups": groups, "group_tokens": GROUP_TOKENS, "busy_tokens": 24}
    return {
        "version": 1,
        "seed": number % 2,
        "replica": replica,
        "scheduling": {
            "request_prioritizer": "lrs" if scheduler["policy"] == "space_sharing" else ["fcfs", "lrs"][number % 2],
            "replicaset_scheduler": "round_robin",
            "replica_scheduler": scheduler,
        },
        "workload": {
            "type": "sessions",
            "arrivals": {"type": "poisson", "rate": 200.0},
            "num_sessions": 8,
            "turns": {"type": "uniform", "min": 1, "max": 2},
            "first_turn_tokens": {"type": "uniform", "min": 1, "max": 110},
            "turn_tokens": {"type": "uniform", "min": 1, "max": 12},
            "output_tokens": {"type": "uniform", "min": 1, "max": 20},
            "system_prompts": {"count": 1, "tokens": {"type": "constant", "value": 8}},
            "max_total_tokens": 140,
        },
        "backend": {
            "engine": {
                "model": ranks.path,
                "num_threads": 1,
                "tensor_parallel": tensor,
                "latency": {"type": "affine", "base_s": 0.004, "per_token_s": 1e-4, "num_stages": stages},
            }
        },
    }


def run_schedule(ranks: Ranks, number: int, folder: Path) -> Counter[str]:
    """One schedule, every output compared and the log replayed; what happened in it."""
    config = config_from_mapping(schedule(ranks, number))

    def make(run: Run) -> Backend:
        stream, clock = np.random.default_rng(number), TakesBack()

        def worker(key: ReplicaKey, options: RunnerOptions) -> Any:
            assert (options.kv_groups, options.pipeline_stages, options.tensor_parallel_size) == ranks.split
            return ranks.worker

        backend = EngineRun(run, make_worker=worker, make_clock=lambda: clock)

        def take_back() -> None:
            if backend.loop is not None and stream.random() < ABORT_RATE:
                alive = [request.request_id for request, _ in backend.loop.alive()]
                if alive:
                    backend.loop.abort(alive[int(stream.integers(len(alive)))])

        clock.on_read = take_back
        return backend

    run_experiment(config, folder=folder, backend=make)
    happened = compare(ranks, {spec.request_id: spec for spec in load_workload(config)}, config.seed, folder, number)
    for step in read_decisions(folder / "decisions.parquet"):
        happened.update(mode for _, mode in step["preempted"])
        happened["together"] += len(step["chunks"]) > 2
    report = replay(folder)
    assert report.is_equal, f"schedule {number}: {report.difference}"
    return happened


def compare(ranks: Ranks, specs: Mapping[str, Any], seed: int, folder: Path, number: int) -> Counter[str]:
    happened: Counter[str] = Counter()
    outputs = {row["request_id"]: row for row in read_rows(folder / "outputs.jsonl.gz")}
    maker = PromptMaker(seed, VOCAB_SIZE, {name: row["token_ids"] for name, row in outputs.items()})
    for name, row in outputs.items():
        prompt = list(maker.prompt(specs[name]).token_ids)
        expected, got = ranks.oracle.tokens(prompt, specs[name].num_output_tokens), row["token_ids"]
        assert got == expected[: len(got)], f"schedule {number}, request {name}"
        assert row["reason"] in ("stop", "aborted"), f"schedule {number}, request {name}: {row['reason']}"
        assert row["reason"] == "aborted" or len(got) == len(expected)
        happened[row["reason"]] += 1
        happened["spread"] += len(prompt) + len(got) > GROUP_TOKENS
        happened["crossed while decoding"] += len(prompt) <= GROUP_TOKENS < len(prompt) + len(got)
    return happened


def crowd(ranks: Ranks) -> dict[str, Any]:
    """Long prompts, which need both groups, among many short ones that come while they are computed."""
    settings = schedule(ranks, 3)
    settings["scheduling"]["request_prioritizer"] = "edf"
    settings["replica"]["max_batch_size"] = 12
    settings["replica"]["memory"]["num_blocks"] = MAX_BLOCKS
    params = {"target_batch_time_s": 0.016, "long_seq_kv_cache_len_threshold": 24}
    settings["scheduling"]["replica_scheduler"] = {"policy": "space_sharing", "params": params}

    def kind(count: int, rate: float, low: int, high: int) -> dict[str, Any]:
        prompts = {"type": "uniform", "min": low, "max": high}
        arrivals = {"type": "poisson", "rate": rate}
        outputs = {"type": "uniform", "min": 2, "max": 6}
        lengths = {"prompt_tokens": prompts, "output_tokens": outputs}
        return {"type": "synthetic", "num_requests": count, "arrivals": arrivals, **lengths}

    settings["workload"] = {"type": "merge", "workloads": [kind(4, 100.0, 110, 136), kind(40, 400.0, 4, 20)]}
    return settings


def test_short_requests_run_beside_a_long_prompt_on_other_groups(
    divided: Callable[[Split, str], Ranks], tmp_path: Path
) -> None:
    ranks = divided((2, 1, 1), "llama")
    folder = tmp_path / "run"
    config = config_from_mapping(crowd(ranks))
    run_experiment(config, folder=folder, backend=lambda run: EngineRun(run, make_worker=lambda *_: ranks.worker))
    specs = {spec.request_id: spec for spec in load_workload(config)}
    assert compare(ranks, specs, config.seed, folder, 0)["stop"] == len(specs)
    assert replay(folder).is_equal
    happened: Counter[str] = Counter()
    for step in ranks.worker.steps:
        prompts = [chunk for chunk in step.chunks if len(chunk.token_ids) > 1]
        long = [chunk for chunk in prompts if chunk.num_computed + len(chunk.token_ids) > 24]
        short = [chunk for chunk in prompts if chunk not in long]
        assert sum(chunk.num_computed >= 24 for chunk in long) <= 1, "a long prompt waits for another one's chunk"
        assert all(len(one.groups) == 1 for one in short)
        for one in long:
            if len(one.groups) == 1:  # the group is busy, and takes no other prompt
                happened["short prompts beside it"] += len(short)
                assert all(other.groups != one.groups for other in short)
            else:
                happened["others beside it over both groups"] += len(step.chunks) > 1
    assert happened["short prompts beside it"] >= 2, happened
    assert happened["others beside it over both groups"] >= 2, happened


def run_all(ranks: Ranks, numbers: range, folder: Path) -> Counter[str]:
    happened: Counter[str] = Counter()
    for number in numbers:
        happened += run_schedule(ranks, number, folder / str(number))
    happened["preempted"] = happened["swap"] + happened["recompute"]  # the number of each depends on the speed of steps
    assert min(happened[what] for what in ("stop", "spread", "preempted", "together")) >= 2, happened
    return happened


@pytest.mark.parametrize("split", [(1, 2, 1), (2, 1, 1), (2, 1, 2)], ids=name_of)
def test_tokens_and_decisions_are_those_of_one_process(
    split: Split, divided: Callable[[Split, str], Ranks], tmp_path: Path
) -> None:
    run_all(divided(split, "llama"), range(4), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("split", [(1, 2, 1), (2, 1, 1)], ids=name_of)
def test_a_replica_that_loses_one_of_its_processes_starts_again_and_loses_no_request(
    split: Split, divided: Callable[[Split, str], Ranks], forks: ForkServerContext, tmp_path: Path
) -> None:
    ranks = divided(split, "llama")
    settings, others = schedule(ranks, 1), set(active_children())
    settings["backend"]["engine"]["recovery"] = {"max_reruns": 3, "max_restarts": 2}
    config, killed = config_from_mapping(settings), []

    def make(run: Run) -> Backend:
        clock = TakesBack()

        def worker(key: ReplicaKey, options: RunnerOptions) -> ProcessWorker:
            return ProcessWorker(key, options, 0, context=forks)

        backend = EngineRun(run, make_worker=worker, make_clock=lambda: clock)

        def kill() -> None:
            if not killed and backend.loop is not None and backend.loop.num_steps >= 8:
                victim = next(one for one in set(active_children()) - others if one.name == "vajra-worker-0-1")
                killed.append(victim.pid)
                victim.kill()

        clock.on_read = kill
        return backend

    folder = tmp_path / "run"
    run_experiment(config, folder=folder, backend=make)
    assert len(killed) == 1
    inputs = read_inputs(folder / "inputs.jsonl.gz")
    # Reported when it ends, or by the rank that waits for it.
    assert sum(isinstance(one, Failure) for one in inputs) == 1
    assert sum(isinstance(one, Restart) for one in inputs) == 1
    specs = {spec.request_id: spec for spec in load_workload(config)}
    assert compare(ranks, specs, config.seed, folder, 1)["stop"] == len(specs)
    report = replay(folder)
    assert report.is_equal, report.difference


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
@pytest.mark.parametrize("split", [(1, 2, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)], ids=name_of)
def test_many_schedules_over_every_combination(
    split: Split, family: str, divided: Callable[[Split, str], Ranks], tmp_path: Path
) -> None:
    is_wide = "VAJRA_FUZZ_SCHEDULES" in os.environ
    if not is_wide and (family, split) != ("llama", (2, 2, 1)):
        pytest.skip("minutes for each combination: set VAJRA_FUZZ_SCHEDULES=24")
    happened = run_all(divided(split, family), range(int(os.environ.get("VAJRA_FUZZ_SCHEDULES", "6"))), tmp_path)
    assert not is_wide or min(happened[what] for what in ("aborted", "crossed while decoding")) >= 2, happened
