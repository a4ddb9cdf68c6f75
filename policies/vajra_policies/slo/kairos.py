"""Kairos: prompts in the order of their latest start times."""

from __future__ import annotations

from pydantic import Field

from vajra_py.contract import (
    KeyMotion,
    Layer,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    PrefillTime,
    RequestView,
)


class KairosConfig(PolicyConfig):
    """Parameters of `kairos`."""

    default_ttft_s: float = Field(10.0, gt=0, description="TTFT SLO of requests that state none, seconds.")


class Kairos:
    """Key = arrival + TTFT SLO - T(rest of the prompt): the latest time at which the prompt may start.

    The urgency of a prompt is its deadline minus its predicted completion if it ran now; `now` is the same for all, so
    the order does not change with time. A long prompt goes before a short one with the same deadline; earliest deadline
    first does not distinguish the two.

    Left out: decodes packed into the slack of others' TPOT SLOs, for which `slack_chunk` and `scorpio` have their own
    rules. Written from the abstract; the default is a round figure.

    Source: "Kairos" (arXiv:2605.02329).
    """

    key_motion = KeyMotion.PROGRESS

    def __init__(self, config: KairosConfig, prefill_time: PrefillTime) -> None:
        self._default_s = config.default_ttft_s
        self._prefill_time = prefill_time

    def key(self, request: RequestView, now: float) -> float:
        """Return the latest start, seconds on the run's clock."""
        target_s = self._default_s if request.ttft_slo_s is None else request.ttft_slo_s
        prompt = request.num_prompt_tokens
        done = prompt - request.num_remaining_prompt_tokens
        rest_s = self._prefill_time.remaining_s(prompt, done) if done < prompt else 0.0
        return request.arrived_at + target_s - rest_s


def _build(config: KairosConfig, context: PolicyContext) -> Kairos:
    return Kairos(config, context.prefill_time)


SPEC = PolicySpec(
    name="kairos",
    layer=Layer.REQUEST_PRIORITIZER,
    config=KairosConfig,
    build=_build,
    summary=(
        "The prompt with the latest start time that is soonest first: the deadline of its first token minus its "
        "prefill time."
    ),
    source="Kairos (arXiv:2605.02329)",
    advice=(
        "Use it for prompts of very different lengths with TTFT SLOs: of two prompts with the same deadline, the "
        "longer one goes first. Not in overload, where it starts long prompts that will be late anyway (`qoserve`, "
        "`slos_serve`)."
    ),
)
