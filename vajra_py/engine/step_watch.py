"""Detect workers that hang: each step has a time limit, derived from the times of earlier steps.

One thread checks all replicas a few times a second. A worker whose step exceeds its limit is treated like one that
died: the loop gets the same message, and the worker is discarded, which kills its processes. Its later answers are
dropped. While a step waits until another model is loaded in this process, its time does not count.

The limits depend on the wall clock, so a replay does not recompute them: a timeout is recorded like any other failure.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from vajra_py.engine.compute import LookaheadStep, StepInput
from vajra_py.engine.kv_copy import KvMove
from vajra_py.engine.worker import (
    AdapterLoaded,
    Deliver,
    Finished,
    InlineWorker,
    KvExported,
    KvImported,
    KvMoved,
    LeftFirstStage,
    ReplicaKey,
    Worker,
    WorkerNews,
)
from vajra_py.errors import ExecutorError

_log = logging.getLogger(__name__)
_FACTOR = 10.0
"""Time limit of a step, as a multiple of the duration of the longest earlier step."""
_FLOOR_S = {"cpu": 10.0}
_DEVICE_FLOOR_S = 60.0
"""Minimum time limit of a step on a GPU, in seconds: machines stall now and then, and libraries compile kernels on
first use."""
_NUM_FIRST = 8
"""Number of first steps of a worker whose times do not affect limits: they load libraries and fill caches."""
_FIRST_S = 600.0
"""Time limit of a worker's first steps, in seconds."""
_FIRST_AGAIN_S = 60.0
"""Minimum time limit of a worker's first steps, in seconds, if an earlier worker of the replica has computed more than
`_NUM_FIRST` steps."""
_LOADING_FACTOR, _LOADING_FLOOR_S = 10.0, 300.0
"""Time limit for reloading a worker: the first value times the time that loading the first workers took, but at least
the second value, in seconds."""
_PAUSE_S = 0.25


@dataclass(slots=True)
class StepTimes:
    """Durations of a replica's steps, over all its workers, without each worker's first steps.

    Attributes:
        fixed_s: configured limit in seconds; None: derived from the other attributes.
        floor_s: smallest derived limit, in seconds.
        longest_s: duration of the longest step, in seconds.
        most_tokens: number of tokens of the largest step.
    """

    fixed_s: float | None
    floor_s: float
    longest_s: float = 0.0
    most_tokens: int = 0

    def note(self, num_tokens: int, seconds: float) -> None:
        """Record the duration of a step of `num_tokens` tokens."""
        self.longest_s = max(self.longest_s, seconds)
        self.most_tokens = max(self.most_tokens, num_tokens)

    def allowed_s(self, num_tokens: int, num_before: int) -> float:
        """Return the limit in seconds of a step of `num_tokens` tokens, after `num_before` steps of its worker.

        For a step with more tokens than all earlier ones, the limit grows with the square of the number of tokens, as
        the time of attention does. Once the limit exceeds ten minutes, it grows only in proportion to this number.
        """
        if self.fixed_s is not None:
            return self.fixed_s
        growth = max(1.0, num_tokens / self.most_tokens) if self.most_tokens else 1.0
        linear = _FACTOR * self.longest_s * growth
        allowed = max(self.floor_s, linear, min(linear * growth, _FIRST_S))
        if num_before >= _NUM_FIRST:
            return allowed
        return max(allowed, _FIRST_AGAIN_S if self.longest_s else _FIRST_S)


@dataclass(slots=True, eq=False)
class _Lane:
    """Steps or copies that a worker executes one after the other."""

    num_tokens: deque[int] = field(default_factory=deque)
    """For each step in flight, its number of tokens; for a copy that is ordered with steps, 0; for a copy that is
    concurrent with steps, the number of tokens of the earlier steps that the copy waits for."""
    numbers: deque[int] = field(default_factory=deque)
    """`KvMove.number` of each copy that is concurrent with steps; empty in a lane of steps."""
    began_at: float = 0.0
    """Start of the oldest step or copy in flight, on the monotonic clock."""
    age_s: float = 0.0
    """Seconds since `began_at` without those in which this process was suspended, or the worker waited for the load of
    another model."""

    def add(self, num_tokens: int) -> None:
        """Record a step or copy that is about to be submitted to the worker."""
        if not self.num_tokens:
            self.begin(time.monotonic())
        self.num_tokens.append(num_tokens)

    def begin(self, now: float) -> None:
        """Count the time limit of the oldest step or copy in flight from `now`."""
        self.began_at, self.age_s = now, 0.0


@dataclass(slots=True, eq=False)
class _Timer:
    """Time limits of one worker's outstanding work."""

    replica: ReplicaKey
    worker: Worker
    deliver: Deliver
    times: StepTimes
    steps: _Lane = field(default_factory=_Lane)
    """Steps, and copies ordered with them."""
    down: _Lane = field(default_factory=_Lane)
    up: _Lane = field(default_factory=_Lane)
    """Copies to the device that are concurrent with steps; `down` holds those to the host."""
    num_done: int = 0
    is_over: bool = False


