"""A host tier on the engine: content that the device gave up comes back, every token is as without it, and replays are equal."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.engine.fake_runner import runner_that_dies_moving
from tests.engine.test_control_pools import RARELY, RECOVERS, check, on_processes, run_it
from tests.engine.test_control_replay import SESSIONS, layers, settings
from vajra_py.config import config_from_mapping
from vajra_py.config.replica import ReplicaConfig
from vajra_py.engine.build import _dry_controller
from vajra_py.engine.config import EngineConfig
from vajra_py.engine.kv_copy import KvMove
from vajra_py.engine.kv_transfers import check_transfers
from vajra_py.engine.refusals import check_tiers
from vajra_py.engine.replica import EngineReplica
from vajra_py.engine.services import engine_services
from vajra_py.engine.tier_copies import TierCopies
from vajra_py.engine.worker import KvMoved
from vajra_py.errors import ConfigError
from vajra_py.experiment.runs.engined import EngineRun
from vajra_py.experiment.runs.replay import replay
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.plugins import load_registry
from vajra_py.runtime.kv import BlockCopy, CopyDirection
from vajra_py.runtime.records.input_log import TierEnd, read_inputs
from vajra_py.runtime.records.json_lines import read_rows
from vajra_py.runtime.serving.backend import TierCopy
from vajra_py.runtime.serving.build import ModelFacts

CHATS = {
    **SESSIONS,
    "num_sessions": 12,
    "turns": {"type": "uniform", "min": 2, "max": 5},
    "system_prompts": {"count": 4, "tokens": {"type": "constant", "value": 32}},
}
RULES: list[dict[str, Any]] = [
    {"write": "write_back"},
    {"write": "write_through"},
    {"write": "write_through_selective"},
]


def tiered(
    model: Path,
    rules: dict[str, Any] | None,
    batcher: Any = "vllm_v1",
    of_all: dict[str, Any] | None = None,
    **sections: Any,
) -> dict[str, Any]:
    """An experiment with chats whose prefixes do not fit on the device."""
    mapping = settings(model, layers("fcfs", "prefix_affinity", batcher), CHATS, **sections)
    if rules is not None:
        level = {"name": "host", "num_blocks": 60, "bandwidth_gb_s": 1.0, **rules}
        mapping["replica"]["memory"]["tiers"] = {"levels": [level], **(of_all or {})}
    return mapping


def hits(run: RunData) -> int:
    """Prompt tokens that came from the host."""
    return sum(run.requests().column("hit_tokens_host").to_pylist())


@pytest.mark.parametrize("rules", RULES, ids=[one["write"] for one in RULES])
def test_content_comes_back_from_the_host(rules: dict[str, Any], hollow_model: Path, tmp_path: Path) -> None:
    run, made = run_it(tiered(hollow_model, rules), tmp_path / "run", abort_rate=RARELY)
    happened = check(made, tmp_path / "run")
    assert happened["TierEnd"] > 5
    assert hits(run) > 0


@pytest.mark.parametrize(
    ("batcher", "of_all"),
    [
        ({"policy": "fixed_chunk", "params": {"chunk_size": 48, "preemption": "swap"}}, {}),
        pytest.param(
            {"policy": "preemptive", "params": {"chunk_size": 32}}, {"prompts_only": True}, marks=pytest.mark.long
        ),
        pytest.param("orca", {"min_load_tokens": 16}, marks=pytest.mark.long),
        ("vllm_v1", {"preset": "vllm_offloading"}),
    ],
    ids=["swaps", "preempts", "orca", "reserved"],
)
def test_the_tier_goes_with_swapping_and_every_rule_of_loads(
    batcher: Any, of_all: dict[str, Any], hollow_model: Path, tmp_path: Path
) -> None:
    mapping = tiered(hollow_model, {"num_blocks": 40}, batcher, of_all)
    run, made = run_it(mapping, tmp_path / "run", abort_rate=2 * RARELY)
    happened = check(made, tmp_path / "run")
    assert hits(run) > 0
    if not of_all:
        assert happened["swap"] > 0


@pytest.mark.parametrize("fails", [{"fails": 0.7}, {"fails_moving": 0.7}], ids=["step", "copy"])
def test_a_lost_worker_costs_no_request(fails: dict[str, Any], hollow_model: Path, tmp_path: Path) -> None:
    mapping = tiered(hollow_model, RULES[0], engine={"recovery": RECOVERS})
    run, made = run_it(mapping, tmp_path / "run", **fails)
    happened = check(made, tmp_path / "run")
    assert happened["Failure"] > 1
    assert happened["failed"] == 0
    assert hits(run) > 0


def test_workers_copy_in_an_order_in_which_nothing_is_overwritten() -> None:
    moves: list[KvMove] = []
    swap = BlockCopy(5, 0, CopyDirection.TO_HOST)
    swapped = [swap]
    memory = SimpleNamespace(take_copies=lambda: [swapped.pop()] if swapped else [])
    limits = SimpleNamespace(host_blocks=4)
    one, idle = (
        cast(
            EngineReplica,
            SimpleNamespace(
                replica=SimpleNamespace(replicaset="default", replica_id=number, memory=memory, limits=limits),
                move_kv=moves.append,
            ),
        )
        for number in range(2)
    )
    copies = TierCopies()
    dropped = TierCopy(1, one, True, [(6, 0)])
    loads = [
        TierCopy(0, one, True, [(5, 2)]),
        dropped,
        TierCopy(3, one, True, [(7, 3)]),
        TierCopy(4, idle, True, [(5, 0)]),
    ]
    for copy in (*loads, TierCopy(2, one, False, [(5, 1)])):
        copies.begin(copy)
    copies.cancel(dropped)
    assert moves == [KvMove(2, [BlockCopy(5, 5, CopyDirection.TO_HOST)])]  # before the step
    assert copies.load(one, [swap])
    assert moves[1:] == [  # the step's swaps precede the first of them
        KvMove(0, [BlockCopy(6, 5, CopyDirection.TO_DEVICE)], [swap]),
        KvMove(3, [BlockCopy(7, 7, CopyDirection.TO_DEVICE)]),
    ]
    assert not copies.load(one, [])
    copies.load_rest()
    assert moves[3:] == [KvMove(4, [BlockCopy(4, 5, CopyDirection.TO_DEVICE)], [swap])]
    assert copies.moved(KvMoved(("default", 0), 1), 9) is None
    assert copies.moved(KvMoved(("default", 0), 0), 9) == TierEnd(9, "default", 0)
    assert len(copies) == 3


# Processes


@pytest.mark.long
def test_a_process_killed_in_the_middle_of_a_copy_costs_no_request(
    hollow_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # the process finds the runner
    model = tmp_path / "model"
    shutil.copytree(hollow_model, model)
    engine = {"workers": "process", "recovery": {**RECOVERS, "backoff_s": 0.01}}
    mapping = tiered(model, {}, num_replicas=1, engine=engine)
    mapping["workload"] = {**CHATS, "slo_classes": []}
    made: list[EngineRun] = []
    run_experiment(
        config_from_mapping(mapping), folder=tmp_path / "run", backend=on_processes(runner_that_dies_moving, made)
    )
    happened = check(made[0], tmp_path / "run")
    assert happened["Failure"] == 1
    assert happened["failed"] == happened["rejected"] == 0
    assert happened["TierEnd"] > 10


# A real model


@pytest.mark.long
@pytest.mark.parametrize(("workers", "rule"), [("in_process", RULES[0]), ("process", RULES[1])])
def test_a_real_model_gives_the_tokens_that_it_gives_without_a_tier(
    workers: str, rule: dict[str, Any], tmp_path: Path
) -> None:
    from vajra_py.engine.tiny import write_tiny_model

    model = write_tiny_model(tmp_path / "tiny")
    engine = {"num_threads": 1, "random_weights": False, "workers": workers}
    tokens = {}
    for name, rules in (("without", None), ("with", rule)):
        mapping = tiered(model, rules, num_replicas=1, engine=engine)
        mapping["replica"] |= {"max_batch_tokens": 64, "max_model_len": 200}
        mapping["workload"] = {**CHATS, "num_sessions": 8, "slo_classes": []}
        run_experiment(config_from_mapping(mapping), folder=tmp_path / name)
        rows = read_rows(tmp_path / name / "outputs.jsonl.gz")
        tokens[name] = {row["request_id"]: row["token_ids"] for row in rows}
    assert tokens["with"] == tokens["without"]
    run = RunData.load(tmp_path / "with")
    assert hits(run) > 50
    assert run.summary is not None
    moved = sum(isinstance(one, TierEnd) for one in read_inputs(tmp_path / "with" / "inputs.jsonl.gz"))
    assert moved > 10
    assert replay(tmp_path / "with").difference is None


# Refused configurations

LEVEL = {"name": "host", "num_blocks": 8, "bandwidth_gb_s": 1.0}


@pytest.mark.parametrize(
    ("replica", "said"),
    [
        ({"memory": {"tiers": [LEVEL, {**LEVEL, "name": "disk"}]}}, "the engine has one tier, in host memory"),
        ({"memory": {"tiers": [{**LEVEL, "shared": True}]}}, "replicas of the engine share no tier"),
        ({"memory": {"tiers": [{**LEVEL, "exclusive": True}]}}, "stays in the engine's tier"),
        ({"memory": {"tiers": [LEVEL]}, "pipeline_stages": 2}, "2 pipeline stages"),
        ({"memory": {"tiers": [LEVEL]}, "kv_parallel": {"groups": 2, "group_tokens": 64}}, "2 KV-parallel"),
    ],
)
def test_what_the_engine_has_no_tier_for_is_named(replica: dict[str, Any], said: str) -> None:
    (problem,) = check_tiers("replica", ReplicaConfig.model_validate(replica))
    assert str(problem).startswith("replica.memory.tiers")
    assert said in str(problem)
    assert "Allowed: " in str(problem)


def test_requests_do_not_move_beside_a_tier(hollow_model: Path) -> None:
    mapping = tiered(hollow_model, {})
    mapping["scheduling"]["replicaset_scheduler"] = "llumnix"
    config = config_from_mapping(mapping)
    services = engine_services(config, load_registry(), {})
    sizes = ModelFacts(lambda block_size, fraction: 64, 200, kv_bytes_per_token=1)
    with pytest.raises(ConfigError, match=r"replica\.memory\.tiers: requests that move with their KV \(llumnix\)"):
        check_transfers(_dry_controller(config, services, {"default": {"default": sizes}}), EngineConfig(model="m"))
