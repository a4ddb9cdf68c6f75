"""The three questions that policies answer: how urgent, which replica, and what runs in this step.

Protocols, not base classes: any object with these methods will do. One policy object serves simulator and engine alike.
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
    """Volatility of a request's key while it waits. A truthful declaration is what keeps queues exact and cheap."""

    STATIC = "static"
    """Fixed when the request arrives."""
    PROGRESS = "progress"
    """Changes only when the request itself computes, generates or is preempted; re-read at those moments."""
    TIME_LINEAR = "time_linear"
    """intercept + slope * now between two such moments (`TimeLinearPrioritizer.line`); order is exact at every time."""
    NAMED_FALLS = "named_falls"
    """Rises with anything, and falls only where the policy names it (`NamesFalls`); order is exact at every time.

    A key is read again when its request would be next, so a rise needs no word.
    """
    PREFIX_HITS = "prefix_hits"
    """Changes with the request's own progress, with its `prefix_hit_tokens`, and at times that `falls_at` returns.

    Read at every step where one of these has changed, and in groups after each admission and preemption too.
    """
    ARBITRARY = "arbitrary"
    """May change with anything; re-read for every waiting request at every step."""
    VOLATILE = "volatile"
    """May change with anything, also while a step is formed: re-read after each admission and preemption too.

    For keys that `on_admission` or `on_preemption` moves; costs as much as `ARBITRARY` each time. Counters that requests have in
    common, such as a tenant's share, are keys of groups (`GroupsRequests`), which cost far less.
    """


@runtime_checkable
class RequestPrioritizer(Protocol):
    """Ranks requests by urgency. One instance serves a whole replicaset; the same key orders admission and victims."""

    @property
    def key_motion(self) -> KeyMotion:
        """Volatility of the keys; read once, when the policy is built."""

    def key(self, request: RequestView, now: float) -> Key:
        """The request's key at `now`; lower is more urgent. Ties go to the earlier arrival, then the lower index."""


@runtime_checkable
class TimeLinearPrioritizer(RequestPrioritizer, Protocol):
    """A prioritizer whose keys are straight lines in time; needed with `KeyMotion.TIME_LINEAR`."""

    def line(self, request: RequestView) -> tuple[float, float]:
        """(intercept, slope), with key(request, now) = intercept + slope * now until the request's next progress."""


@runtime_checkable
class NamesFalls(RequestPrioritizer, Protocol):
    """A prioritizer that names falls of waiting requests' keys; needed with `KeyMotion.NAMED_FALLS`."""

    @property
    def fallen_requests(self) -> FallenRequests:
        """Names of the requests whose keys have fallen; read once. Name a request as soon as its key has."""


@runtime_checkable
class FallsWithTime(RequestPrioritizer, Protocol):
    """Optional method of a prioritizer with `KeyMotion.NAMED_FALLS` or `PREFIX_HITS` whose keys may move with time alone."""

    def falls_at(self, request: RequestView, now: float) -> float | None:
        """Earliest time at which the request's key may fall by itself, seconds on the run's clock; None: never. `PREFIX_HITS`: fall or rise.

        Called whenever the key is read. From that time on the key is read each time until a later one is given, so it may be a little early.
        """


@runtime_checkable
class CountsKeyChanges(RequestPrioritizer, Protocol):
    """Optional method of a prioritizer with `KeyMotion.ARBITRARY`, `VOLATILE` or `PREFIX_HITS` for times at which no key moves."""

    def key_epoch(self) -> int:
        """A number that changes whenever the key of any waiting request may have changed, for whatever reason.

        Read before keys are read again, which is left out if the number has not changed. A request's own progress needs no new
        number, nor do its hits under `PREFIX_HITS`.
        """


@runtime_checkable
class GroupsRequests(RequestPrioritizer, Protocol):
    """Optional methods of a prioritizer that ranks by group first: by tenant, program, session or adapter.

    The order is (key of the group, key of the request, arrival, index), with the group's key as it is at that moment.
    `key_motion` is that of the requests' keys within their groups. With `STATIC` or `PROGRESS` a counter moves its whole group
    in O(log groups), and with `PREFIX_HITS` as well; with other motions everything that waits is read again, as for `VOLATILE`.
    """

    def group(self, request: RequestView) -> str:
        """Name of the request's group, the same as long as the request lives."""

    def group_key(self, group: str) -> Key:
        """The group's key now; lower is more urgent.

        It may rise with anything, at any time: it is read again when the group would be next. While something of the group
        waits, it falls only if the policy names it (`LowersGroups`).
        """


@runtime_checkable
class LowersGroups(GroupsRequests, Protocol):
    """Optional attribute of a prioritizer whose groups' keys may fall as well."""

    @property
    def fallen_groups(self) -> FallenGroups:
        """Names of the groups whose keys have fallen; read once. Name a group as soon as its key has."""


