"""Refill of deficits, shared by DLPM and D2LPM."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

HolderT = TypeVar("HolderT")


def refill(deficits: dict[HolderT, float], candidates: Collection[HolderT], quantum: float) -> list[HolderT]:
    """Add the quantum to every deficit of at most 0, repeatedly, until the deficit of a candidate is above 0.

    A missing deficit is 0. Nothing changes if the deficit of a candidate is above 0 already, or if there is no
    candidate. Returns the holders whose deficits rose above 0.
    """
    if not candidates or any(deficits.get(one, 0.0) > 0 for one in candidates):
        return []
    for one in candidates:
        deficits.setdefault(one, 0.0)
    num_rounds = min(_rounds(deficits[one], quantum) for one in candidates)
    used_up = [one for one, deficit in deficits.items() if deficit <= 0]
    for one in used_up:
        deficits[one] += min(num_rounds, _rounds(deficits[one], quantum)) * quantum
    return [one for one in used_up if deficits[one] > 0]


def _rounds(deficit: float, quantum: float) -> int:
    """Return the number of quanta that raise a deficit of at most 0 above 0."""
    num_quanta = int(-deficit // quantum) + 1
    while deficit + num_quanta * quantum <= 0:  # a rounding error: add as many quanta as change the floating-point sum
        num_quanta += 1 + num_quanta // 2**53
    return num_quanta
