"""Measure step times of a model runner for batches of given shapes, relative to the machine's current speed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from vajra_py.contract import BatchFeatures
from vajra_py.engine.compute import Chunk, ModelRunner, NewRow, RunnerOptions, SamplingParams, StepInput, TableUpdate
from vajra_py.runtime.kv import BlockCopy, CopyDirection
from vajra_py.runtime.support.seeds import SeedTree

GREEDY = SamplingParams(temperature=0.0)
_REFERENCE_ROWS, _REFERENCE_CONTEXT = 8, 16
NEIGHBOURS = 2
"""Number of neighbours on each side of a reference time; the median of the time and its neighbours gives the machine's
speed at that moment.
"""


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch to measure: context lengths of its decodes, (tokens, context length) of its prefill chunks, and number
    of swapped blocks.
    """

    decodes: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    num_swapped: int = 0

    def shape(self, bytes_per_block: int) -> BatchFeatures:
        """Return the batch's features for a latency model."""
        shape = BatchFeatures(swap_bytes=self.num_swapped * bytes_per_block)
        shape = shape.with_decodes(len(self.decodes), sum(self.decodes))
        for num_tokens, context in self.chunks:
            shape = shape.with_chunk(num_tokens, context)
        return shape

    def ends(self, begins_ahead: bool = False) -> list[int]:
        """Return the number of tokens for which each row needs KV memory. With `begins_ahead`, rows of decode-only
        batches need memory for one more token, which the next step computes.
        """
        is_ahead = self.is_ahead(begins_ahead)
        decoded = [max(2, context) + 2 if is_ahead else context + 1 for context in self.decodes]
        return decoded + [tokens + context for tokens, context in self.chunks]

    def is_ahead(self, begins_ahead: bool) -> bool:
        """Return True if the step is launched before the previous step's tokens are known: with `begins_ahead`, for a
        batch that has only decodes and no swapped blocks.
        """
        return begins_ahead and not self.chunks and not self.num_swapped

    def num_blocks(self, block_size: int, begins_ahead: bool = False) -> int:
        """Return the number of KV blocks of all rows."""
        return sum(-(-end // block_size) for end in self.ends(begins_ahead))


class Bench:
    """Executes batches on a runner and measures their time, using slots from `first_slot` and KV blocks from
    `first_block` on.
    """

    def __init__(
        self,
        runner: ModelRunner,
        block_size: int,
        num_blocks: int,
        first_slot: int = 0,
        first_block: int = 0,
        begins_ahead: bool = False,
    ) -> None:
        """With `begins_ahead`, decode-only steps are launched before the previous step's tokens are known."""
        self._begins_ahead = begins_ahead
        self._runner = runner
        self._size = block_size
        self._num_blocks = num_blocks
        self._first_slot = first_slot
        self._first_block = first_block
        self._vocab_size = runner.facts.vocab_size
        self._stream = SeedTree(0).stream("tokens")
        self.bytes_per_block = runner.facts.kv_bytes_per_token * block_size
        self.taken: list[int] = []
        """Slots in use, which the next step frees."""

    def time_s(self, batch: Batch) -> float:
        """Return the seconds of one step of the batch. If its decodes begin ahead, this is the time from the previous
        step's tokens to this step's tokens.
        """
        is_ahead = batch.is_ahead(self._begins_ahead)
        # If decodes begin ahead, the step before the measured one decodes the same rows with one context token less.
        # Each context therefore needs at least two tokens.
        if is_ahead:
            batch = replace(batch, decodes=tuple(max(2, context) for context in batch.decodes))
        ends = batch.ends(self._begins_ahead)
        blocks = self._first_block + self._stream.permutation(self._num_blocks)
        freed, self.taken = self.taken, [self._first_slot + place for place in range(len(ends))]
        new, tables, at = [], [], 0
        for slot, end in zip(self.taken, ends, strict=True):
            count = -(-end // self._size)
            tables.append(TableUpdate(slot, 0, blocks[at : at + count].tolist()))
            new.append(NewRow(slot, GREEDY, slot))
            at += count
        decodes = self.taken[: len(batch.decodes)]
        if decodes:  # a row can decode only after the worker has sampled a token for it
            contexts = zip(decodes, batch.decodes, strict=True)
            before = [Chunk(slot, self._tokens(1), context - 1 - is_ahead, samples=True) for slot, context in contexts]
            self._runner.run(StepInput(before, new=new, freed=freed, tables=tables))
            new, freed, tables = [], [], []
        chunks = [
            Chunk(slot, self._tokens(tokens), context, samples=True)
            for slot, (tokens, context) in zip(self.taken[len(decodes) :], batch.chunks, strict=True)
        ]
        copies = [BlockCopy(block, block, CopyDirection.TO_HOST) for block in range(batch.num_swapped)]
        step = StepInput(chunks, decodes, new, freed, tables, copies)
        if is_ahead:
            first, second = self._runner.submit(step), self._runner.submit(step)
            first.result()
            start = time.perf_counter()
            third = self._runner.submit(step)
            second.result()
            time_s = time.perf_counter() - start
            third.result()
            return time_s
        start = time.perf_counter()
        self._runner.run(step)
        return time.perf_counter() - start

    def _tokens(self, count: int) -> list[int]:
        tokens: list[int] = self._stream.integers(0, self._vocab_size, count).tolist()
        return tokens


class Reference:
    """Measures the time of a fixed batch, which shows the machine's current speed.

    It uses slots and KV blocks after those of the engine: the runner needs the options that `room` returns, and
    `num_blocks` further KV blocks from `first_block` on.
    """

    def __init__(self, runner: ModelRunner, options: RunnerOptions, first_block: int) -> None:
        size = options.block_size
        context = max(1, min(_REFERENCE_CONTEXT, runner.facts.max_model_len - 2))
        self._batch = Batch((context,) * _REFERENCE_ROWS)
        self._bench = Bench(runner, size, self.num_blocks(options), options.max_requests, first_block)

    @staticmethod
    def room(options: RunnerOptions) -> RunnerOptions:
        """Return an engine's options with additional slots for the reference."""
        return replace(options, max_requests=options.max_requests + _REFERENCE_ROWS)

    @staticmethod
    def num_blocks(options: RunnerOptions) -> int:
        """Return the number of KV blocks of the reference."""
        return _REFERENCE_ROWS * -(-(_REFERENCE_CONTEXT + 1) // options.block_size)

    def frees(self, bench: Bench) -> None:
        """Let the reference's next step free the slots of another bench, which is no longer used."""
        self._bench.taken += bench.taken
        bench.taken = []

    def time_s(self) -> float:
        """Return the seconds of one step of the reference batch."""
        return self._bench.time_s(self._batch)


def paces(reference_s: Sequence[float], typical_s: float) -> list[float]:
    """Return, for each reference time, the slowdown of the machine at that moment: the median of this time and its
    `NEIGHBOURS`, divided by `typical_s`.
    """
    windows = (reference_s[max(0, at - NEIGHBOURS) : at + NEIGHBOURS + 1] for at in range(len(reference_s)))
    return [median(window) / typical_s for window in windows]