@runtime_checkable
class PredictsSlack(Protocol):
    """Optional methods of a prioritizer with deadlines; replica schedulers read slack from `LocalReplicaView`.

    A replica scheduler that cannot do without declares `SchedulerTraits.needs_slack`.
    """

    def slack_s(self, request: RequestView, now: float) -> float:
        """Seconds that the request can still lose at `now` before it is late; negative when it is late already."""

    def slack_fraction(self, request: RequestView, now: float) -> float:
        """Slack as a fraction of the time that the request is allowed in all, from arrival to deadline; at most 1."""


@runtime_checkable
class ReplicasetScheduler(Protocol):
    """Assigns requests to replicas' queues at arrival, or lets replicas pull them."""

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Early binding: the replica (one that is up) whose queue takes the arriving request.

        None leaves it in the shared queue, from which replicas pull (late binding).
        """

    def pull(self, replica: ReplicaLoadView, queued: QueueView, now: float) -> Iterable[str]:
        """Ids of shared-queue requests that the replica may admit in the step it is about to form, in any lazy form.

        Called each time the replica forms a step while the shared queue is not empty. A request stays in the queue until
        the replica's scheduler really admits it.
        """


@runtime_checkable
class PlacesAfterPrompt(Protocol):
    """Optional method of a replicaset scheduler for replicasets whose pools split prompts and decodes.

    A scheduler without it is used unchanged: one instance assigns arrivals to replicas that compute prompts, a second one of the same
    kind assigns requests whose prompt is computed to replicas that decode; each sees its own replicas alone. With it, `assign` sees
    the replicas of all pools, and may choose any of them.
    """

    def place_after_prompt(
        self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float
    ) -> ReplicaId | None:
        """Replica that continues a request whose prompt has just been computed, or that a replica scheduler hands off.

        None: it stays where it is. Called again, when something has changed, while the chosen replica cannot take it.
        """


@dataclass(frozen=True, slots=True)
class Move:
    """A request is to go to another replica."""

    request: RequestView
    target: ReplicaId | None
    """None calls a waiting request back into the shared queue."""
    reason: str = ""
    """Words for tables and reports."""


@runtime_checkable
class MovesRequests(Protocol):
    """Optional method of a replicaset scheduler that moves waiting and running requests between replicas."""

    def moves(self, replicas: Sequence[ReplicaLoadView], now: float) -> Iterable[Move]:
        """Requests to move now; running ones take their KV along and are computed meanwhile.

        Called when the scheduler is woken (`PolicyContext.wake`) and when a replica comes, drains or is lost.
        """


@runtime_checkable
class ReplicaScheduler(Protocol):
    """Selects the requests of each step with their token counts, and whom to preempt when memory is short."""

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Fill `batch`. An empty batch means that nothing can run until something changes."""


@runtime_checkable
class ChunksSoloPrompts(Protocol):
    """Optional method of a replica scheduler by which prefill times of its own chunking are predicted (EDF and LRS need them)."""

    def solo_chunk_size(self, num_done_tokens: int, num_remaining_tokens: int) -> int:
        """Tokens of the next chunk of a prompt that has the replica to itself; at least 1."""


SoloChunkSize: TypeAlias = Callable[[int, int], int]
"""(done, remaining) tokens of a prompt to the size of its next chunk."""


@runtime_checkable
class RefusesRequests(Protocol):
    """Optional method of a replica scheduler that can never run some requests, for reasons of its own.

    What can never fit into KV memory, or exceeds the model's length, is refused without a call.
    """

    def refuses(self, request: RequestView, replica: ReplicaLoadView, now: float) -> str | None:
        """Return the reason that the request might wait for ever or keep others waiting for ever; None if it cannot.

        Called before the request is queued anywhere, for the schedulers of the replicas that are up, one after the other until one
        would run it; where none would, the first answer goes to the client. A request that is preempted must be able to
        come back: think of its longest length, `num_prompt_tokens + max_tokens - 1` tokens to compute. An answer that rests
        on load turns requests away that could be served later; one that waits already is taken out by `BatchBuilder.drop`.
        """


@runtime_checkable
class EvictsAdapters(Protocol):
    """Optional method of a replica scheduler that chooses which loaded LoRA adapter makes room for another one."""

    def evict_adapter(self, idle: Sequence[str], now: float) -> str:
        """Return one of `idle`, loaded adapters that are not in use, the least recently used first; without this method the first is evicted.

        Called while `BatchBuilder.add` is tried for a request whose adapter is not loaded, with no slot free.
        """


class SteadyState(Enum):
    """A situation in which every step computes all decodes of the replica and nothing else."""

    NOTHING_WAITS = "nothing waits"
    """All running requests decode, all are in the batch, and neither the own nor the shared queue holds anything."""
    BATCH_FULL = "the batch is full"
    """All running requests decode, and they fill the batch; any number of requests may wait."""


