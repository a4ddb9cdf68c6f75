"""Equal decisions on the engine and in its replay by the simulator, and the notice when they differ."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.engine.fake_runner import SteppedWorld, expected_output
from vajra_policies.fixed_chunk import FixedChunk
from vajra_py.config import config_from_mapping, dump_effective
from vajra_py.contract import Layer
from vajra_py.engine.compute import RunnerOptions
from vajra_py.engine.worker import ReplicaKey
from vajra_py.errors import RunError
from vajra_py.experiment.runs.backend import Backend, Run
from vajra_py.experiment.runs.engined import EngineRun
from vajra_py.experiment.runs.replay import _compare_violations, replay
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.plugins import build_registry, load_registry
from vajra_py.runtime.records.decision_reader import read_decisions
from vajra_py.runtime.records.input_log import PolicyViolation
from vajra_py.runtime.records.json_lines import read_rows
from vajra_py.runtime.records.retention_log import RETENTION_FILE, read_retention
from vajra_py.workload import PromptContent, RequestSpec, Workload, write_jsonl
from vajra_py.workload.request import follows_of

LATENCY = {"type": "affine", "base_s": 0.004, "per_token_s": 1e-4, "per_prefill_pair_s": 1e-7, "per_swap_byte_s": 1e-7}
CLASSES = [
    {"name": "gold", "ttft_slo_s": 0.05, "deadline_s": 0.4, "priority": -1, "expires_after_s": 0.4},
    {"name": "iron", "share": 2.0},
]
SESSIONS = {
    "type": "sessions",
    "arrivals": {"type": "poisson", "rate": 40.0},
    "num_sessions": 8,
    "turns": {"type": "uniform", "min": 1, "max": 4},
    "first_turn_tokens": {"type": "uniform", "min": 1, "max": 60},
    "turn_tokens": {"type": "uniform", "min": 1, "max": 30},
    "output_tokens": {"type": "uniform", "min": 1, "max": 30},
    "think_time_s": {"type": "uniform", "min": 0, "max": 0.04},
    "system_prompts": {"count": 2, "tokens": {"type": "constant", "value": 24}},
    "slo_classes": CLASSES,
    "max_prompt_tokens": 150,
    "max_total_tokens": 190,
}
SINGLES = {
    "type": "synthetic",
    "arrivals": {"type": "poisson", "rate": 60.0},
    "num_requests": 24,
    "slo_classes": CLASSES,
    "prompt_tokens": {"type": "uniform", "min": 1, "max": 140},
    "output_tokens": {"type": "uniform", "min": 1, "max": 40},
}


def settings(model: Path, scheduling: Any, workload: Any = SINGLES, **sections: Any) -> dict[str, Any]:
    replica = {
        "max_batch_size": 6,
        "memory": {
            "block_size": 8,
            "num_blocks": 34,
            "host_blocks": 24,
            "reservation": "incremental",
            "watermark_fraction": 0.0,
        },
        **sections.pop("replica", {}),
    }
    engine = {
        "model": str(model),
        "random_weights": True,
        "latency": LATENCY,
        "time_scale": 0.2,
        **sections.pop("engine", {}),
    }
    return {
        "version": 1,
        "seed": 11,
        "num_replicas": 2,
        "scheduling": scheduling,
        "replica": replica,
        "workload": workload,
        "backend": {"engine": engine},
        **sections,
    }


def layers(prioritizer: Any, chooser: Any, batcher: Any) -> dict[str, Any]:
    return {"request_prioritizer": prioritizer, "replicaset_scheduler": chooser, "replica_scheduler": batcher}


def on_fake_runners(
    aborts: bool = True,
    abort_rate: float = 0.02,
    runner: Callable[[ReplicaKey, RunnerOptions], Any] | None = None,
    made: list[EngineRun] | None = None,
) -> Callable[[Run], Backend]:
    """A backend in which no time passes, and whose clients now and then take a request back."""

    def make(run: Run) -> Backend:
        stream = np.random.default_rng(run.config.seed)
        world = SteppedWorld(stream, mean_step_s=0.002, runner=runner)
        backend = EngineRun(run, make_worker=world.worker, make_clock=world.clock)

        def come_and_go() -> None:
            if backend.loop is not None and stream.random() < abort_rate:
                alive = [request.request_id for request, _ in backend.loop.alive()]
                if alive:
                    backend.loop.abort(alive[int(stream.integers(len(alive)))])

        if aborts:
            world.on_read = come_and_go
        if made is not None:
            made.append(backend)
        return backend

    return make


def run_it(mapping: Mapping[str, Any], folder: Path, **options: Any) -> RunData:
    return run_experiment(config_from_mapping(mapping), folder=folder, backend=on_fake_runners(**options))


PRIORITIZERS: list[Any] = [
    *("fcfs", {"policy": "edf", "params": {"min_deadline_s": 0.01}}, "lars", "priority"),
    *("vtc", "least_counter_first", "deficit_round_robin", "sjf", "srpt", "trail", "hrrn", "qoserve"),
    *(
        "plas",
        "atlas",
        "lpm",
        "preflow",
        "residual_sjf",
        "justitia",
        "continuum",
        "jitserve",
        "andes",
        "equinox",
        "parrot",
    ),
    "kairos",
    {"policy": "qlm", "params": {"default_slo_s": 0.1, "group_requests": 2}},
    "lrs",
    {"policy": "dlpm", "params": {"quantum": 60.0}},
    {"policy": "least_attained_service", "params": {"half_life_s": 0.05}},
    {"policy": "ltr", "params": {"starvation_s": 0.05, "boost_steps": 4}},
    {"policy": "skip_join_mlfq", "params": {"promotion_steps": 20, "starvation_s": 0.05}},
]
CHOOSERS: list[Any] = [
    *("round_robin", "pull", "least_loaded", "power_of_two", "random", "prefix_affinity"),
    *("endpoint_picker", "dynamo_kv_router", "sglang_cache_aware", "preble_e2"),
    *("lmetric", "consistent_hashing", "thunderagent", "llumnix", "splitwise_mixed_pool"),
    {"policy": "dynaserve", "params": {"min_part_tokens": 4}},
    {"policy": "ascendra", "params": {"margin_s": 0.01}},
    {"policy": "cascadeinfer", "params": {"interval_s": 0.02, "plan_s": 0.1, "own_tokens": 20.0}},
    {"policy": "dlora_migration", "params": {"interval_s": 0.05, "more_requests": 1}},
    "mooncake_conductor",
    {"policy": "d2lpm", "params": {"quantum": 60.0}},
    {"policy": "polyserve", "params": {"tiers_s": [0.01, 0.03]}},
]
BATCHERS: list[Any] = [
    {"policy": "fixed_chunk", "params": {"chunk_size": 48, "preemption": "swap"}},
    {"policy": "fixed_chunk", "params": {"chunk_size": 20}},
    {"policy": "dynamic_chunk", "params": {"target_batch_time_s": 0.008}},
    {"policy": "space_sharing", "params": {"target_batch_time_s": 0.01, "long_seq_kv_cache_len_threshold": 64}},
    "vllm_v1",
    "nano_vllm",
    "minivllm",
    "orca",
    {"policy": "nano_vllm_rs", "params": {"preemption": True}},
    {"policy": "preemptive", "params": {"chunk_size": 32}},
    {"policy": "slack_chunk", "params": {"sizes": [16, 48]}},
    {"policy": "past_future", "params": {"chunk_size": 48}},
    {"policy": "hygen", "params": {"chunk_size": 48, "latency_budget_s": 0.01}},
    {"policy": "scorpio", "params": {"chunk_size": 48}},
    {"policy": "p_pas", "params": {"chunk_size": 48, "capped_tokens": 16}},
    {"policy": "min_chunk_hold", "params": {"chunk_size": 48, "min_chunk": 20}},
    {"policy": "prefill_waves", "params": {"chunk_size": 48, "wave_slots": 2}},
    {"policy": "mixed_prefill_governor", "params": {"chunk_size": 48, "mixed_tokens": 16, "max_wait_s": 0.05}},
    {"policy": "conserve", "params": {"chunk_size": 48, "default_tpot_s": 0.01}},
    {"policy": "micro_requests", "params": {"chunk_size": 48}},
    {"policy": "slos_serve", "params": {"chunk_size": 48, "step_s": 0.008}},
    {"policy": "adaserve", "params": {"chunk_size": 48, "budget_tokens": 12}},
    {"policy": "blendserve", "params": {"chunk_size": 48}},
    {"policy": "chameleon", "params": {"chunk_size": 48, "refresh_s": 0.05}},
    {"policy": "dlora", "params": {"chunk_size": 48, "credit_bound": 2.0}},
    {"policy": "sliding_serve", "params": {"min_chunk": 16, "max_chunk": 48, "grain": 8}},
]


def builtin(layer: Layer) -> list[str]:
    """Names of the policies that are shipped."""
    return sorted(name for name, offer in load_registry().policies(layer).items() if offer.package == "vajra-py")


def _needs_slack(batcher: Any) -> bool:
    return (batcher if isinstance(batcher, str) else batcher["policy"]) == "space_sharing"


def combinations() -> list[tuple[Any, Any, Any]]:
    """Every policy with several of the others: each list turns past the replica schedulers at its own pace.

    Prioritizers turn five places short, so that one whose place `space_sharing` takes has another.
    """
    return [
        (
            "lrs" if _needs_slack(batcher) else PRIORITIZERS[(index + turn * (len(BATCHERS) - 5)) % len(PRIORITIZERS)],
            CHOOSERS[(index + 2 * turn) % len(CHOOSERS)],
            batcher,
        )
        for turn in range(2)
        for index, batcher in enumerate(BATCHERS)
    ]


def test_every_policy_is_replayed() -> None:
    used = [
        {one if isinstance(one, str) else one["policy"] for one in ones} for ones in zip(*combinations(), strict=True)
    ]
    for layer, names in zip(Layer, used, strict=True):
        assert set(builtin(layer)) <= names


@pytest.mark.parametrize("number", range(len(combinations())))
def test_decisions_are_equal(number: int, hollow_model: Path, tmp_path: Path) -> None:
    scheduling = layers(*combinations()[number])
    workload = SESSIONS if number % 2 else SINGLES
    run = run_it(settings(hollow_model, scheduling, workload, seed=number), tmp_path / "run")
    report = replay(tmp_path / "run")
    assert report.difference is None
    assert report.num_steps == run.steps().num_rows > 20


RETENTIONS: list[Any] = [
    "arc",
    {"policy": "ttl", "params": {"ttl_s": 0.05}},
    {"policy": "session_pin", "params": {"pin_s": 0.1}},
]


@pytest.mark.parametrize("number", range(len(RETENTIONS)))
def test_what_is_kept_is_equal(number: int, hollow_model: Path, tmp_path: Path) -> None:
    """Under a router that follows the caches late, in memory that is short."""
    scheduling = {**layers("fcfs", "dynamo_kv_router", "vllm_v1"), "retention": RETENTIONS[number]}
    mapping = settings(hollow_model, scheduling, SESSIONS, seed=number, kv_event_lag_s=0.01)
    run_it(mapping, tmp_path / "run")
    report = replay(tmp_path / "run")
    assert report.difference is None
    lines = list(read_retention(tmp_path / "run" / RETENTION_FILE))
    lost = [line for line in lines if line is not lines[len(lines) // 2]]
    assert len(lost) == len(lines) - 1
    with gzip.open(tmp_path / "run" / RETENTION_FILE, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lost)
    assert "retention" in (replay(tmp_path / "run").difference or "")


def test_a_replay_asks_nothing_of_the_policy_about_repeated_decode_steps(
    hollow_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    schedule = FixedChunk.schedule

    def counted(*arguments: Any) -> None:
        nonlocal asked
        asked += 1
        schedule(*arguments)

    monkeypatch.setattr(FixedChunk, "schedule", counted)
    lengths = {
        name: {"type": "constant", "value": value} for name, value in (("prompt_tokens", 9), ("output_tokens", 80))
    }
    workload = {"type": "synthetic", "arrivals": {"type": "at_once"}, "num_requests": 3, **lengths}
    mapping = settings(hollow_model, layers("fcfs", "round_robin", "fixed_chunk"), workload, num_replicas=1)
    mapping["replica"]["memory"]["num_blocks"] = 60
    run_it(mapping, tmp_path / "run", aborts=False)
    asked_by_engine, asked = asked, 0
    report = replay(tmp_path / "run")
    assert report.difference is None
    assert asked_by_engine >= report.num_steps >= 80
    assert asked < 20


BUILTIN = {layer: builtin(layer) for layer in Layer}


def test_a_join_waits_for_its_last_parent_on_the_engine_and_in_its_replay(hollow_model: Path, tmp_path: Path) -> None:
    graph: dict[str, tuple[str, ...]] = {}
    for number in range(4):
        calls = tuple(f"call{number}.{branch}" for branch in range(3))
        graph |= {f"plan{number}": (), **dict.fromkeys(calls, (f"plan{number}",)), f"answer{number}": calls}
    content = {"content": PromptContent((("sys", 16), (("out", "call0.0"), 5), (("out", "call0.1"), 5), ("own", 4)))}
    requests = [
        RequestSpec(
            name,
            0.01 * index,
            30,
            5 + 9 * (index % 3),
            follows=follows_of(parents),
            think_time_s=0.01 * len(parents),
            **(content if name == "answer0" else {}),  # type: ignore[arg-type]
        )
        for index, (name, parents) in enumerate(graph.items())
    ]
    write_jsonl(Workload.from_requests(requests), tmp_path / "graph.jsonl")
    workload = {"type": "jsonl", "path": str(tmp_path / "graph.jsonl")}
    mapping = settings(hollow_model, layers("fcfs", "least_loaded", "vllm_v1"), workload, engine={"time_scale": 1.0})
    run = run_it(mapping, tmp_path / "run")
    rows = {row["request_id"]: row for row in run.requests().to_pylist()}
    assert set(rows) == set(graph)
    for name, parents in graph.items():
        if parents:
            last = max(rows[parent]["ended_at"] for parent in parents)
            assert rows[name]["arrived_at"] - last - 0.01 * len(parents) == pytest.approx(0.0, abs=0.02)
            assert rows[name]["arrived_at"] >= last + 0.01 * len(parents) - 1e-9
    assert replay(tmp_path / "run").is_equal


PREEMPTS_SELDOM = {"orca", "past_future", "preemptive", "hygen", "min_chunk_hold", "mixed_prefill_governor"}
"""Two look at the memory to come before they admit anybody, two let others pause while memory lasts, two hold prompts back."""
FEW = {**SINGLES, "num_requests": 14, "prompt_tokens": {"type": "uniform", "min": 20, "max": 140}}


def prioritizers_beside(chooser: str, batcher: str) -> list[str]:
    """Two prioritizers of this pair, such that over all pairs each meets every chooser and every batcher."""
    if _needs_slack(batcher):
        return ["lrs", "edf"]
    names = BUILTIN[Layer.REQUEST_PRIORITIZER]
    turn = BUILTIN[Layer.REPLICASET_SCHEDULER].index(chooser) + BUILTIN[Layer.REPLICA_SCHEDULER].index(batcher)
    return [names[turn % len(names)], names[(turn + len(names) // 2) % len(names)]]


def test_each_prioritizer_meets_every_other_policy() -> None:
    met: set[tuple[str, str]] = set()
    for chooser in BUILTIN[Layer.REPLICASET_SCHEDULER]:
        for batcher in BUILTIN[Layer.REPLICA_SCHEDULER]:
            met |= {(one, other) for one in prioritizers_beside(chooser, batcher) for other in (chooser, batcher)}
    for prioritizer in BUILTIN[Layer.REQUEST_PRIORITIZER]:
        assert all((prioritizer, chooser) in met for chooser in BUILTIN[Layer.REPLICASET_SCHEDULER])
        assert all((prioritizer, one) in met for one in BUILTIN[Layer.REPLICA_SCHEDULER] if not _needs_slack(one))


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("batcher", BUILTIN[Layer.REPLICA_SCHEDULER])
def test_every_pair_of_policies_is_replayed(batcher: str, number: int, hollow_model: Path, tmp_path: Path) -> None:
    happened: Counter[str] = Counter()
    for chooser in BUILTIN[Layer.REPLICASET_SCHEDULER]:
        prioritizer = prioritizers_beside(chooser, batcher)[number]
        scheduling = layers(prioritizer, chooser, batcher)
        memory = {"block_size": 8, "num_blocks": 26, "reservation": "incremental", "watermark_fraction": 0.0}
        mapping = settings(hollow_model, scheduling, FEW, seed=number, replica={"memory": memory})
        run = run_it(mapping, tmp_path / f"{chooser} {prioritizer}", abort_rate=0.05)
        assert replay(run.path).is_equal, (chooser, prioritizer)
        happened += what_happened(run)
    assert happened["aborted"] > 0
    assert number or happened["preempted"] > 0 or batcher in PREEMPTS_SELDOM


def what_happened(run: RunData) -> Counter[str]:
    """How requests ended, how often some were preempted, and tokens that were found in the prefix cache."""
    happened: Counter[str] = Counter()
    for request in run.requests().to_pylist():
        happened[request["reason"]] += 1
        happened["preempted"] += request["num_preemptions"]
        happened["cached"] += request["num_cached_tokens"]
    return happened


def test_the_fuzzed_runs_are_worth_replaying(hollow_model: Path, tmp_path: Path) -> None:
    happened: Counter[str] = Counter()
    for seed in range(4):
        batcher = BATCHERS[seed % 2]
        workload = SESSIONS if seed > 1 else SINGLES
        mapping = settings(hollow_model, layers("fcfs", "least_loaded", batcher), workload, seed=seed)
        run = run_it(mapping, tmp_path / str(seed))
        happened += what_happened(run)
        for row in read_decisions(tmp_path / str(seed) / "decisions.parquet"):
            for _, mode in row["preempted"]:
                happened[mode] += 1
    assert all(happened[what] > 3 for what in ("stop", "aborted", "expired", "cached", "swap", "recompute")), happened


@pytest.mark.parametrize("preset", sorted(load_registry().presets))
def test_presets_are_replayed(preset: str, hollow_model: Path, tmp_path: Path) -> None:
    num_replicas = 2 if load_registry().presets[preset].spec.replicaset else 1
    mapping = settings(hollow_model, {}, SESSIONS, num_replicas=num_replicas, preset=preset)
    mapping["replica"] = {"max_model_len": 224, "memory": {"block_size": 16, "num_blocks": 16}}
    del mapping["scheduling"]
    run = run_it(mapping, tmp_path / "run", abort_rate=0.03)
    assert run.steps().num_rows > 20
    assert replay(tmp_path / "run").is_equal
    happened = what_happened(run)
    assert happened["aborted"] > 0
    assert happened["preempted"] > 0 or preset in PREEMPTS_SELDOM or num_replicas == 2


@pytest.mark.parametrize("batcher", BATCHERS[:2])
def test_tokens_do_not_depend_on_the_schedule(batcher: Any, hollow_model: Path, tmp_path: Path) -> None:
    made: list[EngineRun] = []
    mapping = settings(hollow_model, layers("fcfs", "round_robin", batcher), SESSIONS)
    mapping["workload"] = {**SESSIONS, "slo_classes": []}
    mapping["num_replicas"] = 1
    run = run_it(mapping, tmp_path / "run", aborts=False, made=made)
    prompts, specs = made[0]._prompts, {spec.request_id: spec for spec in made[0]._run.workload}
    outputs = {row["request_id"]: row["token_ids"] for row in read_rows(tmp_path / "run" / "outputs.jsonl.gz")}
    assert sum(run.requests().column("num_preemptions").to_pylist()) > 3
    for name, tokens in outputs.items():
        spec = specs[name]
        assert tokens == expected_output(prompts.prompt(spec).token_ids, spec.num_output_tokens)


def test_requests_known_by_their_tokens_are_replayed(hollow_model: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    system = rng.integers(0, 900, 20).tolist()
    rows = []
    for index in range(16):
        prompt = [*system, *rng.integers(0, 900, int(rng.integers(1, 60))).tolist()]
        lengths = {"num_prompt_tokens": len(prompt), "num_output_tokens": 30}
        rows.append({"request_id": f"r{index}", "arrived_at": index * 0.01, "prompt_token_ids": prompt, **lengths})
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    mapping = settings(
        hollow_model, layers("fcfs", "prefix_affinity", BATCHERS[1]), {"type": "jsonl", "path": str(trace)}
    )
    mapping["backend"]["engine"]["sampling"] = {"ignore_eos": False}
    mapping["replica"]["memory"]["num_blocks"] = 16
    run = run_it(mapping, tmp_path / "run")
    report = replay(tmp_path / "run")
    assert report.difference is None
    requests = run.requests().to_pylist()
    assert sum(request["num_cached_tokens"] for request in requests) > 0
    assert sum(request["num_preemptions"] for request in requests) > 0
    # A preempted request hits blocks of its own generated tokens, whose hashes only these tokens give.
    resumed = [row["chunks"] for row in read_decisions(tmp_path / "run" / "decisions.parquet")]
    assert any(kind == "resumed" and done > 0 for chunks in resumed for _, _, done, kind in chunks)


# Changes that must be detected


POLICY = """
import time
from vajra_py.contract import Layer, PolicyConfig, PolicySpec, fill, hookimpl

