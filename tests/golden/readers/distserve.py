"""Compare our replicas with DistServe's simulator (schema simdistserve-golden/1), request by request and step by step.

There a request of `output` tokens takes `output` decode steps, since its prefill gives none: here it has one token more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any

from tests.golden.readers.distserve_policies import Placement, Seen, specs
from tests.golden.readers.events import Compared, first_difference
from tests.golden.readers.simulation import Life, PlanTimer, Record, Step, simulate
from tests.golden.readers.step_times import StagedTimer, distserve_batch, distserve_model
from tests.golden.readers.trace import Difference, Result
from vajra_py.errors import VajraError
from vajra_py.runtime.serving.replica import Replica
from vajra_py.sim.executor import StepTimer
from vajra_py.workload.request import RequestSpec

SCHEMA = "simdistserve-golden/1"
UNIT = "requests"
MS = 1e3
TOLERANCE_MS = 1e-6
"""Nanoseconds: what floating point leaves of the recorded sums."""
MANY_BLOCKS = 2**24
STEPS_IN_FLIGHT = 64
REPLICA: Mapping[str, Any] = {
    "max_batch_size": MANY_BLOCKS,
    "memory": {
        "num_blocks": MANY_BLOCKS,
        "watermark_fraction": 0.0,
        "reservation": "incremental",
        "prefix_cache": {"enabled": False},
    },
}
"""The simulator knows no memory."""


def compare(system: str, name: str, trace: Mapping[str, Any]) -> Result:
    """Run the trace's workload and compare every request and step."""
    rows, config = trace["requests"], trace["config"]
    record, seen = Record(), Seen()
    try:
        run(config, rows, record, seen)
    except VajraError as error:
        failed = Difference("none", "the simulation", "runs to its end", str(error))
        return Result(system, name, len(rows), failed, UNIT)
    stages = stages_of(config)
    compared = []
    for row in rows:
        request_id = str(row["id"])
        compared += _placements(row, seen.placements.get(request_id, []), stages)
        compared += _request(row, record.life(request_id), stages)
    compared += _steps(trace["steps"], record.steps, stages)
    by_id = {row["id"]: row for row in rows} | {None: {}}
    return Result(system, name, len(rows), first_difference(compared, by_id), UNIT)


def stages_of(config: Mapping[str, Any]) -> list[int]:
    """Pipeline stages of each replica, each of which is a worker of the recording."""
    stages = [config["pp_p"]] * config["P"]
    return stages + [config["pp_d"]] * config["D"] if config["backend"] == "distserve" else stages


def run(config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], record: Record, seen: Seen) -> None:
    """Simulate the recorded run."""
    system: dict[str, Any] = {
        "replica": REPLICA,
        "scheduling": {
            "request_prioritizer": "fcfs",
            "replicaset_scheduler": "simdistserve_router",
            "replica_scheduler": {"policy": "simdistserve_worker", "params": worker_params(config)},
        },
    }
    if config["backend"] == "distserve":
        system["pools"] = {
            pool: {"num_replicas": config[count], "replica": {"pipeline_stages": _in_flight(config[stages])}}
            for pool, count, stages in (("prefill", "P", "pp_p"), ("decode", "D", "pp_d"))
        }
        system["hand_off"] = {"preset": "distserve", "kv_bytes_per_token": 1}
    else:
        system["num_replicas"] = config["P"]
        system["replica"] = {**REPLICA, "pipeline_stages": _in_flight(config["pp_p"])}
    stages = stages_of(config)

    def timer_of(replica: Replica) -> StepTimer:
        model = distserve_model(config, stages[replica.replica_id])
        if model.pipeline_stages == 1:
            return PlanTimer(model, distserve_batch)
        return StagedTimer(model)

    simulate(system, requests_of(rows), timer_of, [record, seen], specs(seen))


def _in_flight(num_stages: int) -> int:
    """Steps that a replica may have in flight: there, any number may wait for a later stage."""
    return 1 if num_stages == 1 else STEPS_IN_FLIGHT


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


