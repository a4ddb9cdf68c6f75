"""Restart replicas whose worker is lost, with a pause, while the others go on.

Attempts are bounded: so many in a row, with pauses that double. A replica that computed for a while starts to count anew.
What comes of it reaches the loop as a message, so that nothing changes but between two steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from vajra_py.engine.worker import ReplicaKey, Worker, said

_log = logging.getLogger(__name__)
LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True)
class Restarted:
    """A replica has a worker again, ready for steps."""

    replica: ReplicaKey
    worker: Worker


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A replica will not come back."""

    replica: ReplicaKey
    why: str


Outcome: TypeAlias = Restarted | GivenUp


class Restarter(Protocol):
    """Who finds another worker for a replica that lost its own."""

    def lost(self, replica: ReplicaKey, worker: Worker) -> bool:
        """This worker is lost. Whether another one is tried for; what comes of it is told once."""

    def close(self) -> None:
        """Try no more; nothing is told after this."""


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """How often and how fast.

    Attributes:
        max_restarts: attempts in a row.
        backoff_s: pause before the first one, seconds; it doubles from one to the next.
        settled_s: a replica that computed for so long counts its attempts anew, seconds.
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
"""Made like a `Supervisor`."""


@dataclass(slots=True)
class _Record:
    num_attempts: int = 0
    up_since: float = 0.0


class Supervisor:
    """Loads workers in threads of its own, one for each replica that is down."""

    def __init__(
        self,
        limits: RestartLimits,
        begin: Callable[[ReplicaKey], Worker],
        finish: Callable[[ReplicaKey, Worker], None],
        tell: Callable[[Outcome], None],
    ) -> None:
        """`begin` makes a worker that may still be loading; `finish` waits for it and gives it its memory."""
        self._limits = limits
        self._begin = begin
        self._finish = finish
        self._tell = tell
        self._records: dict[ReplicaKey, _Record] = {}
        self._loading: dict[ReplicaKey, Worker] = {}
        self._threads: dict[ReplicaKey, threading.Thread] = {}
        self._gate = threading.Lock()
        self._closing = threading.Event()

    def lost(self, replica: ReplicaKey, worker: Worker) -> bool:
        """See `Restarter`."""
        record = self._records.setdefault(replica, _Record())
        if time.monotonic() - record.up_since >= self._limits.settled_s:
            record.num_attempts = 0
        comes_back = record.num_attempts < self._limits.max_restarts
        target = self._replace if comes_back else self._discard
        name = f"vajra-restart-{replica[0]}-{replica[1]}"
        thread = threading.Thread(target=target, args=(replica, worker), name=name, daemon=True)
        self._threads[replica] = thread
        thread.start()
        return comes_back

    def close(self) -> None:
        """See `Restarter`; waits until nothing is being loaded."""
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
        while record.num_attempts < limits.max_restarts:
            pause_s = min(limits.backoff_s * 2.0**record.num_attempts, LONGEST_PAUSE_S)
            if self._closing.wait(pause_s):
                return
            record.num_attempts += 1
            _log.warning(
                "replica %s of %s: attempt %d of %d to start it again",
                *(replica[1], replica[0], record.num_attempts, limits.max_restarts),
            )
            try:
                made = self._load(replica)
            except Exception as error:  # whatever it was, the next attempt may go better
                why = said(error)
                _log.warning("replica %s of %s did not start: %s", replica[1], replica[0], why)
                continue
            if made is None:
                return
            record.up_since = time.monotonic()
            self._tell(Restarted(replica, made))
            return
        self._tell(GivenUp(replica, f"{limits.max_restarts} attempts to start it again failed; the last: {why}"))

    def _load(self, replica: ReplicaKey) -> Worker | None:
        """A worker that is ready; None when nobody wants it any more."""
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
