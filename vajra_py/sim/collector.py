"""How much of a simulation goes into looking for cyclic garbage? Little: what exists before a run is not looked through."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_ALLOCATIONS_BETWEEN_COLLECTIONS = 50_000


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect cyclic garbage more rarely, and only among what is made inside; the collector's settings come back after.

    The event loop makes no cycles of its own; those that policies and observers make are still found.
    """
    thresholds = gc.get_threshold()
    freezes = gc.isenabled() and not gc.get_freeze_count()  # whoever froze objects before wants them to stay frozen
    if freezes:
        gc.freeze()
    if thresholds[0]:  # 0: never
        gc.set_threshold(max(_ALLOCATIONS_BETWEEN_COLLECTIONS, thresholds[0]), *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if freezes:
            gc.unfreeze()
