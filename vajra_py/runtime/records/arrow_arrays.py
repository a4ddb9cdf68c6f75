"""Arrow arrays of numbers, flags, texts and lists of texts, made without pandas, and computations on them.

`pyarrow.array` always imports pandas at its first call: on a small run, this takes as much time as everything else
together. Importing `pyarrow.compute` takes a tenth of a small run's time, because it wraps and documents 300 functions;
methods such as `take` import it. `call` uses the module that `pyarrow.compute` wraps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def arrow_array(values: Any, kind: Any = None, is_null: NDArray[np.bool_] | None = None) -> Any:
    """Return values as an Arrow array, of the Arrow type `kind` if it is given.

    `values`: numbers or flags (an array), or texts and None, or an Arrow array. `is_null`: True for numbers that are
    unknown. Raises `ArrowInvalid` for a number that the type cannot hold.
    """
    import pyarrow as pa

    if isinstance(values, np.ndarray) and values.dtype != np.object_:
        made = _numbers(values, is_null)
    elif isinstance(values, pa.Array | pa.ChunkedArray):
        made = values
    elif kind is not None and pa.types.is_list(kind):
        flat = _texts([text for each in values for text in each])
        made = list_array(flat, np.array([len(each) for each in values], dtype=np.int32))
    elif kind is None or pa.types.is_string(kind):
        made = _texts(values)
    else:
        made = _numbers(np.array(values, dtype=kind.to_pandas_dtype()), is_null)
    return made if kind is None or made.type.equals(kind) else cast(made, kind)


def list_array(values: Any, counts: NDArray[Any]) -> Any:
    """Return an Arrow array of lists; `counts` has the number of values in each list."""
    return list_arrays([values], counts)[0]


def list_arrays(columns: Sequence[Any], counts: NDArray[Any]) -> list[Any]:
    """Return Arrow arrays of lists of the same lengths, one for each of `columns`; see `list_array`."""
    import pyarrow as pa

    offsets = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=offsets[1:])
    starts = arrow_array(offsets)
    return [pa.ListArray.from_arrays(starts, arrow_array(values)) for values in columns]


def _numbers(values: NDArray[Any], is_null: NDArray[np.bool_] | None) -> Any:
    import pyarrow as pa

    kind, data = pa.from_numpy_dtype(values.dtype), np.ascontiguousarray(values)
    if data.dtype == np.bool_:  # Arrow stores booleans as bits, numpy as bytes
        data = np.packbits(data, bitorder="little")
    known = None if is_null is None else pa.py_buffer(np.packbits(~is_null, bitorder="little"))
    return pa.Array.from_buffers(kind, len(values), [known, pa.py_buffer(data)])


def _texts(texts: Sequence[str | None]) -> Any:
    import pyarrow as pa

    known: Any = None
    given: Sequence[Any] = texts
    if None in texts:
        is_null = np.array([text is None for text in texts], dtype=np.bool_)
        known, given = pa.py_buffer(np.packbits(~is_null, bitorder="little")), [text or "" for text in texts]
    joined = "".join(given)
    offsets = np.zeros(len(given) + 1, dtype=np.int64)
    if joined:
        lengths = map(len, given if joined.isascii() else [text.encode() for text in given])
        np.cumsum(np.fromiter(lengths, dtype=np.int64, count=len(given)), out=offsets[1:])
    data = pa.py_buffer(joined.encode())
    if len(data) < 1 << 31:
        return pa.Array.from_buffers(pa.string(), len(given), [known, pa.py_buffer(offsets.astype(np.int32)), data])
    return cast(pa.Array.from_buffers(pa.large_string(), len(given), [known, pa.py_buffer(offsets), data]), pa.string())


def numpy_array(column: Any) -> NDArray[Any]:
    """Return an Arrow column as a numpy array, without a copy if its numbers are contiguous.

    The values are those of the column's `to_numpy`. That method imports pandas, so it is called only for numbers or
    flags of which some are null, and for types other than numbers, flags and texts.
    """
    import pyarrow as pa

    array = column
    if isinstance(column, pa.ChunkedArray):
        array = one_array(column)
    kind, end = array.type, array.offset + len(array)
    if pa.types.is_string(kind):
        return np.array(array.to_pylist(), dtype=np.object_)
    if array.null_count or not pa.types.is_primitive(kind):
        found: NDArray[Any] = array.to_numpy(zero_copy_only=False)
        return found
    if not len(array):
        return np.empty(0, dtype=kind.to_pandas_dtype())
    if pa.types.is_boolean(kind):
        bits = np.frombuffer(array.buffers()[1], dtype=np.uint8)
        return np.unpackbits(bits, count=end, bitorder="little")[array.offset :].view(np.bool_)
    return np.frombuffer(array.buffers()[1], dtype=kind.to_pandas_dtype(), count=end)[array.offset :]


def one_array(column: Any) -> Any:
    """Return a chunked column as one array, without a copy if it has one chunk.

    Equivalent to the column's `combine_chunks`, which imports pandas if there is no chunk.
    """
    import pyarrow as pa

    if not column.num_chunks:
        return pa.nulls(0, column.type)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def call(function: str, *values: Any, options: Any = None) -> Any:
    """Return the result of one of Arrow's functions for these arrays or tables, like `pyarrow.compute.call_function`."""
    return _compute().call_function(function, list(values), options)


def cast(values: Any, kind: Any) -> Any:
    """Return an Arrow array in another type. Raises `ArrowInvalid` for a value that the type cannot hold."""
    return call("cast", values, options=_compute().CastOptions.safe(kind))


def is_among(values: Any, texts: Sequence[str]) -> NDArray[np.bool_]:
    """Return a mask that is True for each entry of an Arrow column that is one of these texts."""
    found = call("is_in", values, options=_compute().SetLookupOptions(arrow_array(texts)))
    mask: NDArray[np.bool_] = numpy_array(found)
    return mask


def rows_with(table: Any, column: str, text: str) -> Any:
    """Return the rows of an Arrow table that have this text in a column."""
    return call("filter", table, call("equal", table.column(column), arrow_array([text])[0]))


def _compute() -> Any:
    try:
        import pyarrow._compute as compute
    except ImportError:  # the module is private, so other versions of pyarrow may lack it
        import pyarrow.compute as compute
    return compute
