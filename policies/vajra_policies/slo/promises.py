"""Promises of requests in the form in which policies compare them."""

from __future__ import annotations

from vajra_py.contract import RequestView


def promised_tpot_s(request: RequestView) -> float | None:
    """The promised time per output token or, without it, between two tokens in a row, seconds; None without either."""
    return request.tpot_slo_s if request.tpot_slo_s is not None else request.tbt_slo_s
