"""Replicas computed in separate processes, one per rank.

The controller sends every rank the same steps through pipes and waits for all answers (`rank_answers`). If a rank dies,
its replica is lost, but nothing else.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

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
    load_runner,
)
from vajra_py.engine.kv_copier import KvCopier
from vajra_py.engine.kv_copy import KvExport, KvMove, RankCopy, RankMove, SharedBuffer
from vajra_py.engine.rank_answers import RankAnswers
from vajra_py.engine.worker import (
    Deliver,
    Finished,
    KvTask,
    ReplicaKey,
    described,
    facts_of_ranks,
    placed,
    set_passive_omp_wait,
)
from vajra_py.engine.worker_logs import WorkerLogs
from vajra_py.errors import ExecutorError
from vajra_py.runtime.kv import BlockCopy
from vajra_py.runtime.support.gc_control import existing_objects_frozen

_STEPS = ("run", "run_ahead")
_SENT_APART = True
"""Placeholder in a message for a shared buffer; the buffer's file descriptor is sent right after the message."""
_JOIN_S = 10.0
_CLOSE_S = 2.0
"""Seconds for which `close` waits for processes to end by themselves, and again after killing them."""


def serve_steps(
    pipe: Connection, options: RunnerOptions, ordinal: int, load: LoadRunner, logs: WorkerLogs | None = None
) -> None:
    """Run a worker process: load the runner, then answer messages from the pipe until it is closed."""
    if logs is not None:
        logs.install()
    set_passive_omp_wait()
    try:
        runner = load(placed(options, ordinal))
    except BaseException as error:
        _send(pipe, error)
        return
    _send(pipe, runner.facts)
    rank = _Rank(pipe, runner)
    try:
        with existing_objects_frozen():
            rank.work()
    except (EOFError, KeyboardInterrupt):
        pass
    finally:
        rank.close()
    # With a tensor library loaded, the interpreter's normal exit takes seconds and does nothing that is still needed.
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


class _Rank:
    """One rank: handles the messages from its pipe, and answers."""

    def __init__(self, pipe: Connection, runner: ModelRunner) -> None:
        self._pipe = pipe
        self._runner = runner
        self._answers = threading.Lock()
        """Lock held while an answer is sent, since copies answer concurrently with steps."""
        self._copier = KvCopier(runner, self._moved)
        self._others: Mapping[str, Callable[..., None]] = {
            "export_kv": self._export,
            "import_kv": self._import,
            "move_kv": self._copier.begin,
            "load_adapter": self._load_adapter,
        }
        """Handlers of messages other than steps, by type."""

    def work(self) -> None:
        """Handle messages until the pipe is closed."""
        while (message := self._pipe.recv()) is not None:
            name, arguments = message
            try:
                if name in self._others:
                    self._others[name](*arguments)
                    continue
                if name in _STEPS:
                    self._copier.wait_before(*arguments)
                self._answer(getattr(self._runner, name)(*arguments))
                if name == "run_ahead":
                    cast(LookaheadRunner, self._runner).begin_ahead()
            except Exception as error:
                self._fail(error)

    def close(self) -> None:
        """Release everything; a copy that does not end in time continues until the process ends."""
        with suppress(ExecutorError):
            self._copier.close(_CLOSE_S)
        self._runner.close()

    def _answer(self, answer: Any) -> None:
        with self._answers:
            self._pipe.send(answer)

    def _fail(self, error: Exception) -> None:
        with self._answers:
            _send(self._pipe, error)

    def _export(self, number: int, block_ids: Sequence[int]) -> None:
        """Copy KV blocks into shared memory; send the answer, and then the memory's descriptor."""
        runner = cast(KvRunner, self._runner)
        with closing(SharedBuffer.of_size(len(block_ids) * runner.kv_block_bytes)) as buffer:
            runner.export_kv(block_ids, buffer.array())
            with self._answers:
                self._pipe.send(RankCopy(number, _SENT_APART))
                buffer.send(self._pipe)

    def _import(self, number: int, block_ids: Sequence[int], copies: Sequence[BlockCopy]) -> None:
        """Copy shared memory into KV blocks; the memory's descriptor follows the message in the pipe."""
        with closing(SharedBuffer.receive(self._pipe)) as buffer:
            cast(KvRunner, self._runner).import_kv(block_ids, buffer.array(), copies)
        self._answer(RankCopy(number))

    def _load_adapter(self, load: LoadAdapter) -> None:
        """Load an adapter, and send `load` back as the answer."""
        cast(AdapterRunner, self._runner).load_adapter(load.name, load.slot)
        self._answer(load)

    def _moved(self, move: KvMove, error: Exception | None) -> None:
        """Send the answer to a `KvMove` that has ended: `RankMove`, or the copy's error."""
        with suppress(OSError):  # raised if the controller has closed the pipe; this process then ends anyway
            if error is None:
                self._answer(RankMove(move.number))
            else:
                self._fail(error)


