"""Equinox: tenants ordered by the service that their users got and the resources that they used, both predicted before
a request runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from vajra_policies.size.lengths import FirstLengths, LengthConfig, Lengths
from vajra_py.contract import (
    BatchFeatures,
    FallenGroups,
    KeyMotion,
    Layer,
    PolicyContext,
    PolicySpec,
    ReplicaId,
    RequestView,
)


class EquinoxConfig(LengthConfig):
    """Parameters of `equinox`."""

    user_share: float = Field(0.7, ge=0, le=1, description="Weight of the user's counter (alpha).")
    output_weight: float = Field(
        4.0, ge=0, le=1e9, description="Ratio of the charge for an output token to the charge for a prompt token."
    )
    patience_s: float = Field(
        10.0, gt=0, description="Wait for admission that halves the value of a request to its user, seconds."
    )


class Equinox:
    """Key of tenant u = HF_u = alpha * UFC_u + (1 - alpha) * RFC_u, least first.

    - UFC, the user counter: (p + w * d) / (1 + wait / `patience_s`) for each request, since late tokens are worth less.
    - RFC, the resource counter: device time of each request (its prefill and its share of d decode steps), converted to
      the number of prompt tokens that take as long. Prompt and output tokens are thus charged by their real cost.
    - Both are charged at admission with the predicted output length d, and corrected when the request ends.
    - A tenant that begins to wait is lifted to the least HF of the tenants that wait or run or, if there are none, of
      the tenants that left last.

    Left out: the mixture of experts that predicts (the backend's `output_length` and latency model take its place),
    adaptive batching, and tenants' weights. From memory: alpha and w. The paper's exact terms could not be checked;
    `patience_s`, the form of the discount and the lift are ours.

    Source: "Equinox: Holistic Fair Scheduling in Serving Large Language Models" (arXiv:2508.16646).
    """

    key_motion = KeyMotion.STATIC

    def __init__(self, config: EquinoxConfig, context: PolicyContext) -> None:
        self._config = config
        self._lengths = FirstLengths(Lengths(config, context.output_lengths))
        latency = context.latency
        empty = latency.stage_time_s(BatchFeatures().with_decodes(1, 0))
        self._token_s = max((latency.stage_time_s(BatchFeatures().with_chunk(1024, 0)) - empty) / 1024, 1e-12)
        self._latency = latency
        self._slots = context.limits.max_batch_size
        self._counters: dict[str, float] = {}
        self._alive: dict[str, dict[RequestView, None]] = {}
        self._idle_level = 0.0
        """Level to which tenants are lifted while no request waits or runs."""
        self._charged: dict[RequestView, tuple[float, float]] = {}
        """(discount, charge) of each admitted request."""
        self.fallen_groups = FallenGroups()

    def key(self, request: RequestView, now: float) -> float:
        """Return 0: requests of one tenant are served in order of arrival."""
        return 0.0

    def group(self, request: RequestView) -> str:
        """Return the request's tenant."""
        return request.tenant

    def group_key(self, group: str) -> float:
        """Return HF, the tenant's combined counter, in weighted tokens."""
        return self._counters.get(group, 0.0)

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        """Lift the counters of tenants that begin to wait."""
        for request in requests:
            tenant = request.tenant
            if tenant not in self._alive:
                level = min((self._counters.get(one, 0.0) for one in self._alive), default=self._idle_level)
                self._counters[tenant] = max(self._counters.get(tenant, 0.0), level)
            self._alive.setdefault(tenant, {})[request] = None

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Charge the predicted cost, once per request."""
        if request not in self._charged:
            discount = 1.0 / (1.0 + (now - request.arrived_at) / self._config.patience_s)
            charge = self._charge(request, self._lengths.total(request), discount)
            self._charged[request] = discount, charge
            self._counters[request.tenant] = self._counters.get(request.tenant, 0.0) + charge

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Replace the predicted charges of these requests by their real ones. Forget tenants without live requests
        whose counters are at most the level to which tenants are lifted.
        """
        for request in requests:
            tenant = request.tenant
            discount, charged = self._charged.pop(request, (0.0, 0.0))
            if charged:
                real = self._charge(request, request.num_output_tokens, discount)
                self._counters[tenant] = self._counters.get(tenant, 0.0) + real - charged
                self.fallen_groups.add(tenant)
            members = self._alive.get(tenant, {})
            members.pop(request, None)
            if not members:
                self._alive.pop(tenant, None)
        self._lengths.forget(requests)
        left = dict.fromkeys(request.tenant for request in requests)
        floor = min((self._counters.get(one, 0.0) for one in self._alive or left), default=self._idle_level)
        if not self._alive:
            self._idle_level = floor
            left = dict.fromkeys(self._counters)
        for tenant in left:
            if tenant not in self._alive and self._counters.get(tenant, 0.0) <= floor:
                self._counters.pop(tenant, None)

    def _charge(self, request: RequestView, output: float, discount: float) -> float:
        prompt, alpha = request.num_prompt_tokens, self._config.user_share
        user = (prompt + self._config.output_weight * output) * discount
        context = int(prompt + output / 2)
        full = self._latency.stage_time_s(BatchFeatures().with_decodes(self._slots, self._slots * context))
        device = prompt + output * full / self._slots / self._token_s
        return alpha * user + (1.0 - alpha) * device


SPEC = PolicySpec(
    name="equinox",
    layer=Layer.REQUEST_PRIORITIZER,
    config=EquinoxConfig,
    build=Equinox,
    summary=(
        "The tenant with the least weighted sum of two predicted counters first: service received in time, and "
        "resources used."
    ),
    source="Equinox (arXiv:2508.16646)",
    advice=(
        "Use it where tenants' requests differ in prompt and output lengths, and shares should follow their cost. Not "
        "where shares are defined in tokens (`vtc`), or output lengths cannot be predicted."
    ),
)
