"""Reduction of garbage collection during a run by leaving out what existed before it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_ALLOCATIONS_BETWEEN_COLLECTIONS = 50_000
_ALLOCATIONS_OF_A_START = 1_000_000
_thresholds_before_start: list[tuple[int, int, int]] = []
"""Settings of the collector to go back to once a command has started."""


def put_off_collections() -> None:
    """Leave out garbage collection while a command starts: nearly all that it imports and reads lives to its end.

    The first loop that freezes what exists goes back to the settings before.
    """
    if not _thresholds_before_start and gc.get_threshold()[0] > 0:
        _thresholds_before_start.append(gc.get_threshold())
        gc.set_threshold(_ALLOCATIONS_OF_A_START, *gc.get_threshold()[1:])


@contextmanager
def existing_objects_frozen() -> Iterator[None]:
    """Collect cyclic garbage only among objects made inside.

    Going through all objects of the tensor libraries takes a quarter of a second, in which no step begins and no token is told.
    """
    freezes = gc.isenabled() and not gc.get_freeze_count()  # objects that the caller froze stay frozen
    if freezes:
        gc.freeze()
        while _thresholds_before_start:
            gc.set_threshold(*_thresholds_before_start.pop())
        gc.collect()  # cheap now; the next full collection waits for new objects, a quarter of those that this one examined
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()


@contextmanager
def infrequent_collections() -> Iterator[None]:
    """Do as `existing_objects_frozen`, and collect more rarely; the collector's settings are restored at the end.

    The simulator's event loop makes no cycles of its own; those that policies and observers make are still found.
    """
    thresholds = gc.get_threshold()
    is_changed = (
        0 < thresholds[0] < _ALLOCATIONS_BETWEEN_COLLECTIONS
    )  # 0: never. Another run beside this one may have done it
    with existing_objects_frozen():
        if is_changed:
            gc.set_threshold(_ALLOCATIONS_BETWEEN_COLLECTIONS, *thresholds[1:])
        try:
            yield
        finally:
            if is_changed:
                gc.set_threshold(*thresholds)
