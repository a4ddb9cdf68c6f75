"""Read Mooncake traces, which describe prompts by block ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from vajra_py.contract.facts import is_number
from vajra_py.errors import WorkloadError
from vajra_py.workload.arrays import F64, I64, StringColumn
from vajra_py.workload.columns import Columns
from vajra_py.workload.content import NO_NODE, ContentBuilder, ContentColumn, SegmentSpace
from vajra_py.workload.files import file_facts, iter_json_lines
from vajra_py.workload.workload import Workload

__all__ = ["MooncakeOptions", "read_mooncake"]

FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
LARGEST_TOKENS = np.iinfo(np.int32).max


class MooncakeOptions(Struct, frozen=True):
    """Options of reading the trace.

    Attributes:
        block_tokens: length of a hashed block in tokens.
        tick_s: if > 0, a delay drawn uniformly from [0, tick_s) seconds is added to each timestamp (the conversation
            trace has ticks of 3 s); needs a generator.
        drop_empty: True to drop and count requests without prompt or output tokens; False: such requests are errors.
        sort: True to sort requests by arrival; False: descending times are errors.
    """

    block_tokens: int = 512
    tick_s: float = 0.0
    drop_empty: bool = False
    sort: bool = False


def read_mooncake(
    file: Path, options: MooncakeOptions | None = None, dither: np.random.Generator | None = None
) -> Workload:
    """Read a Mooncake trace: one JSON object per line.

    Keys: `timestamp` (ms), `input_length` and `output_length` (tokens), `hash_ids`. A hash id names a segment of
    `block_tokens` tokens; the last id covers the rest of the prompt. The clock starts at the earliest timestamp.
    Source: Qin et al., Mooncake, FAST 2025.

    Raises:
        WorkloadError: a field is missing or out of range, the number of ids differs from the number of blocks, or times
            descend (and `sort` is false); the error gives the line. Or no request is left.
        ValueError: `tick_s` is given without a generator.
    """
    options = options or MooncakeOptions()
    rows: list[tuple[int, float, int, int, int]] = []
    builder = ContentBuilder((SegmentSpace("number"),))
    number = num_dropped = 0
    before = 0.0
    for number, (line, record) in enumerate(iter_json_lines(file), start=1):
        stamp, prompt, output, ids = _checked(file, line, record, options)
        if stamp < before and not options.sort:
            message = f"arrives before the line above it (timestamp {stamp:g} after {before:g})"
            raise WorkloadError(file, line, message, "Ascending times; or sort: true")
        before = stamp
        if not output or not prompt:
            num_dropped += 1
            continue
        node, left = NO_NODE, prompt
        for hash_id in ids:
            node = builder.add(node, 0, hash_id, min(left, options.block_tokens))
            left -= options.block_tokens
        rows.append((number - 1, stamp, prompt, output, node))
    if not rows:
        raise WorkloadError(file, None, "no request is left with a prompt and an output", "At least one request")
    numbers, stamps, prompts, outputs, nodes = (np.array(column) for column in zip(*rows, strict=True))
    columns = Columns(
        arrived_at=_seconds(stamps, options.tick_s, dither),
        num_prompt_tokens=prompts.astype(np.int64),
        num_output_tokens=outputs.astype(np.int64),
        request_id=StringColumn.numbered("", _int64(numbers)),
        content=ContentColumn(builder.store(), _int64(nodes)),
    )
    facts: dict[str, Any] = {**file_facts("mooncake", file), "num_rows": number, "block_tokens": options.block_tokens}
    if options.drop_empty:
        facts["num_dropped_empty"] = num_dropped
    if options.tick_s:
        facts["tick_s"] = options.tick_s
    return Workload(columns, file.name.split(".")[0], facts)


def _int64(values: Any) -> I64:
    return np.asarray(values, dtype=np.int64)


def _seconds(stamps: Any, tick_s: float, dither: np.random.Generator | None) -> F64:
    times: F64 = (stamps - stamps.min()) / 1000.0
    if not tick_s:
        return times
    if dither is None:
        raise ValueError("tick_s needs a random generator")
    return times + dither.uniform(0.0, tick_s, len(times))


def _checked(
    file: Path, line: int, record: dict[str, Any], options: MooncakeOptions
) -> tuple[float, int, int, list[int]]:
    for name in FIELDS:
        if name not in record:
            raise WorkloadError(
                file, line, f"has no field {name!r} ({', '.join(record)})", f"Fields: {', '.join(FIELDS)}"
            )
    stamp, prompt, output, ids = (record[name] for name in FIELDS)
    if not is_number(stamp) or stamp < 0:
        raise WorkloadError(file, line, f"timestamp is not a time ({stamp!r})", "A finite number of milliseconds >= 0")
    least = 0 if options.drop_empty else 1
    for name, value in (("input_length", prompt), ("output_length", output)):
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST_TOKENS:
            raise WorkloadError(file, line, f"{name} cannot be used ({value!r})", "A whole number of tokens >= 1")
    if not isinstance(ids, list) or not all(type(entry) is int and 0 <= entry < 2**63 for entry in ids):
        raise WorkloadError(file, line, f"hash_ids is not a list of ids ({str(ids)[:40]})", "Whole numbers >= 0")
    blocks = -(-prompt // options.block_tokens)
    if len(ids) != blocks:
        message = f"hash_ids has {len(ids)} ids for a prompt of {prompt} tokens"
        raise WorkloadError(file, line, message, f"One id per started block of {options.block_tokens} tokens: {blocks}")
    return float(stamp), prompt, output, ids
