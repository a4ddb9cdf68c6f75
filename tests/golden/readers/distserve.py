"""Compare our replicas with DistServe's simulator (schema simdistserve-golden/1), request by request and step by step.

There a request of `output` tokens takes `output` decode steps, since its prefill gives none: here it has one token more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.golden.readers.distserve_policies import SPECS
from tests.golden.readers.events import Compared, first_difference
from tests.golden.readers.simulation import Life, PlanTimer, Record, Step, simulate
from tests.golden.readers.step_times import distserve_batch, distserve_model
from tests.golden.readers.trace import Difference, Result
from vajra_py.errors import VajraError
from vajra_py.workload.request import RequestSpec

SCHEMA = "simdistserve-golden/1"
UNIT = "requests"
MS = 1e3
TOLERANCE_MS = 1e-6
"""Nanoseconds: what floating point leaves of the recorded sums."""
MANY_BLOCKS = 2**24


def compare(system: str, name: str, trace: Mapping[str, Any]) -> Result:
    """Run the trace's workload and compare every request and step."""
    rows, config = trace["requests"], trace["config"]
    record = Record()
    try:
        run(config, rows, record)
    except VajraError as error:
        failed = Difference("none", "the simulation", "runs to its end", str(error))
        return Result(system, name, len(rows), failed, UNIT)
    compared = [one for row in rows for one in _request(row, record.life(str(row["id"])))]
    compared += _steps(trace["steps"], record.steps)
    by_id = {row["id"]: row for row in rows} | {None: {}}
    return Result(system, name, len(rows), first_difference(compared, by_id), UNIT)


def run(config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], record: Record) -> None:
    """Simulate the recorded run."""
    timer = PlanTimer(distserve_model(config, config["pp_p"]), distserve_batch)
    system = {
        "num_replicas": config["P"],
        "replica": {
            "max_batch_size": MANY_BLOCKS,
            "memory": {
                "num_blocks": MANY_BLOCKS,
                "watermark_fraction": 0.0,
                "reservation": "incremental",
                "prefix_cache": {"enabled": False},
            },
        },
        "scheduling": {
            "request_prioritizer": "fcfs",
            "replicaset_scheduler": "simdistserve_router",
            "replica_scheduler": {"policy": "simdistserve_worker", "params": worker_params(config)},
        },
    }
    simulate(system, requests_of(rows), lambda replica: timer, [record], SPECS)


def worker_params(config: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a worker."""
    return {
        "prefill_max_batch_size": config["prefill_max_batch_size"],
        "prefill_max_tokens": config["prefill_max_tokens"],
        "decode_max_tokens": config["decode_max_tokens"],
        "back_pressure_tokens": int(config["decode_max_batch_size"] * config["decode_back_pressure"]),
        "chunked": config["enable_chunked_prefill"],
    }


def requests_of(rows: Sequence[Mapping[str, Any]]) -> list[RequestSpec]:
    """The recorded workload."""
    return [
        RequestSpec(str(row["id"]), row["arrival"] / MS, row["prompt"], row["output"] + 1, row["output"] + 1)
        for row in rows
    ]


def _request(row: Mapping[str, Any], life: Life) -> Iterator[Compared]:
    def time(field: str, at: float, actual: float | None) -> Compared:
        return Compared(at, row["id"], field, at, None if actual is None else actual * MS, TOLERANCE_MS)

    prefills = [one for one in life.entries if one.num_computed_before < row["prompt"]]
    decodes = life.entries[len(prefills) :]
    placed = [worker for _, _, worker, _ in row["placements"]]
    yield Compared(row["arrival"], row["id"], "placements", placed[0], next(iter(life.assignments), None))
    starts = [one.formed_at for one in prefills]
    yield Compared(row["prefill_end"], row["id"], "prefill steps", len(row["prefill_starts"]), len(starts))
    for number, (at, actual) in enumerate(zip(row["prefill_starts"], starts, strict=False)):
        yield time(f"prefill start {number}", at, actual)
    yield time("prefill_end", row["prefill_end"], life.first_token_at)
    yield time("decode_starts_first", row["decode_starts_first"], decodes[0].formed_at if decodes else None)
    yield Compared(row["end"], row["id"], "rounds", row["rounds"], len(decodes))
    yield time("end", row["end"], life.ended_at)


def _steps(expected: Sequence[Sequence[Any]], ours: Sequence[Step]) -> Iterator[Compared]:
    by_worker: dict[int, list[Step]] = {}
    for step in ours:
        by_worker.setdefault(step.replica_id, []).append(step)
    for worker, _, start, end, prefills, decodes in expected:
        if not prefills and not decodes:
            continue
        step = by_worker[worker].pop(0) if by_worker.get(worker) else None
        if step is None:
            yield Compared(start, None, "step", [start, end], None)
            continue
        for field, at, actual in (("start", start, step.formed_at), ("end", end, step.ended_at)):
            yield Compared(start, None, f"{field} of a step of worker {worker}", at, actual * MS, TOLERANCE_MS)
        members = {request: (tokens, before) for request, tokens, before in step.entries}
        chunks = [[str(request), tokens] for request, tokens in prefills]
        contexts = sorted([str(request), context] for request, context in decodes)
        decoded = {name for name, _ in contexts}
        here = [[name, tokens] for name, (tokens, _) in members.items() if name not in decoded]
        yield Compared(start, None, f"prompts in a step of worker {worker}", chunks, here)
        there = sorted([name, members[name][1]] for name in members if name in decoded)
        yield Compared(start, None, f"decodes in a step of worker {worker}", contexts, there)
    for worker, rest in by_worker.items():
        for step in rest:
            yield Compared(step.formed_at * MS, None, f"step of worker {worker}", None, step.entries)
