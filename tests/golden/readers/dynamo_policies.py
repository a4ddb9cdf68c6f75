"""Policies of decode workers of Dynamo's mocker, for comparison with its recorded runs alone.

Workers that compute prompts schedule as `vllm_v1`. So do those that only decode, but for three things: requests wait in the order in
which their KV came; while a request waits for blocks there, nobody is admitted without KV; and where the first admitted is
preempted first, the loop over running requests forgets that the list became shorter, and leaves one out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from tests.golden.readers.policies import Arrivals, BindsOnArrival
from vajra_py.contract import (
    BatchBuilder,
    Layer,
    LocalReplicaView,
    PolicyConfig,
    PolicySpec,
    ReplicaId,
    ReplicaLoadView,
    RequestView,
)


class Seen(Arrivals):
    """What goes on between workers, which a worker of the mocker knows."""

    def __init__(self) -> None:
        super().__init__()
        self.reserving: dict[ReplicaId, set[str]] = {}
        """Requests that wait for blocks of a worker."""

    def on_transfer(
        self, request: RequestView, source: ReplicaId, target: ReplicaId, num_tokens: int, now: float
    ) -> None:
        self.reserving[target].discard(request.request_id)


class MockerDecodeConfig(PolicyConfig):
    """Parameters of a decode worker."""

    preemption_mode: Literal["lifo", "fifo"] = Field("lifo", description="Who is preempted first.")


class MockerDecode:
    """Running requests in order of admission, then waiting ones."""

    def __init__(self, config: MockerDecodeConfig, seen: Seen) -> None:
        self._victim = 0 if config.preemption_mode == "fifo" else -1
        self._seen = seen
        self._waiting: list[RequestView] = []
        self._running: list[RequestView] = []

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Form one step."""
        here = list(replica.waiting())
        known = set(self._waiting)
        self._waiting = [one for one in self._waiting if one in set(here)]
        self._waiting += sorted((one for one in here if one not in known), key=self._seen.order_of)
        running = self._running = [one for one in self._running if one.end_reason is None]
        position = 0
        while position < len(running):
            position += self._add(running[position], batch)
        if batch.num_preempted:
            return
        for request in [
            one for one in self._waiting if one.num_computed_tokens or not self._seen.reserving.get(replica.replica_id)
        ]:
            if len(running) >= replica.limits.max_batch_size or not self._admit(request, batch):
                return

    def _add(self, request: RequestView, batch: BatchBuilder) -> bool:
        """Add a running request, preempting for it; False if it had to go itself."""
        num_tokens = request.num_remaining_tokens
        while batch.add(request, num_tokens) is not None:
            victim = self._running.pop(self._victim)
            batch.preempt(victim)
            self._waiting.insert(0, victim)
            if victim is request:
                return False
        return True

    def _admit(self, request: RequestView, batch: BatchBuilder) -> bool:
        known = request.num_known_tokens
        num_tokens = min(known - batch.cached_tokens(request), batch.tokens_left)
        if num_tokens <= 0 or batch.blocks_needed(request, known) > batch.free_blocks:
            return False
        end = batch.cached_tokens(request) + num_tokens
        if batch.add(request, num_tokens, reserve_tokens=end) is not None:
            return False
        self._waiting.remove(request)
        self._running.append(request)
        return True


class SeenRoundRobin(BindsOnArrival):
    """One replica after the other; tells who goes where."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._num_assigned = 0

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """The next one."""
        chosen = replicas[self._num_assigned % len(replicas)].replica_id
        self._num_assigned += 1
        if request.num_computed_tokens:
            self._seen.reserving.setdefault(chosen, set()).add(request.request_id)
        return chosen


def specs(seen: Seen) -> Sequence[PolicySpec]:
    """The policies of one run."""
    return [
        PolicySpec(
            name="mocker_decode",
            layer=Layer.REPLICA_SCHEDULER,
            config=MockerDecodeConfig,
            build=lambda config, context: MockerDecode(config, seen),
            summary="A decode worker of Dynamo's mocker.",
        ),
        PolicySpec(
            name="mocker_round_robin",
            layer=Layer.REPLICASET_SCHEDULER,
            config=PolicyConfig,
            build=lambda config, context: SeenRoundRobin(seen),
            summary="Workers of a pool in turn.",
        ),
    ]
