"""Decode fast-forward of the simulator: all repetitions of a steady decode step are launched as one event and applied
on demand.

`vajra_py.runtime.step.fast_forward` determines how many repetitions are certain to follow a step.
Results are the same as if each step were simulated separately.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable

from vajra_py.runtime.serving.driver import Driver
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.step.plan import StepPlan
from vajra_py.sim.decode_runs import FIRST_STEPS, MAX_STEPS
from vajra_py.sim.replica import SimReplica

_STEP_END = Phase.STEP_END


class DecodeFastForward:
    """`FastForward` of a simulator."""

    def __init__(self, driver: Driver[SimReplica], end_now: Callable[[SimReplica], None]) -> None:
        """Create the fast-forward. `end_now`: function that ends a replica's step in flight; called if this step ends
        now and its end is not an event.
        """
        self._driver = driver
        self._end_now = end_now
        self._running: dict[str, dict[int, SimReplica]] = {name: {} for name in driver.controller.replicasets}
        """Replicas that execute a run of repetitions, by replicaset and id."""

    def launch(self, one: SimReplica, plan: StepPlan) -> int | None:
        """Launch a plan together with its repetitions.

        Returns the tick at which the last repetition ends. If no repetition is certain, launches nothing and returns
        None.
        """
        runs, replica, now = one.runs, one.replica, self._driver.now
        if runs is None:
            return None
        num_steps = min(1 + replica.num_repeats(plan), one.run_limit)
        if num_steps < 2:
            return None
        features = plan.features
        ends = runs.run_ends(now, features.num_decodes, features.decode_context_tokens, num_steps)
        if len(ends) < 2:
            return None
        one.run_ends, one.is_apart = ends, False
        replica.note_waiting()
        self._running[replica.replicaset][replica.replica_id] = one
        return ends[-1]

    def finish(self, one: SimReplica) -> None:
        """End a run whose last step ends now: apply all steps before the last one."""
        assert one.run_ends is not None
        if len(one.run_ends) > 1:
            self._sync(one, goes_on=True)
            one.run_limit = min(4 * one.run_limit, MAX_STEPS)
        self.forget(one)

    def forget(self, one: SimReplica) -> None:
        """End the run of a replica without applying its steps."""
        one.run_ends = None
        self._running[one.replica.replicaset].pop(one.replica.replica_id, None)

    def sync_all(self, replicaset: str) -> None:
        """See `FastForward`."""
        for one in self._due(replicaset):
            self._sync(one, goes_on=True)

    def sync_before(self, replica: SimReplica) -> None:
        """See `FastForward`."""
        for other in self._due(replica.replica.replicaset):
            self._sync(other, goes_on=True, up_to_now=other.rank < replica.rank)

    def on_queued(self, replica: SimReplica) -> None:
        """See `FastForward`."""
        if replica.run_ends is not None:
            self._sync(replica, goes_on=replica.replica.repeats.ignores_arrivals(replica.plan))

    def interrupt(self, replica: SimReplica, *, up_to_now: bool = True) -> None:
        """See `FastForward`."""
        if replica.run_ends is not None:
            self._sync(replica, goes_on=False, up_to_now=up_to_now)

    def catch_up(self, replica: SimReplica, *, up_to_now: bool = True) -> None:
        """See `FastForward`."""
        if replica.run_ends is not None:
            self._sync(replica, goes_on=True, up_to_now=up_to_now)

    def shorten(self, replica: SimReplica) -> None:
        """See `FastForward`."""
        ends, plan = replica.run_ends, replica.plan
        if ends is None or plan is None:
            return
        replica.is_apart = True
        if replica.replica.repeats.surely_fit(plan, len(ends) - 1):
            return
        num_repeats = replica.replica.num_repeats(plan)
        if num_repeats == 0:
            replica.is_apart = False
            self.interrupt(replica, up_to_now=False)
        elif num_repeats < len(ends) - 1:
            self._end_after(replica, 1 + num_repeats)

    def interrupt_all(self, replicaset: str) -> None:
        """See `FastForward`."""
        for one in list(self._running[replicaset].values()):
            self._sync(one, goes_on=False)

    def _due(self, replicaset: str) -> list[SimReplica]:
        """Return the replicas whose run has a step that has ended or ends now; usually there are none."""
        now = self._driver.now
        return [one for one in self._running[replicaset].values() if one.run_ends and one.run_ends[0] <= now]

    def _sync(self, one: SimReplica, *, goes_on: bool, up_to_now: bool = True) -> None:
        """Apply the steps of a run that ended before now. Unless `goes_on`, the step in flight becomes the last step of
        the run.

        `up_to_now`: if a step of the run ends now, apply it too, and make it the last step of the run.
        """
        ends, plan = one.run_ends, one.plan
        if ends is None or plan is None:
            return
        driver, replica = self._driver, one.replica
        num_done = bisect_left(ends, driver.now)
        if num_done:
            self._complete(one, plan, ends[:num_done])
            del ends[:num_done]
        # A step that ends now becomes the run's last one: the next step is formed after the other events of this tick.
        if up_to_now and len(ends) > 1 and ends[0] == driver.now:
            del ends[1:]
            driver.end_run_at(one, driver.now)
            self._end_now(one)
            return
        if not goes_on and len(ends) > 1:
            self._end_after(one, 1)
            self._running[replica.replicaset].pop(replica.replica_id, None)
            one.run_limit = FIRST_STEPS
        replica.note_waiting()

    def _complete(self, one: SimReplica, plan: StepPlan, ended_at: array[int]) -> None:
        """Complete the first steps of a run, which ended at these ticks.

        If other requests took blocks after the first step was formed, that step is completed separately, because its
        plan has more free blocks than the plans of the later steps.
        """
        replica, now = one.replica, self._driver.now
        self._driver.count_repeats(len(ended_at))
        if one.is_apart:
            one.is_apart = False
            replica.complete_repeats(plan, ended_at[:1], now)
            ended_at = ended_at[1:]
        if ended_at:
            replica.complete_repeats(plan, ended_at, now)

    def _end_after(self, one: SimReplica, num_steps: int) -> None:
        """Make the run end after `num_steps` more steps, including the one in flight."""
        ends, driver = one.run_ends, self._driver
        assert ends is not None
        del ends[num_steps:]
        driver.end_run_at(one, ends[-1])
        driver.events.push(ends[-1], _STEP_END, (one, None, one.epoch), one.rank)
