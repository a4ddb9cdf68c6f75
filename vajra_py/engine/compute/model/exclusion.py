"""Exclusion between loading a model and computing steps in one process.

While transformers builds a model, it sets torch's default dtype for the whole process and seeds torch's generator. A
step of another model in another thread could create tensors of the wrong dtype meanwhile.

A step that hangs must not keep models from being loaded. When the worker of such a step is given up, `forget` releases
the lock that the step's thread holds. The step then needs no protection, since its result is ignored.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Exclusion:
    """Readers-writer lock that prefers writers: many threads share it, or one thread holds it exclusively."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sharing: list[int] = []
        """Identifiers of the threads that hold the lock shared, one entry for each time that a thread holds it."""
        self._waiting: set[int] = set()
        """Identifiers of the threads that wait in `shared`."""
        self._num_exclusive = 0
        """Number of threads that hold the lock exclusively or wait to do so."""
        self._owner: int | None = None

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock shared with other threads."""
        me = threading.get_ident()
        with self._changed:
            self._waiting.add(me)
            try:
                self._changed.wait_for(lambda: self._owner == me or not self._num_exclusive)
            finally:
                self._waiting.discard(me)
            self._sharing.append(me)
        try:
            yield
        finally:
            with self._changed:
                if me in self._sharing:  # unless `forget` has removed it
                    self._sharing.remove(me)
                self._changed.notify_all()

    def is_waiting(self, thread_id: int) -> bool:
        """Return True if this thread waits in `shared`, because another thread has or wants the lock exclusively."""
        with self._changed:
            return thread_id in self._waiting

    def forget(self, thread_id: int) -> None:
        """Release the lock for a thread that hangs while it holds the lock shared; others no longer wait for it."""
        with self._changed:
            self._sharing = [one for one in self._sharing if one != thread_id]
            self._changed.notify_all()

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Hold the lock exclusively. Must not be entered within `shared`."""
        with self._changed:
            self._num_exclusive += 1
            self._changed.wait_for(lambda: self._owner is None and not self._sharing)
            self._owner = threading.get_ident()
        try:
            yield
        finally:
            with self._changed:
                self._owner = None
                self._num_exclusive -= 1
                self._changed.notify_all()


LOADING = Exclusion()
"""The process's only `Exclusion`, since torch's default dtype and generator exist once per process."""
