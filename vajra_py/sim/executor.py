"""Simulated execution: durations of steps, and output lengths of requests."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from vajra_py.contract.latency import LAST_S, LatencyModel
from vajra_py.latency import CountsSteps, VariesSteps
from vajra_py.runtime.requests.adapters import MergeRules
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.serving.replica import Replica
from vajra_py.runtime.step.builder_options import DraftRules
from vajra_py.runtime.step.plan import StepPlan, StepResult
from vajra_py.runtime.support.clock import TICKS_PER_SECOND, to_ticks
from vajra_py.runtime.support.seeds import SeedTree
from vajra_py.sim.acceptance import AcceptanceModel
from vajra_py.sim.decode_runs import check_step_time, decode_run_times_s, run_ends_of
from vajra_py.sim.factors import StepFactors


class StepTimer(Protocol):
    """Durations of simulated steps."""

    def stage_ticks(self, plan: StepPlan) -> int:
        """Return the number of ticks for which the plan occupies one pipeline stage; with a single stage, the duration
        of the step.
        """


@runtime_checkable
class TimesFirstStage(Protocol):
    """Timer of recorded steps with several pipeline stages; its `stage_ticks` covers all stages of a step."""

    def stage_ticks(self, plan: StepPlan) -> int:
        """Return the number of ticks from the forming of the step until its result."""

    def first_stage_ticks(self, plan: StepPlan) -> int:
        """Return the number of ticks from the forming of the step until the first stage is free."""


class PredictedTimer:
    """Timer that adds a fixed overhead for scheduling to the durations that a latency model predicts."""

    def __init__(self, latency: LatencyModel, overhead_s: float = 0.0) -> None:
        self._stage_time_s = latency.taken_time_s if isinstance(latency, CountsSteps) else latency.stage_time_s
        self._decode_run_times_s = decode_run_times_s(latency)
        self._overhead_ticks = to_ticks(overhead_s)

    def stage_ticks(self, plan: StepPlan) -> int:
        """Return the predicted duration of the step, or of its slowest pipeline stage, plus the overhead, in ticks."""
        seconds = self._stage_time_s(plan.features)
        if not 0.0 <= seconds <= LAST_S:
            check_step_time(seconds)
        return round(seconds * TICKS_PER_SECOND) + self._overhead_ticks

    def run_ends(self, now: int, num_decodes: int, first_context_tokens: int, num_steps: int) -> array[int]:
        """Return the end ticks of consecutive steps that begin at `now` and only decode."""
        seconds = self._decode_run_times_s(num_decodes, first_context_tokens, num_steps)
        return run_ends_of(now, seconds, self._overhead_ticks)


class VariedTimer(PredictedTimer):
    """Timer of one replica that multiplies predicted step times by a random factor for each step, and adds the fixed
    overhead.

    The factor of a replica's n-th step does not depend on whether the step's time is computed alone or in a run of
    decode steps.
    """

    def __init__(self, latency: LatencyModel, overhead_s: float, replica: Replica, factors: StepFactors) -> None:
        super().__init__(latency, overhead_s)
        self._replica = replica
        self._factors = factors

    def stage_ticks(self, plan: StepPlan) -> int:
        """Return the predicted duration times the step's random factor, plus the overhead, in ticks."""
        features = plan.features
        (factor,) = self._factors.of(plan.step_index, 1, has_prompts=features.num_prefills > 0)
        seconds = self._stage_time_s(features) * float(factor)
        check_step_time(seconds)
        return to_ticks(seconds) + self._overhead_ticks

    def run_ends(self, now: int, num_decodes: int, first_context_tokens: int, num_steps: int) -> array[int]:
        """See `TimesRuns`; the first of these steps must be the step that the replica formed last."""
        seconds = np.asarray(self._decode_run_times_s(num_decodes, first_context_tokens, num_steps))
        factors = self._factors.of(self._replica.num_steps - 1, len(seconds), has_prompts=False)
        return run_ends_of(now, seconds * factors, self._overhead_ticks)


class DraftingTimer:
    """Timer that adds the time of drafting to steps with drafts."""

    def __init__(self, timer: StepTimer, rules: DraftRules) -> None:
        self._timer = timer
        self._rules = rules

    def stage_ticks(self, plan: StepPlan) -> int:
        """See `StepTimer`."""
        return self._timer.stage_ticks(plan) + to_ticks(self._rules.time_s(plan.features))


