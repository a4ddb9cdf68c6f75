"""Builder of a step's plan for replica schedulers: its only writer, so an illegal plan cannot be built."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Protocol

from vajra_py.contract.latency import BatchFeatures
from vajra_py.contract.requests import RequestView


class Refusal(Enum):
    """Reason that the builder did not take a request. A refusal changes nothing."""

    BATCH_FULL = "the batch holds as many requests as the replica runs in one step"
    TOKEN_BUDGET = "the step's token budget is spent"
    KV_BLOCKS = "not enough free KV blocks"
    WATERMARK = "admission would leave fewer free KV blocks than the watermark keeps"
    HOST_BLOCKS = "not enough free host blocks to swap to"
    ALREADY_SCHEDULED = "the request is in this step's batch already"
    IN_FLIGHT = "the request is part of a step that has not come back yet"
    JUST_PREEMPTED = "the request was preempted in this very step"
    NOT_ADMITTED = "the backend admits no request now, or not this request in this step"
    LOADING = "its KV or its adapter has to come from elsewhere first, and it waits for that"
    NO_TARGET = "no other replica that is up could go on with it, or requests do not move between replicas here"
    STAYS = "it has just come here, or the replicaset scheduler has let it stay, and nothing of it was computed since"
    NO_DRAFTS = "no drafts are made here: `replica.draft` asks for none"
    PINS = "pins hold as much of the KV memory as they may"
    ADAPTER = "no slot for its adapter is free"
    GROUP_BUSY = "every KV-parallel group with room carries enough query tokens in this step"


class PreemptionMode(Enum):
    """Treatment of a preempted request's memory."""

    RECOMPUTE = "recompute"
    """Blocks are freed; the request computes its known tokens again when it is next admitted."""
    SWAP = "swap"
    """Blocks move to host memory and come back when the request is next added."""


class DecodeStop(NamedTuple):
    """End of a bulk addition of decodes: the first request that did not fit, and the reason."""

    request: RequestView
    refusal: Refusal


