"""Division of a simulation into independent parts, whose merged results equal those of the undivided run.

Tables have equal rows. Files are equal byte for byte, except that the files of steps and decisions may store a sequence
of repeated steps in fewer records than those of the undivided run.

Replicasets share nothing but the order of requests. The replicas of one replicaset share nothing else either, if its
scheduler binds requests on arrival without reading loads, and no policy keeps state about requests of other replicas.
Each part processes all requests in order, determines the replica of each request as the undivided run would, and
simulates the requests of its own replicas. A run that cannot be divided exactly is not divided; `why_whole` returns the
reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import structs

from vajra_py.config import ExperimentConfig
from vajra_py.contract import HandlesWakes, Layer, QueueView, ReplicaLoadView, RequestView, SchedulerTraits
from vajra_py.contract.policies import traits_of
from vajra_py.errors import POLICY_EXCEPTIONS, RunError, check_is_own_fault
from vajra_py.experiment.device_figures import latency_models
from vajra_py.experiment.runs.backend import Run, WriteTables
from vajra_py.experiment.runs.part_tables import write_part
from vajra_py.experiment.runs.simulated import SimulatedRun
from vajra_py.latency import CountsSteps, HasHostOverhead, ReplaysDurations
from vajra_py.plugins import Registry
from vajra_py.runtime.records.decision_log import DecisionLog, PartialDecisionLog
from vajra_py.runtime.requests.listeners import NOBODY
from vajra_py.runtime.requests.request import Request, RequestFacts, RequestState
from vajra_py.runtime.serving.load import LiveLoad
from vajra_py.runtime.serving.replicaset import Replicaset
from vajra_py.runtime.serving.workload_adapter import facts_of
from vajra_py.runtime.support.clock import to_seconds, to_ticks
from vajra_py.runtime.support.seeds import NotedSeeds
from vajra_py.workload import Workload
from vajra_py.workload.arrays import I64

_LENGTHS = ("none", "constant", "histogram", "oracle", "noisy_oracle")
"""Predictors of output lengths whose prediction for a request depends only on that request."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of several parts of a run."""

    index: int
    count: int


