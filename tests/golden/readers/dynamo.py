"""Compare our pools with the offline replay of Dynamo's mocker (schema pd-golden/1), request by request.

A worker of the mocker schedules as vLLM does: preset `vllm-v1` with the worker's sizes gives every decision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.golden.readers.dynamo_policies import Seen, specs
from tests.golden.readers.events import Compared, first_difference
from tests.golden.readers.simulation import Entry, Life, PlanTimer, Record, content_of, simulate
from tests.golden.readers.step_times import mocker_batch, mocker_decode_batch, mocker_model
from tests.golden.readers.trace import Difference, Result
from vajra_py.errors import VajraError
from vajra_py.workload.request import RequestSpec

SCHEMA = "pd-golden/1"
UNIT = "requests"
MS = 1e3
TOLERANCE_MS = 1e-6
"""The recordings are rounded to this."""


def compare(system: str, name: str, trace: Mapping[str, Any]) -> Result:
    """Run the trace's workload and compare every request."""
    config, rows = trace["config"], trace["requests"]
    record = Record()
    is_split = config["workers_prefill"] is not None
    try:
        run = run_pools if is_split else run_colocated
        run(config, rows, record)
    except VajraError as error:
        failed = Difference("none", "the simulation", "runs to its end", str(error))
        return Result(system, name, len(rows), failed, UNIT)
    compared: list[Compared] = []
    for row in rows:
        life = record.life(str(row["id"]))
        compared += _split(row, life, config["workers_prefill"]) if is_split else _colocated(row, life)
    return Result(system, name, len(rows), first_difference(compared, {row["id"]: row for row in rows}), UNIT)


def run_colocated(config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], record: Record) -> None:
    """Simulate a run whose workers compute prompts and decode."""
    engine = config["engine"]
    timer = PlanTimer(mocker_model(engine), mocker_batch)
    system = {
        "preset": "vllm-v1",
        "num_replicas": config["workers_aggregated"],
        "replica": replica_of(engine),
        "scheduling": {"replica_scheduler": scheduler_of(engine)},
    }
    simulate(system, requests_of(rows, config["trace_block_size"]), lambda replica: timer, [record])


def run_pools(config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], record: Record) -> None:
    """Simulate a run with workers for prompts and workers that decode."""
    prefill, decode = config["prefill"], config["decode"]
    bandwidth = prefill["kv_transfer_bandwidth"]
    moves = {"full_prompt": "whole_prompt", "destination_missing": "missing"}[prefill["kv_transfer_timing_mode"]]
    seen = Seen()
    worker = {"policy": "mocker_decode", "params": {"preemption_mode": decode["preemption_mode"]}}
    system = {
        "preset": "vllm-v1",
        "scheduling": {"replicaset_scheduler": "mocker_round_robin", "replica_scheduler": scheduler_of(prefill)},
        "pools": {
            "prefill": {"num_replicas": config["workers_prefill"], "replica": replica_of(prefill)},
            "decode": {
                "num_replicas": config["workers_decode"],
                "replica": replica_of(decode),
                "replica_scheduler": worker,
            },
        },
        "hand_off": {
            "preset": "dynamo-pd",
            "moves": moves,
            "kv_bytes_per_token": prefill["kv_transfer_bytes_per_token"],
        },
        "links": {"contention": "none", "bandwidth_gb_s": None if bandwidth is None else float(bandwidth)},
    }
    timers = {
        "prefill": PlanTimer(mocker_model(prefill), mocker_batch),
        "decode": PlanTimer(mocker_model(decode), mocker_decode_batch),
    }
    requests = requests_of(rows, config["trace_block_size"])
    simulate(system, requests, lambda replica: timers[replica.parts.pool], [record, seen], specs(seen))


