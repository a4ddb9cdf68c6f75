"""Limits on the part of a step's time that the prompts of each request class may take."""

from __future__ import annotations

from collections.abc import Mapping

from vajra_py.contract import BatchBuilder, RequestView


class ClassShares:
    """Tracks the predicted time that the prompts of each class add to the step.

    `shares` lists fractions of `target_s` by class; all other classes share the remaining time. Shares are hard limits:
    time that a class does not use is not given to other classes.
    """

    __slots__ = ("_added_s", "_budgets_s", "_by_tenant", "_last", "_rest_s")

    def __init__(self, shares: Mapping[str, float], target_s: float, *, by_tenant: bool) -> None:
        self._budgets_s = {name: share * target_s for name, share in shares.items()}
        self._rest_s = max(0.0, (1.0 - sum(shares.values())) * target_s)
        self._by_tenant = by_tenant
        self.start()

    def start(self) -> None:
        """Begin a new step."""
        self._added_s: dict[str | None, float] = {}
        self._last: tuple[str | None, float] | None = None

    def budget_s(self, request: RequestView) -> float:
        """Return the seconds of each step that all prompts of the request's class may take together."""
        name = self._class_of(request)
        return self._rest_s if name is None else self._budgets_s[name]

    def left_s(self, request: RequestView, batch: BatchBuilder) -> float:
        """Return the seconds that the request's class may still add to the step. Must be called before the request is
        added.
        """
        before_s = batch.predicted_time()
        if self._last is not None:
            last, last_before_s = self._last  # only the request of the previous call may have been added since
            self._added_s[last] = self._added_s.get(last, 0.0) + before_s - last_before_s
        name = self._class_of(request)
        self._last = (name, before_s)
        return self.budget_s(request) - self._added_s.get(name, 0.0)

    def _class_of(self, request: RequestView) -> str | None:
        """Return the request's class if it is listed; None for all other classes."""
        name = request.tenant if self._by_tenant else request.slo_class
        return name if name in self._budgets_s else None
