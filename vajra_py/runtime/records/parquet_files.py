"""Writing of Parquet files.

`pyarrow.parquet` also imports what reads files from elsewhere (file systems, TLS): a fortieth of a short run.
"""

from __future__ import annotations

from typing import Any


def parquet_writer(sink: Any, schema: Any, **options: Any) -> Any:
    """Return a writer of an Arrow schema's tables into a path or a binary file.

    `options` are those of `pyarrow.parquet.ParquetWriter`, as are `write_table` and `close`; it is no context manager.
    """
    try:
        import pyarrow._parquet as low_level
    except ImportError:  # its place is not promised
        from pyarrow.parquet import ParquetWriter

        return ParquetWriter(sink, schema, **options)
    return low_level.ParquetWriter(sink, schema, writer_engine_version="V2", **options)
