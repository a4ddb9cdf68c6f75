"""Decode fast-forward: the number of next steps that are certain to repeat the present one, and their record for
observers.

A replica scheduler allows fast-forward through `SchedulerTraits.repeats_decodes`; otherwise every step is formed
individually.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from vajra_py.contract import ReplicaScheduler, SteadyState
from vajra_py.contract.observer import StepRun
from vajra_py.contract.policies import traits_of
from vajra_py.runtime.requests.running_set import RunningSet
from vajra_py.runtime.step.plan import StepPlan
from vajra_py.runtime.support.clock import to_seconds


class Repeats:
    """Predicts which of one replica's next steps repeat the present one."""

    def __init__(self, running_set: RunningSet) -> None:
        self._running_set = running_set
        self._repeats_alone = self._repeats_full = False

    def read_traits(self, policy: ReplicaScheduler, *, listens: bool) -> None:
        """Read the traits of the present policy. `listens`: True if a policy must be notified of each single step."""
        running_set = self._running_set
        steady = traits_of(policy).repeats_decodes
        memory = running_set.memory
        may_repeat = running_set.limits.pipeline_stages == 1 and not listens and memory.num_groups == 1
        may_repeat = may_repeat and not memory.recycles
        self._repeats_alone = may_repeat and SteadyState.NOTHING_WAITS in steady
        self._repeats_full = may_repeat and SteadyState.BATCH_FULL in steady

    def num_alike(self, plan: StepPlan) -> int:
        """Return the number of further steps that are certain to be decided like this one, if no event concerns the
        replica meanwhile.

        The count includes the step in which a request ends, and excludes the first one in which a decode would lack a
        block.
        """
        pool, running_set = plan.pool, self._running_set
        if pool is None or plan.num_apart or not self._is_steady(plan):
            return 0
        if plan.preempted or plan.num_preempted_before or plan.features.swap_bytes:
            return 0
        memory = running_set.memory
        if running_set.has_spare_blocks or running_set.skipped or running_set.partial:
            return 0
        if plan.num_requests != plan.num_running:
            return 0
        if (memory.may_expire and memory.next_due < inf) or (memory.is_watched and pool.num_public):
            return 0  # pins may end, content may expire, or newly cached blocks must be reported
        num_steps = pool.steps_to_next_end() - 1
        free = memory.repeat_headroom
        most = -(-num_steps // memory.block_size) * len(pool)
        if most <= free:
            return num_steps
        for step, num_blocks in enumerate(pool.growth_by_step(num_steps)):
            free -= num_blocks
            if free < 0:
                return step
        return num_steps

    def surely_fit(self, plan: StepPlan, num_steps: int) -> bool:
        """Return True if the free blocks suffice for this many repetitions, whichever decodes need blocks."""
        running_set, memory = self._running_set, self._running_set.memory
        most = -(-num_steps // memory.block_size) * plan.num_requests
        return most <= memory.repeat_headroom and not running_set.has_spare_blocks

    def goes_on(self, plan: StepPlan) -> bool:
        """Return True if the next step probably consists of this step's decodes and the requests whose prompts this
        step completes.
        """
        if plan.preempted or plan.num_preempted_before or plan.num_requests != plan.num_running:
            return False
        ends_prompts = all(start + num == request.num_known_tokens for request, num, start, _ in plan.chunks)
        return ends_prompts and not self._running_set.skipped and self._is_steady(plan)

    def _is_steady(self, plan: StepPlan) -> bool:
        running_set = self._running_set
        if self.ignores_arrivals(plan):
            return not len(running_set.shared)
        return self._repeats_alone and not running_set.num_waiting

    def ignores_arrivals(self, plan: StepPlan | None) -> bool:
        """Return True if repetitions of this plan continue when a request joins the replica's own queue."""
        return self._repeats_full and plan is not None and plan.num_requests >= self._running_set.limits.max_batch_size


def run_of(replicaset: str, plan: StepPlan, ended_at: Sequence[int], num_waiting: int) -> StepRun:
    """Return the record of a step and its repetitions, which ended at these ticks; `num_waiting` requests waited during
    the repetitions.
    """
    pool = plan.pool
    assert pool is not None
    free = plan.free_blocks
    free_blocks = [free]
    for num_blocks in pool.growth_by_step(len(ended_at) - 1):
        free -= num_blocks
        free_blocks.append(free)
    return StepRun(
        replicaset,
        plan.replica_id,
        plan.step_index,
        to_seconds(plan.formed_at),
        [to_seconds(tick) for tick in ended_at],
        len(pool),
        plan.features.decode_context_tokens,
        free_blocks,
        [plan.num_waiting, *[num_waiting] * (len(ended_at) - 1)],
        plan.num_running,
    )
