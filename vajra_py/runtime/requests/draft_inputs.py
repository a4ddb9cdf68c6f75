"""Accepted drafts as an input, for runs whose steps are formed before the outcome of the last one is known."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class Verification(Struct, frozen=True):
    """Outcome of a step that ended earlier: its accepted drafts.

    Attributes:
        step: the step.
        accepted: (index of the request, number of accepted drafts) of requests with any.
    """

    tick: int
    replicaset: str
    replica_id: int
    step: int
    accepted: Sequence[tuple[int, int]]
