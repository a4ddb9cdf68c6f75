"""Compare our replicas with splitwise-sim (schema splitwise-golden/1), token by token.

Memory is counted in tokens there: here a block holds one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.golden.readers.events import Compared, first_difference
from tests.golden.readers.simulation import Life, PlanTimer, Record, simulate
from tests.golden.readers.splitwise_policies import KEYS, Seen, specs
from tests.golden.readers.step_times import SplitwiseLinear, SplitwiseTable, splitwise_batch
from tests.golden.readers.trace import Difference, Result
from vajra_py.errors import VajraError
from vajra_py.workload.request import RequestSpec

SCHEMA = "splitwise-golden/1"
UNIT = "requests"
TOLERANCE_S = 1e-9


def compare(system: str, name: str, trace: Mapping[str, Any]) -> Result:
    """Run the trace's workload and compare every request."""
    rows = trace["requests"]
    record, seen = Record(), Seen()
    try:
        run(trace, record, seen)
    except VajraError as error:
        failed = Difference("none", "the simulation", "runs to its end", str(error))
        return Result(system, name, len(rows), failed, UNIT)
    names = [one[0] for one in trace["config"]["instances"]]
    by_tokens = trace["config"]["scheduler"] == "token_jsq"
    compared = []
    for row in rows:
        request_id = str(row["id"])
        compared += _placement(row, names, record.life(request_id), seen.get(request_id, []), by_tokens=by_tokens)
        compared += _times(row, record.life(request_id))
    return Result(system, name, len(rows), first_difference(compared, {row["id"]: row for row in rows}), UNIT)


def run(trace: Mapping[str, Any], record: Record, seen: Seen) -> None:
    """Simulate the recorded run."""
    config = trace["config"]
    timer = PlanTimer(step_times(trace), splitwise_batch)
    system = {
        "num_replicas": len(config["instances"]),
        "replica": replica_of(config, config["instances"][0]),
        "scheduling": {
            "request_prioritizer": "fcfs",
            "replicaset_scheduler": {"policy": "splitwise_router", "params": {"key": KEYS[config["scheduler"]]}},
            "replica_scheduler": {
                "policy": "splitwise_instance",
                "params": {key: config[key] for key in ("max_batch_tokens", "max_preemptions")},
            },
        },
    }
    simulate(system, requests_of(trace["requests"]), lambda replica: timer, [record], specs(seen))


def replica_of(config: Mapping[str, Any], instance: Sequence[Any]) -> dict[str, Any]:
    """The sizes of an instance."""
    _, _, memory, model = instance
    return {
        "max_batch_size": config["max_batch_size"],
        "memory": {
            "block_size": 1,
            "num_blocks": int((memory - model) // config["kv_bytes_per_token"]),
            "watermark_fraction": 0.0,
            "reservation": "incremental",
            "prefix_cache": {"enabled": False},
        },
    }


def requests_of(rows: Sequence[Mapping[str, Any]]) -> list[RequestSpec]:
    """The recorded workload."""
    return [RequestSpec(str(row["id"]), row["arrival"], row["prompt"], row["output"], row["output"]) for row in rows]


def step_times(trace: Mapping[str, Any], hardware: str | None = None) -> SplitwiseLinear | SplitwiseTable:
    """The step times of the run; from a table, those of one kind of device."""
    config = trace["config"]
    if config["performance_model"] == "linear":
        return SplitwiseLinear(**config["linear"])
    devices = {name: device for name, device, *_ in config["instances"]}
    prompts = {row["id"]: row["prompt"] for row in trace["requests"]}
    table: dict[tuple[int, int], float] = {}
    for instance, _, duration, _, _, members in trace["iterations"]:
        if hardware in (None, devices[instance]):
            tokens = sum(prompts[request] for request, kind in members if kind == "P")
            table[tokens, sum(kind == "T" for _, kind in members)] = duration
    return SplitwiseTable(table)


def _placement(
    row: Mapping[str, Any],
    names: Sequence[str],
    life: Life,
    seen: Sequence[tuple[int, int, int]],
    *,
    by_tokens: bool,
) -> Iterator[Compared]:
    placed = None if life.replica_id is None else names[life.replica_id]
    for field in ("prompt_instance", "token_instance"):
        yield Compared(row["arrival"], row["id"], field, row[field], placed)
    counts = [[name, count] for name, count, *_ in row["before"]]
    yield Compared(row["arrival"], row["id"], "requests before", counts, [[names[one], many] for one, many, _ in seen])
    if by_tokens:
        tokens = [[name, pending] for name, _, pending, _ in row["before"]]
        here = [[names[one], pending] for one, _, pending in seen]
        yield Compared(row["arrival"], row["id"], "tokens before", tokens, here)


def _times(row: Mapping[str, Any], life: Life) -> Iterator[Compared]:
    def time(field: str, expected: float, actual: float | None) -> Compared:
        return Compared(expected, row["id"], field, expected, actual, TOLERANCE_S)

    entries = life.entries
    yield time("prompt_start", row["prompt_start"], entries[0].formed_at if entries else None)
    yield time("prompt_end", row["prompt_end"], life.first_token_at)
    yield time("token_start", row["token_start"], entries[1].formed_at if len(entries) > 1 else None)
    yield time("end", row["end"], life.ended_at)
    times = [one.ended_at for one in entries]
    yield Compared(row["end"], row["id"], "tokens", len(row["token_times"]), len(times))
    for number, (expected, actual) in enumerate(zip(row["token_times"], times, strict=False)):
        yield time(f"token {number}", expected, actual)
    yield Compared(row["end"], row["id"], "preemptions", row["preemptions"], life.notes.get("preemptions"))
