"""Models of both of vLLM's model runners, limited to the scheduler's messages.

`FirstRunner` does what `vllm/v1/worker/gpu_model_runner.py` does in `_update_states`, `_prepare_input_ids` and `_bookkeeping_sync`,
`SecondRunner` what `vllm/v1/worker/gpu/model_runner.py` does in `finish_requests`, `add_requests`, `update_requests`, `prepare_inputs`
and `post_update`, the same in vLLM 0.32 and 0.33. Which tokens they would read follows from the messages alone; they are compared with
the requests' tokens. A KV slot holds a digest of all tokens up to it, so that a read of other content is detected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

UNKNOWN = -1
"""Placeholder in a row for a token that was sampled on the device and is not available on the host."""


class WorkerFault(AssertionError):
    """A message that would make a worker crash or compute a wrong result."""


@dataclass
class ExpectedTokens:
    """Tokens of each request, independent of the scheduler.

    Attributes:
        prompt: its prompt.
        salt: prevents sharing of its KV.
        token: its output token of a given position, from 0.
    """

    prompt: Sequence[int]
    salt: str
    token: Callable[[int], int]
    digests: list[int] = field(default_factory=list)

    def at(self, position: int) -> int:
        own = position - len(self.prompt)
        return self.prompt[position] if own < 0 else self.token(own)

    def digest(self, position: int) -> int:
        """Return the digest of all tokens up to this one."""
        while len(self.digests) <= position:
            before = self.digests[-1] if self.digests else hash(self.salt)
            self.digests.append(hash((before, self.at(len(self.digests)))))
        return self.digests[position]


class KvSlots:
    """Contents of each slot of the KV memory.

    Attributes:
        windows: for each block table, how many tokens a token attends to, its own included; None: all before it, 0: its one
            block is a state, which has read them all.
    """

    def __init__(self, block_size: int, windows: Sequence[int | None] = (None,)) -> None:
        self.size = block_size
        self.windows = windows
        self._held: dict[tuple[int, int], tuple[int, int]] = {}
        self._written_by: dict[tuple[int, int], tuple[str, int]] = {}

    def begin(self, to_zero: Sequence[int] | None) -> None:
        """Begin a step by clearing these blocks."""
        self._written_by = {}
        for block in to_zero or ():
            for offset in range(self.size):
                self._held.pop((block, offset), None)

    def holds(self, block: int, group: int, expected: ExpectedTokens, start: int) -> bool:
        """Return whether a block holds KV of a request's tokens from `start` on."""
        held = [self._held.get((block, offset)) for offset in range(self.size)]
        return held == [(expected.digest(start + offset), group) for offset in range(self.size)]

    def _first_read(self, group: int, start: int) -> int:
        window = self.windows[group]
        return 0 if window is None else max(0, start - window + 1)

    def check_tables(self, name: str, tables: Sequence[Sequence[int]], start: int, end: int) -> None:
        if len(tables) != len(self.windows):
            raise WorkerFault(f"{name}: {len(tables)} block tables for {len(self.windows)} groups")
        read: list[int] = []
        for group, table in enumerate(tables):
            if self.windows[group] == 0:
                if len(table) != 1:
                    raise WorkerFault(f"{name}: {len(table)} blocks for a state")
                read += table
                continue
            if len(table) * self.size < end:
                raise WorkerFault(f"{name}: {len(table)} blocks for {end} tokens")
            read += table[self._first_read(group, start) // self.size : -(-end // self.size)]
        if 0 in read or len(set(read)) != len(read):
            raise WorkerFault(f"{name}: block tables {tables} for tokens {start} to {end}")

    def read(self, name: str, expected: ExpectedTokens, tables: Sequence[Sequence[int]], start: int, end: int) -> None:
        for group, table in enumerate(tables):
            if self.windows[group] == 0:
                continue  # read before it was overwritten
            for position in range(self._first_read(group, start), end):
                held = self._held.get((table[position // self.size], position % self.size))
                if held != (expected.digest(position), group):
                    what = "nothing" if held is None else "another content"
                    raise WorkerFault(f"{name}: reads KV of token {position} of {end}, where {what} lies")

    def write(
        self,
        name: str,
        expected: ExpectedTokens,
        tables: Sequence[Sequence[int]],
        start: int,
        end: int,
        right: int | None = None,
    ) -> None:
        """Write KV of the tokens from `start` on: the request's up to `right` (None: all), and drafts that are rejected behind that.

        What a window has left behind has no slot.
        """
        right = end if right is None else right
        for group, table in enumerate(tables):
            if self.windows[group] == 0:
                self._move_state(name, expected, (table[0], 0), group, start, right)
                continue
            for position in range(start, end):
                if not table[position // self.size]:
                    continue
                slot = (table[position // self.size], position % self.size)
                other = self._written_by.setdefault(slot, (name, group))
                if other != (name, group):
                    raise WorkerFault(f"{name} and {other[0]} write one slot of KV memory")
                self._held[slot] = (expected.digest(position) if position < right else 0), group

    def _move_state(
        self, name: str, expected: ExpectedTokens, slot: tuple[int, int], group: int, start: int, right: int
    ) -> None:
        """Read a state, which has to be that after the token before `start`, and write that after the token before `right`."""
        if start and self._held.get(slot) != (expected.digest(start - 1), group):
            raise WorkerFault(f"{name}: the state at token {start} is not that after the token before it")
        if self._written_by.setdefault(slot, (name, group)) != (name, group):
            raise WorkerFault(f"{name} and {self._written_by[slot][0]} write one state")
        self._held[slot] = expected.digest(right - 1), group


@dataclass
class _Cached:
    """State of a request in the first runner, in its batch or not (`CachedRequestState`)."""

    prompt: list[int]
    blocks: list[list[int]]
    num_computed: int
    output: list[int] = field(default_factory=list)


@dataclass
class _Row:
    """A row of `InputBatch`."""

    tokens: list[int]
    blocks: list[list[int]]
    num_computed: int


@dataclass
class Runner:
    """Common base of both runners: computes a batch and returns its tokens as outputs.

    Attributes:
        expected: the requests' tokens, by name.
        max_rows: largest number of requests.
        seen: tokens that it computed for each request before the step at hand, as it was told.
        ahead: how many tokens of that are drafts of the step before which were rejected, where they are told of nevertheless.
        places: output tokens of each request that sampled any in the step at hand, after it.
        proposed: drafts that are on the device for a request's next step.
    """

    slots: KvSlots
    expected: dict[str, ExpectedTokens]
    is_async: bool
    max_rows: int
    seen: dict[str, int] = field(default_factory=dict)
    ahead: dict[str, int] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    proposed: dict[str, list[int]] = field(default_factory=dict)

    def execute(self, message: Any) -> dict[str, list[int]]:
        """Sampled tokens of each request of the step, in its order."""
        scheduled = message.num_scheduled_tokens
        if message.total_num_scheduled_tokens != sum(scheduled.values()) or 0 in scheduled.values():
            raise WorkerFault(f"{message.total_num_scheduled_tokens} tokens in all, of {scheduled}")
        told = [*(one.req_id for one in message.scheduled_new_reqs), *message.scheduled_cached_reqs.req_ids]
        if len(set(told)) != len(told) or set(told) != set(scheduled):
            raise WorkerFault(f"tokens for {sorted(scheduled)}, and {sorted(told)} are in the message")
        self.slots.begin(message.new_block_ids_to_zero)
        self.update(message)
        self.seen, self.places = {}, {}
        if not scheduled:
            self.ahead = {}
            return {}
        sampled: dict[str, list[int]] = {}
        drafts = message.scheduled_spec_decode_tokens
        if not drafts.keys() <= scheduled.keys() or not all(drafts.values()):
            raise WorkerFault(f"drafts {drafts} for {sorted(scheduled)}")
        if self.is_async:
            invalid = message.num_invalid_spec_tokens or {}
            drafts = {name: self.on_device(name, tokens, invalid.get(name, 0)) for name, tokens in drafts.items()}
        reads = {name: self.inputs(name, count - len(drafts.get(name, ()))) for name, count in scheduled.items()}
        rights: dict[str, int] = {}
        for name, (start, tokens, tables) in reads.items():
            expected, end = self.expected[name], start + len(tokens)
            wanted = [expected.at(position) for position in range(start, end)]
            if tokens != wanted:
                raise WorkerFault(f"{name}: tokens {start} to {end} are read as {tokens}, and are {wanted}")
            self.slots.check_tables(name, tables, start, start + scheduled[name])
            self.seen[name], right = start + self.ahead.get(name, 0), end
            for token in drafts.get(name, ()):
                if token != expected.at(right):
                    break
                right += 1
            rights[name] = right
        for name, (start, _, tables) in reads.items():  # a step writes before it reads
            self.slots.write(name, self.expected[name], tables, start, start + scheduled[name], rights[name])
        for name, (start, _, tables) in reads.items():
            self.slots.read(name, self.expected[name], tables, start, rights[name])
        for name, (start, tokens, _) in reads.items():
            ends = range(start + len(tokens), rights[name] + 1)
            sampled[name] = [token for end in ends for token in self.sample(name, end)]
            if name in drafts and not sampled[name]:
                raise WorkerFault(f"{name}: drafts behind a part of its prompt")
            if sampled[name]:
                self.places[name] = rights[name] + 1 - len(self.expected[name].prompt)
        rejected = {name: len(tokens) + 1 - len(sampled[name]) for name, tokens in drafts.items()}
        self.ahead = rejected if self.is_async else {}
        self.finish_step()
        return sampled

    def on_device(self, name: str, told: list[int], num_invalid: int) -> list[int]:
        """Drafts of a step whose message has places for them: what was proposed after the step before, but for invalid ones."""
        found = [*self.proposed.get(name, ()), *[UNKNOWN] * len(told)][: len(told)]
        valid = found[: len(told) - num_invalid]
        if told not in ([UNKNOWN] * len(told), valid + [UNKNOWN] * num_invalid):
            raise WorkerFault(f"{name}: drafts are told as {told}, and are {found}")
        return valid + [UNKNOWN] * num_invalid

    def propose(self, proposals: dict[str, list[int]]) -> None:
        """Keep the drafts of the requests that sampled in the last step."""
        self.proposed = proposals

    def update(self, message: Any) -> None:
        """Apply the message's changes."""
        raise NotImplementedError

    def inputs(self, name: str, count: int) -> tuple[int, list[int], list[list[int]]]:
        """First position, tokens that are read, block tables."""
        raise NotImplementedError

    def sample(self, name: str, end: int) -> list[int]:
        """Return the token after `end`, or nothing if it is discarded."""
        raise NotImplementedError

    def finish_step(self) -> None:
        """Finish the step after sampling."""

    def next_token(self, name: str, end: int) -> int:
        expected = self.expected[name]
        if end < len(expected.prompt):
            raise WorkerFault(f"{name}: samples a token in its prompt, at {end} of {len(expected.prompt)}")
        return expected.token(end - len(expected.prompt))


@dataclass
class FirstRunner(Runner):
    """`vllm.v1.worker.gpu_model_runner.GPUModelRunner`."""

    requests: dict[str, _Cached] = field(default_factory=dict)
    rows: dict[str, _Row] = field(default_factory=dict)
    last: dict[str, list[int]] = field(default_factory=dict)
    """`prev_req_id_to_index` and `prev_sampled_token_ids`: tokens of the last step that only the device has."""
    sampled: dict[str, list[int]] = field(default_factory=dict)

    def _remove(self, name: str) -> None:
        if self.rows.pop(name, None) is not None:
            self.last.pop(name, None)

    def update(self, message: Any) -> None:
        for name in message.finished_req_ids:
            self.requests.pop(name, None)
            self._remove(name)
        cached = message.scheduled_cached_reqs
        stay = message.num_scheduled_tokens.keys() - cached.resumed_req_ids
        for name in self.rows.keys() - stay:
            self._remove(name)
        to_add: list[str] = []
        for one in message.scheduled_new_reqs:
            if one.req_id in self.requests:
                raise WorkerFault(
                    f"{one.req_id}: is new, and the runner knows it (it would take it for streamed input)"
                )
            prompt = list(one.prompt_token_ids)
            self.requests[one.req_id] = _Cached(prompt, _copied(one.block_ids), one.num_computed_tokens)
            to_add.append(one.req_id)
        for index, name in enumerate(cached.req_ids):
            self._update_cached(cached, index, name, to_add)
        for name in to_add:
            state = self.requests[name]
            self.rows[name] = _Row([*state.prompt, *state.output], _copied(state.blocks), state.num_computed)
        if len(self.rows) > self.max_rows:
            raise WorkerFault(f"{len(self.rows)} rows, and there is room for {self.max_rows}")

    def _update_cached(self, cached: Any, index: int, name: str, to_add: list[str]) -> None:
        if name not in self.requests:
            raise WorkerFault(f"{name}: goes on, and the runner does not know it")
        state, row = self.requests[name], self.rows.get(name)
        blocks, num_output = cached.new_block_ids[index], cached.num_output_tokens[index]
        state.num_computed = cached.num_computed_tokens[index]
        if row is None:
            self.ahead.pop(name, None)
        elif name in self.ahead:
            num_output -= self.ahead[name]
            state.num_computed -= self.ahead[name]
            if num_output != len(state.output):
                raise WorkerFault(f"{name}: {num_output} output tokens, and there are {len(state.output)}")
        if num_output < len(state.output):
            del state.output[num_output:]
            if row is not None:
                del row.tokens[len(state.prompt) + num_output :]
        if name not in cached.resumed_req_ids:
            if blocks is not None:
                _extend(state.blocks, blocks)
        else:
            if row is not None or blocks is None:
                raise WorkerFault(f"{name}: is resumed without blocks, or while it is in the batch")
            state.blocks = _copied(blocks)
        if row is None:
            if self.is_async and num_output > 0:
                if name not in cached.all_token_ids:
                    raise WorkerFault(f"{name}: comes back into the batch without all_token_ids (KeyError)")
                state.output = list(cached.all_token_ids[name])[-num_output:]
            to_add.append(name)
            return
        row.num_computed = state.num_computed
        if blocks is not None:
            _extend(row.blocks, blocks)

    def inputs(self, name: str, count: int) -> tuple[int, list[int], list[list[int]]]:
        row, state = self.rows[name], self.requests[name]
        start = row.num_computed
        tokens = row.tokens[start : start + count]
        if name in self.last:
            if len(tokens) == count:
                tokens[-1] = self.last[name][-1]
            if state.output and state.output[-1] == UNKNOWN:  # read by the sampler, for which it is repaired
                state.output[-len(self.last[name]) :] = self.last[name]
        if len(tokens) < count:
            raise WorkerFault(f"{name}: computes up to {start + count}, and {len(row.tokens)} tokens are known")
        expected = self.expected[name]
        told = [expected.token(position) for position in range(len(state.output))]
        if state.output != told:
            raise WorkerFault(f"{name}: its output is {state.output} for the sampler, and is {told}")
        return start, tokens, row.blocks

    def sample(self, name: str, end: int) -> list[int]:
        state, row = self.requests[name], self.rows[name]
        if end < len(state.prompt) + len(state.output):
            return []
        token = self.next_token(name, end)
        kept = UNKNOWN if self.is_async else token
        row.tokens.append(kept)
        state.output.append(kept)
        self.sampled.setdefault(name, []).append(token)
        return [token]

    def finish_step(self) -> None:
        self.last, self.sampled = (self.sampled if self.is_async else {}), {}


@dataclass
class _State:
    """A request's slot in `RequestState` and `BlockTables`."""

    tokens: list[int]
    num_prefill: int
    num_computed: int
    num_computed_on_host: int
    blocks: list[list[int]]
    last: int = UNKNOWN


@dataclass
class SecondRunner(Runner):
    """`vllm.v1.worker.gpu.model_runner.GPUModelRunner`."""

    states: dict[str, _State] = field(default_factory=dict)

    def propose(self, proposals: dict[str, list[int]]) -> None:
        self.proposed |= proposals

    def update(self, message: Any) -> None:
        for name in message.finished_req_ids | (message.preempted_req_ids or set()):
            self.states.pop(name, None)
        for one in message.scheduled_new_reqs:
            if one.prefill_token_ids is None or len(one.prefill_token_ids) < one.prompt_len:
                raise WorkerFault(f"{one.req_id}: is new without its tokens so far")
            self.states.pop(one.req_id, None)
            self.proposed.pop(one.req_id, None)
            self.ahead.pop(one.req_id, None)
            if len(self.states) >= self.max_rows:
                raise WorkerFault(f"{one.req_id}: there is no slot for it, {len(self.states)} are taken")
            tokens, done = list(one.prefill_token_ids), one.num_computed_tokens
            self.states[one.req_id] = _State(tokens, len(tokens), done, done, _copied(one.block_ids))
        cached = message.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            if name not in self.states:
                raise WorkerFault(f"{name}: goes on, and the runner does not know it (KeyError)")
            state = self.states[name]
            state.num_computed_on_host = cached.num_computed_tokens[index]
            if cached.new_block_ids[index] is not None:
                _extend(state.blocks, cached.new_block_ids[index])

    def inputs(self, name: str, count: int) -> tuple[int, list[int], list[list[int]]]:
        state = self.states[name]
        start = state.num_computed
        if state.num_computed_on_host - self.ahead.get(name, 0) != start:
            raise WorkerFault(f"{name}: {state.num_computed_on_host} tokens are computed, and on the device {start}")
        tokens = state.tokens[start : start + count] if start < state.num_prefill else [state.last]
        if start + count > state.num_prefill and len(tokens) == count:
            tokens[-1] = state.last
        if len(tokens) < count:
            raise WorkerFault(f"{name}: computes up to {start + count}, and {len(state.tokens)} tokens are known")
        return start, tokens, state.blocks

    def sample(self, name: str, end: int) -> list[int]:
        state = self.states[name]
        state.num_computed = end
        if end < state.num_prefill:
            return []
        token = state.last = self.next_token(name, end)
        state.tokens.append(token)
        return [token]


def _copied(tables: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(table) for table in tables]


def _extend(tables: list[list[int]], new: Sequence[Sequence[int]]) -> None:
    for table, blocks in zip(tables, new, strict=True):
        table.extend(blocks)
