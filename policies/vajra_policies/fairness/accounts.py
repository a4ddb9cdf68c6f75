"""Accounts of tenants: tokens that each is charged for, and requests of each that wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from vajra_py.contract import EndedStep, PolicyConfig, RequestView


class TokenCostConfig(PolicyConfig):
    """Parameters of what a tenant is charged."""

    prompt_weight: float = Field(
        1.0, ge=0, description="Charge for a prompt token (w_p), when its request is admitted."
    )
    output_weight: float = Field(2.0, ge=0, description="Charge for a generated token (w_q), when it is generated.")
    tenant_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="Share of each tenant relative to the others (f_u); 1 for those not listed."
    )


@dataclass(slots=True)
class _Charged:
    """Charges of one live request so far."""

    waits: bool
    was_admitted: bool
    num_output_tokens: int


class Accounts:
    """Charges tenants for tokens: w_p for each of a prompt at its first admission, w_q for each generated one, over f_u.

    A prompt is charged in full, cached or not, and once: what is computed again after a preemption is not. `charge` is called
    with (tenant, cost), at once where a request is admitted, and when a step has ended. The policy hands its callbacks on.
    """

    def __init__(self, config: TokenCostConfig, charge: Callable[[str, float], None]) -> None:
        self._prompt_weight = config.prompt_weight
        self._output_weight = config.output_weight
        self._weights = config.tenant_weights
        self._charge = charge
        self._live: dict[RequestView, _Charged] = {}
        self.num_waiting: dict[str, int] = {}
        """Waiting requests of each tenant that has any, in the order in which tenants began to wait."""

    def arrive(self, request: RequestView) -> None:
        """A request waits for the first time; one that runs already, or ran before this policy was in force, has paid."""
        waits = not request.is_resident
        self._live[request] = _Charged(waits, request.admitted_index > 0, request.num_output_tokens)
        if waits:
            self._wait(request.tenant)

    def admit(self, request: RequestView) -> None:
        """A waiting request has got its memory; its prompt is charged for the first time."""
        charged = self._live[request]
        if charged.waits:
            charged.waits = False
            self._leave(request.tenant)
        if not charged.was_admitted:
            charged.was_admitted = True
            self._cost(request.tenant, self._prompt_weight * request.num_prompt_tokens)

    def preempt(self, request: RequestView) -> None:
        """A running request waits again."""
        charged = self._live[request]
        if not charged.waits:
            charged.waits = True
            self._wait(request.tenant)

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
                if charged.waits:
                    self._leave(request.tenant)

    def _settle(self, request: RequestView, charged: _Charged) -> None:
        num_new = request.num_output_tokens - charged.num_output_tokens
        if num_new:
            charged.num_output_tokens += num_new
            self._cost(request.tenant, self._output_weight * num_new)

    def _cost(self, tenant: str, cost: float) -> None:
        self._charge(tenant, cost / self._weights.get(tenant, 1.0))

    def _wait(self, tenant: str) -> None:
        self.num_waiting[tenant] = self.num_waiting.get(tenant, 0) + 1

    def _leave(self, tenant: str) -> None:
        left = self.num_waiting[tenant] - 1
        if left:
            self.num_waiting[tenant] = left
        else:
            del self.num_waiting[tenant]
