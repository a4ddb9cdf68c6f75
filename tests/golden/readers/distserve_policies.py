"""Policies of DistServe's simulator (simdistserve), for comparison with its recorded runs alone.

Its quirks are kept: what a decode step holds is in no queue, so that a worker whose step holds everyone looks idle; cut prompts
go behind those that came later, and what is left of a step's tokens is counted down twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from pydantic import Field

from vajra_py.contract import (
    BatchBuilder,
    EndedStep,
    Layer,
    LocalReplicaView,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    QueueView,
    ReplicaId,
    ReplicaLoadView,
    RequestView,
)

DECODE_CONTEXT_TOKENS = 50_000
"""Most context of a decode batch, each request's with its new token."""


class WorkerConfig(PolicyConfig):
    """Parameters of a worker."""

    prefill_max_batch_size: int = Field(10**7, ge=1, description="Most prompts in a step.")
    prefill_max_tokens: int = Field(10**7, ge=1, description="Most prompt tokens in a step, and decodes when chunked.")
    decode_max_tokens: int = Field(10**7, ge=1, description="Most requests in a decode step.")
    back_pressure_tokens: int = Field(
        9_000_000, ge=0, description="Context of waiting decodes above which no prompt starts."
    )
    chunked: bool = Field(False, description="Cut prompts, and fill steps up with decodes.")


class Worker:
    """Prompts first, in order of arrival; else everyone who decodes, those first who waited longest."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._prompts: deque[RequestView] = deque()
        self._decodes: deque[RequestView] = deque()
        self._prefilled: list[RequestView] = []
        self._decoded: list[RequestView] = []
        self._known: set[RequestView] = set()

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Form one step."""
        self._take_back(replica)
        config = self._config
        if self._prompts and not self._has_back_pressure():
            num_tokens = self._add_prompts(batch)
            if config.chunked:
                self._add_decodes(batch, config.prefill_max_tokens - num_tokens)
        elif self._decodes:
            self._add_decodes(batch, config.decode_max_tokens)

    def _take_back(self, replica: LocalReplicaView) -> None:
        """Who came during the last step queues before its members: prompts that are done first, then those that decode."""
        for request in replica.waiting():
            if request not in self._known:
                self._known.add(request)
                self._prompts.append(request)
        for request in self._prefilled:
            (self._prompts if request.num_remaining_prompt_tokens else self._decodes).append(request)
        self._decodes.extend(one for one in self._decoded if one.end_reason is None)
        self._prefilled, self._decoded = [], []

    def _has_back_pressure(self) -> bool:
        return sum(one.num_computed_tokens for one in self._decodes) > self._config.back_pressure_tokens

    def _add_prompts(self, batch: BatchBuilder) -> int:
        config = self._config
        total, limit = 0, config.prefill_max_tokens
        for _ in range(min(config.prefill_max_batch_size, len(self._prompts))):
            request = self._prompts[0]
            left = request.num_remaining_prompt_tokens
            size = min(left, limit - total) if config.chunked else left
            if size <= 0 or size > limit:
                break
            limit -= size
            total += size
            self._prompts.popleft()
            _granted(batch.add(request, size))
            self._prefilled.append(request)
        return total

    def _add_decodes(self, batch: BatchBuilder, most: int) -> None:
        context = DECODE_CONTEXT_TOKENS
        for _ in range(min(most, len(self._decodes))):
            needed = self._decodes[0].num_computed_tokens + 1
            if needed > context:
                break
            context -= needed
            request = self._decodes.popleft()
            _granted(batch.add(request, 1))
            self._decoded.append(request)


def _granted(refusal: object) -> None:
    if refusal is not None:
        raise ValueError(f"the simulator has no limit for this: {refusal}")


class RouterConfig(PolicyConfig):
    """No parameters."""


class Router:
    """The worker with fewest prompts that are not done; ties go to the lowest."""

    def __init__(self) -> None:
        self._unfinished: dict[ReplicaId, set[RequestView]] = {}

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """The least loaded."""
        counts = {one.replica_id: len(self._unfinished.setdefault(one.replica_id, set())) for one in replicas}
        best = min(counts, key=lambda one: (counts[one], one))
        self._unfinished[best].add(request)
        return best

    def pull(self, replica: ReplicaLoadView, queued: QueueView, now: float) -> Iterable[str]:
        """Nothing: everyone is bound on arrival."""
        return ()

    def on_step_end(self, step: EndedStep) -> None:
        """Prompts that are done no longer count."""
        done = {one for one in step.requests if not one.num_remaining_prompt_tokens}
        self._unfinished.setdefault(step.replica_id, set()).difference_update(done)


def _build_worker(config: WorkerConfig, context: PolicyContext) -> Worker:
    return Worker(config)


def _build_router(config: RouterConfig, context: PolicyContext) -> Router:
    return Router()


SPECS = [
    PolicySpec(
        name="simdistserve_worker",
        layer=Layer.REPLICA_SCHEDULER,
        config=WorkerConfig,
        build=_build_worker,
        summary="A worker of simdistserve.",
    ),
    PolicySpec(
        name="simdistserve_router",
        layer=Layer.REPLICASET_SCHEDULER,
        config=RouterConfig,
        build=_build_router,
        summary="Placement of simdistserve.",
    ),
]
