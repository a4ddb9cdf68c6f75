"""Optional columns of the requests table."""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from vajra_py.metrics.tables.tier_log import TierLog
from vajra_py.metrics.tables.transfers import TransfersBuilder

DRAFT_COUNTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
DRAFT_COLUMNS = (*DRAFT_COUNTS, "acceptance_length")
"""Further columns of the requests table of a run with draft tokens: number of steps that verified drafts of the
request, number of verified draft tokens, number of accepted ones, and the mean number of the request's output tokens
per such step (NaN without such steps).
"""


class FurtherColumns(Struct, frozen=True):
    """Selection of optional columns of a requests table.

    Attributes:
        admission: True if the table has `ADMISSION_COLUMNS`.
        drafts: True if the table has `DRAFT_COLUMNS`.
        movement: source of `MOVEMENT_COLUMNS`; None if the table does not have these columns.
        tiers: source of the columns of prefix hits by memory tier; None if the table does not have these columns.
    """

    admission: bool = False
    drafts: bool = False
    movement: TransfersBuilder | None = None
    tiers: TierLog | None = None


NOTHING_FURTHER = FurtherColumns()


def acceptance_length(num_drafts: NDArray[np.int64], num_accepted: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the mean number of output tokens per step that verified drafts, for each request; NaN without
    such steps.
    """
    return np.where(num_drafts > 0, 1.0 + num_accepted / np.maximum(num_drafts, 1), np.nan)
