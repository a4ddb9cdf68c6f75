"""Columns of the requests table that only some runs have."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vajra_py.metrics.tables.tier_log import TierLog
from vajra_py.metrics.tables.transfers import TransfersBuilder

DRAFT_COUNTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
DRAFT_COLUMNS = (*DRAFT_COUNTS, "acceptance_length")
"""Further columns of the requests table of a run with drafts: steps that verified drafts of the request, drafts, those that became output,
and the mean number of tokens that these steps gave; NaN without any."""


@dataclass(frozen=True, slots=True)
class FurtherColumns:
    """Columns of a requests table that only some runs have.

    Attributes:
        admission: whether it has `ADMISSION_COLUMNS`.
        drafts: whether it has `DRAFT_COLUMNS`.
        movement: what `MOVEMENT_COLUMNS` are made of; None: it has none.
        tiers: the same for hits by memory tier.
    """

    admission: bool = False
    drafts: bool = False
    movement: TransfersBuilder | None = None
    tiers: TierLog | None = None


NOTHING_FURTHER = FurtherColumns()


def acceptance_length(num_drafts: NDArray[np.int64], num_accepted: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the mean number of tokens of steps that verified drafts; NaN where there were none."""
    return np.where(num_drafts > 0, 1.0 + num_accepted / np.maximum(num_drafts, 1), np.nan)
