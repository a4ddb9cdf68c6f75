"""PREFLOW: prompts ordered by total attention work times remaining attention work, aged by their wait."""

from __future__ import annotations

from math import log

from pydantic import Field

from vajra_py.contract import KeyMotion, Layer, PolicyConfig, PolicyContext, PolicySpec, RequestView


class PreflowConfig(PolicyConfig):
    """Parameters of `preflow`."""

    doubling_s: float = Field(
        10.0, ge=1e-6, description="Waiting time after which a request's priority has doubled (D), seconds."
    )


def attention_work(num_tokens: int) -> int:
    """Return W(n) = n (n + 1) / 2, the number of query-key pairs in the causal attention of a prompt of n tokens."""
    return num_tokens * (num_tokens + 1) // 2


class Preflow:
    """Key = (1, ln P + ln R + arrival * ln 2 / D) for prompts; (0, arrival * ln 2 / D) for decodes, which go first.

    - W(n) = n (n + 1) / 2 is the attention work of n tokens. P = W(prompt) - W(h) is the total work, with h the cached
      prefix at the first admission, or now for a request that was not admitted yet. R = W(prompt) - W(done) is the
      remaining work.
    - The priority is 2^(A / D) / (P * R), with A = now - arrival. The key of a prompt is minus the logarithm of the
      priority, without the term now * ln 2 / D: it is the same for all requests, so it does not change their order.
      Doubling both P and R weighs as much as a wait of 2 D.

    Short prompts go before long ones, a prompt near its end before one that begins, and no request waits forever.
    Waiting prompts and those in progress are ordered together, so use it with a chunked scheduler such as
    `fixed_chunk`.

    Left out: nothing of the rule; the source runs on replicas that only compute prompts. Unverified: the default of D.

    Source: PREFLOW, "slowdown-aware scheduler for PD prefill" (vllm-ascend, pull request 16360).
    """

    key_motion = KeyMotion.PREFIX_HITS

    def __init__(self, config: PreflowConfig) -> None:
        self._ageing = log(2.0) / config.doubling_s

    def key(self, request: RequestView, now: float) -> tuple[float, float]:
        """Return the key by the rule in the class docstring."""
        prompt = request.num_prompt_tokens
        if not request.num_remaining_prompt_tokens:
            return (0.0, request.arrived_at * self._ageing)
        num_done = request.num_computed_tokens or request.prefix_hit_tokens()
        num_cached = request.num_cached_tokens if request.admitted_index else num_done
        work = attention_work(prompt)
        needed = work - attention_work(min(num_cached, prompt - 1))
        left = work - attention_work(min(num_done, prompt - 1))
        return (1.0, log(needed) + log(left) + request.arrived_at * self._ageing)


def _build(config: PreflowConfig, context: PolicyContext) -> Preflow:
    return Preflow(config)


SPEC = PolicySpec(
    name="preflow",
    layer=Layer.REQUEST_PRIORITIZER,
    config=PreflowConfig,
    build=_build,
    summary="Prompts ordered by total times remaining attention work, aged by their wait.",
    source="PREFLOW (vllm-ascend, pull request 16360)",
    advice=(
        "Use it with chunked schedulers where prompt lengths differ by orders of magnitude: mean slowdown is low, and "
        "no request starves. Not where outputs make up most of the work."
    ),
)
