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
    """Volatility of a waiting request's key. Queues are exact and cheap only if the declaration is correct."""

    STATIC = "static"
    """Fixed when the request arrives."""
    PROGRESS = "progress"
    """Changes only when the request itself computes or generates tokens or is preempted; re-read at those times."""
    TIME_LINEAR = "time_linear"
    """Is intercept + slope * now (`TimeLinearPrioritizer.line`) until the request's next progress or preemption.

    The order is exact at every time.
    """
    NAMED_FALLS = "named_falls"
    """May rise at any time, but falls only if the policy reports it (`NamesFalls`). The order is exact at every time.

    A key is re-read before its request is selected as the next one, so rises need not be reported.
    """
    PREFIX_HITS = "prefix_hits"
    """Changes only when the request makes progress, when its `prefix_hit_tokens` changes, and at times that `falls_at`
    returns.

    Re-read at every step at which one of these has happened; with `GroupsRequests`, also after each admission and
    preemption.
    """
    ARBITRARY = "arbitrary"
    """May change at any time; re-read for every waiting request at every step."""
    VOLATILE = "volatile"
    """May change at any time, even while a step is formed: also re-read after each admission and preemption.

    Needed for keys that `on_admission` or `on_preemption` changes; each re-reading costs as much as for `ARBITRARY`.
    For counters shared by requests, such as a tenant's share, keys of groups (`GroupsRequests`) cost far less.
    """


@runtime_checkable
class RequestPrioritizer(Protocol):
    """Ranks requests by urgency. One instance serves a whole replicaset.

    The same key orders admission and the choice of victims for preemption.
    """

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
        """List of requests whose keys have fallen. The attribute is read once; add a request to the list as soon as its
        key falls.
        """


@runtime_checkable
class FallsWithTime(RequestPrioritizer, Protocol):
    """Optional method of a prioritizer with `KeyMotion.NAMED_FALLS` or `PREFIX_HITS` whose keys may change without
    events.
    """

    def falls_at(self, request: RequestView, now: float) -> float | None:
        """Return the earliest time at which the key may fall without an event, seconds on the run's clock; None: never.

        With `PREFIX_HITS`, a rise counts like a fall. Called whenever the key is read. From the returned time on, the
        key is re-read at every step until a later time is returned, so a slightly early time does no harm.
        """


@runtime_checkable
class CountsKeyChanges(RequestPrioritizer, Protocol):
    """Optional method of a prioritizer with `KeyMotion.ARBITRARY`, `VOLATILE` or `PREFIX_HITS` that avoids re-reading
    unchanged keys.
    """

    def key_epoch(self) -> int:
        """Return a number that changes whenever the key of any waiting request may have changed, for any reason.

        If the number is unchanged, keys are not re-read. With `PREFIX_HITS` there is one exception: keys of requests
        whose prefix hits may have changed are re-read. Neither a changed prefix hit nor a request's own progress
        requires a new number.
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
    """Optional attribute of a prioritizer whose groups' keys may fall as well as rise."""

    @property
    def fallen_groups(self) -> FallenGroups:
        """List of groups whose keys have fallen. The attribute is read once; add a group to the list as soon as its key
        falls.
        """


@runtime_checkable
class PredictsSlack(Protocol):
    """Optional methods of a prioritizer with deadlines; replica schedulers read slack from `LocalReplicaView`.

    A replica scheduler that requires slack declares `SchedulerTraits.needs_slack`.
    """

    def slack_s(self, request: RequestView, now: float) -> float:
        """Return the slack at `now`: seconds by which the request may still be delayed without being late; negative if
        it is late already.
        """

    def slack_fraction(self, request: RequestView, now: float) -> float:
        """Return the slack as a fraction of the time from arrival to deadline; at most 1."""


@runtime_checkable
class ReplicasetScheduler(Protocol):
    """Assigns requests to replicas' queues at arrival, or lets replicas pull them."""

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Return the id of the replica whose queue the request joins (early binding): one of `replicas` that is up.

        None leaves the request in the shared queue, from which replicas pull (late binding). Called on arrival, and
        again when a request must be placed anew, for example because its replica drains or has failed.
        """

    def pull(self, replica: ReplicaLoadView, queued: QueueView, now: float) -> Iterable[str]:
        """Return the ids of shared-queue requests that the replica may admit in its next step; a lazy iterable is fine.

        Called only while the shared queue is not empty: when the replica's scheduler reads the waiting requests, and to
        find out whether an idle replica could run any request of the queue. A request stays in the queue until a
        replica's scheduler admits it.
        """


@runtime_checkable
class PlacesAfterPrompt(Protocol):
    """Optional method of a replicaset scheduler for replicasets whose pools split prompts and decodes.

    Without this method, one instance of the scheduler assigns arrivals to prefill replicas, and a second instance
    assigns requests with computed prompts to decode replicas; each instance sees only its own replicas. With this
    method there is one instance, whose `assign` sees the replicas of all pools and may choose any of them.
    """

    def place_after_prompt(
        self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float
    ) -> ReplicaId | None:
        """Return the id of the replica that continues a request after its prompt, or after `BatchBuilder.hand_off`.

        With None, the request continues on its present replica. If that is a prefill replica, the request waits there
        instead, and the method is called again later. With `hand_off.when_full: hold`, the method is also called again
        while the chosen replica is full.
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
        """Return the moves to make now. A running request continues to compute while its KV is copied to the target.

        Called when the scheduler is woken (`PolicyContext.wake`), and after a replica was lost or restored.
        """


