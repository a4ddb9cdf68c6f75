"""Tick positions of logarithmic axes that span a tenth of a decade to eight decades.

This module imports matplotlib, so only drawing functions import it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.ticker import Locator, MaxNLocator

_STEPS: tuple[tuple[float, ...], ...] = ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0))


class ReadableLogLocator(Locator):
    """Locator of three to `most` ticks: round numbers within decades, or evenly spaced ones on axes shorter than a
    decade.
    """

    def __init__(self, most: int) -> None:
        self._most = most

    def __call__(self) -> Sequence[float]:
        """Return the ticks of the axis' current view."""
        low, high = self.axis.get_view_interval() if self.axis is not None else (1.0, 10.0)
        return self.tick_values(low, high)

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        """Return the ticks from `vmin` to `vmax`."""
        low, high = sorted((vmin, vmax))
        if not (low > 0 and math.isfinite(high) and high > low):
            return [high if high > 0 else 1.0]
        found: list[float] = []
        for steps in _STEPS:
            found = self._within(steps, low, high)
            if len(found) >= 3:
                break
        if len(found) < 3:
            even = MaxNLocator(min(self._most, 5)).tick_values(low, high)
            found = [float(tick) for tick in even if low <= tick <= high]
        return found[:: max(1, -(-len(found) // self._most))]

    @staticmethod
    def _within(steps: tuple[float, ...], low: float, high: float) -> list[float]:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        slack = 1e-9
        ticks = (step * 10.0**decade for decade in decades for step in steps)
        return [tick for tick in ticks if low * (1 - slack) <= tick <= high * (1 + slack)]