def why_whole(config: ExperimentConfig, registry: Registry) -> str | None:
    """Return the reason why a run of these settings cannot be divided; None if its replicasets can be simulated
    separately.
    """
    if config.backend.kind != "simulator":
        return f"only simulations are divided (backend: {config.backend.kind})"
    settings = config.backend.settings
    latencies = latency_models(config, registry).values()
    reasons = {
        "its observers see all replicas": bool(config.observers),
        "a scaler decides by all replicas": any(
            one.scheduling.scaling is not None for one in config.effective_replicasets.values()
        ),
        "what its replicas keep is logged in one order": any(
            one.scheduling.retention is not None or any(pool.retention is not None for pool in one.pools.values())
            for one in config.effective_replicasets.values()
        ),
        "it has memory tiers, whose results are of the whole run": any(
            one.memory.tiers is not None for one in config.replica_settings
        ),
        "it has drafts, which are logged in one order": any(
            one.draft.most_tokens > 0 for one in config.replica_settings
        ),
        "its admission policy sees all requests": config.admission_policy is not None,
        "it ends with its last arrival (backend.simulator.drain: false)": not settings.drain,
        f"the predictor of output lengths may remember requests ({settings.output_length.type})": (
            settings.output_length.type not in _LENGTHS
        ),
        "an asynchronous engine takes requests in when any replica's step ends": any(
            isinstance(one, HasHostOverhead) and one.host.asynchronous for one in latencies
        ),
        "its step times are replayed": any(isinstance(one, ReplaysDurations) for one in latencies),
        "its latency model sums the times of all replicas' steps": any(
            isinstance(one, CountsSteps) for one in latencies
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def why_together(
    replicaset: Replicaset, config: ExperimentConfig, seeds: NotedSeeds, first: RequestView | None
) -> str | None:
    """Return the reason why the replicas of a replicaset must stay in one part; None if each can be simulated
    separately.

    `seeds` records the random streams that its policies request; `first` is the replicaset's first request, or None
    without requests.
    """
    policies = replicaset.policies
    assert policies is not None  # a replicaset built from settings has policies
    if replicaset.hand_off is not None:
        return "requests go from one of its replicas to another"
    for layer in Layer:
        if any(isinstance(one, HandlesWakes) for one in policies.layer(layer).made):
            return f"{policies.name(layer)} may be woken while some of its replicas have nothing left"
    scheduler = policies.make_again(Layer.REPLICASET_SCHEDULER).made[0]
    name, admission = policies.name(Layer.REPLICASET_SCHEDULER), config.admission
    if traits_of(scheduler).reads_load:
        return f"{name} reads the replicas' loads"
    if first is not None and scheduler.assign(first, _views(replicaset), first.arrived_at) is None:
        return f"{name} leaves requests in a queue that the replicas share"
    if admission.max_queued_requests is not None or admission.max_queued_tokens is not None:
        return "the bounds of `admission` count what waits at all its replicas"
    if replicaset.may_refuse:
        return f"{policies.name(Layer.REPLICA_SCHEDULER)} is asked at all its replicas whether a request can be taken"
    listeners = [policies.listeners(), *(policies.listeners_of(one) for one in range(len(replicaset.replicas)))]
    if any(one != NOBODY for one in listeners) or not policies.shared.is_empty:
        return "a policy keeps state about the requests of all its replicas"
    for layer in (Layer.REQUEST_PRIORITIZER, Layer.REPLICA_SCHEDULER):
        seeds.asked.clear()
        policies.make_again(layer)
        if seeds.asked:
            return f"{policies.name(layer)} draws random numbers for all its replicas"
    return None


def _views(replicaset: Replicaset) -> list[ReplicaLoadView]:
    return [LiveLoad(one) for one in replicaset.replicas]  # nothing runs, so loads are up to date


@dataclass(frozen=True, slots=True)
class Division:
    """Assignment of replicas to parts.

    Attributes:
        owners: Part of each replica, by replicaset.
        together: Reason why the replicas of a replicaset stay in one part, by name of the replicaset; replicasets that
            can be divided have no entry.
    """

    owners: Mapping[str, Sequence[int]]
    together: Mapping[str, str]

    @property
    def parts(self) -> list[int]:
        """Numbers of the parts that have replicas."""
        return sorted({one for owners in self.owners.values() for one in owners})


def divide(run: SimulatedRun, config: ExperimentConfig, seeds: NotedSeeds, count: int) -> Division:
    """Assign replicas in order to `count` parts of about equal size; replicas that must stay together go to the part of
    the middle replica among them.
    """
    replicasets = run.controller.replicasets
    firsts: dict[str, RequestView] = {}
    for spec in run.workload:
        facts = facts_of(spec)
        replicaset = run.controller.replicaset_for(facts)
        request = run.controller.new_request(facts, replicaset, spec.arrived_at)
        request.move_to(RequestState.WAITING)
        firsts.setdefault(replicaset.name, request)
        if len(firsts) == len(replicasets):
            break
    total = sum(len(one.replicas) for one in replicasets.values())
    owners: dict[str, list[int]] = {}
    together: dict[str, str] = {}
    start = 0
    for name, replicaset in replicasets.items():
        size = len(replicaset.replicas)
        owners[name] = [(start + position) * count // total for position in range(size)]
        reason = why_together(replicaset, config, seeds, firsts.get(name)) if size > 1 else None
        if reason is not None:
            together[name] = reason
            owners[name] = [owners[name][size // 2]] * size
        start += size
    return Division(owners, together)


class PartOfRun(SimulatedRun):
    """Simulation of the replicas of one part; requests keep the index that they have in the undivided run."""

    decision_log: type[DecisionLog] = PartialDecisionLog
    write: WriteTables = staticmethod(write_part)

    def __init__(self, run: Run, part: Part) -> None:
        seeds = NotedSeeds(run.seeds)
        super().__init__(structs.replace(run, seeds=seeds))
        division = divide(self, run.config, seeds, part.count)
        rows, self._replicas = self._plan(division, part.index)
        self._rows = rows.tolist()
        self._position = -1
        self.controller.index_of = self._next_index
        for name, replicaset in self.controller.replicasets.items():
            if name not in division.together:
                replicaset.bind_policy(_Planned(self), replicaset.scheduler_name)
        self.workload = Workload(run.workload.columns.take(rows), run.workload.name, run.workload.source)

    def _plan(self, division: Division, part: int) -> tuple[I64, list[int]]:
        """Return the workload rows of this part's requests and the replica of each (-1 if the request is refused, or if
        its replica is decided during the run).
        """
        rows: list[int] = []
        replicas: list[int] = []
        views = {name: _views(one) for name, one in self.controller.replicasets.items()}
        delay = to_ticks(self.options.arrival_delay_s)
        row = 0
        self.controller.index_of = lambda facts: row
        for row, spec in enumerate(self.workload):
            tick = to_ticks(spec.arrived_at)
            facts = facts_of(spec)
            replicaset = self.controller.replicaset_for(facts)
            request = self.controller.new_request(facts, replicaset, to_seconds(tick))
            owners, replica_id, now = division.owners[replicaset.name], -1, to_seconds(tick + delay)
            if replicaset.name not in division.together and replicaset.refusal(request, now) is None:
                request.move_to(RequestState.WAITING)
                replica_id = self._assign(replicaset, request, views[replicaset.name], now)
            if owners[max(replica_id, 0)] == part:
                rows.append(row)
                replicas.append(replica_id)
        return np.array(rows, dtype=np.int64), replicas

    def _assign(self, replicaset: Replicaset, request: Request, views: Sequence[ReplicaLoadView], now: float) -> int:
        """Return the replica to which the undivided run would bind a request. Raises `RunError` if it cannot be
        determined.
        """
        try:
            chosen = replicaset.scheduler.assign(request, views, now)
        except POLICY_EXCEPTIONS as error:
            check_is_own_fault(error)
            raise RunError(f"{replicaset.scheduler_name}: {error}") from error
        if isinstance(chosen, int) and 0 <= chosen < len(views):
            return int(chosen)
        raise RunError(f"{replicaset.scheduler_name} binds a request to no replica ({chosen!r})")

    def _next_index(self, facts: RequestFacts) -> int:
        """Return the index, in the undivided run, of the request that is submitted next; requests are submitted in the
        order of the plan.
        """
        self._position += 1
        return int(self._rows[self._position])

    def planned(self) -> int:
        """Return the planned replica of the request that was submitted last."""
        return self._replicas[self._position]


class _Planned:
    """Replicaset scheduler that binds requests according to the plan."""

    traits = SchedulerTraits(reads_load=False)

    def __init__(self, part: PartOfRun) -> None:
        self._part = part

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> int | None:
        """Return the planned replica."""
        return self._part.planned()

    def pull(self, replica: ReplicaLoadView, queued: QueueView, now: float) -> Iterable[str]:
        """Return no requests, as each is bound on arrival."""
        return ()