def _placements(row: Mapping[str, Any], seen: Sequence[Placement], stages: Sequence[int]) -> Iterator[Compared]:
    """Stage, chosen worker, and the key of each."""
    first = _first_workers(stages)
    here = [[stage, first[best], [[first[one], key] for one, key in keys]] for stage, best, keys in seen]
    for number, (stage, at, worker, keys) in enumerate(row["placements"]):
        ours = here[number] if number < len(here) else None
        yield Compared(at, row["id"], f"placement {number}", [stage, worker, keys], ours)


def _first_workers(stages: Sequence[int]) -> list[int]:
    """The worker that is the first stage of each replica."""
    return [sum(stages[:replica]) for replica in range(len(stages))]


def _request(row: Mapping[str, Any], life: Life, stages: Sequence[int]) -> Iterator[Compared]:
    def time(field: str, at: float, actual: float | None) -> Compared:
        return Compared(at, row["id"], field, at, None if actual is None else actual * MS, TOLERANCE_MS)

    prefills = [one for one in life.entries if one.num_computed_before < row["prompt"]]
    decodes = life.entries[len(prefills) :]
    starts = [one.formed_at for one in prefills]
    depth = stages[prefills[0].replica_id] if prefills else 1
    expected = row["prefill_starts"][::depth]  # of the first stage
    yield Compared(row["prefill_end"], row["id"], "prefill steps", len(expected), len(starts))
    for number, (at, actual) in enumerate(zip(expected, starts, strict=False)):
        yield time(f"prefill start {number}", at, actual)
    yield time("prefill_end", row["prefill_end"], life.first_token_at)
    yield time("decode_starts_first", row["decode_starts_first"], decodes[0].formed_at if decodes else None)
    rounds = sum(stages[one.replica_id] for one in decodes)
    yield Compared(row["end"], row["id"], "rounds", row["rounds"], rounds)
    yield time("end", row["end"], life.ended_at)


def _steps(expected: Sequence[Sequence[Any]], ours: Sequence[Step], stages: Sequence[int]) -> Iterator[Compared]:
    """Compare what each replica's first stage does, and when its last stage has done it."""
    first = _first_workers(stages)
    rows: dict[int, list[Sequence[Any]]] = {}
    for row in expected:
        if row[4] or row[5]:
            rows.setdefault(row[0], []).append(row)
    by_replica: dict[int, list[Step]] = {}
    for step in ours:
        by_replica.setdefault(step.replica_id, []).append(step)
    for replica, depth in enumerate(stages):
        worker, here = first[replica], by_replica.get(replica, [])
        begun, done = (sorted(rows.get(one, []), key=lambda row: row[2]) for one in (worker, worker + depth - 1))
        yield Compared(inf, None, f"steps of worker {worker}", len(begun), len(here))
        for number, (_, _, start, _, prompts, decodes) in enumerate(begun):
            yield from _step(start, worker, prompts, decodes, here[number] if number < len(here) else None)
        for (_, _, start, end, *_), step in zip(done, here, strict=False):
            what = f"end of a step of worker {worker + depth - 1}"
            yield Compared(start, None, what, end, step.ended_at * MS, TOLERANCE_MS)


def _step(
    start: float, worker: int, prompts: Sequence[Any], decodes: Sequence[Any], step: Step | None
) -> Iterator[Compared]:
    if step is None:
        yield Compared(start, None, f"step of worker {worker}", start, None)
        return
    yield Compared(start, None, f"start of a step of worker {worker}", start, step.formed_at * MS, TOLERANCE_MS)
    members = {request: (tokens, before) for request, tokens, before in step.entries}
    chunks = [[str(request), tokens] for request, tokens in prompts]
    contexts = sorted([str(request), context] for request, context in decodes)
    decoded = {name for name, _ in contexts}
    here = [[name, tokens] for name, (tokens, _) in members.items() if name not in decoded]
    yield Compared(start, None, f"prompts in a step of worker {worker}", chunks, here)
    there = sorted([name, members[name][1]] for name in members if name in decoded)
    yield Compared(start, None, f"decodes in a step of worker {worker}", contexts, there)
