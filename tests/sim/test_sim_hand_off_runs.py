"""Runs of repeated decodes that begin with requests which came with their KV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.sim.run_counts import CountsRuns
from tests.sim.split_pools import AFFINE, prepared, settings
from vajra_py.config import config_from_mapping
from vajra_py.contract import (
    KeyMotion,
    Layer,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    PoolView,
    RequestView,
    ScalerSpec,
)
from vajra_py.contract.observer import Observer
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.plugins import Registry, load_registry
from vajra_py.runtime.records.decision_reader import read_decisions
from vajra_py.workload import RequestSpec


def test_the_first_decode_of_a_request_that_came_with_its_kv_begins_a_run() -> None:
    asked: Counter[str] = Counter()

    def around(replicaset: str, layer: Layer, policy: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            asked[layer.value] += 1
            return method(*arguments)

        return counted

    run, simulator, ways = prepared(settings())
    run.controller.replicasets["default"].call_through(around)
    simulator.run([RequestSpec("r0", 0.0, 100, 30)])
    assert simulator.num_steps == 30  # one for the prompt, 29 at the target
    assert asked[Layer.REPLICA_SCHEDULER.value] == 2
    assert ways.of["r0"].ended == pytest.approx(0.01 + 100 * 0.0001 + 100 * 1e6 / 10e9 + 29 * 0.0101)


@pytest.mark.parametrize("preset", ["distserve", "vllm-pd", "sglang-pd", "dynamo-pd", "splitwise"])
@pytest.mark.parametrize("scheduler", ["fixed_chunk", "vllm_v1"])
def test_decisions_of_hand_overs_are_those_of_single_steps(
    preset: str, scheduler: str, tmp_path: Path, with_observer: Callable[[str, Observer], Registry]
) -> None:
    mapping = settings(
        scheduling={
            "request_prioritizer": "fcfs",
            "replicaset_scheduler": "round_robin",
            "replica_scheduler": scheduler,
        },
        pools={"prefill": {"num_replicas": 2}, "decode": {"num_replicas": 2}},
        replica={"max_batch_size": 6, "max_batch_tokens": 512, "memory": {"num_blocks": 40, "watermark_fraction": 0.0}},
        hand_off={"preset": preset, "kv_bytes_per_token": 1_000_000},
        observers=["counts_runs"],
    )
    mapping["backend"] = {"simulator": {"latency": AFFINE}}
    mapping["workload"] = {
        "type": "synthetic",
        "arrivals": {"type": "poisson", "rate": 8.0},
        "num_requests": 40,
        "prompt_tokens": {"type": "uniform", "min": 10, "max": 200},
        "output_tokens": {"type": "uniform", "min": 1, "max": 60},
    }
    decisions, tables = [], []
    for stepped in (True, False):
        observer = CountsRuns(wants_steps=stepped)
        registry = with_observer("counts_runs", observer)
        folder = tmp_path / str(stepped)
        run = run_experiment(config_from_mapping(mapping, registry=registry), folder=folder, registry=registry)
        decisions.append(list(read_decisions(folder / "decisions.parquet")))
        tables.append(run.requests().sort_by("index").to_pydict())
        assert bool(observer.num_in_runs) is not stepped
    assert any(chunk[3] == "moved" for row in decisions[0] for chunk in row["chunks"])
    assert decisions[0] == decisions[1]
    assert repr(tables[0]) == repr(tables[1])


class SeesOthers:
    """FCFS; at each departure it notes how many tokens every request has."""

    key_motion = KeyMotion.STATIC

    def __init__(self) -> None:
        self.arrived: list[RequestView] = []
        self.seen: list[tuple[float, dict[str, int]]] = []

    def key(self, request: RequestView, now: float) -> float:
        return request.arrived_at

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        self.arrived += requests

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        self.seen.append((now, {one.request_id: one.num_output_tokens for one in self.arrived}))


class Shrinks:
    """Asks for one decode replica less from 0.15 s on."""

    def __init__(self, context: PolicyContext) -> None:
        context.wake.at(0.15)

    def on_wake(self, key: str, now: float) -> None:
        """Be asked."""

    def targets(self, pools: Sequence[PoolView], now: float) -> Mapping[str, int]:
        return {"decode": 3 if now < 0.15 else 2}


def test_a_look_at_a_draining_replica_leaves_its_step_that_ends_later_in_the_tick() -> None:
    seen = []
    for stepped in (True, False):
        policy = SeesOthers()
        registry = load_registry().with_policies(
            [
                PolicySpec("sees", Layer.REQUEST_PRIORITIZER, PolicyConfig, lambda _, __, it=policy: it, "FCFS."),
                ScalerSpec("shrinks", PolicyConfig, lambda _, context: Shrinks(context), "Once."),
            ]
        )
        mapping = settings(
            scheduling={
                "request_prioritizer": "sees",
                "replicaset_scheduler": "round_robin",
                "replica_scheduler": "vllm_v1",
                "scaling": "shrinks",
            },
            pools={
                "decode": {
                    "num_replicas": 3,
                    "replica": {"max_batch_size": 2},
                    "elastic": {"min_replicas": 2, "max_replicas": 3, "drain": "migrate"},
                },
                "prefill": {},
            },
            links={"latency_s": 0.05},
        )
        mapping["backend"] = {"simulator": {"latency": {"type": "constant", "step_time_s": 0.01}}}
        _, simulator, _ = prepared(mapping, wants_steps=stepped, registry=registry)
        # Replicas 0 and 1 are full, so that replica 2 keeps what it has; "late" comes there while it drains, and "ends" ends
        # on replica 1 a step later, when steps of all three end.
        outputs = {"a": 40, "ends": 12, "c": 40, "d": 40, "e": 40, "late": 40}
        requests = [RequestSpec(name, 0.1 if name == "late" else 0.0, 10, num) for name, num in outputs.items()]
        simulator.run(requests)
        seen.append(policy.seen)
    assert seen[0] == seen[1]
    assert seen[0][0][0] == pytest.approx(0.17)
    assert seen[0][0][1] == {"a": 12, "ends": 12, "c": 11, "d": 12, "e": 12, "late": 1}
