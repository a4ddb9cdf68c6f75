"""Preemption by urgency: each step runs the most urgent requests, running or waiting."""

from __future__ import annotations

from collections.abc import Iterator

from vajra_policies.fixed_chunk import FixedChunk, FixedChunkConfig
from vajra_policies.preemption import give_way
from vajra_py.contract import (
    BatchBuilder,
    Layer,
    LocalReplicaView,
    PolicySpec,
    Refusal,
    RequestView,
    SchedulerTraits,
    SteadyState,
    fill,
)

_LACKS_BLOCKS = frozenset({Refusal.KV_BLOCKS, Refusal.WATERMARK})
_PASSED_OVER = frozenset({Refusal.JUST_PREEMPTED, Refusal.LOADING, Refusal.NOT_ADMITTED, Refusal.GROUP_BUSY})
"""Refusals of one waiting request after which the next waiting request may still be admitted."""


class PreemptiveConfig(FixedChunkConfig):
    """Parameters of `preemptive`."""


class Preemptive(FixedChunk):
    """Running and waiting requests form one queue by urgency; a step takes requests from its head while slots are free.

    - A running request without a slot is paused: it keeps its KV, and continues when it is among the first again.
    - A running request that lacks blocks preempts the least urgent running request behind it in the queue. A waiting
      request does so only if all running requests behind it together hold enough blocks; otherwise neither it nor any
      waiting request behind it is admitted in this step.
    - A preempted request preempts no others for its readmission: it waits until enough blocks are free. It then keeps
      its blocks until its known tokens are computed again; only running requests admitted earlier may take them. This
      avoids thrashing if keys rise with progress.
    - Of `chunk_size` tokens, each decode with a slot gets one; prompts share the rest by urgency.

    A pause costs nothing as long as blocks suffice. When blocks run out, paused requests are preempted (in the mode
    `preemption`). The prioritizer decides everything else; with a non-preemptive rule, such as first come, first
    served, no request is preempted for a more urgent one.

    Source: iteration-level preemption of FastServe (arXiv:2305.05920) and LTR (arXiv:2408.15792), whose scheduler cuts
    one list of waiting, running and swapped requests; chunks as in Sarathi-Serve (OSDI'24). Proactive swapping is left
    out.
    """

    traits = SchedulerTraits(repeats_decodes=frozenset({SteadyState.NOTHING_WAITS}), is_work_conserving=True)
    """Steps repeat only while no request waits, since a waiting request may overtake a running one."""

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Add the most urgent requests, as many as slots, tokens and blocks allow."""
        if self._takes_all(replica, batch):
            fill(replica, batch, self._next_chunk, self._mode)
            return
        # The list is a copy, from which `_run` removes the requests that it adds or preempts.
        running = sorted(replica.running(), key=replica.urgency)
        self._run(running, replica.waiting(), replica, batch)
        if not batch.num_requests and replica.num_running > 1:
            running = list(replica.running())
            # Requests that are missing from `running` are in flight, and may free enough blocks when their step ends.
            if len(running) == replica.num_running:
                self._free_the_earliest(running, batch)

    def _run(
        self,
        running: list[RequestView],
        waiting: Iterator[RequestView],
        replica: LocalReplicaView,
        batch: BatchBuilder,
        paused: frozenset[RequestView] = frozenset(),
    ) -> None:
        """Add requests from the heads of `running` and `waiting`, each time the more urgent of the two heads. `paused`
        requests are the last ones of `running`; they are not added, but may be preempted.
        """
        queued = next(waiting, None)
        while batch.slots_left > 0 and self._room(batch) > 0:
            is_last = not running or running[0] in paused
            if queued is not None and (is_last or replica.urgency(queued) < replica.urgency(running[0])):
                admits_more = self._admit(queued, running, replica, batch)
                queued = next(waiting, None) if admits_more else None
            elif not is_last:
                self._continue(running.pop(0), running, batch)
            else:
                break

    def _takes_all(self, replica: LocalReplicaView, batch: BatchBuilder) -> bool:
        """Return True if no request waits, and there is a slot, a token and a free block for each running request."""
        limit = min(batch.slots_left, batch.free_blocks, self._room(batch))
        return not replica.num_waiting and replica.num_running <= limit

    def _tokens(self, request: RequestView, behind: list[RequestView], batch: BatchBuilder) -> int:
        """Return the request's number of tokens in this step: its remaining tokens, reduced so that one token of the
        budget is left for each decode of `behind` that gets a slot.
        """
        num_tokens = min(batch.max_chunk(request), self._room(batch))
        if num_tokens <= 1:
            return num_tokens
        num_decodes = sum(one.num_remaining_tokens == 1 for one in behind)
        return min(num_tokens, self._room(batch) - min(num_decodes, batch.slots_left - 1))

    def _continue(self, request: RequestView, behind: list[RequestView], batch: BatchBuilder) -> None:
        """Add a running request, preempting requests behind it for blocks; if it still lacks blocks, it is paused."""
        num_tokens = self._tokens(request, behind, batch)
        if num_tokens < 1:
            return
        refusal = batch.add(request, num_tokens)
        while refusal is Refusal.KV_BLOCKS and self._preempt_one(behind, request, batch):
            refusal = batch.add(request, num_tokens)

    def _admit(
        self, request: RequestView, behind: list[RequestView], replica: LocalReplicaView, batch: BatchBuilder
    ) -> bool:
        """Add a waiting request, preempting requests behind it if they hold enough blocks.

        Return False if no further waiting request may be admitted in this step.
        """
        num_tokens = self._tokens(request, behind, batch)
        if num_tokens < 1:
            return False
        refusal = batch.add(request, num_tokens)
        if refusal in _LACKS_BLOCKS:
            if request.num_preemptions:
                return False
            held = sum(replica.blocks_for(one.num_computed_tokens) for one in behind if not _is_protected(one))
            if batch.blocks_needed(request, request.num_known_tokens) > batch.free_blocks + held:
                return False
        while refusal in _LACKS_BLOCKS and self._preempt_one(behind, None, batch):
            refusal = batch.add(request, num_tokens)
        return refusal is None or refusal in _PASSED_OVER

    def _preempt_one(self, behind: list[RequestView], needing: RequestView | None, batch: BatchBuilder) -> bool:
        """Free blocks by preempting one request of `behind`: the least urgent one that may be preempted.

        `needing`: running request that needs the blocks; None if a waiting request needs them. Return False if no
        request could be preempted.
        """
        for index in range(len(behind) - 1, -1, -1):
            victim = behind[index]
            is_later = needing is not None and victim.admitted_index > needing.admitted_index
            if (is_later or not _is_protected(victim)) and give_way(batch, victim, self._mode):
                del behind[index]
                return True
        return False

    def _free_the_earliest(self, running: list[RequestView], batch: BatchBuilder) -> None:
        """Preempt the latest admitted requests one by one until the earliest admitted one has enough blocks to run."""
        running.sort(key=_admission)
        first = running.pop(0)
        while running:
            if not give_way(batch, running.pop(), self._mode):
                return
            if batch.add(first, min(batch.max_chunk(first), self._room(batch))) is not Refusal.KV_BLOCKS:
                return


def _is_protected(request: RequestView) -> bool:
    """Return True if the request was preempted and is being recomputed."""
    return request.num_preemptions > 0 and not request.is_prefill_complete


def _admission(request: RequestView) -> int:
    return request.admitted_index


SPEC = PolicySpec(
    name="preemptive",
    layer=Layer.REPLICA_SCHEDULER,
    config=PreemptiveConfig,
    build=Preemptive,
    summary="Runs the most urgent requests; running requests are paused or preempted for more urgent waiting ones.",
    source="FastServe (arXiv:2305.05920); LTR (arXiv:2408.15792)",
    advice=(
        "Use it with a router that binds on arrival: with `pull`, a full replica does not see waiting requests. Not "
        "with prioritizers whose keys change their order all the time (`vtc`). Each step sorts the running requests."
    ),
)
