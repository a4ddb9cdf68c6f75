"""Model runner with predictable tokens, for engine tests.

`FakeRunner` implements the runner's protocol without a model: KV memory holds token ids, so a block table that is
wrong, a missing copy, or a chunk that starts at the wrong position gives other tokens, or a specific error. The
token after a sequence is a hash of the sequence; `expected_output` returns the tokens expected under every schedule.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from vajra_py.engine.clock import TICKS_PER_NANOSECOND
from vajra_py.engine.compute import (
    DoneStep,
    LookaheadDecodes,
    LookaheadStep,
    ModelFacts,
    ModelRunner,
    PendingStep,
    RunnerOptions,
    StepInput,
    StepOutput,
    TokenLogprobs,
)
from vajra_py.engine.kv_copier import KvCopier, _Lane
from vajra_py.engine.kv_copy import KvMove
from vajra_py.engine.supervision import Outcome, Restarted, RestartLimits
from vajra_py.engine.worker import Deliver, InlineWorker, ReplicaKey, Worker
from vajra_py.errors import ConfigError, ExecutorError, Problem
from vajra_py.runtime.kv import BlockCopy, CopyDirection
from vajra_py.runtime.support.clock import NEVER

T = TypeVar("T")
VOCAB_SIZE = 997
EOS_TOKEN_ID = 7
FREE_BLOCKS = 64
_JUMPS = 0.2
_EMPTY = -1
_DEADLY = 100
PACE_S = 0.004


def next_token(token_ids: Sequence[int]) -> int:
    """The token that follows a sequence: any of the vocabulary, the end of sequence included."""
    return xxh3_64_intdigest(np.asarray(token_ids, np.int64).tobytes()) % VOCAB_SIZE


def expected_output(prompt: Sequence[int], num_tokens: int, stops_at_eos: bool = False) -> list[int]:
    """Return the output tokens for a prompt."""
    known = list(prompt)
    for _ in range(num_tokens):
        known.append(next_token(known))
        if stops_at_eos and known[-1] == EOS_TOKEN_ID:
            break
    return known[len(prompt) :]


@dataclass(slots=True)
class _Slot:
    table: list[int] = field(default_factory=list)
    num_computed: int = 0
    last: int | None = None
    min_tokens: int = 0
    wants_logprobs: bool = False
    num_output: int = 0


class FakeRunner:
    """A `ModelRunner` that checks its input; `fail_at_step` makes that step raise, `fail_at_move` that copy to or from its host memory."""

    def __init__(
        self, options: RunnerOptions, fail_at_step: int | None = None, fail_at_move: int | None = None
    ) -> None:
        self._options = options
        self._fail_at_step, self._fail_at_move = fail_at_step, fail_at_move
        self._num_steps = self._num_moves = 0
        self._slots: dict[int, _Slot] = {}
        self._ahead: tuple[StepOutput, dict[int, _Slot], list[tuple[int, int, int]]] | None = None
        """Step started ahead: its output, its previous rows, and (slot, place in its table, spare block) of those that grew."""
        self._device = self._host = np.empty((0, 0), np.int64)

    @property
    def facts(self) -> ModelFacts:
        """Facts of a small model."""
        options = self._options
        return ModelFacts(
            "fake", 1, 0, 1, 1, 1, 8, 8, options.block_size, options.max_model_len or 2048, VOCAB_SIZE,
            (EOS_TOKEN_ID,), "float32", "cpu", "fused",
        )  # fmt: skip

    def profile_num_blocks(self, memory_fraction: float) -> int:
        """Return a small number."""
        return FREE_BLOCKS

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """See `ModelRunner`."""
        self._num_blocks = num_blocks
        shape = (num_blocks + self._options.spare_blocks, self._options.block_size)
        self._device = np.full(shape, _EMPTY, np.int64)
        self._host = np.full((num_host_blocks, self._options.block_size), _EMPTY, np.int64)

    def submit(self, step: StepInput) -> PendingStep:
        """See `ModelRunner`."""
        return DoneStep(self.run(step))

    def run_ahead(self, work: LookaheadStep) -> StepOutput:
        """See `LookaheadRunner`; KV written by a row that was not needed is kept."""
        output = self._finish_begun(work.step, work.begun) if work.begun else self.run(work.step)
        if work.ahead is not None:
            self._begin(work.ahead)
        return output

    def begin_ahead(self) -> None:
        """See `LookaheadRunner`; a no-op, since `run_ahead` computes everything itself."""

    def _begin(self, ahead: LookaheadDecodes) -> None:
        before = {slot: replace(self._slots[slot], table=[*self._slots[slot].table]) for slot in ahead.decodes}
        grown = []
        for spare, slot in enumerate(ahead.growing, self._num_blocks):
            grown.append((slot, len(before[slot].table), spare))
            self._slots[slot].table.append(spare)
        self._ahead = self.run(StepInput(decodes=ahead.decodes)), before, grown

    def _finish_begun(self, step: StepInput, begun: Sequence[int]) -> StepOutput:
        if self._ahead is None:
            raise ExecutorError("step: none was begun ahead")
        (output, before, grown), self._ahead = self._ahead, None
        self._slots.update({slot: row for slot, row in before.items() if slot not in begun})
        self._take_changes(step)
        for slot, place, spare in grown:
            if slot in begun:
                self._device[self._slots[slot].table[place]] = self._device[spare]
        tokens = dict(zip(output.slots, output.token_ids, strict=True))
        rest = StepInput(step.chunks, [slot for slot in step.decodes if slot not in begun])
        others = self.run(rest)
        found = {slot: tokens[slot] for slot in begun} | dict(zip(others.slots, others.token_ids, strict=True))
        slots = [*step.decodes, *(chunk.slot for chunk in step.chunks if chunk.samples)]
        faults = {slot: why for slot, why in output.faults.items() if slot in begun} | dict(others.faults)
        return replace(others, slots=slots, token_ids=[found[slot] for slot in slots], faults=faults)

    def run(self, step: StepInput) -> StepOutput:
        """See `ModelRunner`."""
        if self._ahead is not None:
            self._slots.update(self._ahead[1])
            self._ahead = None
        self._num_steps += 1
        if self._num_steps - 1 == self._fail_at_step:
            raise ExecutorError("step: out of memory on fake")
        self._take_changes(step)
        sampled: list[tuple[int, int]] = []
        for slot in step.decodes:
            row = self._slots[slot]
            if row.last is None:
                raise ExecutorError(f"slot {slot}: goes on, and its newest token is not known here")
            sampled.append((slot, self._sample(row, [row.last], row.num_computed)))
        for chunk in step.chunks:
            row = self._slots[chunk.slot]
            if chunk.num_outputs is not None:
                row.num_output = chunk.num_outputs
            known, drafts = _cut(chunk.token_ids, chunk.num_drafts)
            token = self._sample(row, known, chunk.num_computed, samples=chunk.samples)
            if chunk.samples:
                sampled.append((chunk.slot, token))
            for place, draft in enumerate(drafts, chunk.num_computed + len(known)):
                sampled.append((chunk.slot, self._sample(row, [draft], place)))
        logprobs = {
            slot: TokenLogprobs(-0.5, 1, ((token, -0.5),))
            for slot, token in sampled
            if self._slots[slot].wants_logprobs
        }
        scores = {
            chunk.slot: [TokenLogprobs(-0.5, 1, ((token, -0.5),)) for token in chunk.followers]
            for chunk in step.chunks
            if chunk.followers
        }
        return StepOutput([slot for slot, _ in sampled], [token for _, token in sampled], 1e-6, logprobs, scores)

    @property
    def kv_block_bytes(self) -> int:
        """See `KvRunner`."""
        return 8 * self._options.block_size

    def export_kv(self, block_ids: Sequence[int], buffer: npt.NDArray[np.uint8]) -> None:
        """See `KvRunner`."""
        buffer[:] = self._device[list(block_ids)].reshape(-1).view(np.uint8)

    def import_kv(
        self, block_ids: Sequence[int], buffer: npt.NDArray[np.uint8], copies: Sequence[BlockCopy] = ()
    ) -> None:
        """See `KvRunner`."""
        self._move(copies)
        self._device[list(block_ids)] = buffer.view(np.int64).reshape(len(block_ids), -1)

    def mark(self) -> object:
        """See `KvRunner`: the number of steps so far."""
        return self._num_steps

    def move_kv(self, copies: Sequence[BlockCopy], after: object = None) -> None:
        """See `KvRunner`."""
        self._num_moves += 1
        if self._num_moves - 1 == self._fail_at_move:
            raise ExecutorError("KV copy: out of memory on fake")
        self._move(copies)

    def close(self) -> None:
        """Do nothing."""

    def _take_changes(self, step: StepInput) -> None:
        for slot in step.freed:
            del self._slots[slot]
        for new in step.new:
            if new.slot in self._slots or not 0 <= new.slot < self._options.max_requests:
                raise ExecutorError(f"slot {new.slot}: is taken, or there is no such slot")
            sampling = new.sampling
            wants = sampling.logprobs is not None
            self._slots[new.slot] = _Slot(
                min_tokens=sampling.min_tokens, wants_logprobs=wants, num_output=new.num_output_tokens
            )
        for update in step.tables:
            table = self._slots[update.slot].table
            if update.start > len(table):
                raise ExecutorError(f"slot {update.slot}: its block table has a hole")
            table[update.start :] = update.block_ids
        self._move(step.copies)
        if len({*step.decodes, *(chunk.slot for chunk in step.chunks)}) != len(step.decodes) + len(step.chunks):
            raise ExecutorError("step: names a slot twice")

    def _move(self, copies: Sequence[BlockCopy]) -> None:
        for source, target, direction, _ in copies:
            if direction is CopyDirection.TO_HOST:
                self._host[target] = self._device[source]
            else:
                self._device[target] = self._host[source]

    def _sample(self, row: _Slot, token_ids: Sequence[int], start: int, samples: bool = True) -> int:
        size, end = self._options.block_size, start + len(token_ids)
        if end > len(row.table) * size:
            raise ExecutorError(f"a row of {end} tokens has {len(row.table)} blocks of {size}")
        for position, token in enumerate(token_ids, start):
            self._device[row.table[position // size], position % size] = token
        row.num_computed, row.last = end, None
        if not samples:
            return _EMPTY
        known = self._device[row.table].reshape(-1)[:end].tolist()
        if _EMPTY in known:
            raise ExecutorError("a row attends to KV that was never computed")
        row.num_output += 1
        row.last = token = next_token(known)
        if token == EOS_TOKEN_ID and row.num_output < row.min_tokens:
            row.last = token + 1
        return row.last


def _cut(token_ids: Sequence[int], num_drafts: int) -> tuple[Sequence[int], Sequence[int]]:
    """Known tokens, and drafts."""
    end = len(token_ids) - num_drafts
    return token_ids[:end], token_ids[end:]


class _Mortal(FakeRunner):
    def run(self, step: StepInput) -> StepOutput:
        if any(len(chunk.token_ids) > _DEADLY for chunk in step.chunks):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(step)


def runner_that_dies_on_long_prompts(options: RunnerOptions) -> FakeRunner:
    """Load a runner whose process is killed by a chunk of more than 100 tokens. Defined here since a process must import it."""
    return _Mortal(options)


class _DiesExporting(FakeRunner):
    def export_kv(self, block_ids: Sequence[int], buffer: npt.NDArray[np.uint8]) -> None:
        super().export_kv(block_ids, buffer)
        _die_once(self._options, "exporting")


class _DiesImporting(FakeRunner):
    def import_kv(
        self, block_ids: Sequence[int], buffer: npt.NDArray[np.uint8], copies: Sequence[BlockCopy] = ()
    ) -> None:
        self._device[block_ids[0]] = _EMPTY  # half of it
        _die_once(self._options, "importing")
        super().import_kv(block_ids, buffer, copies)


class _DiesMoving(FakeRunner):
    def move_kv(self, copies: Sequence[BlockCopy], after: object = None) -> None:
        if self._num_steps > 20:
            super().move_kv(copies[:1], after)
            _die_once(self._options, "moving")
        super().move_kv(copies, after)


def _die_once(options: RunnerOptions, what: str) -> None:
    """Kill this process, unless another one of the same model's folder has been killed for this."""
    try:
        (Path(options.model) / f"died {what}").touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def runner_that_dies_exporting(options: RunnerOptions) -> FakeRunner:
    """Load a runner whose process is killed when KV was copied out of its memory, the first time."""
    return _DiesExporting(options)


