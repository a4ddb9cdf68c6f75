"""Budget of devices for scaling decisions: a ceiling that is never exceeded, and a floor that limits scaling down.

A decision that exceeds the budget is reduced, never reversed: the number of replicas stays between the present and the
requested one. The budget replaces the decision (`RECONCILE`) only if the present replicas do not fit it.

Source: NVIDIA Dynamo 1.6.1, planner, GPU budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HOLD = "gpu_budget_guard_hold"
"""Reason of a decision that the budget prevents."""
RECONCILE = "gpu_budget_reconcile"
"""Reason of a decision that changes the present number of replicas to fit the budget."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Maximum (`ceiling`) and minimum (`floor`) of the devices of all replicas together.

    If there are both, the total may be below the floor by up to the devices of one replica, since whole replicas seldom
    fit between floor and ceiling.
    """

    ceiling: int | None = None
    floor: int | None = None

    @property
    def is_open(self) -> bool:
        """True if there is neither a ceiling nor a floor."""
        return self.ceiling is None and self.floor is None

    def without_floor(self) -> Budget:
        """Return this budget without its floor."""
        return Budget(self.ceiling, None)

    def lowest(self, tolerance: int) -> int | None:
        """Return the floor, less `tolerance` if there is also a ceiling; None without a floor."""
        if self.floor is None:
            return None
        return self.floor - (tolerance if self.ceiling is not None else 0)

    def admits(self, devices: int, tolerance: int) -> bool:
        """Return True if this number of devices is from `lowest(tolerance)` to the ceiling."""
        lowest = self.lowest(tolerance)
        return (self.ceiling is None or devices <= self.ceiling) and (lowest is None or devices >= lowest)


NO_BUDGET = Budget()


def clamp_one(wanted: int, devices: int, budget: Budget, least: int) -> int:
    """Return the number of replicas of one pool: `wanted`, reduced or raised to fit the budget; 0 if `least` replicas
    exceed the ceiling.
    """
    total = wanted * devices
    if budget.is_open or budget.admits(total, devices):
        return wanted
    if budget.ceiling is not None and total > budget.ceiling:
        return 0 if budget.ceiling < least * devices else max(least, budget.ceiling // devices)
    assert budget.floor is not None
    return max(least, math.ceil(budget.floor / devices))


def guard_one(current: int, wanted: int, devices: int, budget: Budget, least: int) -> tuple[int, str | None]:
    """Apply the budget to a decision on one pool; return (replicas, reason if the budget decided, else None)."""
    total = current * devices
    if not budget.admits(total, devices):
        return clamp_one(current, devices, budget, least), RECONCILE
    if budget.floor is not None and total <= budget.floor and wanted < current:
        return current, HOLD
    if budget.ceiling is not None and total >= budget.ceiling and wanted > current:
        return current, HOLD
    fitted = clamp_one(wanted, devices, budget, least)
    return (fitted, None) if is_between(fitted, current, wanted) else (current, HOLD)


def is_between(value: int, one: int, other: int) -> bool:
    """Return True if `value` is between `one` and `other`, or equal to either."""
    return min(one, other) <= value <= max(one, other)
