"""Virtual token counter: the tenant that has been served least goes first."""

from __future__ import annotations

from collections.abc import Sequence

from vajra_policies.fairness.accounts import Accounts, TokenCostConfig
from vajra_py.contract import (
    EndedStep,
    KeyMotion,
    Layer,
    PolicyContext,
    PolicySpec,
    ReplicaId,
    RequestView,
)


class VtcConfig(TokenCostConfig):
    """Parameters of `vtc`; the defaults are the paper's."""


class Vtc:
    """Key = c_u, the counter of the request's tenant u: tokens served to it so far, weighted, over its share f_u.

    - A request's admission adds w_p * prompt / f_u to c_u; each token that it generates adds w_q / f_u.
    - Lift: when u begins to wait, c_u rises to the least counter of those that wait; where nobody waits, to the counter of
      the tenant that waited last. So time without requests earns no credit.
    - Requests of one tenant are served in order of arrival.

    Of two tenants that wait throughout, none is served more than 2 U beyond the other, in any interval, where requests are not
    preempted: U = max(w_p * longest prompt, w_q * M), with M the most tokens in a running batch. Tenants that wait share
    evenly; who asks for less than its share gets it. Counters move while a step is formed, so keys are `VOLATILE`.

    Left out: predicted lengths that are charged in advance, and cost functions other than weighted tokens. A tenant's counter
    stays for good, as the paper's does. Cached prompt tokens are charged in full.

    Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI'24 (arXiv:2401.00588), algorithms 2 and 4.
    """

    key_motion = KeyMotion.VOLATILE

    def __init__(self, config: TokenCostConfig, *, lifts: bool = True) -> None:
        self._lifts = lifts
        self._accounts = Accounts(config, self._charge)
        self._counters: dict[str, float] = {}
        self._last_waiting = ""

    def key(self, request: RequestView, now: float) -> float:
        """The tenant's counter, weighted tokens."""
        return self._counters.get(request.tenant, 0.0)

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        """Lift the counters of tenants that begin to wait."""
        waiting = self._accounts.waiting
        for request in requests:
            tenant = request.tenant
            if self._lifts and tenant not in waiting:
                others = waiting or (self._last_waiting,)
                level = min(self._counters.get(other, 0.0) for other in others)
                self._counters[tenant] = max(self._counters.get(tenant, 0.0), level)
            self._accounts.arrive(request)

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Charge for the prompt."""
        self._last_waiting = request.tenant
        self._accounts.admit(request)

    def on_preemption(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Count it among the waiting; nothing is given back."""
        self._accounts.preempt(request)

    def on_step_end(self, step: EndedStep) -> None:
        """Charge for generated tokens."""
        self._accounts.end_step(step)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Charge for the last tokens."""
        self._accounts.depart(requests)

    def _charge(self, tenant: str, cost: float) -> None:
        self._counters[tenant] = self._counters.get(tenant, 0.0) + cost


def _build(config: VtcConfig, context: PolicyContext) -> Vtc:
    return Vtc(config)


SPEC = PolicySpec(
    name="vtc",
    layer=Layer.REQUEST_PRIORITIZER,
    config=VtcConfig,
    build=_build,
    summary="Virtual token counter: the tenant that has been served the fewest weighted tokens first.",
    source="VTC (Sheng et al., OSDI'24, arXiv:2401.00588)",
)