class StepWatch:
    """Limits the time that the workers of an engine take for their steps."""

    def __init__(self, fixed_s: float | None) -> None:
        """`fixed_s`: limit in seconds; None: derived from the times of earlier steps."""
        self._fixed_s = fixed_s
        self._times: dict[ReplicaKey, StepTimes] = {}
        self._timers: dict[ReplicaKey, _Timer] = {}
        self._gate = threading.Lock()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="vajra-steps", daemon=True)
        self._thread.start()

    def watched(self, replica: ReplicaKey, worker: Worker, deliver: Deliver) -> Deliver:
        """Watch a new worker of a replica; return the function that the worker must call instead of `deliver`."""
        times = self._times.get(replica)
        if times is None:
            floor_s = _FLOOR_S.get(worker.facts.device, _DEVICE_FLOOR_S)
            times = self._times[replica] = StepTimes(self._fixed_s, floor_s)
        timer = _Timer(replica, worker, deliver, times)
        with self._gate:
            self._timers[replica] = timer
        return lambda news: self._deliver(timer, news)

    def begin(self, replica: ReplicaKey, step: StepInput | LookaheadStep) -> None:
        """Record that a step is about to be submitted to the replica's worker."""
        wanted = step.step if isinstance(step, LookaheadStep) else step
        self._begin(replica, len(wanted.decodes) + sum(len(chunk.token_ids) for chunk in wanted.chunks))

    def begin_copy(self, replica: ReplicaKey) -> None:
        """Record that a copy ordered with the steps is about to be submitted to the replica's worker.

        It copies KV or an adapter.
        """
        self._begin(replica, 0)

    def begin_move(self, replica: ReplicaKey, move: KvMove) -> None:
        """Record that a copy of KV concurrent with later steps is about to be submitted to the replica's worker."""
        with self._gate:
            timer = self._timers.get(replica)
            if timer is not None:
                lane = timer.up if move.is_upward else timer.down
                lane.add(sum(timer.steps.num_tokens))
                lane.numbers.append(move.number)

    def _begin(self, replica: ReplicaKey, num_tokens: int) -> None:
        with self._gate:
            timer = self._timers.get(replica)
            if timer is not None:
                timer.steps.add(num_tokens)

    def close(self) -> None:
        """Stop watching."""
        self._is_closed.set()
        self._thread.join()

    def _deliver(self, timer: _Timer, news: WorkerNews) -> None:
        with self._gate:
            if timer.is_over:
                return
            if not isinstance(news, LeftFirstStage):
                self._note(timer, news)
            timer.deliver(news)

    def _note(self, timer: _Timer, news: Finished | KvExported | KvImported | KvMoved | AdapterLoaded) -> None:
        now = time.monotonic()
        timer.is_over = isinstance(news, Finished) and news.output is None
        lane = timer.steps
        if isinstance(news, KvMoved):
            lane = timer.up if news.number in timer.up.numbers else timer.down
        if lane.num_tokens:
            num_tokens = lane.num_tokens.popleft()
            if lane.numbers:
                lane.numbers.popleft()
            elif num_tokens:  # a step: a copy has an entry in `numbers`, or 0 tokens
                timer.num_done += 1
                if timer.num_done > _NUM_FIRST:
                    timer.times.note(num_tokens, min(now - lane.began_at, lane.age_s + 2 * _PAUSE_S))
        lane.begin(now)

    def _look_on(self) -> None:
        looked_at = time.monotonic()
        while not self._is_closed.wait(_PAUSE_S):
            now = time.monotonic()
            passed_s, looked_at = min(now - looked_at, 2 * _PAUSE_S), now
            with self._gate:
                late = [timer for timer in self._timers.values() if self._is_late(timer, passed_s)]
            for timer in late:
                # Discard the worker here, not when the loop reads the message that `_is_late` sent: the loop may be
                # blocked until this worker accepts a step.
                threading.Thread(target=_discard, args=(timer.worker,), name="vajra-discard", daemon=True).start()

    def _is_late(self, timer: _Timer, passed_s: float) -> bool:
        if isinstance(timer.worker, InlineWorker) and timer.worker.waits_for_load:
            return False
        is_late = False
        for lane in (timer.steps, timer.down, timer.up):
            if timer.is_over or not lane.num_tokens:
                continue
            lane.age_s += passed_s
            num_tokens = lane.num_tokens[0]
            allowed_s = timer.times.allowed_s(num_tokens, timer.num_done)
            if lane.numbers and num_tokens:
                allowed_s += timer.times.allowed_s(0, timer.num_done)
            if lane.age_s > allowed_s:
                work = f"step of {num_tokens} tokens" if num_tokens and not lane.numbers else "copy"
                what = f"it hangs: a {work} has taken {lane.age_s:.1f} s ({allowed_s:.3g} s are allowed)"
                timer.is_over = is_late = True
                timer.deliver(Finished(timer.replica, None, what))
        return is_late


class LoadLimit:
    """Limits the time for reloading a worker: one that takes longer is discarded, and its load fails."""

    def __init__(self, first_s: float) -> None:
        """`first_s`: seconds that loading the first workers took."""
        self.allowed_s = max(_LOADING_FACTOR * first_s, _LOADING_FLOOR_S)

    def wait_loaded(self, worker: Worker) -> None:
        """Wait until a worker is loaded. Raises the error of loading, or `ExecutorError` if it took too long."""
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            _discard(worker)

        timer = threading.Timer(self.allowed_s, give_up)
        timer.daemon = True
        timer.start()
        try:
            worker.wait_loaded()
        except Exception as error:
            if is_late.is_set():
                raise ExecutorError(f"its worker was not loaded within {self.allowed_s:.0f} s") from error
            raise
        finally:
            timer.cancel()


def _discard(worker: Worker) -> None:
    try:
        worker.discard()
    except Exception:
        _log.warning("what was left of a worker stays", exc_info=True)
