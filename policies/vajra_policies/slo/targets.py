"""SLO targets of requests: time per token, and due times of next tokens."""

from __future__ import annotations

from collections.abc import Iterable

from vajra_py.contract import RequestView


def tpot_target_s(request: RequestView) -> float | None:
    """Return the TPOT SLO, or else the TBT SLO, in seconds; None without either."""
    return request.tpot_slo_s if request.tpot_slo_s is not None else request.tbt_slo_s


class DueTimes:
    """Computes when decodes' next tokens are due: arrival + max(TTFT, TTFT SLO) + TBT SLO * number of output tokens."""

    def __init__(self) -> None:
        self._first_token_at: dict[RequestView, float] = {}

    def due_at(self, request: RequestView) -> float | None:
        """Return the time at which the decode's next token is due, seconds on the run's clock; None without a TBT SLO,
        or before the first token.
        """
        tbt_s, last_at, num_tokens = request.tbt_slo_s, request.last_token_at, request.num_output_tokens
        if tbt_s is None or last_at is None:
            return None
        first_at = self._first_token_at.get(request)
        if first_at is None:  # exact if the newest token is the first; else an estimate with intervals of `tbt_s`
            first_at = self._first_token_at[request] = last_at - (num_tokens - 1) * tbt_s
        first_due_at = first_at if request.ttft_slo_s is None else request.arrived_at + request.ttft_slo_s
        return max(first_at, first_due_at) + num_tokens * tbt_s

    def forget(self, requests: Iterable[RequestView]) -> None:
        """Forget requests that have left."""
        for request in requests:
            self._first_token_at.pop(request, None)
