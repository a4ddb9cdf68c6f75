"""Decode fast-forward: how many steps repeat the present one, and applying them at once.

A replica scheduler says it by `RepeatsDecodes`. Where it is not claimed, nothing is sure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vajra_py.contract import RepeatsDecodes, SteadyState, StepRun
from vajra_py.runtime.clock import to_seconds
from vajra_py.runtime.executor import StepPlan

if TYPE_CHECKING:
    from vajra_py.runtime.replica import Replica


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
        may_repeat = (
            parts.limits.pipeline_stages == 1 and not parts.listeners.step_ends and parts.memory.num_groups == 1
        )
        self._repeats_alone = may_repeat and SteadyState.NOTHING_WAITS in steady
        self._repeats_full = may_repeat and SteadyState.BATCH_FULL in steady

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
        """Steps of the present run that are formed from now on leave this many waiting; only observers want to know."""
        if self._replica.is_watched_by_step_end:
            self._num_waiting_in_run = self._replica.residents.num_waiting

    def apply(self, plan: StepPlan, ended_at: Sequence[int]) -> StepPlan:
        """`plan` and repetitions of it came back at these ticks; returns the repetition that is in flight after them."""
        pool, replica = plan.pool, self._replica
        assert pool is not None
        num_steps = len(ended_at)
        if replica.is_watched_by_step_end:
            self._show_run(plan, ended_at)
        following = replica.builder.repeat(plan, num_steps, ended_at[-1], self._num_waiting_in_run)
        pool.advance(ended_at)
        replica.num_steps += num_steps
        return following

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
