"""Ties: what happens at one tick happens in one order, with decode fast-forward or step by step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sim.run_counts import CountsRuns
from vajra_py.config import config_from_mapping
from vajra_py.contract import (
    KeyMotion,
    Layer,
    PolicyConfig,
    PolicySpec,
    QueueView,
    ReplicaId,
    ReplicaLoadView,
    RequestView,
)
from vajra_py.contract.observer import Observer
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.latency import ConstantModel
from vajra_py.plugins import Registry, load_registry
from vajra_py.sim.simulator import SimulationOptions
from vajra_py.testing import Harness, HarnessOptions, InTurn, PlainChunks
from vajra_py.workload import RequestSpec


@pytest.mark.parametrize("router", ["round_robin", "least_loaded", "power_of_two", "prefix_affinity", "pull"])
@pytest.mark.parametrize("seed", range(4))
def test_ties_are_settled_in_the_same_order(
    router: str, seed: int, tmp_path: Path, with_observer: Callable[[str, Observer], Registry]
) -> None:
    stream = np.random.default_rng(seed)
    arrivals = sorted(int(tick) for tick in stream.integers(0, 120, 40))
    rows = [
        {
            "request_id": f"r{index}",
            "arrived_at": tick * 0.01,  # steps take 10 ms, so every arrival falls on the end of some
            "num_prompt_tokens": int(stream.integers(1, 100)),
            "num_output_tokens": int(stream.integers(1, 60)),
            "expires_after_s": 0.5 if index % 5 == 0 else None,
        }
        for index, tick in enumerate(arrivals)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({k: v for k, v in row.items() if v is not None}) + "\n" for row in rows))
    config = config_from_mapping(
        {
            "version": 1,
            "num_replicas": 3,
            "scheduling": {
                "request_prioritizer": "fcfs",
                "replicaset_scheduler": router,
                "replica_scheduler": "fixed_chunk",
            },
            "replica": {"max_batch_size": 4, "memory": {"block_size": 8, "num_blocks": 40}},
            "workload": {"type": "jsonl", "path": str(trace)},
            "backend": {"simulator": {"latency": {"type": "constant", "step_time_s": 0.01}}},
        }
    )
    config = config.model_copy(
        update={"observers": (type(config.backend.settings.latency)(type="counts_runs"),)}  # type: ignore[union-attr]
    )
    tables, num_in_runs = [], []
    for stepped in (True, False):
        observer = CountsRuns(wants_steps=stepped)
        run = run_experiment(config, folder=tmp_path / str(stepped), registry=with_observer("counts_runs", observer))
        order = [("replica_id", "ascending"), ("step_index", "ascending")]
        tables.append((run.requests().sort_by("index").to_pydict(), run.steps().sort_by(order).to_pydict()))
        num_in_runs.append(observer.num_in_runs)
    assert num_in_runs[0] == 0 < num_in_runs[1]
    np.testing.assert_equal(tables[0], tables[1])


class SeesOthers:
    """FCFS; at each departure it notes how far every request is."""

    key_motion = KeyMotion.STATIC

    def __init__(self) -> None:
        self.arrived: list[Any] = []
        self.seen: list[tuple[float, list[str], list[tuple[str, int]]]] = []

    def key(self, request: Any, now: float) -> float:
        return float(request.arrived_at)

    def on_arrivals(self, requests: Sequence[Any], now: float) -> None:
        self.arrived += requests

    def on_departures(self, requests: Sequence[Any], now: float) -> None:
        progress = [(one.request_id, one.num_output_tokens) for one in self.arrived]
        self.seen.append((now, [one.request_id for one in requests], progress))


@pytest.mark.parametrize("seed", range(8))
def test_a_departure_finds_the_others_as_far_as_step_by_step_where_steps_end_together(seed: int) -> None:
    lengths = [int(one) for one in np.random.default_rng(seed).permutation(np.arange(40, 100, 6))]
    seen, num_in_runs = [], []
    for fast_forward in (False, True):
        policy, runs = SeesOthers(), CountsRuns(wants_steps=False)
        options = HarnessOptions(
            num_replicas=3,
            num_blocks=400,
            max_model_len=2000,
            latency=ConstantModel(0.01),  # the three replicas' steps all end at the same ticks
            reserves_growth=fast_forward,
        )
        harness = Harness(policy, InTurn(), PlainChunks(), options)
        harness.controller.watch((runs,))
        specs = [RequestSpec(f"r{index}", 0.0, 16, length) for index, length in enumerate(lengths)]
        harness.simulator(SimulationOptions(fast_forward=fast_forward)).run(specs)
        seen.append(policy.seen)
        num_in_runs.append(runs.num_in_runs)
    assert num_in_runs[0] == 0 < num_in_runs[1]
    assert len(seen[0]) == len(lengths)
    assert seen[0] == seen[1]


class RouterThatLooks:
    """Places requests in turn and lets every third be pulled; whenever it is called it notes how far every request is."""

    def __init__(self) -> None:
        self._arrived: list[Any] = []
        self.seen: list[tuple[str, float, list[int], list[int]]] = []

    def _look(self, why: str, now: float) -> None:
        done = [one.num_computed_tokens for one in self._arrived]
        self.seen.append((why, now, [one.num_output_tokens for one in self._arrived], done))

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        self._look("assign", now)
        number = int(request.request_id[1:])
        return None if number % 3 == 0 else replicas[number % len(replicas)].replica_id

    def pull(self, replica: ReplicaLoadView, queued: QueueView, now: float) -> Iterable[str]:
        if replica.num_running >= replica.max_batch_size:
            return ()
        self._look("pull", now)
        return [one.request_id for one in queued][:1]

    def on_arrivals(self, requests: Sequence[Any], now: float) -> None:
        self._arrived += requests

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        self._look("admission", now)

    def on_departures(self, requests: Sequence[Any], now: float) -> None:
        self._look("departure", now)


@pytest.mark.parametrize("latency", [{"step_time_s": 0.01}, {"step_time_s": 0.007}])
@pytest.mark.parametrize("seed", range(3))
def test_a_router_that_listens_finds_all_requests_as_far_as_step_by_step(
    seed: int, latency: dict[str, float], tmp_path: Path, with_observer: Callable[[str, Observer], Registry]
) -> None:
    stream = np.random.default_rng(seed)
    ticks, lengths = sorted(int(tick) for tick in stream.integers(0, 60, 30)), stream.integers(1, 90, (30, 2))
    rows = [
        {
            "request_id": f"r{index}",
            "arrived_at": tick * 0.01,
            "num_prompt_tokens": int(prompt),
            "num_output_tokens": int(out),
        }
        for index, (tick, (prompt, out)) in enumerate(zip(ticks, lengths, strict=True))
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scheduling = {"request_prioritizer": "fcfs", "replicaset_scheduler": "looks", "replica_scheduler": "fixed_chunk"}
    made: list[RouterThatLooks] = []

    def make(*_: Any) -> RouterThatLooks:
        made.append(RouterThatLooks())
        return made[-1]

    spec = PolicySpec("looks", Layer.REPLICASET_SCHEDULER, PolicyConfig, make, "Looks.")
    config = config_from_mapping(
        {
            "version": 1,
            "num_replicas": 3,
            "scheduling": scheduling,
            "replica": {"max_batch_size": 4, "memory": {"block_size": 8, "num_blocks": 60}},
            "workload": {"type": "jsonl", "path": str(trace)},
            "backend": {"simulator": {"latency": {"type": "constant", **latency}}},
        },
        registry=load_registry().with_policies([spec]),
    )
    config = config.model_copy(
        update={"observers": (type(config.backend.settings.latency)(type="counts_runs"),)}  # type: ignore[union-attr]
    )
    seen, num_in_runs = [], []
    for stepped in (True, False):
        observer = CountsRuns(wants_steps=stepped)
        registry = with_observer("counts_runs", observer).with_policies([spec])
        run_experiment(config, folder=tmp_path / str(stepped), registry=registry)
        seen.append(made[-1].seen)
        num_in_runs.append(observer.num_in_runs)
    assert num_in_runs[0] == 0 < num_in_runs[1]
    assert {why for why, *_ in seen[0]} == {"assign", "pull", "admission", "departure"}
    assert seen[0] == seen[1]
