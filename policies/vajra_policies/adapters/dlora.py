"""dLoRA: load and credits decide whether a step runs requests of one adapter (merged into weights) or of several."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

from pydantic import Field

from vajra_policies.preemptive import Preemptive, PreemptiveConfig
from vajra_py.contract import (
    BatchBuilder,
    Layer,
    LocalReplicaView,
    PolicyContext,
    PolicySpec,
    RequestView,
    SchedulerTraits,
)


class DloraConfig(PreemptiveConfig):
    """Parameters of `dlora`; the defaults are those of the authors' code."""

    merged_step_s: float = Field(0.015, gt=0, description="Time of a step with one adapter, merged, seconds.")
    unmerged_step_s: float = Field(0.027, gt=0, description="Time of a step with several adapters, seconds.")
    switch_s: float = Field(0.02, ge=0, description="Time to merge or unmerge an adapter, seconds.")
    decrease: float = Field(
        0.05, ge=0, description="Fall of `begin` (rise of `stay`) after a merged (unmerged) phase that paid off."
    )
    increase: float = Field(
        1.1, ge=1, description="Factor of `begin` (divisor of `stay`) after a merged (unmerged) phase that did not."
    )
    credit_bound: float = Field(10000.0, gt=0, description="Credit at which an adapter goes first, until half is left.")


class Thresholds:
    """Numbers of requests that one adapter must have for merged mode to begin (`begin`) and to continue (`stay`), as
    fractions of the number of requests that unmerged mode would run.

    After each phase in one mode, a threshold is adapted: the throughput of that mode, in requests per second, is
    compared with an estimate for the other mode.
    """

    def __init__(self, config: DloraConfig) -> None:
        self._config = config
        self.begin = 1.0
        self.stay = config.merged_step_s / config.unmerged_step_s
        self._num_steps = self._num_merged = self._num_unmerged = self._num_switches = 0
        self._favourite: str | None = None

    def count(self, num_merged: int, num_unmerged: int, favourite: str, *, is_merged: bool) -> None:
        """Count a step, with the numbers of requests that the step would run in merged mode and in unmerged mode.

        `favourite` is the adapter that merged mode would run. In unmerged mode, each change of `favourite` counts as a
        switch.
        """
        self._num_steps += 1
        self._num_merged += num_merged
        self._num_unmerged += num_unmerged
        if not is_merged and favourite != self._favourite:
            self._favourite = favourite
            self._num_switches += 1

    def end_phase(self, *, was_merged: bool) -> None:
        """Adapt a threshold: `begin` after a phase in merged mode, `stay` after one in unmerged mode."""
        config, num_steps = self._config, self._num_steps
        if not num_steps:
            return
        merged_s, unmerged_s = config.merged_step_s * num_steps, config.unmerged_step_s * num_steps
        if was_merged:
            merged_s += config.switch_s
        else:
            merged_s += config.switch_s * self._num_switches
            unmerged_s += config.switch_s
        gain = self._num_merged / merged_s - self._num_unmerged / unmerged_s
        if was_merged and gain > 0 and self.begin - config.decrease > self.stay:
            self.begin -= config.decrease
        elif was_merged and gain < 0:
            self.begin *= config.increase
        elif not was_merged and gain < 0 and self.stay + config.decrease < self.begin:
            self.stay += config.decrease
        elif not was_merged and gain > 0:
            self.stay /= config.increase
        self._num_steps = self._num_merged = self._num_unmerged = self._num_switches = 0
        self._favourite = None


