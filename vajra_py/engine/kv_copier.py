"""Copies of KV between a worker's device and its host memory, concurrent with its steps: one thread per direction.

A worker starts each copy after it has processed all earlier messages. Copies of one direction are made one after the
other.

Invariants:
    - A copy reads KV that earlier steps have written; on a GPU, the copy waits on the device for these steps.
    - Before a step writes a newly taken device block, it waits until no copy reads or writes that block. Steps wait for
      no other copies. Before a copy to the device writes a block, it waits until no copy to the host reads that block.
    - After a failed copy, no further copy starts and every later step fails.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from vajra_py.engine.compute import KvRunner, LookaheadRunner, LookaheadStep, ModelRunner, StepInput
from vajra_py.engine.kv_copy import KvMove
from vajra_py.errors import ExecutorError
from vajra_py.runtime.kv import BlockCopy, CopyDirection

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Lane:
    """Copies of one direction."""

    name: str
    moves: deque[tuple[KvMove, object]] = field(default_factory=deque)
    """Copies that have not started, each with the runner's mark after the steps submitted before it."""
    busy: Counter[int] = field(default_factory=Counter)
    """Device blocks of copies that have not finished."""
    thread: threading.Thread | None = None


class KvCopier:
    """Makes the copies of one runner. All methods but `close` are called by the thread that computes its steps."""

    def __init__(self, runner: ModelRunner, notify: Callable[[KvMove, Exception | None], None]) -> None:
        """`notify` is called in the copying thread when a copy has ended, with the copy and its error, or None."""
        self._runner = runner
        self._notify = notify
        self._changed = threading.Condition()
        self._down, self._up = _Lane("vajra-copies-down"), _Lane("vajra-copies-up")
        self._error: Exception | None = None
        self._is_closed = False

    def begin(self, move: KvMove) -> None:
        """Queue a copy behind earlier ones of its direction; later steps wait for it only if they overwrite its blocks.

        Raises `ExecutorError` after a failed copy.
        """
        runner = cast(KvRunner, self._runner)
        # Decodes that start ahead are submitted before this copy. After it, a decode of a request that has ended
        # meanwhile could overwrite the copied KV, since the request's block may now be a target of this copy.
        cast(LookaheadRunner, runner).begin_ahead()
        self._wait_for(_loaded(move.before))
        if move.before:
            runner.move_kv(move.before)
        lane = self._lane(move)
        with self._changed:
            lane.busy.update(device_blocks(move.copies))
            lane.moves.append((move, runner.mark()))
            self._changed.notify_all()
        self._go_on(lane)

    def wait_before(self, work: StepInput | LookaheadStep) -> None:
        """Wait for copies that use blocks which the step overwrites: newly taken blocks, and targets of its own copies.

        Raises `ExecutorError` after a failed copy.
        """
        if self._down.busy or self._up.busy or self._error is not None:
            step = work.step if isinstance(work, LookaheadStep) else work
            self._wait_for(set(written_blocks(step, self._runner.facts.block_size)))

    def close(self, timeout_s: float | None = None) -> None:
        """Finish the running copies, drop the queued ones and stop the threads. May be called twice, from any thread.

        Raises `ExecutorError` if a copy takes longer than `timeout_s`.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for lane in (self._down, self._up):
            if lane.thread is not None:
                lane.thread.join(timeout_s)
                if lane.thread.is_alive():
                    raise ExecutorError("its thread does not return from a copy; its memory is not freed")

    def _lane(self, move: KvMove) -> _Lane:
        return self._up if move.is_upward else self._down

    def _wait_for(self, blocks: Collection[int]) -> None:
        def may_go_on() -> bool:
            is_free = self._down.busy.keys().isdisjoint(blocks) and self._up.busy.keys().isdisjoint(blocks)
            return is_free or self._is_closed or self._error is not None

        with self._changed:
            self._changed.wait_for(may_go_on)
            if self._error is not None:
                raise ExecutorError(f"a copy of KV failed before ({self._error})")
            if self._is_closed:
                raise ExecutorError("the worker has been closed")

    def _go_on(self, lane: _Lane) -> None:
        """Start the thread that makes the queued copies of this direction, unless it runs already."""
        if lane.thread is None:
            lane.thread = threading.Thread(target=self._work, args=(lane,), name=lane.name, daemon=True)
            lane.thread.start()

    def _work(self, lane: _Lane) -> None:
        def may_go_on() -> bool:
            return self._is_closed or self._error is not None or self._is_next_free(lane)

        while True:
            with self._changed:
                self._changed.wait_for(may_go_on)
                if self._is_closed or self._error is not None:
                    return
                move, after = lane.moves.popleft()
            self._make(move, after)

    def _is_next_free(self, lane: _Lane) -> bool:
        """Return True if a copy is queued and no copy to the host still reads blocks that the queued one overwrites."""
        if not lane.moves:
            return False
        return lane is self._down or self._down.busy.keys().isdisjoint(device_blocks(lane.moves[0][0].copies))

    def _make(self, move: KvMove, after: object) -> None:
        error, lane = None, self._lane(move)
        try:
            cast(KvRunner, self._runner).move_kv(move.copies, after)
        except Exception as problem:  # any error of a copy is handled like the error of a step
            _log.warning("a copy of KV failed", exc_info=True)
            error = problem
        with self._changed:
            lane.busy.subtract(device_blocks(move.copies))
            lane.busy = +lane.busy
            self._error = error or self._error
            self._changed.notify_all()
        self._notify(move, error)


def device_blocks(copies: Sequence[BlockCopy]) -> list[int]:
    """Return the device block of each copy."""
    to_host = CopyDirection.TO_HOST
    return [copy.source if copy.direction is to_host else copy.target for copy in copies]


def written_blocks(step: StepInput, block_size: int) -> Iterator[int]:
    """Yield the device blocks that requests take in this step, and those that swapped-out content is copied back to."""
    starts = {chunk.slot: chunk.num_computed // block_size for chunk in step.chunks}
    for update in step.tables:
        num_found = max(0, starts.get(update.slot, 0) - update.start)
        yield from update.block_ids[num_found:]
    yield from _loaded(step.copies)


def _loaded(copies: Sequence[BlockCopy]) -> list[int]:
    return [copy.target for copy in copies if copy.direction is CopyDirection.TO_DEVICE]
