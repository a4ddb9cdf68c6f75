"""History of a server's last hour for the dashboard: values every two seconds."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

INTERVAL_S = 2.0
_FIRST_S = 0.1
"""Seconds between attempts to take the first sample; so short that this sample shows the values before any request."""
NUM_KEPT = 1800
"""Number of samples that are kept: those of an hour."""


class History:
    """Samples of a server's values.

    `read` returns the current values, always under the same names; `clock` returns seconds since 1970.
    """

    def __init__(self, read: Callable[[], Mapping[str, float] | None], clock: Callable[[], float]) -> None:
        self._read = read
        self._clock = clock
        self._columns: tuple[str, ...] = ()
        self._rows: deque[tuple[float, ...]] = deque(maxlen=NUM_KEPT)

    def sample(self) -> None:
        """Record the current values, if there are any."""
        numbers = self._read()
        if numbers is not None:
            self._columns = ("at", *numbers)
            self._rows.append((self._clock(), *numbers.values()))

    async def keep(self) -> None:
        """Record values periodically until cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(INTERVAL_S if self._rows else _FIRST_S)

    def since(self, at: float) -> dict[str, Any]:
        """Return the samples later than a time, in seconds since 1970: column names, and rows."""
        return {"columns": self._columns, "rows": [row for row in self._rows if row[0] > at]}