def replica_of(engine: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a worker with these settings."""
    return {
        "max_batch_size": engine["max_num_seqs"],
        "max_batch_tokens": engine["max_num_batched_tokens"],
        "memory": {
            "block_size": engine["block_size"],
            "num_blocks": engine["num_gpu_blocks"],
            "prefix_cache": {"enabled": engine["enable_prefix_caching"]},
        },
    }


def scheduler_of(engine: Mapping[str, Any]) -> dict[str, Any]:
    """The replica scheduler of a worker with these settings."""
    return {"policy": "vllm_v1", "params": {"chunked_prefill": engine["enable_chunked_prefill"]}}


def requests_of(rows: Sequence[Mapping[str, Any]], block_tokens: int) -> list[RequestSpec]:
    """The recorded workload."""
    return [
        RequestSpec(
            str(row["id"]),
            row["arrival"] / MS,
            row["prompt"],
            row["max_output"],
            row["max_output"],
            content=content_of(row["hash_ids"], row["prompt"], block_tokens),
        )
        for row in rows
    ]


def admissions_of(life: Life) -> list[tuple[float, int, bool]]:
    """Time in ms, tokens found in the prefix cache, and whether it was admitted before: of each admission."""
    admitted = [one for one in life.entries if one.kind != "running"]
    return [(one.formed_at * MS, one.num_computed_before, one.kind == "resumed") for one in admitted]


def _colocated(row: Mapping[str, Any], life: Life) -> Iterator[Compared]:
    def value(at: float, field: str, expected: Any, actual: Any) -> Compared:
        return Compared(at, row["id"], field, expected, actual, TOLERANCE_MS)

    def time(field: str, actual: float | None) -> Compared:
        return value(row[field], field, row[field], None if actual is None else actual * MS)

    admissions = admissions_of(life)
    yield value(row["arrival"], "worker", row["worker"], life.replica_id)
    for number, (_, at, reused, again) in enumerate(row["admissions"]):
        ours = admissions[number] if number < len(admissions) else (None, None, None)
        for field, expected, actual in zip(("", " reused", " again"), (at, reused, again), ours, strict=True):
            yield value(at, f"admission {number}{field}", expected, actual)
    yield time("first_token", life.first_token_at)
    yield time("end", life.ended_at)
    yield value(row["end"], "readmissions", row["readmissions"], len(admissions) - 1)
    yield value(row["end"], "p_reused_tokens", row["p_reused_tokens"], sum(reused for _, reused, _ in admissions))


def _split(row: Mapping[str, Any], life: Life, num_prefill: int) -> Iterator[Compared]:
    def value(at: float, field: str, expected: Any, actual: Any) -> Compared:
        return Compared(at, row["id"], field, expected, actual, TOLERANCE_MS)

    def time(field: str, actual: float | None) -> Compared:
        return value(row[field], field, row[field], None if actual is None else actual * MS)

    here = [one for one in life.entries if one.replica_id < num_prefill]
    there = [one for one in life.entries if one.replica_id >= num_prefill]
    admitted = [one for one in here if one.kind != "running"]
    moved = [one for one in there if one.kind not in ("running", "resumed")]
    again = [one for one in there if one.kind == "resumed"]
    yield value(row["arrival"], "p_worker", row["p_worker"], next(iter(life.assignments), None))
    target = None if life.target is None else life.target - num_prefill
    yield value(row["held"], "d_worker", row["d_worker"], target)
    yield time("p_admit", admitted[0].formed_at if admitted else None)
    yield time("held", life.held_at)
    yield time("reserved", life.reserved_at)
    yield time("activated", life.arrived_at)
    yield time("d_admit", moved[0].formed_at if moved else None)
    yield time("released", life.released_at)
    yield time("first_token", life.first_token_at)
    yield time("end", life.ended_at)
    yield value(row["held"], "p_reused_tokens", row["p_reused_tokens"], _last_reuse(admitted))
    yield value(row["end"], "d_reused_tokens", row["d_reused_tokens"], _last_reuse(again))
    yield value(row["end"], "readmissions", row["readmissions"], len(admitted) - 1 + len(again))


def _last_reuse(admitted: Sequence[Entry]) -> int:
    """Tokens that the latest admission found in the prefix cache; what comes from another worker is not among them."""
    return admitted[-1].num_computed_before if admitted else 0
