"""Input of a run that verified drafts give, where steps are formed before it is known what came of the one before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verification:
    """Outcome of a step that had ended before: its tokens are known now, and which of its drafts were accepted.

    Attributes:
        step: the step.
        accepted: (index of the request, drafts that were accepted) of requests with any.
    """

    tick: int
    replicaset: str
    replica_id: int
    step: int
    accepted: Sequence[tuple[int, int]]
