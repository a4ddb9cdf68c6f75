"""vLLM's scheduler interface, implemented by this project's mechanism: `--scheduler-cls vajra_py.vllm.Scheduler`.

vLLM adds requests with `add_request`, gets plans as `SchedulerOutput` from `schedule`, and returns tokens with
`update_from_output`. The policies come from an experiment file; `vajra_py.vllm.settings` documents how to name it.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request as VllmRequest
from vllm.v1.request import RequestStatus

from vajra_py.config.single import only_replicaset
from vajra_py.errors import ConfigError, VajraError
from vajra_py.experiment.runs.recording import RunRecording
from vajra_py.plugins import Registry, load_registry
from vajra_py.plugins.watchdog import no_endless_calls
from vajra_py.vllm.absent import WithoutExtras
from vajra_py.vllm.connecting import NOT_LOADED, check_connector, connector_of, rules_of
from vajra_py.vllm.drafting import DraftStats, num_tokens_of
from vajra_py.vllm.endings import Endings, RefusedStreams
from vajra_py.vllm.grammars import Grammars
from vajra_py.vllm.kv_events import KvEvents, kv_events_of
from vajra_py.vllm.lora import AdapterNames
from vajra_py.vllm.managed_kv import ManagedKv
from vajra_py.vllm.managing import managed_memory
from vajra_py.vllm.mechanism import EndReason, MakeMemory, Mechanism, Request, StepPlan, make_mechanism
from vajra_py.vllm.messages import Messages
from vajra_py.vllm.model_facts import kv_bytes_per_token_of, layer_specs_of
from vajra_py.vllm.recording import SessionRecording, facts_of, start_recording
from vajra_py.vllm.records import Arrivals, Record, RecordRules, record_of
from vajra_py.vllm.settings import (
    VajraOptions,
    described,
    experiment_of,
    fallback_of,
    orders_by_priority,
    sizes_of,
    vajra_options_of,
)
from vajra_py.vllm.steady_tokens import SteadyTokens, TakenTokens
from vajra_py.vllm.support import block_size_of, check_options, check_version, installed_version

_log = logging.getLogger(__name__)

_BY_ITSELF = (EndReason.STOP, EndReason.LENGTH)
"""End reasons that follow from a request's tokens; they are sent to the client with the last token."""
_BY_BREACH = (EndReason.FAILED, EndReason.REJECTED)
"""End reasons that can result from a policy's violation of the contract; the policies are then out of service."""


