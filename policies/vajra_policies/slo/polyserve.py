"""PolyServe: tiers of promises on replicas of their own, each request to the most loaded one that still keeps its promises."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import Field, field_validator

from vajra_policies.routing import load_in, those_up
from vajra_py.contract import (
    BatchFeatures,
    Layer,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    QueueView,
    ReplicaId,
    ReplicaLoadView,
    RequestView,
)


class PolyserveConfig(PolicyConfig):
    """Parameters of `polyserve`."""

    tiers_s: tuple[float, ...] = Field(
        (0.02, 0.03, 0.05, 0.1),
        min_length=1,
        description="Promised times per output token of the tiers, rising seconds; a request belongs to the loosest one that keeps its own.",
    )
    default_output_tokens: float = Field(
        256.0,
        ge=0,
        description="Mean output of a tier before any of its requests has ended.",
        json_schema_extra={"unit": "tokens"},
    )

    @field_validator("tiers_s")
    @classmethod
    def _rising(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if value[0] <= 0 or list(value) != sorted(set(value)):
            raise ValueError(f"tiers_s do not rise from above 0 (got {value}). Allowed: such as [0.03, 0.1]")
        return value


@dataclass(slots=True)
class _Outputs:
    """Output tokens of a tier's ended requests."""

    mean: float
    count: int = 0


