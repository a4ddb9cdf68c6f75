"""Section `drafts` of a summary: acceptance of draft tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from vajra_py.metrics.definitions import Bools
from vajra_py.metrics.summary.distributions import distribution
from vajra_py.metrics.tables.columns import floats_of, ints_of
from vajra_py.metrics.tables.further_columns import DRAFT_COUNTS
from vajra_py.runtime.records.arrow_arrays import arrow_array

if TYPE_CHECKING:
    import pyarrow as pa

    ArrowTable: TypeAlias = pa.Table
else:
    ArrowTable = "pyarrow.Table"


def drafts_section(requests: ArrowTable, inside: Bools) -> dict[str, Any]:
    """Return the section for these rows of a requests table.

    `acceptance_rate` is the fraction of draft tokens that were accepted; `mean_acceptance_length` is the mean number of
    output tokens that a request gets from a step that verifies its drafts, as vLLM reports it; `acceptance_length` is
    the distribution of the same mean taken for each request. Rate and mean are None if nothing was drafted.
    """
    rows = requests.filter(arrow_array(inside))
    counts = {name: int(ints_of(rows, name).sum()) for name in DRAFT_COUNTS}
    num_drafts, num_tokens, num_accepted = counts.values()
    return {
        "drafts": {
            **counts,
            "acceptance_rate": num_accepted / num_tokens if num_tokens else None,
            "mean_acceptance_length": 1 + num_accepted / num_drafts if num_drafts else None,
            "acceptance_length": distribution(floats_of(rows, "acceptance_length")),
        }
    }
