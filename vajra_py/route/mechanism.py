"""A server as a replica of the mechanism: its load is estimated from the requests sent to it and from the load that it
reports.

A request counts as running from when it is sent until its answer ends. Meanwhile it occupies blocks in a simulated
memory of the server's size; requests that do not fit into this memory wait in the router. The memory's prefix cache
approximates the server's cache. The load that a server reports includes requests from other sources, and corrects the
estimate until the next report. While the server's KV events are followed, prefix hits come from these events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from vajra_py.contract import PoolRole, Refusal
from vajra_py.contract.observer import EndReason
from vajra_py.route.memory import ServerMemory
from vajra_py.runtime.requests.request import Request, RequestState
from vajra_py.runtime.serving.load import LiveLoad
from vajra_py.runtime.serving.replica import Replica, ReplicaParts
from vajra_py.runtime.step.plan import StepPlan, StepResult
from vajra_py.runtime.support.clock import to_seconds


@dataclass(frozen=True, slots=True)
class ServerReport:
    """Load that a server reported, and the router's estimate of the load at the time of the report.

    Attributes:
        num_running: number of requests that the server was computing, from all sources.
        num_waiting: number of requests that were waiting in the server, from all sources.
        num_used_blocks: number of KV blocks in use, computed from the reported usage.
        num_sent: number of requests of this router at the server.
        num_taken_blocks: number of KV blocks in use by the router's estimate.
    """

    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_sent: int
    num_taken_blocks: int


@dataclass(frozen=True, slots=True)
class Answered:
    """Progress of one request at a server.

    Attributes:
        num_tokens: number of output tokens so far.
        end: reason why the request ended; None if it continues, at this server or, once its prompt is computed, at
            another one.
    """

    request: Request
    num_tokens: int
    end: EndReason | None = None
    detail: str = ""


class RemoteReplica(Replica):
    """Replica that stands for a server. The server schedules itself, so the replica scheduler is not called."""

    __slots__ = ("news", "on_sent", "reported")

    migrates = False

    def __init__(self, parts: ReplicaParts) -> None:
        super().__init__(parts)
        self.news: Answered | None = None
        """Progress that the next `complete_step` applies."""
        self.on_sent: Callable[[Request, int], None] | None = None
        """Called for each request that is to be sent to the server, with the replica's id."""
        self.reported: ServerReport | None = None
        """The server's last report; None if there was none since it came up."""

    @property
    def leaves(self) -> bool:
        """True if requests leave the server once their prompt is computed."""
        return self.parts.role is PoolRole.PREFILL

    def can_hold(self, request: Request) -> bool:
        """Return whether the prompt can fit into the server's memory; the server itself limits output lengths."""
        num_tokens = request.num_prompt_tokens
        return num_tokens < self.limits.max_model_len and self.memory.fits(num_tokens)

    def send_waiting(self, now: int) -> None:
        """Send waiting requests, most urgent first, as long as they fit into the server's memory by the router's
        estimate.
        """
        running_set, seconds = self.running_set, to_seconds(now)
        self._view.now = seconds
        self.builder.start(seconds)
        if self.queue.is_arbitrary:
            running_set.read_keys_again()
        while running_set.num_running < self.limits.max_batch_size and running_set.num_waiting:
            request = cast("Request | None", next(iter(self._view.waiting()), None))
            if request is None:
                return
            if request.state is RequestState.REMOTE:
                num_known = request.num_known_tokens
                if self.builder.load(request, num_known, num_known) is not Refusal.LOADING:
                    return
                continue
            if not self._take_blocks(request):
                return
            self.lifecycle.admitted(request, request.num_computed_tokens, seconds)
            if request.hashes is not None:
                self.memory.cache_blocks(request, request.num_prompt_tokens)
            if self.on_sent is not None:
                self.on_sent(request, self.replica_id)

    def _take_blocks(self, request: Request) -> bool:
        if request.state is RequestState.ARRIVED:  # its blocks were reserved when its prompt was computed
            return True
        memory = self.memory
        is_new = not memory.is_registered(request)
        if is_new:
            memory.register(request, request.hashes)
        hit = memory.allocate(request, request.num_known_tokens)
        if hit is None:
            if is_new:
                memory.forget(request)
            return False
        if isinstance(memory, ServerMemory) and memory.reported is not None and request.hashes is not None:
            hit = memory.lookup_prefix(request.hashes, request.num_known_tokens)
        request.set_computed(min(hit, request.num_known_tokens - 1))
        return True

    def complete_step(self, plan: StepPlan, result: StepResult, now: int) -> list[tuple[Request, EndReason]]:
        """Apply the progress in `news`. Return [(request, reason of its end)] if that request ended, otherwise an empty
        list.
        """
        news, self.news = self.news, None
        assert news is not None
        request = news.request
        if news.end is None and self.leaves:
            request.set_computed(request.num_prompt_tokens)
            self.lifecycle.hold(request)
            self.newly_held.append(request)
            return []
        self._add_tokens(request, news.num_tokens, now)
        if news.end is None:
            return []
        self._finish(request, news.end, to_seconds(now), news.detail)
        return [(request, news.end)]

    def _add_tokens(self, request: Request, num_tokens: int, now: int) -> None:
        """Record the tokens received since the request's latest recorded token.

        Their times are spread evenly between the time of that token and `now`.
        """
        before = request.num_output_tokens
        num_new = num_tokens - before
        if num_new <= 0:
            return
        if not before:
            request.set_computed(request.num_prompt_tokens)
        last = request.token_log[-1] if request.token_log else now
        assert isinstance(last, int)
        for number in range(1, num_new + 1):
            count = request.add_output(last + (now - last) * number // num_new)
            if count == 1:
                self.lifecycle.first_token(request, now)

    def take_back(self, request: Request) -> None:
        """Remove from the server a request whose answer has not begun, without placing it in a queue."""
        memory = self.memory
        if self.memory.is_registered(request):
            memory.free(request, 0, for_good=True)
            memory.forget(request)
        self.lifecycle.requeue(request)

    def record_report(self, num_running: int, num_waiting: int, kv_fraction: float) -> None:
        """Record the load that the server reported."""
        num_blocks = self.memory.num_blocks
        taken = num_blocks - self.memory.free_blocks
        used = round(min(max(kv_fraction, 0.0), 1.0) * num_blocks)
        self.reported = ServerReport(num_running, num_waiting, used, self.running_set.num_running, taken)


class RemoteLoad(LiveLoad):
    """Load of a server: the requests sent to it that have not ended, corrected by its last report."""

    __slots__ = ()

    @property
    def _reported(self) -> ServerReport | None:
        return cast(RemoteReplica, self.replica).reported

    @property
    def _num_queued_there(self) -> int:
        """Number of requests that wait in the server: the number in its last report, plus the requests sent since that
        report, minus the requests ended since; 0 if none waited at the report.
        """
        reported = self._reported
        if reported is None or not reported.num_waiting:
            return 0
        return max(0, reported.num_waiting + self.replica.running_set.num_running - reported.num_sent)

    @property
    def _num_of_others(self) -> int:
        reported = self._reported
        return 0 if reported is None else max(0, reported.num_running + reported.num_waiting - reported.num_sent)

    @property
    def num_running(self) -> int:
        """Number of requests that the server computes, from all sources."""
        return max(0, self.replica.running_set.num_running + self._num_of_others - self._num_queued_there)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for the server, in the router or in the server itself."""
        return self.replica.queue.num_requests + self._num_queued_there

    @property
    def free_blocks(self) -> int:
        """Number of free KV blocks: the router's estimate, corrected by the difference between the server's last report
        and the estimate at the time of that report.
        """
        free, reported = self.replica.memory.free_blocks, self._reported
        if reported is None:
            return free
        return min(max(free - (reported.num_used_blocks - reported.num_taken_blocks), 0), self.num_blocks)