def connection_writable(pipes: Sequence[Connection]) -> list[Connection]:
    """Return the pipes that accept a message now; a pipe may be full if its process reads nothing."""
    return [pipe for pipe in pipes if not pipe.closed and _takes_more(pipe)]


def _takes_more(pipe: Connection) -> bool:
    poll = select.poll()
    poll.register(pipe.fileno(), select.POLLOUT)
    return bool(poll.poll(0))


def _send(pipe: Connection, answer: Any) -> None:
    try:
        pipe.send(answer)
    except Exception:  # the answer is an error that cannot be pickled
        pipe.send(ExecutorError(described(answer)))


class ProcessWorker:
    """The processes of one replica.

    Several workers load concurrently: create all of them first, then call `wait_loaded` of each.
    """

    def __init__(
        self,
        replica: ReplicaKey,
        options: RunnerOptions,
        first_ordinal: int,
        load: LoadRunner = load_runner,
        context: SpawnContext | ForkServerContext | None = None,
    ) -> None:
        """Start the processes with the start method of `context`; None: spawn."""
        self._replica = replica
        self._rendezvous: str | None = None
        self._facts: ModelFacts | None = None
        self._deliver: Deliver | None = None
        self._closes = threading.Lock()
        self._receiver: threading.Thread | None = None
        self._closing = False
        self._options = options
        ranks = options.num_ranks
        if ranks > 1:
            self._rendezvous = tempfile.mkdtemp(prefix="vajra-ranks-")
            options = replace(options, rendezvous=f"file://{Path(self._rendezvous) / 'store'}")
        context = context or get_context("spawn")
        set_passive_omp_wait()
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve_steps,
                args=(theirs, replace(options, rank=rank), first_ordinal + rank, load, WorkerLogs.of_this_process()),
                name=f"vajra-worker-{replica[1]}-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def wait_loaded(self) -> None:
        """See `Worker`: waits for every rank."""
        self._facts = facts_of_ranks(self._answers())

    @property
    def facts(self) -> ModelFacts:
        """See `Worker`."""
        assert self._facts is not None
        return self._facts

    def profile_num_blocks(self, memory_fraction: float) -> int:
        """See `Worker`; return the smallest number over all ranks. Ranks on one device share its memory."""
        most_sharing = max(Counter(self.facts.device_ids).values())
        return int(min(self._call("profile_num_blocks", memory_fraction / most_sharing)))

    def start(self, num_blocks: int, num_host_blocks: int, deliver: Deliver) -> None:
        """See `Worker`."""
        self._call("allocate", num_blocks // self._options.kv_groups, num_host_blocks)
        self._deliver = deliver
        self._receiver = threading.Thread(target=self._receive, name=f"vajra-pipe-{self._replica[1]}", daemon=True)
        self._receiver.start()

    def submit(self, step: StepInput | LookaheadStep) -> None:
        """See `Worker`."""
        name = "run" if isinstance(step, StepInput) else "run_ahead"
        for pipe in self._pipes:
            try:
                pipe.send((name, (step,)))
            except OSError:
                return  # the process has died, which the receiving thread reports

    def copy_kv(self, copy: KvTask) -> None:
        """See `Worker`: each rank copies its part.

        Copies between replicas go through memory that the processes share by its descriptor.
        """
        for rank, pipe in enumerate(self._pipes):
            try:
                if isinstance(copy, KvExport):
                    pipe.send(("export_kv", (copy.number, copy.block_ids)))
                elif isinstance(copy, KvMove):
                    pipe.send(("move_kv", (copy,)))
                else:
                    pipe.send(("import_kv", (copy.number, copy.block_ids, copy.copies)))
                    copy.content[rank].send(pipe)
            except OSError:
                return  # the process has died, which the receiving thread reports

    def load_adapter(self, load: LoadAdapter) -> None:
        """See `Worker`."""
        for pipe in self._pipes:
            try:
                pipe.send(("load_adapter", (load,)))
            except OSError:
                return  # the process has died, which the receiving thread reports

    def close(self) -> None:
        """See `Worker`; concurrent calls wait for the first."""
        self._closing = True
        with self._closes:
            self._close()

    def _close(self) -> None:
        writable = connection_writable(self._pipes)
        for pipe in writable:
            with suppress(OSError):
                pipe.send(None)
        deadline = time.monotonic() + (_CLOSE_S if len(writable) == len(self._pipes) else 0.0)
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            if process.is_alive():
                process.kill()  # SIGKILL: the process hangs, or is stopped and handles no other signal
        for process in self._processes:
            process.join(_CLOSE_S)
        if self._receiver is not None:
            self._receiver.join(_CLOSE_S)
            self._receiver = None
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            with suppress(ValueError):  # raised if the start of another process has reaped this one meanwhile
                process.close()
        self._processes = []
        if self._rendezvous is not None:
            shutil.rmtree(self._rendezvous, ignore_errors=True)

    def discard(self) -> None:
        """See `Worker`; all ranks are killed, since some may wait for one that has died."""
        for process in list(self._processes):
            with suppress(ValueError):  # a concurrent call has closed the process object
                process.kill()
        self.close()

    def _call(self, name: str, *arguments: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((name, arguments))
        return self._answers()

    def _answers(self) -> list[Any]:
        """Return one answer per rank; raise the first error among them."""
        answers: dict[int, Any] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            for ready in connection.wait(list(waiting)):
                rank = waiting.pop(ready)  # type: ignore[call-overload]
                try:
                    answer = self._pipes[rank].recv()
                except (EOFError, OSError):
                    answer = ExecutorError(self._died(rank))
                if isinstance(answer, BaseException):  # raised at once: other ranks may wait forever for this one
                    raise answer
                answers[rank] = answer
        return [answers[rank] for rank in range(len(self._pipes))]

    def _died(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(_JOIN_S)
        code = process.exitcode
        how = "is gone" if code is None else f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        of = f", rank {rank} of {len(self._pipes)}" if len(self._pipes) > 1 else ""
        return f"worker process {process.pid}{of} {how}"

    def _receive(self) -> None:
        """Deliver results as they arrive, until a rank is lost or the worker is closed."""
        assert self._deliver is not None
        pipes = list(self._pipes)
        answers = RankAnswers(self._replica, self._options)
        while True:
            for ready in connection.wait(pipes):
                rank = pipes.index(ready)  # type: ignore[arg-type]
                try:
                    answer = pipes[rank].recv()
                    if isinstance(answer, RankCopy) and answer.part is not None:
                        answer = replace(answer, part=SharedBuffer.receive(pipes[rank]))
                except (EOFError, OSError):
                    answer = ExecutorError(self._died(rank))
                if isinstance(answer, BaseException):
                    if not self._closing:
                        self._deliver(Finished(self._replica, None, described(answer)))
                    return
                for news in answers.take(rank, answer):
                    self._deliver(news)
