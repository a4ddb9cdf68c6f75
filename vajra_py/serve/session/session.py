"""Life cycle of the engine behind a server: load, submit, and shut down without losing a request.

One thread loads the engine and then runs its loop. The other methods are called in the event loop's thread.

Invariants:
    - A request that `submit` accepted always gets an end on its stream, even if the engine fails.
    - Once the engine's thread has ended, `submit` raises.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from vajra_py.config import SystemConfig
from vajra_py.contract.observer import EndReason, Observer
from vajra_py.engine.build import Engine
from vajra_py.engine.client import EngineClient
from vajra_py.engine.clock import WallClock
from vajra_py.engine.config import ModelBackendConfig
from vajra_py.engine.loop import EngineLoop
from vajra_py.engine.outputs import Submission
from vajra_py.engine.params import PromptLimits
from vajra_py.errors import ConfigError, ExecutorError, Problem, VajraError
from vajra_py.experiment.runs.recording import RunRecording, SessionEnd
from vajra_py.plugins import Registry
from vajra_py.runtime.records.input_log import PolicyChange
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.serving.controller import Controller
from vajra_py.runtime.serving.eligibility import AdmissionLimits
from vajra_py.runtime.serving.policy_swap import Swapped
from vajra_py.serve.session.output_streams import SHUTTING_DOWN, LoopBridge, OutputStream

_log = logging.getLogger(__name__)
STOP_S = 2.0
"""Seconds for the engine's thread to stop after `close` requested it."""
_KILL_S = 0.5
"""Seconds for the engine's thread to stop after its workers were killed; the thread may have been submitting a step."""
_GIVE_BACK_S = 3.0
_WRITE_S = 1.5
"""Seconds for completing the recording of an engine that hangs."""
RECORD_S = 30.0
"""Seconds for completing the recording of an engine that has stopped; this writes its tables."""