@dataclass(frozen=True, slots=True)
class SchedulerTraits:
    """Claims of a replica or replicaset scheduler beyond its Protocol: its attribute `traits`, read once when it is built.

    A scheduler without that attribute claims nothing. The conformance suite holds every claim against what the policy does.
    """

    repeats_decodes: frozenset[SteadyState] = frozenset()
    """Situations in which a step of all decodes is followed by equal ones; for replica schedulers.

    After such a step every further one is decided the same way, whatever the time, until a request arrives (with
    `NOTHING_WAITS`), a request ends, or a decode lacks a block. A simulator then works such steps out at once.
    """
    reads_load: bool = True
    """False: `assign` reads nothing of the replicas but `replica_id` and `is_up`; for replicaset schedulers.

    A simulator then need not bring every replica up to date at each arrival.
    """
    needs_slack: bool = False
    """True if a replica scheduler reads slack: it is refused beside a prioritizer without `PredictsSlack`, when policies are built."""
    is_work_conserving: bool = False
    """No replica idles while there is work that it could do.

    Of a replica scheduler: with blocks to spare, steps follow one another until every request has ended. Of a replicaset
    scheduler: with blocks to spare, no replica is idle while a request waits anywhere in the replicaset.
    """


NO_TRAITS = SchedulerTraits()


def traits_of(policy: object) -> SchedulerTraits:
    """The traits that a scheduler declares; without a declaration it claims nothing."""
    traits: SchedulerTraits = getattr(policy, "traits", NO_TRAITS)
    return traits


@dataclass(frozen=True, slots=True)
class EndedStep:
    """A step that has come back, as listening policies get it. The requests' counters have moved already."""

    replica_id: ReplicaId
    step_index: int
    """Steps that this replica had run before."""
    formed_at: float
    ended_at: float
    """Seconds on the run's clock."""
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
    """Steps of one replica that have come back one after the other, each with the same decodes and nothing else.

    Nobody was admitted, preempted or ended in them. The requests' counters are those after the last step.
    """

    replica_id: ReplicaId
    step_index: int
    """Steps that this replica had run before the first."""
    formed_at: float
    """Seconds on the run's clock: of the first step. Each further one was formed when the one before it ended."""
    ended_at: Sequence[float]
    """Seconds at which each step ended."""
    requests: Sequence[RequestView]
    """Requests of every step, in batch order; a step computed one token of each."""

    def steps(self) -> Iterator[EndedStep]:
        """The steps one by one; the requests' counters are those after the last."""
        num_tokens, formed_at = (1,) * len(self.requests), self.formed_at
        for number, ended_at in enumerate(self.ended_at):
            index = self.step_index + number
            yield EndedStep(self.replica_id, index, formed_at, ended_at, self.requests, num_tokens)
            formed_at = ended_at


class ListensToRequests(Protocol):
    """Optional callbacks of any policy, to keep state per request (attained service, fairness counters).

    Each method is optional by itself: a policy is notified of what it has a method for; `on_step_run` alone needs
    `on_step_end` beside it. All but `on_step_end` leave a simulator free to work out repeated steps at once
    (`SchedulerTraits.repeats_decodes`); with `on_step_end` every step is formed by itself, unless the policy has `on_step_run` too.
    """

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        """Requests that have just been accepted, before they are assigned or queued."""

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """A waiting request has just got its memory, at once while the step is being formed: for the first time or again."""

    def on_preemption(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """A running request has just lost its memory or was swapped out (`is_swapped`), and waits again."""

    def on_moved(self, request: RequestView, source: ReplicaId, target: ReplicaId, now: float) -> None:
        """The KV of a request that was handed off, or migrates, is at its target, where it waits to go on; `source` holds it no more."""

    def on_step_end(self, step: EndedStep) -> None:
        """A step of a replica has come back."""

    def on_step_run(self, run: EndedRun) -> None:
        """Steps of a replica have come back for which `on_step_end` was not called. A run may come in several parts.

        Steps of one replica come in order; steps of other replicas at the same time may come before or after them.
        """

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Requests that have left for good; `end_reason` of each is why: finished, aborted, expired, dropped while waiting, failed."""

    def on_program_end(self, program: ProgramView, now: float) -> None:
        """A program has ended; `end_reason` is why. Every policy of the run is notified, after the end of the program's last call."""


@runtime_checkable
class HandlesWakes(Protocol):
    """Optional method of any policy that sets wake-ups (`PolicyContext.wake`)."""

    def on_wake(self, key: str, now: float) -> None:
        """The time that was asked for under this key has come."""


SchedulingPolicy: TypeAlias = RequestPrioritizer | ReplicasetScheduler | ReplicaScheduler
