"""Accounts of tenants: the tokens charged to each tenant, and its waiting and running requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from vajra_py.contract import PolicyConfig, RequestView

_EXACT = 2.0**53
"""Largest number up to which sums of integers are exact in floating point."""
_QUANTA_IN_MEMORY = 20
"""Ratio of the tokens of the KV memory to the default quantum, as in the artifact of VTC."""


class TokenCostConfig(PolicyConfig):
    """Parameters of the service charged to a tenant."""

    prompt_weight: float = Field(
        1.0, ge=0, le=1e9, description="Charge for a prompt token (w_p), when its request is admitted."
    )
    output_weight: float = Field(
        2.0, ge=0, le=1e9, description="Charge for a generated token (w_q), when it is generated."
    )
    tenant_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict,
        description=("Share of each tenant relative to other tenants (f_u); 1 for tenants that are not listed."),
    )


class QuantumConfig(TokenCostConfig):
    """Parameters of policies that serve each tenant for a quantum of tokens at a time."""

    quantum: float | None = Field(
        None,
        ge=1e-6,
        description="Charge that a tenant may run up in one turn (Q), weighted tokens; null: a twentieth of the KV memory's tokens.",
    )

    def quantum_for(self, num_kv_tokens: int) -> float:
        """Return the quantum for replicas whose KV memory holds `num_kv_tokens` tokens."""
        return self.quantum if self.quantum is not None else num_kv_tokens / _QUANTA_IN_MEMORY


@dataclass(slots=True)
class _Charged:
    """State of the charges for one live request."""

    was_admitted: bool
    num_output_tokens: int


class Accounts:
    """Charges tenants for tokens: w_p / f_u per prompt token at the first admission, and w_q / f_u per generated token.

    f_u is the tenant's share. A prompt is charged once, since recomputation after a preemption is free; with
    `charges_cached` False, its cached prefix is not charged. `charge` is called with (tenant, cost, times), and must
    add `cost` to the tenant's charges `times` times. Generated tokens are charged by `collect` and `collect_all`, at
    the latest before another prompt of the tenant is charged, or when the request that generated them is preempted, is
    moved or leaves. The policy forwards its callbacks to this object.
    """

    def __init__(
        self, config: TokenCostConfig, charge: Callable[[str, float, int], None], *, charges_cached: bool = True
    ) -> None:
        self._charges_cached = charges_cached
        self._prompt_weight = config.prompt_weight
        self._output_weight = config.output_weight
        self._weights = config.tenant_weights
        self._charge = charge
        self._waiting: dict[RequestView, _Charged] = {}
        self._admitted: dict[str, dict[RequestView, _Charged]] = {}
        """Live requests that do not wait, by tenant; tenants without such requests are left out."""
        self.num_waiting: dict[str, int] = {}
        """Number of waiting requests of each tenant with waiting requests, in the order in which the tenants began to
        wait.
        """

    def is_live(self, tenant: str) -> bool:
        """Return True if a request of the tenant waits or runs."""
        return tenant in self.num_waiting or tenant in self._admitted

    def arrive(self, request: RequestView) -> bool:
        """Count a request that is new to this object: as running if it holds KV blocks, else as waiting.

        Returns True if its tenant begins to wait. The prompt of a request that was admitted before, under another
        policy, is not charged.
        """
        charged = _Charged(request.admitted_index > 0, request.num_output_tokens)
        if not request.is_resident:
            return self._wait(request, charged)
        self._admitted.setdefault(request.tenant, {})[request] = charged
        return False

    def admit(self, request: RequestView) -> bool:
        """Count an admitted request as running, and charge its prompt at the first admission. Returns True if its
        tenant no longer waits.
        """
        tenant = request.tenant
        charged = self._waiting.pop(request, None)
        stops = charged is not None and self._leave(tenant)
        admitted = self._admitted.setdefault(tenant, {})
        if charged is None:  # not waiting: the request held KV blocks at `arrive`, which counted it as running
            charged = admitted[request]
        admitted[request] = charged
        if not charged.was_admitted:
            charged.was_admitted = True
            self.collect(tenant)
            num_spared = 0 if self._charges_cached else request.num_cached_tokens
            self._cost(tenant, self._prompt_weight * (request.num_prompt_tokens - num_spared), 1)
        return stops

    def preempt(self, request: RequestView) -> bool:
        """Count a preempted or moved request as waiting. Returns True if its tenant begins to wait."""
        charged = self._take_admitted(request)
        return charged is not None and self._wait(request, charged)

    def depart(self, requests: Iterable[RequestView]) -> list[str]:
        """Charge the last tokens of requests that have left, and forget these requests. Returns the tenants whose last
        waiting request was among them.
        """
        stopped = []
        for request in requests:
            charged = None if self._take_admitted(request) is not None else self._waiting.pop(request, None)
            if charged is not None:
                self._collect(request.tenant, {request: charged})
                if self._leave(request.tenant):
                    stopped.append(request.tenant)
        return stopped

    def collect(self, tenant: str) -> None:
        """Charge the tenant for tokens that its requests have generated since the last charge."""
        admitted = self._admitted.get(tenant)
        if admitted:
            self._collect(tenant, admitted)

    def collect_all(self) -> None:
        """Charge every tenant for tokens that its requests have generated since the last charge."""
        for tenant, admitted in self._admitted.items():
            self._collect(tenant, admitted)

    def _collect(self, tenant: str, living: Mapping[RequestView, _Charged]) -> None:
        num_new = 0
        for request, charged in living.items():
            num_output_tokens = request.num_output_tokens
            num_new += num_output_tokens - charged.num_output_tokens
            charged.num_output_tokens = num_output_tokens
        if num_new:
            self._cost(tenant, self._output_weight, num_new)

    def _take_admitted(self, request: RequestView) -> _Charged | None:
        tenant = request.tenant
        admitted = self._admitted.get(tenant)
        charged = None if admitted is None else admitted.get(request)
        if admitted is None or charged is None:
            return None
        self._collect(tenant, {request: charged})
        del admitted[request]
        if not admitted:
            del self._admitted[tenant]
        return charged

    def _cost(self, tenant: str, cost: float, times: int) -> None:
        if cost:
            self._charge(tenant, cost / self._weights.get(tenant, 1.0), times)

    def _wait(self, request: RequestView, charged: _Charged) -> bool:
        tenant = request.tenant
        self._waiting[request] = charged
        num_before = self.num_waiting.get(tenant, 0)
        self.num_waiting[tenant] = num_before + 1
        return not num_before

    def _leave(self, tenant: str) -> bool:
        left = self.num_waiting[tenant] - 1
        if left:
            self.num_waiting[tenant] = left
        else:
            del self.num_waiting[tenant]
        return not left


def added(total: float, cost: float, times: int) -> float:
    """Return `total` after adding `cost` to it `times` times. The sum is the same to the last bit, however its terms
    are divided among calls.
    """
    if times > 1 and total.is_integer() and cost.is_integer() and abs(total) + times * abs(cost) <= _EXACT:
        return total + times * cost
    for _ in range(times):
        total += cost
    return total