class Scheduler(WithoutExtras):
    """Schedules a vLLM with the policies of an experiment.

    Raises `ConfigError` for options and models that cannot be scheduled.
    """

    def __init__(  # noqa: PLR0913  # the interface's
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        structured_output_manager: Any,
        block_size: int,
        hash_block_size: int | None = None,
        mm_registry: Any = None,
        include_finished_set: bool = False,
        log_stats: bool = False,
    ) -> None:
        version = check_version(installed_version())
        check_options(vllm_config)
        self.kv_cache_config = kv_cache_config
        self.log_stats = log_stats
        self.requests: dict[str, VllmRequest] = {}
        """Requests whose end has not been sent to the client; vLLM's structured output reads this attribute."""
        self._grammars = Grammars(structured_output_manager)
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self._is_async = bool(vllm_config.scheduler_config.async_scheduling)
        self._caches = bool(vllm_config.cache_config.enable_prefix_caching)
        self._zero_ns = time.monotonic_ns()
        registry = load_registry()
        block_sizes = block_size, hash_block_size or block_size
        block_size = block_size_of(kv_cache_config, block_size)
        sizes = sizes_of(vllm_config, block_size, kv_cache_config.num_blocks - 1, version)
        options = vajra_options_of(vllm_config.additional_config)
        self.config = experiment_of(sizes, options, vllm_config.scheduler_config, registry)
        self._fallback = fallback_of(self.config, registry)
        """Policies that take over after a contract violation; None: all requests end, and new ones are rejected."""
        bytes_per_token = kv_bytes_per_token_of(layer_specs_of(kv_cache_config), block_size)
        check_connector(vllm_config)
        self._in_flight: deque[SchedulerOutput] = deque()
        self._plans: deque[StepPlan | None] = deque()
        """Plans of the steps in flight; None for an empty step."""
        make_memory = managed_memory(vllm_config, kv_cache_config, block_sizes, options, self._num_in_flight)
        self.mechanism: Mechanism = self._make_mechanism(registry, bytes_per_token, make_memory)
        self._recording: SessionRecording | None = None
        if options.save_run is not None:
            run = RunRecording(self.config, registry, options.save_run)
            facts = facts_of(vllm_config, sizes, bytes_per_token, rules_of(vllm_config, kv_cache_config, self.config))
            self._recording = start_recording(run, self.mechanism, vllm_config, facts)
        self._watchdog = ExitStack()
        """Watchdog that interrupts policies that do not return, in the scheduling thread."""
        self._thread_id: int | None = None
        kv_events = kv_events_of(vllm_config, kv_cache_config, block_size)
        self._rules = self._record_rules(vllm_config, kv_events)
        records = self._records = dict[str, Record]()
        self._steady = SteadyTokens(records)
        self._draft_stats = DraftStats(sizes.drafts.num_tokens)
        self._with_events: set[str] = set()
        """Requests with output whose next output must contain events that vLLM's metrics count."""
        self._stopping: list[Request] = []  # requests that end with a token of the step being processed
        resumes_as_new, zeroes = bool(vllm_config.use_v2_model_runner), bool(kv_cache_config.needs_kv_cache_zeroing)
        self._messages = Messages(self.mechanism, records, resumes_as_new=resumes_as_new, zeroes=zeroes)
        self._is_shut_down = False
        self._held: list[Record] = []
        """Requests to be resubmitted to the mechanism with the next step, once all their tokens are known."""
        self._streams = RefusedStreams()
        self._num_idle = 0
        """Number of consecutive turns that scheduled nothing although a request was waiting."""
        self._events = kv_events
        self._connected = connector_of(self, vllm_config, self._looked_up, self._num_in_flight)
        self._endings = Endings(lists_finished=include_finished_set)
        self._fault: VajraError | None = None
        """The last contract violation that was logged."""
        self._pause = PauseState.UNPAUSED
        self._forgets = False
        """True if all KV is to be dropped before the next step, once all tokens of earlier steps are known."""
        self._prefix_stats = PrefixCacheStats()
        self._log_policies(options, is_managed=make_memory is not None)

    def _log_policies(self, options: VajraOptions, *, is_managed: bool) -> None:
        line = described(self.config, options, is_async=self._is_async, is_managed=is_managed)
        init_logger("vllm.vajra").info(line)

    def _make_mechanism(self, registry: Registry, bytes_per_token: int, make_memory: MakeMemory | None) -> Mechanism:
        """Build the mechanism.

        Raises `ConfigError` if policies, including the fallback ones, are unusable with vLLM.
        """
        mechanism: Mechanism = make_mechanism(
            self.config, registry, self._clock, self._max_model_len, bytes_per_token, make_memory
        )
        if self._is_async:
            mechanism.form_ahead()
        if self._fallback is not None:
            mechanism.check_policies(self._fallback)
        return mechanism

    def _record_rules(self, vllm_config: Any, kv_events: KvEvents | None) -> RecordRules:
        memory = only_replicaset(self.config).replica.memory
        arrivals = Arrivals(self._clock, as_stated=orders_by_priority(self.config))
        rules = RecordRules(self._max_model_len, self._caches, memory.tenant_salt, arrivals, self._on_ended)
        if vllm_config.lora_config is not None:
            rules = replace(rules, adapters=AdapterNames())
        if kv_events is not None:
            rules = replace(rules, hashes_for=kv_events.hashes_for)
            kv_events.follow(self.mechanism.replica.memory)
        return rules

    def _clock(self) -> int:
        return time.monotonic_ns() - self._zero_ns

    def _num_in_flight(self, request_id: str) -> int:
        """Return the number of a request's tokens in steps in flight, without drafts."""
        return sum(num_tokens_of(request_id, one) for one in self._in_flight)

    # Requests

    def add_request(self, request: VllmRequest) -> None:
        """Accept a request; it enters the queue when the next step is formed.

        A request that cannot be served ends with an `error` output.
        """
        if self._streams.answers(request, self.requests):
            return
        self.requests[request.request_id] = request
        if self.log_stats:
            request.record_event(EngineCoreEventType.QUEUED)
        try:
            record = record_of(request, self._rules)
        except ConfigError as error:
            self._endings.fail(request, FinishReason.ERROR, str(error))
            return
        self._records[request.request_id] = record
        if self._connected is not None:
            self._connected.take_in(record)
        if not self._grammars.take_in(record):
            self.mechanism.arrive(record.submission)
            self._settle()

    def _take_compiled(self) -> None:
        for record, error in self._grammars.take_compiled():
            if error is None:
                self.mechanism.arrive(record.submission)
            else:
                self._drop(record, FinishReason.ERROR, f"its grammar cannot be compiled: {error}")

    def _on_ended(self, request: Request, reason: EndReason) -> None:
        """Handle a request that the mechanism has ended, for any reason."""
        record = self._records.get(request.request_id)
        if record is None or record.own is not request:  # another request may have this name by now
            return
        if self._connected is not None and self._connected.is_void(request):
            if self._connected.computes_again(request):
                self._held.append(record)
            else:
                self._drop(record, FinishReason.ERROR, NOT_LOADED)
            return
        if reason in _BY_ITSELF:
            self._forget_at_workers(record)
            return
        is_violation = reason in _BY_BREACH and (self.mechanism.fault is not None or reason is EndReason.FAILED)
        if is_violation and self._fallback is not None and self.mechanism.fault is not None:
            self._held.append(record)
            return
        self._drop(record, FinishReason.ERROR if is_violation else FinishReason.ABORT, request.detail)

    def _drop(self, record: Record, reason: FinishReason, why: str) -> None:
        """End a request for a reason other than its tokens; `why` is the explanation for its client."""
        self._forget_at_workers(record)
        self._with_events.discard(record.request_id)
        del self._records[record.request_id]
        self._steady.forget()
        record.is_over = True
        self._grammars.forget(record)
        if self._connected is not None:
            self._connected.leave(record)
        self._endings.fail(record.request, reason, why)

    def _forget_at_workers(self, record: Record) -> None:
        if record.is_known or self._connected is not None:
            self._messages.next.finished.add(record.request_id)
            record.is_known = False

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[VllmRequest]:
        """Remove and return requests that the front end aborted, or stopped because it found a stop string.

        `request_ids`: None selects all requests.
        """
        names = (
            [request_ids]
            if isinstance(request_ids, str)
            else list(self.requests if request_ids is None else request_ids)
        )
        finished = []
        for name in names:
            record = self._records.get(name)
            if record is None:
                failed = self._endings.take_back(name)
                if failed is not None:
                    failed.status = finished_status
                    finished.append(self.requests.pop(name))
                    self._endings.note_finished(failed.client_index, name)
                continue
            finished.append(record.request)
            record.request.status = finished_status
            if not self._grammars.forget(record) and record not in self._held:
                self.mechanism.abort(name)
                if self._connected is not None:
                    self._connected.taken_back(record)
            elif self._connected is not None:
                self._connected.leave(record)
            self._end(record)
        self._settle()
        return finished

    def _end(self, record: Record) -> None:
        """Remove a request that ends with an output of this step, or that the front end has ended."""
        record.is_over = True
        name = record.request_id
        self._with_events.discard(name)
        del self._records[name]
        del self.requests[name]
        self._steady.forget()
        self._grammars.forget(record)
        if record in self._held:
            self._held.remove(record)
        elif record.own is not None:
            self.mechanism.leave(record.own)
        self._forget_at_workers(record)
        self._endings.note_finished(record.client_index, name)

    # A step

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Form the next step with the policies."""
        if self._grammars.num_compiling:
            self._take_compiled()
        if self._held and (self.mechanism.fault is None or self._fallback is None):
            self._hand_in_held()
        is_busy = self._is_busy
        plan = None
        if not (self._forgets and is_busy):
            self._forget_if_wanted()
            plan = self._step()
            if plan is None and not is_busy:
                plan = self._after_nothing()
            elif plan is not None:
                self._num_idle = 0
        for name in self.mechanism.take_preempted():
            if name in self._records:
                self._messages.next.preempted.add(name)
                self._record_event(self._records[name], EngineCoreEventType.PREEMPTED)
        output = self._messages.empty() if plan is None else self._message(plan)
        if self._connected is not None:
            self._connected.add_message(output, is_formed=plan is not None)
        self._in_flight.append(output)
        self._plans.append(plan)
        return output

    @property
    def _is_busy(self) -> bool:
        """True if a non-empty step is in flight."""
        return any(one.total_num_scheduled_tokens for one in self._in_flight)

    def _forget_if_wanted(self) -> None:
        if self._forgets:
            self._forgets = False
            self.mechanism.forget_cache()

    def _settle(self) -> None:
        """Apply pending inputs at once if no step can be formed, since vLLM may not request a step for a long time."""
        if self._in_flight:
            return
        if self._pause is PauseState.UNPAUSED:
            can_form = len(self._records) > self._grammars.num_compiling
        else:
            can_form = self._pause is PauseState.PAUSED_NEW and self._num_draining > 0
        if not can_form:
            self._forget_if_wanted()
            self.mechanism.step()

    def _after_nothing(self) -> StepPlan | None:
        """Handle a turn that forms no step while no step is in flight; too many in a row violate the contract."""
        is_left_idle = self._pause is not PauseState.UNPAUSED or self.mechanism.replica.builder.idle_at is not None
        if self._connected is not None and self._connected.is_awaited:
            is_left_idle = True
        if is_left_idle or not self.mechanism.controller.num_alive or self.mechanism.fault is not None:
            self._num_idle = 0
            return None
        self._num_idle += 1
        if self._num_idle < self.config.backend.settings.max_idle_steps:
            return None
        self._num_idle = 0
        self.mechanism.condemn()
        return self._step()

    def _step(self) -> StepPlan | None:
        if self._thread_id != threading.get_ident():
            self._watchdog.close()
            self._watchdog.enter_context(no_endless_calls(self.config.policy_timeout_s))
            self._thread_id = threading.get_ident()
        plan = self.mechanism.step()
        fault = self.mechanism.fault
        if fault is not None and fault is not self._fault:
            self._fault = fault
            _log.error("after %d steps: %s", self.mechanism.num_steps, fault)
        if fault is not None and self._fallback is not None and self._may_fall_back:
            return self._fall_back()
        return plan

    @property
    def _may_fall_back(self) -> bool:
        """True if there is no connector, or no block is being loaded, sent, or written by a step.

        Otherwise the fallback must wait, since it may reassign all blocks.
        """
        return self._connected is None or (self._connected.is_quiet and not self._is_busy)

    def _fall_back(self) -> StepPlan | None:
        """Switch to the fallback policies; running requests continue after their present tokens."""
        fallback, self._fallback = self._fallback, None
        assert fallback is not None
        names = ", ".join(choice.policy for choice in fallback.values())
        try:
            self.mechanism.change_policies(fallback)
        except VajraError as error:
            _log.error("the policies to fall back to (%s) cannot be used: %s", names, error)
            held, self._held = self._held, []
            for record in held:
                self._drop(record, FinishReason.ERROR, str(self._fault))
            return None
        _log.warning("from now on these policies schedule: %s; %d requests go on under them", names, len(self._held))
        self._hand_in_held()
        return self.mechanism.step()

    def _hand_in_held(self) -> None:
        """Submit held requests to the mechanism, except those with a token in flight."""
        held, self._held = self._held, []
        self._steady.forget()
        for record in held:
            if any(record.request_id in one.num_scheduled_tokens for one in self._in_flight):
                self._held.append(record)
                continue
            if record.is_known:
                self._messages.next.preempted.add(record.request_id)
            self.mechanism.arrive(record.hand_in_again() if record.own is not None else record.submission)

    def _message(self, plan: StepPlan) -> SchedulerOutput:
        if plan.chunks and plan.drafted is None:
            for chunk in plan.chunks:
                if chunk.kind != "running":
                    self._admitted(chunk.request, chunk.num_computed_before, is_first=chunk.kind == "admitted")
        output = self._messages.message(plan)
        if self._grammars.sampling(output):
            output.has_structured_output_requests = True
            output.pending_structured_output_tokens = self._is_async and bool(self._in_flight)
        return output

    def _admitted(self, request: Request, num_cached: int, *, is_first: bool) -> None:
        record = self._records[request.request_id]
        vllms = record.request
        vllms.status = RequestStatus.RUNNING
        vllms.num_preemptions = request.num_preemptions
        self._record_event(record, EngineCoreEventType.SCHEDULED)
        if self._connected is None:
            self._looked_up(record, request, num_cached, 0, is_first=is_first)

    def _record_event(self, record: Record, event: EngineCoreEventType) -> None:
        if self.log_stats:
            record.request.record_event(event)
            if record.output:
                self._with_events.add(record.request_id)

    def _looked_up(
        self, record: Record, request: Request, num_cached: int, num_loaded: int, *, is_first: bool | None = None
    ) -> None:
        """Count the cached and loaded tokens of a request that has been allocated blocks, for statistics."""
        vllms = record.request
        if is_first is None:
            is_first = not request.num_preemptions
        if vllms.prefill_stats is not None and is_first:
            vllms.prefill_stats.set(request.num_prompt_tokens, min(num_cached, request.num_prompt_tokens), num_loaded)
        if self.log_stats and self._caches and not vllms.skip_reading_prefix_cache:
            self._prefix_stats.record(request.num_known_tokens, num_cached, not is_first)

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Return the bit mask of tokens that grammars allow for a step's requests; None without grammars."""
        return self._grammars.bitmask(scheduler_output, self.requests)

    # Tokens

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Process a step's tokens; return the message for every client, by its index."""
        self._in_flight.popleft()
        plan = self._plans.popleft()
        reported, void = model_runner_output.kv_connector_output, set[str]()
        if self._connected is not None:
            void = self._connected.voided_by(reported, scheduler_output)
        if scheduler_output.scheduled_spec_decode_tokens and self.log_stats:
            self._draft_stats.observe(scheduler_output, model_runner_output, self._records)
        taken = TakenTokens({}, {})
        if model_runner_output.sampled_token_ids:
            taken = self._take_tokens(model_runner_output, void)
        if plan is not None and self._draft_stats.num_tokens:
            self.mechanism.accept(plan, taken.accepted)
        if self._stopping:
            self._stop()
        if not self._in_flight:
            if self._connected is None:
                self.mechanism.land()
            else:
                self._connected.land(reported)
            self._settle()
        elif self._connected is not None:
            self._compute_again(self._connected.land_late(reported))
        if self._recording is not None:
            self._recording.take_tokens()
        if self._events is not None:
            if self.connector is not None:
                self._events.feed.events += self.connector.take_events()
            self._events.publish()
        by_client = self._endings.with_ends(taken.outputs, self.requests)
        if self.log_stats and (stats := self.make_stats()) is not None:
            if not by_client:
                by_client[0] = EngineCoreOutputs()
            next(iter(by_client.values())).scheduler_stats = stats
        return by_client

    def _compute_again(self, ended: Sequence[Request]) -> None:
        """Resubmit requests that ended in the mechanism with a void token; end those that may not be resubmitted."""
        for record in (self._records[one.request_id] for one in ended if one.request_id in self._records):
            assert self._connected is not None
            # The workers have dropped the request, and accept it as a new one only if it has no output yet.
            if self._connected.recomputes and not record.output:
                self._held.append(record)
            else:
                self._drop(record, FinishReason.ERROR, NOT_LOADED)

    def _take_tokens(self, output: ModelRunnerOutput, void: Collection[str]) -> TakenTokens:
        """Process the tokens of a step, except for requests with void results."""
        has_more = output.logprobs or output.prompt_logprobs_dict or output.num_nans_in_logits
        if not has_more and not void and (not self._with_events or self._with_events.isdisjoint(output.req_ids)):
            taken = self._steady.take(output.req_ids, output.sampled_token_ids)
            if taken is not None:
                return taken
        self._steady.count_again()
        find: Callable[[str], Record | None] = self._records.get
        if void:
            find = {name: one for name, one in self._records.items() if name not in void}.get
        first = sys.maxsize if has_more else 2
        """Output length from which a client gets only ids of tokens, unless they end the request."""
        outputs, accepted = dict[int, list[EngineCoreOutput]](), dict[Request, int]()
        for index, (name, tokens) in enumerate(zip(output.req_ids, output.sampled_token_ids, strict=True)):
            if not tokens or (record := find(name)) is None:
                continue
            produced = record.output
            own_outputs = outputs.setdefault(record.client_index, [])
            goes_on = record.stops.keys().isdisjoint(tokens)
            is_short = goes_on and first <= len(produced) + len(tokens) < record.plain_until
            if is_short and name not in self._with_events:
                produced += tokens
                own_outputs.append(EngineCoreOutput(name, tokens))
            else:
                tokens, is_last = record.take(tokens, self._max_model_len)
                own_outputs.append(self._full_output(record, index, tokens, output, stops=is_last))
                self._with_events.discard(name)
            if len(tokens) > 1 and (own := record.own) is not None:
                accepted[own] = len(tokens) - 1
        return TakenTokens(outputs, accepted)

    def _stop(self) -> None:
        """End requests whose last token is known; call this after `Mechanism.accept` has counted their drafts."""
        stopping, self._stopping = self._stopping, []
        for request in stopping:
            self.mechanism.stop(request)

    def _full_output(
        self, record: Record, index: int, tokens: list[int], output: ModelRunnerOutput, *, stops: bool
    ) -> EngineCoreOutput:
        """Return an output with all fields: for first or last tokens, or tokens with log-probabilities and the like."""
        request, name = record.request, record.request_id
        if not self._grammars.accepts(request, tokens):
            _log.error("the grammar of request %s does not allow tokens %s; it ends", name, tokens)
            request.status, stops = RequestStatus.FINISHED_ERROR, True
        made = EngineCoreOutput(name, tokens, trace_headers=request.trace_headers)
        if record.wants_logprobs and output.logprobs:
            made.new_logprobs = output.logprobs.slice_request(index, len(tokens))
        made.new_prompt_logprobs_tensors = output.prompt_logprobs_dict.get(name)
        made.prompt_token_id_logprobs = output.prompt_token_id_logprobs_dict.get(name)
        if output.num_nans_in_logits:
            made.num_nans_in_logits = output.num_nans_in_logits.get(name, 0)
        stats = request.take_prefill_stats()
        if stats is not None:
            stats.finalize(self._num_stored(record))
            made.prefill_stats = stats
        made.events = request.take_events()
        if stops:
            made.finish_reason, made.stop_reason = request.get_finished_reason(), request.stop_reason
            if record.own is not None and len(record.output) < record.limit:
                self._stopping.append(record.own)
            if self._connected is not None:
                self._connected.ends_with(record, made)
            self._end(record)
        return made

    def _num_stored(self, record: Record) -> int:
        """Return the number of prompt tokens that are in the prefix cache, once the whole prompt is computed."""
        replica, own = self.mechanism.replica, record.own
        memory, size = replica.memory, replica.limits.block_size
        if isinstance(memory, ManagedKv) and own is not None and memory.is_registered(own):
            return memory.num_stored(own)
        return record.request.num_prompt_tokens // size * size if self._caches else 0

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Store the draft tokens that the workers propose after the last step."""
        names, drafts = draft_token_ids.req_ids, draft_token_ids.draft_token_ids
        owners = self._steady.owners(names)
        if owners is not None:
            self.mechanism.propose(owners, drafts)
            return
        requests, allowed = list[Request](), list[list[int]]()
        for name, tokens in zip(names, drafts, strict=True):
            record = self._records.get(name)
            if record is not None and tokens and (own := record.own) is not None and own.is_decode:
                is_plain = record.is_plain  # a plain request has no grammar, so all its drafts are allowed
                requests.append(own)
                allowed.append(tokens if is_plain else self._grammars.allowed_drafts(record.request, tokens))
        self.mechanism.propose(requests, allowed)

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        """Write draft tokens into the message of a step formed ahead.

        -1 replaces the first draft that its request's grammar rejects, and all later drafts of the request.
        """
        planned, invalid = scheduler_output.scheduled_spec_decode_tokens, dict[str, int]()
        for name, tokens in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            record = self._records.get(name)
            if record is None or not (count := len(planned.get(name, ()))):
                continue
            found = self._grammars.allowed_drafts(record.request, tokens[:count])
            if len(found) < count:
                invalid[name] = count - len(found)
            planned[name] = found + [-1] * (count - len(found))
        scheduler_output.num_invalid_spec_tokens = invalid

    # Counts

    def get_num_unfinished_requests(self) -> int:
        """Return the number of unfinished requests; while requests are paused, only of those that continue."""
        if self._pause is PauseState.PAUSED_ALL:
            return 0
        if self._pause is PauseState.PAUSED_NEW:
            return self._num_draining
        return len(self.requests)

    def has_request(self, request_id: str) -> bool:
        """Return whether the request is unfinished."""
        return request_id in self.requests

    def has_finished_requests(self) -> bool:
        """Return whether ends must still be sent to workers or clients, or a connector needs ended requests' blocks."""
        keeps = self._connected is not None and self._connected.keeps
        return bool(self._messages.next.finished) or self._endings.is_pending or keeps

    def has_requests(self) -> bool:
        """Return whether vLLM must keep requesting steps, even empty ones."""
        pushes = self.connector is not None and bool(self.connector.has_pending_push_work())
        return bool(super().has_requests()) or pushes

    def get_request_counts(self) -> tuple[int, int]:
        """Return the numbers of running and waiting requests."""
        running = self._num_running
        return running, max(0, len(self.requests) - running)

    @property
    def _num_running(self) -> int:
        """Number of requests that hold KV blocks; 0 if all KV is about to be dropped."""
        return 0 if self._forgets else self.mechanism.num_running

    @property
    def _num_draining(self) -> int:
        """Number of requests that continue while new ones are paused."""
        return self._num_running + (0 if self._connected is None else self._connected.num_holding)

    def get_kv_cache_usage(self) -> float:
        """Return the fraction of all KV blocks (0 to 1) that requests hold; 0 if all KV is about to be dropped."""
        return 0.0 if self._forgets else self.mechanism.kv_usage

    def make_stats(self) -> SchedulerStats | None:
        """Return counts for vLLM's log and metrics; None if they are disabled."""
        if not self.log_stats:
            return None
        running, waiting = self.get_request_counts()
        stats, self._prefix_stats = self._prefix_stats, PrefixCacheStats()
        made = SchedulerStats(
            num_running_reqs=running,
            num_waiting_reqs=max(0, waiting - self._grammars.num_compiling),
            num_skipped_waiting_reqs=self._grammars.num_compiling,
            kv_cache_usage=self.get_kv_cache_usage(),
            prefix_cache_stats=stats,
            spec_decoding_stats=self._draft_stats.take(),
        )
        if self._connected is not None:
            self._connected.add_stats(made)
        return made

    # Control

    @property
    def pause_state(self) -> PauseState:
        """State that determines which requests new steps may contain."""
        return self._pause

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pause all requests, pause only those without KV blocks, or resume."""
        if pause_state is self._pause:
            return
        self._pause = pause_state
        self.mechanism.set_gate(
            admits=pause_state is PauseState.UNPAUSED, forms=pause_state is not PauseState.PAUSED_ALL
        )
        self._settle()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Drop all cached blocks; return False and keep them if requests hold blocks that they may not lose.

        `reset_connector`: the connector drops its content too, even if the blocks are kept; return False if it cannot.
        """
        is_refused = self._num_running and not reset_running_requests
        if self._connected is not None:  # blocks that are being loaded or sent must be kept
            is_refused = is_refused or self._connected.num_holding > 0 or self._connected.keeps
        if not is_refused:
            self._forgets = self._prefix_stats.reset = True
            self._settle()
        if reset_connector and self._connected is not None:
            return self._connected.reset() and not is_refused
        return not is_refused

    @property
    def connector(self) -> Any:
        """KV connector of this vLLM; None without one."""
        return None if self._connected is None else self._connected.vllms

    def get_kv_connector(self) -> Any:
        """Return vLLM's KV connector; None without one."""
        return self.connector

    def get_kv_event_publisher_config(self) -> Any:
        """Return the configuration for publishing KV events; None if they are not published."""
        return None if self._events is None else self._events.publisher.get_publisher_config()

    def shutdown(self) -> None:
        """Release the scheduler's resources, and finish the recording. A second call does nothing."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        if self._events is not None:
            self._events.publisher.shutdown()
        if self.connector is not None:
            self.connector.shutdown()
        # The recording must contain the pending inputs: with the gate closed, `step` applies them and forms no step.
        if self._recording is not None:
            self.mechanism.set_gate(forms=False)
            self.mechanism.step()
        self._watchdog.close()
        self._thread_id = None
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.finish()
