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
    """One entry of a step."""

    request: RequestView
    num_tokens: int
    num_computed_before: int
    """Number of leading tokens whose KV was in memory before the step; at a first admission, the prefix hit."""
    kind: str
    """"running", "admitted" (first admission), "resumed" (admission after a preemption) or "moved" (admission of a
    request that arrived with its KV).
    """


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One formed step, expanded entry by entry; built only for observers."""

    step_index: int
    replicaset: str
    replica_id: ReplicaId
    formed_at: float
    chunks: Sequence[ScheduledChunk]
    """Entries in batch order."""
    preempted: Sequence[tuple[RequestView, str]]
    """(request, mode) in the order of preemption."""
    features: BatchFeatures
    free_blocks: int
    """Number of free KV blocks right after the step was formed."""
    num_waiting: int
    """Number of waiting requests right after the step was formed."""
    num_running: int
    """Number of running requests right after the step was formed."""
    notes: Mapping[str, Mapping[str, float | int | str]] = field(default_factory=dict)
    """Scores that the policy noted (`BatchBuilder.note`), by request id and name of the score."""


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
    """Number of free KV blocks right after the step was formed."""
    features: BatchFeatures
    num_waiting: int
    """Number of waiting requests right after the step was formed."""
    num_running: int
    """Number of running requests right after the step was formed."""
    num_preempted: int
    """Number of requests preempted while the step was formed, or in earlier, unsuccessful attempts to form it."""


@dataclass(frozen=True, slots=True)
class StepRun:
    """Consecutive steps that computed the same decodes and nothing else; each `Sequence` has one entry per step."""

    replicaset: str
    replica_id: ReplicaId
    first_step_index: int
    formed_at: float
    """Time at which the first step was formed, seconds; each further step was formed when the one before it ended."""
    ended_at: Sequence[float]
    num_decodes: int
    first_context_tokens: int
    """Sum of the decodes' context lengths in tokens before the first step; each step adds `num_decodes`."""
    free_blocks: Sequence[int]
    """Number of free KV blocks right after each step was formed."""
    num_waiting: Sequence[int]
    num_running: int


@dataclass(frozen=True, slots=True)
class PolicySwap:
    """One layer's policy of a replicaset was replaced by another policy while requests were served."""

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
    """Transfer of cached content from one memory tier of a replica to another; device memory is the tier "device"."""

    replicaset: str
    replica_id: ReplicaId
    source: str
    target: str
    num_blocks: int
    """Number of blocks that have arrived; not all blocks arrive if the transfer was cut short."""
    num_bytes: int
    started_at: float


