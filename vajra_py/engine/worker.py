"""Workers, which compute a replica: in the controller's thread, in a separate thread, or in one process per rank.

Invariants:
    - A worker gets one step at a time, or one part of a divided step, and delivers one `Finished` for each step or
      part, never before `submit` was called. With pipeline stages, it gets all parts of a step at once, and the next
      step when it has delivered `LeftFirstStage` for each of these parts.
    - Copies of KV may be submitted at any time; a worker handles them in order, but runs a `KvMove` concurrently with
      later work.
    - After a `Finished` with an error the worker is not used again. If a process dies, a `Finished` with an error may
      arrive at any time.
    - A worker in this process whose step or copy does not end is left behind: its thread cannot be killed, and its
      memory stays in use.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Protocol, TypeAlias, cast

from vajra_py.engine.compute import (
    AdapterRunner,
    KvRunner,
    LoadAdapter,
    LoadRunner,
    LookaheadRunner,
    LookaheadStep,
    ModelFacts,
    ModelRunner,
    RunnerOptions,
    StepInput,
    StepOutput,
    load_runner,
)
from vajra_py.engine.compute.model.exclusion import LOADING
from vajra_py.engine.kv_copier import KvCopier
from vajra_py.engine.kv_copy import KvContent, KvExport, KvImport, KvMove, exported
from vajra_py.errors import ExecutorError, VajraError

_log = logging.getLogger(__name__)
_END_S = 5.0
"""Seconds for which closing or discarding a worker in this process waits for its step or copy to end."""

ReplicaKey: TypeAlias = tuple[str, int]
"""Key of a replica: (replicaset, replica id)."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Message that a step (or a part of one) is complete, or that its worker is lost: `output` or `error` is set."""

    replica: ReplicaKey
    output: StepOutput | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class LeftFirstStage:
    """Message that a step (or a part of one) has left the first of several pipeline stages; the next one may enter it.

    The `Finished` of this step or part follows.
    """

    replica: ReplicaKey


@dataclass(frozen=True, slots=True)
class KvExported:
    """Message that a worker has copied KV blocks out of its memory into the buffers of `content`."""

    replica: ReplicaKey
    number: int
    content: KvContent


@dataclass(frozen=True, slots=True)
class KvImported:
    """Message that a worker has copied KV into its blocks, or, if `is_lost`, that the KV was lost before the copy."""

    replica: ReplicaKey
    number: int
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    """Message that a worker has copied an adapter into a slot."""

    replica: ReplicaKey
    number: int


@dataclass(frozen=True, slots=True)
class KvMoved:
    """Message that a worker has copied KV blocks between its device and its host memory."""

    replica: ReplicaKey
    number: int


WorkerNews: TypeAlias = Finished | LeftFirstStage | KvExported | KvImported | KvMoved | AdapterLoaded
KvTask: TypeAlias = KvExport | KvImport | KvMove
Deliver: TypeAlias = Callable[[WorkerNews], None]


class Worker(Protocol):
    """Computes the steps of one replica and delivers messages about them."""

    @property
    def facts(self) -> ModelFacts:
        """Facts of the loaded model."""

    def wait_loaded(self) -> None:
        """Wait until the weights are loaded. Raises the error of loading, or `ExecutorError` if a process died."""

    def profile_num_blocks(self, memory_fraction: float) -> int:
        """See `ModelRunner.profile_num_blocks`."""

    def start(self, num_blocks: int, num_host_blocks: int, deliver: Deliver) -> None:
        """Allocate KV memory and accept steps from now on. Raises `ExecutorError`."""

    def submit(self, step: StepInput | LookaheadStep) -> None:
        """Compute a step; its result is delivered. A `LookaheadStep` needs a `LookaheadRunner`."""

    def copy_kv(self, copy: KvTask) -> None:
        """Copy KV blocks after the submitted steps; `KvExported`, `KvImported` or `KvMoved` is delivered.

        Needs a `KvRunner`.

        Steps submitted later do not wait for a `KvMove`, unless they overwrite its blocks.
        """

    def load_adapter(self, load: LoadAdapter) -> None:
        """Copy an adapter into a slot after the submitted steps; `AdapterLoaded` is delivered.

        Needs an `AdapterRunner`.
        """

    def close(self) -> None:
        """Release memory and processes; may be called twice."""

    def discard(self) -> None:
        """Close a worker that is lost or no longer needed, without waiting for its work. Thread-safe.

        May be called again. Raises `ExecutorError` as long as a thread of the worker does not end.
        """


