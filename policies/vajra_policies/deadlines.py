"""Deadlines derived from predicted prefill times, shared by the policies that order by deadline or slack."""

from __future__ import annotations

from pydantic import Field

from vajra_py.contract import PolicyConfig, PrefillTime, RequestView

SHORTEST_DEADLINE_S = 0.001
"""Lower bound for relative deadlines that come from requests' own targets, seconds. Policies divide by relative
deadlines, and a request's own deadline may have passed when the request arrives.
"""


class DeadlineConfig(PolicyConfig):
    """Parameters of a request's relative deadline."""

    deadline_multiplier: float = Field(
        1.5, gt=0, description="Deadline of a prompt as a multiple of its predicted prefill time alone on a replica."
    )
    min_deadline_s: float = Field(0.5, gt=0, description="Shortest deadline that is given to a prompt, seconds.")
    use_request_deadlines: bool = Field(
        False,
        description=("For requests with a deadline or a TTFT SLO, use the earlier of the two instead of the formula."),
    )


class Deadlines:
    """Relative deadlines D = max(prefill_time(prompt) * deadline_multiplier, min_deadline_s).

    With `use_request_deadlines`, D of a request that has a deadline or a TTFT SLO is the earlier of the two instead.

    Source: Vajra's scheduling architecture, EDF prioritizer. A published variant, max(prefill_time, min_deadline),
    lacks the multiplier.
    """

    __slots__ = ("_config", "_prefill_time")

    def __init__(self, config: DeadlineConfig, prefill_time: PrefillTime) -> None:
        self._config = config
        self._prefill_time = prefill_time

    def slack_s(self, request: RequestView, now: float) -> float:
        """Return the longest wait in seconds after which the request's remaining prompt could still be computed by its
        deadline; negative if even without a wait it would be late.
        """
        remaining_s = self._prefill_time.remaining_s(request.num_prompt_tokens, request.num_computed_tokens)
        return request.arrived_at + self.relative_s(request) - remaining_s - now

    def relative_s(self, request: RequestView) -> float:
        """Return the seconds from arrival to the request's deadline; above 0."""
        config = self._config
        if config.use_request_deadlines:
            own_s = _own_target_s(request)
            if own_s is not None:
                return max(own_s, SHORTEST_DEADLINE_S)
        predicted = self._prefill_time.total_s(request.num_prompt_tokens)
        return max(predicted * config.deadline_multiplier, config.min_deadline_s)


def _own_target_s(request: RequestView) -> float | None:
    """Return the earlier of the request's own deadline and TTFT SLO, in seconds from arrival; None without either."""
    targets_s = []
    if request.deadline_at is not None:
        targets_s.append(request.deadline_at - request.arrived_at)
    if request.ttft_slo_s is not None:
        targets_s.append(request.ttft_slo_s)
    return min(targets_s, default=None)
