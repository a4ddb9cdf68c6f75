"""Protocols of the three layers of policies: order of requests, choice of replica, and contents of a step.

These are Protocols, not base classes: any object with these methods is a policy, in simulator and engine alike.
Policies read views, get `now` as an argument (seconds on the run's clock) and named random streams from their
`PolicyContext`; they never read a clock, draw from a global generator, sleep, allocate memory or touch tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias, runtime_checkable

from vajra_py.contract.batch import BatchBuilder
from vajra_py.contract.groups import FallenGroups, FallenRequests
from vajra_py.contract.programs import ProgramView
from vajra_py.contract.requests import ReplicaId, RequestView
from vajra_py.contract.views import Key, LocalReplicaView, QueueView, ReplicaLoadView


class Layer(Enum):
    """The three places where a policy can be plugged in; the values are the keys of `scheduling:` in YAML."""

    REQUEST_PRIORITIZER = "request_prioritizer"
    REPLICASET_SCHEDULER = "replicaset_scheduler"
    REPLICA_SCHEDULER = "replica_scheduler"


class KeyMotion(Enum):
    """Volatility of a request's key while it waits. Queues are exact and cheap only if the declaration is correct."""

    STATIC = "static"
    """Fixed when the request arrives."""
    PROGRESS = "progress"
    """Changes only when the request itself computes, generates or is preempted; re-read at those moments."""
    TIME_LINEAR = "time_linear"
    """intercept + slope * now between two such moments (`TimeLinearPrioritizer.line`); order is exact at every time."""
    NAMED_FALLS = "named_falls"
    """May rise at any time, but falls only if the policy reports it (`NamesFalls`); order is exact at every time.

    A key is re-read when its request would be next, so rises need not be reported.
    """
    PREFIX_HITS = "prefix_hits"
    """Changes with the request's own progress, with its `prefix_hit_tokens`, and at times that `falls_at` returns.

    Read at every step where one of these has changed, and in groups after each admission and preemption too.
    """
    ARBITRARY = "arbitrary"
    """May change at any time; re-read for every waiting request at every step."""
    VOLATILE = "volatile"
    """May change at any time, even while a step is formed: also re-read after each admission and preemption.

    For keys that `on_admission` or `on_preemption` changes; each re-reading costs as much as for `ARBITRARY`. For
    counters shared by requests, such as a tenant's share, keys of groups (`GroupsRequests`) cost far less.
    """


@runtime_checkable
class RequestPrioritizer(Protocol):
    """Ranks requests by urgency. One instance serves a whole replicaset; the same key orders admission and victims."""

    @property
    def key_motion(self) -> KeyMotion:
        """Volatility of the keys; read once, when the policy is built."""

    def key(self, request: RequestView, now: float) -> Key:
        """Return the request's key at `now`; lower is more urgent.

        Ties go to the earlier arrival, then the lower index.
        """


@runtime_checkable
class TimeLinearPrioritizer(RequestPrioritizer, Protocol):
    """A prioritizer whose keys are straight lines in time; needed with `KeyMotion.TIME_LINEAR`."""

    def line(self, request: RequestView) -> tuple[float, float]:
        """Return (intercept, slope): key(request, now) = intercept + slope * now until the request's next progress."""


@runtime_checkable
class NamesFalls(RequestPrioritizer, Protocol):
    """A prioritizer that reports falls of waiting requests' keys; needed with `KeyMotion.NAMED_FALLS`."""

    @property
    def fallen_requests(self) -> FallenRequests:
        """List of requests whose keys have fallen; read once. Add a request as soon as its key falls."""


@runtime_checkable
class FallsWithTime(RequestPrioritizer, Protocol):
    """Optional method of a prioritizer with `KeyMotion.NAMED_FALLS` or `PREFIX_HITS` whose keys may move with time alone."""

    def falls_at(self, request: RequestView, now: float) -> float | None:
        """Return the earliest time at which the key may fall without an event, seconds on the run's clock; None: never.

        With `PREFIX_HITS`, also the earliest time of a rise. Called whenever the key is read. From the returned time
        on, the key is re-read at every step until a later time is returned, so a slightly early time does no harm.
        """