class SessionState(Enum):
    """State of a session."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    """The session finishes its requests and accepts no more."""
    CLOSED = "closed"
    FAILED = "failed"


class Unavailable(Exception):
    """The session accepts no requests now; the message is the reason."""


@dataclass(frozen=True, slots=True)
class SessionParts:
    """Parts of a session.

    Attributes:
        config: experiment or system, whose backend computes with a model.
        registry: installed policies.
        recording: recording of the run; None: no recording.
        replaced: fields of `EngineServices` to override, for tests.
    """

    config: SystemConfig
    registry: Registry
    recording: RunRecording | None = None
    replaced: dict[str, Any] | None = None


class EngineSession:
    """One engine behind a server."""

    def __init__(self, parts: SessionParts) -> None:
        settings = parts.config.backend.settings
        if not isinstance(settings, ModelBackendConfig):
            message = f"a server needs a backend that computes with a model (got {parts.config.backend.kind!r})"
            raise ConfigError(
                Problem("backend", message, "Allowed: `backend: {engine: {model: …}}`, or vllm in its place")
            )
        self.config = parts.config
        replaced = {"threaded": True, "make_clock": self._clock, **(parts.replaced or {})}
        self.client = EngineClient(parts.config, parts.registry, **replaced)
        self.client.refusal = lambda: Unavailable(self.why_unavailable())
        self.state = SessionState.LOADING
        self.error: BaseException | None = None
        self.watchers: list[Callable[[Controller], Sequence[Observer]]] = []
        """Called in the engine's thread when the engine is loaded; each returns observers for it."""
        self.on_formed: Callable[[str, float], None] | None = None
        """Called after each step was formed, with (replicaset, seconds that forming the step took); `watchers` may set
        it.
        """
        self.clock_zero_ns = 0
        """Start of the engine's clock, in nanoseconds since 1970."""
        self._parts = parts
        self._bridge: LoopBridge | None = None
        self._load_gate = threading.Lock()
        self._is_loaded = False
        self._is_abandoned = False
        """True if the session was closed while the engine was being loaded; the engine's thread then only releases the
        engine.
        """
        self._changed: asyncio.Event | None = None
        self.is_left_behind = False
        """True if the session was closed although part of it still hangs, so that the process must be ended."""
        self.is_stuck = False
        """True if the part that hangs is the engine's own thread."""
        self._has_stopped = False
        """True if the loop has ended and all clients were notified; the recording and the workers are not released
        yet."""
        self._records_end = threading.Lock()
        """Lock held while the recording is being completed."""
        self._is_recorded = False
        self._given_up: VajraError | None = None
        """Error that ends the session although its loop could continue."""
        self._thread = threading.Thread(target=self._run, name="vajra-engine", daemon=True)

    # Methods that run in the event loop's thread

    def start(self) -> None:
        """Start to load the engine; returns at once."""
        loop = asyncio.get_running_loop()
        self._bridge = LoopBridge(loop)
        self._changed = asyncio.Event()
        self._thread.start()

    async def loaded(self) -> None:
        """Wait until the engine serves. Raises the error of loading."""
        await self._until(lambda: self.state is not SessionState.LOADING)
        if self.error is not None:
            raise self.error

    async def ended(self) -> None:
        """Wait until the session has ended, for any reason."""
        await self._until(lambda: self.state in (SessionState.CLOSED, SessionState.FAILED))

    async def _until(self, holds: Callable[[], bool]) -> None:
        assert self._changed is not None
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    @property
    def engine(self) -> Engine | None:
        """Engine of the session; None before it is loaded."""
        return self.client.engine

    @property
    def _loop(self) -> EngineLoop | None:
        return self.client.loop

    @property
    def controller(self) -> Controller | None:
        """Controller of the engine; None before it is loaded. Its statistics may be read from any thread."""
        return None if self.engine is None else self.engine.controller

    @property
    def num_replicas_up(self) -> int:
        """Number of replicas that are up; 0 unless the session is ready or draining."""
        if self.engine is None or self.state not in (SessionState.READY, SessionState.DRAINING):
            return 0
        return sum(not one.is_lost for one in self.engine.replicas.values())

    @property
    def is_ready(self) -> bool:
        """True if requests are accepted and some replicaset can run them."""
        return self.state is SessionState.READY and len(self.unavailable()) < len(self.config.effective_replicasets)

    @property
    def has_ended(self) -> bool:
        """True if the session can serve no more requests."""
        lost = self._loop is not None and self._loop.failed is not None
        return lost or self._given_up is not None or self.state in (SessionState.FAILED, SessionState.CLOSED)

    @property
    def num_restarting(self) -> int:
        """Number of failed replicas that are being restarted."""
        return 0 if self._loop is None else self._loop.num_restarting

    def unavailable(self) -> dict[str, str]:
        """Return a mapping from each replicaset that accepts no requests to the reason; empty while the engine is not
        loaded.
        """
        found = {}
        blocked = "" if self._loop is None else self._loop.blocked
        for name, one in ({} if self.controller is None else self.controller.replicasets).items():
            if one.out_of_service:
                found[name] = one.out_of_service
            elif blocked:
                found[name] = f"a policy is blocked: {blocked}"
            elif not one.num_up:
                loss = "" if self._loop is None else self._loop.last_loss
                found[name] = f"no replica is up ({loss}); {self.num_restarting} are being started again"
        return found

    def prompt_limits(self, replicaset: str) -> PromptLimits:
        """Return the prompt limits of a replicaset."""
        assert self.engine is not None
        return self.engine.prompt_limits_of(replicaset)

    def admission(self, replicaset: str) -> AdmissionLimits:
        """Return the queue bounds of a replicaset."""
        assert self.controller is not None
        return self.controller.replicasets[replicaset].admission

    def submit(self, streams: Sequence[OutputStream]) -> None:
        """Submit outputs to the engine, all or none. Raises `Unavailable`."""
        assert self._bridge is not None
        for stream in streams:
            self._bridge.connect(stream)
        self.client.submit([stream.submission for stream in streams])

    def abort(self, streams: Sequence[OutputStream]) -> None:
        """Abort outputs; ended ones are not affected."""
        self.client.abort(stream.request_id for stream in streams if stream.end is None)

    async def swap_policy(self, change: PolicyChange) -> Swapped:
        """Swap a policy between two steps.

        Raises `Unavailable`, or the error that prevents the swap; the old policy then stays.
        """
        try:
            return await self.client.swap(change)
        except ExecutorError as error:  # the engine ended before the swap
            raise Unavailable(str(error)) from None

    def why_unavailable(self) -> str:
        """Return the reason for which requests are refused, as text for clients."""
        if self.state is SessionState.LOADING:
            return "the model is being loaded"
        if self.state is SessionState.READY:
            return "; ".join(f"{name}: {why}" for name, why in self.unavailable().items())
        if self.state is SessionState.FAILED:
            return "the engine has failed; the server's log says why"
        return SHUTTING_DOWN

    @property
    def num_open(self) -> int:
        """Number of accepted outputs that have not ended."""
        return self.client.num_open

    def drain(self) -> None:
        """Stop accepting requests."""
        self.client.refuse()
        if self.state is SessionState.READY:
            self._set_state(SessionState.DRAINING)

    def end_if_out_of_service(self) -> None:
        """End with an error if policies took every replicaset out of service.

        Called by servers whose policies cannot be swapped.
        """
        if self.state is not SessionState.READY or self.controller is None or self._given_up is not None:
            return
        replicasets = self.controller.replicasets.values()
        if all(one.out_of_service for one in replicasets):
            self._given_up = ExecutorError(f"engine: {self.why_unavailable()}")
            assert self._loop is not None
            self._loop.stop()

    @property
    def is_writing(self) -> bool:
        """True while the recording is being completed."""
        return self._records_end.locked()

    async def close(self, stop_s: float = STOP_S) -> None:
        """End all remaining requests and the engine.

        Return when the engine's thread has ended or was left behind (`is_left_behind`).

        If the thread does not stop within `stop_s`, the engine's workers are killed. If the thread still does not stop,
        clients are answered and the recording is completed without it. Workers that are not released in time are left
        behind too.
        """
        self.drain()
        if self._thread.ident is None or self.is_left_behind or self._abandon_load():
            return
        await self._until(lambda: self.state is not SessionState.LOADING)
        if self._loop is not None:
            self._loop.stop()
        if self._loop is not None and self._loop.blocked:
            stop_s = _KILL_S
        if not await self._within(stop_s, lambda: self._has_stopped):
            assert self.engine is not None
            self.engine.discard_workers()
            if not await self._within(_KILL_S, lambda: self._has_stopped):
                await self._leave_thread()
                return
        await self._within(RECORD_S, lambda: self._is_recorded)
        if not await self._within(_GIVE_BACK_S, lambda: self.state in (SessionState.CLOSED, SessionState.FAILED)):
            _log.warning("workers are not given back within %g s; they are left behind", _GIVE_BACK_S)
            self.is_left_behind = True
            return
        await asyncio.to_thread(self._thread.join)

    async def _within(self, limit_s: float, holds: Callable[[], bool]) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._until(lambda: holds() or self.state is SessionState.FAILED), limit_s)
        return holds() or self.state is SessionState.FAILED

    async def _leave_thread(self) -> None:
        """End the session without waiting for the engine's thread."""
        why = "" if self._loop is None else self._loop.blocked
        self.is_left_behind = self.is_stuck = True
        self.error = error = ExecutorError(f"engine: it does not stop{': ' if why else ''}{why}")
        _log.error("%s", error)
        self.client.end_open(None)
        writer = threading.Thread(target=self._end_recording, args=(error,), name="vajra-recording", daemon=True)
        writer.start()
        await self._within(_WRITE_S, lambda: self._is_recorded)
        self._set_state(SessionState.FAILED)

    def _abandon_load(self) -> bool:
        """Close the session without waiting for the engine to load; return False if it is not loading."""
        if self._is_abandoned:
            return True
        with self._load_gate:
            if self._is_loaded or self.state is not SessionState.LOADING:
                return False
            self._is_abandoned = True
        if self._parts.recording is not None:
            self._parts.recording.finish(
                None, ExecutorError("engine: the server was stopped while the model was being loaded")
            )
        self.state = SessionState.CLOSED
        if self._changed is not None:
            self._changed.set()
        return True

    # Methods that run in the engine's thread

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            if not self._load():
                return
            error = self.client.run() or self._why_it_ended()
        except BaseException as raised:  # whatever the error, every client must be notified
            if self._is_abandoned:
                return
            error = raised
        self.client.end(error)  # notifies clients before `_finish`, which may have to wait for a step
        if self.is_left_behind:
            return
        self.error = error
        self._has_stopped = True
        self._notify_changed()
        try:
            self._finish(error)
        except BaseException as raised:
            _log.exception("closing the engine failed")
            error = error or raised
        self.error = error
        if error is not None:
            expected = isinstance(error, VajraError)
            _log.error("the engine ended: %s", error, exc_info=None if expected else error)
        self._set_state(SessionState.CLOSED if error is None else SessionState.FAILED)

    def _why_it_ended(self) -> VajraError | None:
        """Return the error that ended the loop; None if it was stopped on purpose."""
        assert self._loop is not None
        if self._loop.failed is not None:
            return ExecutorError(f"engine: no replica is left, and none is started again ({self._loop.failed})")
        return self._given_up

    def _load(self) -> bool:
        """Load the engine and begin to serve; return False if the session was closed meanwhile."""
        parts = self._parts
        engine = self.client.load()
        with self._load_gate:
            self._is_loaded = not self._is_abandoned
        if self._is_abandoned:
            engine.close()
            return False
        self.client.engine = engine
        recording = parts.recording
        if recording is not None:
            recording.begin(engine.description(), engine.controller)
        kept = () if recording is None else recording.observers
        found = [one for make in self.watchers for one in make(engine.controller)]
        engine.controller.watch([*found, *kept])
        note = None if recording is None else recording.note
        loop = self.client.start(serves=True, note=note, isolates_policies=True)
        loop.on_formed = self.on_formed
        loop.on_failed = lambda _: loop.stop()
        if recording is not None:
            self.client.on_ended = partial(_note_end, recording)
        self.client.accept()
        self._set_state(SessionState.READY)
        return True

    def _clock(self) -> WallClock:
        self.clock_zero_ns = time.time_ns()
        return WallClock()

    def _finish(self, error: BaseException | None) -> None:
        try:
            self._end_recording(error)
        finally:
            if self.engine is not None:
                self.engine.close()

    def _end_recording(self, error: BaseException | None) -> None:
        """Complete the recording's folder; only the first call has an effect."""
        recording = self._parts.recording
        try:
            with self._records_end:
                if recording is not None and not self._is_recorded:
                    recording.finish(None if self._loop is None else _end_of(self._loop), error)
        finally:
            self._is_recorded = True
            self._notify_changed()

    def _set_state(self, state: SessionState) -> None:
        self.state = state
        self._notify_changed()

    def _notify_changed(self) -> None:
        assert self._bridge is not None
        assert self._changed is not None
        self._bridge.call(self._changed.set)


def _note_end(recording: RunRecording, submission: Submission, request: Request, reason: EndReason) -> None:
    buffer = submission.output
    recording.ended(request, reason, buffer.token_ids, is_faulty=buffer.is_faulty)


def _end_of(loop: EngineLoop) -> SessionEnd:
    alive = ((request, submission.output.token_ids) for request, submission in loop.alive())
    return SessionEnd(loop.controller, loop.now, loop.num_steps, alive)