class Dlora(Preemptive):
    """Runs either the requests of one adapter (merged mode) or the most urgent requests of any adapter (unmerged mode).

    B is the batch limit. F is the list of the first B requests in the prioritizer's order. n_a is the number of running
    or waiting requests with adapter a.

    - Unmerged mode runs F. Merged mode begins if n_a >= `begin` |F| for the adapter a with the most requests, and lasts
      while n_a >= `stay` |F|. `Thresholds` adapts `begin` and `stay`.
    - Credits: when merged mode does not run a request of F, the request's adapter gets 1 / (r B) of credit from the
      adapter that runs, with r = merged / unmerged step time. It gets half of that if merged mode and F differ in their
      numbers of requests. Credits start at 0 and always sum to 0.
    - The requests of an adapter whose credit reaches the bound go first, before those of F, until the credit falls
      below half of the bound: each request that runs instead of one of F costs its adapter 1 / B. Merged mode does not
      choose an adapter whose debt (negative credit) exceeds the bound times the number of other adapters.

    Running requests that are not chosen are paused with their KV, and preempted if the chosen ones lack blocks, as by
    `preemptive`. A request whose adapter has no slot is not counted. Requests of the base model count as requests of
    one more adapter.

    Left out: an explicit merge operation. Weights count as merged whenever all requests of a step have the same adapter
    (`replica.adapters.unmerged_factor`), only in simulations; neither the engine nor vLLM merges.

    Source: Wu et al., "dLoRA: Dynamically Orchestrating Requests and Adapters for LoRA LLM Serving" (OSDI'24); code LLMServe/dLoRA-artifact.
    """

    traits = SchedulerTraits(is_work_conserving=True)

    def __init__(self, config: DloraConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        self.thresholds = Thresholds(config)
        self.merged: str | None = None
        """Adapter of merged mode, the only one whose requests run; None in unmerged mode."""
        self.credits: defaultdict[str, float] = defaultdict(float)
        self._bound = config.credit_bound
        self._speed = config.merged_step_s / config.unmerged_step_s
        self._max_batch = context.limits.max_batch_size
        self._ahead: list[str] = []
        """Adapters that go first because of their credit."""

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Run the chosen requests and pause the other running ones; if no chosen request can run, schedule all requests
        as `preemptive` does.
        """
        line = sorted([*replica.running(), *replica.waiting()], key=replica.urgency)
        if not line:
            return
        chosen = self._choose(line)
        running = [one for one in chosen if one.is_resident]
        kept = set(chosen)
        paused = [one for one in line if one.is_resident and one not in kept]
        waiting = iter([one for one in chosen if not one.is_resident])
        self._run([*running, *paused], waiting, replica, batch, frozenset(paused))
        if not batch.num_requests:
            super().schedule(replica, batch, now)

    def _choose(self, line: Sequence[RequestView]) -> list[RequestView]:
        by_arrival = list(line[: self._max_batch])
        first = self._by_credit(line)
        if first:
            self._leave_merged()
            taken = set(first)
            chosen = [*first, *(one for one in by_arrival if one not in taken)][: self._max_batch]
            self._settle(by_arrival, chosen, 1.0 / self._max_batch)
            return chosen
        counts = Counter(one.adapter for one in line)
        least = -self._bound * (len(self.credits) - 1)
        counts = Counter({name: count for name, count in counts.items() if self.credits[name] >= least})
        if not counts:
            self._leave_merged()
            return by_arrival
        favourite = max(counts, key=counts.__getitem__)
        if self.merged is None or counts[self.merged] < self.thresholds.stay * len(by_arrival):
            if counts[favourite] < self.thresholds.begin * len(by_arrival):
                self._leave_merged()
            else:
                self.thresholds.end_phase(was_merged=self.merged is not None)
                self.merged = favourite
        name = favourite if self.merged is None else self.merged
        num_merged = min(counts[name], self._max_batch)
        self.thresholds.count(num_merged, len(by_arrival), favourite, is_merged=self.merged is not None)
        if self.merged is None:
            return by_arrival
        chosen = [one for one in line if one.adapter == self.merged][: self._max_batch]
        self._settle(by_arrival, chosen, 1.0 / (self._speed * self._max_batch))
        return chosen

    def _leave_merged(self) -> None:
        if self.merged is not None:
            self.thresholds.end_phase(was_merged=True)
            self.merged = None

    def _by_credit(self, line: Sequence[RequestView]) -> list[RequestView]:
        """Return the requests, up to the batch limit, whose adapters have enough credit to go first; the adapter with
        the most credit comes first.
        """
        for request in line:
            self.credits[request.adapter] += 0.0  # adds the adapter if it is new
        ranked = sorted(self.credits, key=lambda name: -self.credits[name])
        ahead = self._ahead
        self._ahead = [
            name for name in ranked if self.credits[name] >= (self._bound / 2.0 if name in ahead else self._bound)
        ]
        return [one for name in self._ahead for one in line if one.adapter == name][: self._max_batch]

    def _settle(self, by_arrival: Sequence[RequestView], chosen: Collection[RequestView], price: float) -> None:
        """Transfer credit to the adapter of each request that is passed over: in `by_arrival`, but not in `chosen`.

        If equally many requests run instead (in `chosen`, but not in `by_arrival`), each of these costs its adapter
        `price`, and each passed request brings its adapter `price`. Otherwise each passed request brings its adapter
        half of `price`, paid by the adapter of the first chosen request.
        """
        due, kept = set(by_arrival), set(chosen)
        passed = [one.adapter for one in by_arrival if one not in kept]
        instead = [one.adapter for one in chosen if one not in due]
        if len(passed) != len(instead):
            price /= 2.0
            instead = [next(iter(chosen)).adapter] * len(passed)
        for name in passed:
            self.credits[name] += price
        for name in instead:
            self.credits[name] -= price


SPEC = PolicySpec(
    name="dlora",
    layer=Layer.REPLICA_SCHEDULER,
    config=DloraConfig,
    build=Dlora,
    summary="Steps with one merged adapter if it has most of the load; credits for requests that are passed over.",
    source="dLoRA (Wu et al., OSDI'24); code LLMServe/dLoRA-artifact",
    advice=(
        "Use it where a few adapters have most of the load and steps with several adapters take longer. Not on "
        "backends that never merge, or with many adapters of equal load: steps with one adapter then only cost "
        "throughput."
    ),
)