@runtime_checkable
class CountsKeyChanges(RequestPrioritizer, Protocol):
    """Optional method of a prioritizer with `KeyMotion.ARBITRARY`, `VOLATILE` or `PREFIX_HITS` to avoid re-reading."""

    def key_epoch(self) -> int:
        """Return a number that changes whenever the key of any waiting request may have changed, for any reason.

        If the number is unchanged, keys are not re-read. A request's own progress needs no new number, nor do its
        prefix hits with `PREFIX_HITS`.
        """


@runtime_checkable
class GroupsRequests(RequestPrioritizer, Protocol):
    """Optional methods of a prioritizer that ranks by group first: by tenant, program, session or adapter.

    The order is (key of the group, key of the request, arrival, index), with the group's present key. `key_motion` is
    that of the requests' keys within their groups. With `STATIC`, `PROGRESS` or `PREFIX_HITS`, a change of a group's
    key costs O(log groups); with other motions, the keys of all waiting requests are re-read, as for `VOLATILE`.
    """

    def group(self, request: RequestView) -> str:
        """Return the name of the request's group, which must not change during the request's life."""

    def group_key(self, group: str) -> Key:
        """Return the group's present key; lower is more urgent.

        It may rise at any time, since it is re-read when the group would be next. While requests of the group wait, it
        may fall only if the policy reports it (`LowersGroups`).
        """


@runtime_checkable
class LowersGroups(GroupsRequests, Protocol):
    """Optional attribute of a prioritizer whose groups' keys may fall as well."""

    @property
    def fallen_groups(self) -> FallenGroups:
        """List of groups whose keys have fallen; read once. Add a group as soon as its key falls."""


@runtime_checkable
class PredictsSlack(Protocol):
    """Optional methods of a prioritizer with deadlines; replica schedulers read slack from `LocalReplicaView`.

    A replica scheduler that requires slack declares `SchedulerTraits.needs_slack`.
    """

    def slack_s(self, request: RequestView, now: float) -> float:
        """Return the slack at `now`: seconds of delay until the request is late; negative if it is late already."""

    def slack_fraction(self, request: RequestView, now: float) -> float:
        """Return the slack as a fraction of the time from arrival to deadline; at most 1."""


@runtime_checkable
class ReplicasetScheduler(Protocol):
    """Assigns requests to replicas' queues at arrival, or lets replicas pull them."""

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Return the replica, which must be up, whose queue the arriving request joins (early binding).

        None leaves it in the shared queue, from which replicas pull (late binding).
        """

    def pull(self, replica: ReplicaLoadView, queued: QueueView, now: float) -> Iterable[str]:
        """Return the ids of shared-queue requests that the replica may admit in its next step; a lazy iterable is fine.

        Called each time the replica forms a step while the shared queue is not empty. A request stays in the queue until
        the replica's scheduler admits it.
        """


@runtime_checkable
class PlacesAfterPrompt(Protocol):
    """Optional method of a replicaset scheduler for replicasets whose pools split prompts and decodes.

    A scheduler without it needs no change: one instance assigns arrivals to prefill replicas, and a second one assigns
    requests with computed prompts to decode replicas; each sees only its own replicas. With it, `assign` sees the
    replicas of all pools, and may choose any of them.
    """

    def place_after_prompt(
        self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float
    ) -> ReplicaId | None:
        """Return the replica to continue a request after its prompt, or after a replica scheduler's hand-off.

        None: it stays on its replica. While the chosen replica has no room for it, this is called again after changes.
        """


@dataclass(frozen=True, slots=True)
class Move:
    """Decision to move a request to another replica."""

    request: RequestView
    target: ReplicaId | None
    """Target replica; None returns a waiting request to the shared queue."""
    reason: str = ""
    """Reason shown in tables and reports."""


@runtime_checkable
class MovesRequests(Protocol):
    """Optional method of a replicaset scheduler that moves waiting and running requests between replicas."""

    def moves(self, replicas: Sequence[ReplicaLoadView], now: float) -> Iterable[Move]:
        """Return the requests to move now. Running ones take their KV along, and continue to compute during the copy.

        Called when the scheduler is woken (`PolicyContext.wake`) and when a replica comes, drains or is lost.
        """


@runtime_checkable
class ReplicaScheduler(Protocol):
    """Selects the requests of each step with their token counts, and victims of preemption if memory is short."""

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Fill `batch`. An empty batch means that nothing can run until something changes."""


