"""Section `movement` of a summary: moves of requests between replicas, and the time that they took."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from vajra_py.metrics.definitions import Bools
from vajra_py.metrics.summary.distributions import by_reason, distribution
from vajra_py.metrics.tables.columns import floats_of, ints_of
from vajra_py.metrics.tables.transfers import (
    CALLED_OFF,
    DONE,
    ENDED,
    HAND_OFF,
    MIGRATION,
    MOVE,
    MOVEMENT_COUNTS,
    MOVEMENT_TIMES,
    RECOMPUTED,
    STAYED,
    UNFINISHED,
)
from vajra_py.runtime.records.arrow_arrays import arrow_array

if TYPE_CHECKING:
    import pyarrow as pa

    ArrowTable: TypeAlias = pa.Table
else:
    ArrowTable = "pyarrow.Table"

_KINDS = {HAND_OFF: "hand-off", MIGRATION: "migration", MOVE: "move"}
_OUTCOMES = {
    DONE: "",
    STAYED: " stayed at its source",
    CALLED_OFF: " called off",
    ENDED: " ended on its way",
    RECOMPUTED: " computed again",
    UNFINISHED: " open at the end of the run",
}


def movement_section(transfers: ArrowTable, requests: ArrowTable, inside: Bools) -> dict[str, Any]:
    """Return the section for these rows of a requests table and the transfers of their requests.

    Times are sums over each request's hand-offs and migrations; each distribution leaves out the requests that were
    never in its stage (held, in transfer, waiting at a target). `by_reason` counts moves with a reason from the
    replicaset scheduler, and moves after which the request was not admitted at its target. `routes` has, for each kind
    and each pair of pools, the number of completed KV transfers and their tokens and bytes.
    """
    rows = requests.filter(arrow_array(inside))
    own = transfers.filter(arrow_array(np.isin(ints_of(transfers, "index"), ints_of(rows, "index"))))
    columns = [own.column(name).to_pylist() for name in ("kind", "outcome", "reason", "is_live")]
    reasons: Counter[str] = Counter()
    for kind, outcome, reason, is_live in zip(*columns, strict=True):
        if outcome != DONE or (reason and not is_live):
            reasons[_KINDS[kind] + _OUTCOMES[outcome] + (f": {reason}" if reason else "")] += 1
    return {
        "movement": {
            **{name: int(ints_of(rows, name).sum()) for name in MOVEMENT_COUNTS},
            "num_called_off": columns[1].count(CALLED_OFF),
            **{name: distribution(floats_of(rows, name)) for name in MOVEMENT_TIMES},
            "by_reason": by_reason(reasons),
            "routes": _routes(own),
        }
    }


def _routes(transfers: ArrowTable) -> list[dict[str, Any]]:
    """Return totals of the completed KV transfers by replicaset, source and target pool, and kind."""
    import pyarrow.compute as pc

    whole = transfers.filter(pc.invert(pc.is_nan(transfers.column("end_at"))))
    whole = whole.filter(pc.not_equal(whole.column("kind"), arrow_array([MOVE])[0]))
    keys = ["replicaset", "source_pool", "target_pool", "kind"]
    sums = [("num_tokens", "sum"), ("num_bytes", "sum"), ("index", "count")]
    found = whole.group_by(keys).aggregate(sums).sort_by([(key, "ascending") for key in keys])
    names = {"index_count": "num_transfers", "num_tokens_sum": "moved_tokens", "num_bytes_sum": "moved_bytes"}
    return [{names.get(name, name): value for name, value in row.items()} for row in found.to_pylist()]