class MergingTimer:
    """Timer of one replica; the replica merges an adapter into the weights while all requests of its steps use that
    adapter.
    """

    def __init__(self, timer: StepTimer, rules: MergeRules) -> None:
        self._timer = timer
        self._rules = rules
        self._merged = ""
        """Adapter that is merged now; empty if none is."""

    def stage_ticks(self, plan: StepPlan) -> int:
        """See `StepTimer`."""
        names = {request.adapter for request in plan.work()[0]}
        ticks = self._timer.stage_ticks(plan)
        if len(names) > 1:
            ticks = round(ticks * self._rules.unmerged_factor)
        merged = names.pop() if len(names) == 1 else ""
        if merged != self._merged:
            self._merged = merged
            ticks += to_ticks(self._rules.switch_s)
        return ticks


def predicted_timers(latency: LatencyModel, seeds: SeedTree, overhead_s: float = 0.0) -> Callable[[Replica], StepTimer]:
    """Return a function that creates the timer of each replica.

    Timers differ by replica if the latency model draws random factors, or if drafts or adapters take time.
    """
    timers = _timers_of_models(latency, seeds, overhead_s)

    def timer_of(replica: Replica) -> StepTimer:
        rules = replica.parts.options.drafts
        takes_time = rules is not None and (rules.step_s or rules.token_s)
        timer: StepTimer = timers(replica)
        if rules is not None and takes_time:
            timer = DraftingTimer(timer, rules)
        if replica.adapters is not None and replica.adapters.merging is not None:
            timer = MergingTimer(timer, replica.adapters.merging)
        return timer

    return timer_of


def _timers_of_models(latency: LatencyModel, seeds: SeedTree, overhead_s: float) -> Callable[[Replica], PredictedTimer]:
    variation = latency.variation if isinstance(latency, VariesSteps) else None
    if variation is None:
        timer = PredictedTimer(latency, overhead_s)
        return lambda replica: timer

    def varied(replica: Replica) -> VariedTimer:
        factors = StepFactors(variation, seeds.child(replica.replicaset, str(replica.replica_id)))
        return VariedTimer(latency, overhead_s, replica, factors)

    return varied


class RecordedTimer:
    """Timer with the durations of a recorded run, in the order in which the replica formed its steps."""

    def __init__(self, next_duration_s: Callable[[int], float]) -> None:
        self._next_duration_s = next_duration_s

    def stage_ticks(self, plan: StepPlan) -> int:
        """Return the next recorded duration of the plan's replica, in ticks."""
        return to_ticks(self._next_duration_s(plan.replica_id))


_NOTHING_KNOWN = StepResult()


class SimulatedExecutor:
    """Executor that uses the true output lengths of a workload; output tokens have no ids."""

    def __init__(self, acceptance: AcceptanceModel | None = None) -> None:
        """Create the executor. `acceptance`: model of the acceptance of drafts; None: there are no drafts."""
        self._output_tokens: dict[Request, int] = {}
        self._acceptance = acceptance

    def expect(self, request: Request, num_output_tokens: int) -> None:
        """Set the number of output tokens after which the request ends by itself."""
        self._output_tokens[request] = num_output_tokens

    def result(self, plan: StepPlan) -> StepResult:
        """Return the result of a step that has just ended.

        Each request that samples in the step gets one token, and one more token per accepted draft.
        """
        if self._acceptance is None or not plan.drafts:
            return _NOTHING_KNOWN
        drafts = [
            (one, each.num_tokens) for one, each in plan.drafts.items() if each.num_tokens and not each.is_padding
        ]
        return StepResult(accepted={one: self._acceptance.num_accepted(one, count) for one, count in drafts})

    def num_drafts(self, requests: Sequence[Request], at_most: int) -> Sequence[int]:
        """Return `at_most` for each request, since any number of drafts can be simulated."""
        return [at_most] * len(requests)

    def known_output_tokens(self, request: Request) -> int | None:
        """Return the true output length; None if it was not set."""
        return self._output_tokens.get(request)

    def withheld_token(self, request: Request) -> StepResult:
        """See `Executor`."""
        return _NOTHING_KNOWN

    def release(self, request: Request) -> None:
        """Drop all data about a request that has ended."""
        self._output_tokens.pop(request, None)
        if self._acceptance is not None:
            self._acceptance.release(request)
