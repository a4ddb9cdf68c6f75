"""Files of a part of a run, for merging: its tables and the origin of its step times, without a summary."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vajra_py.config import ExperimentConfig
from vajra_py.experiment.runs.results import Tables
from vajra_py.metrics.tables.emitted import combined
from vajra_py.metrics.tables.requests import ROW_GROUP_ROWS, TableBuilder
from vajra_py.runtime.records.arrow_arrays import numpy_array

_REQUESTS, _STEPS, _TBT, _STEP_TIMES = "requests.arrow", "steps.arrow", "tbt.arrow", "step_times.json"
_EMITTED, _NOTES, _TRANSFERS = "emitted.arrow", "notes.json", "transfers.arrow"


def write_part(
    path: Path, config: ExperimentConfig, tables: Tables, ended_at: float, step_times: Mapping[str, Any]
) -> None:
    """Write the tables that `take_part` reads; used in place of `write_results`, with the same parameters."""
    for name, builder in ((_REQUESTS, tables.requests), (_STEPS, tables.steps), (_TBT, tables.tbt)):
        _write(path / name, builder)
    if tables.transfers is not None:
        _write(path / _TRANSFERS, tables.transfers)
    if tables.emitted is not None:
        _write_table(path / _EMITTED, tables.emitted)
    (path / _NOTES).write_text(json.dumps([*tables.notes]))
    (path / _STEP_TIMES).write_text(json.dumps(step_times))


def take_part(path: Path, tables: Tables) -> Mapping[str, Any]:
    """Add a part's rows to these tables, and return the origin of its step times."""
    tables.requests.take(_read(path / _REQUESTS))
    tables.steps.extend(_read(path / _STEPS))
    for batch in _read(path / _TBT).to_batches():  # each batch has the gaps of one replicaset and SLO class
        gaps = tables.tbt.gaps(*(batch.column(name)[0].as_py() for name in ("replicaset", "slo_class")))
        gaps.extend_weighted(numpy_array(batch.column("gap_s")), numpy_array(batch.column("weight")))
    if tables.transfers is not None and has_transfers(path):
        tables.transfers.take(_read(path / _TRANSFERS))
    step_times: Mapping[str, Any] = json.loads((path / _STEP_TIMES).read_text())
    return step_times


def has_transfers(path: Path) -> bool:
    """Return whether requests could move between replicas in a part."""
    return (path / _TRANSFERS).exists()


def take_emitted(paths: Sequence[Path]) -> Any:
    """Return the values that policies emitted in all parts, as one table."""
    return combined([_read(path / _EMITTED) for path in paths])


def take_notes(paths: Sequence[Path]) -> list[str]:
    """Return the notes that all parts have on their policies, without duplicates."""
    return sorted({note for path in paths for note in json.loads((path / _NOTES).read_text())})


def _write_table(path: Path, table: Any) -> None:
    import pyarrow as pa

    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


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
