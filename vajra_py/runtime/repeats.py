"""Which steps of a replica are sure to be decided in a known way, so that a simulator need not ask the policy for them?

Two claims of a replica scheduler are used: `RepeatsDecodes`, by which a whole run of equal steps is worked out at once, and
`ChunksBesideDecodes`, by which the next step is formed here while nothing waits. Where neither is made, nothing is sure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vajra_py.contract import BatchShape, ChunksBesideDecodes, RepeatsDecodes, SteadyState, StepRun
from vajra_py.runtime.clock import to_seconds
from vajra_py.runtime.executor import PlannedChunk, StepPlan

if TYPE_CHECKING:
    from vajra_py.runtime.replica import Replica
    from vajra_py.runtime.request import Request


class Repeats:
    """What can be known in advance of one replica's steps, and how such steps are applied."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._num_waiting_in_run = 0
        self.read_claims()

    def read_claims(self) -> None:
        """The replica has its policy, or another one: read what it declares."""
        parts = self._replica.parts
        policy = parts.policy
        steady = policy.repeats_decodes if isinstance(policy, RepeatsDecodes) else frozenset()
        may_repeat = parts.limits.pipeline_stages == 1 and not parts.listeners and parts.memory.num_groups == 1
        self._repeats_alone = may_repeat and SteadyState.NOTHING_WAITS in steady
        self._repeats_full = may_repeat and SteadyState.BATCH_FULL in steady
        self._chunk_beside = policy.chunk_beside if may_repeat and isinstance(policy, ChunksBesideDecodes) else None
        self._publishes_chunks = parts.options.publish_at_schedule

    # The next step

    def next_plan(self, now: int) -> StepPlan | None:
        """Form the next step without asking the policy, where it has said what it would do; None: ask it."""
        replica, chunk_beside = self._replica, self._chunk_beside
        if chunk_beside is None or replica.is_watched_by_step or replica.builder.swap_bytes_due:
            return None
        residents = replica.residents
        partial, pool = residents.partial, residents.pool
        num_decodes, num_prompts = len(pool.members), len(partial)
        if num_prompts > 1 or not num_decodes + num_prompts or residents.parked or residents.has_spare_blocks:
            return None
        if residents.queue.num_requests or len(residents.shared) or pool.num_public:
            return None
        request: Request | None = None
        num_left = 0
        for request in partial:
            num_left = request.num_remaining_tokens
        num_tokens = chunk_beside(num_decodes, num_left)
        if num_tokens is None or not self._has_room(num_decodes, num_prompts, num_tokens):
            return None
        if num_decodes:
            due = pool.needing_blocks()
            if due:
                replica.memory.grow_each(due)
        shape = BatchShape(num_decodes, pool.context_tokens)
        chunks: list[PlannedChunk] = []
        if request is not None:
            computed = request.num_computed_tokens
            shape = shape.with_chunk(num_tokens, computed)
            chunks.append(PlannedChunk(request, num_tokens, computed, "running"))
            self._take_chunk(request, computed + num_tokens)
        return self._plan(now, shape, chunks)

    def _has_room(self, num_decodes: int, num_prompts: int, num_tokens: int) -> bool:
        """Whether a step of all decodes and a chunk of so many tokens is within every limit, whoever gets the blocks."""
        replica = self._replica
        limits = replica.limits
        if num_decodes + num_prompts > limits.max_batch_size or (num_prompts and num_tokens < 1):
            return False
        if limits.max_batch_tokens is not None and num_decodes + num_tokens > limits.max_batch_tokens:
            return False
        most_blocks = len(replica.residents.pool.needing_blocks()) + num_tokens // limits.block_size + num_prompts
        return most_blocks <= replica.memory.growth_headroom

    def _take_chunk(self, request: Request, num_tokens: int) -> None:
        memory = self._replica.memory
        if not memory.grow(request, num_tokens):
            raise RuntimeError(f"request {request.request_id}: room for its chunk was counted and is not there")
        if self._publishes_chunks:
            memory.publish(request, num_tokens)
        request.set_computed(num_tokens)

    def _plan(self, now: int, shape: BatchShape, chunks: list[PlannedChunk]) -> StepPlan:
        replica = self._replica
        pool = replica.residents.pool
        num_decodes = shape.num_decodes
        plan = StepPlan(
            replica.num_steps,
            replica.replica_id,
            now,
            shape,
            chunks,
            pool if num_decodes else None,
            num_decodes,
            pool_position=0,
            running_in_order=False,
            preempted=[],
            free_blocks=replica.memory.free_blocks,
            num_running=num_decodes + len(chunks),
        )
        if num_decodes:
            pool.commit()
        replica.num_in_flight += 1
        replica.num_steps += 1
        return plan

    # Steps that repeat

    def num_repeats(self, plan: StepPlan) -> int:
        """How many further steps are sure to be decided like this one, if nothing reaches the replica meanwhile.

        Up to the one in which a request ends, or before the one in which a decode would lack a block. None while somebody
        watches every step.
        """
        return 0 if self._replica.is_watched_by_step else self.num_alike(plan)

    def num_alike(self, plan: StepPlan) -> int:
        """The same, whoever watches."""
        pool, replica = plan.pool, self._replica
        if pool is None or plan.chunks or not self._is_steady(plan):
            return 0
        if plan.preempted or plan.num_preempted_before or plan.shape.swap_bytes:
            return 0
        residents, memory = replica.residents, replica.memory
        if residents.has_spare_blocks or residents.parked or residents.partial:
            return 0
        if plan.num_requests != plan.num_running:
            return 0
        num_steps = pool.steps_to_next_end() - 1
        free = memory.growth_headroom
        most = -(-num_steps // memory.block_size) * len(pool)
        if most <= free:
            return num_steps
        for step, num_blocks in enumerate(pool.growth_by_step(num_steps)):
            free -= num_blocks
            if free < 0:
                return step
        return num_steps

    def _is_steady(self, plan: StepPlan) -> bool:
        residents = self._replica.residents
        if self.ignores_arrivals(plan):
            return not len(residents.shared)
        return self._repeats_alone and not residents.num_waiting

    def ignores_arrivals(self, plan: StepPlan | None) -> bool:
        """Whether repetitions of this plan go on when a request joins the replica's own queue."""
        return self._repeats_full and plan is not None and plan.num_requests >= self._replica.limits.max_batch_size

    def note_waiting(self) -> None:
        """Steps of the present run that are formed from now on leave this many waiting."""
        self._num_waiting_in_run = self._replica.residents.num_waiting

    def apply(self, plan: StepPlan, ended_at: Sequence[int]) -> None:
        """`plan` and repetitions of it came back at these ticks; it becomes the one that is in flight after them."""
        pool, replica = plan.pool, self._replica
        assert pool is not None
        num_steps = len(ended_at)
        if replica.is_watched_by_step_end:
            self._show_run(plan, ended_at)
        for members, num_blocks in pool.growth_of_members(num_steps):
            replica.memory.grow_each(members, num_blocks)
            plan.free_blocks -= num_blocks * len(members)
        pool.advance(ended_at)
        replica.num_steps += num_steps
        context = plan.shape.decode_context_tokens + num_steps * len(pool)
        plan.shape = BatchShape(len(pool), context)
        plan.step_index += num_steps
        plan.formed_at = ended_at[-1]
        plan.num_waiting = self._num_waiting_in_run

    def _show_run(self, plan: StepPlan, ended_at: Sequence[int]) -> None:
        assert plan.pool is not None
        replica = self._replica
        free = plan.free_blocks
        free_blocks = [free]
        for num_blocks in plan.pool.growth_by_step(len(ended_at) - 1):
            free -= num_blocks
            free_blocks.append(free)
        run = StepRun(
            replica.replicaset,
            replica.replica_id,
            plan.step_index,
            to_seconds(plan.formed_at),
            [to_seconds(tick) for tick in ended_at],
            len(plan.pool),
            plan.shape.decode_context_tokens,
            free_blocks,
            [plan.num_waiting, *[self._num_waiting_in_run] * (len(ended_at) - 1)],
            plan.num_running,
        )
        replica.show_run(run)
