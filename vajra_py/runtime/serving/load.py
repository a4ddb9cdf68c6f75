"""Load of a replica as the replicaset scheduler sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vajra_py.contract import ReplicaLimits, ReplicaState, RequestView
from vajra_py.runtime.serving.replica import Replica


class LiveLoad:
    """`ReplicaLoadView` that reads the replica as it is."""

    __slots__ = (
        "_replica",
        "age_s",
        "is_up",
        "limits",
        "max_batch_size",
        "num_blocks",
        "pool",
        "replica_id",
        "role",
        "state",
    )

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.replica_id = replica.replica_id
        self.pool = replica.parts.pool
        self.role = replica.parts.role.value
        self.limits = replica.limits
        self.set_state(ReplicaState.UP)
        self.num_blocks = replica.memory.num_blocks
        self.max_batch_size = replica.limits.max_batch_size
        self.age_s = 0.0

    def set_state(self, state: ReplicaState) -> None:
        """Let the replica be at this stage of its life."""
        self.state = state
        self.is_up = state is ReplicaState.UP

    @property
    def num_running(self) -> int:
        """Requests that hold KV blocks."""
        return self._replica.running_set.num_running

    @property
    def num_waiting(self) -> int:
        """Requests assigned and not admitted."""
        return len(self._replica.queue)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens left to prefill."""
        return self._replica.num_pending_tokens

    @property
    def num_context_tokens(self) -> int:
        """Tokens whose KV is held for running requests."""
        return self._replica.num_context_tokens

    @property
    def free_blocks(self) -> int:
        """Free KV blocks."""
        return self._replica.memory.free_blocks

    def prefix_hit_tokens(self, request: RequestView) -> int:
        """Leading prompt tokens in this replica's prefix cache now."""
        hashes = getattr(request, "hashes", None)
        return 0 if hashes is None else self._replica.memory.lookup_prefix(hashes, request.num_known_tokens)


class LoadOnDemand:
    """`ReplicaLoadView` that applies the steps that have ended before a figure is read."""

    __slots__ = ("_live", "_sync")

    def __init__(self, live: LiveLoad, sync: Callable[[], None]) -> None:
        self._live = live
        self._sync = sync

    def __getattr__(self, name: str) -> Any:
        self._sync()
        return getattr(self._live, name)


@dataclass(slots=True)
class SnapshotLoad:
    """`ReplicaLoadView` of an earlier time, as a router that polls its replicas sees it. Prefix hits are read live."""

    live: LiveLoad
    replica_id: int
    pool: str
    role: str
    limits: ReplicaLimits
    num_blocks: int
    max_batch_size: int
    state: ReplicaState = ReplicaState.UP
    is_up: bool = True
    num_running: int = 0
    num_waiting: int = 0
    num_pending_tokens: int = 0
    num_context_tokens: int = 0
    free_blocks: int = 0
    age_s: float = 0.0
    taken_at: float = float("-inf")

    @classmethod
    def of(cls, live: LiveLoad) -> SnapshotLoad:
        """Return a snapshot without figures yet."""
        return cls(live, live.replica_id, live.pool, live.role, live.limits, live.num_blocks, live.max_batch_size)

    def look(self, now: float, interval_s: float) -> SnapshotLoad:
        """Read the figures again if they are older than the interval; returns the snapshot with its age set."""
        live = self.live
        # Read live: requests sent to a replica that is down come back at once.
        self.state, self.is_up = live.state, live.is_up
        if now - self.taken_at >= interval_s:
            self.num_running = live.num_running
            self.num_waiting = live.num_waiting
            self.num_pending_tokens = live.num_pending_tokens
            self.num_context_tokens = live.num_context_tokens
            self.free_blocks = live.free_blocks
            self.taken_at = now
        self.age_s = now - self.taken_at
        return self

    def prefix_hit_tokens(self, request: RequestView) -> int:
        """Leading prompt tokens in this replica's prefix cache now."""
        return self.live.prefix_hit_tokens(request)
