"""Reduce garbage collection during a run by excluding objects that existed before the run."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_ALLOCATIONS_BETWEEN_COLLECTIONS = 50_000
_ALLOCATIONS_OF_A_START = 1_000_000
"""Number of allocations added to the collector's threshold while a command starts."""


def put_off_collections() -> None:
    """Postpone garbage collection while a command starts, because nearly all objects created then live until the
    process ends.

    The first use of `existing_objects_frozen` restores the earlier settings.
    """
    first, *others = gc.get_threshold()
    if 0 < first < _ALLOCATIONS_OF_A_START:
        gc.set_threshold(first + _ALLOCATIONS_OF_A_START, *others)


def skip_collection_at_exit() -> None:
    """Skip the full collection at the end of the process, which takes a fifth of the time of a short command.

    The collection is not skipped if triton was imported: its bindings (nanobind) would print each uncollected object.
    """
    atexit.unregister(_freeze_at_exit)
    atexit.register(_freeze_at_exit)


def _freeze_at_exit() -> None:
    if "triton" not in sys.modules:
        gc.freeze()


@contextmanager
def existing_objects_frozen() -> Iterator[None]:
    """Collect cyclic garbage only among objects created within the context.

    A collection through all objects of the tensor libraries takes a quarter of a second, during which no step begins
    and no token is delivered.
    """
    # Freeze only if the caller has not frozen objects already, because `gc.unfreeze` below would unfreeze these too.
    freezes = gc.isenabled() and not gc.get_freeze_count()
    if freezes:
        gc.freeze()
        first, *others = gc.get_threshold()
        if first > _ALLOCATIONS_OF_A_START:  # `put_off_collections` was called
            gc.set_threshold(first - _ALLOCATIONS_OF_A_START, *others)
        # CPython delays a full collection until new objects amount to a quarter of those that survived the last one.
        # That number still includes the objects that are frozen now, which would delay collections within the context.
        # The collection below updates the number, and is cheap, since it skips frozen objects.
        gc.collect()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()


@contextmanager
def infrequent_collections() -> Iterator[None]:
    """Freeze existing objects like `existing_objects_frozen`, and collect less often; the collector's settings are
    restored at the end.

    The simulator's event loop creates no reference cycles; cycles of policies and observers are still collected.
    """
    with existing_objects_frozen():
        thresholds = gc.get_threshold()
        # Raise the threshold if the collector is on (threshold above 0) and no concurrent run has raised it already.
        is_changed = 0 < thresholds[0] < _ALLOCATIONS_BETWEEN_COLLECTIONS
        if is_changed:
            gc.set_threshold(_ALLOCATIONS_BETWEEN_COLLECTIONS, *thresholds[1:])
        try:
            yield
        finally:
            if is_changed:
                gc.set_threshold(*thresholds)
