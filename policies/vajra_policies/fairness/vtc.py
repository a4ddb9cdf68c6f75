"""Virtual token counter: the tenant that has been served least goes first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush, heapreplace

from vajra_policies.fairness.accounts import Accounts, TokenCostConfig, added
from vajra_py.contract import (
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
    """Key of tenant u = c_u, its counter: weighted tokens served to it so far, divided by its share f_u.

    - A request's admission adds w_p * prompt / f_u to c_u; each token that it generates adds w_q / f_u.
    - Lift: when a request of u arrives and no other request of u waits, c_u rises to the least counter of the waiting
      tenants or, if no tenant waits, to the counter of the tenant that waited last. Time without requests therefore
      earns no credit.
    - Requests of one tenant are served in order of arrival.

    Without preemptions, the services of two tenants that wait throughout an interval differ by at most 2 U, with U =
    max(w_p * longest prompt, w_q * M) and M the largest number of tokens in a running batch. Waiting tenants share
    evenly; a tenant that demands less than its share gets all it demands.

    A counter is updated only when it is read. A counter is forgotten when no request of its tenant waits or runs, and
    the counter is at most the least counter among the tenants that wait or run and the tenant that waited last. Every
    later lift is to at least that value, so the forgotten counter would have no effect.

    Left out: charging predicted lengths in advance, and cost functions other than weighted tokens. Cached prompt tokens
    are charged in full.

    Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI'24 (arXiv:2401.00588), algorithms 2 and 4.
    """

    key_motion = KeyMotion.STATIC

    def __init__(self, config: TokenCostConfig, *, lifts: bool = True) -> None:
        self._lifts = lifts
        self._accounts = Accounts(config, self._charge)
        self._counters: dict[str, float] = {}
        self._last_waiting = ""
        """Tenant whose request was admitted last; it counts as the tenant that waited last."""
        self._least_waiting = _LeastCounter(self.group_key, lambda tenant: tenant in self._accounts.num_waiting)
        self._least_live = _LeastCounter(self.group_key, self._accounts.is_live)
        self._left: list[tuple[float, str]] = []
        """Heap of (counter, tenant) of tenants that have left; some may have returned, or been forgotten."""

    def key(self, request: RequestView, now: float) -> float:
        """Return 0: requests of one tenant are served in order of arrival."""
        return 0.0

    def group(self, request: RequestView) -> str:
        """Return the request's tenant."""
        return request.tenant

    def group_key(self, group: str) -> float:
        """Return the tenant's counter, weighted tokens."""
        self._accounts.collect(group)
        return self._counters.get(group, 0.0)

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        """Lift the counters of tenants that begin to wait."""
        for request in requests:
            tenant = request.tenant
            if self._lifts and tenant not in self._accounts.num_waiting:
                level = self._level()
                if self.group_key(tenant) < level:
                    self._counters[tenant] = level
            begins = self._accounts.arrive(request)
            if self._lifts:
                self._least_live.add(tenant)
                if begins:
                    self._least_waiting.add(tenant)

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Charge the tenant for the prompt, at the request's first admission."""
        tenant, before = request.tenant, self._last_waiting
        self._accounts.admit(request)
        if tenant != before:
            self._last_waiting = tenant
            self._leave(before)

    def on_preemption(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Count the request as waiting; its charges are kept."""
        if self._accounts.preempt(request) and self._lifts:
            self._least_waiting.add(request.tenant)

    def on_moved(self, request: RequestView, source: ReplicaId, target: ReplicaId, now: float) -> None:
        """Count the request as waiting; its charges are kept."""
        self.on_preemption(request, source, now)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Charge the tenants for the last tokens of these requests, and forget counters that cannot matter any more."""
        self._accounts.depart(requests)
        for tenant in dict.fromkeys(request.tenant for request in requests):
            self._leave(tenant)
        self._forget()

    def _charge(self, tenant: str, cost: float, times: int) -> None:
        self._counters[tenant] = added(self._counters.get(tenant, 0.0), cost, times)

    def _level(self) -> float:
        """Return the counter to which a tenant that begins to wait now is lifted."""
        level = self._least_waiting.value()
        return self.group_key(self._last_waiting) if level is None else level

    def _leave(self, tenant: str) -> None:
        """Mark the tenant's counter to be forgotten later, if no request of the tenant waits or runs."""
        if self._lifts and tenant in self._counters and not self._accounts.is_live(tenant):
            heappush(self._left, (self._counters[tenant], tenant))

    def _forget(self) -> None:
        if not self._left:
            return
        last = self._last_waiting
        least = self._least_live.value()
        floor = self.group_key(last) if least is None else min(least, self.group_key(last))
        while self._left and self._left[0][0] <= floor:
            counter, tenant = heappop(self._left)
            if tenant != last and not self._accounts.is_live(tenant) and self._counters.get(tenant) == counter:
                del self._counters[tenant]


class _LeastCounter:
    """Least counter of the tenants in a set. Counters only rise, so counters stored in a heap are never too high."""

    def __init__(self, counter: Callable[[str], float], belongs: Callable[[str], bool]) -> None:
        self._counter = counter
        self._belongs = belongs
        self._heap: list[tuple[float, str]] = []
        self._listed: set[str] = set()

    def add(self, tenant: str) -> None:
        """Add a tenant to the set."""
        if tenant not in self._listed:
            self._listed.add(tenant)
            heappush(self._heap, (self._counter(tenant), tenant))

    def value(self) -> float | None:
        """Return the least counter; None if the set is empty."""
        heap = self._heap
        while heap:
            known, tenant = heap[0]
            if not self._belongs(tenant):
                heappop(heap)
                self._listed.discard(tenant)
                continue
            counter = self._counter(tenant)
            if counter == known:
                return counter
            heapreplace(heap, (counter, tenant))
        return None


def _build(config: VtcConfig, context: PolicyContext) -> Vtc:
    return Vtc(config)


SPEC = PolicySpec(
    name="vtc",
    layer=Layer.REQUEST_PRIORITIZER,
    config=VtcConfig,
    build=_build,
    summary="Virtual token counter: the tenant that has received the fewest weighted tokens goes first.",
    source="VTC (Sheng et al., OSDI'24, arXiv:2401.00588)",
    advice=(
        "Use it where tenants share replicas and one of them may send too many requests; a tenant that demands less "
        "than its share is served at once. Not with a replica scheduler that preempts by urgency: the order of "
        "counters changes all the time."
    ),
)
