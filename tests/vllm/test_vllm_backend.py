"""`backend: {vllm: …}`: experiments on a real vLLM, whose decisions the simulator takes again."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.plugins import built_in
from tests.vllm.shared import BLOCK_SIZE, MAX_STEP_TOKENS, SharedWorkers, run_on, settings
from vajra_py.contract import Layer
from vajra_py.engine.compute import StepInput
from vajra_py.errors import ConfigError, ExecutorError
from vajra_py.experiment.runs.replay import replay
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.plugins import build_registry
from vajra_py.runtime.kv import BlockCopy, CopyDirection
from vajra_py.vllm.loading import load_vllm
from vajra_py.vllm.options import VllmOptions

ROOT = Path(__file__).parents[2]
LATENCY = {"type": "affine", "base_s": 0.004, "per_token_s": 1e-4, "per_prefill_pair_s": 1e-7}
CLASSES = [
    {"name": "gold", "ttft_slo_s": 0.05, "deadline_s": 0.4, "priority": -1},
    {"name": "iron", "share": 2.0, "expires_after_s": 30.0},
]
WORKLOAD = {
    "type": "synthetic",
    "arrivals": {"type": "poisson", "rate": 200.0},
    "num_requests": 10,
    "slo_classes": CLASSES,
    "prompt_tokens": {"type": "uniform", "min": 20, "max": 180},
    "output_tokens": {"type": "uniform", "min": 1, "max": 40},
}
SESSIONS = {
    "type": "sessions",
    "arrivals": {"type": "poisson", "rate": 100.0},
    "num_sessions": 6,
    "turns": {"type": "uniform", "min": 1, "max": 3},
    "first_turn_tokens": {"type": "uniform", "min": 1, "max": 60},
    "turn_tokens": {"type": "uniform", "min": 1, "max": 30},
    "output_tokens": {"type": "uniform", "min": 1, "max": 20},
    "think_time_s": {"type": "uniform", "min": 0, "max": 0.02},
    "system_prompts": {"count": 2, "tokens": {"type": "constant", "value": 70}},
    "slo_classes": CLASSES,
    "max_prompt_tokens": 190,
    "max_total_tokens": 230,
}
PARAMS: dict[str, Any] = {
    "dynamic_chunk": {"target_batch_time_s": 0.015},
    "fixed_chunk": {"chunk_size": 48},
    "space_sharing": {"target_batch_time_s": 0.02, "long_seq_kv_cache_len_threshold": 64},
}
PREEMPTS_NEVER = {"chameleon", "orca", "past_future"}
"""Policies that set memory aside at admission."""
DROPS = {"scorpio"}
"""Policies that reject requests that cannot meet their objectives."""
MOVES_KV = {"ascendra", "cascadeinfer", "dlora_migration", "dynaserve", "llumnix", "splitwise_mixed_pool"}


@pytest.fixture(scope="module")
def workers(tiny_model: str) -> Iterator[SharedWorkers]:
    made = SharedWorkers(tiny_model)
    yield made
    made.shut_down()


def layers(prioritizer: str, chooser: str, batcher: str) -> dict[str, Any]:
    chosen = {"policy": batcher, "params": PARAMS.get(batcher, {})}
    return {"request_prioritizer": prioritizer, "replicaset_scheduler": chooser, "replica_scheduler": chosen}


def what_happened(run: RunData) -> Counter[str]:
    happened: Counter[str] = Counter()
    for request in run.requests().to_pylist():
        happened[request["reason"]] += 1
        happened["preempted"] += request["num_preemptions"]
        happened["cached"] += request["num_cached_tokens"]
    return happened


CHOOSERS = [one for one in built_in(Layer.REPLICASET_SCHEDULER) if one not in MOVES_KV]
BATCHERS = built_in(Layer.REPLICA_SCHEDULER)


def two_prioritizers(chooser: str, batcher: str) -> list[str]:
    """Two of all, in turn, so that every pair of policies of two layers is tried."""
    every = ["edf", "lrs"] if batcher == "space_sharing" else built_in(Layer.REQUEST_PRIORITIZER)  # it needs slack
    first = CHOOSERS.index(chooser) + BATCHERS.index(batcher)
    return [every[first % len(every)], every[(first + 1) % len(every)]]


ALWAYS = (
    *("fixed_chunk", "dynamic_chunk", "space_sharing", "preemptive"),
    *("vllm_v1", "nano_vllm", "nano_vllm_rs", "minivllm", "orca"),
)
"""Vajra's replica schedulers and those of systems. Each runs with a third of the replicaset schedulers, which meet three of
them; all pairs of both layers take minutes."""
PAIRS = [
    *(pytest.param(batcher, CHOOSERS[number % 3 :: 3], id=batcher) for number, batcher in enumerate(ALWAYS)),
    *(pytest.param(batcher, CHOOSERS, id=f"{batcher}-all", marks=pytest.mark.long) for batcher in BATCHERS),
]


@pytest.mark.parametrize(("batcher", "choosers"), PAIRS)
def test_every_pair_is_replayed(
    batcher: str, choosers: list[str], workers: SharedWorkers, tiny_model: str, tmp_path: Path
) -> None:
    happened: Counter[str] = Counter()
    for chooser in choosers:
        for number, prioritizer in enumerate(two_prioritizers(chooser, batcher)):
            workload = SESSIONS if number == 1 else WORKLOAD
            scheduling = layers(prioritizer, chooser, batcher)
            mapping = settings(tiny_model, scheduling, workload, seed=number, vllm={"latency": LATENCY})
            before = workers.num_steps
            run = run_on(workers, mapping, tmp_path / f"{chooser} {prioritizer}")
            report = replay(run.path)
            assert report.difference is None, (chooser, prioritizer)
            assert 10 < report.num_steps == run.steps().num_rows <= workers.num_steps - before
            ended = what_happened(run)
            assert ended["stop"] + ended["length"] > 0, (chooser, prioritizer)
            num_ended = sum(ended[one] for one in ("stop", "length", "expired", "rejected"))
            assert num_ended == run.requests().num_rows, (chooser, prioritizer)
            happened += ended
    assert happened["rejected"] == 0 or batcher in DROPS
    assert happened["aborted"] == happened["failed"] == 0
    assert happened["preempted"] > 0 or batcher in PREEMPTS_NEVER
    assert happened["cached"] > 0


def test_policies_of_a_plug_in_are_replayed(
    workers: SharedWorkers, tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "plugin_template" / "src"))
    entry = metadata.EntryPoint("example", "vajra_example_policies", "vajra")
    registry = build_registry([*metadata.entry_points(group="vajra"), entry])
    scheduling = {
        "request_prioritizer": {"policy": "example_aging_shortest", "params": {"forgiven_tokens": 64}},
        "replicaset_scheduler": "example_prefix_affinity",
        "replica_scheduler": {
            "policy": "example_capped_chunk",
            "params": {"chunk_tokens": 96, "capped_chunk_tokens": 32},
        },
    }
    for seed, workload in enumerate((WORKLOAD, SESSIONS)):
        mapping = settings(tiny_model, scheduling, workload, seed=seed)
        run = run_on(workers, mapping, tmp_path / str(seed), registry)
        assert what_happened(run)["stop"] == run.requests().num_rows
        assert replay(tmp_path / str(seed), registry).is_equal
    sys.modules.pop("vajra_example_policies", None)


def test_a_run_records_what_every_run_does(workers: SharedWorkers, tiny_model: str, tmp_path: Path) -> None:
    mapping = settings(tiny_model, layers("fcfs", "round_robin", "vllm_v1"), WORKLOAD)
    run = run_on(workers, mapping, tmp_path / "run")
    found = {one.name for one in (tmp_path / "run").iterdir()}
    assert found >= {"config.yaml", "manifest.json", "decisions.parquet", "inputs.jsonl.gz", "outputs.jsonl.gz"}
    assert run.manifest["status"] == "finished"
    assert "real" in str(run.summary.data["step_times"])
    assert run.summary.value("overall.ttft_s.p50") > 0


def test_steps_above_vllms_buffers_are_computed_in_parts(
    workers: SharedWorkers, tiny_model: str, tmp_path: Path
) -> None:
    """A step of more tokens than vLLM was told of is one step of the experiment."""
    workload = {
        "type": "synthetic",
        "arrivals": {"type": "poisson", "rate": 1e6},
        "num_requests": 5,
        "prompt_tokens": {"type": "constant", "value": 75},
        "output_tokens": {"type": "constant", "value": 5},
    }
    mapping = settings(tiny_model, layers("fcfs", "round_robin", "minivllm"), workload)
    before = workers.num_steps
    run = run_on(workers, mapping, tmp_path / "run")
    steps = run.steps()
    assert max(steps.column("prefill_tokens").to_pylist()) > MAX_STEP_TOKENS
    assert workers.num_steps - before > steps.num_rows
    assert replay(tmp_path / "run").is_equal


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "cuda"}, r"backend\.vllm\.device: the installed vLLM is built for a CPU \(got cuda\)"),
        ({"engine_args": {"data_parallel_size": 2}}, "--data-parallel-size"),
        ({"engine_args": {"quantization": "nonsense"}}, r"backend\.vllm: vLLM does not take these settings"),
        ({"max_model_len": 1 << 20}, r"backend\.vllm: vLLM does not take these settings"),
    ],
)
def test_what_vllm_does_not_take_is_refused_before_its_model_is_loaded(
    options: dict[str, Any], said: str, tiny_model: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load_vllm(VllmOptions(model=tiny_model, block_size=BLOCK_SIZE, **options))
    assert str(caught.value).count("\n") == 0


def test_a_run_that_is_told_to_swap_is_refused(workers: SharedWorkers, tiny_model: str) -> None:
    runner = workers.load(VllmOptions(model=tiny_model, block_size=BLOCK_SIZE, max_batch_size=4))
    with pytest.raises(ExecutorError, match="host memory"):
        runner.allocate(4, 2)
    with pytest.raises(ExecutorError, match="Preemption recomputes"):
        runner.run(StepInput(copies=[BlockCopy(0, 0, CopyDirection.TO_HOST)]))


@pytest.mark.parametrize("chooser", sorted(MOVES_KV))
def test_a_scheduler_that_moves_kv_is_refused(
    chooser: str, workers: SharedWorkers, tiny_model: str, tmp_path: Path
) -> None:
    mapping = settings(tiny_model, layers("edf", chooser, "vllm_v1"), WORKLOAD, vllm={"latency": LATENCY})
    with pytest.raises(ConfigError, match=f"{chooser} moves requests with their KV"):
        run_on(workers, mapping, tmp_path / "run")
