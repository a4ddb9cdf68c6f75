"""Deficit round robin: tenants take turns, each for a quantum of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from vajra_policies.fairness.accounts import Accounts, QuantumConfig
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
    """Key = turns until the request's tenant has its own, 0 for the tenant whose turn it is.

    Tenants that wait stand in a circle. A turn adds the quantum Q to the tenant's credit D_u, and lasts while D_u > 0 and the
    tenant waits; admitted prompts and generated tokens are subtracted, so that D_u falls below 0 (a debt, since costs are known
    afterwards only), and a tenant in debt is passed over until its turns have paid it. Credit that is left is lost when
    a tenant waits no more; a debt stays.

    Source: Shreedhar and Varghese, "Efficient fair queuing using deficit round-robin", SIGCOMM'95; with debt, and with this
    quantum, the baseline of VTC (OSDI'24).
    """

    key_motion = KeyMotion.VOLATILE

    def __init__(self, config: DeficitRoundRobinConfig, num_kv_tokens: int) -> None:
        self._quantum = config.quantum_for(num_kv_tokens)
        self._accounts = Accounts(config, self._charge)
        self._credit: dict[str, float] = {}
        self._circle: dict[str, None] = {}
        """Tenants that wait; the turn is the first one's."""
        self._current: str | None = None
        """Tenant whose turn it is."""
        self._places: dict[str, int] = {}

    def key(self, request: RequestView, now: float) -> float:
        """The tenant's place in the circle."""
        return float(self._places.get(request.tenant, len(self._places)))

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        """A tenant that begins to wait goes to the end of the circle."""
        for request in requests:
            self._accounts.arrive(request)
        self._turn()

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Charge for the prompt."""
        self._accounts.admit(request)
        self._turn()

    def on_preemption(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Count it among the waiting; nothing is given back."""
        self._accounts.preempt(request)
        self._turn()

    def on_step_end(self, step: EndedStep) -> None:
        """Charge for generated tokens."""
        self._accounts.end_step(step)
        self._turn()

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Charge for the last tokens."""
        self._accounts.depart(requests)
        self._turn()

    def _charge(self, tenant: str, cost: float) -> None:
        self._credit[tenant] = self._credit.get(tenant, 0.0) - cost

    def _turn(self) -> None:
        """Let those that wait no more leave the circle and others enter it, and pass the turn on until somebody has credit."""
        waiting, circle, credit = self._accounts.waiting, self._circle, self._credit
        for tenant in [one for one in circle if one not in waiting]:
            del circle[tenant]
            credit[tenant] = min(credit[tenant], 0.0)
            if tenant == self._current:
                self._current = None
        for tenant in waiting:
            if tenant not in circle:
                circle[tenant] = None
                credit.setdefault(tenant, 0.0)
        if circle and (self._current is None or credit[self._current] <= 0):
            self._pass_on()
        self._places = {tenant: place for place, tenant in enumerate(circle)}

    def _pass_on(self) -> None:
        """Give the next tenant its turn, and so on until one has credit; rounds that nobody could use are given at once."""
        circle, credit, quantum = self._circle, self._credit, self._quantum
        if self._current is not None:
            self._to_the_end(self._current)
        num_rounds = int(-max(credit[tenant] for tenant in circle) // quantum)
        if num_rounds > 0:
            for tenant in circle:
                credit[tenant] += num_rounds * quantum
        while True:
            self._current = first = next(iter(circle))
            credit[first] += quantum
            if credit[first] > 0:
                return
            self._to_the_end(first)

    def _to_the_end(self, tenant: str) -> None:
        del self._circle[tenant]
        self._circle[tenant] = None


def _build(config: DeficitRoundRobinConfig, context: PolicyContext) -> DeficitRoundRobin:
    return DeficitRoundRobin(config, context.limits.num_blocks * context.limits.block_size)


SPEC = PolicySpec(
    name="deficit_round_robin",
    layer=Layer.REQUEST_PRIORITIZER,
    config=DeficitRoundRobinConfig,
    build=_build,
    summary="Tenants take turns, each for a quantum of weighted tokens, and pay for what they could not know in later turns.",
    source="Deficit round robin (Shreedhar and Varghese, SIGCOMM'95); VTC's baseline (OSDI'24)",
    aliases=("drr",),
)
