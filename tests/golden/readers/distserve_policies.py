"""Policies of DistServe's simulator (simdistserve), for comparison with its recorded runs alone.

Its quirks are kept: what a decode step holds is in no queue, so that a worker whose step holds everyone looks idle; cut prompts
go behind those that came later, and what is left of a step's tokens is counted down twice.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import Field

from tests.golden.readers.policies import Arrivals, BindsOnArrival
from vajra_py.contract import (
    BatchBuilder,
    EndedStep,
    Layer,
    LocalReplicaView,
    PolicyConfig,
    PolicySpec,
    ReplicaId,
    ReplicaLoadView,
    RequestView,
)

DECODE_CONTEXT_TOKENS = 50_000
"""Most context of a decode batch, each request's with its new token."""

Placement = tuple[str, ReplicaId, list[list[int]]]
"""Stage, chosen replica, and [replica, key] of all."""


class Seen(Arrivals):
    """What workers and placement know of each other, and every placement."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: dict[ReplicaId, set[RequestView]] = {}
        """Prompts that wait, or whose first stage has begun and no other step after it."""
        self.num_queued: Counter[ReplicaId] = Counter()
        """Requests that wait to decode, by replica; those in a running step are not among them."""
        self.placements: dict[str, list[Placement]] = {}


class WorkerConfig(PolicyConfig):
    """Parameters of a worker."""

    prefill_max_batch_size: int = Field(10**7, ge=1, description="Most prompts in a step.")
    prefill_max_tokens: int = Field(10**7, ge=1, description="Most prompt tokens in a step, and decodes when chunked.")
    decode_max_tokens: int = Field(10**7, ge=1, description="Most requests in a decode step.")
    back_pressure_tokens: int = Field(
        9_000_000, ge=0, description="Context of waiting decodes above which no prompt starts."
    )
    chunked: bool = Field(False, description="Cut prompts, and fill steps up with decodes.")


@dataclass(slots=True)
class _Step:
    """Requests of a step that has not come back."""

    prompts: list[RequestView] = field(default_factory=list)
    decodes: list[RequestView] = field(default_factory=list)


class Worker:
    """Prompts first, in order of arrival; else everyone who decodes, those first who waited longest."""

    def __init__(self, config: WorkerConfig, seen: Seen) -> None:
        self._config = config
        self._seen = seen
        self._prompts: deque[RequestView] = deque()
        self._decodes: deque[RequestView] = deque()
        self._steps: list[_Step] = []
        """Those that may not have come back, in order; several with pipeline stages."""
        self._known: set[RequestView] = set()

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Form one step."""
        self._take_back(replica)
        config, step = self._config, _Step()
        if self._prompts and not self._has_back_pressure():
            num_tokens = self._add_prompts(batch, step)
            if config.chunked:
                self._add_decodes(batch, step, config.prefill_max_tokens - num_tokens)
        elif self._decodes:
            self._add_decodes(batch, step, config.decode_max_tokens)
        self._steps.append(step)
        self._seen.prompts[replica.replica_id] = {*self._prompts, *step.prompts}
        self._seen.num_queued[replica.replica_id] = len(self._decodes)

    def _take_back(self, replica: LocalReplicaView) -> None:
        """Who came meanwhile queues before members of steps that are back: prompts that are done first, then those that decode."""
        new = [one for one in replica.waiting() if one not in self._known]
        self._known.update(new)
        for request in sorted(new, key=self._seen.order_of):
            (self._decodes if request.num_computed_tokens else self._prompts).append(request)
        here = set(replica.running())
        for step in self._steps:
            for request in step.prompts:
                if request in here:
                    (self._prompts if request.num_remaining_prompt_tokens else self._decodes).append(request)
            self._decodes.extend(one for one in step.decodes if one in here)
            step.prompts = [one for one in step.prompts if one not in here and not self._has_left(one)]
            step.decodes = [one for one in step.decodes if one not in here and one.end_reason is None]
        self._steps = [one for one in self._steps if one.prompts or one.decodes]

    def _has_left(self, request: RequestView) -> bool:
        return request.end_reason is not None or self._seen.order_of(request) >= 0

    def _has_back_pressure(self) -> bool:
        return sum(one.num_computed_tokens for one in self._decodes) > self._config.back_pressure_tokens

    def _add_prompts(self, batch: BatchBuilder, step: _Step) -> int:
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
            step.prompts.append(request)
        return total

    def _add_decodes(self, batch: BatchBuilder, step: _Step, most: int) -> None:
        context = DECODE_CONTEXT_TOKENS
        for _ in range(min(most, len(self._decodes))):
            needed = self._decodes[0].num_computed_tokens + 1
            if needed > context:
                break
            context -= needed
            request = self._decodes.popleft()
            _granted(batch.add(request, 1))
            step.decodes.append(request)


def _granted(refusal: object) -> None:
    if refusal is not None:
        raise ValueError(f"the simulator has no limit for this: {refusal}")


class Router(BindsOnArrival):
    """The worker with fewest prompts that are not done, or fewest requests that wait to decode; ties go to the lowest."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._places_decodes = False

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """The least loaded."""
        decodes = request.num_computed_tokens > 0
        prompts, queued = self._seen.prompts, self._seen.num_queued
        counts = [
            [one, queued[one] if decodes else len(prompts.setdefault(one, set()))]
            for one in (each.replica_id for each in replicas)
        ]
        best = min(counts, key=lambda one: (one[1], one[0]))[0]
        placement = ("decode" if decodes else "prefill", best, counts)
        self._seen.placements.setdefault(request.request_id, []).append(placement)
        if decodes:
            self._places_decodes = True
            queued[best] += 1
        else:
            prompts[best].add(request)
        return best

    def on_step_end(self, step: EndedStep) -> None:
        """Prompts that are done no longer count; who goes on to decode waits again, until the next step begins."""
        done = {one for one in step.requests if not one.num_remaining_prompt_tokens}
        self._seen.prompts.setdefault(step.replica_id, set()).difference_update(done)
        if self._places_decodes:  # of the two instances for two pools, the one that counts them
            going_on = sum(one.end_reason is None and one.num_output_tokens > 1 for one in step.requests)
            self._seen.num_queued[step.replica_id] += going_on


def specs(seen: Seen) -> Sequence[PolicySpec]:
    """The policies of one run."""
    return [
        PolicySpec(
            name="simdistserve_worker",
            layer=Layer.REPLICA_SCHEDULER,
            config=WorkerConfig,
            build=lambda config, context: Worker(config, seen),
            summary="A worker of simdistserve.",
        ),
        PolicySpec(
            name="simdistserve_router",
            layer=Layer.REPLICASET_SCHEDULER,
            config=PolicyConfig,
            build=lambda config, context: Router(seen),
            summary="Placement of simdistserve.",
        ),
    ]