def runner_that_dies_importing(options: RunnerOptions) -> FakeRunner:
    """Load a runner whose process is killed while KV is copied into its memory, the first time."""
    return _DiesImporting(options)


def runner_that_dies_moving(options: RunnerOptions) -> FakeRunner:
    """Load a runner whose process is killed while it copies KV to its host memory or back, the first time after 20 steps."""
    return _DiesMoving(options)


class _Paced(FakeRunner):
    def run(self, step: StepInput) -> StepOutput:
        threading.Event().wait(PACE_S)
        return super().run(step)


def runner_that_takes_its_time(options: RunnerOptions) -> FakeRunner:
    """Load a runner whose steps take a few milliseconds, like a small model's: long enough to be interrupted."""
    return _Paced(options)


def runner_that_cannot_load(options: RunnerOptions) -> FakeRunner:
    """Raises ConfigError in place of loading."""
    raise ConfigError(Problem("model", "is too large", "Allowed: smaller ones"))


class SteppedWorld:
    """Clock and workers of a run in which no time passes: several replicas compute at once, on one thread.

    The clock moves by a random time whenever it is read. When the loop has nothing to do, either a step comes back, any of
    those under way, or the clock jumps to what is due next. `services` of an engine get `clock` and `worker`.
    """

    def __init__(
        self,
        stream: np.random.Generator,
        mean_step_s: float = 0.01,
        runner: Callable[[ReplicaKey, RunnerOptions], ModelRunner] | None = None,
    ) -> None:
        self._stream = stream
        self._mean_ns = mean_step_s * 1e9
        self._runner = runner or (lambda replica, options: FakeRunner(options))
        self._now = 0
        self.on_read: Callable[[], None] | None = None
        """Called whenever the clock is read; simulates clients that arrive and leave."""
        self._under_way: list[tuple[Worker | None, Callable[[], None]]] = []
        """Next things that may happen, by the worker that does them; each gives the loop one message."""

    def clock(self) -> SteppedWorld:
        """Return this object as an `EngineClock`."""
        return self

    def worker(self, replica: ReplicaKey, options: RunnerOptions) -> Worker:
        """The worker of one replica."""
        return _SteppedWorker(replica, self._runner(replica, options), self._under_way)

    def restarter(
        self,
        limits: RestartLimits,
        begin: Callable[[ReplicaKey], Worker],
        finish: Callable[[ReplicaKey, Worker], None],
        notify: Callable[[Outcome], None],
    ) -> SteppedRestarter:
        """See `MakeRestarter`: workers come back some time later, without threads."""
        return SteppedRestarter(limits.max_restarts, lambda key, lost: self._replace(key, lost, begin, finish, notify))

    def _replace(
        self,
        replica: ReplicaKey,
        lost: Worker,
        begin: Callable[[ReplicaKey], Worker],
        finish: Callable[[ReplicaKey, Worker], None],
        notify: Callable[[Outcome], None],
    ) -> None:
        def come_back() -> None:
            worker = begin(replica)
            finish(replica, worker)
            notify(Restarted(replica, worker))

        self._under_way[:] = [one for one in self._under_way if one[0] is not lost]  # it is discarded first
        self._under_way.append((None, come_back))

    def now(self) -> int:
        """See `EngineClock`."""
        if self.on_read is not None:
            self.on_read()
        self._now += int(self._stream.exponential(self._mean_ns)) * TICKS_PER_NANOSECOND
        return self._now

    def wait(self, inbox: SimpleQueue[T], until: int) -> T | None:
        """See `EngineClock`."""
        jumps = until < NEVER and (not self._under_way or self._stream.random() < _JUMPS)
        if jumps:
            self._now = max(self._now, -(-until // TICKS_PER_NANOSECOND) * TICKS_PER_NANOSECOND)
            return None
        if not self._under_way:
            raise RuntimeError("the loop waits for ever")
        self._under_way.pop(int(self._stream.integers(len(self._under_way))))[1]()
        return inbox.get_nowait()


class SteppedRestarter:
    """A `Restarter` that restarts each replica at most `max_restarts` times."""

    def __init__(self, max_restarts: int, replace: Callable[[ReplicaKey, Worker], None]) -> None:
        self._left: dict[ReplicaKey, int] = {}
        self._max = max_restarts
        self._replace = replace
        self.losses: list[bool] = []
        """For each loss, whether the worker had completed a step."""

    def lost(self, replica: ReplicaKey, worker: Worker, *, has_computed: bool) -> bool:
        """See `Restarter`."""
        self.losses.append(has_computed)
        left = self._left[replica] = self._left.get(replica, self._max) - 1
        if left < 0:
            return False
        self._replace(replica, worker)
        return True

    def close(self) -> None:
        """See `Restarter`."""


class SteppedCopier(KvCopier):
    """Copies when the world permits it, or when a step has to wait for it, and tells when the world permits it."""

    def __init__(
        self,
        runner: ModelRunner,
        later: Callable[[Callable[[], None]], None],
        notify: Callable[[KvMove, Exception | None], None],
    ) -> None:
        super().__init__(runner, self._note)
        self._later = later
        self._notify_end = notify
        self._ended: dict[int, Exception | None] = {}
        self.num_forced = 0
        """Copies that a step has waited for."""

    def _go_on(self, lane: _Lane) -> None:
        move, _ = lane.moves[-1]
        self._later(lambda: self._end(move))

    def _end(self, move: KvMove) -> None:
        while move.number not in self._ended:
            self._advance(self._lane(move))
        self._notify_end(move, self._ended[move.number])

    def _advance(self, lane: _Lane) -> None:
        while not self._is_next_free(lane):
            self._advance(self._down)
        self._make(*lane.moves.popleft())

    def _note(self, move: KvMove, error: Exception | None) -> None:
        self._ended[move.number] = error

    def _wait_for(self, blocks: Collection[int]) -> None:
        for lane in (self._down, self._up):
            while self._error is None and not lane.busy.keys().isdisjoint(blocks):
                self.num_forced += 1
                self._advance(lane)
        super()._wait_for(blocks)


class _SteppedWorker(InlineWorker):
    """Computes on submission and delivers when the world permits it."""

    def __init__(
        self, replica: ReplicaKey, runner: ModelRunner, under_way: list[tuple[Worker | None, Callable[[], None]]]
    ) -> None:
        super().__init__(replica, runner)
        self._under_way = under_way

    def start(self, num_blocks: int, num_host_blocks: int, deliver: Deliver) -> None:
        """See `Worker`."""
        super().start(num_blocks, num_host_blocks, lambda finished: self._later(lambda: deliver(finished)))
        self._copier = SteppedCopier(self._runner, self._later, lambda *end: deliver(self._end_of(*end)))

    def _later(self, call: Callable[[], None]) -> None:
        self._under_way.append((self, call))