class PinEnd(Enum):
    """Reason that a pin ended."""

    RELEASED = "released"
    """A policy ended the pin."""
    EXPIRED = "expired"
    """The pin's time was over."""
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
        """Called after a request was submitted; if it cannot be accepted, it ends at once (`on_ended`)."""

    def on_admission_decision(self, request: RequestView, policy: str, decision: AdmissionDecision, now: float) -> None:
        """Called after the admission policy refused or deferred a request, changed it, or accepted a deferred one.

        Not called for a request that is accepted unchanged on arrival.
        """

    def on_assigned(self, request: RequestView, replica_id: ReplicaId | None, now: float) -> None:
        """Called when a request is about to join a replica's queue, or the shared queue (`replica_id` is None)."""

    def on_admitted(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Called after a request was admitted or readmitted, while the step with its next chunk is being formed."""

    def on_preempted(self, request: RequestView, mode: str, now: float) -> None:
        """Called after a request was preempted and waits again; `mode` is "recompute" or "swap"."""

    def on_held(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Called when a request stops in order to move; the replica holds its KV until the target has received it.

        A request stops when its prompt is computed, when `BatchBuilder.hand_off` is called, or for the last stage of a
        migration.
        """

    def on_transfer(
        self, request: RequestView, source: ReplicaId, target: ReplicaId, num_tokens: int, now: float
    ) -> None:
        """Called when a transfer of a request's KV begins; the KV of `num_tokens` tokens is sent to reserved blocks of
        the target.

        With `hand_off.overlap`, called when the computation of the prompt begins. If the request later leaves with
        fewer tokens, called again with the smaller `num_tokens`.
        """

    def on_transfer_end(
        self, request: RequestView, source: ReplicaId, target: ReplicaId, failure: str, now: float
    ) -> None:
        """Called after a transfer of KV has completed (`failure` is empty), or has failed for the reason `failure`."""

    def on_arrived(self, request: RequestView, source: ReplicaId, target: ReplicaId, now: float) -> None:
        """Called when the target has the KV of a request, which now waits there to run."""

    def on_kv_released(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Called after a replica has freed the blocks that it held for a request that left."""

    def on_stayed(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Called when a request that was to leave its replica (`on_held`) continues on this replica after all."""

    def on_moved(
        self, request: RequestView, source: ReplicaId | None, target: ReplicaId | None, reason: str, now: float
    ) -> None:
        """Called when the replicaset scheduler moves a waiting request to another queue.

        None as `source` or `target` stands for the shared queue.
        """

    def on_migration_begun(
        self, request: RequestView, source: ReplicaId, target: ReplicaId, reason: str, now: float
    ) -> None:
        """Called when the replicaset scheduler starts to move a running request, which continues to compute."""

    def on_migration_aborted(
        self, request: RequestView, source: ReplicaId, target: ReplicaId, reason: str, now: float
    ) -> None:
        """Called when a running request does not move after all.

        It continues at its source, unless it has ended or was preempted.
        """

    def on_first_token(self, request: RequestView, now: float) -> None:
        """Called when the client of a request receives its first token."""

    def on_ended(self, request: RequestView, reason: EndReason, detail: str, now: float) -> None:
        """Called after a request has ended; `detail` explains the reason."""

    def on_program_end(self, program: ProgramView, now: float) -> None:
        """Called after a program has ended (`ProgramView.end_reason`)."""

    def on_step_begin(self, step: StepRecord) -> None:
        """Called after a step was formed, if `wants_steps` is set."""

    def on_step_end(self, step: StepEnd) -> None:
        """Called after a step has completed."""

    def on_step_run(self, run: StepRun) -> None:
        """Called after several steps of the same decodes completed; by default, calls `on_step_end` for each step."""
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
        """Called after a policy was replaced by another one."""

    def on_out_of_service(self, replicaset: str, detail: str, now: float) -> None:
        """Called when a policy has violated the contract.

        The requests of its replicaset end, and new ones are refused until a policy is swapped.
        """

    def on_replica_lost(self, replicaset: str, replica_id: ReplicaId, detail: str, now: float) -> None:
        """Called after a replica failed; its requests end, or are placed again and recomputed (`on_requeued`)."""

    def on_replica_state(self, replicaset: str, replica_id: ReplicaId, state: ReplicaState, now: float) -> None:
        """Called after a replica of a replicaset with a scaler changed its state, and for each replica at the start."""

    def on_requeued(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Called when a request of the failed replica `replica_id` waits again, with the tokens generated so far."""

    def on_replica_restored(self, replicaset: str, replica_id: ReplicaId, now: float) -> None:
        """Called when a replica that had failed computes again; its memory is empty."""

    def on_cache_reset(
        self, replicaset: str, replica_id: ReplicaId, requests: Sequence[RequestView], now: float
    ) -> None:
        """Called after a replica's KV memory was reset on demand.

        `requests` were running and wait to be recomputed; this does not count as preemption.
        """

    def on_pinned(
        self, replicaset: str, replica_id: ReplicaId, name: str, request: RequestView, until: float, now: float
    ) -> None:
        """Called after a request's cached content was pinned under `name`; an earlier pin of this name has ended."""

    def on_unpinned(self, replicaset: str, replica_id: ReplicaId, name: str, why: PinEnd, now: float) -> None:
        """Called after a pin has ended."""

    def on_evicted(self, replicaset: str, replica_id: ReplicaId, block: CachedBlock, now: float) -> None:
        """Called before a cached block chosen by a retention policy is evicted; not called with default eviction."""

    def on_tier_hit(
        self, request: RequestView, replica_id: ReplicaId, num_tokens: Mapping[str, int], load_s: float, now: float
    ) -> None:
        """Called after the prefix of a waiting request was loaded from memory tiers, which took `load_s` seconds.

        `num_tokens` holds the number of loaded tokens by source tier.
        """

    def on_tier_transfer(self, transfer: TierTransfer, now: float) -> None:
        """Called after a transfer of a replica's cached content between two memory tiers has ended."""

    def on_run_end(self, now: float) -> None:
        """Called at the end of the run, after all other callbacks."""
