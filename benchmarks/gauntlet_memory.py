"""Distinguish leaks from warm-up by a server's memory over its number of answered requests.

Warm-up (modules that are imported late, heaps that find their size) comes once and ends; a leak goes on with every request. So the first
third of the requests is left out, and the rest is two halves, in each of which memory has to grow by the request for a leak to be found.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import theilslopes

WARM_UP_FRACTION = 1 / 3
"""Fraction of the requests, at the beginning, whose growth is ignored."""
ALLOWED_BYTES = 1024
"""Growth of memory per request after warm-up that is not counted as a leak."""
NOISE_BYTES = 4 * 2**20
"""Growth after warm-up that is no leak, whatever its slope: heaps are taken from the system in pieces of up to a few MiB."""
PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory at one moment.

    Attributes:
        requests: answered until then.
        size: bytes of memory that belong to the server alone.
    """

    requests: float
    size: float


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth after warm-up.

    Attributes:
        bytes_per_request: the smaller slope of the two halves after warm-up.
        requests: answered after warm-up.
    """

    bytes_per_request: float
    requests: float

    @property
    def least_found(self) -> float:
        """The smallest leak that so many requests show, bytes a request."""
        return max(ALLOWED_BYTES, NOISE_BYTES / self.requests)

    @property
    def is_leak(self) -> bool:
        """True if the growth exceeds warm-up and noise."""
        return self.bytes_per_request > self.least_found


def growth(samples: Sequence[Sample]) -> Growth | None:
    """Growth after warm-up; None where there are too few samples for a slope.

    Slopes are Theil and Sen's, medians over all pairs of samples: a step that memory takes once, or a peak, moves them little.
    """
    if not samples:
        return None
    x, y = np.array([(one.requests, one.size) for one in samples]).T
    begin = x[0] + WARM_UP_FRACTION * (x[-1] - x[0])
    middle = (begin + x[-1]) / 2
    slopes = []
    for half in ((begin <= x) & (x <= middle), x >= middle):
        if len(np.unique(x[half])) < 5:
            return None
        slopes.append(theilslopes(y[half], x[half]).slope)
    return Growth(float(min(slopes)), float(x[-1] - begin))


def own_bytes(pid: int) -> int:
    """Return the anonymous memory of a process; 0 if it has ended.

    Pages of libraries come in as their code is first run, and are the system's to take back.
    """
    try:
        found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return 0 if found is None else 1024 * int(found[1])


@contextmanager
def weighed(answered: Callable[[], float | None], size: Callable[[], int]) -> Iterator[list[Sample]]:
    """Sample both twice a second, in a thread, until the block ends; `answered` returns None while the count is not available."""
    samples: list[Sample] = []
    is_over = threading.Event()

    def weigh() -> None:
        while not is_over.wait(PAUSE_S):
            if (requests := answered()) is not None:
                samples.append(Sample(requests, size()))

    thread = threading.Thread(target=weigh, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        is_over.set()
        thread.join()
