"""Restarts of replicas whose worker is lost: a new worker is loaded after a pause, while the other replicas serve.

Pauses back off exponentially: they double with every restart, up to `LONGEST_PAUSE_S`, and are reset once the replica
was up for `settled_s`. A replica is restarted any number of times, as long as it computes a step after each start. Only
consecutive failed starts are counted, and after too many of them the replica is given up. A start also fails as long
as a thread of the replica's last worker does not end, since that worker's memory is still in use, and its device may
hang. The outcome of a restart reaches the loop as a message, so that only the loop's own thread changes its state.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from vajra_py.engine.worker import ReplicaKey, Worker, described

_log = logging.getLogger(__name__)
LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True)
class Restarted:
    """Message that a replica has a worker again, ready for steps."""

    replica: ReplicaKey
    worker: Worker


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Message that a replica will not be restarted."""

    replica: ReplicaKey
    why: str


Outcome: TypeAlias = Restarted | GivenUp


class Restarter(Protocol):
    """Provider of a new worker for a replica that lost its own."""

    def lost(self, replica: ReplicaKey, worker: Worker, *, has_computed: bool) -> bool:
        """Handle the loss of `worker`, which has completed a step if `has_computed` is True.

        Return True if the replica will be restarted. A single message then reports the outcome, after one or more
        attempts: `Restarted` or `GivenUp`.
        """

    def close(self) -> None:
        """Stop restarting; no outcome is reported after this."""


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """Limits of restarts.

    Attributes:
        max_restarts: number of consecutive starts that may fail.
        backoff_s: pause before the first restart, in seconds; it doubles with each further one.
        settled_s: seconds that a replica must be up for the pauses to be reset.
    """

    max_restarts: int
    backoff_s: float
    settled_s: float


MakeRestarter: TypeAlias = Callable[
    [
        RestartLimits,
        Callable[[ReplicaKey], Worker],
        Callable[[ReplicaKey, Worker], None],
        Callable[[Outcome], None],
    ],
    Restarter,
]
"""Factory of a `Restarter`, with the arguments of `Supervisor`."""


@dataclass(slots=True)
class _Record:
    num_failed: int = 0
    """Number of consecutive starts that failed."""
    num_pauses: int = 0
    """Number of pauses since the last reset."""
    up_since: float = 0.0


class Supervisor:
    """Loads workers in threads, one for each replica that is down."""

    def __init__(
        self,
        limits: RestartLimits,
        begin: Callable[[ReplicaKey], Worker],
        finish: Callable[[ReplicaKey, Worker], None],
        notify: Callable[[Outcome], None],
        pause: Callable[[float], bool] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`begin` creates a worker that may still be loading; `finish` waits for it and allocates its KV memory.

        `pause` waits for a number of seconds and returns True if `close` cut it short; `now` is a clock. Tests
        replace these two.
        """
        self._limits = limits
        self._begin = begin
        self._finish = finish
        self._notify = notify
        self._records: dict[ReplicaKey, _Record] = {}
        self._loading: dict[ReplicaKey, Worker] = {}
        self._threads: dict[ReplicaKey, threading.Thread] = {}
        self._gate = threading.Lock()
        self._closing = threading.Event()
        self._pause = pause or self._closing.wait
        self._now = now

    def lost(self, replica: ReplicaKey, worker: Worker, *, has_computed: bool) -> bool:
        """See `Restarter`."""
        record = self._records.setdefault(replica, _Record(up_since=self._now()))
        if has_computed:  # then the start has not failed
            record.num_failed = 0
        if self._now() - record.up_since >= self._limits.settled_s:
            record.num_failed = record.num_pauses = 0
        comes_back = record.num_failed < self._limits.max_restarts
        target = self._replace if comes_back else self._discard
        name = f"vajra-restart-{replica[0]}-{replica[1]}"
        thread = threading.Thread(target=target, args=(replica, worker), name=name, daemon=True)
        self._threads[replica] = thread
        thread.start()
        return comes_back

    def close(self) -> None:
        """See `Restarter`; waits until no worker is being loaded."""
        with self._gate:
            self._closing.set()
            loading = list(self._loading.values())
        for worker in loading:
            worker.discard()
        for thread in self._threads.values():
            thread.join()

    def _discard(self, replica: ReplicaKey, worker: Worker) -> None:
        try:
            worker.discard()
        except Exception:
            _log.warning("what was left of a worker of replica %s of %s stays", replica[1], replica[0], exc_info=True)

    def _replace(self, replica: ReplicaKey, worker: Worker) -> None:
        self._discard(replica, worker)
        limits, record, why = self._limits, self._records[replica], ""
        while record.num_failed < limits.max_restarts:
            pause_s = min(limits.backoff_s * 2.0 ** min(record.num_pauses, 32), LONGEST_PAUSE_S)
            record.num_pauses += 1
            if self._pause(pause_s):
                return
            # The start counts as failed until the replica has completed a step, or has been up for `settled_s`.
            record.num_failed += 1
            _log.warning(
                "replica %s of %s is started again (%d starts in a row have failed, %d may)",
                *(replica[1], replica[0], record.num_failed - 1, limits.max_restarts),
            )
            try:
                worker.discard()  # again, since it raises as long as a thread of the worker does not end
                made = self._load(replica)
            except Exception as error:  # any error; the next attempt may succeed
                why = described(error)
                _log.warning("replica %s of %s did not start: %s", replica[1], replica[0], why)
                continue
            if made is None:
                return
            record.up_since = self._now()
            self._notify(Restarted(replica, made))
            return
        self._notify(GivenUp(replica, f"{limits.max_restarts} starts in a row failed; the last: {why}"))

    def _load(self, replica: ReplicaKey) -> Worker | None:
        """Return a worker that is ready for steps; None if the supervisor was closed meanwhile."""
        worker = self._begin(replica)
        with self._gate:
            self._loading[replica] = worker
            is_wanted = not self._closing.is_set()
        try:
            if is_wanted:
                self._finish(replica, worker)
        except BaseException:
            self._discard(replica, worker)
            if self._closing.is_set():
                return None
            raise
        finally:
            with self._gate:
                del self._loading[replica]
                is_wanted = not self._closing.is_set()
        if not is_wanted:
            self._discard(replica, worker)
            return None
        return worker
