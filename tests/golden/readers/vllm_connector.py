"""Check `vllm_v1` and a replica's connector against traces of vLLM's scheduler with a KV connector (schema vllm-connector-golden/1).

The recorded connector's answers and reports are inputs; what waits, what stops admission and what is kept are the replica's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.golden.readers.driver import Arrival, Driver
from tests.golden.readers.trace import Result, first_difference
from tests.golden.readers.vllm import REASONS, arrivals_of, difference_of_step, setup_of
from vajra_py.contract.observer import EndReason
from vajra_py.runtime.requests.connector import ConnectorRules, KvReport, Match
from vajra_py.runtime.requests.request import Request, RequestState

SCHEMA = "vllm-connector-golden/1"
STATUS = {
    RequestState.WAITING: "WAITING",
    RequestState.PREEMPTED: "PREEMPTED",
    RequestState.RUNNING: "RUNNING",
    RequestState.LOADING: "WAITING_FOR_REMOTE_KVS",
}
ENDED = {EndReason.LENGTH: "FINISHED_LENGTH_CAPPED", EndReason.ABORTED: "FINISHED_ABORTED"}


class _Connector:
    """The recorded connector: its script, and the calls that it gets."""

    def __init__(self, requests: list[Mapping[str, Any]], driver: Driver) -> None:
        self._scripts = {one["id"]: one["script"] for one in requests}
        self._driver = driver
        self._has_loaded: set[str] = set()
        self.step = 0
        self.calls: list[list[Any]] = []

    def matched(self, request: Request, num_local_tokens: int) -> Match | None:
        script, name = self._scripts[request.request_id], request.request_id
        answer: int | None = max(0, script["remote"] - num_local_tokens)
        if self.step < script["none_until"]:
            answer = None
        elif script["once"] and name in self._has_loaded:
            answer = 0
        is_async = bool(answer) and script["asynchronous"]
        self.calls.append(["matched", name, num_local_tokens, answer, is_async])
        return None if answer is None else Match(answer, is_async)

    def begins(self, request: Request, num_local_tokens: int, num_tokens: int) -> None:
        """Do nothing: the recorded connector is told when the blocks are there."""

    def allocated(self, request: Request, num_tokens: int) -> None:
        if num_tokens:
            self._has_loaded.add(request.request_id)
        held = self._driver.replica.memory.num_held_blocks(request)
        self.calls.append(["alloc", request.request_id, num_tokens, held])

    def ended(self, request: Request, num_blocks: int) -> bool:
        delays = num_blocks > 0 and self._scripts[request.request_id]["send_steps"] is not None
        self.calls.append(["finished", request.request_id, num_blocks, delays])
        return delays

    def take_calls(self) -> list[list[Any]]:
        calls, self.calls = self.calls, []
        return calls


def compare(system: str, name: str, trace: Mapping[str, Any]) -> Result:
    """Run the trace's requests and compare every step: what `vllm` compares, states, blocks, the connector's calls, both queues."""
    run = _Run(trace)
    before: list[str] = []
    for position, expected in enumerate(trace["steps"]):
        actual = run.step(expected)
        absent: dict[str, Any] = {"preempted": [], "finished": [], "connector_end": []}
        field = first_difference({**absent, **expected}, actual)
        if field is not None:
            difference = difference_of_step(trace["config"], field, expected, actual, (before, run.driver.state()))
            return Result(system, name, position + 1, difference)
        before = run.driver.state()
    return Result(system, name, len(trace["steps"]))


class _Run:
    def __init__(self, trace: Mapping[str, Any]) -> None:
        config = trace["config"]
        self.driver = driver = Driver(setup_of(config))
        self._connector = _Connector(trace["requests"], driver)
        rules = ConnectorRules(
            holding_order="urgency" if config["policy"] == "priority" else "begin",
            on_failure=trace["kv_load_failure_policy"],
        )
        self._kv = driver.replica.use_connector(self._connector, rules)
        self._arrivals = {request["id"]: arrival for request, arrival in arrivals_of(trace["requests"], config)}
        self._numbers = {request["id"]: request["index"] for request in trace["requests"]}
        self._requests: dict[str, Request] = {}
        self._tables: dict[str, list[int]] = {}
        """Block table of each request when its latest load began."""

    def step(self, recorded: Mapping[str, Any]) -> dict[str, Any]:
        driver, memory = self.driver, self.driver.replica.memory
        self._connector.step = recorded["step"]
        for request_id in recorded.get("aborted", ()):
            driver.abort(request_id)  # nothing, if it is yet to come
        for request_id in recorded.get("added", ()):
            self._arrive(self._arrivals[request_id])
        entries, preempted = driver.form()
        calls = self._connector.take_calls()
        for what, request_id, num_tokens, *_ in calls:
            if what == "alloc" and num_tokens:
                self._tables[request_id] = list(memory.block_table(self._requests[request_id]))
        holding = [one.request_id for one in self._holding()]
        actual: dict[str, Any] = {
            "sched": [[entry.request.request_id, entry.num_tokens] for entry in entries],
            "kind": "".join("R" if entry.kind == "running" else "N" for entry in entries),
            "computed": [entry.num_computed_before for entry in entries],
            "preempted": preempted,
            "free_sched": memory.free_blocks,
            "connector": calls,
            "status": self._status(),
            "holding": holding,
            "waiting": [one.request_id for one in driver.waiting() if one.request_id not in holding],
        }
        finished = driver.complete(entries, self._next_token, self._report(recorded))
        order, ends = finished, self._connector.take_calls()
        if any(reason is EndReason.FAILED for _, reason in finished):
            order = sorted(finished, key=lambda one: self._numbers[one[0]])
            ends = sorted(ends, key=lambda call: self._numbers[str(call[1])])
        actual |= {
            "finished": [[request_id, REASONS.get(reason, "error")] for request_id, reason in order],
            "connector_end": ends,
            "free_end": memory.free_blocks,
            "running": [request.request_id for request in driver.running()],
            "delayed": sorted((one.request_id for one in self._kv.kept), key=lambda one: self._numbers[one]),
        }
        return actual

    def _arrive(self, arrival: Arrival) -> None:
        self.driver.arrive(arrival)
        self._requests[arrival.request_id] = self.driver.requests[arrival.request_id]

    def _holding(self) -> Sequence[Request]:
        driver = self.driver
        return self._kv.in_order(lambda one: driver.replica.queue.urgency(one, driver.seconds))

    def _status(self) -> list[list[Any]]:
        known = {*self.driver.requests.values(), *self._kv.kept}
        memory = self.driver.replica.memory
        rows: list[list[Any]] = []
        for request in sorted(known, key=lambda one: self._numbers[one.request_id]):
            state = request.state
            name = ENDED[request.end_reason] if request.end_reason is not None else STATUS.get(state)
            if name is None:
                name = "PREEMPTED" if request.num_preemptions else "WAITING"
            loaded = self._kv.num_tokens_of(request)
            num_computed = request.num_computed_tokens if loaded is None else loaded
            rows.append([request.request_id, name, num_computed, memory.num_held_blocks(request)])
        return rows

    def _report(self, recorded: Mapping[str, Any]) -> KvReport:
        def requests(field: str) -> list[Request]:
            return [self._requests[request_id] for request_id in recorded.get(field, ())]

        bad = frozenset(self._tables[request_id][place] for request_id, place in recorded.get("bad", ()))
        return KvReport(requests("recv"), requests("send"), requests("failed_recving"), bad)

    def _next_token(self, request: Request) -> tuple[int, bool]:
        return 1_000_000 + 10_000 * self._numbers[request.request_id] + request.num_output_tokens, False
