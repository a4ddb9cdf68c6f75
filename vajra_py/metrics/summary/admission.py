"""Section `admission` of a summary: the admission policy's decisions, and the reasons of rejections."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vajra_py.contract.observer import EndReason
from vajra_py.metrics.summary.distributions import by_reason, distribution
from vajra_py.metrics.tables.columns import floats_of, ints_of
from vajra_py.runtime.records.arrow_arrays import arrow_array
from vajra_py.runtime.requests.rejections import REJECTION_KINDS, rejection_kind

if TYPE_CHECKING:
    import pyarrow as pa

    ArrowTable: TypeAlias = pa.Table
else:
    ArrowTable = "pyarrow.Table"

_OUTCOMES = ("accepted", "degraded", "refused", "deferred")


def admission_section(requests: ArrowTable, inside: NDArray[np.bool_]) -> dict[str, Any]:
    """Return the section for these rows of a requests table; empty if the run had no admission policy.

    `accepted` counts requests that the policy accepted unchanged, `degraded` those accepted with reduced demands,
    `refused` those that it refused, and `deferred` those still deferred when they, or the run, ended. `rejected` counts
    all rejected requests by kind, including those rejected before the policy was called. `deferred_s` is the
    distribution of deferral times of requests whose deferral has ended; `deferred_by_reason` counts deferred requests
    by the policy's last reason for deferring them.
    """
    if "admission" not in requests.column_names:
        return {}

    rows = requests.filter(arrow_array(inside))
    outcomes = Counter(rows.column("admission").to_pylist())
    deferrals = Counter(filter(None, rows.column("deferral_reason").to_pylist()))
    reasons = Counter(filter(None, rows.column("shed_reason").to_pylist()))
    rejected = dict.fromkeys(REJECTION_KINDS, 0)
    for reason, detail in zip(rows.column("reason").to_pylist(), rows.column("detail").to_pylist(), strict=True):
        if reason == EndReason.REJECTED.value:
            rejected[rejection_kind(detail)] += 1
    num_deferrals = ints_of(rows, "num_deferrals")
    was_deferred = num_deferrals > 0
    waited_s = floats_of(rows, "deferred_s")[was_deferred]
    return {
        "admission": {
            **{name: outcomes[name] for name in _OUTCOMES},
            "refused_by_reason": by_reason(reasons),
            "rejected": rejected,
            "num_deferred": int(was_deferred.sum()),
            "num_deferrals": int(num_deferrals.sum()),
            "deferred_by_reason": by_reason(deferrals),
            "deferred_s": distribution(waited_s),
        }
    }
