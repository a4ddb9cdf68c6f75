"""KV that a replica exchanges through a connector of its engine: loads, and ended requests that keep their blocks until
the connector has sent them.

Each time that a waiting request is considered, the connector is queried for the number of the request's tokens that it
can load. Tokens are loaded within the step that admits the request (synchronous), or while steps run (asynchronous).
A request with an asynchronous load gets blocks for all loaded tokens and waits; it does not count towards a step's
limits on requests and tokens. An asynchronous load may not take blocks that prompts in progress still need, because a
load makes no progress that would free blocks. A load that does not fit is refused like a request that lacks blocks.

Waiting requests that hold blocks are offered for admission before others. Source: vLLM 0.33,
`vllm/v1/core/sched/scheduler.py` (`kv_holding_waiting`) and `KVConnectorBase_V1`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, cast

from msgspec import Struct

from vajra_py.contract import PriorityKey, RequestView
from vajra_py.runtime.requests.kv_inputs import KvNews
from vajra_py.runtime.requests.lifecycle import Lifecycle
from vajra_py.runtime.requests.request import Request, RequestState
from vajra_py.runtime.requests.running_set import RunningSet

_LOADING, _LOADED = RequestState.LOADING, RequestState.LOADED
_ASKED_ABOUT = frozenset({RequestState.WAITING, RequestState.PREEMPTED})
"""States of waiting requests that hold no KV blocks."""


class Match(NamedTuple):
    """Answer of a connector: number of tokens that it can load after the tokens that the prefix cache holds."""

    num_tokens: int
    is_async: bool = False
    """True if the tokens are loaded asynchronously, while steps run."""


NOTHING = Match(0)


class KvConnector(Protocol):
    """Source and sink of KV outside a replica; its answers are inputs of a run."""

    def matched(self, request: Request, num_local_tokens: int) -> Match | None:
        """Return how many tokens (in whole blocks) can be loaded after the cached ones; None: not known yet."""

    def begins(self, request: Request, num_local_tokens: int, num_tokens: int) -> None:
        """Announce that a request is about to get blocks for an asynchronous load. The load covers the `num_tokens`
        tokens that follow its `num_local_tokens` cached tokens.
        """

    def allocated(self, request: Request, num_tokens: int) -> None:
        """Begin to load `num_tokens` tokens (0: none) into the blocks allocated to a request."""

    def ended(self, request: Request, num_blocks: int) -> bool:
        """Return True if an ending request must keep its blocks until the connector has sent the first `num_blocks`,
        which hold its computed tokens.
        """


class FormedStep(Protocol):
    """A formed step, reduced to the requests that it computes."""

    def computes(self, request: Request) -> bool:
        """Return True if the step computes tokens of this running request."""


class KvReport(Struct, frozen=True):
    """Report of a connector's workers."""

    received: Collection[Request] = ()
    """Requests whose loads are over, successful or failed."""
    sent: Collection[Request] = ()
    """Ended requests whose blocks the connector no longer needs."""
    failed: Collection[Request] = ()
    """Requests whose load has failed as a whole."""
    bad_blocks: frozenset[int] = frozenset()
    """Blocks whose load failed, so that their content is invalid."""
    num_returned: int = 0
    """Number of steps that are reported as completed; used only if steps are formed ahead."""


class ConnectorRules(Struct, frozen=True):
    """Rules by which a replica uses its connector."""

    holding_order: Literal["begin", "urgency"] = "begin"
    """Order of waiting requests that hold blocks: by the start of their load, or by the prioritizer's key."""
    on_failure: Literal["fail", "recompute"] = "fail"
    """Treatment of requests whose load failed: they end, or compute the missing tokens."""
    calls_off: bool = False
    """True if a load is cancelled when its request ends; otherwise the request's blocks are kept until the load is
    over.
    """
    reports_with_steps: bool = True
    """True if the connector reports when steps complete; False: it reports at any time."""
    forms_ahead: bool = False
    """True if a step is formed before the preceding step has completed; since the preceding step may still write
    blocks, its requests are not preempted.
    """
    draft_tokens: int = 0
    """Number of tokens in one step of a decode with drafts; asynchronous loads leave blocks for them. 0: no drafts."""
    draft_tables: int = 1
    """Number of block tables; for each of them, an asynchronous load leaves blocks for `draft_tokens` tokens."""


