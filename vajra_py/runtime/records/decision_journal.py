"""Journal of a decision log: records on disk during the run, so that they survive a killed process.

A Parquet file cannot be read before it is finished. The journal is an Arrow stream beside the Parquet file, in which
every batch is readable as soon as it is written; the journal is deleted when the log is closed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from vajra_py.runtime.records.arrow_arrays import arrow_array
from vajra_py.runtime.records.step_log import Batch


def journal_path(log: Path) -> Path:
    """Return the path of a decision log's journal."""
    return log.with_name(log.name + ".journal.partial")


class Journal:
    """Writer of batches of records, each of which is readable as soon as it is written."""

    def __init__(self, file: BinaryIO, compression: str | None = None) -> None:
        """Create the writer. `compression`: name of an Arrow stream codec; None: no compression."""
        self._file = file
        self._compression = compression
        self._writer: Any = None

    def write(self, batch: Batch) -> None:
        """Write the records and flush them to the operating system, so that they survive the end of this process."""
        import pyarrow as pa

        texts = pa.list_(pa.string())
        columns = {
            "replicasets": arrow_array([batch.replicasets], texts),
            "rows": _one(batch.rows),
            "ends": _one(batch.ends),
            "notes": arrow_array([batch.notes], texts),
            "ids": arrow_array([batch.ids], texts),
            "arrived": _one(batch.arrived),
            **{f"list_{name}": _one(numbers) for name, numbers in batch.lists.items()},
        }
        record = pa.RecordBatch.from_pydict(columns)
        if self._writer is None:
            self._writer = pa.ipc.new_stream(
                self._file, record.schema, options=pa.ipc.IpcWriteOptions(compression=self._compression)
            )
        self._writer.write_batch(record)
        self._file.flush()

    def close(self) -> None:
        """Finish the journal."""
        if self._writer is not None:
            self._writer.close()
        self._file.close()


def _one(data: bytes) -> Any:
    """Return an Arrow array with this value as its only element, without a copy."""
    import pyarrow as pa

    ends = array("q", (0, len(data)))
    return pa.Array.from_buffers(pa.large_binary(), 1, [None, pa.py_buffer(ends), pa.py_buffer(data)])


def read_journal(path: Path) -> Iterator[Batch]:
    """Yield the batches of a journal, up to the point where it was cut off."""
    import pyarrow as pa

    with path.open("rb") as file:
        try:
            for record in pa.ipc.open_stream(file):
                row = record.to_pylist()[0]
                lists = {name.removeprefix("list_"): row[name] for name in record.schema.names if "list_" in name}
                facts = {name: row[name] for name in Batch._fields if name != "lists"}
                yield Batch(**facts, lists=lists)
        except (pa.ArrowInvalid, OSError):
            return  # the process ended in the middle of a batch
