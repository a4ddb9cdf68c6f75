"""Splitwise's mixed pool: a full pool borrows replicas of the other pool, which return when their work is done.

Source: Splitwise (ISCA'24, arXiv:2311.18677), section 4.4; splitwise-sim, `MixedPoolScheduler`.
Left out: the search for the numbers and kinds of machines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import Field

from vajra_policies.routers.scheduled_tokens import Placement, ScheduledTokens
from vajra_policies.routing import BindsOnArrival, those_up
from vajra_py.contract import (
    EndedStep,
    Layer,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    ReplicaId,
    ReplicaLoadView,
    RequestView,
)


class MixedPoolConfig(PolicyConfig):
    """Parameters of `splitwise_mixed_pool`."""

    prompt_pool: str = Field("prompt", description="Pool whose replicas compute prompts, of role `mixed`.")
    token_pool: str = Field("token", description="Pool whose replicas decode, of role `mixed`.")
    max_pending_prompt_tokens: int = Field(
        8192,
        ge=1,
        description="Pending tokens beyond which a replica on which requests wait takes no more prompts, tokens.",
    )


class MixedPool(BindsOnArrival):
    """Places prompt and decodes of a request when it arrives. A replica belongs to the prompt pool, the decode pool, or
    the mixed pool.

    A prompt goes to the replica of the prompt pool with the fewest pending tokens; if its queue is long, to the mixed
    pool; if the queues of the mixed pool are long too, the decode pool lends a replica to the mixed pool. Decodes go to
    the replica of the decode pool with the least memory in use by the requests placed there; if it lacks room, to the
    mixed pool; if the mixed pool lacks room too, the prompt pool lends a replica. If no replica can be lent, prompt and
    decodes go to the replica with the fewest pending tokens of all. A mixed replica without work returns to its pool.
    Ties go to the replica that has been in its pool longest. The output length is assumed to be `max_tokens`. Replicas
    of further pools are always mixed. The policy listens to every step.
    """

    def __init__(self, config: MixedPoolConfig, context: PolicyContext) -> None:
        self._config = config
        self._block_size = context.limits.block_size
        self._scheduled = ScheduledTokens()
        self._home: dict[ReplicaId, dict[ReplicaId, None]] = {}
        """Home pool of each known replica: `_prompts`, `_tokens` or `_mixed`."""
        self._prompts: dict[ReplicaId, None] = {}
        self._tokens: dict[ReplicaId, None] = {}
        self._mixed: dict[ReplicaId, None] = {}
        """Replicas of the mixed pool. In each of the three pools, replicas are in the order in which they joined it."""

    # Placing

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Return the replica that computes the prompt."""
        self._scheduled.forget(request)
        self._see(replicas)
        up = {one.replica_id: one for one in those_up(replicas)}
        if not up:
            return None
        prompt_at, token_at = self._chosen(request, up)
        num_prompt_tokens = request.num_prompt_tokens
        placement = Placement(prompt_at, token_at, num_prompt_tokens, num_prompt_tokens + request.max_tokens)
        self._scheduled.place(request, placement)
        return prompt_at

    def place_after_prompt(
        self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float
    ) -> ReplicaId | None:
        """Return the decode replica chosen on arrival; if it is not up, the replica with the least memory in use among
        those that are up. None if no replica is up, or if the request was not placed on arrival.
        """
        placed = self._scheduled.placed.get(request)
        up = {one.replica_id for one in those_up(replicas)}
        if placed is None or not up:
            return None
        if placed.token_at in up:
            return placed.token_at
        self._see(replicas)
        token_at = min(up, key=lambda one: (self._scheduled.at[one].memory, one))
        self._scheduled.change(request, token_at=token_at)
        return token_at

    def _see(self, replicas: Sequence[ReplicaLoadView]) -> None:
        for one in replicas:
            if one.replica_id not in self._home:
                home = self._prompts if one.pool == self._config.prompt_pool else self._tokens
                if one.pool not in (self._config.prompt_pool, self._config.token_pool):
                    home = self._mixed
                self._home[one.replica_id] = home
                home[one.replica_id] = None

    def _chosen(self, request: RequestView, up: Mapping[ReplicaId, ReplicaLoadView]) -> tuple[ReplicaId, ReplicaId]:
        pools = (self._prompts, self._tokens, self._mixed)
        prompts, tokens, mixed = ([up[one] for one in pool if one in up] for pool in pools)
        prompt_at = next(filter(None, (self._for_prompt(pool, request) for pool in (prompts, mixed))), None)
        token_at = next(filter(None, (self._for_tokens(pool, request) for pool in (tokens, mixed))), None)
        if prompt_at is None and tokens:
            prompt_at = min(tokens, key=self._pending)
            self._lend(prompt_at)
        if token_at is None and prompts:
            token_at = min(prompts, key=self._memory)
            self._lend(token_at)
        if prompt_at is None or token_at is None:
            rest = [up[one] for pool in (self._prompts, self._mixed, self._tokens) for one in pool if one in up]
            prompt_at = token_at = min(rest, key=self._pending)
        return prompt_at.replica_id, token_at.replica_id

    def _for_prompt(self, pool: Sequence[ReplicaLoadView], request: RequestView) -> ReplicaLoadView | None:
        best = min(pool, key=self._pending, default=None)
        if best is None:
            return None
        is_long = self._pending(best) + request.num_prompt_tokens > self._config.max_pending_prompt_tokens
        return None if is_long and self._has_waiting(best) else best

    def _for_tokens(self, pool: Sequence[ReplicaLoadView], request: RequestView) -> ReplicaLoadView | None:
        best = min(pool, key=self._memory, default=None)
        if best is None:
            return None
        needed = self._memory(best) + request.num_prompt_tokens + request.max_tokens
        return best if needed <= best.num_blocks * self._block_size else None

    def _pending(self, replica: ReplicaLoadView) -> int:
        return self._scheduled.at[replica.replica_id].pending

    def _memory(self, replica: ReplicaLoadView) -> int:
        return self._scheduled.at[replica.replica_id].memory

    def _has_waiting(self, replica: ReplicaLoadView) -> bool:
        return replica.num_waiting > 0

    # Lending replicas

    def _lend(self, replica: ReplicaLoadView) -> None:
        del self._home[replica.replica_id][replica.replica_id]
        self._mixed[replica.replica_id] = None

    def _return_if_idle(self, replica_id: ReplicaId) -> None:
        home = self._home.get(replica_id, self._mixed)
        is_lent = home is not self._mixed and replica_id in self._mixed
        if is_lent and not self._scheduled.at[replica_id].here:
            del self._mixed[replica_id]
            home[replica_id] = None

    # Completed work

    def on_step_end(self, step: EndedStep) -> None:
        """Count computed prompts as no longer pending, and return the step's replica to its pool if it is lent and
        idle.
        """
        placements = self._scheduled.placed
        for request in step.requests:
            placed = placements.get(request)
            if placed is None:
                continue
            if placed.is_pending and request.num_output_tokens > 0:
                self._scheduled.change(request, is_pending=False)
                if placed.token_at != placed.prompt_at:
                    self._scheduled.at[placed.prompt_at].here.pop(request, None)
            if request.end_reason is not None:
                self._scheduled.forget(request)
        self._return_if_idle(step.replica_id)

    def on_moved(self, request: RequestView, source: ReplicaId, target: ReplicaId, now: float) -> None:
        """Count the request's KV at the target, and no longer at the source."""
        if request in self._scheduled.placed:
            self._scheduled.change(request, token_at=target, has_left=True)
            self._scheduled.at[source].here.pop(request, None)
            self._scheduled.at[target].here[request] = None

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Forget these requests."""
        for request in requests:
            placed = self._scheduled.forget(request)
            if placed is not None:
                self._return_if_idle(placed.prompt_at)
                self._return_if_idle(placed.token_at)


SPEC = PolicySpec(
    name="splitwise_mixed_pool",
    layer=Layer.REPLICASET_SCHEDULER,
    config=MixedPoolConfig,
    build=MixedPool,
    summary="Separate pools for prompts and decodes, which lend each other replicas while one is full.",
    source="Splitwise (ISCA'24, arXiv:2311.18677); splitwise-sim, MixedPoolScheduler",
    advice="Use it with pools for prompts and decodes whose load changes. Not with one pool.",
)
