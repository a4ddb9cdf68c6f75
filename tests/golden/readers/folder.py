"""Find recorded runs in a folder and check each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from tests.golden.readers import (
    distserve,
    dynamo,
    dynamo_router,
    nano,
    offload_cache,
    planner,
    radix_cache,
    splitwise,
    thunderagent,
    vidur,
    vllm,
    vllm_connector,
)
from tests.golden.readers.trace import Difference, Result, read_json

SUFFIXES = (".json.gz", ".jsonl.gz", ".json", ".jsonl")
BY_REQUESTS: Mapping[str, Callable[[str, str, Mapping[str, Any]], Result]] = {
    dynamo.SCHEMA: dynamo.compare,
    dynamo_router.SCHEMA: dynamo_router.compare,
    distserve.SCHEMA: distserve.compare,
    offload_cache.SCHEMA: offload_cache.compare,
    planner.SCHEMA: planner.compare,
    radix_cache.SCHEMA: radix_cache.compare,
    splitwise.SCHEMA: splitwise.compare,
    thunderagent.SCHEMA: thunderagent.compare,
    vllm_connector.SCHEMA: vllm_connector.compare,
}
"""Readers of traces that are no sequences of steps."""


def compare_folder(folder: Path) -> Iterator[Result]:
    """Compare every trace below the folder, in order of path; the first folder of a path names its system."""
    for path in sorted(folder.rglob(f"*{vidur.WORKLOAD}")):
        parts = path.relative_to(folder).parts
        yield vidur.compare(parts[0] if len(parts) > 1 else folder.name, path)
    for path in sorted(one for one in folder.rglob("*") if one.name.endswith(SUFFIXES)):
        parts = path.relative_to(folder).parts
        system = parts[0] if len(parts) > 1 else folder.name
        for name, trace in read_json(path):
            result = _compare(system, "/".join((*parts[1:-1], name)), trace)
            if result is not None:
                yield result


def _compare(system: str, name: str, trace: Any) -> Result | None:
    if not isinstance(trace, Mapping):
        return None
    by_requests = BY_REQUESTS.get(trace.get("schema", ""))
    if by_requests is not None:
        return by_requests(system, name, trace)
    if "steps" not in trace:
        return None
    if trace.get("schema") == vllm.SCHEMA:
        return vllm.compare(system, name, trace)
    if trace.get("kind") in nano.PRESETS and trace.get("format", nano.FORMAT) == nano.FORMAT:
        return nano.compare(system, name, trace)
    allowed = f"{vllm.SCHEMA}; {nano.FORMAT} of kind {', '.join(nano.PRESETS)}"
    told = trace.get("schema") or trace.get("format") or trace.get("kind")
    return Result(system, name, 0, Difference("none", "format of the trace", allowed, told))


def report(folder: Path, out: TextIO) -> bool:
    """Compare a folder, print counts by system and the first difference of each failing trace; whether all match."""
    counts: dict[tuple[str, str], list[int]] = {}
    failed: list[Result] = []
    for result in compare_folder(folder):
        count = counts.setdefault((result.system, result.unit), [0, 0, 0])
        count[0] += result.matches
        count[1] += 1
        count[2] += result.num_compared
        if not result.matches:
            failed.append(result)
        if result.note:
            out.write(f"{result.system}/{result.name}: {result.note}\n")
    for result in failed:
        assert result.difference is not None
        out.write("\n  ".join((f"{result.system}/{result.name}:", *result.difference.lines())) + "\n\n")
    width = max((len(system) for system, _ in counts), default=0)
    for (system, unit), (matching, total, compared) in counts.items():
        out.write(f"{system:{width}}  {matching} of {total} traces match ({compared} {unit} compared)\n")
    if not counts:
        out.write(f"{folder}: no recorded runs there. Expected: a folder with one folder of traces for each system\n")
    return bool(counts) and not failed
