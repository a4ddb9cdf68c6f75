"""Deficit round robin: tenants take turns, each for a quantum of tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from vajra_policies.fairness.accounts import Accounts, QuantumConfig, added
from vajra_py.contract import (
    EndedStep,
    KeyMotion,
    Layer,
    PolicyContext,
    PolicySpec,
    ReplicaId,
    RequestView,
)


class DeficitRoundRobinConfig(QuantumConfig):
    """Parameters of `deficit_round_robin`."""


class DeficitRoundRobin:
    """Key of a tenant = its position in the circle of waiting tenants; its requests are served in order of arrival.

    Waiting tenants take turns in this order. A turn adds the quantum Q to the tenant's credit D_u, and lasts while D_u
    > 0 and the tenant waits. The costs of admitted prompts and generated tokens are subtracted from D_u. Since costs
    are known only afterwards, D_u may fall below 0 (a debt); the tenant is then passed over until its turns have repaid
    the debt. Unused credit is lost when a tenant no longer waits. A debt is kept until it is repaid; nothing else is
    kept of a tenant that has left.

    Left out: nothing.

    Source: Shreedhar and Varghese, "Efficient fair queuing using deficit round-robin", SIGCOMM'95; with debt, and with this
    quantum, the baseline of VTC (OSDI'24).
    """

    key_motion = KeyMotion.STATIC

    def __init__(self, config: DeficitRoundRobinConfig, num_kv_tokens: int) -> None:
        self._quantum = config.quantum_for(num_kv_tokens)
        self._accounts = Accounts(config, self._charge)
        self._credit: dict[str, float] = {}
        self._circle: OrderedDict[str, int] = OrderedDict()
        """Waiting tenants and their positions; the first one has the turn. Positions are numbered in order of entry."""
        self._current: str | None = None
        """Tenant whose turn it is."""
        self._num_places = 0

    def key(self, request: RequestView, now: float) -> float:
        """Return 0: requests of one tenant are served in order of arrival."""
        return 0.0

    def group(self, request: RequestView) -> str:
        """Return the request's tenant."""
        return request.tenant

    def group_key(self, group: str) -> float:
        """Return the tenant's position in the circle; a position after all others if the tenant is not in it."""
        return float(self._circle.get(group, self._num_places))

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        """Add tenants that begin to wait to the end of the circle."""
        for request in requests:
            if self._accounts.arrive(request):
                self._enter(request.tenant)
        self._turn()

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Charge the tenant for the prompt, at the request's first admission."""
        if self._accounts.admit(request):
            self._leave(request.tenant)
        self._turn()

    def on_preemption(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Count the request as waiting; its charges are kept."""
        if self._accounts.preempt(request):
            self._enter(request.tenant)
        self._turn()

    def on_moved(self, request: RequestView, source: ReplicaId, target: ReplicaId, now: float) -> None:
        """Count the request as waiting; its charges are kept."""
        self.on_preemption(request, source, now)

    def on_step_end(self, step: EndedStep) -> None:
        """Pass the turn on if the tokens that the step generated have used up the tenant's credit."""
        self._turn()

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Charge the tenants for the last tokens of these requests."""
        for tenant in self._accounts.depart(requests):
            self._leave(tenant)
        self._turn()

    def _charge(self, tenant: str, cost: float, times: int) -> None:
        self._credit[tenant] = added(self._credit.get(tenant, 0.0), -cost, times)

    def _enter(self, tenant: str) -> None:
        self._to_the_end(tenant)
        self._credit.setdefault(tenant, 0.0)

    def _leave(self, tenant: str) -> None:
        del self._circle[tenant]
        if self._credit_of(tenant) >= 0:
            del self._credit[tenant]
        if tenant == self._current:
            self._current = None

    def _credit_of(self, tenant: str) -> float:
        self._accounts.collect(tenant)
        return self._credit[tenant]

    def _turn(self) -> None:
        """Pass the turn on to the next tenant with credit, unless the present one has waiting requests and credit left."""
        if self._circle and (self._current is None or self._credit_of(self._current) <= 0):
            self._pass_on()

    def _pass_on(self) -> None:
        """Pass the turn on until a tenant has credit.

        If every waiting tenant has a debt of at least one quantum, some full rounds of turns only repay debts. The
        quanta of these rounds are added at once.
        """
        circle, credit, quantum = self._circle, self._credit, self._quantum
        if self._current is not None:
            self._to_the_end(self._current)
        if all(-self._credit_of(tenant) // quantum > 0 for tenant in circle):
            num_rounds = int(-max(credit[tenant] for tenant in circle) // quantum)
            for tenant in circle:
                credit[tenant] += num_rounds * quantum
        while True:
            self._current = first = next(iter(circle))
            credit[first] = self._credit_of(first) + quantum
            if credit[first] > 0:
                return
            self._to_the_end(first)

    def _to_the_end(self, tenant: str) -> None:
        self._circle[tenant] = self._num_places
        self._circle.move_to_end(tenant)
        self._num_places += 1


def _build(config: DeficitRoundRobinConfig, context: PolicyContext) -> DeficitRoundRobin:
    return DeficitRoundRobin(config, context.limits.num_blocks * context.limits.block_size)


SPEC = PolicySpec(
    name="deficit_round_robin",
    layer=Layer.REQUEST_PRIORITIZER,
    config=DeficitRoundRobinConfig,
    build=_build,
    summary=(
        "Tenants take turns, each for a quantum of weighted tokens; tokens used beyond the quantum are repaid in "
        "later turns."
    ),
    source="Deficit round robin (Shreedhar and Varghese, SIGCOMM'95); VTC's baseline (OSDI'24)",
    aliases=("drr",),
    advice=(
        "Use it as the classical alternative to `vtc`: with turns of a quantum, requests of one tenant run together. "
        "Not for many tenants with few requests each, where turns are long."
    ),
)
