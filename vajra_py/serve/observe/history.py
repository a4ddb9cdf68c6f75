"""The last hour of a server, shown when the dashboard is opened: numbers every two seconds, and events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

INTERVAL_S = 2.0
_FIRST_S = 0.1
"""Pause between looks for the first numbers, which are those that nothing has happened before."""
NUM_KEPT = 1800
"""An hour of samples."""


class History:
    """Samples of a server's numbers.

    `read` gives the numbers of now, always the same names; `clock` gives seconds since 1970.
    """

    def __init__(self, read: Callable[[], Mapping[str, float] | None], clock: Callable[[], float]) -> None:
        self._read = read
        self._clock = clock
        self._columns: tuple[str, ...] = ()
        self._rows: deque[tuple[float, ...]] = deque(maxlen=NUM_KEPT)

    def sample(self) -> None:
        """Keep the numbers of now; nothing while there are none."""
        numbers = self._read()
        if numbers is not None:
            self._columns = ("at", *numbers)
            self._rows.append((self._clock(), *numbers.values()))

    async def keep(self) -> None:
        """Keep numbers until cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(INTERVAL_S if self._rows else _FIRST_S)

    def since(self, at: float) -> dict[str, Any]:
        """Samples that are later than a time, in seconds since 1970: names of columns, and rows."""
        return {"columns": self._columns, "rows": [row for row in self._rows if row[0] > at]}
