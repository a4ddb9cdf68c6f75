"""State of a request in the mechanism.

A request is a counter of computed tokens that catches up with its known tokens. While it decodes together with others,
its counters are kept by the replica's decode pool, so that a step need not update every decode.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from msgspec import Struct

from vajra_py.contract.facts import FACTS, StatedFacts
from vajra_py.contract.observer import EndReason
from vajra_py.runtime.kv import BlockHashes
from vajra_py.runtime.support.clock import to_seconds
from vajra_py.workload.generated import copier

_NO_METADATA: Mapping[str, str | int | float] = MappingProxyType({})


class RequestState(Enum):
    """State of a request; `Request.move_to` allows only the changes of the life cycle."""

    CREATED = "created"
    DEFERRED = "deferred"
    """Waiting outside every queue until the admission policy is called again."""
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Waiting again after a preemption, without KV."""
    SWAPPED = "swapped"
    """Waiting again, with its KV in host memory."""
    HELD = "held"
    """Leaving its replica with its KV; the replica holds the KV until another replica has it."""
    REMOTE = "remote"
    """Waiting on its target replica, with its KV still on the source."""
    ARRIVED = "arrived"
    """Waiting, with its transferred KV in its replica's memory."""
    LOADING = "loading"
    """Waiting, while KV of its prefix is loaded (from a lower tier, from swap space or through a connector) to blocks
    that it holds.
    """
    LOADED = "loaded"
    """Waiting, with the loaded KV of its prefix in blocks that it holds."""
    ENDED = "ended"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash, of the name, is several times slower


_CREATED = RequestState.CREATED
_UNCOMPUTED = (RequestState.CREATED, RequestState.WAITING, RequestState.PREEMPTED)
"""States of requests that have no KV of their own in any memory, though their prefixes may be cached."""