def close_all(workers: Iterable[Worker]) -> None:
    """Close workers concurrently, since processes take time to end."""
    threads = [threading.Thread(target=worker.close, name="vajra-close") for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def set_passive_omp_wait() -> None:
    """Make idle OpenMP threads sleep instead of spinning.

    Spinning threads slow other work on the same cores many times over.

    Only affects libraries that are loaded later, so it must be called before a tensor library is loaded.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def placed(options: RunnerOptions, ordinal: int) -> RunnerOptions:
    """Return the options with the device `cuda` replaced by one of the machine's GPUs, which replicas take in turn.
    `ordinal`: index of the GPU, modulo the number of GPUs. Options with another device are returned unchanged.
    """
    if options.device != "cuda":
        return options
    import torch

    count = torch.cuda.device_count()
    return replace(options, device=f"cuda:{ordinal % count}") if count else options


def _run_step(runner: ModelRunner, step: StepInput | LookaheadStep) -> StepOutput:
    """Return the output of a step, computed by a runner in this process."""
    if isinstance(step, StepInput):
        return runner.run(step)
    return cast(LookaheadRunner, runner).run_ahead(step)


def _copied(replica: ReplicaKey, runner: KvRunner, copy: KvExport | KvImport) -> WorkerNews:
    if isinstance(copy, KvExport):
        return KvExported(replica, copy.number, [exported(runner, copy.block_ids)])
    (buffer,) = copy.content
    runner.import_kv(copy.block_ids, buffer, copy.copies)
    return KvImported(replica, copy.number)


def described(error: BaseException) -> str:
    """Return an error's message on one line."""
    text = str(error) if isinstance(error, VajraError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


class InlineWorker:
    """Worker that computes in the submitting thread; only copies of a `KvMove` run concurrently."""

    def __init__(self, replica: ReplicaKey, runner: ModelRunner) -> None:
        self._replica = replica
        self._runner = runner
        self._deliver: Deliver | None = None
        self._copier = KvCopier(runner, self._moved)
        self._thread_id = 0
        """Identifier of the thread that computes; 0 before the first step."""

    @property
    def waits_for_load(self) -> bool:
        """True if the step in flight waits until another model is loaded in this process."""
        return LOADING.is_waiting(self._thread_id)

    @property
    def facts(self) -> ModelFacts:
        """See `Worker`."""
        return self._runner.facts

    def wait_loaded(self) -> None:
        """See `Worker`; the runner was loaded before."""

    def profile_num_blocks(self, memory_fraction: float) -> int:
        """See `Worker`."""
        return self._runner.profile_num_blocks(memory_fraction)

    def start(self, num_blocks: int, num_host_blocks: int, deliver: Deliver) -> None:
        """See `Worker`."""
        self._runner.allocate(num_blocks, num_host_blocks)
        self._deliver = deliver

    def submit(self, step: StepInput | LookaheadStep) -> None:
        """See `Worker`."""
        assert self._deliver is not None
        self._deliver(Finished(self._replica, *self._run(step)))

    def _run(self, step: StepInput | LookaheadStep) -> tuple[StepOutput | None, str | None]:
        self._thread_id = threading.get_ident()
        try:
            self._copier.wait_before(step)
            return _run_step(self._runner, step), None
        except Exception as error:  # any error ends only this worker's requests
            _log.warning("a step failed", exc_info=True)
            return None, described(error)

    def copy_kv(self, copy: KvTask) -> None:
        """See `Worker`."""
        assert self._deliver is not None
        try:
            if isinstance(copy, KvMove):
                self._copier.begin(copy)
                return
            done = _copied(self._replica, cast(KvRunner, self._runner), copy)
        except Exception as error:  # any error ends only this worker's requests
            _log.warning("a copy of KV failed", exc_info=True)
            done = Finished(self._replica, None, described(error))
        self._deliver(done)

    def _moved(self, move: KvMove, error: Exception | None) -> None:
        """Deliver the message that a copy has ended; called in the copying thread."""
        assert self._deliver is not None
        self._deliver(self._end_of(move, error))

    def _end_of(self, move: KvMove, error: Exception | None) -> KvMoved | Finished:
        return KvMoved(self._replica, move.number) if error is None else Finished(self._replica, None, described(error))

    def load_adapter(self, load: LoadAdapter) -> None:
        """See `Worker`."""
        assert self._deliver is not None
        try:
            cast(AdapterRunner, self._runner).load_adapter(load.name, load.slot)
        except Exception as error:  # any error ends only this worker's requests
            _log.warning("loading an adapter failed", exc_info=True)
            self._deliver(Finished(self._replica, None, described(error)))
            return
        self._deliver(AdapterLoaded(self._replica, load.number))

    def close(self) -> None:
        """See `Worker`; copies that have not started are dropped. A thread that does not end soon is left behind."""
        try:
            self._release()
        except ExecutorError as error:
            _log.warning("a worker of replica %s of %s is left behind: %s", self._replica[1], self._replica[0], error)

    def discard(self) -> None:
        """See `Worker`; the step in flight continues to its end."""
        self._release()

    def _release(self) -> None:
        """End the threads and free the memory. Raises `ExecutorError` if a thread does not end soon."""
        self._copier.close(_END_S)
        self._runner.close()


class ThreadWorker(InlineWorker):
    """Worker that computes in its own thread, so that replicas in one process compute concurrently."""

    def __init__(self, replica: ReplicaKey, runner: ModelRunner) -> None:
        super().__init__(replica, runner)
        self._steps: SimpleQueue[StepInput | LookaheadStep | KvTask | LoadAdapter | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"vajra-worker-{replica[1]}", daemon=True)

    def start(self, num_blocks: int, num_host_blocks: int, deliver: Deliver) -> None:
        """See `Worker`."""
        super().start(num_blocks, num_host_blocks, deliver)
        self._thread.start()

    def submit(self, step: StepInput | LookaheadStep) -> None:
        """See `Worker`."""
        self._steps.put(step)

    def copy_kv(self, copy: KvTask) -> None:
        """See `Worker`."""
        self._steps.put(copy)

    def load_adapter(self, load: LoadAdapter) -> None:
        """See `Worker`."""
        self._steps.put(load)

    def _work(self) -> None:
        while (work := self._steps.get()) is not None:
            if isinstance(work, KvTask):
                super().copy_kv(work)
            elif isinstance(work, LoadAdapter):
                super().load_adapter(work)
            else:
                super().submit(work)

    def _release(self) -> None:
        if self._thread.is_alive():
            self._steps.put(None)
            self._thread.join(_END_S)
            if self._thread.is_alive():
                LOADING.forget(self._thread_id)
                raise ExecutorError("its thread does not return from a step; its memory is not freed")
        super()._release()


def load_in_process(
    replica: ReplicaKey, options: RunnerOptions, ordinal: int, threaded: bool, load: LoadRunner = load_runner
) -> Worker:
    """Load a runner and return a worker in this process. Raises the errors of loading the model."""
    set_passive_omp_wait()
    runner = load(placed(options, ordinal))
    return ThreadWorker(replica, runner) if threaded else InlineWorker(replica, runner)


def lost(replica: ReplicaKey, what: str) -> str:
    """Return the message for requests that ended because their replica was lost; `what`: the reason of the loss."""
    return f"replica {replica[1]} of {replica[0]} failed: {what}"


def facts_of_ranks(loaded: Sequence[ModelFacts]) -> ModelFacts:
    """Return the facts of a replica's first rank, with the devices of all its ranks."""
    return replace(loaded[0], device_ids=tuple(name for one in loaded for name in one.device_ids))


def checked_facts(loaded: Sequence[ModelFacts]) -> ModelFacts:
    """Return the first of these model facts. Raises `ExecutorError` if they are not all of the same model."""
    first = loaded[0]
    for facts in loaded[1:]:
        if facts.num_parameters != first.num_parameters or facts.eos_token_ids != first.eos_token_ids:
            raise ExecutorError("workers: replicas loaded different models. Every replica loads the same directory.")
    return first
