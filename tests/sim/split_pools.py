"""Runs of replicasets whose pools split prompts and decodes, with everything that happens to each request on its way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vajra_py.config import config_from_mapping
from vajra_py.contract import RequestView
from vajra_py.contract.observer import EndReason, Observer
from vajra_py.experiment.runs.backend import Run
from vajra_py.experiment.runs.simulated import SimulatedRun
from vajra_py.plugins import Registry, load_registry
from vajra_py.runtime.records.input_log import Failure, Restart
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.support.clock import to_ticks
from vajra_py.runtime.support.seeds import SeedTree
from vajra_py.sim.simulator import Simulator
from vajra_py.workload import RequestSpec, Workload

AFFINE = {"type": "affine", "base_s": 0.01, "per_token_s": 0.0001}
POLICIES = {
    "request_prioritizer": "fcfs",
    "replicaset_scheduler": "round_robin",
    "replica_scheduler": "vllm_v1",
}
GIGA = 10**9


@dataclass
class Way:
    """When what happened to a request, seconds; replicas by id."""

    assigned: list[int | None] = field(default_factory=list)
    held: float | None = None
    target: int | None = None
    num_moved: int | None = None
    sent: float | None = None
    arrived: float | None = None
    released: float | None = None
    first_token: float | None = None
    ended: float | None = None
    reason: EndReason | None = None
    detail: str = ""


class Ways(Observer):
    """Keeps the way of every request."""

    def __init__(self, *, wants_steps: bool = False) -> None:
        self.wants_steps = wants_steps
        self.of: dict[str, Way] = {}
        self.order: list[tuple[str, str, float]] = []

    def _note(self, what: str, request: RequestView, now: float) -> Way:
        self.order.append((what, request.request_id, now))
        return self.of.setdefault(request.request_id, Way())

    def on_assigned(self, request: RequestView, replica_id: int | None, now: float) -> None:
        self._note("assigned", request, now).assigned.append(replica_id)

    def on_held(self, request: RequestView, replica_id: int, now: float) -> None:
        self._note("held", request, now).held = now

    def on_transfer(self, request: RequestView, source: int, target: int, num_tokens: int, now: float) -> None:
        way = self._note("transfer", request, now)
        way.sent, way.target, way.num_moved = now, target, num_tokens

    def on_arrived(self, request: RequestView, source: int, target: int, now: float) -> None:
        self._note("arrived", request, now).arrived = now

    def on_kv_released(self, request: RequestView, replica_id: int, now: float) -> None:
        self._note("released", request, now).released = now

    def on_migration_aborted(self, request: RequestView, source: int, target: int, reason: str, now: float) -> None:
        self._note("aborted", request, now)

    def on_first_token(self, request: RequestView, now: float) -> None:
        self._note("first token", request, now).first_token = now

    def on_ended(self, request: RequestView, reason: EndReason, detail: str, now: float) -> None:
        way = self._note("ended", request, now)
        way.ended, way.reason, way.detail = now, reason, detail


@dataclass
class Finished:
    """A run, ended."""

    simulator: Simulator
    ways: Mapping[str, Way]
    order: Sequence[tuple[str, str, float]]


def settings(**keys: Any) -> dict[str, Any]:
    """One prefill and one decode replica of 100 blocks, KV of 1 MB a token over 10 GB/s."""
    mapping: dict[str, Any] = {
        "version": 1,
        "scheduling": POLICIES,
        "replica": {"memory": {"num_blocks": 100, "watermark_fraction": 0.0}, "max_batch_tokens": 2048},
        "pools": {"prefill": {}, "decode": {}},
        "hand_off": {"kv_bytes_per_token": 1_000_000},
        "links": {"bandwidth_gb_s": 10.0},
        "backend": {"simulator": {"latency": AFFINE}},
    }
    mapping.update(keys)
    mapping["workload"] = {
        "type": "synthetic",
        "arrivals": {"type": "at_once"},
        "num_requests": 1,
        "prompt_tokens": {"type": "constant", "value": 1},
        "output_tokens": {"type": "constant", "value": 1},
    }
    return mapping


def prepared(
    mapping: Mapping[str, Any], *, wants_steps: bool = False, registry: Registry | None = None, seed: int = 0
) -> tuple[SimulatedRun, Simulator, Ways]:
    """A run that has not begun, its simulator, and the ways of its requests."""
    registry = registry or load_registry()
    config = config_from_mapping(mapping, registry=registry)
    run = SimulatedRun(Run(config, registry, Workload.from_requests([]), SeedTree(seed)))
    ways = Ways(wants_steps=wants_steps)
    run.controller.watch((ways,))
    return run, run._simulator, ways


def inject_faults(
    simulator: Simulator, faults: Iterable[tuple[str, float, int]], num_replicas: int, back_at: float = 2.0
) -> None:
    """Let requests be aborted, and replicas fail and come back: (abort, fail or restart, seconds, number of the request or replica).

    At `back_at` the last ones come back, so that nothing waits for ever.
    """
    lost: set[int] = set()
    for kind, at, number in sorted(faults, key=lambda one: one[1]):
        tick, replica_id = to_ticks(at), number % num_replicas
        if kind == "abort":
            simulator.inject(tick, Phase.ABORT, f"r{number}")
        elif kind == "fail" and replica_id not in lost:
            lost.add(replica_id)
            simulator.inject(tick, Phase.FAILURE, Failure(tick, "default", replica_id, "lost", max_reruns=3))
        elif kind == "restart" and replica_id in lost:
            lost.discard(replica_id)
            simulator.inject(tick, Phase.FAILURE, Restart(tick, "default", replica_id))
    for replica_id in sorted(lost):
        simulator.inject(to_ticks(back_at), Phase.FAILURE, Restart(to_ticks(back_at), "default", replica_id))


def nothing_is_left(run: SimulatedRun) -> None:
    """Check that every request has ended and every block is free once pins are."""
    run.controller.check_conservation()
    assert run.controller.num_alive == 0
    for replica in run.controller.replicas():
        replica.memory.check()
        while replica.memory.release_pin() is not None:
            replica.memory.check()
        assert replica.memory.free_blocks == replica.memory.num_blocks
        assert not replica.lifecycle.held
        assert not replica.running_set.arrived
        assert not replica.running_set.loading


def simulate(
    mapping: Mapping[str, Any],
    requests: Sequence[RequestSpec],
    *,
    wants_steps: bool = False,
    registry: Registry | None = None,
) -> Finished:
    """Run to the end and check that nothing is left anywhere."""
    run, simulator, ways = prepared(mapping, wants_steps=wants_steps, registry=registry)
    simulator.run(requests)
    nothing_is_left(run)
    return Finished(simulator, ways.of, ways.order)