class Restless:
    def schedule(self, replica, batch, now):
        size = 16 + time.perf_counter_ns() // 1000 % 16
        fill(replica, batch, lambda request, batch, replica: chunk(request, batch, size))

def chunk(request, batch, size):
    room = min(size - batch.num_tokens, batch.tokens_left)
    return None if room <= 0 else min(batch.max_chunk(request), room)

@hookimpl
def vajra_policies():
    return [PolicySpec("restless", Layer.REPLICA_SCHEDULER, PolicyConfig, lambda c, x: Restless(), "Reads a clock.")]
"""


def test_a_policy_that_reads_the_clock_is_found_out(
    hollow_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    (site / "restless-1.0.dist-info").mkdir(parents=True)
    (site / "restless.py").write_text(POLICY)
    (site / "restless-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: restless\nVersion: 1.0\n")
    (site / "restless-1.0.dist-info" / "entry_points.txt").write_text("[vajra]\nrestless = restless\n")
    monkeypatch.syspath_prepend(str(site))
    theirs = [entry for one in metadata.distributions(path=[str(site)]) for entry in one.entry_points]
    registry = build_registry([*metadata.distribution("vajra-py").entry_points.select(group="vajra"), *theirs])
    mapping = settings(hollow_model, layers("fcfs", "round_robin", "restless"))
    config = config_from_mapping(mapping, registry=registry)
    run_experiment(config, folder=tmp_path / "run", backend=on_fake_runners(), registry=registry)
    report = replay(tmp_path / "run", registry)
    assert not report.is_equal
    assert report.difference is not None
    assert "chunks" in report.difference


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("replica.memory.num_blocks", 33),
        ("replica.memory.watermark_fraction", 0.2),
        ("replica.memory.reservation", "prompt"),
        ("replica.max_batch_size", 2),
        ("scheduling.request_prioritizer", "lrs"),
        ("backend.engine.latency.base_s", 0.002),
        ("seed", 12),
    ],
)
def test_another_mechanism_is_found_out(path: str, value: Any, hollow_model: Path, tmp_path: Path) -> None:
    mapping = settings(hollow_model, layers("fcfs", "power_of_two", BATCHERS[2]))
    config = config_from_mapping(mapping)
    run_experiment(config, folder=tmp_path / "run", backend=on_fake_runners())
    assert replay(tmp_path / "run").is_equal
    changed = config_from_mapping(mapping, [f"{path}={json.dumps(value)}"])
    (tmp_path / "run" / "config.yaml").write_text(dump_effective(changed))
    report = replay(tmp_path / "run")
    assert not report.is_equal
    assert report.difference is not None


def test_what_was_cut_off_is_not_replayed(hollow_model: Path, tmp_path: Path) -> None:
    run_it(settings(hollow_model, layers("fcfs", "round_robin", "fixed_chunk")), tmp_path / "run")
    log = tmp_path / "run" / "decisions.parquet"
    log.rename(log.with_name(log.name + ".journal.partial"))
    with pytest.raises(RunError, match="was cut off"):
        replay(tmp_path / "run")


def test_a_simulation_is_not_replayed(tmp_path: Path) -> None:
    mapping = settings(tmp_path, layers("fcfs", "round_robin", "fixed_chunk"))
    mapping["backend"] = {"simulator": {"latency": LATENCY}}
    run_experiment(config_from_mapping(mapping), folder=tmp_path / "run")
    with pytest.raises(RunError, match="is a run of the simulator"):
        replay(tmp_path / "run")


def test_violations_at_another_place_in_the_code_are_equal() -> None:
    recorded: Any = SimpleNamespace(inputs=[PolicyViolation(7, "a", "policy x: ValueError: no (lab/x.py:3 in key)")])
    assert _compare_violations(recorded, [(7, "a", "policy x: ValueError: no (/there/lab/x.py:9 in key)")]) is None
    difference = _compare_violations(recorded, [(7, "a", "policy x: KeyError: 3 (lab/x.py:3 in key)")])
    assert difference is not None
    assert "ValueError: no" in difference
    assert "KeyError: 3" in difference
