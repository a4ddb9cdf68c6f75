"""What a part of a run leaves for who puts the parts together: its rows as they are, without a summary, and where its step times come from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vajra_py.config import ExperimentConfig
from vajra_py.experiment.results import Tables
from vajra_py.metrics.tables import ROW_GROUP_ROWS, TableBuilder

_REQUESTS, _STEPS, _TBT, _STEP_TIMES = "requests.arrow", "steps.arrow", "tbt.arrow", "step_times.json"


def write_part(
    path: Path, config: ExperimentConfig, tables: Tables, ended_at: float, step_times: Mapping[str, Any]
) -> None:
    """Write what `take_part` reads; arguments as of `write_results`, in whose place it is called."""
    for name, builder in ((_REQUESTS, tables.requests), (_STEPS, tables.steps), (_TBT, tables.tbt)):
        _write(path / name, builder)
    (path / _STEP_TIMES).write_text(json.dumps(step_times))


def take_part(path: Path, tables: Tables) -> Mapping[str, Any]:
    """Add a part's rows to these tables, and return where its step times come from."""
    tables.requests.take(_read(path / _REQUESTS))
    tables.steps.extend(_read(path / _STEPS))
    for batch in _read(path / _TBT).to_batches():  # each of one replicaset and class
        gaps = tables.tbt.gaps(*(batch.column(name)[0].as_py() for name in ("replicaset", "slo_class")))
        gaps.extend_weighted(batch.column("gap_s").to_numpy(), batch.column("weight").to_numpy())
    step_times: Mapping[str, Any] = json.loads((path / _STEP_TIMES).read_text())
    return step_times


def _write(path: Path, builder: TableBuilder) -> None:
    import pyarrow as pa

    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_file(path, builder.schema(), options=options) as writer:
        for table in builder.slices(ROW_GROUP_ROWS):
            writer.write_table(table)


def _read(path: Path) -> Any:
    import pyarrow as pa

    with pa.ipc.open_file(path) as file:
        return file.read_all()
