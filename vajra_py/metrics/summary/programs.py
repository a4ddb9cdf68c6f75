"""Section `programs` of a summary: makespans, slowdowns and SLOs of the programs that arrived in the window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from vajra_py.metrics.definitions import SloStatus, Window
from vajra_py.metrics.summary.distributions import distribution
from vajra_py.metrics.tables.columns import floats_of, ints_of
from vajra_py.metrics.tables.programs import COMPLETED, FAILED
from vajra_py.metrics.tables.requests import UNFINISHED
from vajra_py.runtime.records.arrow_arrays import arrow_array

if TYPE_CHECKING:
    import pyarrow as pa

    ArrowTable: TypeAlias = pa.Table
else:
    ArrowTable = "pyarrow.Table"


def programs_section(table: ArrowTable, window: Window) -> dict[str, Any]:
    """Return the section `programs` of a summary, over the programs that arrived in the window."""
    rows = table.filter(arrow_array(window.holds(floats_of(table, "arrived_at"))))
    reasons = rows.column("reason").to_pylist()
    met = rows.column("slo_met").to_pylist()
    status = {SloStatus.MET: met.count(True), SloStatus.MISSED: met.count(False)}
    num_with_slo = int((~np.isnan(floats_of(rows, "program_slo_s"))).sum())
    prompt, cached = int(ints_of(rows, "num_prompt_tokens").sum()), int(ints_of(rows, "num_cached_tokens").sum())
    num_decided = sum(status.values())
    return {
        "programs": {
            "arrived": rows.num_rows,
            **{reason: reasons.count(reason) for reason in (COMPLETED, FAILED, UNFINISHED)},
            "calls": distribution(ints_of(rows, "num_calls").astype(np.float64)),
            "makespan_s": distribution(floats_of(rows, "makespan_s")),
            "slowdown": distribution(floats_of(rows, "slowdown")),
            "slo": {
                "num_met": status[SloStatus.MET],
                "num_missed": status[SloStatus.MISSED],
                "num_undecided": num_with_slo - num_decided,
                "attainment_fraction": status[SloStatus.MET] / num_decided if num_decided else None,
            },
            "prefix_hit_fraction": cached / prompt if prompt else None,
        }
    }
