"""Compare our replicas with splitwise-sim (schema splitwise-golden/1), token by token.

Memory is counted in tokens there: here a block holds one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.golden.readers.events import Compared, first_difference
from tests.golden.readers.simulation import Life, PlanTimer, Record, simulate
from tests.golden.readers.splitwise_policies import Placed, Seen, specs
from tests.golden.readers.step_times import SplitwiseLinear, SplitwiseTable, splitwise_batch
from tests.golden.readers.trace import Difference, Result
from vajra_py.errors import VajraError
from vajra_py.runtime.serving.replica import Replica
from vajra_py.workload.request import RequestSpec

SCHEMA = "splitwise-golden/1"
UNIT = "requests"
TOLERANCE_S = 1e-9
SCHEDULERS = ("jsq", "token_jsq", "kv_jsq", "overlap_kv_jsq", "kv_token_jsq", "kv_round_robin", "mixed_pool")
"""Schedulers of the recordings that are followed."""


def compare(system: str, name: str, trace: Mapping[str, Any]) -> Result:
    """Run the trace's workload and compare every request."""
    rows = trace["requests"]
    scheduler = trace["config"]["scheduler"]
    if scheduler not in SCHEDULERS:
        unknown = Difference(
            "none", "scheduler", scheduler, f"not followed here. Those that are: {', '.join(SCHEDULERS)}"
        )
        return Result(system, name, len(rows), unknown, UNIT)
    record, seen = Record(), Seen()
    try:
        run(trace, record, seen)
    except VajraError as error:
        failed = Difference("none", "the simulation", "runs to its end", str(error))
        return Result(system, name, len(rows), failed, UNIT)
    compared = []
    for row in rows:
        request_id = str(row["id"])
        compared += _placement(row, trace["config"], seen.get(request_id))
        compared += _times(row, record.life(request_id))
    return Result(system, name, len(rows), first_difference(compared, {row["id"]: row for row in rows}), UNIT)


def run(trace: Mapping[str, Any], record: Record, seen: Seen) -> None:
    """Simulate the recorded run."""
    config = trace["config"]
    instances = config["instances"]
    system: dict[str, Any] = {
        "scheduling": {
            "request_prioritizer": "fcfs",
            "replicaset_scheduler": {"policy": "splitwise_router", "params": {"scheduler": config["scheduler"]}},
            "replica_scheduler": {
                "policy": "splitwise_instance",
                "params": {key: config[key] for key in ("max_batch_tokens", "max_preemptions")},
            },
        },
    }
    if config["prompt_instances"] is None:
        system |= {"num_replicas": len(instances), "replica": replica_of(config, instances[0])}
    else:
        counts = config["prompt_instances"], config["token_instances"]
        prompts = {"num_replicas": counts[0], "replica": replica_of(config, instances[0])}
        tokens = {"num_replicas": counts[1], "replica": replica_of(config, instances[-1])}
        system["pools"] = {"prefill": prompts, "decode": tokens}
        if config["scheduler"] == "mixed_pool":
            system["pools"] = {"prompt": {"role": "mixed", **prompts}, "token": {"role": "mixed", **tokens}}
            limit = {"max_pending_prompt_tokens": config["prompt_max_pending_batch_tokens"]}
            system["scheduling"]["replicaset_scheduler"] = {"policy": "splitwise_lending_router", "params": limit}
        system["hand_off"] = {"preset": "splitwise", "kv_bytes_per_token": config["kv_bytes_per_token"]}
        bandwidth_gb_s = config["transfer_bandwidth_gib_s"] * 2**30 / 1e9
        system["links"] = {"contention": "none", "bandwidth_gb_s": bandwidth_gb_s}
    timers = {device: PlanTimer(step_times(trace, device), splitwise_batch) for _, device, *_ in instances}

    def timer_of(replica: Replica) -> PlanTimer:
        return timers[instances[replica.replica_id][1]]

    simulate(system, requests_of(trace["requests"]), timer_of, [record], specs(seen))


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


def step_times(trace: Mapping[str, Any], hardware: str) -> SplitwiseLinear | SplitwiseTable:
    """The step times of one kind of device; where they come from a table, those that the run had."""
    config = trace["config"]
    if config["performance_model"] == "linear":
        return SplitwiseLinear(**config["linear"])
    devices = {name: device for name, device, *_ in config["instances"]}
    prompts = {row["id"]: row["prompt"] for row in trace["requests"]}
    table: dict[tuple[int, int], float] = {}
    for instance, _, duration, _, _, members in trace["iterations"]:
        if hardware == devices[instance]:
            tokens = sum(prompts[request] for request, kind in members if kind == "P")
            table[tokens, sum(kind == "T" for _, kind in members)] = duration
    return SplitwiseTable(table)


def _placement(row: Mapping[str, Any], config: Mapping[str, Any], placed: Placed | None) -> Iterator[Compared]:
    names = [one[0] for one in config["instances"]]
    chosen = (None, None) if placed is None else (names[placed.prompt_at], names[placed.token_at])
    for field, actual in zip(("prompt_instance", "token_instance"), chosen, strict=True):
        yield Compared(row["arrival"], row["id"], field, row[field], actual)
    expected = [[name, count, tokens] for name, count, tokens, _ in row["before"]]
    here = [[names[one], count, tokens] for one, count, tokens in ([] if placed is None else placed.loads)]
    yield Compared(row["arrival"], row["id"], "before", expected, here)
    if placed is not None and placed.memory:
        per_token = config["kv_bytes_per_token"]
        scheduled = [
            (memory - model) / per_token
            for (*_, memory), (*_, model) in zip(row["before"], config["instances"], strict=True)
        ]
        yield Compared(row["arrival"], row["id"], "memory before", scheduled, list(placed.memory))
        mixed = sorted(names[one] for one in placed.mixed)
        yield Compared(row["arrival"], row["id"], "mixed", sorted(row["mixed"]), mixed)


def _times(row: Mapping[str, Any], life: Life) -> Iterator[Compared]:
    def time(field: str, expected: float, actual: float | None) -> Compared:
        return Compared(expected, row["id"], field, expected, actual, TOLERANCE_S)

    entries = life.entries
    if row["kv_start"] is not None:
        yield time("kv_start", row["kv_start"], life.reserved_at)
        yield time("kv_end", row["kv_end"], life.arrived_at)
    yield time("prompt_start", row["prompt_start"], entries[0].formed_at if entries else None)
    yield time("prompt_end", row["prompt_end"], life.first_token_at)
    yield time("token_start", row["token_start"], entries[1].formed_at if len(entries) > 1 else None)
    yield time("end", row["end"], life.ended_at)
    times = [one.ended_at for one in entries]
    yield Compared(row["end"], row["id"], "tokens", len(row["token_times"]), len(times))
    for number, (expected, actual) in enumerate(zip(row["token_times"], times, strict=False)):
        yield time(f"token {number}", expected, actual)
    yield Compared(row["end"], row["id"], "preemptions", row["preemptions"], life.notes.get("preemptions"))
