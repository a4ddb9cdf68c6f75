"""SLO targets of requests: time per token, and due times of next tokens."""

from __future__ import annotations

from vajra_py.contract import RequestView


def tpot_target_s(request: RequestView) -> float | None:
    """Return the TPOT SLO, or else the TBT SLO, in seconds; None without either."""
    return request.tpot_slo_s if request.tpot_slo_s is not None else request.tbt_slo_s


def token_due_at(request: RequestView) -> float | None:
    """Return the time at which a decode's next token is due: arrival + max(TTFT, TTFT SLO) + TBT SLO * number of output
    tokens, in seconds on the run's clock; None without a TBT SLO, or before the first token.
    """
    tbt_s, first_at = request.tbt_slo_s, request.first_token_at
    if tbt_s is None or first_at is None:
        return None
    first_due_at = first_at if request.ttft_slo_s is None else request.arrived_at + request.ttft_slo_s
    return max(first_at, first_due_at) + request.num_output_tokens * tbt_s
