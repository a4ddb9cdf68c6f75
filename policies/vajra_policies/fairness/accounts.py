"""Accounts of tenants: tokens that each is charged for, and requests of each that wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from vajra_policies.waiting import Waiting
from vajra_py.contract import EndedStep, PolicyConfig, RequestView

_QUANTA_IN_MEMORY = 20
"""Quanta that the KV memory holds, by default; as in the artifact of VTC."""


class TokenCostConfig(PolicyConfig):
    """Parameters of what a tenant is charged."""

    prompt_weight: float = Field(
        1.0, ge=0, description="Charge for a prompt token (w_p), when its request is admitted."
    )
    output_weight: float = Field(2.0, ge=0, description="Charge for a generated token (w_q), when it is generated.")
    tenant_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="Share of each tenant relative to the others (f_u); 1 for those not listed."
    )


class QuantumConfig(TokenCostConfig):
    """Parameters of policies that give tenants a quantum at a time."""

    quantum: float | None = Field(
        None,
        gt=0,
        description="Charge that a tenant may run up in one turn (Q), weighted tokens; null: a twentieth of the KV memory's tokens.",
    )

    def quantum_for(self, num_kv_tokens: int) -> float:
        """The quantum of replicas with room for so many tokens."""
        return self.quantum if self.quantum is not None else num_kv_tokens / _QUANTA_IN_MEMORY


@dataclass(slots=True)
class _Charged:
    """Charges of one live request so far."""

    was_admitted: bool
    num_output_tokens: int


class Accounts:
    """Charges tenants for tokens: w_p for each of a prompt at its first admission, w_q for each generated one, over f_u.

    A prompt is charged in full, or without what the prefix cache spared, and once: what is computed again after a preemption is
    not. `charge` is called with (tenant, cost), at once where a request is admitted, and when a step has ended. The policy hands its
    callbacks on.
    """

    def __init__(
        self, config: TokenCostConfig, charge: Callable[[str, float], None], *, charges_cached: bool = True
    ) -> None:
        self._charges_cached = charges_cached
        self._prompt_weight = config.prompt_weight
        self._output_weight = config.output_weight
        self._weights = config.tenant_weights
        self._charge = charge
        self._live: dict[RequestView, _Charged] = {}
        self._waiting = Waiting(_tenant)
        self.waiting = self._waiting.groups
        """Waiting requests of each tenant that has any, in the order in which tenants began to wait."""

    def arrive(self, request: RequestView) -> None:
        """A request waits for the first time; one that runs already, or ran before this policy was in force, has paid."""
        self._live[request] = _Charged(request.admitted_index > 0, request.num_output_tokens)
        if not request.is_resident:
            self._waiting.add(request)

    def admit(self, request: RequestView) -> None:
        """A waiting request has got its memory; its prompt is charged for the first time."""
        self._waiting.remove(request)
        charged = self._live[request]
        if not charged.was_admitted:
            charged.was_admitted = True
            num_spared = 0 if self._charges_cached else request.num_cached_tokens
            self._cost(request.tenant, self._prompt_weight * (request.num_prompt_tokens - num_spared))

    def preempt(self, request: RequestView) -> None:
        """A running request waits again."""
        self._waiting.add(request)

    def end_step(self, step: EndedStep) -> None:
        """Charge for the tokens that a step has generated."""
        for request in step.requests:
            charged = self._live.get(request)
            if charged is not None:
                self._settle(request, charged)

    def depart(self, requests: Iterable[RequestView]) -> None:
        """Requests have left; they are charged for their last tokens and forgotten."""
        for request in requests:
            charged = self._live.pop(request, None)
            if charged is not None:
                self._settle(request, charged)
            self._waiting.remove(request)

    def _settle(self, request: RequestView, charged: _Charged) -> None:
        num_new = request.num_output_tokens - charged.num_output_tokens
        if num_new:
            charged.num_output_tokens += num_new
            self._cost(request.tenant, self._output_weight * num_new)

    def _cost(self, tenant: str, cost: float) -> None:
        self._charge(tenant, cost / self._weights.get(tenant, 1.0))


def _tenant(request: RequestView) -> str:
    return request.tenant
