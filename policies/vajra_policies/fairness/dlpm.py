"""Deficit longest prefix match: the longest cached prefix first, among tenants that have not used up their quantum."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from vajra_policies.fairness.accounts import Accounts, QuantumConfig, added
from vajra_policies.fairness.deficits import refill
from vajra_py.contract import (
    EndedStep,
    FallenGroups,
    KeyMotion,
    Layer,
    PolicyContext,
    PolicySpec,
    ReplicaId,
    RequestView,
)


class DlpmConfig(QuantumConfig):
    """Parameters of `dlpm`."""

    output_weight: float = Field(1.0, ge=0, le=1e9, description="Charge for a generated token, when it is generated.")


class Dlpm:
    """Key of tenant u = 0 if its remaining deficit q_u is above 0, else 1; key of a request = minus its cached prefix.

    - A request's first admission takes w_p * (prompt - cached prefix) / f_u from q_u, and each token that it generates
      takes w_q / f_u, with f_u the tenant's share and w_p and w_q the weights of tokens; q_u may fall below 0.
    - When no waiting tenant has q_u > 0, the quantum Q is added to every q_u <= 0, repeatedly until a waiting tenant
      has q_u > 0. New tenants have q_u = 0.

    A large Q gives the order of `lpm`; a small Q lets tenants take turns, as `vtc` does. The services of tenants that
    wait throughout differ by at most a few quanta, whatever their cached prefixes.

    Left out: forgetting idle tenants. If the requests of tenants with deficit lack memory, a request of a tenant
    without deficit may be admitted in the same step; the paper's loop skips it. The paper states no default for Q; the
    one of `deficit_round_robin` is used.

    Source: Cao et al., "Locality-aware Fair Scheduling in LLM Serving" (arXiv:2501.14312), DLPM; details from a port to SGLang.
    """

    key_motion = KeyMotion.PREFIX_HITS

    def __init__(self, config: DlpmConfig, num_kv_tokens: int) -> None:
        self._quantum = config.quantum_for(num_kv_tokens)
        self._accounts = Accounts(config, self._charge, charges_cached=False)
        self._deficits: dict[str, float] = {}
        self._left: dict[str, None] = {}
        """Tenants that may have a deficit above 0; includes every waiting tenant whose deficit is above 0."""
        self._collected: set[str] = set()
        """Tenants that were charged for all tokens generated so far."""
        self.fallen_groups = FallenGroups()

    def key(self, request: RequestView, now: float) -> float:
        """Return minus the request's prefix hit now, in tokens; 0 for a running request."""
        return -float(request.prefix_hit_tokens())

    def group(self, request: RequestView) -> str:
        """Return the request's tenant."""
        return request.tenant

    def group_key(self, group: str) -> float:
        """Return 0 for a tenant with deficit left, else 1."""
        return 0.0 if self._has_deficit(group) else 1.0

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        """Record the tenants that begin to wait."""
        for request in requests:
            if self._accounts.arrive(request):
                self._left[request.tenant] = None
        self._refill()

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Charge the tenant for the uncached prompt tokens, at the request's first admission."""
        self._accounts.admit(request)
        self._refill()

    def on_preemption(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Count the request as waiting; its charges are kept."""
        if self._accounts.preempt(request):
            self._left[request.tenant] = None
        self._refill()

    def on_moved(self, request: RequestView, source: ReplicaId, target: ReplicaId, now: float) -> None:
        """Count the request as waiting; its charges are kept."""
        self.on_preemption(request, source, now)

    def on_step_end(self, step: EndedStep) -> None:
        """Refill deficits if the tokens that the step generated have used up the deficits of all waiting tenants."""
        self._collected.clear()
        self._refill()

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Charge the tenants for the last tokens of these requests."""
        self._accounts.depart(requests)
        self._refill()

    def _charge(self, tenant: str, cost: float, times: int) -> None:
        self._deficits[tenant] = added(self._deficits.get(tenant, 0.0), -cost, times)

    def _has_deficit(self, tenant: str) -> bool:
        if tenant not in self._collected:
            self._collected.add(tenant)
            self._accounts.collect(tenant)
        return self._deficits.get(tenant, 0.0) > 0

    def _refill(self) -> None:
        """Refill deficits if no waiting tenant has a deficit above 0. While some waiting tenant still has such a
        deficit, the generated tokens of other tenants need not be charged yet.
        """
        left, waiting = self._left, self._accounts.num_waiting
        while left:
            tenant = next(iter(left))
            if tenant in waiting and self._has_deficit(tenant):
                return
            del left[tenant]
        if not waiting:
            return
        self._accounts.collect_all()
        for tenant in refill(self._deficits, waiting, self._quantum):
            left[tenant] = None
            self.fallen_groups.add(tenant)


def _build(config: DlpmConfig, context: PolicyContext) -> Dlpm:
    return Dlpm(config, context.limits.num_blocks * context.limits.block_size)


SPEC = PolicySpec(
    name="dlpm",
    layer=Layer.REQUEST_PRIORITIZER,
    config=DlpmConfig,
    build=_build,
    summary="Longest cached prefix first, among the tenants that have not used up their quantum.",
    source="DLPM (Cao et al., arXiv:2501.14312)",
    aliases=("deficit_longest_prefix_match",),
    advice=(
        "Use it where each tenant has its own prefixes: nearly the hit rate of `lpm`, and a bounded difference of "
        "service between tenants, 2 (U + Q) with U as for `vtc`. Not without a prefix cache (`vtc`)."
    ),
)
