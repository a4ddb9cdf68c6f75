"""Accepted drafts as an input of a run, if steps are formed before the outcome of the previous step is known."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class Verification(Struct, frozen=True):
    """Outcome of a step that ended earlier: its accepted drafts.

    Attributes:
        step: index of the step.
        accepted: (index of the request, number of accepted drafts) of each request with accepted drafts.
    """

    tick: int
    replicaset: str
    replica_id: int
    step: int
    accepted: Sequence[tuple[int, int]]
