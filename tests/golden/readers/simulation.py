"""Simulate a recorded workload, and keep everything that recordings tell of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vajra_py.config import config_from_mapping
from vajra_py.contract import BatchFeatures, PolicySpec, RequestView
from vajra_py.contract.latency import LatencyModel
from vajra_py.contract.observer import EndReason, Observer, StepEnd, StepRecord
from vajra_py.latency.models.unknown import NoPredictions
from vajra_py.latency.services.output_length import NoLengths
from vajra_py.plugins import load_registry
from vajra_py.runtime.serving.build import ModelFacts, Services, build_controller
from vajra_py.runtime.serving.replica import Replica
from vajra_py.runtime.step.plan import StepPlan
from vajra_py.runtime.support.clock import TICKS_PER_SECOND
from vajra_py.runtime.support.seeds import SeedTree
from vajra_py.sim.executor import SimulatedExecutor, StepTimer
from vajra_py.sim.simulator import SimulationOptions, Simulator
from vajra_py.workload.request import PromptContent, RequestSpec

NOT_IN_FILE: Mapping[str, Any] = {
    "workload": {"type": "jsonl", "path": "requests come from the trace"},
    "backend": {"simulator": {"latency": {"type": "affine", "base_s": 1.0}}},
}
"""Sections of an experiment that a recorded run has no use for; step times come from timers."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One request's part of one step."""

    formed_at: float
    ended_at: float
    replica_id: int
    num_tokens: int
    num_computed_before: int
    kind: str


@dataclass(frozen=True, slots=True)
class Step:
    """One step."""

    formed_at: float
    ended_at: float
    replica_id: int
    entries: Sequence[tuple[str, int, int]]
    """Request, tokens, tokens computed before."""


@dataclass(slots=True)
class Life:
    """Life of one request, times in seconds."""

    replica_id: int | None = None
    assignments: list[int | None] = field(default_factory=list)
    first_token_at: float | None = None
    ended_at: float | None = None
    detail: str = "never ended"
    entries: list[Entry] = field(default_factory=list)
    preempted_at: list[float] = field(default_factory=list)
    held_at: float | None = None
    reserved_at: float | None = None
    arrived_at: float | None = None
    released_at: float | None = None
    target: int | None = None
    """Times of a request that leaves with its KV, and the replica to which it goes."""
    notes: dict[str, float | int | str] = field(default_factory=dict)
    """The latest that its replica scheduler noted."""


class Record(Observer):
    """Keeps the life of every request, and every step."""

    wants_steps = True

    def __init__(self) -> None:
        self.lives: dict[str, Life] = {}
        self.steps: list[Step] = []
        self._formed: dict[tuple[int, int], StepRecord] = {}

    def life(self, request_id: str) -> Life:
        """The life of a request, empty before it arrives."""
        return self.lives.setdefault(request_id, Life())

    def on_assigned(self, request: RequestView, replica_id: int | None, now: float) -> None:
        life = self.life(request.request_id)
        life.replica_id = replica_id
        life.assignments.append(replica_id)

    def on_first_token(self, request: RequestView, now: float) -> None:
        self.life(request.request_id).first_token_at = now

    def on_preempted(self, request: RequestView, mode: str, now: float) -> None:
        self.life(request.request_id).preempted_at.append(now)

    def on_ended(self, request: RequestView, reason: EndReason, detail: str, now: float) -> None:
        life = self.life(request.request_id)
        life.ended_at, life.detail = now, f"{reason.value} {detail}".strip()

    def on_held(self, request: RequestView, replica_id: int, now: float) -> None:
        self.life(request.request_id).held_at = now

    def on_transfer(self, request: RequestView, source: int, target: int, num_tokens: int, now: float) -> None:
        life = self.life(request.request_id)
        life.reserved_at, life.target = now, target

    def on_arrived(self, request: RequestView, source: int, target: int, now: float) -> None:
        self.life(request.request_id).arrived_at = now

    def on_kv_released(self, request: RequestView, replica_id: int, now: float) -> None:
        self.life(request.request_id).released_at = now

    def on_step_begin(self, step: StepRecord) -> None:
        self._formed[step.replica_id, step.step_index] = step

    def on_step_end(self, step: StepEnd) -> None:
        formed = self._formed.pop((step.replica_id, step.step_index))
        entries = []
        for name, notes in formed.notes.items():
            self.life(name).notes.update(notes)
        for chunk in formed.chunks:
            name, num_tokens, before = chunk.request.request_id, chunk.num_tokens, chunk.num_computed_before
            entry = Entry(step.formed_at, step.ended_at, step.replica_id, num_tokens, before, chunk.kind)
            self.life(name).entries.append(entry)
            entries.append((name, num_tokens, before))
        self.steps.append(Step(step.formed_at, step.ended_at, step.replica_id, entries))


class PlanTimer:
    """Steps last what a latency model says to the features that a recorded system would see in the plan."""

    def __init__(self, latency: LatencyModel, features: Callable[[StepPlan], BatchFeatures]) -> None:
        self._latency = latency
        self._features = features

    def stage_ticks(self, plan: StepPlan) -> int:
        """The latency model's answer, to the nearest tick."""
        return round(self._latency.stage_time_s(self._features(plan)) * TICKS_PER_SECOND)


def simulate(
    system: Mapping[str, Any],
    requests: Iterable[RequestSpec],
    timer_of: Callable[[Replica], StepTimer],
    observers: Sequence[Observer],
    policies: Sequence[PolicySpec] = (),
) -> None:
    """Run a system, given as the top-level keys of an experiment file, on a workload."""
    registry = load_registry().with_policies(policies)
    config = config_from_mapping({"version": 1, **NOT_IN_FILE, **system}, registry=registry)
    executor = SimulatedExecutor()
    services = Services(
        registry=registry,
        latency=NoPredictions("the latency model"),
        output_lengths=NoLengths(),
        seeds=SeedTree(0),
        facts=ModelFacts(),
        executor_of=lambda replicaset, replica_id: executor,
    )
    controller = build_controller(config, services)
    controller.watch(observers)
    Simulator(controller, executor, timer_of, SimulationOptions()).run(requests)


def content_of(hash_ids: Sequence[int], num_tokens: int, block_tokens: int) -> PromptContent:
    """A prompt of blocks that are named by ids; the last one may be partial."""
    segments, left = [], num_tokens
    for hash_id in hash_ids:
        segments.append((hash_id, min(left, block_tokens)))
        left -= block_tokens
    return PromptContent(tuple(segments))
