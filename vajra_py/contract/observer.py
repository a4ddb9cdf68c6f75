"""Lifecycle events for observers, batched per step. Metrics, logs and timelines are observers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from vajra_py.contract.admission import AdmissionDecision
from vajra_py.contract.latency import BatchFeatures
from vajra_py.contract.policies import Layer
from vajra_py.contract.programs import ProgramView
from vajra_py.contract.requests import EndReason, ReplicaId, RequestView
from vajra_py.contract.retention import CachedBlock
from vajra_py.contract.views import ReplicaState

__all__ = [
    "EndReason",
    "Observer",
    "PinEnd",
    "PolicySwap",
    "ScheduledChunk",
    "StepEnd",
    "StepRecord",
    "StepRun",
    "TierTransfer",
]


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """One entry of a step, in batch order."""

    request: RequestView
    num_tokens: int
    num_computed_before: int
    """Number of tokens in KV memory before the step; for a request admitted in this step, its prefix hit."""
    kind: str
    """"running", "admitted" (first admission), "resumed" (admission after a preemption) or "moved" (it arrived with its
    KV).
    """


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One formed step, expanded entry by entry; built only for observers."""

    step_index: int
    replicaset: str
    replica_id: ReplicaId
    formed_at: float
    chunks: Sequence[ScheduledChunk]
    preempted: Sequence[tuple[RequestView, str]]
    """(request, mode) in the order of preemption."""
    features: BatchFeatures
    free_blocks: int
    """Free KV blocks right after the step was formed."""
    num_waiting: int
    num_running: int
    """Number of running requests; this and `num_waiting` count right after the step was formed."""
    notes: Mapping[str, Mapping[str, float | int | str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepEnd:
    """Result of a step."""

    step_index: int
    replicaset: str
    replica_id: ReplicaId
    formed_at: float
    ended_at: float
    finished: Sequence[tuple[RequestView, EndReason]]
    free_blocks: int
    features: BatchFeatures
    num_waiting: int
    num_running: int
    num_preempted: int
    """Free blocks, waiting and running requests right after the step was formed, and how many were preempted for it."""


@dataclass(frozen=True, slots=True)
class StepRun:
    """Consecutive steps of the same decodes; every sequence has one entry per step."""

    replicaset: str
    replica_id: ReplicaId
    first_step_index: int
    formed_at: float
    """Time at which the first step was formed, seconds; each further step was formed when the one before it ended."""
    ended_at: Sequence[float]
    num_decodes: int
    first_context_tokens: int
    """Tokens in KV before the first step; each step adds `num_decodes`."""
    free_blocks: Sequence[int]
    """Free KV blocks right after each step was formed."""
    num_waiting: Sequence[int]
    num_running: int


@dataclass(frozen=True, slots=True)
class PolicySwap:
    """One layer's policy of a replicaset was replaced by another while requests were served."""

    replicaset: str
    layer: Layer
    old_policy: str
    old_params: Mapping[str, Any]
    policy: str
    params: Mapping[str, Any]
    num_requeued: int
    """Number of waiting requests that were reordered or placed again."""


@dataclass(frozen=True, slots=True)
class TierTransfer:
    """Transfer of cached content from one memory tier of a replica to another; "device" is one of them."""

    replicaset: str
    replica_id: ReplicaId
    source: str
    target: str
    num_blocks: int
    """Number of blocks that have arrived: fewer than were sent if the transfer was cut."""
    num_bytes: int
    started_at: float


class PinEnd(Enum):
    """Reason that a pin ended."""

    RELEASED = "released"
    """A policy ended it."""
    EXPIRED = "expired"
    """Its time was over."""
    FORCED = "forced"
    """The replica could run no request while pins held blocks."""


class Observer:
    """Base class of observers with optional callbacks, which must not modify their arguments.

    It is the only base class of the contract, so that existing observers keep working when events are added.

    Attributes:
        wants_steps: True to call `on_step_begin`, for which each step is expanded entry by entry. Read once before the
            run.
        wants_step_ends: True to call `on_step_end` and `on_step_run`. Read once before the run.
    """

    wants_steps: bool = False
    wants_step_ends: bool = True

    def on_arrival(self, request: RequestView, now: float) -> None:
        """A request was submitted; one that cannot be accepted ends at once (`on_ended`)."""

    def on_admission_decision(self, request: RequestView, policy: str, decision: AdmissionDecision, now: float) -> None:
        """The admission policy degraded, refused or deferred a request, or accepted one that it had deferred.

        There is no call for a request that is accepted unchanged on arrival.
        """

    def on_assigned(self, request: RequestView, replica_id: ReplicaId | None, now: float) -> None:
        """A request was bound to a replica's queue, or left in the shared queue (None)."""

    def on_admitted(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """A request was admitted (or readmitted); its first chunk is in the step being formed."""

    def on_preempted(self, request: RequestView, mode: str, now: float) -> None:
        """A running request lost its memory or was swapped out."""

    def on_held(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """A request with computed prompt leaves this replica, which holds its KV until the target has received it."""

    def on_transfer(
        self, request: RequestView, source: ReplicaId, target: ReplicaId, num_tokens: int, now: float
    ) -> None:
        """Blocks of the target are reserved, and KV of `num_tokens` tokens is on its way to them.

        With `hand_off.overlap`, called when the prompt's computation begins, and again if the request leaves with fewer
        tokens, with their number.
        """

    def on_transfer_end(
        self, request: RequestView, source: ReplicaId, target: ReplicaId, failure: str, now: float
    ) -> None:
        """A transfer of KV is complete, or has failed for the reason `failure` (empty if it is complete)."""

    def on_arrived(self, request: RequestView, source: ReplicaId, target: ReplicaId, now: float) -> None:
        """The target has the KV of a request, which waits there to run."""

    def on_kv_released(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """The source of a request has given back the blocks that it held for it."""

    def on_stayed(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """A request that was held to leave its replica continues there after all."""

    def on_moved(
        self, request: RequestView, source: ReplicaId | None, target: ReplicaId | None, reason: str, now: float
    ) -> None:
        """A waiting request goes from one queue to another (None: the shared one), by the replicaset scheduler's decision."""

    def on_migration_begun(
        self, request: RequestView, source: ReplicaId, target: ReplicaId, reason: str, now: float
    ) -> None:
        """A running request is to go to another replica while it continues to compute, by the replicaset scheduler's decision."""

    def on_migration_aborted(
        self, request: RequestView, source: ReplicaId, target: ReplicaId, reason: str, now: float
    ) -> None:
        """A running request does not move after all; it continues at its source, unless it has ended or was preempted."""

    def on_first_token(self, request: RequestView, now: float) -> None:
        """A request's client saw its first token."""

    def on_ended(self, request: RequestView, reason: EndReason, detail: str, now: float) -> None:
        """A request has ended; `detail` explains the reason."""

    def on_program_end(self, program: ProgramView, now: float) -> None:
        """A program has ended, for its `end_reason`."""

    def on_step_begin(self, step: StepRecord) -> None:
        """A step was formed; only with `wants_steps`."""

    def on_step_end(self, step: StepEnd) -> None:
        """A step has completed."""

    def on_step_run(self, run: StepRun) -> None:
        """Several steps of the same decodes have completed; by default `on_step_end` is called for each."""
        formed_at = run.formed_at
        context = run.first_context_tokens
        figures = zip(run.ended_at, run.free_blocks, run.num_waiting, strict=True)
        for position, (ended_at, free_blocks, num_waiting) in enumerate(figures):
            self.on_step_end(
                StepEnd(
                    run.first_step_index + position,
                    run.replicaset,
                    run.replica_id,
                    formed_at,
                    ended_at,
                    (),
                    free_blocks,
                    BatchFeatures(num_decodes=run.num_decodes, decode_context_tokens=context),
                    num_waiting,
                    run.num_running,
                    0,
                )
            )
            formed_at = ended_at
            context += run.num_decodes

    def on_policy_swapped(self, swap: PolicySwap, now: float) -> None:
        """A policy was replaced by another one."""

    def on_out_of_service(self, replicaset: str, detail: str, now: float) -> None:
        """A policy broke the contract: its replicaset's requests end; new ones are refused until a policy is swapped."""

    def on_replica_lost(self, replicaset: str, replica_id: ReplicaId, detail: str, now: float) -> None:
        """A replica failed; its running requests end, or are recomputed elsewhere (`on_requeued`)."""

    def on_replica_state(self, replicaset: str, replica_id: ReplicaId, state: ReplicaState, now: float) -> None:
        """A replica of a replicaset with a scaler changed its state; also called at the start of the run for each."""

    def on_requeued(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """A request's replica failed; it waits to be recomputed and keeps its tokens so far."""

    def on_replica_restored(self, replicaset: str, replica_id: ReplicaId, now: float) -> None:
        """A replica that had failed computes again; its memory is empty."""

    def on_cache_reset(
        self, replicaset: str, replica_id: ReplicaId, requests: Sequence[RequestView], now: float
    ) -> None:
        """A replica's KV memory was reset on demand; its running `requests` wait to be recomputed (no preemption)."""

    def on_pinned(
        self, replicaset: str, replica_id: ReplicaId, name: str, request: RequestView, until: float, now: float
    ) -> None:
        """The cached content of a request was pinned under a name; an earlier pin of the name has ended."""

    def on_unpinned(self, replicaset: str, replica_id: ReplicaId, name: str, why: PinEnd, now: float) -> None:
        """A pin has ended."""

    def on_evicted(self, replicaset: str, replica_id: ReplicaId, block: CachedBlock, now: float) -> None:
        """A cached block is about to be evicted by the choice of a retention policy; not called for the default one."""

    def on_tier_hit(
        self, request: RequestView, replica_id: ReplicaId, num_tokens: Mapping[str, int], load_s: float, now: float
    ) -> None:
        """The prefix of a waiting request was loaded in `load_s` seconds; `num_tokens` counts tokens by source tier."""

    def on_tier_transfer(self, transfer: TierTransfer, now: float) -> None:
        """A transfer of a replica's cached content between two memory tiers has ended."""

    def on_run_end(self, now: float) -> None:
        """The run has ended; no further callback follows."""
