"""Adapt the vLLM connector of `--kv-transfer-config` to the mechanism's interface.

The connector is called in the same order as by vLLM's own scheduler. Attributes of a request that it reads (tokens,
block hashes, computed tokens) are updated on access, and the request's status is set before each call. The connector
uses vLLM's block ids; the mechanism's ids are smaller by one, since vLLM's block 0 is unused.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from msgspec import structs
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole, SupportsHMA
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.request import Request as VllmRequest
from vllm.v1.request import RequestStatus

from vajra_py.vllm.drafting import without_drafts
from vajra_py.vllm.late_ends import LateEnds
from vajra_py.vllm.lazy_request import make_lazy, settle
from vajra_py.vllm.managed_kv import ManagedKv
from vajra_py.vllm.mechanism import NOTHING, ConnectorRules, KvReport, Match, Mechanism, Request, RequestState
from vajra_py.vllm.records import Record

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")
_BY_BLOCK = (
    "the KV connector reports blocks that were not loaded, which name no token where windows leave blocks behind or "
    "there are several block tables. It has to report requests (failed_recving)"
)
_WAITING_TO_START, _IN_PROGRESS, _COMPLETED = "waiting_to_start", "in_progress", "completed_waiting"


OnLookup = Callable[[Record, Request, int, int], None]
"""Called when a request has been allocated blocks. The integers are its number of cached tokens and its number of
tokens to load.
"""


class Connector:
    """vLLM's connector and the requests that it serves.

    If vLLM's connector raises an error while the mechanism calls this object, the error is stored, because the
    mechanism would attribute it to a policy; `raise_error` raises it later.
    """

    def __init__(  # noqa: PLR0913  # what vLLM's scheduler has at hand
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        mechanism: Mechanism,
        on_lookup: OnLookup,
        *,
        rules: ConnectorRules,
        num_in_flight: Callable[[str], int],
        log_stats: bool,
    ) -> None:
        """Create vLLM's connector; `num_in_flight` returns the number of a request's tokens in steps in flight."""
        self.vllms: Any = KVConnectorFactory.create_connector(
            config=vllm_config, role=KVConnectorRole.SCHEDULER, kv_cache_config=kv_cache_config
        )
        self._late = LateEnds(lambda name: num_in_flight(name) > 0) if rules.forms_ahead else None
        """Requests that have ended for the mechanism or for the connector, but not for both, if steps are formed before
        the result of the last step is known; otherwise None.
        """
        self._void: dict[str, Request] = {}
        """Requests with void tokens (computed from KV that was not loaded).

        A request is removed when it has ended and none of its steps is in flight.
        """
        self._newly_void: dict[str, Request] = {}
        self._formed: deque[bool] = deque()
        """For each step in flight, True if policies formed it, False if it is empty."""
        self.recomputes = rules.on_failure == "recompute"
        self._mechanism = mechanism
        self._memory = memory = mechanism.replica.memory
        self._managed = memory if isinstance(memory, ManagedKv) else None
        """vLLM's own KV manager, which has several block tables; None if this project's memory is used."""
        self._connected = mechanism.use_connector(self, rules)
        self._on_lookup = on_lookup
        self._num_tables = len(kv_cache_config.kv_cache_groups)
        self._caches = bool(vllm_config.cache_config.enable_prefix_caching)
        self._known: dict[str, Record] = {}
        """Requests whose end has not been reported to the connector."""
        self._scheduled: Mapping[str, int] = {}
        """Number of scheduled tokens by request id in the step that is being passed to the connector."""
        self._begins: int | None = None
        """Number of cached tokens of the request that is being allocated blocks for an asynchronous load; None if there
        is no such request.
        """
        self._loaded: set[str] = set()
        """Requests that wait for admission and whose asynchronous load has begun; the load is pending or complete."""
        self._loading: set[str] = set()
        self._sending: set[str] = set()
        """Requests whose KV is being sent."""
        self._relieves = False
        self._loads_now = False
        """True if a request of the step being formed loads KV within that step."""
        self._last: dict[str, EngineCoreOutput] = {}
        """Last output of each request that ends with the step in flight."""
        self._stages: dict[str, str] | None = {} if log_stats else None
        """Stage (in vLLM's terms) of each request with an asynchronous load; None if statistics are off."""
        self._hits = PrefixCacheStats() if log_stats else None
        self._figures: Any = None
        """Statistics of the connector and its workers as of the last step; None if neither has any."""
        self._error: Exception | None = None

    # Requests

    def take_in(self, record: Record) -> None:
        """Add a new request."""
        self._known[record.request_id] = record
        make_lazy(record, self._num_computed)
        self.vllms.on_new_request(record.request)
        params = record.request.kv_transfer_params
        if params and params.get("do_remote_prefill"):
            self._enter(record.request_id, _WAITING_TO_START)

    def leave(self, record: Record) -> None:
        """Notify the connector of the end of a request that is not, or no longer, in the mechanism.

        Does nothing if the connector was notified already.
        """
        if self._known.pop(record.request_id, None) is not None:
            self._enter(record.request_id, None)
            own = record.own
            if self._late is not None and own is not None and own in self._late.unreported:
                self._late.note_end(record.request_id, wants=self._finish_of(record, own))
            else:
                self._finish(record, ([],) * self._num_tables)

    def ends_with(self, record: Record, output: EngineCoreOutput) -> None:
        """Store the last output of a request that ends with the step in flight; the connector may extend it."""
        self._last[output.request_id] = output
        self.taken_back(record)

    def taken_back(self, record: Record) -> None:
        """Record that a request which is still in the mechanism has ended for its client.

        Under asynchronous scheduling, the connector is notified now; otherwise, when the mechanism ends the request.
        """
        own = record.own
        if self._late is not None and own is not None and self._known.pop(record.request_id, None) is not None:
            self._late.note_end(record.request_id, wants=self._finish_of(record, own))

    def raise_error(self) -> None:
        """Raise the error that the connector raised when the mechanism called it, if any."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _guarded(self, call: Callable[[], _Answer], otherwise: _Answer) -> _Answer:
        if self._error is None:
            try:
                return call()
            except Exception as error:
                self._error = error
        return otherwise

    def _num_computed(self, record: Record) -> int:
        """Return the number of computed or loaded tokens, without those of the step being passed to the connector."""
        own = record.own
        if own is None:
            return 0
        num_loaded = self._connected.num_tokens_of(own)
        return own.num_computed_tokens - self._scheduled.get(record.request_id, 0) if num_loaded is None else num_loaded

    def _look_at(self, record: Record, request: Request) -> VllmRequest:
        record.request.num_preemptions = request.num_preemptions
        return record.request

    # Called by the mechanism

    def matched(self, request: Request, num_local_tokens: int) -> Match | None:
        """See `KvConnector`."""
        record = self._known[request.request_id]
        vllms = self._look_at(record, request)
        vllms.num_computed_tokens = 0
        vllms.status = RequestStatus.PREEMPTED if request.state is RequestState.PREEMPTED else RequestStatus.WAITING
        self._loaded.discard(record.request_id)
        nothing: tuple[int | None, bool] = (0, False)
        num_tokens, is_async = self._guarded(
            lambda: self.vllms.get_num_new_matched_tokens(vllms, num_local_tokens), nothing
        )
        if vllms.skip_reading_prefix_cache:
            num_tokens, is_async = 0, False
        if num_tokens is None:
            return None
        self._enter(record.request_id, _WAITING_TO_START if is_async else None)
        return Match(num_tokens, bool(is_async)) if num_tokens > 0 else NOTHING

    def begins(self, request: Request, num_local_tokens: int, num_tokens: int) -> None:
        """See `KvConnector`."""
        self._begins = num_local_tokens

    def allocated(self, request: Request, num_tokens: int) -> None:
        """See `KvConnector`."""
        num_local, self._begins = self._begins, None
        name = request.request_id
        record = self._known[name]
        vllms = self._look_at(record, request)
        begins, was_loaded = num_local is not None, name in self._loaded
        self._loaded.discard(name)
        if num_local is None:
            num_local = request.num_computed_tokens - num_tokens
        blocks = self._blocks(request, vllms, num_local if begins else num_local + num_tokens, begins=begins)
        self._guarded(lambda: self.vllms.update_state_after_alloc(vllms, blocks, num_tokens), None)
        if begins:
            self._loaded.add(name)
            self._loading.add(name)
            vllms.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            self._enter(name, _IN_PROGRESS)
        else:
            self._loads_now |= num_tokens > 0
            self._enter(name, None)
        vllms.num_computed_tokens = None
        if not was_loaded:
            self._count(request, vllms, num_local, num_tokens)
            self._on_lookup(record, request, num_local, num_tokens)

    def ended(self, request: Request, num_blocks: int) -> bool:
        """See `KvConnector`."""
        if self._relieves and self._mechanism.fault is not None:
            if self._late is not None:
                self._late.forget(request)
            return False  # the request has ended only in the mechanism: fallback policies continue it
        if self._late is not None and (keeps := self._late.ends(request)) is not None:
            return keeps
        goes_on = self.recomputes and request.request_id in self._void
        record = None if goes_on else self._known.pop(request.request_id, None)
        return record is not None and self._finish_of(record, request)

    def _finish_of(self, record: Record, request: Request) -> bool:
        name, num_loaded, memory = record.request_id, self._connected.num_tokens_of(request), self._memory
        vllms = self._look_at(record, request)
        num_tokens = request.num_computed_tokens if num_loaded is None else num_loaded
        if request.state is RequestState.RUNNING and request in self._mechanism.replica.running_set.unverified:
            # `vllms.num_tokens` includes accepted drafts that the mechanism has not counted yet. Of these tokens,
            # all but the last are computed.
            num_tokens = max(num_tokens, vllms.num_tokens - 1)
        vllms.num_computed_tokens = num_tokens
        self._loaded.discard(name)
        self._enter(name, None)
        has_blocks = self._mechanism.fault is None and memory.num_held_blocks(request) > 0
        if self._managed is not None and has_blocks:
            return self._finish(record, self._managed.numbers_at_end(request, num_tokens))
        if not has_blocks:
            return self._finish(record, ([],) * self._num_tables)
        held = memory.block_table(request)[: memory.blocks_for(num_tokens)]
        return self._finish(record, ([block + 1 for block in held],))

    def _finish(self, record: Record, tables: tuple[list[int], ...]) -> bool:
        vllms = record.request
        if not vllms.is_finished():
            vllms.status = RequestStatus.FINISHED_ERROR
        finished = self.vllms
        nothing: tuple[bool, dict[str, Any] | None] = (False, None)
        keeps, params = self._guarded(
            lambda: (
                finished.request_finished_all_groups(vllms, tables)
                if isinstance(finished, SupportsHMA)
                else finished.request_finished(vllms, tables[0])
            ),
            nothing,
        )
        settle(vllms)
        output = self._last.pop(record.request_id, None)
        if output is not None and params is not None:
            if output.prefill_stats is not None and params.get("do_remote_prefill"):
                params["remote_prefill_cached_tokens"] = output.prefill_stats.num_cached_tokens
            output.kv_transfer_params = params
        if keeps:
            self._sending.add(record.request_id)
        return bool(keeps)

    def _blocks(self, request: Request, vllms: VllmRequest, num_cached: int, *, begins: bool) -> KVCacheBlocks:
        """Return a request's blocks in vLLM's form. The full blocks of the first `num_cached` tokens are returned with
        their hashes.
        """
        if self._managed is not None:
            if not begins:
                self._managed.cache_blocks(request, num_cached)
            return self._managed.blocks_of(request)
        num_hashed = num_cached // self._memory.block_size if self._caches and request.hashes is not None else 0
        blocks = [KVCacheBlock(block + 1, ref_cnt=1) for block in self._memory.block_table(request)]
        for block, block_hash in zip(blocks[:num_hashed], vllms.block_hashes, strict=False):
            block.set_block_hash(make_block_hash_with_group_id(block_hash, 0))
        return KVCacheBlocks((blocks,))

    # Steps

    def add_message(self, output: SchedulerOutput, *, is_formed: bool) -> None:
        """Add the connector's metadata for its workers to a step's message. Errors of the connector are passed on.

        `is_formed` is true if the policies formed the step.
        """
        self.raise_error()
        if self._late is not None:
            self._formed.append(is_formed)
        output.has_sync_kv_loads, self._loads_now = self._loads_now, False
        output.kv_connector_block_state = KVConnectorBlockState(set(output.num_scheduled_tokens), self._table_of, {})
        self._scheduled = without_drafts(output)
        output.kv_connector_metadata = self.vllms.build_connector_meta(output)
        self._scheduled = {}
        output.kv_connector_block_state = None

    def _table_of(self, name: str) -> tuple[list[int], ...]:
        own = self._known[name].own
        assert own is not None
        if self._managed is not None:
            return self._managed.numbers(own)
        return ([block + 1 for block in self._memory.block_table(own)],)

    def voided_by(self, output: Any, step: SchedulerOutput) -> set[str]:
        """Return the ids of requests whose results of this step are void, because some of their KV was not loaded."""
        if not output or not output.invalid_block_ids:
            return set(self._void)
        if self._managed is not None:
            raise RuntimeError(_BY_BLOCK)
        num_scheduled = without_drafts(step)
        bad = {block - 1 for block in output.invalid_block_ids}
        void = list(self._connected.find_void(bad, lambda one: num_scheduled.get(one.request_id, 0)))
        if self._late is not None:
            void += [one for one in self._late.unreported if not bad.isdisjoint(self._memory.block_table(one))]
        self._newly_void = {one.request_id: one for one in void}
        return {*self._newly_void, *self._void}

    def land(self, output: Any) -> None:
        """End the step in flight, and pass the workers' report to the connector. Errors of the connector are raised."""
        report = self._report(output) if output else None
        if self._late is not None:
            self._void |= self._newly_void
            report = self._late_report(self._late, report or KvReport())
        self._mechanism.land(report)
        self._forget_step(output)

    def land_late(self, output: Any) -> list[Request]:
        """Process the workers' report on a step that the mechanism ended earlier, when it formed the next step.

        Returns the requests that ended with the reported step and whose result is void because a load failed. Errors of
        the connector are passed on.
        """
        assert self._late is not None
        ended = [one for one in self._newly_void.values() if one.state is RequestState.ENDED]
        for request in ended:
            self._late.void(request)
            del self._newly_void[request.request_id]
        self._void |= self._newly_void
        self._mechanism.take_report(self._late_report(self._late, self._report(output) if output else KvReport()))
        self._forget_step(output)
        return ended

    def is_void(self, request: Request) -> bool:
        """Return whether the computed tokens of a request that ends in the mechanism are void."""
        return self._void.get(request.request_id) is request

    def computes_again(self, request: Request) -> bool:
        """Return whether a request with a void result is to be computed again; if so, cancel the report of its end."""
        if not self.recomputes:
            return False
        if self._late is not None:
            self._late.void(request)
        return True

    def _forget_step(self, output: Any) -> None:
        self._last.clear()
        self._newly_void.clear()
        for request in [one for one in self._void.values() if one.state is RequestState.ENDED]:
            if self._late is not None and not self._late.is_written(request.request_id):
                del self._void[request.request_id]
        self.raise_error()
        if output:
            self.vllms.update_connector_output(output)
        self._figures = output.kv_connector_stats if output else None
        own = self.vllms.get_kv_connector_stats()
        if own is not None and not own.is_empty():
            self._figures = own if self._figures is None else self._figures.aggregate(own)

    def _late_report(self, late: LateEnds, report: KvReport) -> KvReport:
        """Return the report with two fields changed: `num_returned` is 0 if the step was empty, else 1; `sent` lists
        the requests that no longer need their blocks.
        """
        for request in report.sent:
            late.sent(request)
        return structs.replace(report, sent=late.take_released(), num_returned=int(self._formed.popleft()))

    def _report(self, output: Any) -> KvReport:
        for name in output.finished_recving or ():
            if name in self._known and name in self._loading:
                self._enter(name, _COMPLETED)
        self._loading.difference_update(output.finished_recving or ())
        self._sending.difference_update(output.finished_sending or ())
        return KvReport(
            received=list(self._named(output.finished_recving or ())),
            sent=list(self._named(output.finished_sending or ())),
            failed=list(self._named(output.failed_recving)),
            bad_blocks=frozenset(block - 1 for block in output.invalid_block_ids),
        )

    def _named(self, names: Iterable[str]) -> Iterator[Request]:
        for name in sorted(names):
            record = self._known.get(name)
            own = None if record is None else record.own
            if own is None:
                own = self._connected.find(name)  # the request may have ended and still hold blocks
            if own is None:
                _log.warning("the connector reports a transfer of request %s, which holds nothing here", name)
            else:
                yield own

    # Faults of policies

    def relieve(self) -> None:
        """From now on, if a request ends because a policy broke the contract, do not report this end to the connector:
        the fallback policies will continue the request.
        """
        self._relieves = True

    @property
    def is_quiet(self) -> bool:
        """True if no load or send that uses blocks is under way."""
        return not (self._loading or self._sending)

    # Counts

    @property
    def num_holding(self) -> int:
        """Number of waiting requests that hold blocks."""
        return self._connected.num_holding

    @property
    def keeps(self) -> bool:
        """True if ended requests keep blocks for a transfer."""
        return len(self._connected.kept) > (0 if self._late is None else self._late.num_waiting)

    @property
    def is_awaited(self) -> bool:
        """True if a pending transfer, step or answer of the connector may be the reason why no request can run."""
        return self._connected.is_awaited

    def _enter(self, name: str, stage: str | None) -> None:
        if self._stages is not None:
            if stage is None:
                self._stages.pop(name, None)
            else:
                self._stages[name] = stage

    def _count(self, request: Request, vllms: VllmRequest, num_local: int, num_tokens: int) -> None:
        num_asked = vllms.num_tokens - num_local
        if self._hits is None or not num_asked:
            return
        is_again = request.num_preemptions > 0
        sources = None
        if num_tokens and not is_again:
            sources = self._guarded(lambda: self.vllms.get_external_cache_hit_sources(vllms, num_tokens), None)
        self._hits.record(num_tokens=num_asked, num_hits=num_tokens, preempted=is_again, hits_by_source=sources)

    def reset(self) -> bool:
        """Make the connector drop its cached content; return False if it cannot."""
        if self.vllms.reset_cache() is False:
            return False
        if self._hits is not None:
            self._hits.reset = True
        return True

    def add_stats(self, stats: SchedulerStats) -> None:
        """Add the statistics of the connector and its workers to a step's statistics."""
        if self._hits is not None:
            stats.connector_prefix_cache_stats, self._hits = self._hits, PrefixCacheStats()
        if self._stages is not None:
            counts = dict.fromkeys((_WAITING_TO_START, _IN_PROGRESS, _COMPLETED), 0)
            for stage in self._stages.values():
                counts[stage] += 1
            stats.num_kv_fetch_reqs_by_stage = counts
        stats.kv_connector_stats = self._figures.to_dict() if self._figures else None
