"""Write workloads to JSON Lines and read them back without loss.

Each line is one request: a JSON object with the fields of `RequestSpec` that differ from their defaults. Reading a
written file restores equal requests, to the last bit of each time.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vajra_py.contract.facts import FACTS
from vajra_py.errors import WorkloadError, did_you_mean
from vajra_py.workload.columns import columns_from_requests
from vajra_py.workload.files import file_facts, iter_json_lines
from vajra_py.workload.request import PromptContent, RequestSpec, SegmentId, follows_of
from vajra_py.workload.stated import format_of, read_integer, read_seconds, read_text
from vajra_py.workload.workload import Workload, check_requests

__all__ = ["read_jsonl", "write_jsonl"]

REQUIRED = ("request_id", "arrived_at", "num_prompt_tokens", "num_output_tokens")
_STATED = {fact.name: format_of(fact) for fact in FACTS}
OPTIONAL = ("max_tokens", *_STATED, "content", "prompt_token_ids", "follows", "think_time_s", "metadata")
FIELD_NAMES = (*REQUIRED, *OPTIONAL)


def read_jsonl(file: Path, *, sort: bool = False) -> Workload:
    """Read a workload in this project's own format, as written by `write_jsonl`.

    Raises:
        WorkloadError: a field is unknown, missing, of a wrong type or out of range; ids are not unique; a request comes
            before one that it follows; times descend (and `sort` is false). The error gives the line.
    """
    requests: list[RequestSpec] = []
    lines: list[int] = []
    for line, record in iter_json_lines(file):
        requests.append(_request(file, line, record))
        lines.append(line)
    if sort:
        order = sorted(range(len(requests)), key=lambda row: requests[row].arrived_at)
        requests, lines = [requests[row] for row in order], [lines[row] for row in order]
    check_requests(requests, str(file), lines)
    facts = {**file_facts("jsonl", file), "num_rows": len(requests)}
    return Workload(columns_from_requests(requests), file.name.split(".")[0], facts)


def write_jsonl(requests: Iterable[RequestSpec], file: Path) -> None:
    """Write one request per line, gzip-compressed if the name ends in `.gz`. Equal requests give equal bytes."""
    if file.suffix == ".gz":
        with file.open("wb") as raw, gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as packed:
            packed.writelines(line.encode() for line in _lines(requests))
    else:
        with file.open("w", encoding="utf-8", newline="\n") as text:
            text.writelines(_lines(requests))


def _lines(requests: Iterable[RequestSpec]) -> Iterator[str]:
    defaults = _request(
        Path(), 0, {"request_id": "", "arrived_at": 0.0, "num_prompt_tokens": 1, "num_output_tokens": 1}
    )
    usual = {name: getattr(defaults, name) for name in OPTIONAL}
    for request in requests:
        record: dict[str, Any] = {name: getattr(request, name) for name in REQUIRED}
        for name, default in usual.items():
            value = getattr(request, name)
            if value != default:
                record[name] = value
        if request.content is not None:
            record["content"] = request.content.segments
        if "metadata" in record:
            record["metadata"] = dict(request.metadata)
        yield json.dumps(record, separators=(",", ":")) + "\n"


def _request(file: Path, line: int, record: Mapping[str, Any]) -> RequestSpec:
    values: dict[str, Any] = {}
    for name, value in record.items():
        reader = READERS.get(name)
        if reader is None:
            raise WorkloadError(file, line, f"unknown field ({name!r})", did_you_mean(name, FIELD_NAMES))
        read, allowed = reader
        try:
            values[name] = None if value is None and name in NULLABLE else read(value)
        except (TypeError, ValueError):
            raise WorkloadError(file, line, f"{name} cannot be used ({str(value)[:60]!r})", allowed) from None
    for name in REQUIRED:
        if name not in values:
            raise WorkloadError(file, line, f"has no field {name!r}", f"Fields needed: {', '.join(REQUIRED)}")
    return RequestSpec(**values)


def _tokens(value: Any) -> int:
    if not 0 < read_integer(value) < 2**31:
        raise ValueError
    return int(value)


def _follows(value: Any) -> str | tuple[str, ...] | None:
    if isinstance(value, list) and value:
        return follows_of([read_text(entry) for entry in value])
    return read_text(value)


def _content(value: Any) -> PromptContent:
    return PromptContent(tuple((_segment_id(entry), _tokens(length)) for entry, length in value))


def _segment_id(value: Any) -> SegmentId:
    if isinstance(value, list) and value:
        return tuple(entry if isinstance(entry, str) else read_integer(entry) for entry in value)
    return value if isinstance(value, str) else read_integer(value)


def _token_ids(value: Any) -> tuple[int, ...]:
    ids = tuple(map(read_integer, value))
    if any(token_id < 0 for token_id in ids):
        raise ValueError
    return ids


def _metadata(value: Any) -> Mapping[str, str | int | float]:
    if not isinstance(value, dict) or not all(type(entry) in (str, int, float) for entry in value.values()):
        raise TypeError
    return value


_A_DURATION = (read_seconds, "A finite number of seconds >= 0")
_A_COUNT = (_tokens, "A whole number >= 1")
_A_TEXT = (read_text, "A string")

READERS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "request_id": _A_TEXT,
    "arrived_at": _A_DURATION,
    "num_prompt_tokens": _A_COUNT,
    "num_output_tokens": _A_COUNT,
    "max_tokens": _A_COUNT,
    **{name: (format.read_json, format.json_allowed) for name, format in _STATED.items()},
    "content": (
        _content,
        "Pairs of a segment id (string, whole number, or a list of these) and a number of tokens >= 1",
    ),
    "prompt_token_ids": (_token_ids, "A list of whole numbers >= 0"),
    "follows": (_follows, "The id of an earlier request, or a list of such ids"),
    "think_time_s": _A_DURATION,
    "metadata": (_metadata, "An object of strings and numbers"),
}
NULLABLE = frozenset({
    *("max_tokens", "content", "prompt_token_ids", "follows"),
    *(fact.name for fact in FACTS if fact.is_optional),
})  # fmt: skip
