"""Builder through which replica schedulers write the plan of a step; it prevents illegal plans."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Protocol

from vajra_py.contract.latency import BatchFeatures
from vajra_py.contract.requests import RequestView


class Refusal(Enum):
    """Reason why the builder refused an operation. A refusal changes nothing, except that `LOADING` may begin a
    load.
    """

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
    """Treatment of a preempted request's KV blocks."""

    RECOMPUTE = "recompute"
    """Blocks are freed; the request recomputes its known tokens after its next admission."""
    SWAP = "swap"
    """Blocks move to host memory, and back to the device when the request is next added."""


class DecodeStop(NamedTuple):
    """Early end of `add_decodes` or `add_running`: the first request that did not fit, and the reason."""

    request: RequestView
    refusal: Refusal


class BatchBuilder(Protocol):
    """The plan of one step, under construction.

    It enforces the limits of token budget, batch size, memory and KV-parallel groups, and leaves out requests in
    flight. An operation that a limit does not allow is refused with a reason; an invalid one (zero tokens, more tokens
    than remain, a request of another replica) raises `ValueError`. The mechanism turns this error into a `PolicyError`
    that names the policy. A `PolicyError` ends the run; in a server, it takes the replicaset out of service instead.
    """

    @property
    def num_tokens(self) -> int:
        """Number of query tokens in the batch so far."""

    @property
    def num_requests(self) -> int:
        """Number of requests in the batch so far."""

    @property
    def tokens_left(self) -> int:
        """Remaining token budget of the step; a very large number if the replica has no budget."""

    @property
    def slots_left(self) -> int:
        """Number of further requests that the batch may hold."""

    @property
    def free_blocks(self) -> int:
        """Number of KV blocks that are free after everything added so far, summed over KV-parallel groups."""

    @property
    def num_preempted(self) -> int:
        """Number of requests preempted in this step so far."""

    def __contains__(self, request: object) -> bool:
        """Return True if the request is in the batch."""

    def add(self, request: RequestView, num_tokens: int, *, reserve_tokens: int | None = None) -> Refusal | None:
        """Compute the next `num_tokens` (at least 1, at most the remaining tokens) of the request in this step.

        Returns None if the request was added. A waiting request is admitted by this call. Its cached prefix is attached
        first, and `num_tokens` counts from the end of that prefix. Blocks are taken for `reserve_tokens` leading
        tokens; by default these are, depending on the replica's reservation option, all known tokens or the tokens up
        to the end of this chunk. A swapped request is swapped in. A running request gets the blocks that this step
        needs, or those for `reserve_tokens` leading tokens if that is more. If KV or an adapter must be loaded before
        the request can run, the load begins, and the call is refused with `LOADING`.
        """

    def add_decodes(self) -> DecodeStop | None:
        """Add every decode that is not in the batch yet, with one token and its drafts, in order of admission.

        Without drafts, the cost of the call depends on the changes since the last step, not on the number of decodes.
        Stops at the first decode that does not fit; to continue from there, preempt requests and call it again. Returns
        None once all decodes are in.
        """

    def add_running(self, max_chunk_tokens: int | None = None) -> DecodeStop | None:
        """Add every running request that is not in the batch yet, in order of admission, decodes and partial prefills
        alike.

        Each gets its remaining tokens, at most `max_chunk_tokens`, and at most the remaining budget. Stops like
        `add_decodes`, with `TOKEN_BUDGET` if the budget is used up; call it again to continue.
        """

    def preempt(self, request: RequestView, mode: PreemptionMode = PreemptionMode.RECOMPUTE) -> Refusal | None:
        """Take a running request's device memory and let the request wait again.

        If it was in this step's batch, it leaves the batch and its tokens return to the budget. Refused only with
        `HOST_BLOCKS` or `IN_FLIGHT`. `IN_FLIGHT` also applies in two cases: this step admits the request, whose KV was
        copied back from the host while steps ran; or another entry of the batch depends on the request's blocks. Raises
        `ValueError` for a request that is not running.
        """

    def idle_until(self, time_s: float) -> None:
        """Idle on purpose: if the batch stays empty, form the next step at `time_s`, or at an earlier event.

        `time_s` is in seconds on the run's clock. No effect if the final batch is not empty. Raises `ValueError` unless
        the time is finite and after now.
        """

    def draft(self, request: RequestView, num_tokens: int) -> Refusal | None:
        """Limit the drafts that this step verifies for a decode to `num_tokens`, instead of `replica.draft.num_tokens`.

        Drafts are query tokens of the decode's own entry, whichever call adds it, and use token budget and blocks.
        Fewer are verified if fewer were proposed, or if the token budget, `max_tokens` or the model's length does not
        allow more; if blocks are lacking, adding the decode is refused as usual. The setting applies to this step only.
        Refused with `NO_DRAFTS`, or with `ALREADY_SCHEDULED` if the request is in the batch. Raises `ValueError` for a
        negative number, or one above `limits.max_draft_tokens`.
        """

    def hand_off(self, request: RequestView) -> Refusal | None:
        """Move a running request with its KV to another replica now, in the middle of its prompt or while it decodes.

        The replicaset scheduler chooses the target (`PlacesAfterPrompt`), as after a prompt; if the scheduler returns
        None or this replica, the request continues here. The target computes the rest of an unfinished prompt. Refused
        with `NO_TARGET`, `STAYS`, `IN_FLIGHT`, or with `ALREADY_SCHEDULED` if the request is in the batch.
        """

    def drop(self, request: RequestView, reason: str) -> None:
        """End a waiting request now; it is reported as rejected, with the policy's name and this reason.

        Raises `ValueError` for a running request, or if the reason is empty. A request that was preempted, even in this
        step, counts as waiting.
        """

    def pin(self, request: RequestView, seconds: float) -> Refusal | None:
        """Keep the present content of a request in the prefix cache for `seconds`, regardless of retention keys.

        The pin belongs to the request's session or, without a session, to the request itself; an earlier pin of the
        same owner ends. Idle pinned blocks do not count as free. Refused with `PINS` if pins would hold more than
        `replica.memory.prefix_cache.max_pinned_fraction`. If the replica could run no request otherwise, pins end
        early, starting with the pin that would last longest. Raises `ValueError` unless `seconds` is finite and at
        least 0.
        """

    def unpin(self, request: RequestView) -> None:
        """End the pin of the request's session or, without a session, of the request; no effect without a pin."""

    def cached_tokens(self, request: RequestView) -> int:
        """Return the prefix hit of a waiting request in tokens; at least one token is always left to compute.

        0 for a running or swapped request, and if no cache holds its prefix. For a request whose KV comes from another
        replica, or was loaded, the number of tokens of that KV.
        """

    def blocks_needed(self, request: RequestView, num_tokens: int, *, in_steps: bool = False) -> int:
        """Return the number of free blocks needed for the request to hold its first `num_tokens` tokens.

        Idle cached blocks of the request's prefix hit are included, since they are free now. Blocks that the request
        holds already are not included, nor are blocks of its prefix hit that other requests hold. With `in_steps`,
        several steps compute the tokens, so blocks that leave the model's sliding windows in the meantime are not
        counted.
        """

    def max_chunk(self, request: RequestView) -> int:
        """Return the size in tokens of the largest chunk that may be added: the remaining tokens of the request.

        The remaining tokens of a waiting request begin after its prefix hit. With KV parallelism, a chunk also ends at
        the boundary of the request's present group.
        """

    def features(self) -> BatchFeatures:
        """Return the features of the batch so far, for its slowest KV-parallel group."""

    def predicted_time(self) -> float:
        """Return the predicted duration of the batch so far in seconds, for its slowest KV-parallel group and stage."""

    def predicted_time_with(self, request: RequestView, num_tokens: int) -> float:
        """Return the predicted duration in seconds of the batch with `num_tokens` more tokens of the request; O(1)."""

    def note(self, request: RequestView, **scores: float | int | str) -> None:
        """Write scores about a request to the decision log, to explain a decision.

        A score is a finite number, a text or a truth value; raises `ValueError` for anything else.
        """