class _Load(Struct):
    num_tokens: int
    """Number of leading tokens whose KV the request's blocks hold after the load."""
    is_over: bool = False


class _Kept(Struct):
    num_tokens: int
    """Number of leading tokens whose KV the blocks hold, or would hold if the load had succeeded."""
    reasons: set[Literal["load", "send"]]


class FailedLoads(Struct, frozen=True):
    """Requests affected by failed loads."""

    waiting: Sequence[Request]
    """Waiting requests whose load has failed, wholly or in part."""
    running: Mapping[Request, int]
    """Running requests that hold a block whose load failed, with each request's number of valid leading tokens."""


class ConnectedKv:
    """KV loaded to one replica through a connector, and blocks kept for the connector."""

    def __init__(
        self,
        connector: KvConnector,
        rules: ConnectorRules,
        running_set: RunningSet,
        lifecycle: Lifecycle,
        is_full: Callable[[], bool],
        leaving: Container[Request] = frozenset(),
    ) -> None:
        """Create the state of one replica. `is_full` returns True if the step being formed takes no more requests;
        `leaving`: aborted requests, which end when their present step ends.
        """
        self.rules = rules
        self._connector = connector
        self._running_set = running_set
        self._lifecycle = lifecycle
        self._is_full = is_full
        self._leaving = leaving
        self._loads: dict[Request, _Load] = {}
        """Loads of requests that have not been admitted since their load began, in order of its start. A load may be
        under way, over or failed.
        """
        self._matches: dict[Request, tuple[int, Match] | None] = {}
        """(Number of cached tokens, connector's answer) for requests considered in this step; None: no answer yet."""
        self._kept: dict[Request, _Kept] = {}
        """Ended requests that keep their blocks, with the reasons."""
        self._computes: set[Request] = set()
        """Requests whose loaded KV was dropped because no request could run; they must run before loading again."""
        self._whole: set[Request] = set()
        """Requests admitted in this step without an earlier load, if the step computes all their missing tokens."""
        self._ahead: deque[FormedStep] = deque()
        """Steps that have not completed, if steps are formed ahead."""

    # Steps that are formed ahead

    def step_formed(self, plan: FormedStep) -> None:
        """Note that a step was formed that computes tokens."""
        if self.rules.forms_ahead:
            self._ahead.append(plan)

    def is_written(self, request: Request) -> bool:
        """Return True if a step that has not completed computes tokens of this running request."""
        return any(plan.computes(request) for plan in self._ahead)

    # Offering waiting requests

    def start_step(self) -> None:
        """Drop the connector's answers and the admissions noted in the last step."""
        self._matches.clear()
        self._whole.clear()

    def offered(
        self, in_order: Iterator[RequestView], urgency: Callable[[RequestView], PriorityKey], now: float
    ) -> Iterator[RequestView]:
        """Iterate over the waiting requests that may be admitted, those that hold blocks first.

        Requests that wait for a load, an answer or a slot for an adapter are left out. Once the step is full, the
        connector is not queried for further requests.
        """
        for request in self.in_order(urgency):
            if self._is_full() or self._is_ready(request, now):
                yield request
        arrived, others = self._running_set.arrived, self._running_set.loading
        yield from sorted((one for one in arrived if one not in self._loads), key=urgency)
        for view in in_order:
            own = cast(Request, view)
            if own in self._loads or own in arrived or own in others:
                continue
            is_own = own.replica_id != -1 and own.state in _ASKED_ABOUT
            if not is_own or self._is_full() or (self._fits(own) and self._ask(own) is not None):
                yield own

    def _fits(self, request: Request) -> bool:
        """Return True if a request needs no adapter, or its adapter has, or can get, a slot."""
        adapters = self._running_set.adapters
        return adapters is None or adapters.fits(request)

    def _is_ready(self, request: Request, now: float) -> bool:
        load = self._loads.get(request)
        if load is None or not load.is_over:
            return False
        self._end_load(request, load, now)
        if request.state is _LOADED:
            return self._fits(request)
        if self._fits(request) and self._ask(request) is not None:
            return True
        del self._loads[request]
        return False

    def _end_load(self, request: Request, load: _Load, now: float) -> None:
        if request.state is _LOADING and load.num_tokens:
            self._lifecycle.loaded(request, load.num_tokens, now)
        elif request.state is _LOADING:
            self._lifecycle.load_again(request, now)

    def end_loads(self, now: float) -> None:
        """End each load that is over: its request waits with the loaded KV, or without KV if nothing was loaded."""
        for request, load in list(self._loads.items()):
            if load.is_over:
                self._end_load(request, load, now)

    def _ask(self, request: Request) -> Match | None:
        """Query the connector about a waiting request that holds no blocks; return the connector's answer, or None if
        it is unknown yet.
        """
        num_local = self._running_set.memory.cached_tokens(request)
        match = NOTHING if request in self._computes else self._connector.matched(request, num_local)
        found = None
        if match is not None:
            most = request.num_known_tokens - num_local - (not match.is_async)
            found = num_local, match._replace(num_tokens=min(match.num_tokens, most))
            self._running_set.memory.expect_load(request, found[1].num_tokens)
        self._matches[request] = found
        return match

    def _match(self, request: Request) -> tuple[int, Match] | None:
        """Return (number of cached tokens, connector's answer) for a waiting request without blocks, None if the answer
        is unknown yet. Queries the connector first if the request was not considered in this step yet.
        """
        if request not in self._matches:
            self._ask(request)
        return self._matches[request]

    # Admission

    def loads_beside_steps(self, request: Request) -> bool:
        """Return True if the connector's answer in this step is to load tokens of a waiting request asynchronously.
        If this request is admitted, it computes nothing until the load has ended.
        """
        found = self._matches.get(request)
        return found is not None and found[1].is_async and found[1].num_tokens > 0

    def cached_tokens(self, request: Request) -> int:
        """Return the number of leading tokens that a waiting request need not compute if it is admitted now."""
        num_local = self._running_set.memory.cached_tokens(request)
        found = self._match(request) if request.state in _ASKED_ABOUT else None
        return num_local if found is None or found[1].is_async else num_local + found[1].num_tokens

    def blocks_needed(self, request: Request, num_tokens: int, *, in_steps: bool) -> int:
        """Return the number of free blocks that admission needs. This is the number of blocks that the request takes
        or, with `in_steps`, the largest number that it needs at any one time. If the request loads asynchronously, the
        result is at least the number of blocks of the load plus the number reserved for prompts in progress.
        """
        memory = self._running_set.memory
        count = memory.blocks_needed_in_steps if in_steps else memory.blocks_needed
        num_blocks = count(request, num_tokens)
        if not self.loads_beside_steps(request):
            return num_blocks
        found = self._matches[request]
        assert found is not None
        return max(num_blocks, self._blocks_of_load(request, found[0] + found[1].num_tokens))

    def _blocks_of_load(self, request: Request, num_tokens: int) -> int:
        """Return the number of free blocks that an asynchronous load needs to begin, including reserved blocks.

        If nothing else is in progress, a load that fits into memory needs at most all blocks. It would otherwise wait
        forever.
        """
        running_set = self._running_set
        num_blocks = running_set.memory.blocks_needed(request, num_tokens)
        num_wanted = num_blocks + self._num_reserved()
        if self._loads or running_set.num_running:
            return num_wanted
        return max(num_blocks, min(num_wanted, running_set.memory.num_blocks))

    def _num_reserved(self) -> int:
        """Return the number of blocks to keep free. A request whose KV is being loaded, or whose prompt is partly
        computed, still needs blocks for its known tokens and its first decode step with drafts. The request whose load
        is about to begin needs blocks for its drafts.
        """
        memory, ahead = self._running_set.memory, self.rules.draft_tokens
        partial = (one for one in self._running_set.partial if one not in self._whole)
        num_blocks = self.rules.draft_tables * -(-ahead // memory.block_size)
        for request in dict.fromkeys((*self._loads, *partial)):
            num_tokens, is_waiting = request.num_known_tokens + ahead, request.state in _ASKED_ABOUT
            num_blocks += (
                memory.blocks_for(num_tokens) if is_waiting else memory.blocks_needed_in_steps(request, num_tokens)
            )
        return num_blocks

    def begin_load(self, request: Request, now: float) -> bool | None:
        """Begin an asynchronous load of a request's KV, or only bind the request if the connector's answer is unknown
        yet; return True. Return None if there is nothing to load asynchronously, False if blocks are lacking.
        """
        found = self._match(request)
        if found is None:
            self._lifecycle.bind(request, now)
            return True
        num_local, match = found
        if not match.is_async or not match.num_tokens:
            return None
        memory, num_tokens = self._running_set.memory, num_local + match.num_tokens
        if self._blocks_of_load(request, num_tokens) > memory.free_blocks:
            return False
        self._connector.begins(request, num_local, match.num_tokens)
        if memory.allocate(request, num_tokens) is None:
            raise RuntimeError(f"request {request.request_id}: memory was checked and is full")
        self._lifecycle.load(request, now)
        self._loads[request] = _Load(num_tokens)
        self._connector.allocated(request, match.num_tokens)
        return True

    def admitted(self, request: Request, num_loaded_tokens: int, *, is_whole: bool) -> None:
        """Note that a request is admitted; `is_whole`: its first step computes all tokens that were not loaded."""
        was_loaded = self._loads.pop(request, None) is not None
        if is_whole and not was_loaded:
            self._whole.add(request)
        self._computes.discard(request)
        self._connector.allocated(request, num_loaded_tokens)

    def give_up(self, request: Request) -> None:
        """Note that a request's loaded or transferred KV is dropped because no request can run."""
        self._loads.pop(request, None)
        self._computes.add(request)

    # Reports

    def report_of(self, news: KvNews) -> KvReport:
        """Return a recorded report, reduced to requests that load or keep blocks here."""
        known = {one.index: one for one in (*self._loads, *self._kept)}
        received, sent, failed = (
            [known[index] for index in each if index in known] for each in (news.received, news.sent, news.failed)
        )
        return KvReport(received, sent, failed, frozenset(news.bad_blocks), news.num_returned)

    def num_tokens_of(self, request: Request) -> int | None:
        """Return the number of leading tokens that a request's blocks hold after its present load. For an ended request
        that keeps its blocks, return the number of leading tokens in these blocks; for any other request, None.
        """
        kept = self._kept.get(request)
        if kept is not None:
            return kept.num_tokens
        load = self._loads.get(request)
        return None if load is None or request.state is not _LOADING else load.num_tokens

    def in_order(self, urgency: Callable[[Request], PriorityKey]) -> Sequence[Request]:
        """Return the waiting requests with a load (see `holds`), in the order in which they are offered."""
        holding = list(self._loads)
        if self.rules.holding_order == "urgency":
            holding.sort(key=urgency)
        return holding

    @property
    def kept(self) -> Collection[Request]:
        """Ended requests that still hold their blocks."""
        return self._kept.keys()

    def find(self, request_id: str) -> Request | None:
        """Return the request with this id that has a load, or keeps its blocks after its end; None if there is none."""
        return next((one for one in (*self._kept, *self._loads) if one.request_id == request_id), None)

    def holds(self, request: RequestView) -> bool:
        """Return True if a waiting request holds blocks, or has lost them to a failed load; such a request may run even
        if no new request is admitted.
        """
        return request in self._loads

    @property
    def num_holding(self) -> int:
        """Number of waiting requests that hold blocks."""
        return len(self._loads)

    @property
    def is_awaited(self) -> bool:
        """True if a pending load, send, step or answer of the connector may be the reason why no request can run."""
        return bool(self._kept or self._ahead) or (
            any(not load.is_over for load in self._loads.values()) or None in self._matches.values()
        )

    def take_report(self, report: KvReport) -> None:
        """Record the loads that are over and the steps that have completed, and free those blocks of ended requests
        that the connector no longer needs.
        """
        for _ in range(min(report.num_returned, len(self._ahead))):
            self._ahead.popleft()
        for request in report.received:
            load = self._loads.get(request)
            if load is not None:
                load.is_over = True
            else:
                self._release(request, "load")
        for request in report.sent:
            self._release(request, "send")

    def _release(self, request: Request, reason: Literal["load", "send"]) -> None:
        kept = self._kept.get(request)
        if kept is None:
            return  # the replica lost its memory meanwhile, or the request ended without blocks
        kept.reasons.discard(reason)
        if not kept.reasons:
            del self._kept[request]
            self._lifecycle.release_kept(request)

    def find_failed(self, report: KvReport, num_scheduled: Callable[[Request], int]) -> FailedLoads:
        """Return the requests whose loads failed, and limit pending loads to the tokens that arrived.

        A bad block shared by several running requests is recomputed by the one admitted first; the others continue as
        if it were valid.
        """
        failed: dict[Request, None] = {}
        for request in report.failed:
            load = self._loads.get(request)
            if load is not None and request.state is _LOADING:
                failed[request] = None
                if self.rules.on_failure == "recompute":
                    load.num_tokens = 0
        if not report.bad_blocks:
            return FailedLoads(list(failed), {})
        loading = {one: load.num_tokens for one, load in self._loads.items() if one.state is _LOADING}
        for request, num_valid in self._cut(loading, report.bad_blocks).items():
            self._loads[request].num_tokens = num_valid
            failed[request] = None
        return FailedLoads(list(failed), self.find_void(report.bad_blocks, num_scheduled))

    def find_void(self, bad_blocks: Collection[int], num_scheduled: Callable[[Request], int]) -> Mapping[Request, int]:
        """Return the running requests whose step is invalid because they hold a bad block, with each request's number
        of valid tokens. `num_scheduled` returns the number of a request's tokens in the step with which the bad blocks
        were reported; this step is not completed yet.
        """
        self._running_set.materialize()
        staying = (one for one in self._running_set.running() if one not in self._leaving)
        running = {one: one.num_computed_tokens - num_scheduled(one) for one in staying}
        return self._cut(running, bad_blocks)

    def _cut(self, computed: Mapping[Request, int], bad_blocks: Collection[int]) -> dict[Request, int]:
        """Return the number of valid tokens of each request that holds a bad block, given each request's number of
        computed tokens. A bad block that several of these requests hold counts as bad only for the first of them.
        """
        memory = self._running_set.memory
        marked: set[int] = set()
        cut: dict[Request, int] = {}
        for request, num_tokens in computed.items():
            held = memory.block_table(request)[: memory.blocks_for(num_tokens)]
            bad = [place for place, block in enumerate(held) if block in bad_blocks]
            own = [place for place in bad if held[place] not in marked]
            marked.update(held[place] for place in own)
            if bad:
                cut[request] = own[0] * memory.block_size if own else num_tokens
        return cut

    # Ends

    def keeps(self, request: Request) -> bool:
        """Return True if a request that ends now keeps its blocks until a report releases them."""
        load = self._loads.get(request)
        self._computes.discard(request)
        memory = self._running_set.memory
        is_loading = load is not None and request.state is _LOADING
        num_tokens = load.num_tokens if load is not None and is_loading else request.num_computed_tokens
        reasons: set[Literal["load", "send"]] = set()
        if self._connector.ended(request, min(memory.blocks_for(num_tokens), memory.num_held_blocks(request))):
            reasons.add("send")
        self._loads.pop(request, None)
        if is_loading and load is not None and not load.is_over and not self.rules.calls_off:
            reasons.add("load")
        if "load" in reasons or (reasons and memory.num_held_blocks(request)):
            self._kept[request] = _Kept(num_tokens, reasons)
            return True
        return False

    def clear(self) -> None:
        """Drop all state, because the replica has lost its memory."""
        self._loads.clear()
        self._matches.clear()
        self._whole.clear()
        self._kept.clear()
        self._computes.clear()
        self._ahead.clear()
