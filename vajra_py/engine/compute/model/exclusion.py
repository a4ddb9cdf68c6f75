"""Exclusion between loading a model and computing steps in one process.

While transformers builds a model, it sets torch's default dtype for the whole process and seeds torch's generator. A
step of another model in another thread could create tensors of the wrong dtype meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Exclusion:
    """Readers-writer lock that prefers writers: many threads share it, or one thread holds it exclusively."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_sharing = 0
        self._num_exclusive = 0
        """Number of threads that hold the lock exclusively or wait to do so."""
        self._owner: int | None = None

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock shared with other threads."""
        me = threading.get_ident()
        with self._changed:
            if self._owner != me:
                self._changed.wait_for(lambda: not self._num_exclusive)
            self._num_sharing += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_sharing -= 1
                self._changed.notify_all()

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Hold the lock exclusively. Must not be entered within `shared`."""
        with self._changed:
            self._num_exclusive += 1
            self._changed.wait_for(lambda: self._owner is None and not self._num_sharing)
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
