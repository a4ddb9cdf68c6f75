"""Views of replicas, pools, replicasets and queues for policies; only a scheduler's own replica is shown in detail."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias, runtime_checkable

from vajra_py.contract.requests import ReplicaId, RequestView

Key: TypeAlias = float | tuple[float, ...]
"""Key that a prioritizer returns: a finite number, or a tuple of finite numbers whose length is always the same. Lower
is more urgent.
"""

PriorityKey: TypeAlias = tuple[Key, float, int]
"""Key with tie-breakers: (the prioritizer's key, arrival, submission index); smaller is more urgent."""


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """Sizes of a replica, which do not change during a run."""

    block_size: int
    num_blocks: int
    max_batch_size: int
    max_batch_tokens: int | None
    max_model_len: int
    pipeline_stages: int = 1
    kv_parallel_groups: int = 1
    kv_group_tokens: int | None = None
    """Maximum number of tokens of one request that one KV-parallel group may hold; None without KV parallelism."""
    bytes_per_block: int = 0
    host_blocks: int = 0
    max_draft_tokens: int = 0
    """Largest number of drafts that a step may verify for one decode; 0 without drafts."""


class PoolRole(Enum):
    """Kind of work of a pool's replicas; the values are those of `role:` in YAML."""

    MIXED = "mixed"
    """Replicas compute prompts and decode."""
    PREFILL = "prefill"
    """Requests leave with their KV once their prompt is computed."""
    DECODE = "decode"
    """Requests arrive with the KV of their prompt."""


class ReplicaState(Enum):
    """State in the life cycle of a replica."""

    STARTING = "starting"
    """Takes no requests yet."""
    UP = "up"
    DRAINING = "draining"
    """Takes no more requests; goes down when it has none left."""
    DOWN = "down"
    """Does not compute: lost, or removed by the scaler."""


class LocalReplicaView(Protocol):
    """A replica as its own replica scheduler sees it while it forms a step. Reading changes nothing."""

    @property
    def replica_id(self) -> ReplicaId:
        """Number of the replica in its replicaset, from 0."""

    @property
    def limits(self) -> ReplicaLimits:
        """Sizes of the replica."""

    @property
    def free_blocks(self) -> int:
        """Number of free KV blocks, including cached idle ones."""

    @property
    def num_running(self) -> int:
        """Number of running requests: decodes and partial prefills, in flight or not."""

    @property
    def num_decodes(self) -> int:
        """Number of decodes that are not in flight; only the newest generated token of a decode is left to compute."""

    @property
    def num_partial_prefills(self) -> int:
        """Number of running requests that are neither in flight nor decodes."""

    @property
    def num_waiting(self) -> int:
        """Number of requests in its own queue and in the shared queue, including those that it may not admit now."""

    @property
    def loaded_adapters(self) -> Sequence[str]:
        """LoRA adapters that its slots hold now, the least recently used first; empty without adapters."""

    @property
    def num_adapter_slots(self) -> int:
        """Number of slots into which another adapter could be loaded now: free ones, and those of idle adapters."""

    def adapter_blocks(self, name: str) -> int:
        """Return the size of a LoRA adapter in KV blocks; 0 if it is unknown or the replica lacks the adapter."""

    def running(self) -> Sequence[RequestView]:
        """Return every running request that is not in flight, in order of (latest) admission."""

    def decodes(self) -> Sequence[RequestView]:
        """Return the decodes that are not in flight, in order of admission."""

    def partial_prefills(self) -> Sequence[RequestView]:
        """Return the partial prefills that are not in flight, most urgent first by the prioritizer's key now."""

    def waiting(self) -> Iterator[RequestView]:
        """Iterate lazily over the requests that may be admitted now, most urgent first; reading only the head is cheap.

        Requests whose KV has arrived or was loaded come before all others. Requests whose KV or adapter is being
        loaded, or whose adapter has no slot, are omitted. Requests of the shared queue are in the order of
        `ReplicasetScheduler.pull`. Requests may be added or preempted during the iteration; requests that begin to wait
        meanwhile are left out.
        """

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of KV blocks that `num_tokens` tokens occupy."""

    def urgency(self, request: RequestView) -> PriorityKey:
        """Return the request's present key with tie-breakers, which orders admission and the choice of victims."""

    def slack_s(self, request: RequestView) -> float | None:
        """Return the slack in seconds (`PredictsSlack`); None if the prioritizer does not predict it."""

    def slack_fraction(self, request: RequestView) -> float | None:
        """Return the slack as a fraction of the time from arrival to deadline; None if it is not predicted."""


class ReplicaLoadView(Protocol):
    """A replica as the replicaset scheduler sees it: load figures of age `age_s`."""

    @property
    def replica_id(self) -> ReplicaId:
        """Number of the replica in its replicaset, from 0."""

    @property
    def pool(self) -> str:
        """Name of its pool; "default" in a replicaset without pools."""

    @property
    def role(self) -> str:
        """Value of its pool's `PoolRole`: "mixed" unless the replicaset is disaggregated."""

    @property
    def state(self) -> ReplicaState:
        """State in its life cycle."""

    @property
    def limits(self) -> ReplicaLimits:
        """Its sizes."""

    @property
    def is_up(self) -> bool:
        """True if it takes requests (`ReplicaState.UP`)."""

    @property
    def num_running(self) -> int:
        """Number of running requests."""

    @property
    def num_waiting(self) -> int:
        """Number of requests in its own queue: assigned to it and not admitted yet, or preempted."""

    @property
    def num_pending_tokens(self) -> int:
        """Number of tokens left to prefill, summed over its waiting and running requests."""

    @property
    def num_context_tokens(self) -> int:
        """Number of tokens whose KV it holds for running requests."""

    @property
    def free_blocks(self) -> int:
        """Number of free KV blocks, including cached idle ones."""

    @property
    def num_blocks(self) -> int:
        """Total number of KV blocks."""

    @property
    def max_batch_size(self) -> int:
        """Maximum number of requests in one step."""

    def prefix_hit_tokens(self, request: RequestView) -> int:
        """Return the number of leading tokens of the request that the replica's prefix cache holds.

        With `kv_event_lag_s`, the number follows from the events that policies have received so far; otherwise it is
        live, even if the other figures of this view are older.
        """

    def tier_hit_tokens(self, request: RequestView) -> Mapping[str, int]:
        """Return the number of leading tokens of the request in each memory tier; a token in several tiers counts for
        the nearest.

        For example `{"device": 512, "host": 1024}`; empty without tiers. Does not change the order of eviction. The
        numbers are live, even if the other figures of this view are older.
        """

    @property
    def loaded_adapters(self) -> Sequence[str]:
        """LoRA adapters that its slots hold, the least recently used first; empty without adapters."""

    @property
    def waiting_adapters(self) -> Sequence[str]:
        """LoRA adapters of requests assigned to it and not admitted, each once; takes time linear in the number of
        these requests.
        """

    @property
    def num_adapter_slots(self) -> int:
        """Number of slots into which another adapter could be loaded: free ones, and those of idle adapters."""

    @property
    def max_loras(self) -> int:
        """Total number of adapter slots; 0 without adapters."""

    @property
    def age_s(self) -> float:
        """Age of these figures, seconds; 0 for a live view."""


@runtime_checkable
class LoadColumns(Protocol):
    """Optional method of the sequence of replicas that a replicaset scheduler gets: reads one figure of all of them.

    For a thousand replicas this takes about half the time of reading the figure from each replica. Check with
    `isinstance` before use.
    """

    def column(self, name: str) -> Sequence[int]:
        """Return an integer figure of `ReplicaLoadView` by name for each replica, in order; read-only."""


class PoolView(Protocol):
    """One pool of a replicaset, as admission policies and scalers see it."""

    @property
    def name(self) -> str:
        """Name in YAML; "default" in a replicaset without pools."""

    @property
    def role(self) -> str:
        """Value of its `PoolRole`."""

    @property
    def replicas(self) -> Sequence[ReplicaLoadView]:
        """Replicas in any state, by id."""

    @property
    def min_replicas(self) -> int:
        """Smallest number of replicas (starting or up) that a scaler may set."""

    @property
    def max_replicas(self) -> int:
        """Largest number of replicas (starting or up) that a scaler may set."""

    @property
    def num_queued(self) -> int:
        """Number of queued requests: those in its replicas' queues, those in the shared queue if its replicas may pull
        from it, and those whose prompt the pool computes only once a decode replica has free blocks for them.
        """

    @property
    def num_queued_tokens(self) -> int:
        """Number of tokens left to compute, summed over the queued requests."""


class ReplicasetView(Protocol):
    """A replicaset as admission policies see it: live figures."""

    @property
    def name(self) -> str:
        """Name in YAML; "default" if the file has no named replicasets."""

    @property
    def pools(self) -> Sequence[PoolView]:
        """Pools in the order of the file; a single one if the file has no `pools:`."""

    @property
    def replicas(self) -> Sequence[ReplicaLoadView]:
        """Replicas of all pools, by id."""

    @property
    def num_queued(self) -> int:
        """Number of requests that wait in its queues, plus the number of requests whose prompt will be computed once a
        decode replica has blocks for them; deferred requests are not counted.
        """

    @property
    def num_queued_tokens(self) -> int:
        """Number of tokens left to compute, summed over the queued requests."""

    @property
    def num_deferred(self) -> int:
        """Number of requests for this replicaset that the admission policy has deferred."""


class QueueView(Protocol):
    """The shared queue of a replicaset, as a pulling replica sees it."""

    def __len__(self) -> int:
        """Return the number of requests in the queue."""

    def __iter__(self) -> Iterator[RequestView]:
        """Iterate over the requests lazily, most urgent first."""