_MOVES: Mapping[RequestState, frozenset[RequestState]] = {
    RequestState.CREATED: frozenset({RequestState.DEFERRED, RequestState.WAITING, RequestState.ENDED}),
    RequestState.DEFERRED: frozenset({RequestState.WAITING, RequestState.ENDED}),
    RequestState.WAITING: frozenset({RequestState.RUNNING, RequestState.LOADING, RequestState.ENDED}),
    RequestState.RUNNING: frozenset(
        {RequestState.PREEMPTED, RequestState.SWAPPED, RequestState.HELD, RequestState.ENDED}
    ),
    RequestState.PREEMPTED: frozenset({RequestState.RUNNING, RequestState.LOADING, RequestState.ENDED}),
    RequestState.SWAPPED: frozenset(
        {RequestState.RUNNING, RequestState.LOADING, RequestState.PREEMPTED, RequestState.ENDED}
    ),
    RequestState.HELD: frozenset(
        {
            RequestState.RUNNING,
            RequestState.REMOTE,
            RequestState.ARRIVED,
            RequestState.PREEMPTED,
            RequestState.ENDED,
        }
    ),
    RequestState.REMOTE: frozenset(
        {RequestState.HELD, RequestState.ARRIVED, RequestState.PREEMPTED, RequestState.ENDED}
    ),
    RequestState.ARRIVED: frozenset({RequestState.RUNNING, RequestState.PREEMPTED, RequestState.ENDED}),
    RequestState.LOADING: frozenset(
        {RequestState.LOADED, RequestState.WAITING, RequestState.PREEMPTED, RequestState.ENDED}
    ),
    RequestState.LOADED: frozenset({RequestState.RUNNING, RequestState.PREEMPTED, RequestState.ENDED}),
    RequestState.ENDED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class RequestFacts(StatedFacts):
    """Facts of a request that are fixed when it is submitted."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int | None = None
    metadata: Mapping[str, str | int | float] = field(default_factory=lambda: _NO_METADATA, hash=False)


class Admission(Struct):
    """Decisions of the admission policy on one request; a request that never reached the policy has none.

    Attributes:
        outcome: "accepted", "degraded", "refused", or "deferred" (no decision yet, or the request ended before one).
        degraded: new values set by the admission policy, such as `max_tokens=64, slo_class=batch`.
        max_tokens: reduced maximum number of output tokens; None if the policy did not reduce it.
        refusal: reason of the request's refusal.
        retry_after_s: seconds after which the client of a refused request may try again.
        num_deferrals: number of times that the request was deferred.
        deferral: reason of the request's latest deferral.
        deferred_at: time of the request's first deferral, in seconds on the run's clock.
        deferred_s: total time for which the request was deferred, in seconds.
    """

    outcome: str = ""
    degraded: str = ""
    max_tokens: int | None = None
    refusal: str = ""
    retry_after_s: float | None = None
    num_deferrals: int = 0
    deferral: str = ""
    deferred_at: float | None = None
    deferred_s: float = 0.0

    @property
    def was_let_in(self) -> bool:
        """True if the request reached a queue."""
        return self.outcome in ("accepted", "degraded")


_STATED = tuple(fact.name for fact in FACTS)
_copy_stated = copier(_STATED)
if TYPE_CHECKING:
    from vajra_py.runtime.requests.programs import Program

    _Stated: TypeAlias = StatedFacts
else:
    _Stated = type("_Stated", (), {"__slots__": _STATED})
    """Facts that the client stated, in slots of the request itself: policies read them in every step."""


class CountedTokens(NamedTuple):
    """Tokens that a step produced for a decode, counted when the step ends or when the step's drafts are verified.

    Attributes:
        tick: time of the count.
        num_new: 1 if the token that the step produces even without accepted drafts is counted here; 0 if this token
            was counted before.
        num_drafts: number of drafts that were verified.
    """

    tick: int
    num_new: int
    num_drafts: int
    num_accepted: int


class SharedSteps:
    """Steps of a group of requests that decode with drafts. All requests of the group are in each of these steps, so
    each step is stored once for the group.

    Attributes:
        requests: the group; empty once no further step can be added.
        steps: for each step, the fields of `CountedTokens`; the numbers of drafts are columns with one entry per
            request.
    """

    __slots__ = ("requests", "steps")

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.steps: list[tuple[int, int, Sequence[int], Sequence[int]]] = []

    def steps_of(self, place: int, first: int) -> list[CountedTokens]:
        """Return the steps, from index `first` on, for the request at index `place` of `requests`."""
        steps = self.steps[first:]
        return [CountedTokens(tick, num_new, each[place], accepted[place]) for tick, num_new, each, accepted in steps]


class SharedCounters(Protocol):
    """Counters shared by requests that decode together."""

    @property
    def num_committed(self) -> int:
        """Number of steps that were put into a plan so far."""

    @property
    def num_emitted(self) -> int:
        """Number of steps completed so far."""


class LooksUpPrefixes(Protocol):
    """Lookup of a request's prefix in the memory of the replica that it is bound to."""

    def prefix_hits(self, request: Request) -> int:
        """Return the number of leading tokens of a request that its replica's prefix cache holds."""

    def tier_hits(self, request: Request) -> Mapping[str, int]:
        """Return the number of leading tokens of a request that each memory of its replica holds, by the memory's name;
        each token counts only for the nearest memory that holds it. Empty without tiers.
        """


class Request(_Stated):
    """State of one request; policies see it as `vajra_py.contract.RequestView`.

    The true output length is known only to the executor, so that no policy can read it.
    """

    __slots__ = (
        "_computed",
        "_draft_log",
        "_num_accepted",
        "_num_drafted",
        "_offset",
        "_output",
        "_pool",
        "_shared",
        "_steps",
        "_token_log",
        "admission",
        "admitted_at",
        "admitted_index",
        "arrived_at",
        "caches",
        "deadline_at",
        "detail",
        "end_epoch",
        "end_reason",
        "ended_at",
        "expires_at",
        "first_token_at",
        "hashes",
        "in_flight",
        "index",
        "is_skipped",
        "max_tokens",
        "metadata",
        "num_cached_tokens",
        "num_losses",
        "num_preemptions",
        "num_prompt_tokens",
        "preempted_index",
        "program",
        "proposals",
        "replica_id",
        "replicaset",
        "request_id",
        "state",
        "stays_at",
    )

    def __init__(self, facts: RequestFacts, index: int, arrived_at: float, max_tokens: int) -> None:
        self.request_id = facts.request_id
        self.index = index
        self.arrived_at = arrived_at
        self.num_prompt_tokens = facts.num_prompt_tokens
        self.max_tokens = max_tokens
        _copy_stated(facts, self)
        self.deadline_at = None if facts.deadline_s is None else arrived_at + facts.deadline_s
        self.expires_at = None if facts.expires_after_s is None else arrived_at + facts.expires_after_s
        self.metadata = facts.metadata
        self.state = _CREATED
        self.admission: Admission | None = None
        self.hashes: BlockHashes | None = None
        self.program: Program | None = None
        self.caches: LooksUpPrefixes | None = None
        """Lookup in the memory of the replica to which the request is bound; None until a replicaset has accepted the
        request.
        """
        self.replicaset = ""
        self.replica_id = -1
        self.num_cached_tokens = 0
        self._steps: list[CountedTokens] | None = None
        """Steps whose tokens are counted but not yet entered in `_token_log` and `_draft_log`, which are rarely read.
        """
        self._shared: tuple[SharedSteps, int, int] | None = None
        """Shared steps that follow `_steps`: (the steps, index of this request in them, index of the first step that is
        not yet entered in the logs).
        """
        self._num_drafted = self._num_accepted = 0
        self._draft_log: list[int] | None = None
        """The entries of `draft_log`, flattened."""
        self.proposals: Sequence[tuple[int, int]] = ()
        """For each proposal of drafts: (number of output tokens before it, number of drafts). Empty unless drafts are
        real tokens.
        """
        self.num_preemptions = 0
        self.num_losses = 0
        """Number of replica failures that count towards the request's limit of reruns; see `Failure`."""
        self.stays_at = -1
        """Id of the replica that dropped the request's transferred KV; the request will not leave this replica with its
        KV. -1: none.
        """
        self.preempted_index = 0
        self.admitted_index = 0
        self.in_flight = False
        self.is_skipped = False
        self.end_epoch = 0
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        self.end_reason: EndReason | None = None
        self.detail = ""
        self._token_log: list[int | tuple[array[int], int, int]] = []
        self._computed = 0
        self._output = 0
        self._pool: SharedCounters | None = None
        self._offset = 0

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.state.value}, computed {self.num_computed_tokens} of "
            f"{self.num_known_tokens} tokens, {self.num_output_tokens} generated)"
        )

    def move_to(self, state: RequestState) -> None:
        """Change the state. Raises `RuntimeError` for a move outside the life cycle, which is a bug of the mechanism."""
        if state not in _MOVES[self.state]:
            raise RuntimeError(f"request {self.request_id}: no move from {self.state.value} to {state.value}")
        self.state = state

    @property
    def num_computed_tokens(self) -> int:
        """Number of leading tokens whose KV is in memory or is being written by a step in flight."""
        pool = self._pool
        return self._computed if pool is None else pool.num_committed + self._offset

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens generated so far."""
        pool = self._pool
        return self._output if pool is None else pool.num_emitted + self._offset + 1 - self.num_prompt_tokens

    @property
    def num_known_tokens(self) -> int:
        """Number of prompt and generated tokens."""
        pool = self._pool
        return self.num_prompt_tokens + self._output if pool is None else pool.num_emitted + self._offset + 1

    @property
    def num_remaining_tokens(self) -> int:
        """Number of known tokens that are not computed yet."""
        pool = self._pool
        if pool is None:
            return self.num_prompt_tokens + self._output - self._computed
        return pool.num_emitted + 1 - pool.num_committed

    @property
    def num_remaining_prompt_tokens(self) -> int:
        """Number of prompt tokens that are not computed yet."""
        return max(0, self.num_prompt_tokens - self.num_computed_tokens)

    @property
    def token_log(self) -> list[int | tuple[array[int], int, int]]:
        """Times of the request's tokens. An entry is the tick of one token or, for consecutive tokens from a decode
        pool, (the pool's log of ticks, index of the first tick, index after the last tick or -1 while in the pool).
        """
        self._enter_steps()
        return self._token_log

    @property
    def num_draft_tokens(self) -> int:
        """Number of drafts that steps have verified so far."""
        self._enter_steps()
        return self._num_drafted

    @property
    def num_accepted_tokens(self) -> int:
        """Number of drafts that became output so far."""
        self._enter_steps()
        return self._num_accepted

    @property
    def draft_log(self) -> Sequence[tuple[int, int, int]]:
        """For each step that verified drafts: (output tokens before the step, drafts verified, drafts that became
        output).
        """
        self._enter_steps()
        log: Sequence[int] = self._draft_log or ()
        return list(zip(log[::3], log[1::3], log[2::3], strict=True))

    @property
    def num_drafts(self) -> int:
        """Number of steps that verified drafts of this request."""
        self._enter_steps()
        return len(self._draft_log or ()) // 3

    @property
    def is_resident(self) -> bool:
        """True if the request is running, so that it holds KV blocks on its replica."""
        return self.state is RequestState.RUNNING

    @property
    def is_swapped(self) -> bool:
        """True if the request's KV is in host memory."""
        return self.state is RequestState.SWAPPED

    @property
    def is_decode(self) -> bool:
        """True if the request is one of its replica's decodes: its prompt has been computed, and exactly one of its
        known tokens is not computed yet.
        """
        return self._pool is not None or self.is_skipped

    @property
    def is_prefill_complete(self) -> bool:
        """True if the request has generated a token, and at most its newest known token is not computed."""
        return self._pool is not None or (self._output > 0 and self.num_remaining_tokens <= 1)

    @property
    def last_token_at(self) -> float | None:
        """Time in seconds at which the newest token was produced; None before the first token."""
        for entry in reversed(self.token_log):
            if isinstance(entry, int):
                return to_seconds(entry)
            log, first, end = entry
            stop = len(log) if end < 0 else end
            if stop > first:
                return to_seconds(log[stop - 1])
        return None

    @property
    def next_token_due_at(self) -> float | None:
        """Deadline of the next token in seconds: by the TTFT SLO for the first token, by the TBT SLO for later tokens;
        None if the request does not have the SLO in question.
        """
        if self.num_output_tokens == 0:
            return None if self.ttft_slo_s is None else self.arrived_at + self.ttft_slo_s
        last_at = self.last_token_at
        return None if self.tbt_slo_s is None or last_at is None else last_at + self.tbt_slo_s

    def prefix_hit_tokens(self) -> int:
        """Return the number of the request's leading tokens that its replica's prefix cache holds now; 0 unless the
        request waits on that replica without KV.
        """
        caches = self.caches
        is_bound = caches is not None and self.replica_id >= 0 and self.state in _UNCOMPUTED
        return caches.prefix_hits(self) if is_bound and caches is not None else 0

    def tier_hit_tokens(self) -> Mapping[str, int]:
        """Return the number of the request's leading tokens that each memory of its replica holds, by the memory's
        name; each token counts only for the nearest memory that holds it. Empty unless the request waits on that
        replica without KV.
        """
        caches = self.caches
        is_bound = caches is not None and self.replica_id >= 0 and self.state in _UNCOMPUTED
        return caches.tier_hits(self) if is_bound and caches is not None else {}

    def block_hashes(self) -> Sequence[Hashable]:
        """Return the hashes of the prompt's full blocks; empty if no other request can have the same content."""
        return () if self.hashes is None else self.hashes.shared_prompt_hashes(self.num_prompt_tokens)

    def set_computed(self, num_tokens: int) -> None:
        """Set the number of computed tokens; allowed only outside a decode pool."""
        assert self._pool is None
        self._computed = num_tokens

    def add_output(self, tick: int) -> int:
        """Count a token produced at this tick; only outside a decode pool. Returns the number of output tokens."""
        assert self._pool is None
        self.token_log.append(tick)
        self._output += 1
        return self._output

    def add_verified(self, num_drafts: int, num_accepted: int, tick: int) -> None:
        """Count the drafts verified by the step that produced the newest token, and the drafts that became output after
        that token.
        """
        assert self._pool is None
        self._own_steps().append(CountedTokens(tick, 0, num_drafts, num_accepted))
        self._output += num_accepted
        if self.state is RequestState.RUNNING:  # otherwise the request was preempted: it has no KV
            self._computed += num_accepted

    def _own_steps(self) -> list[CountedTokens]:
        """Return the request's own list of steps, for a step that is not shared. If the request shared steps with other
        requests, the shared steps are copied to the list, and none of these requests shares further steps.
        """
        steps = self._steps
        if steps is None:
            steps = self._steps = []
        if self._shared is not None:
            shared, place, first = self._shared
            steps += shared.steps_of(place, first)
            shared.requests, self._shared = (), None
        return steps

    def _enter_steps(self) -> None:
        """Enter in the logs the tokens that were counted since the logs were last read, if there are any."""
        steps = self._steps
        if self._shared is not None:
            shared, place, first = self._shared
            steps = [*(steps or ()), *shared.steps_of(place, first)]
            self._shared = shared, place, len(shared.steps)
        if not steps:
            return
        self._steps = None
        num_outputs = self._output - sum(one.num_new + one.num_accepted for one in steps)
        for tick, num_new, num_drafts, num_accepted in steps:
            if num_drafts:
                self._num_drafted += num_drafts
                self._num_accepted += num_accepted
                if self._draft_log is None:
                    self._draft_log = []
                self._draft_log += (num_outputs - (1 - num_new), num_drafts, num_accepted)
            self._token_log += [tick] * (num_new + num_accepted)
            num_outputs += num_new + num_accepted

    def note_proposal(self, num_drafts: int) -> None:
        """Record the number of drafts proposed for the next tokens."""
        entry, log = (self._output, num_drafts), self.proposals
        if isinstance(log, list):
            log.append(entry)
        else:
            self.proposals = [entry]

    def take_back_output(self) -> None:
        """Undo the count of the newest generated token; only outside a decode pool."""
        assert self._pool is None
        newest = self.token_log.pop()
        self._output -= 1
        if not isinstance(newest, int):
            log, first, end = newest
            if end - 1 > first:
                self.token_log.append((log, first, end - 1))

    def join_pool(self, pool: SharedCounters) -> int:
        """Let the pool's counters replace the request's own; return the number of computed tokens minus the pool's
        committed steps.
        """
        self._offset = self._computed - pool.num_committed
        self._pool = pool
        return self._offset

    def leave_pool(self) -> int:
        """Use the request's own counters again; return the number that `join_pool` returned."""
        computed, output = self.num_computed_tokens, self.num_output_tokens
        self._pool = None
        self._computed, self._output = computed, output
        return self._offset


def num_computed_of(requests: Sequence[Request]) -> list[int]:
    """Return the number of computed tokens of each of these requests, which must not be in a decode pool."""
    return [one._computed for one in requests]


def count_planned(requests: Sequence[Request]) -> None:
    """Count one more token of each of these requests as computed; none of them may be in a decode pool."""
    for request in requests:
        request._computed += 1


def num_known_of(requests: Sequence[Request]) -> list[int]:
    """Return the number of known tokens of each of these requests, which must not be in a decode pool."""
    return [one.num_prompt_tokens + one._output for one in requests]


class DraftedOutputs:
    """Counts the tokens of a replica's decodes with drafts."""

    def __init__(self) -> None:
        self._shared = SharedSteps(())

    def add(
        self,
        requests: Sequence[Request],
        num_drafts: Sequence[int],
        num_accepted: Sequence[int],
        num_new: int,
        tick: int,
    ) -> None:
        """Count the tokens that a step at this tick produced for decodes.

        Each request gets its accepted drafts. The token before them is counted here too if `num_new` is 1; it was
        counted before if `num_new` is 0. The caller must not change `num_drafts` and `num_accepted` afterwards. For
        speed, the fields of the requests are changed in plain loops, and if the requests are the same as in the last
        call, they share one entry for the step.
        """
        shared = self._shared
        if requests and shared.requests == requests:
            if not shared.steps:
                for place, request in enumerate(requests):
                    request._own_steps()
                    request._shared = shared, place, 0
            shared.steps.append((tick, num_new, num_drafts, num_accepted))
        else:
            self._shared = SharedSteps(list(requests))
            for request, drafts, accepted in zip(requests, num_drafts, num_accepted, strict=True):
                request._own_steps().append(CountedTokens(tick, num_new, drafts, accepted))
        if any(num_accepted):
            for request, accepted in zip(requests, num_accepted, strict=True):
                request._output += num_new + accepted
                request._computed += accepted
                request.end_epoch -= num_new + accepted
        elif num_new:
            for request in requests:
                request._output += num_new
                request.end_epoch -= num_new