@runtime_checkable
class ChunksSoloPrompts(Protocol):
    """Optional method of a replica scheduler, to predict prefill times with its chunk sizes (needed by EDF and LRS)."""

    def solo_chunk_size(self, num_done_tokens: int, num_remaining_tokens: int) -> int:
        """Return the size in tokens (at least 1) of the next chunk of a prompt that is alone on the replica."""


SoloChunkSize: TypeAlias = Callable[[int, int], int]
"""Function from (done, remaining) tokens of a prompt to the size of its next chunk in tokens."""


@runtime_checkable
class RefusesRequests(Protocol):
    """Optional method of a replica scheduler whose rules exclude some requests for ever.

    Requests that can never fit into KV memory, or exceed the model's length, are refused without a call.
    """

    def refuses(self, request: RequestView, replica: ReplicaLoadView, now: float) -> str | None:
        """Return the reason why the request, or others because of it, might wait for ever; None if that cannot happen.

        Called before the request is queued, for the schedulers of the replicas that are up, until one returns None; if
        none does, the first reason is sent to the client. A preempted request must be able to resume, so consider its
        largest length, `num_prompt_tokens + max_tokens - 1` tokens to compute. The result must not depend on load,
        which would refuse requests that could be served later; use `BatchBuilder.drop` for requests that already wait.
        """


@runtime_checkable
class EvictsAdapters(Protocol):
    """Optional method of a replica scheduler that chooses the LoRA adapter to evict."""

    def evict_adapter(self, idle: Sequence[str], now: float) -> str:
        """Return one of `idle`, the unused loaded adapters, least recently used first; by default the first is evicted.

        Called during `BatchBuilder.add` for a request whose adapter is not loaded, if no slot is free.
        """


class SteadyState(Enum):
    """A situation in which every step computes all decodes of the replica and nothing else."""

    NOTHING_WAITS = "nothing waits"
    """All running requests decode, all are in the batch, and the replica's queue and the shared queue are empty."""
    BATCH_FULL = "the batch is full"
    """All running requests decode, and they fill the batch; any number of requests may wait."""


@dataclass(frozen=True, slots=True)
class SchedulerTraits:
    """Claims of a replica or replicaset scheduler about its behaviour: its attribute `traits`, read once after building.

    A scheduler without that attribute claims nothing. The conformance suite checks every claim.
    """

    repeats_decodes: frozenset[SteadyState] = frozenset()
    """Situations in which a step of all decodes is followed by equal ones; for replica schedulers.

    After such a step every further one is equal, regardless of the time, until a request arrives (with
    `NOTHING_WAITS`), a request ends, or a decode lacks a block. A simulator then computes these steps at once.
    """
    reads_load: bool = True
    """False if `assign` reads only `replica_id` and `is_up` of the replicas; for replicaset schedulers.

    A simulator then need not update every replica at each arrival.
    """
    needs_slack: bool = False
    """True if a replica scheduler requires slack: building it fails if the prioritizer lacks `PredictsSlack`."""
    is_work_conserving: bool = False
    """True if no replica idles while there is work for it.

    For a replica scheduler: as long as there are enough blocks, steps follow each other until every request has ended.
    For a replicaset scheduler: as long as there are enough blocks, no replica is idle while a request of the replicaset
    waits.
    """


