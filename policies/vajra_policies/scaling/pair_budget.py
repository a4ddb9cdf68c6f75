"""Budget of devices over two pools: decisions are reduced to fit it, never reversed.

The number of replicas of each pool stays between the present and the requested one; if one pool is to grow while the
other shrinks, both change or neither does. The budget replaces the decision (`RECONCILE`) only if the present replicas
do not fit it, or a pool has fewer replicas than its minimum.

Source: NVIDIA Dynamo 1.6.1, planner, GPU budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from vajra_policies.scaling.device_budget import HOLD, RECONCILE, Budget, is_between

Counts: TypeAlias = tuple[int, int]
"""Numbers of replicas of the prompt pool and the decode pool."""


@dataclass(frozen=True, slots=True)
class PairBudget:
    """Budget over two pools, with the devices per replica and the minimum number of replicas of each pool."""

    budget: Budget
    devices: Counts
    least: Counts

    @property
    def tolerance(self) -> int:
        """Number of devices by which a total may fall below the floor, if there is a ceiling."""
        return max(self.devices)

    def total(self, counts: Counts) -> int:
        """Return the number of devices of these replicas."""
        return counts[0] * self.devices[0] + counts[1] * self.devices[1]

    def admits(self, counts: Counts) -> bool:
        """Return True if these numbers of replicas are within both bounds."""
        return self.budget.admits(self.total(counts), self.tolerance)

    def without_floor(self) -> PairBudget:
        """Return this budget without its floor."""
        return PairBudget(self.budget.without_floor(), self.devices, self.least)

    def clamp(self, wanted: Counts) -> Counts:
        """Shrink or grow both pools in proportion to fit the budget; (0, 0) if the minimum numbers of replicas exceed
        the ceiling.
        """
        if self.budget.is_open or self.admits(wanted):
            return wanted
        ceiling = self.budget.ceiling
        if ceiling is not None and self.total(wanted) > ceiling:
            return self._shrink(wanted, ceiling)
        assert self.budget.floor is not None
        return self._grow(wanted, self.budget.floor)

    def _shrink(self, wanted: Counts, ceiling: int) -> Counts:
        (p_devices, d_devices), (p_least, d_least) = self.devices, self.least
        if ceiling < self.total(self.least):
            return 0, 0
        scale = ceiling / self.total(wanted)
        most = (ceiling - d_least * d_devices) // p_devices
        num_p = max(p_least, min(most, math.floor(wanted[0] * scale)))
        return num_p, max(d_least, (ceiling - num_p * p_devices) // d_devices)

    def _grow(self, wanted: Counts, floor: int) -> Counts:
        (p_devices, d_devices), (p_least, d_least) = self.devices, self.least
        total = self.total(wanted)
        share = wanted[0] * (floor / total) if total > 0 else floor / 2 / p_devices
        num_p = max(p_least, math.ceil(share))
        num_d = max(d_least, math.ceil(max(0, floor - num_p * p_devices) / d_devices))
        would_shrink, num_d = num_d < wanted[1], max(num_d, wanted[1])
        if self.budget.ceiling is not None and self.total((num_p, num_d)) > self.budget.ceiling:
            return self.fit(wanted, (num_p, wanted[1])) if would_shrink else wanted
        return num_p, num_d

    def fit(self, current: Counts, wanted: Counts) -> Counts:
        """Return the counts within the budget that are nearest to `wanted`, each between its current and wanted count.

        Of equally near counts, those are chosen that bring both pools most nearly the same fraction of the way from
        `current` to `wanted`; then those with the largest changes. If one pool is to grow and the other to shrink, both
        change or neither does. Returns `current` if no counts are within the budget.
        """
        if wanted[0] >= self.least[0] and wanted[1] >= self.least[1] and self.admits(wanted):
            return wanted
        requested = abs(wanted[0] - current[0]), abs(wanted[1] - current[1])
        best: tuple[tuple[int, ...], Counts] | None = None
        for counts in self._between(current, wanted):
            progress = abs(counts[0] - current[0]), abs(counts[1] - current[1])
            distance = abs(wanted[0] - counts[0]) + abs(wanted[1] - counts[1])
            skew = abs(progress[0] * requested[1] - progress[1] * requested[0])
            score = (distance, skew, -sum(progress), *counts)
            if best is None or score < best[0]:
                best = score, counts
        return current if best is None else best[1]

    def _between(self, current: Counts, wanted: Counts) -> Iterator[Counts]:
        """Yield counts within the budget, each between the current and the wanted count of its pool. For every count of
        the pool with fewer such counts, the other pool has the count nearest to its own wanted count.
        """
        ranges = [self._range(pool, current, wanted) for pool in (0, 1)]
        outer = 0 if len(ranges[0]) <= len(ranges[1]) else 1
        inner = 1 - outer
        is_opposed = is_exchange(current, wanted)
        lowest, ceiling = self.budget.lowest(self.tolerance), self.budget.ceiling
        for count in ranges[outer]:
            spent = count * self.devices[outer]
            low, high = (ranges[inner].start, ranges[inner].stop - 1)
            if lowest is not None:
                low = max(low, -((spent - lowest) // self.devices[inner]))
            if ceiling is not None:
                high = min(high, (ceiling - spent) // self.devices[inner])
            if is_opposed and count == current[outer]:
                low, high = max(low, current[inner]), min(high, current[inner])
            elif is_opposed and wanted[inner] > current[inner]:
                low = max(low, current[inner] + 1)
            elif is_opposed:
                high = min(high, current[inner] - 1)
            if low <= high:
                other = min(max(wanted[inner], low), high)
                yield (count, other) if outer == 0 else (other, count)

    def _range(self, pool: int, current: Counts, wanted: Counts) -> range:
        low = max(min(current[pool], wanted[pool]), self.least[pool])
        high = max(current[pool], wanted[pool])
        if self.budget.ceiling is not None:
            least_other = max(min(current[1 - pool], wanted[1 - pool]), self.least[1 - pool])
            high = min(high, (self.budget.ceiling - least_other * self.devices[1 - pool]) // self.devices[pool])
        return range(low, high + 1)

    def raised(self, counts: Counts) -> Counts:
        """Return the counts, each raised to at least its pool's minimum."""
        return max(counts[0], self.least[0]), max(counts[1], self.least[1])

    def plan(self, current: Counts, wanted: Counts) -> Counts:
        """Reduce the wanted counts until they fit the ceiling; the floor does not raise them. If a pool is below its
        minimum now, the wanted counts are first raised to the minima.
        """
        bound = self.without_floor()
        return bound.clamp(self.raised(wanted)) if self._is_short(current) else bound.fit(current, wanted)

    def decide(self, current: Counts, wanted: Counts) -> tuple[Counts, str | None]:
        """Return the result of `guard`. If a pool is below its minimum now, return instead the wanted counts, raised to
        the minima and clamped, with the reason `RECONCILE`.
        """
        if self._is_short(current):
            return self.clamp(self.raised(wanted)), RECONCILE
        return self.guard(current, wanted)

    def _is_short(self, current: Counts) -> bool:
        return self.raised(current) != current

    def guard(self, current: Counts, wanted: Counts) -> tuple[Counts, str | None]:
        """Apply the budget to a decision on both pools; return (counts, reason if the budget decided, else None)."""
        if not self.admits(current):
            return self.clamp(current), RECONCILE
        total, floor, ceiling = self.total(current), self.budget.floor, self.budget.ceiling
        grows = wanted[0] > current[0] or wanted[1] > current[1]
        shrinks = wanted[0] < current[0] or wanted[1] < current[1]
        is_opposed = is_exchange(current, wanted)
        at_floor = floor is not None and total <= floor
        if at_floor and shrinks and not grows:
            return current, HOLD
        at_ceiling = ceiling is not None and total >= ceiling and grows
        if at_ceiling and not is_opposed:
            return current, HOLD
        if (at_floor or at_ceiling) and is_opposed:
            fitted = self.fit(current, wanted)
            return fitted, HOLD if fitted == current else None
        fitted = self.clamp(wanted)
        keeps_direction = all(map(is_between, fitted, current, wanted))
        return (fitted, None) if keeps_direction and self.admits(fitted) else (current, HOLD)


def is_exchange(current: Counts, wanted: Counts) -> bool:
    """Return True if one pool is to grow and the other to shrink."""
    return (wanted[0] - current[0]) * (wanted[1] - current[1]) < 0