@runtime_checkable
class ReplicaScheduler(Protocol):
    """Selects the requests of each step, their token counts, and the victims of preemption if memory is short."""

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Fill `batch`. If it stays empty, no step runs, and the method is called again after the next event.

        Requests may wait only if an event is still to come, such as the end of a step or the time set with
        `BatchBuilder.idle_until`; otherwise an empty batch is a violation of the contract.
        """


@runtime_checkable
class ChunksSoloPrompts(Protocol):
    """Optional method of a replica scheduler that states its chunk sizes, from which prefill times are predicted.

    EDF and LRS use these times. Without the method, chunks are predicted to fill the step's token budget.
    """

    def solo_chunk_size(self, num_done_tokens: int, num_remaining_tokens: int) -> int:
        """Return the size in tokens (at least 1) of the next chunk of a prompt that is alone on the replica."""


SoloChunkSize: TypeAlias = Callable[[int, int], int]
"""Function that takes the numbers of done and remaining tokens of a prompt, and returns the size of the prompt's next
chunk in tokens.
"""


@runtime_checkable
class RefusesRequests(Protocol):
    """Optional method of a replica scheduler whose rules exclude some requests for ever.

    Requests that can never fit into KV memory, or exceed the model's length, are refused without a call.
    """

    def refuses(self, request: RequestView, replica: ReplicaLoadView, now: float) -> str | None:
        """Return the reason why the request, or others because of it, might wait for ever; None if this cannot happen.

        Called before the request is queued. The schedulers of the replicas that could serve the request are asked one
        after another, until one returns None. If none does, the request is refused, and the client gets the first
        reason. A preempted request must be able to resume, so consider its largest length, `num_prompt_tokens +
        max_tokens - 1` tokens to compute. The result must not depend on load, since requests that could be served later
        would otherwise be refused. Use `BatchBuilder.drop` for requests that already wait.
        """


@runtime_checkable
class EvictsAdapters(Protocol):
    """Optional method of a replica scheduler that chooses the LoRA adapter to evict."""

    def evict_adapter(self, idle: Sequence[str], now: float) -> str:
        """Return the name of the adapter to evict, one of `idle`.

        `idle` lists the loaded adapters that no request uses, least recently used first; without this method, the first
        of them is evicted. Called during `BatchBuilder.add` for a request whose adapter is not loaded, if no slot is
        free.
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
    """Situations in which a step of all decodes is followed by equal steps; for replica schedulers.

    In these situations every further step is equal, regardless of the time, until a request arrives (with
    `NOTHING_WAITS`), a request ends, or a decode lacks a block. A simulator then computes the equal steps at once.
    """
    reads_load: bool = True
    """True if `assign` may read any figure of the replicas; for replicaset schedulers.

    False if `assign` reads only `replica_id` and `is_up`. A simulator then need not update every replica at each
    arrival.
    """
    needs_slack: bool = False
    """True if a replica scheduler requires slack: building it fails if the prioritizer lacks `PredictsSlack`."""
    is_work_conserving: bool = False
    """True if no replica idles while there is work for it, as long as there are enough blocks.

    For a replica scheduler: steps follow each other until every request has ended. For a replicaset scheduler: no
    replica is idle while a request of the replicaset waits.
    """


NO_TRAITS = SchedulerTraits()


def traits_of(policy: object) -> SchedulerTraits:
    """Return the traits that a scheduler declares; the defaults if it declares none."""
    traits: SchedulerTraits = getattr(policy, "traits", NO_TRAITS)
    return traits


@dataclass(frozen=True, slots=True)
class EndedStep:
    """A completed step, for policies that listen. The requests' counters are already updated."""

    replica_id: ReplicaId
    step_index: int
    """Number of steps that this replica had run before this one."""
    formed_at: float
    ended_at: float
    """End of the step, seconds on the run's clock."""
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
    """Number of steps that this replica had run before the first of these steps."""
    formed_at: float
    """Time at which the first step was formed, seconds on the run's clock; each further step was formed when the one
    before it ended."""
    ended_at: Sequence[float]
    """End of each step, seconds on the run's clock."""
    requests: Sequence[RequestView]
    """Requests of every step, in batch order; each step computed one token of each request."""

    def steps(self) -> Iterator[EndedStep]:
        """Yield the steps one by one; the requests' counters are those after the last step."""
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
        """Called after requests were accepted, before they are assigned or queued."""

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Called immediately after a waiting request was admitted or readmitted, while the step is being formed."""

    def on_preemption(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Called after an admitted request lost its KV in device memory; it waits again.

        Causes: preemption by recompute or swap (`is_swapped`), or the loss of its replica. After a loss, the request is
        placed again only after this call.
        """

    def on_moved(self, request: RequestView, source: ReplicaId, target: ReplicaId, now: float) -> None:
        """Called when the KV of a handed-off or migrating request is at `target`, where the request now waits.

        `source` has released its copy.
        """

    def on_step_end(self, step: EndedStep) -> None:
        """Called after a step of a replica is complete."""

    def on_step_run(self, run: EndedRun) -> None:
        """Called after repeated steps of a replica are complete, instead of `on_step_end` for each of them.

        A run may be reported in several parts. Steps of one replica are reported in order; the order of simultaneous
        steps of different replicas is unspecified.
        """

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Called after requests have ended, whether finished, aborted, expired, dropped or failed (`end_reason`)."""

    def on_program_end(self, program: ProgramView, now: float) -> None:
        """Called after a program has ended (`end_reason`); its last call ended before.

        Called on the policies of the replicasets to which its calls were sent.
        """


@runtime_checkable
class HandlesWakes(Protocol):
    """Optional method of any policy that sets wake-ups (`PolicyContext.wake`)."""

    def on_wake(self, key: str, now: float) -> None:
        """Called at the time that the policy set for the wake-up with this key."""


SchedulingPolicy: TypeAlias = RequestPrioritizer | ReplicasetScheduler | ReplicaScheduler
