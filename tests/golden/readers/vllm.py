"""Check `vllm_v1` against traces of vLLM's V1 scheduler (schema vllm-sched-golden-1)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from tests.golden.readers.driver import Arrival, Driver, Setup
from tests.golden.readers.trace import Difference, Result, first_difference
from vajra_py.contract.observer import EndReason
from vajra_py.runtime.requests.request import Request

SCHEMA = "vllm-sched-golden-1"
NUM_WAITING_LISTED = 8
KINDS = {"running": "R", "admitted": "N", "resumed": "P"}
REASONS = {EndReason.LENGTH: "length", EndReason.STOP: "stop"}


def setup_of(config: Mapping[str, Any]) -> Setup:
    """The preset with a trace's knobs. vLLM's first block is a null block and holds nothing, so there is one less."""
    by_priority = config["policy"] == "priority"
    max_active = config.get("max_num_active_seqs")
    max_requests = config["max_num_seqs"]
    return Setup(
        preset="vllm-v1-priority" if by_priority else "vllm-v1",
        replica={
            "max_batch_size": max(max_requests, max_active or 0),
            "max_batch_tokens": config.get("max_num_scheduled_tokens") or config["max_num_batched_tokens"],
            "max_model_len": config["max_model_len"],
            "memory": {
                "block_size": config["block_size"],
                "num_blocks": config["num_blocks"] - 1,
                # As the recorded scheduler did; the preset removes such blocks from the cache.
                "prefix_cache": {"enabled": config["enable_prefix_caching"], "unscheduled": "keep"},
            },
        },
        params={
            "max_num_active_requests": max_active if max_active is not None else max_requests,
            "long_prefill_threshold_tokens": config.get("long_prefill_token_threshold", 0),
            "adaptive_long_prefill_threshold": config.get("long_prefill_token_threshold_adaptive", False),
            "chunked_prefill": config.get("enable_chunked_prefill", True),
            "reserve_full_prompt": config.get("scheduler_reserve_full_isl", True),
            "watermark_fraction": config.get("watermark", 0.0),
            "prefill_interval_steps": config.get("prefill_schedule_interval", 1),
        },
    )


def compare(system: str, name: str, trace: Mapping[str, Any]) -> Result:
    """Run the trace's requests and compare every step: order, tokens, kinds, hits, victims, ends, free blocks, queues."""
    return _Comparison(trace).run(system, name)


def difference_of_step(
    config: Mapping[str, Any],
    field: str,
    expected: Mapping[str, Any],
    actual: Mapping[str, Any],
    states: tuple[list[str], list[str]],
) -> Difference:
    """Describe a step that differs from the recorded one; `states` of the replica: before and after it."""
    recorded = [f"{key}: {value}" for key, value in expected.items()]
    here = [f"{key}: {value}" for key, value in actual.items()]
    before, after = states
    return Difference(
        str(expected["step"]),
        field,
        expected.get(field, []),
        actual[field],
        [f"config: {dict(config)}", *recorded],
        [*here, "before the step:", *before, "after it:", *after],
    )


class _Comparison:
    def __init__(self, trace: Mapping[str, Any]) -> None:
        self._trace = trace
        config = trace["config"]
        self._driver = Driver(setup_of(config))
        self._arrivals: dict[int, list[Arrival]] = defaultdict(list)
        for request, arrival in arrivals_of(trace["requests"], config):
            self._arrivals[request["arrival_step"]].append(arrival)
        self._numbers = {request["id"]: request["index"] for request in trace["requests"]}
        self._aborts: dict[int, list[str]] = defaultdict(list)
        for abort in trace.get("aborts", ()):
            self._aborts[abort["step"]].extend(abort["ids"])

    def run(self, system: str, name: str) -> Result:
        before: list[str] = []
        steps = self._trace["steps"]
        for position, expected in enumerate(steps):
            actual = self._step(expected["step"])
            field = first_difference({"preempted": [], "finished": [], **expected}, actual)
            if field is not None:
                both = (before, self._driver.state())
                difference = difference_of_step(self._trace["config"], field, expected, actual, both)
                return Result(system, name, position + 1, difference)
            before = self._driver.state()
        left = sorted(self._driver.requests)
        if left and not self._trace.get("stalled"):
            difference = Difference("the last", "requests left", [], left, [], self._driver.state())
            return Result(system, name, len(steps), difference)
        return Result(system, name, len(steps))

    def _step(self, step: int) -> dict[str, Any]:
        driver = self._driver
        for request_id in self._aborts.get(step, ()):
            driver.abort(request_id)
        for arrival in self._arrivals.get(step, ()):
            driver.arrive(arrival)
        entries, preempted = driver.form()
        actual: dict[str, Any] = {
            "sched": [[entry.request.request_id, entry.num_tokens] for entry in entries],
            "kind": "".join(KINDS[entry.kind] for entry in entries),
            "computed": [entry.num_computed_before for entry in entries],
            "preempted": preempted,
            "free_sched": driver.replica.memory.free_blocks,
        }
        finished = driver.complete(entries, self._next_token)
        waiting = driver.waiting()
        actual |= {
            "finished": [[request_id, REASONS[reason]] for request_id, reason in finished],
            "free_end": driver.replica.memory.free_blocks,
            "running": [request.request_id for request in driver.running()],
            "num_waiting": len(waiting),
            "waiting": [request.request_id for request in waiting[:NUM_WAITING_LISTED]],
        }
        return actual

    def _next_token(self, request: Request) -> tuple[int, bool]:
        return 1_000_000 + 10_000 * self._numbers[request.request_id] + request.num_output_tokens, False


def arrivals_of(requests: list[dict[str, Any]], config: Mapping[str, Any]) -> list[tuple[dict[str, Any], Arrival]]:
    """Requests with what orders them.

    First come first served is the order in which they were added. Equal priorities are followed by the arrival time,
    and by the text of the id where that ties.
    """
    by_priority = config["policy"] == "priority"
    by_text = {request_id: rank for rank, request_id in enumerate(sorted(one["id"] for one in requests))}
    order = sorted(requests, key=lambda one: one["arrival_step"])
    return [
        (
            request,
            Arrival(
                request_id=request["id"],
                prompt=request["prompt"],
                max_tokens=min(request["max_tokens"], config["max_model_len"] - len(request["prompt"])),
                index=by_text[request["id"]] if by_priority else position,
                arrived_at=request["arrival_time"] if by_priority else float(position),
                priority=request["priority"],
            ),
        )
        for position, request in enumerate(order)
    ]
