"""Interrupt plug-in code that does not return: a thread samples another thread's stack periodically.

The watchdog measures real time, but no decision of a run depends on real time. The watched thread has no overhead,
since no call is wrapped; a call is recognised by its frame, which is the same object in successive samples.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType

from vajra_py.errors import DidNotReturn, RunError, place_of_frame

_log = logging.getLogger(__name__)

_CALLERS = tuple(f"vajra_py.{name}" for name in ("runtime", "testing", "serve", "latency", "plugins"))
"""Packages of the framework that call plug-in code, directly or through one another."""
_DEBUGGERS = frozenset({"bdb", "pdb", "pydevd", "_pydevd_bundle"})
_LOOKS = 8
"""Number of samples per time limit.

A pause between two samples counts as at most two intervals, since the process may have been suspended.
"""
_MAX_SECONDS_BETWEEN_LOOKS = 1.0
_COLLECTION_OFF = threading.Lock()
"""Lock held by the thread that has turned garbage collection off, which affects all threads of the process.

A fork waits for the lock, so that the child process starts with garbage collection on.
"""
os.register_at_fork(
    before=_COLLECTION_OFF.acquire, after_in_parent=_COLLECTION_OFF.release, after_in_child=_COLLECTION_OFF.release
)


@contextmanager
def no_endless_calls(limit_s: float | None, on_blocked: Callable[[str], None] | None = None) -> Iterator[None]:
    """Watch this thread while the context is active: interrupt a plug-in call that takes longer than `limit_s`.

    `DidNotReturn` is raised inside the call. The caller of a policy converts this error to `PolicyError`; for other
    plug-ins (observers), this context converts it to `RunError`. A call that blocks outside Python cannot be
    interrupted: it is logged, and `on_blocked` is called with a description of the call, and again with "" after the
    call has returned. `limit_s=None` disables the watchdog.
    """
    if limit_s is None:
        yield
        return
    watchdog = _Watchdog(threading.get_ident(), limit_s, on_blocked)
    watchdog.start()
    try:
        yield
    except DidNotReturn as error:
        raise RunError(f"a plug-in {error}") from error
    finally:
        watchdog.stop()


class _Watchdog(threading.Thread):
    """Thread that samples the stack of one thread."""

    def __init__(self, thread_id: int, limit_s: float, on_blocked: Callable[[str], None] | None) -> None:
        super().__init__(name="vajra-watchdog", daemon=True)
        self._thread_id = thread_id
        self._limit_s = limit_s
        self._pause_s = min(limit_s / _LOOKS, _MAX_SECONDS_BETWEEN_LOOKS)
        self._is_over = threading.Event()
        self._call: FrameType | None = None
        self._in_call_s = 0.0
        self._num_interrupts = 0
        self._on_blocked = on_blocked
        self._is_blocked = False

    def stop(self) -> None:
        """Stop sampling."""
        self._is_over.set()
        self.join()

    def run(self) -> None:
        """Sample until stopped."""
        looked_at = monotonic()
        while not self._is_over.wait(self._pause_s):
            now = monotonic()
            self._look(min(now - looked_at, 2 * self._pause_s))
            looked_at = now
        self._call = None

    def _look(self, passed_s: float) -> None:
        calls = _plugin_calls(_stack_of(self._thread_id))
        call = calls[0] if calls else None
        if call is None or call is not self._call:
            if self._is_blocked:
                self._notify("")
            self._call, self._in_call_s, self._num_interrupts = call, 0.0, 0
            return
        self._in_call_s += passed_s
        if self._in_call_s >= self._limit_s:
            self._interrupt(calls[-1])

    def _interrupt(self, innermost: FrameType) -> None:
        """Raise `DidNotReturn` inside the call; if that has no effect, log it once and raise again at every sample.

        `innermost`: innermost plug-in call, which is the one that blocks; its callers may be calls of other plug-ins.
        """
        self._num_interrupts += 1
        message = f"did not return within {self._limit_s:g} s"
        if self._num_interrupts == 3:
            where = place_of_frame(innermost)
            what = f"{where} {message}; it is blocked outside Python or ignores interruption, and is still running"
            _log.error("%s", what)
            self._notify(what)
        kind = type("DidNotReturn", (DidNotReturn,), {"message": message})
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread_id), ctypes.py_object(kind))

    def _notify(self, what: str) -> None:
        self._is_blocked = bool(what)
        if self._on_blocked is not None:
            self._on_blocked(what)


def _stack_of(thread_id: int) -> list[FrameType]:
    """Return the frames that a thread is executing, innermost first; none if the thread has ended.

    Garbage collection is off while frames are listed, since its callbacks and finalizers may let another thread run.
    Two errors could follow. First, CPython holds a lock while it lists the frames of all threads. If the other thread
    starts a new thread, which needs this lock, both wait for each other forever. Second, CPython 3.11 assumes that an
    outer frame stays in place while its frame object is created. If the frame has ended, freed memory is read.
    """
    frames: list[FrameType] = []
    with _COLLECTION_OFF:
        is_on = gc.isenabled()
        gc.disable()
        try:
            frame = sys._current_frames().get(thread_id)
            while frame is not None:
                frames.append(frame)
                frame = frame.f_back
        finally:
            if is_on:
                gc.enable()
    return frames


def _plugin_calls(frames: list[FrameType]) -> list[FrameType]:
    """Return the plug-in frames called by the framework, outermost first; none if a debugger runs in them."""
    calls: list[FrameType] = []
    caller = ""
    for depth in range(len(frames) - 1, -1, -1):
        module = _module_of(frames[depth])
        package = module.partition(".")[0]
        if caller.startswith(_CALLERS) and package != "vajra_py" and package not in sys.stdlib_module_names:
            calls.append(frames[depth])
        if calls and package in _DEBUGGERS:
            return []
        caller = module
    return calls


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