NO_TRAITS = SchedulerTraits()


def traits_of(policy: object) -> SchedulerTraits:
    """Return the traits that a scheduler declares; the defaults if it declares none."""
    traits: SchedulerTraits = getattr(policy, "traits", NO_TRAITS)
    return traits


@dataclass(frozen=True, slots=True)
class EndedStep:
    """A completed step, for listening policies. The requests' counters are already updated."""

    replica_id: ReplicaId
    step_index: int
    """Steps that this replica had run before."""
    formed_at: float
    ended_at: float
    """Time of its end, seconds on the run's clock."""
    requests: Sequence[RequestView]
    """Requests of the step, in batch order; some of them may have ended with it."""
    num_tokens: Sequence[int]
    """Query tokens that the step computed for each of `requests`."""

    @property
    def duration_s(self) -> float:
        """Seconds from forming the step to its end."""
        return self.ended_at - self.formed_at


@dataclass(frozen=True, slots=True)
class EndedRun:
    """Consecutive completed steps of one replica that computed the same decodes and nothing else.

    No request was admitted, preempted or ended in them. The requests' counters are those after the last step.
    """

    replica_id: ReplicaId
    step_index: int
    """Steps that this replica had run before the first."""
    formed_at: float
    """Time at which the first step was formed, seconds on the run's clock; each further one when the last had ended."""
    ended_at: Sequence[float]
    """End of each step, seconds on the run's clock."""
    requests: Sequence[RequestView]
    """Requests of every step, in batch order; a step computed one token of each."""

    def steps(self) -> Iterator[EndedStep]:
        """Yield the steps one by one; the requests' counters are those after the last."""
        num_tokens, formed_at = (1,) * len(self.requests), self.formed_at
        for number, ended_at in enumerate(self.ended_at):
            index = self.step_index + number
            yield EndedStep(self.replica_id, index, formed_at, ended_at, self.requests, num_tokens)
            formed_at = ended_at


class ListensToRequests(Protocol):
    """Optional callbacks of any policy, to keep state per request (attained service, fairness counters).

    Each method is optional, except that `on_step_run` requires `on_step_end`. With `on_step_end` but without
    `on_step_run`, a simulator must form every step individually; otherwise it may compute repeated steps at once
    (`SchedulerTraits.repeats_decodes`).
    """

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        """Requests have been accepted; they are not yet assigned or queued."""

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """A waiting request has been admitted or readmitted; called immediately, while the step is being formed."""

    def on_preemption(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """A running request has just lost its memory or was swapped out (`is_swapped`), and waits again."""

    def on_moved(self, request: RequestView, source: ReplicaId, target: ReplicaId, now: float) -> None:
        """A request that was handed off or migrates has its KV at the target and waits there; `source` released it."""

    def on_step_end(self, step: EndedStep) -> None:
        """A step of a replica is complete."""

    def on_step_run(self, run: EndedRun) -> None:
        """Steps of a replica are complete, for which `on_step_end` is not called.

        A run may be reported in several parts.

        Steps of one replica are reported in order; simultaneous steps of other replicas may be reported before or
        after.
        """

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Requests have ended, each for its `end_reason`: finished, aborted, expired, dropped while waiting, failed."""

    def on_program_end(self, program: ProgramView, now: float) -> None:
        """A program has ended, for its `end_reason`; called for every policy of the run, after the last call's end."""


@runtime_checkable
class HandlesWakes(Protocol):
    """Optional method of any policy that sets wake-ups (`PolicyContext.wake`)."""

    def on_wake(self, key: str, now: float) -> None:
        """The time of the wake-up with this key has come."""


SchedulingPolicy: TypeAlias = RequestPrioritizer | ReplicasetScheduler | ReplicaScheduler
