"""Random sessions of a vLLM: its own scheduler and this one get the same input, and their messages to the workers are executed.

`make vllm-fuzz` plays many. What is compared, and what is not, because `docs/evidence/vllm.md` names it as a difference, says `difference`.
"""

from __future__ import annotations

import copy
import os
import random
import time
import zlib
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from vllm.config.kv_events import KVEventsConfig
from vllm.config.lora import LoRAConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler as SyncScheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus

from tests.vllm.core import EOS, STATE, Core, free_blocks, kv_cache, lora_of, made_up_token, make_scheduler, vllm_config
from tests.vllm.worker_model import WorkerFault
from vajra_py.vllm import Scheduler

MAX_CALLS = 8000
STOPS = (600, 601, 602)
"""Tokens that are not generated otherwise, which end a request that names them."""


@dataclass(frozen=True)
class RequestScript:
    """A request and its events."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    arrives: int
    """Turn of its arrival."""
    arrival_time: float
    """Seconds after the start, as set by its frontend; not in the order of arrival."""
    priority: int = 0
    salt: str | None = None
    ends_at: int | None = None
    """Number of tokens after which it generates the end-of-sequence token."""
    stops_at: tuple[int, int] | None = None
    """Number of tokens after which it generates one of `STOPS`, and which one."""
    min_tokens: int = 0
    ignores_eos: bool = False
    prompt_logprobs: bool = False
    skips_cache: bool = False
    aborts: tuple[int, bool] | None = None
    """Turn of its abort, and True if that is during a step."""
    string_after: int | None = None
    """Number of tokens after which its frontend finds a stop string."""
    grammar: tuple[int, str, int | None] | None = None
    """Turn in which it is compiled, "ok" or "error", and the token that it forbids."""
    client: int = 0
    adapter: str | None = None
    transfer: dict[str, Any] | None = None
    """`kv_transfer_params`."""


@dataclass(frozen=True)
class Event:
    """Operation on the whole scheduler: "reset", "reset all", "pause new", "pause all", "resume", "abort all"."""

    turn: int
    kind: str
    in_flight: bool = False


@dataclass(frozen=True)
class Session:
    """Complete input of a run."""

    seed: int
    block_size: int
    num_blocks: int
    options: dict[str, Any]
    scripts: list[RequestScript]
    events: list[Event]
    is_async: bool
    second_runner: bool
    has_kv_events: bool = False
    windows: tuple[int | None, ...] = (None,)
    """Windows of the groups of KV blocks; None: full attention, `STATE`: layers that keep a state."""
    retention_interval: int | None = None
    begins: float = 10.0
    """When the first frontend sent the first request, seconds from now; clocks of frontends may be far off."""
    max_loras: int = 0
    """LoRA adapters of a step; 0: there are none."""
    num_drafts: int = 0
    """Tokens that are proposed after a step for each request, at most."""
    drafter: str = "ngram"
    """Method of drafting; EAGLE's is the same to a scheduler but for blocks."""
    drafted_group: int | None = None
    """The group of KV blocks whose layers are EAGLE's; None: not said."""
    is_exact: bool = False
    """True if asynchronous steps are compared one by one as well: nothing happens that is known to differ."""
    without_ends: frozenset[str] = frozenset()
    """Requests whose ends depend on when they run."""


