"""Drive a preset's replica step by step: arrivals, single steps, given tokens.

The replica stands behind no door: what a recorded engine took in is taken in, although a run would refuse what may never
fit. Requests get the index and the arrival that make the trace's own ties.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vajra_py.config import config_from_mapping
from vajra_py.contract.observer import EndReason
from vajra_py.latency import AffineModel
from vajra_py.latency.services.output_length import NoLengths
from vajra_py.plugins import load_registry
from vajra_py.runtime.kv import TokenBlockHashes
from vajra_py.runtime.requests.connector import KvReport
from vajra_py.runtime.requests.request import Request, RequestFacts, RequestState
from vajra_py.runtime.serving.build import ModelFacts, Services, build_controller
from vajra_py.runtime.step.plan import PlannedChunk, StepPlan, StepResult
from vajra_py.runtime.support.clock import TICKS_PER_SECOND
from vajra_py.runtime.support.seeds import SeedTree

NextToken = Callable[[Request], tuple[int, bool]]
"""The token that a request samples next, and whether it ends the request (an end of sequence, not a length)."""

MAX_CHECKED_BLOCKS = 512
"""KV memories up to this size are checked after every step."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A preset, and a trace's overrides."""

    preset: str
    replica: Mapping[str, Any]
    params: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the replica scheduler."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace."""

    request_id: str
    prompt: Sequence[int]
    max_tokens: int
    index: int
    arrived_at: float
    priority: int = 0


class _NoExecutor:
    """Tokens come from the trace; lengths are not known in advance."""

    def known_output_tokens(self, request: Request) -> int | None:
        """Return None, since lengths are never known."""
        return None

    def withheld_token(self, request: Request) -> StepResult:
        """Return nothing, since requests stay."""
        return StepResult()

    def release(self, request: Request) -> None:
        """Do nothing."""


class Driver:
    """One replica of a preset, step by step."""

    def __init__(self, setup: Setup) -> None:
        registry = load_registry()
        latency = {"type": "affine", "base_s": 1.0}
        scheduler = registry.preset(setup.preset).spec.scheduling["replica_scheduler"]
        policy = scheduler if isinstance(scheduler, str) else scheduler["policy"]
        config = config_from_mapping(
            {
                "version": 1,
                "preset": setup.preset,
                "replica": setup.replica,
                "scheduling": {"replica_scheduler": {"policy": policy, "params": dict(setup.params)}},
                "workload": {"type": "jsonl", "path": "requests come from the trace"},
                "backend": {"simulator": {"latency": latency}},
            },
            registry=registry,
        )
        executor = _NoExecutor()
        services = Services(
            registry=registry,
            latency=AffineModel(base_s=1.0),
            output_lengths=NoLengths(),
            seeds=SeedTree(0),
            facts=ModelFacts(),
            executor_of=lambda replicaset, replica_id: executor,
        )
        controller = build_controller(config, services)
        self.replica = controller.only_replica()
        self.requests: dict[str, Request] = {}
        """Requests that have arrived and not ended."""
        self._now = 0
        self._plan: StepPlan | None = None

    def arrive(self, arrival: Arrival) -> None:
        """A request joins the replica's queue."""
        facts = RequestFacts(arrival.request_id, len(arrival.prompt), arrival.max_tokens, priority=arrival.priority)
        request = Request(facts, arrival.index, arrival.arrived_at, arrival.max_tokens)
        request.hashes = TokenBlockHashes(arrival.prompt, self.replica.limits.block_size)
        request.move_to(RequestState.WAITING)
        self.replica.enqueue(request, self.seconds)
        self.requests[arrival.request_id] = request

    def abort(self, request_id: str) -> bool:
        """The client takes a request back; False if it has ended before."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return False
        return self.replica.abort(request, EndReason.ABORTED, self.seconds)

    @property
    def seconds(self) -> float:
        """The clock: one second a step."""
        return self._now / TICKS_PER_SECOND

    def form(self) -> tuple[list[PlannedChunk], list[str]]:
        """Let the policy form one step: its entries in order, and who was preempted in order."""
        self._plan = plan = self.replica.form_step(self._now)
        if plan is None:
            return [], []
        return list(plan.entries()), [request.request_id for request, _ in plan.preempted]

    def complete(
        self, entries: Sequence[PlannedChunk], next_token: NextToken, report: KvReport | None = None
    ) -> list[tuple[str, EndReason]]:
        """The step comes back with everyone's token, and a connector's report; who ended, in order of admission."""
        self._now += TICKS_PER_SECOND
        if self._plan is None or not self._plan.num_requests:
            return [] if report is None else self._ended(self.replica.take_report(report, self._now))
        tokens: list[tuple[Request, int]] = []
        stopped: set[Request] = set()
        for entry in entries:
            request = entry.request
            if entry.num_computed_before + entry.num_tokens == request.num_known_tokens:
                token, ends = next_token(request)
                tokens.append((request, token))
                if ends:
                    stopped.add(request)
        result = StepResult(tokens=tokens, stopped=frozenset(stopped), report=report)
        return self._ended(self.replica.complete_step(self._plan, result, self._now))

    def _ended(self, ended: Sequence[tuple[Request, EndReason]]) -> list[tuple[str, EndReason]]:
        for request, _ in ended:
            del self.requests[request.request_id]
        if self.replica.limits.num_blocks <= MAX_CHECKED_BLOCKS:
            self.replica.memory.check()
        return [(request.request_id, reason) for request, reason in ended]

    # State for comparisons

    def running(self) -> list[Request]:
        """Requests that hold blocks, in order of admission."""
        return list(self.replica.running_set.running())

    def waiting(self) -> list[Request]:
        """Requests that wait, most urgent first."""
        return [self.requests[one.request_id] for one in self.replica.queue.ordered(self.seconds)]

    def state(self) -> list[str]:
        """Every request that is alive, and the free blocks, for people."""
        memory = self.replica.memory
        lines = [f"free blocks: {memory.free_blocks} of {memory.num_blocks}"]
        lines += [
            f"{request.request_id}: {request.state.value}, computed {request.num_computed_tokens} of "
            f"{request.num_known_tokens}, {memory.num_held_blocks(request)} blocks, priority {request.priority}, "
            f"preempted {request.num_preemptions} times"
            for request in (*self.running(), *self.waiting())
        ]
        return lines
