"""Plain policies for the layers that are not under test."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vajra_py.contract import (
    BatchBuilder,
    KeyMotion,
    LocalReplicaView,
    PolicyContext,
    PrefillTime,
    QueueView,
    ReplicaId,
    ReplicaLoadView,
    RequestView,
    SchedulerTraits,
    SteadyState,
    fill,
)


class ByArrival:
    """First come, first served."""

    key_motion = KeyMotion.STATIC

    def key(self, request: RequestView, now: float) -> float:
        """Return the arrival time in seconds."""
        return request.arrived_at


class ByArrivalInTime(ByArrival):
    """First come, first served, with slack: every request has a deadline one second after its arrival."""

    def slack_s(self, request: RequestView, now: float) -> float:
        """Return the seconds left at `now` until the request's deadline."""
        return request.arrived_at + 1.0 - now

    def slack_fraction(self, request: RequestView, now: float) -> float:
        """Return `slack_s`, since the allowed time is one second."""
        return self.slack_s(request, now)


class BySlack:
    """Least relative slack first; the order of requests may change over time."""

    key_motion = KeyMotion.TIME_LINEAR

    def __init__(self, prefill_time: PrefillTime) -> None:
        self._prefill_time = prefill_time

    def line(self, request: RequestView) -> tuple[float, float]:
        """Return intercept and slope of the slack as a fraction of the allowed time.

        The allowed time is twice the prompt's prefill time plus 0.1 s.
        """
        allowed_s = self._allowed_s(request)
        left_s = self._prefill_time.remaining_s(request.num_prompt_tokens, request.num_computed_tokens)
        return (request.arrived_at + allowed_s - left_s) / allowed_s, -1.0 / allowed_s

    def key(self, request: RequestView, now: float) -> float:
        """Return the value of the request's line at `now`."""
        intercept, slope = self.line(request)
        return intercept + slope * now

    def slack_s(self, request: RequestView, now: float) -> float:
        """Return the seconds of slack at `now`."""
        return self.key(request, now) * self._allowed_s(request)

    def slack_fraction(self, request: RequestView, now: float) -> float:
        """Return the request's key, which is its slack as a fraction of the allowed time."""
        return self.key(request, now)

    def _allowed_s(self, request: RequestView) -> float:
        return 2.0 * self._prefill_time.total_s(request.num_prompt_tokens) + 0.1


def by_slack(context: PolicyContext) -> BySlack:
    """Build `BySlack` with the services of a replicaset."""
    return BySlack(context.prefill_time)


class InTurn:
    """Early binding in round-robin order."""

    traits = SchedulerTraits(reads_load=False)

    def __init__(self) -> None:
        self._count = 0

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Return the next replica that is up."""
        up = [replica.replica_id for replica in replicas if replica.is_up]
        self._count += 1
        return up[self._count % len(up)] if up else None

    def pull(self, replica: ReplicaLoadView, queued: QueueView, now: float) -> Iterable[str]:
        """Yield requests that arrived while no replica was up."""
        return (request.request_id for request in queued)


class PassedOn(InTurn):
    """Early binding in round-robin order, also of requests that leave a replica after their prompt or by a hand-off."""

    def place_after_prompt(
        self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float
    ) -> ReplicaId | None:
        """Return the next replica that is up."""
        return self.assign(request, replicas, now)


class Shared:
    """Late binding from one shared queue."""

    traits = SchedulerTraits(reads_load=False)

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Return None, since requests are not bound on arrival."""
        return None

    def pull(self, replica: ReplicaLoadView, queued: QueueView, now: float) -> Iterable[str]:
        """Return the ids of all requests in the shared queue, most urgent first; none for a replica that is down."""
        return (request.request_id for request in queued) if replica.is_up else ()


class PlainChunks:
    """Decodes first, then prompts by urgency, up to a token budget per step."""

    traits = SchedulerTraits(repeats_decodes=frozenset(SteadyState))

    def __init__(self, num_tokens: int = 128) -> None:
        self._num_tokens = num_tokens

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Fill the batch with the shared fill loop and a fixed budget."""
        fill(replica, batch, self._next_chunk)

    def solo_chunk_size(self, num_done_tokens: int, num_remaining_tokens: int) -> int:
        """Return the budget, or the number of remaining tokens if that is less."""
        return min(self._num_tokens, num_remaining_tokens)

    def _next_chunk(self, request: RequestView, batch: BatchBuilder, replica: LocalReplicaView) -> int | None:
        room = min(self._num_tokens - batch.num_tokens, batch.tokens_left)
        return min(batch.max_chunk(request), room) if room > 0 else None
