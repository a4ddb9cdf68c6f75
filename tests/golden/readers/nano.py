"""Check `nano_vllm` and `minivllm` against traces of format sched-golden/1."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from tests.golden.readers.driver import Arrival, Driver, Setup
from tests.golden.readers.trace import Difference, Result, first_difference
from vajra_py.runtime.requests.request import Request

FORMAT = "sched-golden/1"
PRESETS = {"nano_old": "nano-vllm-old", "nano_new": "nano-vllm", "mini_doc": "minivllm", "mini": "minivllm"}
"""Kind of trace to preset."""
MAX_LISTED = 24
"""Queues are listed in full up to this length."""


def setup_of(kind: str, config: Mapping[str, Any]) -> Setup:
    """The preset with a trace's sizes. nano-vLLM's budget is for prefill steps alone, MinivLLM's for every step."""
    is_nano = kind.startswith("nano")
    budget = config["max_num_batched_tokens"]
    return Setup(
        preset=PRESETS[kind],
        replica={
            "max_batch_size": config["max_num_seqs"],
            "max_batch_tokens": None if is_nano else budget,
            "max_model_len": 1 << 30,
            "memory": {"block_size": config["block_size"], "num_blocks": config["num_blocks"]},
        },
        params={"prefill_budget_tokens": budget} if is_nano else {},
    )


def compare(system: str, name: str, trace: Mapping[str, Any]) -> Result:
    """Run the trace's requests and compare every step: batch, hits, victims, ends, free blocks, queues."""
    return _Comparison(trace).run(system, name)


class _Comparison:
    def __init__(self, trace: Mapping[str, Any]) -> None:
        self._trace = trace
        self._driver = Driver(setup_of(trace["kind"], trace["config"]))
        self._requests = {str(request["id"]): request for request in trace["requests"]}
        self._arrivals: dict[int, list[Arrival]] = defaultdict(list)
        order = sorted(trace["requests"], key=lambda one: one["arrival"])
        for position, request in enumerate(order):
            self._arrivals[request["arrival"]].append(
                Arrival(str(request["id"]), request["prompt"], _max_tokens(request), position, float(position))
            )

    def run(self, system: str, name: str) -> Result:
        before: list[str] = []
        steps = self._trace["steps"]
        last = -1
        for position, expected in enumerate(steps):
            arrivals = [one for at in range(last + 1, expected["t"] + 1) for one in self._arrivals.get(at, ())]
            last = expected["t"]
            for arrival in arrivals:
                self._driver.arrive(arrival)
            actual = self._step()
            field = first_difference(expected, actual)
            if field is not None:
                recorded = [f"{key}: {value}" for key, value in expected.items()]
                here = [f"{key}: {value}" for key, value in actual.items()]
                difference = Difference(
                    str(expected["t"]),
                    field,
                    expected[field],
                    actual[field],
                    [f"config: {dict(self._trace['config'])}", *recorded],
                    [*here, "before the step:", *before, "after it:", *self._driver.state()],
                )
                return Result(system, name, position + 1, difference)
            before = self._driver.state()
        left = sorted(self._driver.requests)
        if left and self._trace.get("end", "all finished") == "all finished":
            difference = Difference("the last", "requests left", [], left, [], self._driver.state())
            return Result(system, name, len(steps), difference)
        return Result(system, name, len(steps))

    def _step(self) -> dict[str, Any]:
        driver = self._driver
        entries, preempted = driver.form()
        decodes = [entry.kind == "running" and entry.request.is_decode for entry in entries]
        is_prefill = bool(entries) and not all(decodes)
        actual: dict[str, Any] = {
            "is_prefill": is_prefill,
            "scheduled": [[int(entry.request.request_id), entry.num_tokens] for entry in entries],
            "preempted": [int(request_id) for request_id in preempted],
            "free_after_schedule": driver.replica.memory.free_blocks,
        }
        if is_prefill:
            actual["computed_before"] = [entry.num_computed_before for entry in entries]
            actual["cache_hit"] = [0 if entry.kind == "running" else entry.num_computed_before for entry in entries]
        finished = driver.complete(entries, self._next_token)
        running = driver.running()
        in_prefill = [one for one in running if not one.is_decode]
        running = [one for one in running if one.is_decode]
        waiting = [*in_prefill, *driver.waiting()]  # a prompt that was cut stays at the head of the queue there
        actual |= {
            "finished": [int(request_id) for request_id, _ in finished],
            "free": driver.replica.memory.free_blocks,
            "n_waiting": len(waiting),
            "n_running": len(running),
        }
        if len(waiting) + len(running) <= MAX_LISTED:
            actual["waiting"] = [int(one.request_id) for one in waiting]
            actual["running"] = [int(one.request_id) for one in running]
        return actual

    def _next_token(self, request: Request) -> tuple[int, bool]:
        facts = self._requests[request.request_id]
        eos = self._trace["config"]["eos"]
        position = request.num_output_tokens
        forced = facts.get("forced", ())
        if position < len(forced):
            token = forced[position]
        elif position in facts.get("eos_at", ()):
            token = eos
        else:
            token = 100_000 + (facts["id"] * 1_000_003 + position * 7_919) % 900_000
        return token, token == eos and not facts["ignore_eos"]


def _max_tokens(request: Mapping[str, Any]) -> int:
    """Output tokens until a length ends the request; its first token is always sampled."""
    most: int = request["max_tokens"]
    max_length: int | None = request.get("max_model_length")
    if max_length is not None:
        most = min(most, max_length - len(request["prompt"]))
    return max(1, most)
