"""Compare our pools with the offline replay of Dynamo's mocker (schema pd-golden/1), request by request.

A worker of the mocker schedules as vLLM does: preset `vllm-v1` with the worker's sizes gives every decision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.golden.readers.events import Compared, first_difference
from tests.golden.readers.simulation import Life, PlanTimer, Record, content_of, simulate
from tests.golden.readers.step_times import mocker_batch, mocker_model
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
    rows = trace["requests"]
    record = Record()
    try:
        run(trace["config"], rows, record)
    except VajraError as error:
        failed = Difference("none", "the simulation", "runs to its end", str(error))
        return Result(system, name, len(rows), failed, UNIT)
    compared = [one for row in rows for one in _colocated(row, record.life(str(row["id"])))]
    return Result(system, name, len(rows), first_difference(compared, {row["id"]: row for row in rows}), UNIT)


def run(config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], record: Record) -> None:
    """Simulate the recorded run."""
    engine = config["engine"]
    timer = PlanTimer(mocker_model(engine), mocker_batch)
    system = {
        "preset": "vllm-v1",
        "num_replicas": config["workers_aggregated"],
        "replica": replica_of(engine),
        "scheduling": {"replica_scheduler": scheduler_of(engine)},
    }
    simulate(system, requests_of(rows, config["trace_block_size"]), lambda replica: timer, [record])


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
