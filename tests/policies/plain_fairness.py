"""VTC and deficit round robin as their papers write them: a key of each request, charged at every step, nothing forgotten."""

from __future__ import annotations

from typing import Any

from vajra_py.contract import KeyMotion


class PlainAccounts:
    """Tokens of every request that was ever seen, and the waiting requests of each tenant."""

    key_motion = KeyMotion.VOLATILE

    def __init__(self, config: Any) -> None:
        self.config = config
        self.charged: dict[Any, int] = {}
        self.paid: set[Any] = set()
        self.waits: dict[Any, bool] = {}
        self.waiting: dict[str, int] = {}

    def charge(self, tenant: str, cost: float) -> None:
        raise NotImplementedError

    def turn(self) -> None:
        """After each event."""

    def cost(self, request: Any, cost: float) -> None:
        self.charge(request.tenant, cost / self.config.tenant_weights.get(request.tenant, 1.0))

    def count(self, request: Any, waits: bool) -> None:
        if self.waits.get(request, False) != waits:
            self.waits[request] = waits
            left = self.waiting.get(request.tenant, 0) + (1 if waits else -1)
            self.waiting[request.tenant] = left
            if not left:
                del self.waiting[request.tenant]

    def settle(self, request: Any) -> None:
        num_new = request.num_output_tokens - self.charged[request]
        if num_new:
            self.charged[request] += num_new
            self.cost(request, self.config.output_weight * num_new)

    def arrive(self, request: Any) -> None:
        self.charged[request] = request.num_output_tokens
        if request.admitted_index > 0:
            self.paid.add(request)
        self.count(request, not request.is_resident)

    def on_arrivals(self, requests: Any, now: float) -> None:
        for request in requests:
            self.arrive(request)
        self.turn()

    def on_admission(self, request: Any, replica_id: int, now: float) -> None:
        self.count(request, False)
        if request not in self.paid:
            self.paid.add(request)
            self.cost(request, self.config.prompt_weight * request.num_prompt_tokens)
        self.turn()

    def on_preemption(self, request: Any, replica_id: int, now: float) -> None:
        self.count(request, True)
        self.turn()

    def on_step_end(self, step: Any) -> None:
        for request in step.requests:
            if request in self.charged:
                self.settle(request)
        self.turn()

    def on_departures(self, requests: Any, now: float) -> None:
        for request in requests:
            self.settle(request)
            self.count(request, False)
        self.turn()


class PlainVtc(PlainAccounts):
    """Key = the tenant's counter."""

    def __init__(self, config: Any, *, lifts: bool = True) -> None:
        super().__init__(config)
        self.lifts = lifts
        self.counters: dict[str, float] = {}
        self.last = ""

    def key(self, request: Any, now: float) -> float:
        return self.counters.get(request.tenant, 0.0)

    def charge(self, tenant: str, cost: float) -> None:
        self.counters[tenant] = self.counters.get(tenant, 0.0) + cost

    def arrive(self, request: Any) -> None:
        tenant = request.tenant
        if self.lifts and tenant not in self.waiting:
            level = min(self.counters.get(other, 0.0) for other in (self.waiting or (self.last,)))
            self.counters[tenant] = max(self.counters.get(tenant, 0.0), level)
        super().arrive(request)

    def on_admission(self, request: Any, replica_id: int, now: float) -> None:
        self.last = request.tenant
        super().on_admission(request, replica_id, now)


class PlainDrr(PlainAccounts):
    """Key = the tenant's place in the circle, counted anew after each event."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.credit: dict[str, float] = {}
        self.circle: list[str] = []
        self.current: str | None = None
        self.places: dict[str, int] = {}

    def key(self, request: Any, now: float) -> float:
        return float(self.places.get(request.tenant, len(self.places)))

    def charge(self, tenant: str, cost: float) -> None:
        self.credit[tenant] = self.credit.get(tenant, 0.0) - cost

    def turn(self) -> None:
        for tenant in [one for one in self.circle if one not in self.waiting]:
            self.circle.remove(tenant)
            self.credit[tenant] = min(self.credit[tenant], 0.0)
            self.current = None if tenant == self.current else self.current
        for tenant in self.waiting:
            if tenant not in self.circle:
                self.circle.append(tenant)
                self.credit.setdefault(tenant, 0.0)
        if self.circle and (self.current is None or self.credit[self.current] <= 0):
            self.pass_on()
        self.places = {tenant: place for place, tenant in enumerate(self.circle)}

    def pass_on(self) -> None:
        quantum = self.config.quantum
        if self.current is not None:
            self.circle.append(self.circle.pop(0))
        num_rounds = int(-max(self.credit[tenant] for tenant in self.circle) // quantum)
        if num_rounds > 0:
            for tenant in self.circle:
                self.credit[tenant] += num_rounds * quantum
        while True:
            self.current = self.circle[0]
            self.credit[self.current] += quantum
            if self.credit[self.current] > 0:
                return
            self.circle.append(self.circle.pop(0))
