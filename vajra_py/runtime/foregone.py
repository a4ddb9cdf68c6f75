"""Which step is sure to be decided in a known way, so that a simulator can form it without asking the policy?

A replica scheduler says it by `ChunksBesideDecodes`, and by `AdmitsInTurn` for steps that prompts wait for. Nothing is sure
where neither is claimed, and whenever something is short or out of the ordinary: then nothing is changed here, and the policy
is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

from vajra_py.contract import AdmitsInTurn, BatchShape, ChunksBesideDecodes
from vajra_py.errors import PolicyError
from vajra_py.runtime.builder import UNLIMITED
from vajra_py.runtime.clock import to_seconds
from vajra_py.runtime.executor import PlannedChunk, StepPlan
from vajra_py.runtime.kv import KvMemory
from vajra_py.runtime.queues import ArbitraryQueue
from vajra_py.runtime.request import RequestState
from vajra_py.runtime.shapes import shape_of

if TYPE_CHECKING:
    from vajra_py.runtime.replica import Replica

# Looking a member of an enumeration up costs more than a call, and these are looked up for every admission.
_WAITING, _RUNNING, _SWAPPED = RequestState.WAITING, RequestState.RUNNING, RequestState.SWAPPED


class ForegoneSteps:
    """Forms those steps of one replica that its policy has said beforehand."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.read_claims()

    def read_claims(self) -> None:
        """The replica has its policy, or another one: read what it declares."""
        parts = self._replica.parts
        policy, limits, options = parts.policy, parts.limits, parts.options
        self._memory = parts.memory if isinstance(parts.memory, KvMemory) else None
        is_plain = limits.pipeline_stages == 1 and not parts.listeners
        self._chunk_beside = policy.chunk_beside if is_plain and isinstance(policy, ChunksBesideDecodes) else None
        # Keys that move with anything are read once a step, which is the business of whoever asks the policy.
        is_ordered = not isinstance(parts.queue, ArbitraryQueue)
        self._admits = is_ordered and isinstance(policy, AdmitsInTurn) and policy.admits_in_turn
        self._max_batch_size, self._block_size = limits.max_batch_size, limits.block_size
        self._max_batch_tokens = UNLIMITED if limits.max_batch_tokens is None else limits.max_batch_tokens
        self._reserves_prompt, self._publishes = options.reserve_prompt, options.publish_at_schedule
        self._watermark = options.watermark_blocks

    def next_plan(self, now: int) -> StepPlan | None:
        """Form the next step; None, and nothing changed: ask the policy."""
        replica, memory, chunk_beside = self._replica, self._memory, self._chunk_beside
        if memory is None or chunk_beside is None:
            return None
        if replica.is_watched_by_step or replica.builder.swap_bytes_due:
            return None
        residents = replica.residents
        pool, partial, num_waiting = residents.pool, residents.partial, residents.queue.num_requests
        if len(partial) > 1 or residents.parked or residents.has_spare_blocks or pool.num_public:
            return None
        if (num_waiting and not self._admits) or len(residents.shared):
            return None
        seconds = to_seconds(now)
        num_growing = len(pool.needing_blocks())
        try:
            chunks = self._chunks(chunk_beside, memory, memory.free_blocks - num_growing, seconds)
        except PolicyError as error:  # of the prioritizer, whose keys are read
            error.step = replica.num_steps if error.step is None else error.step
            raise
        if chunks is None or not (chunks or pool.members):
            return None
        if num_growing:
            memory.lend(num_growing)
        shape = shape_of(len(pool.members), pool.context_tokens, chunks)
        for chunk in chunks:
            self._grant(chunk, memory, seconds)
        return self._plan(now, shape, chunks)

    def _chunks(
        self, chunk_beside: Callable[[int, int], int | None], memory: KvMemory, num_free: int, now: float
    ) -> list[PlannedChunk] | None:
        """What the prompts get, one after the other; None: it is not sure, or something is short."""
        residents = self._replica.residents
        partial, queue = residents.partial, residents.queue
        num_tokens = len(residents.pool.members)
        num_slots = self._max_batch_size - num_tokens
        chunks: list[PlannedChunk] = []
        if num_slots < len(partial):
            return None
        if not partial and not queue.num_requests and chunk_beside(num_tokens, 0) is None:
            return None
        in_turn: Iterable[Any] = chain(partial, queue.ordered(now)) if queue.num_requests else partial
        for request in in_turn:
            num_left, state = request.num_remaining_tokens, request.state
            chunk = chunk_beside(num_tokens, num_left)
            if chunk is None:
                return None
            if chunk < 1 or num_slots < 1:
                break
            if state is _RUNNING:
                if queue.num_requests and queue.goes_before(request, now):
                    return None
                chunks.append(PlannedChunk(request, chunk, request.num_computed_tokens, "running"))
                num_free -= chunk // self._block_size + 1
            elif state is _SWAPPED or memory.may_find(request):
                return None
            else:
                chunks.append(PlannedChunk(request, chunk, 0, "admitted" if state is _WAITING else "resumed"))
                num_free -= memory.blocks_for(num_left if self._reserves_prompt else chunk)
                if num_free < self._watermark:
                    return None
            num_tokens += chunk
            num_slots -= 1
        return chunks if num_free >= 0 and num_tokens <= self._max_batch_tokens else None

    def _grant(self, chunk: PlannedChunk, memory: KvMemory, now: float) -> None:
        """Everything that a chunk needs, which was counted beforehand."""
        request, num_tokens, computed, kind = chunk
        end = computed + num_tokens
        if kind == "running":
            is_granted = memory.grow(request, end)
        else:
            is_granted = memory.admit(request, request.num_known_tokens if self._reserves_prompt else end) is not None
            self._replica.lifecycle.admitted(request, 0, now)
        if not is_granted:
            raise RuntimeError(f"request {request.request_id}: room for its chunk was counted and is not there")
        if self._publishes:
            memory.publish(request, end)
        request.set_computed(end)

    def _plan(self, now: int, shape: BatchShape, chunks: list[PlannedChunk]) -> StepPlan:
        replica = self._replica
        residents, num_decodes = replica.residents, shape.num_decodes
        plan = StepPlan(
            replica.num_steps,
            replica.replica_id,
            now,
            shape,
            chunks,
            residents.pool if num_decodes else None,
            num_decodes,
            replica.memory.free_blocks,
            residents.queue.num_requests,
            num_decodes + len(residents.partial),
        )
        if num_decodes:
            residents.pool.commit()
        replica.num_in_flight += 1
        replica.num_steps += 1
        return plan
