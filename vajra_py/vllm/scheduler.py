"""vLLM's scheduler interface on this project's mechanism: `--scheduler-cls vajra_py.vllm.Scheduler`.

Requests come in by `add_request`, plans go out as `SchedulerOutput`, tokens come back by `update_from_output`. The policies
of an experiment file decide (`vajra_py.vllm.settings` says how it is named).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request as VllmRequest
from vllm.v1.request import RequestStatus

from vajra_py.errors import ConfigError, Problem
from vajra_py.plugins import load_registry
from vajra_py.vllm.mechanism import EndReason, Intake, Mechanism, Request, StepPlan, make_mechanism
from vajra_py.vllm.messages import Messages
from vajra_py.vllm.records import Record, facts_of
from vajra_py.vllm.settings import Sizes, experiment_of, wishes_of
from vajra_py.vllm.support import check_cache, check_options, check_version, installed_version

_log = logging.getLogger(__name__)

_BY_ITSELF = (EndReason.STOP, EndReason.LENGTH)
"""Ends that a request's own tokens bring about, and that its client is told with the last of them."""


@dataclass(slots=True)
class _Failed:
    """A request that ends without a token of its own, and what its client is told."""

    request: VllmRequest
    reason: FinishReason
    why: str


class Scheduler(SchedulerInterface):  # type: ignore[misc]  # vLLM is there at run time alone
    """Schedules a vLLM by the policies of an experiment.

    Raises `ConfigError` for what cannot be scheduled.
    """

    connector = None
    ec_connector = None

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
        self._version = check_version(installed_version())
        check_options(vllm_config)
        check_cache(kv_cache_config)
        self.kv_cache_config = kv_cache_config
        self.log_stats = log_stats
        self.requests: dict[str, VllmRequest] = {}
        """Requests whose end no client was told yet, as vLLM's structured output wants them."""
        self._structured = structured_output_manager
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self._is_async = bool(vllm_config.scheduler_config.async_scheduling)
        self._wishes = wishes_of(vllm_config.additional_config)
        self._zero_ns = time.monotonic_ns()
        self._wall_zero = time.time()
        self.mechanism = self._make_mechanism(vllm_config, kv_cache_config, block_size)
        self._records: dict[str, Record] = {}
        self._messages = Messages(
            self.mechanism.replica,
            self._records,
            resumes_as_new=bool(vllm_config.use_v2_model_runner),
            zeroes=bool(kv_cache_config.needs_kv_cache_zeroing),
        )
        self._caches = bool(vllm_config.cache_config.enable_prefix_caching)
        self._constrained: dict[str, Record] = {}
        """Requests whose tokens a grammar constrains."""
        self._compiling: list[Record] = []
        """Requests whose grammar is not there yet."""
        self._failed: list[_Failed] = []
        self._finished_sets: dict[int, set[str]] | None = {} if include_finished_set else None
        self._pause = PauseState.UNPAUSED
        self._forgets = False
        """Whether all KV is to be given up before the next step, when every token of the last ones is known."""
        self._in_flight: deque[SchedulerOutput] = deque()
        self._prefix_stats = PrefixCacheStats()

    def _make_mechanism(self, vllm_config: Any, kv_cache_config: Any, block_size: int) -> Mechanism:
        scheduler, registry = vllm_config.scheduler_config, load_registry()
        sizes = Sizes(
            model=str(vllm_config.model_config.model),
            block_size=block_size,
            num_blocks=kv_cache_config.num_blocks - 1,
            max_num_seqs=scheduler.max_num_seqs,
            max_step_tokens=scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens,
            max_model_len=self._max_model_len,
            prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
            version=self._version,
        )
        self.config = config = experiment_of(sizes, self._wishes, scheduler, registry)
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        num_layers = len(kv_cache_config.kv_cache_groups[0].layer_names)
        bytes_per_token = spec.page_size_bytes * num_layers // block_size
        return make_mechanism(config, registry, self._clock, self._max_model_len, bytes_per_token)

    def _clock(self) -> int:
        return time.monotonic_ns() - self._zero_ns

    # Requests

    def add_request(self, request: VllmRequest) -> None:
        """Take a request in; it is queued with the next step."""
        if request.request_id in self.requests:
            raise ValueError(f"request {request.request_id!r} is being served already. Another id is needed.")
        self.requests[request.request_id] = request
        if self.log_stats:
            request.record_event(EngineCoreEventType.QUEUED)
        try:
            record = self._record_of(request)
        except ConfigError as error:
            self._fail(request, FinishReason.ERROR, str(error))
            return
        self._records[request.request_id] = record
        if request.use_structured_output:
            self._constrained[request.request_id] = record
        if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            self._compiling.append(record)
        else:
            self.mechanism.arrive(record.intake)

    def _record_of(self, request: VllmRequest) -> Record:
        for name, is_wrong in (
            ("pooling", request.pooling_params is not None),
            ("LoRA adapters", request.lora_request is not None),
            ("multimodal inputs", bool(request.mm_features)),
            ("streamed inputs", request.resumable),
            ("prompt embeddings", request.prompt_embeds is not None or request.prompt_token_ids is None),
        ):
            if is_wrong:
                raise ConfigError(Problem(f"request {request.request_id}", f"{name} cannot be scheduled here"))
        limit = min(request.max_tokens, self._max_model_len - request.num_prompt_tokens)
        shares = self._caches and not request.skip_reading_prefix_cache
        intake = Intake(
            facts=facts_of(request, limit),
            arrived_at=max(0.0, request.arrival_time - self._wall_zero),
            prompt_token_ids=request.prompt_token_ids if shares else None,
            salt=request.cache_salt or "",
            on_ended=self._on_ended,
        )
        return Record(request, intake, self._max_model_len)

    def _take_compiled(self) -> None:
        waiting, self._compiling = self._compiling, []
        for record in waiting:
            structured = record.request.structured_output_request
            grammar = None if structured is None else structured.grammar
            if record.is_over:
                continue
            if grammar is None:
                self._compiling.append(record)
            elif isinstance(grammar, Exception):
                del self._records[record.request_id]
                self._fail(record.request, FinishReason.ERROR, f"its grammar cannot be compiled: {grammar}")
            else:
                record.request.status = RequestStatus.WAITING
                self.mechanism.arrive(record.intake)

    def _fail(self, request: VllmRequest, reason: FinishReason, why: str) -> None:
        self._constrained.pop(request.request_id, None)
        is_error = reason is FinishReason.ERROR
        request.status = RequestStatus.FINISHED_ERROR if is_error else RequestStatus.FINISHED_ABORTED
        self._failed.append(_Failed(request, reason, why))

    def _on_ended(self, request: Request, reason: EndReason) -> None:
        """The mechanism has ended a request, for one reason or another."""
        record = self._records.get(request.request_id)
        if record is None:
            return
        if record.is_known:
            self._messages.finished.add(record.request_id)
            record.is_known = False
        if reason in _BY_ITSELF:
            return
        del self._records[record.request_id]
        record.is_over = True
        is_breach = self.mechanism.fault is not None
        self._fail(record.request, FinishReason.ERROR if is_breach else FinishReason.ABORT, request.detail)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[VllmRequest]:
        """Take requests back: aborted, or stopped by a string that the frontend found."""
        names = (
            [request_ids]
            if isinstance(request_ids, str)
            else list(self.requests if request_ids is None else request_ids)
        )
        finished = []
        for name in names:
            record = self._records.get(name)
            if record is None:
                continue
            finished.append(record.request)
            record.request.status = finished_status
            if record in self._compiling:
                self._compiling.remove(record)
            else:
                self.mechanism.abort(name)
            self._end(record)
        return finished

    def _end(self, record: Record) -> None:
        """The client knows the end, or does not care."""
        record.is_over = True
        name = record.request_id
        del self._records[name]
        del self.requests[name]
        self._constrained.pop(name, None)
        if record.is_known:
            self._messages.finished.add(name)
            record.is_known = False
        self._note_finished(record.client_index, name)

    def _note_finished(self, client_index: int, name: str) -> None:
        if self._finished_sets is not None:
            self._finished_sets.setdefault(client_index, set()).add(name)

    # A step

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """The next step, by the policies."""
        if self._compiling:
            self._take_compiled()
        waits = self._forgets and any(one.total_num_scheduled_tokens for one in self._in_flight)
        if self._forgets and not waits:
            self._forgets = False
            self.mechanism.forget_cache()
        plan = None if waits or self._pause is PauseState.PAUSED_ALL else self.mechanism.step()
        for name in self.mechanism.take_preempted():
            self._messages.preempted.add(name)
            if self.log_stats and name in self.requests:
                self.requests[name].record_event(EngineCoreEventType.PREEMPTED)
        output = self._messages.empty() if plan is None else self._told(plan)
        self._in_flight.append(output)
        return output

    def _told(self, plan: StepPlan) -> SchedulerOutput:
        for chunk in plan.chunks:
            if chunk.kind != "running":
                self._admitted(chunk.request, chunk.num_computed_before)
        output = self._messages.tell(plan)
        if self._constrained and self._sampling_by_grammar(output):
            output.has_structured_output_requests = True
            output.pending_structured_output_tokens = self._is_async and bool(self._in_flight)
        return output

    def _admitted(self, request: Request, num_cached: int) -> None:
        record = self._records[request.request_id]
        vllms = record.request
        if record.append_key is None and record.intake.keys is not None:
            record.append_key = record.intake.keys.append
        vllms.status = RequestStatus.RUNNING
        vllms.num_preemptions = request.num_preemptions
        if vllms.prefill_stats is not None and not request.num_preemptions:
            vllms.prefill_stats.set(request.num_prompt_tokens, min(num_cached, request.num_prompt_tokens), 0)
        if self.log_stats:
            vllms.record_event(EngineCoreEventType.SCHEDULED)
            if self._caches and not vllms.skip_reading_prefix_cache:
                self._prefix_stats.record(request.num_known_tokens, num_cached, request.num_preemptions > 0)

    # Structured output

    def _sampling_by_grammar(self, output: SchedulerOutput) -> list[str]:
        """Requests of a step that sample a token which a grammar constrains."""
        found = []
        for name, record in self._constrained.items():
            own = record.own
            if own is not None and name in output.num_scheduled_tokens and own.num_remaining_tokens <= 0:
                found.append(name)
        return found

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """What the grammars of a step's requests allow."""
        if not scheduler_output.has_structured_output_requests:
            return None
        names = self._sampling_by_grammar(scheduler_output)
        if not names:
            return None
        bitmask = self._structured.grammar_bitmask(self.requests, names, {})
        return GrammarOutput(names, bitmask, [0] * len(names))

    # Tokens

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take a step's tokens in; what every client is to be told."""
        self._in_flight.popleft()
        if not self._is_async:
            self.mechanism.open_turn()
        outputs: dict[int, list[EngineCoreOutput]] = {}
        if model_runner_output.sampled_token_ids:
            self._take_tokens(model_runner_output, outputs)
        for failed in self._failed:
            self._tell_failed(failed, outputs)
        self._failed.clear()
        told = {client: EngineCoreOutputs(outputs=each) for client, each in outputs.items()}
        if self._finished_sets:
            for client, names in self._finished_sets.items():
                told.setdefault(client, EngineCoreOutputs()).finished_requests = names
            self._finished_sets = {}
        if self.log_stats and (stats := self.make_stats()) is not None:
            if not told:
                told[0] = EngineCoreOutputs()
            next(iter(told.values())).scheduler_stats = stats
        return told

    def _take_tokens(self, output: ModelRunnerOutput, outputs: dict[int, list[EngineCoreOutput]]) -> None:
        find = self._records.get
        is_simple = not (output.logprobs or output.prompt_logprobs_dict or output.num_nans_in_logits)
        for index, (name, tokens) in enumerate(zip(output.req_ids, output.sampled_token_ids, strict=True)):
            if not tokens:
                continue
            record = find(name)
            if record is None:
                continue
            token = tokens[0]
            produced = record.output
            produced.append(token)
            if record.append_key is not None:
                record.append_key(token)
            stops = not record.is_plain or token in record.stops or len(produced) >= record.limit
            if not stops and is_simple and len(produced) > 1:
                told = EngineCoreOutput(name, [token])
            else:
                told = self._said_in_full(record, index, token, output, stops)
            try:
                outputs[record.client_index].append(told)
            except KeyError:
                outputs[record.client_index] = [told]

    def _said_in_full(
        self, record: Record, index: int, token: int, output: ModelRunnerOutput, may_stop: bool
    ) -> EngineCoreOutput:
        """The first or last token of a request, or one with more to it than its id."""
        request, name = record.request, record.request_id
        stops = may_stop and record.finishes(token, self._max_model_len)
        if request.use_structured_output and not self._structured.accept_tokens(request, [token]):
            _log.error("the grammar of request %s does not allow token %d; it ends", name, token)
            request.status, stops = RequestStatus.FINISHED_ERROR, True
        told = EngineCoreOutput(name, [token], trace_headers=request.trace_headers)
        if record.wants_logprobs and output.logprobs:
            told.new_logprobs = output.logprobs.slice_request(index, 1)
        told.new_prompt_logprobs_tensors = output.prompt_logprobs_dict.get(name)
        told.prompt_token_id_logprobs = output.prompt_token_id_logprobs_dict.get(name)
        if output.num_nans_in_logits:
            told.num_nans_in_logits = output.num_nans_in_logits.get(name, 0)
        stats = request.take_prefill_stats()
        if stats is not None:
            size = self.mechanism.replica.limits.block_size
            stats.finalize(request.num_prompt_tokens // size * size if self._caches else 0)
            told.prefill_stats = stats
        told.events = request.take_events()
        if stops:
            told.finish_reason, told.stop_reason = request.get_finished_reason(), request.stop_reason
            if record.own is not None and len(record.output) < record.limit:
                self.mechanism.stop(record.own)
            self._end(record)
        return told

    def _tell_failed(self, failed: _Failed, outputs: dict[int, list[EngineCoreOutput]]) -> None:
        request = failed.request
        self.requests.pop(request.request_id, None)
        self._note_finished(request.client_index, request.request_id)
        _log.warning("request %s ends: %s", request.request_id, failed.why)
        told = EngineCoreOutput(
            request.request_id, [], finish_reason=failed.reason, stop_reason=failed.why, events=request.take_events()
        )
        outputs.setdefault(request.client_index, []).append(told)

    # Counts

    def get_num_unfinished_requests(self) -> int:
        """Requests whose clients wait for something."""
        return 0 if self._pause is PauseState.PAUSED_ALL else len(self.requests)

    def has_finished_requests(self) -> bool:
        """Whether the workers have to be told of an end."""
        return bool(self._messages.finished)

    def get_request_counts(self) -> tuple[int, int]:
        """Running and waiting requests."""
        running = self.mechanism.num_running
        return running, max(0, len(self.requests) - running)

    def get_kv_cache_usage(self) -> float:
        """Part of the KV blocks that requests hold."""
        memory = self.mechanism.replica.memory
        return 1.0 - memory.free_blocks / memory.num_blocks

    def make_stats(self) -> SchedulerStats | None:
        """Counts for vLLM's log and metrics."""
        if not self.log_stats:
            return None
        running, waiting = self.get_request_counts()
        stats, self._prefix_stats = self._prefix_stats, PrefixCacheStats()
        return SchedulerStats(
            num_running_reqs=running,
            num_waiting_reqs=max(0, waiting - len(self._compiling)),
            num_skipped_waiting_reqs=len(self._compiling),
            kv_cache_usage=self.get_kv_cache_usage(),
            prefix_cache_stats=stats,
        )

    # Control

    @property
    def pause_state(self) -> PauseState:
        """Whether steps are formed."""
        return self._pause

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Form no steps, or go on."""
        self._pause = pause_state

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget every cached block; False, and nothing changed, when requests hold blocks and may not lose them."""
        if self.mechanism.num_running and not reset_running_requests:
            return False
        self._forgets = True
        return True

    def reset_encoder_cache(self) -> None:
        """There is no encoder."""

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Nobody drafts tokens: speculative decoding is refused."""

    def update_draft_token_ids_in_output(self, draft_token_ids: Any, scheduler_output: SchedulerOutput) -> None:
        """Nobody drafts tokens: speculative decoding is refused."""

    def shutdown(self) -> None:
        """Give back what the scheduler holds."""
