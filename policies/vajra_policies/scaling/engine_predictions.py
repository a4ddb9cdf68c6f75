"""Predictions for one replica from a latency model: times under a load, and the highest rate that meets the SLOs."""

from __future__ import annotations

from vajra_policies.scaling.planner_rules import EngineLoad, LatencySlos, Traffic
from vajra_policies.search import most_that_fits
from vajra_py.contract import BatchFeatures, PolicyContext, PoolRole

DEFAULT_STEP_TOKENS = 8192
"""Assumed number of prompt tokens per step if the replica has no token budget."""


class EnginePredictions:
    """`CapacityModel` of a replica, by the run's latency model.

    A queue is modelled as prompts of the mean length with the same total of tokens, computed one after another. Running
    decodes add the time of a decode step to each step of prompts. A replica that decodes has its highest rate with the
    largest batch that meets the SLO for the time between tokens and fits into the KV memory. A replica of role `mixed`
    alternates between prompts and decodes. A replica of role `prefill` computes one prompt after another.
    """

    def __init__(self, context: PolicyContext, slos: LatencySlos, prompt_tokens: float) -> None:
        self._context = context
        self._slos = slos
        self.prompt_tokens = prompt_tokens
        """Mean length of prompts, tokens."""
        self.hit_fraction = 0.0
        """Fraction of recent prompt tokens that were prefix hits."""

    def ttft_s(self, load: EngineLoad, *, queue_scale: float, kv_scale: float | None) -> float:
        """Return the predicted TTFT in seconds; see `EngineModel` for the arguments."""
        queued = load.queued_prefill * queue_scale
        alone_s = self._prompts_s(queued / self.prompt_tokens + 1.0, self.prompt_tokens, self.hit_fraction)
        held = load.scheduled_kv if kv_scale is None else (load.scheduled_kv + load.queued_kv) * kv_scale
        num_decodes = round(load.num_decodes * (1.0 if kv_scale is None else kv_scale))
        if not num_decodes:
            return alone_s
        num_steps = (queued + self.prompt_tokens) * (1 - self.hit_fraction) / self._step_tokens
        return alone_s + num_steps * self._decode_s(num_decodes, held)

    def itl_s(self, load: EngineLoad, *, scale: float, counts_prefill: bool) -> float:
        """Return the predicted time between tokens in seconds; see `EngineModel` for the arguments."""
        held = load.scheduled_kv + load.queued_kv + (load.queued_prefill if counts_prefill else 0)
        return self._decode_s(max(1, round(load.num_decodes * scale)), held * scale)

    def requests_per_s(self, role: PoolRole, traffic: Traffic) -> float:
        """Return the highest rate of this traffic that one replica serves within the SLOs; see `CapacityModel`."""
        prompt_s = self._prompts_s(1.0, traffic.num_prompt_tokens, traffic.hit_fraction)
        if role is PoolRole.PREFILL:
            return 1.0 / prompt_s if prompt_s > 0 else 0.0
        num_decodes, step_s = self._largest_batch(traffic)
        decode_s = traffic.num_output_tokens / self._slos.accept_length * step_s / num_decodes
        busy_s = decode_s if role is PoolRole.DECODE else prompt_s + decode_s
        return 1.0 / busy_s if busy_s > 0 else 0.0

    @property
    def _step_tokens(self) -> int:
        return self._context.limits.max_batch_tokens or DEFAULT_STEP_TOKENS

    def _prompts_s(self, count: float, num_tokens: float, hit_fraction: float) -> float:
        return count * (1 - hit_fraction) * self._context.prefill_time.total_s(max(1, round(num_tokens)))

    def _decode_s(self, num_decodes: int, num_context_tokens: float) -> float:
        features = BatchFeatures(num_decodes=num_decodes, decode_context_tokens=round(num_context_tokens))
        return self._context.latency.batch_time_s(features)

    def _largest_batch(self, traffic: Traffic) -> tuple[int, float]:
        """Return (largest number of decodes, duration of a step with these decodes in seconds).

        The decodes fit slots and KV memory, and meet the SLO for the time between tokens. The number is at least 1.
        """
        limits = self._context.limits
        context_tokens = traffic.num_prompt_tokens + traffic.num_output_tokens / 2
        room = int(limits.num_blocks * limits.block_size / max(1.0, context_tokens))

        def meets_slo(num_decodes: int) -> bool:
            step_s = self._decode_s(num_decodes, num_decodes * context_tokens)
            return step_s / self._slos.accept_length <= self._slos.itl_s

        most = most_that_fits(1, max(1, min(limits.max_batch_size, room)) + 1, meets_slo)
        return most, self._decode_s(most, most * context_tokens)
