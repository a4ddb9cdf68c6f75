"""Section `tiers` of a summary: prefix hits in the memory tiers below the devices, and traffic on the tiers' links."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from vajra_py.metrics.definitions import Bools
from vajra_py.metrics.summary.distributions import distribution
from vajra_py.metrics.tables.columns import floats_of, ints_of
from vajra_py.metrics.tables.tier_log import LOAD_TIME, TierLog, hits_column
from vajra_py.runtime.records.arrow_arrays import arrow_array

if TYPE_CHECKING:
    import pyarrow as pa

    ArrowTable: TypeAlias = pa.Table
else:
    ArrowTable = "pyarrow.Table"


def tiers_section(log: TierLog, requests: ArrowTable, inside: Bools, ended_at: float) -> dict[str, Any]:
    """Return the section for these rows of a requests table.

    `hit_tokens` and `hit_fraction` count prompt tokens at the first admission, by the nearest memory that held them.
    `links` covers the whole run: `utilisation` is the fraction of a link's capacity in one direction that was used
    until `ended_at` (seconds).
    """
    rows = requests.filter(arrow_array(inside))
    num_tokens = int(ints_of(rows, "num_prompt_tokens").sum())
    hits = {name: int(ints_of(rows, hits_column(name)).sum()) for name in ("device", *log.tiers)}
    links = []
    for (replicaset, source, target), flow in sorted(log.flows.items()):
        tiers = log.links[replicaset]
        order = list(tiers)
        below = (
            target
            if source == "device" or (target != "device" and order.index(target) > order.index(source))
            else source
        )
        could = tiers[below].bandwidth * ended_at
        links.append(
            {
                "replicaset": replicaset,
                "source": source,
                "target": target,
                "num_transfers": flow.num_transfers,
                "num_blocks": flow.num_blocks,
                "num_bytes": flow.num_bytes,
                "mean_transfer_s": flow.seconds / flow.num_transfers,
                "utilisation": flow.num_bytes / could if could > 0 else 0.0,
            }
        )
    return {
        "tiers": {
            "hit_tokens": hits,
            "hit_fraction": {name: count / num_tokens if num_tokens else 0.0 for name, count in hits.items()},
            "load_s": distribution(floats_of(rows, LOAD_TIME)),
            "links": links,
        }
    }
