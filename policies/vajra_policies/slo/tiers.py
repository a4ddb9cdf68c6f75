"""PolyServe's tiers of TPOT SLOs, and its checks that a replica with one more request would still meet the SLOs."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field, field_validator

from vajra_policies.routing import load_in
from vajra_policies.slo.targets import tpot_target_s
from vajra_py.contract import BatchFeatures, PolicyConfig, PolicyContext, ReplicaLoadView, RequestView


class TierConfig(PolicyConfig):
    """Parameters of tiers."""

    tiers_s: tuple[float, ...] = Field(
        (0.02, 0.03, 0.05, 0.1),
        min_length=1,
        description="TPOT SLOs of the tiers, ascending, seconds; a request belongs to the loosest tier that meets its own.",
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
            raise ValueError(f"tiers_s are not ascending numbers above 0 (got {value}). Allowed: such as [0.03, 0.1]")
        return value


@dataclass(slots=True)
class _Outputs:
    """Mean number of output tokens of a tier's ended requests, and the number of these requests."""

    mean: float
    count: int = 0


class Tiers:
    """Tiers of TPOT SLOs, numbered from 0, the tightest. The policy reports requests that have ended (`learn`)."""

    def __init__(self, config: TierConfig, context: PolicyContext) -> None:
        self._tpots_s = config.tiers_s
        self._latency = context.latency
        self._prefill_time = context.prefill_time
        self._block_size = context.limits.block_size
        self._load = load_in("tokens")
        self._outputs = [_Outputs(config.default_output_tokens) for _ in config.tiers_s]

    def learn(self, request: RequestView) -> None:
        """Include the output length of an ended request in the mean of its tier."""
        if request.num_output_tokens:
            outputs = self._outputs[self.target_tier(request)]
            outputs.count += 1
            outputs.mean += (request.num_output_tokens - outputs.mean) / outputs.count

    def target_tier(self, request: RequestView) -> int:
        """Return the loosest tier that meets the request's TPOT SLO, or the tightest tier if none does; without a TPOT
        SLO, the loosest.
        """
        tpot_s = tpot_target_s(request)
        last = len(self._tpots_s) - 1
        return last if tpot_s is None else max(sum(one <= tpot_s for one in self._tpots_s) - 1, 0)

    def of(self, request: RequestView, now: float) -> tuple[int, bool]:
        """Return (tier of the request, True); if even an idle replica would miss the request's SLOs, (loosest tier,
        False).
        """
        prefill_s = self._prefill_time.total_s(request.num_prompt_tokens)
        tier = self.target_tier(request)
        if self._in_time(request, tier, prefill_s, self._step_s(1, request.num_prompt_tokens), now):
            return tier, True
        return len(self._tpots_s) - 1, False

    def _in_time(self, request: RequestView, tier: int, prefill_s: float, step_s: float, now: float) -> bool:
        """Return True if the request has no TTFT SLO, or if its first token meets this SLO and its second token arrives
        within the TTFT SLO plus one TPOT.
        """
        if request.ttft_slo_s is None:
            return True
        left_s = request.arrived_at + request.ttft_slo_s - now
        tpot_s = tpot_target_s(request)
        return prefill_s <= left_s and prefill_s + step_s <= left_s + (
            self._tpots_s[tier] if tpot_s is None else tpot_s
        )

    def keeps(
        self, request: RequestView, replica: ReplicaLoadView, tier: int, now: float, *, is_attainable: bool
    ) -> bool:
        """Return True if a replica of this tier could take the request.

        With the request, the replica must meet the SLOs for the first token, the second token and each step, and have a
        slot and enough memory. Without `is_attainable`, the SLOs for the first and the second token are not checked.
        """
        prompt = request.num_prompt_tokens
        hit = min(replica.prefix_hit_tokens(request), prompt - 1)
        own_s = self._prefill_time.remaining_s(prompt, hit)
        prefill_s = own_s * (1.0 + replica.num_pending_tokens / (prompt - hit))
        num_requests = replica.num_running + replica.num_waiting + 1
        num_tokens = self._load(replica) + prompt
        if is_attainable and not self._in_time(request, tier, prefill_s, self._step_s(num_requests, num_tokens), now):
            return False
        peak = num_tokens + num_requests * self._outputs[tier].mean
        fits = num_requests <= replica.max_batch_size and peak <= replica.num_blocks * self._block_size
        return fits and self._step_s(num_requests, peak) <= self._tpots_s[tier]

    def _step_s(self, num_decodes: int, context_tokens: float) -> float:
        return self._latency.batch_time_s(BatchFeatures().with_decodes(num_decodes, int(context_tokens)))
