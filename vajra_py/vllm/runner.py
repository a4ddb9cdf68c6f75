"""Compute this project's steps with vLLM's workers.

A step describes the changes since the last one; this module translates them into vLLM's form (`SchedulerOutput`).

A chunk of a prompt, or of recomputed tokens, is sent as a new request whose earlier tokens count as computed; decodes
after the last chunk belong to the request that was sent for this chunk. So workers never receive more of a prompt than
they compute, and preempted requests need no special treatment. Requests whose sampling depends on earlier tokens
(penalties), or whose prompt is scored, stay one request for the workers instead, and are sent with their whole prompt.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from vllm import SamplingParams as VllmSampling

from vajra_py.engine.compute import (
    Chunk,
    DoneStep,
    ModelFacts,
    NewRow,
    PendingStep,
    SamplingParams,
    StepInput,
    StepOutput,
    TokenLogprobs,
)
from vajra_py.engine.compute.sampling.needs import needs_prompt
from vajra_py.errors import ExecutorError
from vajra_py.vllm.options import VllmOptions
from vajra_py.vllm.step_message import Scheduled, StepMessage

_DISCARDED = VllmSampling(temperature=0.0, max_tokens=1)
"""Sampling parameters for a token that is discarded."""


class Workers(Protocol):
    """Interface of `VllmWorkers`; tests use other implementations."""

    facts: ModelFacts
    is_cpu: bool

    def num_blocks_in(self, memory_fraction: float) -> int:
        """Return the number of KV blocks that fit into this fraction of device memory."""

    def allocate(self, num_blocks: int) -> None:
        """Allocate KV memory for this number of blocks."""

    def execute(self, message: Any) -> Any:
        """Return the `ModelRunnerOutput` of a `SchedulerOutput`."""

    def close(self) -> None:
        """Release all resources."""


@dataclass(slots=True)
class _Row:
    """State of the request in a slot, and of its counterpart at the workers.

    Attributes:
        keeps: True if the request stays one and the same request at the workers, from its first chunk to its end.
        tokens: the request's token ids as far as they are known here; with `keeps`, its prompt and the output that it
            had when it got the slot.
        blocks: the request's block table.
        name: the request's name at the workers; empty if they do not have the request.
        num_sent: number of leading entries of the block table that were sent.
        num_computed: number of tokens in KV memory.
        num_sampled: number of tokens sampled under `name`.
        is_moved: True if entries of the block table were replaced after they had been sent.
    """

    new: NewRow
    keeps: bool
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    name: str = ""
    num_sent: int = 0
    num_computed: int = 0
    num_sampled: int = 0
    num_outputs: int = 0
    is_moved: bool = False


@dataclass(frozen=True, slots=True)
class _Results:
    """Results of a step by slot, accumulated over its parts; see `StepOutput`."""

    sampled: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, Sequence[TokenLogprobs]] = field(default_factory=dict)


class VllmRunner:
    """A `ModelRunner` on vLLM's workers. Not thread-safe."""

    def __init__(self, workers: Workers, options: VllmOptions) -> None:
        self._workers = workers
        self._max_tokens = options.max_step_tokens
        self._max_rows = options.max_batch_size
        self._rows: dict[int, _Row] = {}
        self._next = StepMessage()
        self._num_named = 0

    @property
    def facts(self) -> ModelFacts:
        """See `ModelRunner`."""
        return self._workers.facts

    def profile_num_blocks(self, memory_fraction: float) -> int:
        """See `ModelRunner`."""
        return self._workers.num_blocks_in(memory_fraction)

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """See `ModelRunner`; there is no host memory to swap to."""
        if num_host_blocks:
            raise ExecutorError(f"vllm: KV blocks are not copied to host memory (got {num_host_blocks}). Allowed: 0.")
        self._workers.allocate(num_blocks)

    def submit(self, step: StepInput) -> PendingStep:
        """See `ModelRunner`; the step runs synchronously."""
        return DoneStep(self.run(step))

    def close(self) -> None:
        """See `ModelRunner`."""
        self._workers.close()

    def run(self, step: StepInput) -> StepOutput:
        """See `ModelRunner`."""
        started = time.perf_counter()
        if step.copies:
            raise ExecutorError("vllm: KV blocks are not copied to host memory. Preemption recomputes.")
        self._take_changes(step)
        results = _Results()
        for decodes, chunks in self._portions(step):
            for slot in decodes:
                self._add_decode(slot)
            for chunk in chunks:
                self._add_chunk(chunk)
            output = self._workers.execute(self._next.take())
            for slot in decodes:
                self._read(slot, output, results, samples=True)
            for chunk in chunks:
                self._read(chunk.slot, output, results, samples=chunk.samples)
        slots = [*step.decodes, *(chunk.slot for chunk in step.chunks if chunk.samples)]
        tokens = [results.sampled[slot] for slot in slots]
        duration_s = time.perf_counter() - started
        return StepOutput(slots, tokens, duration_s, results.logprobs, results.prompt_logprobs)

    # Messages to workers

    def _take_changes(self, step: StepInput) -> None:
        for slot in step.freed:
            row = self._rows.pop(slot)
            if row.name:
                self._next.finished.add(row.name)
        for new in step.new:
            keeps = needs_prompt(new.sampling)
            tokens = [*new.prompt_token_ids, *new.output_token_ids] if keeps else []
            self._rows[new.slot] = _Row(new, keeps, tokens, num_outputs=new.num_output_tokens)
        for table in step.tables:
            row = self._rows[table.slot]
            row.is_moved = row.is_moved or table.start < row.num_sent
            row.blocks[table.start :] = table.block_ids

    def _portions(self, step: StepInput) -> Iterator[tuple[Sequence[int], Sequence[Chunk]]]:
        """Split the step into consecutive parts that fit vLLM's buffers, usually a single one."""
        num_tokens = len(step.decodes) + sum(len(chunk.token_ids) for chunk in step.chunks)
        if num_tokens <= self._max_tokens and len(step.decodes) + len(step.chunks) <= self._max_rows:
            yield step.decodes, step.chunks
            return
        size = min(self._max_tokens, self._max_rows)
        for first in range(0, len(step.decodes), size):
            yield step.decodes[first : first + size], ()
        chunks: list[Chunk] = []
        left = self._max_tokens
        for piece in (piece for chunk in step.chunks for piece in _pieces(chunk, self._max_tokens)):
            # Two pieces of one chunk must be in different parts: the second reads KV that the first computes.
            is_full = len(piece.token_ids) > left or len(chunks) == self._max_rows
            if chunks and (is_full or chunks[-1].slot == piece.slot):
                yield (), chunks
                chunks, left = [], self._max_tokens
            chunks.append(piece)
            left -= len(piece.token_ids)
        if chunks:
            yield (), chunks

    def _add_decode(self, slot: int) -> None:
        row = self._rows[slot]
        self._next.add_known(self._scheduled(row, 1), row.num_sampled)

    def _add_chunk(self, chunk: Chunk) -> None:
        row, num_tokens = self._rows[chunk.slot], len(chunk.token_ids)
        row.num_computed = chunk.num_computed
        is_moved, row.is_moved = row.is_moved, False
        if row.keeps and row.name:
            if is_moved:
                row.num_sent = 0
            self._next.add_known(self._scheduled(row, num_tokens), row.num_sampled, is_resumed=is_moved)
        else:
            self._name(row)
            scheduled = self._scheduled(row, num_tokens)
            self._next.add_new(scheduled, self._known(row, chunk), self._sampling(row, chunk))

    def _scheduled(self, row: _Row, num_tokens: int) -> Scheduled:
        """Return a row's next `num_tokens` tokens and unsent blocks, and record them as computed and sent."""
        scheduled = Scheduled(row.name, num_tokens, row.num_computed, row.blocks[row.num_sent :])
        row.num_sent = len(row.blocks)
        row.num_computed += num_tokens
        return scheduled

    def _name(self, row: _Row) -> None:
        """Assign the row a new, unused name at the workers."""
        if row.name:
            self._next.finished.add(row.name)
        self._num_named += 1
        row.name = str(self._num_named)
        row.num_sampled = row.num_sent = 0

    def _known(self, row: _Row, chunk: Chunk) -> list[int]:
        """Return the prompt to send for a request. Workers do not read tokens before the chunk, so these may be 0."""
        if not row.keeps:
            tokens, start = row.tokens, chunk.num_computed
            tokens += [0] * (start - len(tokens))
            tokens[start:] = chunk.token_ids
        return list(row.tokens)

    def _sampling(self, row: _Row, chunk: Chunk) -> VllmSampling:
        if not chunk.samples and not row.keeps:
            return _DISCARDED
        # On a CPU, vLLM draws a number from a request's own generator even for a chunk that samples nothing: this would
        # shift all later numbers. So a request that the workers keep between chunks (`row.keeps`) gets no seed.
        has_seed = not (row.keeps and self._workers.is_cpu)
        return vllm_sampling(row.new, self.facts.eos_token_ids, row.num_outputs, has_seed=has_seed)

    # Results

    def _read(self, slot: int, output: Any, results: _Results, *, samples: bool) -> None:
        """Store a step's result for the request in a slot; `samples` is false if the sampled token is discarded."""
        row = self._rows[slot]
        place = output.req_id_to_index[row.name]
        tokens = output.sampled_token_ids[place]
        if tokens:
            row.num_sampled += 1
        if samples:
            if not tokens:
                raise ExecutorError("vllm: a request whose tokens are all computed got no new token.")
            results.sampled[slot] = tokens[0]
            row.num_outputs += 1
            wanted = row.new.sampling.logprobs
            if wanted is not None:
                results.logprobs[slot] = _token_logprobs(output.logprobs, place, wanted)
        wanted = row.new.sampling.prompt_logprobs
        scored = output.prompt_logprobs_dict.get(row.name) if wanted is not None else None
        if wanted is not None and scored is not None:
            lists = scored.tolists()
            results.prompt_logprobs[slot] = [
                _token_logprobs(lists, index, wanted) for index in range(len(lists.sampled_token_ranks))
            ]


