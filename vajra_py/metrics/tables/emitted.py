"""Table of values emitted by policies, and the corresponding section of the summary.

`emitted.parquet` is written if a policy emitted values. Its columns are `at` (seconds), `replicaset`, `policy`, `name`,
`value`, and `index`: the request's index in the requests table, null if the value does not belong to a request. Rows
are ordered by time, then by the other columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from vajra_py.runtime.records.arrow_arrays import arrow_array, call
from vajra_py.runtime.records.emitted import EmittedFigures

if TYPE_CHECKING:
    import pyarrow as pa

    ArrowTable: TypeAlias = pa.Table
else:
    ArrowTable = "pyarrow.Table"

EMITTED_FILE = "emitted.parquet"
EMITTED_COLUMNS = ("at", "replicaset", "policy", "name", "value", "index")
_ORDER = [(name, "ascending") for name in ("at", "replicaset", "policy", "name", "index", "value")]


def emitted_table(figures: EmittedFigures) -> ArrowTable:
    """Return the table of these values, with its rows in the order of `emitted.parquet`."""
    import pyarrow as pa

    number, index = np.array(figures.numbers, dtype=np.int64), np.array(figures.indices, dtype=np.int64)
    texts = list(zip(*figures.series, strict=True)) or [(), (), ()]
    names = [call("take", arrow_array(column, pa.string()), arrow_array(number)) for column in texts]
    columns = [
        arrow_array(np.array(figures.at)),
        *names,
        arrow_array(np.array(figures.values)),
        arrow_array(index, is_null=index < 0),
    ]
    table = pa.table(dict(zip(EMITTED_COLUMNS, columns, strict=True)))
    return table.sort_by(_ORDER) if figures.at else table


def combined(tables: list[ArrowTable]) -> ArrowTable:
    """Concatenate the tables of a run's parts, with rows in the order of `emitted.parquet`."""
    import pyarrow as pa

    return pa.concat_tables(tables).sort_by(_ORDER)


def emitted_section(table: ArrowTable) -> dict[str, Any]:
    """Return the summary's section `emitted`: count, mean, extremes, median and P99 per policy and name; empty if
    nothing was emitted.
    """
    if not table.num_rows:
        return {}
    section: dict[str, dict[str, Any]] = {}
    for (policy, name), rows in table.to_pandas().groupby(["policy", "name"]):
        values = rows["value"].to_numpy()
        low, median, p99, high = np.quantile(values, (0.0, 0.5, 0.99, 1.0), method="inverted_cdf").tolist()
        section.setdefault(policy, {})[name] = {
            "count": len(values),
            "mean": float(values.mean()),
            "min": low,
            "p50": median,
            "p99": p99,
            "max": high,
        }
    return {"emitted": section}


def last_by_request(table: ArrowTable) -> Any:
    """Return a data frame of each request's last emitted values, indexed by request index, with a column
    `emitted.POLICY.NAME` per policy and name.
    """
    frame = table.to_pandas()
    frame = frame[frame["index"].notna()]
    frame["column"] = "emitted." + frame["policy"] + "." + frame["name"]
    return frame.groupby(["index", "column"])["value"].last().unstack("column")