class Polyserve:
    """The most loaded replica of the request's tier that passes the checks; else one of a tighter tier; else an idle one, which joins.

    A replica keeps its promises with one more request if (1) the first token comes in time behind the prompts that are pending there,
    (2) the second one does, and (3) a decode step of all of its requests, each grown by the mean output of its tier, takes at most the TPOT of the
    replica's tier, and their memory suffices. Where no replica passes, the request waits in the shared queue until one does or is idle. One whose promises not even an idle replica
    keeps belongs to the loosest tier, without promises.

    So load forms a gradient, and replicas that are not needed stay idle and may be scaled away. With a fixed number of replicas and
    nothing to save, `least_loaded` has shorter times.

    Left out: reassignment of replicas between tiers while they work, dynamic chunks, and split prompts and decodes. From a summary of
    sections 4.5 to 4.7; the tiers are those of its experiments, from memory.

    Source: Zhu et al., "PolyServe: Efficient Multi-SLO Serving at Scale" (arXiv:2507.17769).
    """

    def __init__(self, config: PolyserveConfig, context: PolicyContext) -> None:
        self._tiers_s = config.tiers_s
        self._latency = context.latency
        self._prefill_time = context.prefill_time
        self._block_size = context.limits.block_size
        self._load = load_in("tokens")
        self._outputs = [_Outputs(config.default_output_tokens) for _ in config.tiers_s]
        self._placed: dict[RequestView, ReplicaId] = {}
        self._num_there: dict[ReplicaId, int] = {}
        """Requests placed at each replica that is not idle."""
        self._tier_of: dict[ReplicaId, int] = {}
        """Tier of each replica that is not idle."""

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """The replica by the rule, or None: the request waits for one."""
        self._leave(request)
        up = those_up(replicas)
        if not up:
            return None
        tier, has_promises = self._tier(request, now)
        for own in range(tier, -1, -1):
            members = [one for one in up if self._tier_of.get(one.replica_id) == own]
            for one in sorted(members, key=lambda one: (-self._load(one), one.replica_id)):
                if self._keeps(request, one, own, now, has_promises=has_promises):
                    return self._place(request, one.replica_id, own)
        idle = min((one.replica_id for one in up if one.replica_id not in self._tier_of), default=None)
        return None if idle is None else self._place(request, idle, tier)

    def pull(self, replica: ReplicaLoadView, queued: QueueView, now: float) -> Iterable[str]:
        """The most urgent request that waits for a replica like this one."""
        for request in queued:
            tier, has_promises = self._tier(request, now)
            own = self._tier_of.get(replica.replica_id)
            if own is None or (own <= tier and self._keeps(request, replica, own, now, has_promises=has_promises)):
                yield request.request_id
                return

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Place a request that was pulled."""
        if self._placed.get(request) != replica_id:
            self._leave(request)
            self._place(request, replica_id, self._promised_tier(request))

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Learn outputs; a replica without requests is idle."""
        for request in requests:
            if request.num_output_tokens:
                outputs = self._outputs[self._promised_tier(request)]
                outputs.count += 1
                outputs.mean += (request.num_output_tokens - outputs.mean) / outputs.count
            self._leave(request)

    def _place(self, request: RequestView, replica_id: ReplicaId, tier: int) -> ReplicaId:
        self._placed[request] = replica_id
        self._num_there[replica_id] = self._num_there.get(replica_id, 0) + 1
        self._tier_of.setdefault(replica_id, tier)
        return replica_id

    def _leave(self, request: RequestView) -> None:
        replica_id = self._placed.pop(request, None)
        if replica_id is not None:
            self._num_there[replica_id] -= 1
            if not self._num_there[replica_id]:
                del self._num_there[replica_id], self._tier_of[replica_id]

    def _promised_tier(self, request: RequestView) -> int:
        """The loosest tier that keeps the request's time per token, or the tightest of all."""
        tpot_s = _tpot_s(request)
        last = len(self._tiers_s) - 1
        return last if tpot_s is None else max(sum(one <= tpot_s for one in self._tiers_s) - 1, 0)

    def _tier(self, request: RequestView, now: float) -> tuple[int, bool]:
        """Tier of the request, and whether its promises can be kept: not if an idle replica would break them."""
        prefill_s = self._prefill_time.total_s(request.num_prompt_tokens)
        tier = self._promised_tier(request)
        if self._in_time(request, tier, prefill_s, self._step_s(1, request.num_prompt_tokens), now):
            return tier, True
        return len(self._tiers_s) - 1, False

    def _in_time(self, request: RequestView, tier: int, prefill_s: float, step_s: float, now: float) -> bool:
        """Checks (1) and (2): the first two tokens."""
        if request.ttft_slo_s is None:
            return True
        left_s = request.arrived_at + request.ttft_slo_s - now
        tpot_s = _tpot_s(request)
        return prefill_s <= left_s and prefill_s + step_s <= left_s + (
            self._tiers_s[tier] if tpot_s is None else tpot_s
        )

    def _keeps(
        self, request: RequestView, replica: ReplicaLoadView, tier: int, now: float, *, has_promises: bool
    ) -> bool:
        """The three checks, for a replica of this tier."""
        prompt = request.num_prompt_tokens
        hit = min(replica.prefix_hit_tokens(request), prompt - 1)
        own_s = self._prefill_time.remaining_s(prompt, hit)
        prefill_s = own_s * (1.0 + replica.num_pending_tokens / (prompt - hit))
        num_requests = replica.num_running + replica.num_waiting + 1
        num_tokens = self._load(replica) + prompt
        if has_promises and not self._in_time(request, tier, prefill_s, self._step_s(num_requests, num_tokens), now):
            return False
        peak = num_tokens + num_requests * self._outputs[tier].mean
        fits = num_requests <= replica.max_batch_size and peak <= replica.num_blocks * self._block_size
        return fits and self._step_s(num_requests, peak) <= self._tiers_s[tier]

    def _step_s(self, num_decodes: int, context_tokens: float) -> float:
        return self._latency.batch_time_s(BatchFeatures().with_decodes(num_decodes, int(context_tokens)))


def _tpot_s(request: RequestView) -> float | None:
    return request.tpot_slo_s if request.tpot_slo_s is not None else request.tbt_slo_s


def _build(config: PolyserveConfig, context: PolicyContext) -> Polyserve:
    return Polyserve(config, context)


SPEC = PolicySpec(
    name="polyserve",
    layer=Layer.REPLICASET_SCHEDULER,
    config=PolyserveConfig,
    build=_build,
    summary="Tiers of promised times per token on replicas of their own; each request to the fullest that keeps its promises.",
    source="PolyServe (arXiv:2507.17769)",
)