def vllm_sampling(new: NewRow, eos: Sequence[int], num_outputs: int, *, has_seed: bool = True) -> VllmSampling:
    """Return the sampling parameters of vLLM for a request with `num_outputs` tokens of output.

    vLLM's seed depends on `num_outputs`, so that a request sent again after a preemption does not repeat the random
    numbers of its first tokens. A prompt is scored before the first token of output, and not again.
    """
    params: SamplingParams = new.sampling
    ending = [] if params.ignore_eos else list(eos)
    is_greedy = params.temperature == 0.0
    sampling = VllmSampling(
        temperature=params.temperature,
        top_k=params.top_k or 0,
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        seed=None if is_greedy or not has_seed else (new.seed + num_outputs) % 2**63,
        logprobs=params.logprobs,
        prompt_logprobs=None if num_outputs else params.prompt_logprobs,
        stop_token_ids=[*params.stop_token_ids, *ending],
        min_tokens=max(0, params.min_tokens - num_outputs),
        max_tokens=None,
        detokenize=False,
        allowed_token_ids=None if params.allowed_token_ids is None else list(params.allowed_token_ids),
        logit_bias=dict(params.logit_bias) or None,
    )
    if params.bad_words_token_ids:  # vLLM's public field takes only strings, not token ids
        sampling._bad_words_token_ids = [list(word) for word in params.bad_words_token_ids]
    return sampling


def _pieces(chunk: Chunk, most: int) -> Iterator[Chunk]:
    """Split a chunk into pieces of at most `most` tokens; only the last one may sample."""
    count = len(chunk.token_ids)
    for first in range(0, count, most):
        end = min(count, first + most)
        is_last = end == count
        yield replace(
            chunk,
            token_ids=chunk.token_ids[first:end],
            num_computed=chunk.num_computed + first,
            samples=chunk.samples and is_last,
        )


def _token_logprobs(lists: Any, row: int, count: int) -> TokenLogprobs:
    """Return `count` log-probabilities of a row: the sampled token's first, then those of the most likely tokens."""
    values = lists.logprobs[row].tolist()
    tokens = lists.logprob_token_ids[row].tolist()
    top = tuple(zip(tokens[1 : count + 1], values[1 : count + 1], strict=True))
    return TokenLogprobs(values[0], int(lists.sampled_token_ranks[row]), top)