class BatchBuilder(Protocol):
    """The plan of one step, under construction.

    Legality is checked here: token budget, batch size, blocks, KV-parallel groups, requests in flight. What cannot be
    granted is refused with a reason; what makes no sense (zero tokens, more tokens than remain, a request of another
    replica) raises `ValueError`, which ends the run as a `PolicyError` that names the policy.
    """

    @property
    def num_tokens(self) -> int:
        """Query tokens in the batch so far."""

    @property
    def num_requests(self) -> int:
        """Requests in the batch so far."""

    @property
    def tokens_left(self) -> int:
        """Remaining token budget of the step; a very large number when the replica has no budget."""

    @property
    def slots_left(self) -> int:
        """Number of further requests that the batch may hold."""

    @property
    def free_blocks(self) -> int:
        """Free KV blocks now, after everything added so far (the fullest figure over KV-parallel groups: their sum)."""

    @property
    def num_preempted(self) -> int:
        """Requests preempted in this step so far."""

    def __contains__(self, request: object) -> bool:
        """Return whether the request is in the batch."""

    def add(self, request: RequestView, num_tokens: int, *, reserve_tokens: int | None = None) -> Refusal | None:
        """Compute the next `num_tokens` (>= 1, at most what remains) of the request in this step.

        A waiting request is admitted by this call: its cached prefix is attached first, blocks are taken for
        `reserve_tokens` leading tokens (default: the whole known sequence or just the tokens of this step, by the replica's
        reservation option), and `num_tokens` counts from the end of the cached prefix. A swapped request
        is brought back. A running request grows as needed, or to `reserve_tokens` if these are more.
        """

    def add_decodes(self) -> DecodeStop | None:
        """Add every decode that is not in the batch yet, one token each, in order of admission.

        Costs what changed since the last step, not what runs. Stops at the first that does not fit; call it again
        after making room and it goes on from there. None: all are in.
        """

    def add_running(self, max_chunk_tokens: int | None = None) -> DecodeStop | None:
        """Add every running request that is not in the batch yet, in order of admission, decodes and chunks alike.

        Each gets what it has left to compute, at most `max_chunk_tokens`, at most what the budget has left. Stops like
        `add_decodes`, with `TOKEN_BUDGET` once nothing of the budget is left; call it again to go on.
        """

    def preempt(self, request: RequestView, mode: PreemptionMode = PreemptionMode.RECOMPUTE) -> Refusal | None:
        """Take the request's device memory away and put it back among the waiting.

        If it was in this step's batch it leaves the batch and its tokens return to the budget. Only `HOST_BLOCKS` and
        `IN_FLIGHT` can be refused; the latter also for a request that this step has just taken back from the host over a
        link beside steps.
        """

    def idle_until(self, time_s: float) -> None:
        """Run nothing on purpose: with an empty batch, ask again at `time_s`, or when anything happens before.

        Seconds on the run's clock, after `now`. No effect if the batch is not empty in the end. Raises `ValueError` for a time that
        is not after now.
        """

    def draft(self, request: RequestView, num_tokens: int) -> Refusal | None:
        """Verify at most `num_tokens` drafts of a decode if it is added to this step, instead of `replica.draft.num_tokens`.

        Drafts are query tokens of the decode's own entry, whichever call adds it: they take tokens of the budget and blocks. As
        many are verified as were proposed and as budget and lengths leave room for; where blocks are lacking, adding is refused as
        for any other decode. It counts for this step alone. Refused with `NO_DRAFTS`, and `ALREADY_SCHEDULED` for what is in the
        batch. Raises `ValueError` for a negative number, or one above `limits.max_draft_tokens`.
        """

    def hand_off(self, request: RequestView) -> Refusal | None:
        """Let a running request leave now with its KV, to go on at another replica: in the middle of its prompt, or while it decodes.

        The replicaset scheduler is asked for the replica (`PlacesAfterPrompt`), as after a prompt; if it answers None, or with this
        replica, the request goes on here. Where a prompt is computed by halves, the target computes the rest. Refused with
        `NO_TARGET`, `STAYS`, `IN_FLIGHT`, and `ALREADY_SCHEDULED` for what is in this step's batch.
        """

    def drop(self, request: RequestView, reason: str) -> None:
        """End a waiting request for good, now: it is reported as rejected, with the policy's name and this reason.

        What runs cannot be dropped (`ValueError`); a request that was preempted, in this step or earlier, waits and can be dropped.
        """

    def pin(self, request: RequestView, seconds: float) -> Refusal | None:
        """Keep a request's content that is in the prefix cache now for so many seconds, whatever its retention key.

        A request of a session pins for the session, whose earlier pin ends; any other one for itself. Idle pinned
        blocks are not free. `PINS` is refused where pins would hold more than `replica.memory.prefix_cache.max_pinned_fraction`. A pin
        ends before its time where the replica could run no request otherwise, the one that would last longest first. Raises `ValueError`
        for a negative time.
        """

    def unpin(self, request: RequestView) -> None:
        """End the pin of the request's session, or its own; no effect if there is none."""

    def cached_tokens(self, request: RequestView) -> int:
        """Leading tokens that the prefix cache holds for a waiting request now; at least one token stays to compute.

        0 for a running request, without a prefix cache, and for a request that is swapped. For one that came from another replica
        with its KV: the tokens of that KV.
        """

    def blocks_needed(self, request: RequestView, num_tokens: int, *, in_steps: bool = False) -> int:
        """Free blocks that would be taken if the request came to hold its first `num_tokens` tokens.

        Counts idle cached blocks that a hit would revive, and none for blocks that it holds or shares already. `in_steps`: several
        steps are to compute them, so that blocks which the model's sliding windows have left by then are not counted.
        """

    def max_chunk(self, request: RequestView) -> int:
        """Most tokens that one chunk of the request may have: what remains, cut at its KV-parallel group's boundary."""

    def features(self) -> BatchFeatures:
        """Features of the batch so far (of its slowest KV-parallel group)."""

    def predicted_time(self) -> float:
        """Predicted seconds of the step as it stands: the latency model's answer for the slowest group and stage."""

    def predicted_time_with(self, request: RequestView, num_tokens: int) -> float:
        """Predicted seconds of the step if `num_tokens` of the request were added; O(1)."""

    def note(self, request: RequestView, **scores: float | int | str) -> None:
        """Attach the reasons of a decision to the decision log; free when the log is off."""
