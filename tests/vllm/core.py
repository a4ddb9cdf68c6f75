"""Drives a scheduler as vLLM's engine core does, with synthetic tokens instead of a model's."""

from __future__ import annotations

import sys
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.vllm.worker_model import ExpectedTokens, FirstRunner, KvSlots, Runner, SecondRunner

EOS = 7
VOCABULARY = 512


def vllm_config(model: str, *, is_async: bool = False, **options: Any) -> Any:
    config = EngineArgs(model=model, skip_tokenizer_init=True, dtype="float32", **options).create_engine_config()
    config.scheduler_config.async_scheduling = is_async
    return config


STATE = 0
"""In place of a window: layers that keep one state of a request."""


def kv_cache(
    num_blocks: int, block_size: int, windows: Sequence[int | None] = (None,), max_model_len: int = 512
) -> KVCacheConfig:
    """Return a cache with a group of blocks for each window; None: full attention."""
    sizes: dict[str, Any] = {"block_size": block_size, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    state = MambaSpec(block_size=max_model_len, shapes=((block_size, 128),), dtypes=(torch.float32,))
    specs = [
        FullAttentionSpec(**sizes)
        if one is None
        else state
        if one == STATE
        else SlidingWindowSpec(**sizes, sliding_window=one)
        for one in windows
    ]
    groups = [KVCacheGroupSpec([f"layer {index}"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def make_scheduler(cls: type[Any], config: Any, num_blocks: int, block_size: int, **options: Any) -> Any:
    config.cache_config.num_gpu_blocks = num_blocks
    cache = options.pop("cache", None) or kv_cache(num_blocks, block_size)
    config.cache_config.block_size = min(group.kv_cache_spec.block_size for group in cache.kv_cache_groups)
    scheduler_block_size, hash_block_size = resolve_kv_cache_block_sizes(cache, config)
    made = cls(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=options.pop("grammars", None) or StructuredOutputManager(config),
        block_size=scheduler_block_size,
        hash_block_size=hash_block_size,
        **options,
    )
    made.tests_use_second_runner = bool(config.use_v2_model_runner)
    made.tests_max_rows = config.scheduler_config.max_num_seqs
    return made


def made_up_token(name: str, position: int) -> int:
    """An output token of a request."""
    return EOS + 1 + zlib.crc32(f"{name} {position}".encode()) % VOCABULARY


@dataclass(frozen=True)
class RequestScript:
    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    arrives: int
    """Number of the call of `schedule` before which it arrives."""
    priority: int = 0
    aborts: int | None = None
    ends_at: int | None = None
    """Number of tokens after which it generates the end-of-sequence token."""
    salt: str | None = None
    prompt_logprobs: int | None = None
    adapter: str | None = None


def lora_of(adapter: str | None) -> LoRARequest | None:
    """Return an adapter of vLLM's, by its name, which ends with its number."""
    return None if adapter is None else LoRARequest(adapter, int(adapter.rsplit("-", 1)[1]), f"/{adapter}")


_NONE_HASH: list[bool] = []


def request_of(script: RequestScript, block_size: int, caches: bool) -> Request:
    hash_fn = get_hash_fn_by_name("sha256")
    if not _NONE_HASH:
        init_none_hash(hash_fn)
        _NONE_HASH.append(True)
    params = SamplingParams(max_tokens=script.max_tokens, temperature=0.0, prompt_logprobs=script.prompt_logprobs)
    params.update_from_generation_config({}, EOS)
    return Request(
        request_id=script.name,
        prompt_token_ids=list(script.prompt),
        sampling_params=params,
        pooling_params=None,
        arrival_time=1e10 + script.arrives + int(script.name.rsplit("-", 1)[1]) * 1e-4,
        priority=script.priority,
        cache_salt=script.salt,
        lora_request=lora_of(script.adapter),
        block_hasher=get_request_block_hasher(block_size, hash_fn) if caches else None,
    )


@dataclass
class Step:
    scheduled: dict[str, int]
    computed: dict[str, int]
    preempted: list[str]
    free: int
    drafts: dict[str, list[int]]


@dataclass
class Core:
    """`EngineCore.step`, or `step_with_batch_queue` with a queue of two, on a model of vLLM's workers.

    Attributes:
        worker: receiver of the messages; the kind of vLLM's runner follows from the scheduler's configuration.
    """

    scheduler: Any
    is_async: bool = False
    steps: list[Step] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    queue: deque[tuple[Any, Any]] = field(default_factory=deque)
    scripts: dict[str, RequestScript] = field(default_factory=dict)
    worker: Runner = field(init=False)

    def __post_init__(self) -> None:
        specs = [one.kv_cache_spec for one in self.scheduler.kv_cache_config.kv_cache_groups]
        attention = next((one for one in specs if not isinstance(one, MambaSpec)), specs[0])
        windows = [STATE if isinstance(one, MambaSpec) else getattr(one, "sliding_window", None) for one in specs]
        slots = KvSlots(attention.block_size, windows)
        kind = SecondRunner if self.scheduler.tests_use_second_runner else FirstRunner
        self.worker = kind(slots, {}, self.is_async, self.scheduler.tests_max_rows)

    def add(self, script: RequestScript, block_size: int, caches: bool) -> None:
        self.take_in(script, request_of(script, block_size, caches))

    def take_in(self, script: Any, request: Request) -> None:
        self.scripts[script.name] = script
        salt = f"{script.salt or ''} {script.adapter or ''}"
        self.worker.expected[script.name] = ExpectedTokens(
            script.prompt, salt, lambda position: self.token(script.name, position)
        )
        self.scheduler.add_request(request)

    def step(self) -> None:
        if not self.is_async:
            if self.scheduler.has_requests():
                output = self.scheduler.schedule()
                self.note(output)
                result = self.execute(output)
                self.scheduler.get_grammar_bitmask(output)
                self.before_update()
                self.update(output, result)
                if output.total_num_scheduled_tokens:
                    self.propose(result)
            return
        deferred = None
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.note(output)
            executed = output.total_num_scheduled_tokens > 0
            if executed and output.pending_structured_output_tokens:
                deferred = output
            else:
                result = self.execute(output)
                if executed:
                    self.propose(result)
                    self.scheduler.get_grammar_bitmask(output)
                self.queue.appendleft((output, result))
                if len(self.queue) < 2 and (executed or self.scheduler.has_requests()):
                    return
        if self.queue:
            self.before_update()
            self.update(*self.queue.pop())
            if not self.queue and deferred is None:  # the next message is of the true counts
                self.worker.ahead = {}
        if deferred is not None:  # it samples when the tokens before are known
            self.update_drafts(deferred)
            result = self.execute(deferred)
            self.propose(result)
            self.scheduler.get_grammar_bitmask(deferred)
            self.queue.appendleft((deferred, result))

    def propose(self, result: ModelRunnerOutput) -> None:
        """Called after a step, to propose tokens."""

    def update_drafts(self, output: Any) -> None:
        """Called for a step that waits for tokens, to tell the drafts that it verifies."""

    def before_update(self) -> None:
        """Called after a step was computed, to handle messages that arrived meanwhile."""

    def note(self, output: Any) -> None:
        computed = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        preempted = sorted((output.preempted_req_ids or set()) - output.finished_req_ids)
        free, drafts = free_blocks(self.scheduler), dict(output.scheduled_spec_decode_tokens)
        self.steps.append(Step(dict(output.num_scheduled_tokens), computed, preempted, free, drafts))

    def execute(self, output: Any) -> ModelRunnerOutput:
        """Execute a step as a worker; raises `WorkerFault` on a violation."""
        sampled = self.worker.execute(output)
        for name, start in self.worker.seen.items():
            assert start == self.steps[-1].computed[name], name
        return ModelRunnerOutput(list(sampled), {name: i for i, name in enumerate(sampled)}, list(sampled.values()))

    def token(self, name: str, position: int) -> int:
        if position + 1 == self.scripts[name].ends_at:
            return EOS
        return made_up_token(name, position)

    def update(self, output: Any, result: ModelRunnerOutput) -> None:
        for each in self.scheduler.update_from_output(output, result).values():
            for one in each.outputs:
                assert one.request_id not in self.reasons
                self.tokens.setdefault(one.request_id, []).extend(one.new_token_ids)
                if one.finish_reason is not None:
                    self.reasons[one.request_id] = str(one.finish_reason)

    def abort(self, name: str) -> None:
        if name not in self.reasons:
            self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
            self.reasons[name] = "abort"

    def run(self, scripts: list[RequestScript], block_size: int, caches: bool, max_steps: int = 20000) -> None:
        arrivals = deque(sorted(scripts, key=lambda one: one.arrives))
        aborts = sorted((one.aborts, one.name) for one in scripts if one.aborts is not None)
        turn = num_calls = 0
        while arrivals or self.scheduler.has_requests() or self.queue:
            while arrivals and arrivals[0].arrives <= turn:
                self.add(arrivals.popleft(), block_size, caches)
            while aborts and aborts[0][0] <= turn:
                _, name = aborts.pop(0)
                if name in self.scripts:
                    self.abort(name)
            before = len(self.steps)
            self.step()
            # An attempt at a step that only preempts is a call of its own in vLLM, and part of the next step here.
            has_run = any(one.scheduled for one in self.steps[before:])
            turn += has_run or not self.scheduler.has_requests() or len(self.steps) == before
            num_calls += 1
            assert num_calls < max_steps, "it never ends"


def free_blocks(scheduler: Any) -> int:
    if hasattr(scheduler, "mechanism"):
        return int(scheduler.mechanism.replica.memory.free_blocks)
    return int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def calls_of(core: Core) -> int:
    """Calls of functions that `schedule` and `update_from_output` make for one step."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    def counted(call: Callable[..., Any], *given: Any) -> Any:
        sys.setprofile(note)
        try:
            return call(*given)
        finally:
            sys.setprofile(None)

    output = counted(core.scheduler.schedule)
    core.note(output)
    counted(core.scheduler.update_from_output, output, core.execute(output))
    return count