def session_of(seed: int, *, is_async: bool) -> Session:
    """Return a random session."""
    rng = random.Random(f"vllm {seed}")
    block_size = rng.choice((1, 2, 3, 4, 8, 16, 32))
    num_blocks = max(4, rng.choice((40, 64, 96, 128, 192, 256, 512, 2048)) // block_size)
    max_len = min(rng.choice((32, 48, 96, 160, 256)), num_blocks * block_size)
    options = _options(rng, max_len)
    scripts = _scripts(rng, options, block_size, min(max_len, num_blocks * block_size))
    events = _events(rng, options, max(one.arrives for one in scripts))
    second_runner, begins = rng.random() < 0.5, rng.choice((10.0, 10.0, -1e4))
    return Session(
        seed,
        block_size,
        num_blocks,
        options,
        scripts,
        events,
        is_async,
        second_runner,
        seed % 2 == 0,
        begins=begins,
    )


def windowed_session_of(seed: int, *, is_async: bool, has_drafts: bool = False) -> Session:
    """Return a random session of a model with sliding windows, or with several groups of KV blocks; `has_drafts`: with drafts besides."""
    session = (draft_session_of if has_drafts else session_of)(seed, is_async=is_async)
    rng, size = random.Random(f"windows {seed}"), session.block_size

    def window() -> int:
        return rng.choice((rng.randint(1, 3 * size), rng.randint(1, 40), size, 2 * size + 1))

    groups = rng.choice(("w", "w", "fw", "fw", "fww", "ffw", "wv", "fwv", "ff"))
    first, second = window(), window()
    windows = tuple({"f": None, "w": first, "v": second}[one] for one in groups)
    in_flight = session.options["max_num_batched_tokens"] * (2 if is_async else 1)
    longest = session.options["max_model_len"]
    in_flight += session.num_drafts and session.num_drafts + 1  # and what EAGLE looks ahead
    tokens = [longest if one is None else min(longest, one - 1 + in_flight) for one in windows]
    needed = sum(-(-one // size) + 1 for one in tokens)
    num_blocks = max(needed, int(session.num_blocks * rng.choice((0.3, 0.6, 1, len(windows)))))
    interval = session.options["caches"] and any(windows) and rng.random() < 0.2
    return replace(
        session,
        windows=windows,
        num_blocks=num_blocks,
        has_kv_events=False,
        retention_interval=rng.choice((0, size, 3 * size)) if interval else None,
        drafted_group=rng.randrange(len(windows)) if has_drafts and rng.random() < 0.5 else None,
    )


def states_session_of(seed: int, *, is_async: bool) -> Session:
    """Return a random session of a hybrid model: layers that keep a state beside others, or alone."""
    session = session_of(seed, is_async=is_async)
    rng, size = random.Random(f"states {seed}"), session.block_size
    window = rng.randint(1, 3 * size)
    groups = rng.choice(("fs", "fs", "fss", "fsss", "sf", "ffs", "fws", "ws", "s"))
    windows = tuple({"f": None, "w": window, "s": STATE}[one] for one in groups)
    longest = session.options["max_model_len"]
    needed = sum(1 if one == STATE else -(-longest // size) + 1 for one in windows)
    share = rng.choice((0.3, 0.6, 1)) if groups != "s" else rng.choice((0.05, 0.2))
    return replace(
        session,
        options=session.options | {"caches": False},
        windows=windows,
        num_blocks=max(needed, int(session.num_blocks * share)),
        has_kv_events=False,
    )


def _options(rng: random.Random, max_len: int) -> dict[str, Any]:
    tokens = rng.choice((2, 4, 8, 16, 33, 64, 128, 512))
    threshold = rng.choice((0, 0, 0, 1, 5, 8, 24))
    is_chunked = rng.random() < 0.85
    tokens = tokens if is_chunked else max(tokens, max_len)
    max_seqs = min(tokens, rng.choice((1, 2, 3, 4, 8, 16, 64)))
    return {
        "max_model_len": max_len,
        "max_num_seqs": max_seqs,
        "max_num_batched_tokens": tokens,
        "policy": rng.choice(("fcfs", "fcfs", "priority")),
        "caches": rng.random() < 0.7,
        "long_prefill_token_threshold": threshold,
        "long_prefill_token_threshold_adaptive": threshold > 0 and rng.random() < 0.4,
        "watermark": rng.choice((0.0, 0.0, 0.05, 0.2, 0.5)),
        "scheduler_reserve_full_isl": rng.random() < 0.75,
        "prefill_schedule_interval": rng.choice((1, 1, 1, 2, 3, 7)),
        "max_num_active_seqs": rng.choice((None, None, None, 1, max(1, max_seqs // 2))),
        "enable_chunked_prefill": is_chunked,
        "max_num_scheduled_tokens": max(1, tokens // 2) if is_chunked and rng.random() < 0.2 else None,
    }


def adapter_session_of(seed: int, *, is_async: bool) -> Session:
    """Return a random session with LoRA adapters for most of its requests."""
    session = session_of(seed, is_async=is_async)
    rng = random.Random(f"adapters {session.seed}")
    max_loras, number = rng.choice((1, 1, 2, 3)), rng.randint(1, 6)
    scripts = [
        replace(one, adapter=f"lora-{rng.randint(1, number)}" if rng.random() < 0.75 else None)
        for one in session.scripts
    ]
    # Requests that wait for an adapter count in another way for the interval: docs/evidence/vllm.md.
    options = session.options | {"prefill_schedule_interval": 1}
    return replace(session, scripts=scripts, options=options, max_loras=max_loras)


def draft_session_of(seed: int, *, is_async: bool) -> Session:
    """Return a random session with drafts."""
    session = session_of(seed, is_async=is_async)
    rng = random.Random(f"drafts {session.seed}")
    num_drafts = rng.choice((1, 1, 2, 3, 4, 5, 8))
    options = dict(session.options)
    if 0 < options["long_prefill_token_threshold"] <= num_drafts:
        options["long_prefill_token_threshold"] = 0
        options["long_prefill_token_threshold_adaptive"] = False
    least = num_drafts + 1  # with less vLLM never admits a request that has one token left: docs/evidence/vllm.md
    options["max_num_batched_tokens"] = max(least, options["max_num_batched_tokens"])
    if options["max_num_scheduled_tokens"] is not None:
        options["max_num_scheduled_tokens"] = max(least, options["max_num_scheduled_tokens"])
    # Places of drafts of an admitted request do not count for the watermark: docs/evidence/vllm.md.
    options["watermark"] = 0.0
    drafter = "eagle" if is_async else rng.choice(("ngram", "eagle"))
    if is_async and rng.random() < 0.5:
        session = _without_lengths_reached(rng, session, 2 * num_drafts + 4)
    return replace(
        session,
        options=options,
        num_drafts=num_drafts,
        drafter=drafter,
        second_runner=is_async and session.second_runner,
    )


def _without_lengths_reached(rng: random.Random, session: Session, margin: int) -> Session:
    """Return the session with requests that end by a token, at least so many before their length, and without what else is known to differ."""
    longest = session.options["max_model_len"] - margin
    scripts = []
    for one in session.scripts:
        prompt = one.prompt[: longest - 1]
        ends_at = min(longest - len(prompt), one.ends_at or one.max_tokens)
        changes: dict[str, Any] = {"prompt": prompt, "ends_at": ends_at, "max_tokens": ends_at + margin}
        # Otherwise its blocks would be freed before those of requests that have ended by then.
        if one.aborts is not None:
            changes["aborts"] = (one.aborts[0], True)
        if one.grammar is not None:
            changes["grammar"] = (one.grammar[0], "ok", one.grammar[2])
        scripts.append(replace(one, min_tokens=0, ignores_eos=False, string_after=None, **changes))
    events = [one for one in session.events if one.kind.startswith("pause") or one.kind == "resume"]
    return replace(session, scripts=scripts, events=events, is_exact=True)


def proposed(name: str, script: RequestScript, place: int, num_drafts: int) -> list[int]:
    """Return the tokens that a drafter proposes behind so many output tokens: some are right, up to the first that is not."""
    draw = zlib.crc32(f"{name} {place} drafts".encode())
    right, count = (draw >> 4) % (num_drafts + 1), (draw >> 12) % (num_drafts + 2)
    found = [token_of(script, place + ahead) for ahead in range(min(count, num_drafts))]
    return [token if ahead < right else 5 for ahead, token in enumerate(found)]


def propose(core: Core, result: Any, count: int) -> None:
    """Propose tokens after a step, at most so many for each request; asynchronously they stay on the device, as many for each."""
    found = {}
    for name, place in core.worker.places.items():
        script: Any = core.scripts[name]
        ends = {"ends_at": script.ends_at, "stops_at": getattr(script, "stops_at", None)}
        found[name] = proposed(name, RequestScript(name, (), 0, 0, 0.0, **ends), place, count)
    if core.is_async:
        core.worker.propose({name: (tokens + [5] * count)[:count] for name, tokens in found.items()})
    else:
        told = [found.get(name, []) for name in result.req_ids]
        core.scheduler.update_draft_token_ids(DraftTokenIds(list(result.req_ids), told))


def _scripts(rng: random.Random, options: dict[str, Any], block_size: int, capacity: int) -> list[RequestScript]:
    trunks = [[rng.randrange(8, 400) for _ in range(capacity)] for _ in range(rng.randint(1, 3))]
    is_long = rng.random() < 0.4
    # Requests that wait for a grammar count in other ways for the threshold and for the interval: docs/evidence/vllm.md.
    is_named = options["long_prefill_token_threshold"] > 0 or options["prefill_schedule_interval"] > 1
    has_grammars = rng.random() < 0.3 and not is_named
    scripts: list[RequestScript] = []
    arrives, clock = 0, 0.0
    crowd = rng.random() < 0.06
    for index in range(rng.randint(40, 120) if crowd else rng.randint(2, 24)):
        arrives += rng.choice((0, 0, 0, 0, 1, 2, 7))
        clock += rng.choice((0.0, 0.001, 0.1))
        length = rng.randint(1, max(1, (capacity - 1) // (1 if rng.random() < 0.2 else 3)))
        common = rng.randint(0, length) if rng.random() < 0.7 else 0
        prompt = rng.choice(trunks)[:common] + [rng.randrange(8, 400) for _ in range(length - common)]
        if scripts and rng.random() < 0.2:
            prompt = _following(rng, rng.choice(scripts), capacity)
        if rng.random() < 0.15:  # whole blocks
            prompt = prompt[: max(1, len(prompt) // block_size) * block_size]
        room = capacity - len(prompt)
        output = min(room, rng.choice((20, 40, 80) if is_long else (1, 1, 2, 5, 20, 40)))
        output += 30 if rng.random() < 0.1 else 0  # more than the model's maximum length
        name, copies = f"r{index}", rng.choice((2, 3)) if rng.random() < 0.1 else 1
        base = RequestScript(
            name,
            tuple(prompt),
            output,
            arrives,
            clock + (rng.choice((-0.5, -2.0, 0.3)) if rng.random() < 0.15 else 0.0),
            priority=rng.randrange(-2, 3) if rng.random() < 0.5 else 0,
            salt=rng.choice(("a", "b")) if rng.random() < 0.15 else None,
            ignores_eos=rng.random() < 0.15,
            prompt_logprobs=rng.random() < 0.06,
            skips_cache=rng.random() < 0.06,
            client=rng.randrange(2),
        )
        names = [f"{copy}_{name}" for copy in range(copies)] if copies > 1 else [name]
        scripts += [_fate(rng, replace(base, name=one), room, has_grammars) for one in names]
    return scripts


def _following(rng: random.Random, before: RequestScript, capacity: int) -> list[int]:
    """The prompt of an earlier request; half the time it goes on as a conversation does, after a part of the output."""
    prompt = list(before.prompt)
    if rng.random() < 0.5:
        prompt += [token_of(before, position) for position in range(rng.randint(0, before.max_tokens))]
        prompt += [rng.randrange(8, 400) for _ in range(rng.randint(0, 6))]
    return prompt[: capacity - 1]


def _fate(rng: random.Random, script: RequestScript, room: int, has_grammars: bool) -> RequestScript:
    longest = max(1, min(script.max_tokens, room))
    least = rng.randint(0, longest) if rng.random() < 0.15 else 0
    changes: dict[str, Any] = {"min_tokens": least}
    if rng.random() < 0.3 and least < longest:
        changes["ends_at"] = rng.randint(least + 1, longest)
    if rng.random() < 0.2 and least < longest:
        changes["stops_at"] = (rng.randint(least + 1, longest), rng.choice(STOPS))
    if rng.random() < 0.15:
        changes["aborts"] = (script.arrives + rng.randint(0, 25), rng.random() < 0.5)
    if rng.random() < 0.08:
        changes["string_after"] = rng.randint(1, longest)
    if has_grammars and rng.random() < 0.3:
        refuses = rng.randint(1, longest) if rng.random() < 0.25 else None
        late = rng.choice((0, 0, 1, 3, 9))
        changes["grammar"] = (script.arrives + late, rng.choice(("ok", "ok", "ok", "error")), refuses)
    return replace(script, **changes)


def _events(rng: random.Random, options: dict[str, Any], last: int) -> list[Event]:
    events: list[Event] = []
    if options["caches"] and rng.random() < 0.35:
        for _ in range(rng.randint(1, 3)):
            kind = rng.choice(("reset", "reset all"))
            events.append(Event(rng.randint(1, last + 20), kind, rng.random() < 0.5))
    for _ in range(rng.choice((1, 1, 1, 4)) if rng.random() < 0.25 else 0):
        begins = rng.randint(1, last + 15)
        events.append(Event(begins, rng.choice(("pause new", "pause all")), rng.random() < 0.3))
        events.append(Event(begins + rng.randint(1, 15), "resume"))
        if rng.random() < 0.3 and options["caches"]:
            events.append(Event(begins + rng.randint(0, 5), "reset all"))
    if rng.random() < 0.06:
        events.append(Event(rng.randint(1, last + 15), "abort all"))
    events.sort(key=lambda one: one.turn)
    if any(one.kind.startswith("pause") for one in events):  # of several the last may begin when the others are over
        events.append(Event(last + 40, "resume"))
    return events


def token_of(script: RequestScript, position: int) -> int:
    """An output token, from position 0."""
    if script.stops_at is not None and position + 1 == script.stops_at[0]:
        return script.stops_at[1]
    return EOS if position + 1 == script.ends_at else made_up_token(script.name, position)


class Grammars:
    """Stand-in for vLLM's manager of structured output."""

    def __init__(self, scripts: list[RequestScript]) -> None:
        self._refuses = {one.name: one.grammar[2] for one in scripts if one.grammar is not None}

    def grammar_bitmask(self, requests: dict[str, Any], names: list[str], spec: Any) -> None:
        assert all(name in requests for name in names)

    def validate_tokens(self, request: Any, tokens: list[int]) -> list[int]:
        return tokens[: zlib.crc32(request.request_id.encode()) % 4] if request.use_structured_output else tokens

    def accept_tokens(self, request: Any, tokens: list[int]) -> bool:
        refused = self._refuses.get(request.request_id)
        return refused is None or len(request.output_token_ids) < refused

    def should_advance(self, request: Any) -> bool:
        return True


_HASH = get_hash_fn_by_name("sha256")
_MADE: dict[str, Any] = {}


def _config(model: str, session: Session) -> Any:
    """Return the configuration shared by all sessions, since creating one takes longer than a session."""
    if model not in _MADE:
        init_none_hash(_HASH)
        _MADE[model] = vllm_config(model, max_model_len=512, enforce_eager=True)
    config = _MADE[model]
    given = dict(session.options)
    config.cache_config.enable_prefix_caching = given.pop("caches")
    config.model_config.max_model_len = given.pop("max_model_len")
    config.scheduler_config.async_scheduling = session.is_async
    config.lora_config = LoRAConfig(max_loras=session.max_loras) if session.max_loras else None
    config.speculative_config = _speculative(model, session)
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=session.has_kv_events, publisher="null")
    for name, value in given.items():
        assert hasattr(config.scheduler_config, name), name
        setattr(config.scheduler_config, name, value)
    return config


def _speculative(model: str, session: Session) -> Any:
    if not session.num_drafts:
        return None
    key = f"{model} drafts"
    if key not in _MADE:
        given = {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 3}
        made = vllm_config(model, max_model_len=512, enforce_eager=True, speculative_config=given)
        _MADE[key] = made.speculative_config
    found = copy.copy(_MADE[key])
    found.method, found.num_speculative_tokens = session.drafter, session.num_drafts
    found.disable_lookahead_block_hashes = True
    return found


def request_of(script: RequestScript, session: Session) -> Request:
    params = SamplingParams(
        max_tokens=script.max_tokens,
        min_tokens=script.min_tokens,
        temperature=0.0,
        ignore_eos=script.ignores_eos,
        stop_token_ids=None if script.stops_at is None else [script.stops_at[1]],
        prompt_logprobs=1 if script.prompt_logprobs else None,
        skip_reading_prefix_cache=True if script.skips_cache else None,
        structured_outputs=None if script.grammar is None else StructuredOutputsParams(json_object=True),
        detokenize=False,
        extra_args=None if script.transfer is None else {"kv_transfer_params": dict(script.transfer)},
    )
    params.update_from_generation_config({}, EOS)
    caches = session.options["caches"]
    return Request(
        request_id=script.name,
        prompt_token_ids=list(script.prompt),
        sampling_params=params,
        pooling_params=None,
        client_index=script.client,
        arrival_time=_MADE["zero"] + session.begins + script.arrival_time,
        priority=script.priority,
        cache_salt=script.salt,
        lora_request=lora_of(script.adapter),
        block_hasher=get_request_block_hasher(session.block_size, _HASH) if caches else None,
    )


@dataclass
class Play(Core):
    """A session, driven to its end."""

    session: Session = field(kw_only=True)
    turn: int = 0
    requests: dict[str, Request] = field(default_factory=dict)
    stopped: set[str] = field(default_factory=set)
    """Requests in which their frontend has found a stop string."""
    finished: list[str] = field(default_factory=list)
    """Clients' requests that were reported as finished."""
    answers: list[bool] = field(default_factory=list)
    """Results of resets."""
    stats: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Prompt tokens, and those of them that were cached, of each request."""
    events: deque[Event] = field(default_factory=deque)
    kv_events: list[Any] = field(default_factory=list)
    """KV cache events, in the order in which they are published."""
    drafts: list[Any] = field(default_factory=list)
    """Counts of drafts in each step's statistics."""
    is_endless: bool = False
    """True if requests preempted each other without end, as they may with vLLM's priorities."""
    unwritten_after: int | None = None
    """Number of steps after which vLLM's prefix cache first had a victim's block that was never written; None: never."""

    def execute(self, output: Any) -> Any:
        for one in output.scheduled_new_reqs:
            assert one.lora_request == lora_of(self.scripts[one.req_id].adapter)
        adapters = {self.scripts[name].adapter for name in output.num_scheduled_tokens} - {None}
        assert len(adapters) <= self.session.max_loras
        result = super().execute(output)
        if self.unwritten_after is None and any(map(self._leaves_unwritten, output.preempted_req_ids or ())):
            self.unwritten_after = len(self.steps)
        return result

    def _leaves_unwritten(self, victim: str) -> bool:
        """Return whether vLLM's prefix cache has a block of a victim under its hash that does not hold the victim's KV."""
        manager, request, size = (
            getattr(self.scheduler, "kv_cache_manager", None),
            self.requests[victim],
            self.session.block_size,
        )
        if manager is None or not self.session.options["caches"]:
            return False
        places = {block_hash: place * size for place, block_hash in enumerate(request.block_hashes)}
        slots, expected = self.worker.slots, self.worker.expected[victim]
        hashed = [one for one in manager.block_pool.blocks if one.block_hash is not None]
        return any(
            not slots.holds(
                one.block_id, get_group_id(one.block_hash), expected, places[get_block_hash(one.block_hash)]
            )
            for one in hashed
            if get_block_hash(one.block_hash) in places
        )

    def token(self, name: str, position: int) -> int:
        return token_of(self.scripts[name], position)

    def update(self, output: Any, result: Any) -> None:
        for client, each in self.scheduler.update_from_output(output, result).items():
            self.finished += sorted(each.finished_requests or ())
            if each.scheduler_stats is not None and each.scheduler_stats.spec_decoding_stats is not None:
                self.drafts.append(each.scheduler_stats.spec_decoding_stats)
            for one in each.outputs:
                self._hear(client, one)

    def propose(self, result: Any) -> None:
        if self.session.num_drafts:
            propose(self, result, self.session.num_drafts)

    def update_drafts(self, output: Any) -> None:
        drafts = {name: list(tokens) for name, tokens in self.worker.proposed.items()}
        if self.session.num_drafts:
            self.scheduler.update_draft_token_ids_in_output(DraftTokenIds(list(drafts), list(drafts.values())), output)

    def _hear(self, client: int, one: Any) -> None:
        name = one.request_id
        assert name not in self.reasons, f"{name}: an output after its end"
        script = self.scripts[name]
        assert script.client == client
        told = self.tokens.setdefault(name, [])
        told += one.new_token_ids
        if one.prefill_stats is not None:
            self.stats[name] = (one.prefill_stats.num_prompt_tokens, one.prefill_stats.num_cached_tokens)
        if one.finish_reason is not None:
            self.reasons[name] = f"{one.finish_reason} {one.stop_reason if str(one.finish_reason) == 'stop' else ''}"
        elif script.string_after is not None and len(told) >= script.string_after:
            self.stopped.add(name)

    def before_update(self) -> None:
        newest = self.steps[-1]
        if not self.is_async and newest.preempted and not newest.scheduled:
            return  # vLLM's attempt that only preempts is no step here: messages wait for the step that follows
        self._happen(in_flight=True)

    def _finish(self, name: str, status: RequestStatus, reason: str) -> None:
        if name in self.scripts and name not in self.reasons:
            (found,) = self.scheduler.finish_requests([name], status)
            assert found.request_id == name
            self.reasons[name] = reason

    def _happen(self, *, in_flight: bool) -> None:
        for one in self.session.scripts:
            if one.aborts is None or one.aborts[0] > self.turn:
                continue
            if one.aborts[1] is in_flight or not (in_flight or self.scheduler.has_requests()):
                self._finish(one.name, RequestStatus.FINISHED_ABORTED, "abort")
        while self.events and self.events[0].turn <= self.turn:
            # Without asynchronous scheduling the engine core handles nothing but aborts while a step is computed.
            if in_flight and not self.is_async:
                return
            if self.events[0].in_flight and self.is_async and not in_flight and self.scheduler.has_requests():
                return
            self._do(self.events.popleft().kind)

    def _do(self, kind: str) -> None:
        if kind.startswith("reset"):
            self.answers.append(self.scheduler.reset_prefix_cache(reset_running_requests=kind == "reset all"))
        elif kind == "abort all":
            for one in self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED):
                self.reasons.setdefault(one.request_id, "abort")
        else:
            states = {"pause new": PauseState.PAUSED_NEW, "pause all": PauseState.PAUSED_ALL}
            self.scheduler.set_pause_state(states.get(kind, PauseState.UNPAUSED))

    def play(self) -> None:
        arrivals = deque(sorted(self.session.scripts, key=lambda one: one.arrives))
        self.events = deque(self.session.events)
        for _ in range(MAX_CALLS):
            if not (arrivals or self.events or self.scheduler.has_requests() or self.queue or self._waits()):
                return
            while arrivals and arrivals[0].arrives <= self.turn:
                script = arrivals.popleft()
                self.requests[script.name] = request_of(script, self.session)
                self.take_in(script, self.requests[script.name])
            self._compile()
            self._happen(in_flight=False)
            for name in sorted(self.stopped):
                self._finish(name, RequestStatus.FINISHED_STOPPED, "string")
            self.stopped.clear()
            before = len(self.steps)
            self.step()
            # An attempt at a step that only preempts is a call of its own in vLLM, and part of the next step here.
            only_preempts = any(one.preempted and not one.scheduled for one in self.steps[before:])
            self.turn += not only_preempts
        assert self.scheduler.has_requests(), f"nothing is done for {sorted(self.scripts.keys() - self.reasons.keys())}"
        self.is_endless = True

    def _waits(self) -> bool:
        return bool(self.scripts.keys() - self.reasons.keys())

    def _compile(self) -> None:
        for name, script in self.scripts.items():
            if script.grammar is not None and script.grammar[0] <= self.turn:
                structured = self.requests[name].structured_output_request
                assert structured is not None
                if structured.grammar is None:
                    is_bad = script.grammar[1] == "error"
                    structured.grammar = ValueError("no grammar") if is_bad else object()  # type: ignore[assignment]


@dataclass
class _Publisher:
    """Keeps what is published."""

    events: list[Any]

    def publish(self, batch: Any) -> None:
        self.events += batch.events

    def shutdown(self) -> None:
        """Nothing is open."""


def followed(events: list[Any]) -> Counter[Any]:
    """Return the content that a router knows which follows these events, with the number of blocks that hold it."""
    held: Counter[Any] = Counter()
    for event in events:
        if isinstance(event, AllBlocksCleared):
            held.clear()
        for one in getattr(event, "block_hashes", ()):
            held[one] += 1 if isinstance(event, BlockStored) else -1
            assert held[one] >= 0, f"{one} is removed, and was not stored"
    return +held


def _events_difference(own: Play, ours: Play) -> str | None:
    for kind in (BlockStored, BlockRemoved, AllBlocksCleared):
        theirs, mine = (sorted(repr(one) for one in each.kv_events if isinstance(one, kind)) for each in (own, ours))
        if theirs != mine:
            extra = [one for one in theirs if one not in mine][:1], [one for one in mine if one not in theirs][:1]
            return f"{kind.__name__}: vLLM {len(theirs)}, here {len(mine)}: {extra}"
    return None


def _cache(session: Session) -> Any:
    longest = session.options["max_model_len"]
    cache = kv_cache(session.num_blocks + 1, session.block_size, session.windows, longest)
    cache.prefix_cache_retention_interval = session.retention_interval
    if session.drafter == "eagle" and session.drafted_group is not None:
        cache.kv_cache_groups[session.drafted_group].is_eagle_group = True
    return cache


def play(cls: type[Any], model: str, session: Session, kind: type[Play] = Play) -> Play:
    config = _config(model, session)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if session.second_runner else "0"
    try:
        scheduler = make_scheduler(
            cls,
            config,
            session.num_blocks + 1,
            session.block_size,
            cache=_cache(session),
            grammars=Grammars(session.scripts),
            include_finished_set=True,
            log_stats=True,
        )
    finally:
        del os.environ["VLLM_USE_V2_MODEL_RUNNER"]
    made = kind(scheduler, session.is_async, session=session)
    if session.has_kv_events and session.options["caches"]:
        holder = scheduler._events if cls is Scheduler else scheduler
        name = "publisher" if cls is Scheduler else "kv_event_publisher"
        setattr(holder, name, _Publisher(made.kv_events))
    try:
        made.play()
    finally:
        if cls is Scheduler:
            scheduler.shutdown()
    return made


def _that_run(play: Play) -> list[tuple[Any, ...]]:
    """Return the non-empty steps; preemptions in earlier empty attempts are added to the next step."""
    found, preempted = [], set()
    for one in play.steps:
        preempted |= set(one.preempted)
        if one.scheduled:
            found.append((one.scheduled, one.computed, sorted(preempted), one.free, one.drafts))
            preempted = set()
    return found


def difference(session: Session, own: Play, ours: Play) -> str | None:
    """Return the first difference to vLLM's scheduler; None if all differences are listed in `docs/evidence/vllm.md`."""
    if session.is_exact:
        attempt = next((at for at, one in enumerate(own.steps) if one.preempted and not one.scheduled), None)
        if attempt is not None:  # here the next attempt follows immediately, before the tokens of the step in flight
            count = sum(bool(one.scheduled) for one in own.steps[:attempt])
            found = _steps_difference(_that_run(own)[:count], _that_run(ours)[:count])
            return found or ends_difference(session, own, ours)
    if session.is_exact or not session.is_async:
        if (found := _steps_difference(_that_run(own), _that_run(ours), is_endless=own.is_endless)) is not None:
            return found
        if own.drafts != ours.drafts:
            return f"statistics of drafts {own.drafts}, here {ours.drafts}"
        if own.answers != ours.answers:
            return f"resets answered {own.answers}, here {ours.answers}"
        # Blocks that a victim did not compute after all are removed from the cache here, and stay in vLLM's.
        if not any(one.preempted for one in own.steps) and (found := _events_difference(own, ours)) is not None:
            return found
        if own.stats != ours.stats:
            return f"prefill statistics {own.stats.items() ^ ours.stats.items()}"
    return ends_difference(session, own, ours)


def difference_to_written(session: Session, own: Play, ours: Play) -> str | None:
    """Return `difference`, of what comes before vLLM's cache has a block that was not written: see `docs/evidence/vllm.md`."""
    found = difference(session, own, ours)
    if found is None or own.unwritten_after is None or (session.is_async and not session.is_exact):
        return found
    count = sum(bool(one.scheduled) for one in own.steps[: own.unwritten_after])
    found = _steps_difference(_that_run(own)[:count], _that_run(ours)[:count])
    return found or ends_difference(session, own, ours)


def _steps_difference(theirs: list[Any], mine: list[Any], *, is_endless: bool = False) -> str | None:
    for number, (one, other) in enumerate(zip(theirs, mine, strict=False)):
        parts = ("scheduled", "computed", "preempted", "free", "drafts")
        for what, left, right in zip(parts, one, other, strict=True):
            if left != right:
                return f"step {number} {what}: vLLM {left}, here {right}"
    if len(theirs) != len(mine) and not is_endless:
        return f"{len(theirs)} steps, here {len(mine)}"
    return None


def ends_difference(session: Session, own: Play, ours: Play) -> str | None:
    """Return the first difference in what clients get, whatever the steps were."""
    by_time = {one.name for one in session.scripts if session.is_async and (one.aborts or one.string_after)}
    if session.is_async and any(one.kind == "abort all" for one in session.events):
        by_time = {one.name for one in session.scripts}
    by_time |= {one.name for one in session.scripts if one.grammar is not None and one.grammar[1] == "error"}
    by_time |= set(session.without_ends)
    for name in sorted(own.reasons.keys() | ours.reasons.keys()):
        if name in by_time:
            continue
        for what, left, right in (("end", own.reasons, ours.reasons), ("tokens", own.tokens, ours.tokens)):
            if left.get(name) != right.get(name):
                return f"{what} of {name}: vLLM {left.get(name)}, here {right.get(name)}"
    if sorted(own.finished) != sorted(ours.finished):
        return f"finished requests {set(own.finished) ^ set(ours.finished)}"
    return None


def end_check(session: Session, ours: Play) -> str | None:
    """Return a description of resources that were not released, or None."""
    mechanism = ours.scheduler.mechanism
    mechanism.replica.memory.check()
    mechanism.controller.check_conservation()
    if free_blocks(ours.scheduler) != session.num_blocks:
        return f"{free_blocks(ours.scheduler)} of {session.num_blocks} blocks are free at the end"
    if session.has_kv_events and session.options["caches"] and not ours.scheduler._events.feed.events:
        contents = map(maybe_convert_block_hash, mechanism.replica.memory._pool.contents())
        if followed(ours.kv_events).keys() != set(contents):
            return "who follows the KV events knows other content than there is"
    counts, usage = ours.scheduler.get_request_counts(), ours.scheduler.get_kv_cache_usage()
    if counts != (0, 0) or usage != 0.0 or ours.scheduler.has_requests():
        return f"at the end {counts} requests are counted and {usage} of the memory is used"
    return None


def has_equals(session: Session) -> bool:
    """Return whether requests share priority and arrival: such may preempt each other in turns for ever."""
    ranks = {(one.priority, one.arrival_time) for one in session.scripts}
    return session.options["policy"] == "priority" and len(ranks) < len(session.scripts)


SESSIONS = {
    "plain": session_of,
    "windows": windowed_session_of,
    "states": states_session_of,
    "adapters": adapter_session_of,
    "drafts": draft_session_of,
    "windows-drafts": partial(windowed_session_of, has_drafts=True),
}
"""Kinds of random sessions."""


def compare(model: str, seed: int, *, is_async: bool, kind: str = "plain") -> tuple[str | None, Counter[str]]:
    """Return the difference in one random session, and counts of its contents."""
    return compare_in(model, SESSIONS[kind](seed, is_async=is_async))


def compare_in(model: str, session: Session) -> tuple[str | None, Counter[str]]:
    """Return the difference in this session, and counts of its contents."""
    _MADE["zero"] = time.time()
    counts: Counter[str] = Counter(sessions=1, requests=len(session.scripts), second_runner=session.second_runner)
    plays = []
    for who, cls in (("vLLM", AsyncScheduler if session.is_async else SyncScheduler), ("here", Scheduler)):
        try:
            plays.append(play(cls, model, session))
        except Exception as error:
            if who == "vLLM" and isinstance(error, WorkerFault) and "reads KV" in str(error):
                counts["vllm_reads_stale"] += 1  # blocks that it cached for a victim which then did not compute them
                return end_check(session, play(Scheduler, model, session)), counts
            where = error.__traceback__
            while where is not None and where.tb_next is not None:
                where = where.tb_next
            line = "" if where is None else f" ({Path(where.tb_frame.f_code.co_filename).name}:{where.tb_lineno})"
            counts["vllm_failed"] += who == "vLLM"
            return f"{who}: {type(error).__name__}: {error}{line}", counts
    own, ours = plays
    counts["endless"] += own.is_endless
    counts["vllm_leaves_unwritten"] += own.unwritten_after is not None
    counts["steps"] += len(ours.steps)
    counts["preemptions"] += sum(len(one.preempted) for one in ours.steps)
    counts["cached"] += sum(cached > 0 for _, cached in ours.stats.values())
    counts["resets"] += len(ours.answers)
    counts["kv_events"] += len(ours.kv_events)
    counts["grammars"] += sum(one.grammar is not None for one in session.scripts)
    counts["aborts"] += sum(reason == "abort" for reason in ours.reasons.values())
    counts["with_adapters"] += sum(one.adapter is not None for one in session.scripts)
    counts["drafted"] += sum(one.num_draft_tokens for one in ours.drafts)
    counts["accepted"] += sum(one.num_accepted_tokens for one in ours.drafts)
    counts["exact"] += session.is_exact
    counts["pauses"] += sum(one.kind.startswith("pause") for one in session.events)
    if own.is_endless or ours.is_endless:
        # Asynchronous steps differ in when blocks are free, so that chance decides whether equals meet.
        if own.is_endless is not ours.is_endless and not (session.is_async and has_equals(session)):
            return f"vLLM {'never ends' if own.is_endless else 'ends'}, here it is otherwise", counts
        if session.is_async:
            return None, counts
        return difference_to_written(session, own, ours), counts
    return difference_to_written(session, own, ours) or end_check(session, ours), counts
