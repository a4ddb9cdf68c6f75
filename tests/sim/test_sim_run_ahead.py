"""Steps worked out at once, or asked for one by one: not a single figure may differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vajra_py.contract import KeyMotion, Layer
from vajra_py.contract.observer import Observer, StepRun
from vajra_py.contract.policies import traits_of
from vajra_py.latency import AffineModel, Variation, factors_among
from vajra_py.runtime.kv import PrefixCacheOptions
from vajra_py.runtime.requests.request import RequestFacts
from vajra_py.sim.simulator import SimulationOptions
from vajra_py.testing import ByArrival, Harness, HarnessOptions, InTurn, PlainChunks, policies_under_test
from vajra_py.testing.scenarios import (
    ALL_AT_ONCE,
    LEAVING,
    LIGHT,
    LONG_AND_SHORT,
    OVERLOADED,
    SHARED_PREFIXES,
    STARVED,
    SWAPPING,
    Policies,
    Rules,
    Scenario,
    simulate,
)
from vajra_py.testing.subject import context_of
from vajra_py.workload import RequestSpec

SITUATIONS = (LIGHT, OVERLOADED, LONG_AND_SHORT, STARVED, SWAPPING, LEAVING, SHARED_PREFIXES)


def both_ways(scenario: Scenario, policies: Policies, num_replicas: int, *, repeats: bool = True) -> None:
    asked, ahead = (
        simulate(
            scenario,
            policies,
            Rules(num_replicas, detailed=False, fast_forward=fast_forward, check_every_step=False),
        )
        for fast_forward in (False, True)
    )
    assert asked.num_fast_forwarded == 0
    assert (ahead.num_fast_forwarded > 0) == repeats, "else a run is compared with its like"
    assert asked.steps == ahead.steps
    assert asked.ends == ahead.ends


def combinations() -> list[tuple[Scenario, tuple[str, ...], int]]:
    """Every installed policy in some combination; which meet is drawn once and for all."""
    names = {layer: [spec.name for spec in policies_under_test() if spec.layer is layer] for layer in Layer}
    stream = np.random.default_rng(8)
    drawn = []
    for number in range(max(map(len, names.values())) * 2):
        chosen = tuple(
            names[layer][number % len(names[layer])]
            if number < len(names[layer])
            else names[layer][int(stream.integers(len(names[layer])))]
            for layer in Layer
        )
        if chosen[2] == "space_sharing" and chosen[0] not in ("lrs", "edf"):
            chosen = ("lrs", *chosen[1:])  # it needs slack
        situation = SITUATIONS[number % len(SITUATIONS)]
        if chosen[2] == "minivllm" and situation in (OVERLOADED, LONG_AND_SHORT):
            situation = STARVED  # it refuses every one of these, or has no step twice
        drawn.append((situation, chosen, 1 + number % 3))
    return drawn


@pytest.mark.parametrize(
    ("scenario", "names", "num_replicas"), combinations(), ids=lambda value: str(getattr(value, "name", value))
)
def test_installed_policies(scenario: Scenario, names: tuple[str, ...], num_replicas: int) -> None:
    both_ways(scenario, Policies(*names), num_replicas, repeats=may_repeat(names))


def may_repeat(names: tuple[str, ...]) -> bool:
    """Return True if equal steps may be computed at once: the replica scheduler repeats them, and nobody listens to each."""
    if names[-1] == "orca":  # whose steps differ from one to the next
        return False
    specs = {(spec.layer, spec.name): spec for spec in policies_under_test()}
    chosen = [specs[key] for key in zip(Layer, names, strict=True)]
    policies = [spec.build(spec.config(), context_of(LIGHT)) for spec in chosen]
    hears_each = [one for one in policies if hasattr(one, "on_step_end") and not hasattr(one, "on_step_run")]
    return bool(traits_of(policies[-1]).repeats_decodes) and not hears_each


class VariedSteps(AffineModel):
    """Equal steps differ."""

    variation = Variation(factors_among([0.4, 0.9, 1.0, 1.1, 3.0]), factors_among([0.9, 1.1]))


CONSTANT_STEPS = AffineModel(0.004, 0.0002, per_decode_context_token_s=1e-6)
VARIED_STEPS = VariedSteps(0.004, 0.0002, per_decode_context_token_s=1e-6)


REQUESTS = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 1, 30, 400]),
        st.integers(1, 150),
        st.integers(1, 120),
        st.sampled_from([None, None, 50, 300]),
        st.sampled_from([None, None, None, 20, 250]),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=80)
@given(
    requests=REQUESTS,
    chooser=st.sampled_from(["pull", "round_robin", ("least_loaded", {"by": "tokens"}), "power_of_two"]),
    prioritizer=st.sampled_from(["fcfs", "lrs"]),
    num_blocks=st.integers(18, 60),
    max_batch_size=st.sampled_from([1, 2, 8]),
    horizon_s=st.sampled_from([None, 0.25]),
    cached=st.booleans(),
    scheduler=st.sampled_from([("fixed_chunk", {"chunk_size": 64}), ("fixed_chunk", {"chunk_size": 200}), "vllm_v1"]),
    reserve_prompt=st.booleans(),
    latency=st.sampled_from([CONSTANT_STEPS, VARIED_STEPS]),
)
def test_random_workloads(
    requests: Sequence[tuple[int, int, int, int | None, int | None]],
    chooser: Any,
    prioritizer: str,
    num_blocks: int,
    max_batch_size: int,
    horizon_s: float | None,
    cached: bool,
    scheduler: Any,
    reserve_prompt: bool,
    latency: AffineModel,
) -> None:
    def workload(stream: np.random.Generator, num_replicas: int) -> list[RequestSpec]:
        specs, now_ms = [], 0
        for index, (gap_ms, num_prompt, num_output, expires_ms, _) in enumerate(requests):
            now_ms += gap_ms
            expires_s = None if expires_ms is None else expires_ms / 1000
            specs.append(RequestSpec(f"r{index}", now_ms / 1000, num_prompt, num_output, expires_after_s=expires_s))
        return specs

    options = HarnessOptions(
        num_blocks=num_blocks,
        max_batch_size=max_batch_size,
        num_replicas=2,
        reserve_prompt=reserve_prompt,
        prefix_cache=PrefixCacheOptions() if cached else None,
        latency=latency,
    )
    results = []
    for fast_forward in (False, True):
        harness = Harness(prioritizer, chooser, scheduler, replace(options, reserves_growth=fast_forward))
        rows = Rows()
        harness.controller.watch((rows,))
        rules = SimulationOptions(fast_forward=fast_forward, horizon_s=horizon_s, drain=horizon_s is None)
        simulator = harness.simulator(rules)
        specs = workload(np.random.default_rng(0), 2)
        for spec, request in zip(specs, requests, strict=True):
            if request[4] is not None:
                simulator.abort_at(spec.arrived_at + request[4] / 1000, spec.request_id)
        simulator.run(specs)
        harness.controller.check_conservation()
        alive = [(one.request_id, one.num_output_tokens, one.num_computed_tokens) for one in harness.controller.alive()]
        results.append(
            (sorted(rows.steps, key=lambda row: row[:2]), rows.ends, alive, simulator.now, simulator.num_steps)
        )
    assert results[0] == results[1]


class Rows(Observer):
    """What steps and requests came to, and how many steps came in runs."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, ...]] = []
        self.ends: list[tuple[Any, ...]] = []
        self.num_in_runs = 0

    def on_step_end(self, step: Any) -> None:
        finished = tuple((request.request_id, reason) for request, reason in step.finished)
        figures = (step.features, step.free_blocks, step.num_waiting, step.num_running, step.num_preempted)
        self.steps.append((step.replica_id, step.step_index, step.formed_at, step.ended_at, *figures, finished))

    def on_step_run(self, run: StepRun) -> None:
        self.num_in_runs += len(run.ended_at)
        super().on_step_run(run)

    def on_ended(self, request: Any, reason: Any, detail: str, now: float) -> None:
        self.ends.append((request.request_id, reason, now, request.num_output_tokens, request.first_token_at))


def test_steps_that_vary_come_in_runs_too_and_differ_by_seed() -> None:
    def steps(seed: int, *, fast_forward: bool) -> list[tuple[Any, ...]]:
        options = HarnessOptions(
            latency=VARIED_STEPS, seed=seed, num_blocks=400, max_model_len=4000, reserves_growth=fast_forward
        )
        harness = Harness("fcfs", "round_robin", "fixed_chunk", options)
        rows = Rows()
        harness.controller.watch((rows,))
        harness.simulator(SimulationOptions(fast_forward=fast_forward)).run([RequestSpec("r", 0.0, 50, 3000)])
        assert (rows.num_in_runs > 2900) == fast_forward
        return rows.steps

    ahead = steps(1, fast_forward=True)  # more steps than factors are drawn at once
    assert ahead == steps(1, fast_forward=False)
    assert ahead != steps(2, fast_forward=True)
    decodes = [row for row in ahead if not row[4].num_prefills]
    ratios = [(row[3] - row[2]) / VARIED_STEPS.stage_time_s(row[4]) for row in decodes]
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.05)
    shares = np.unique(np.round(ratios, 6), return_counts=True)
    assert shares[0] == pytest.approx(VARIED_STEPS.variation.decodes, abs=1e-4)
    assert shares[1] / len(ratios) == pytest.approx(np.full(5, 0.2), abs=0.04)


@pytest.mark.parametrize(
    ("options", "policies", "in_runs"),
    [
        (HarnessOptions(), ("fcfs", "pull", "fixed_chunk"), True),
        (HarnessOptions(), ("lrs", "least_loaded", "dynamic_chunk"), True),
        (HarnessOptions(pipeline_stages=2), ("fcfs", "pull", "fixed_chunk"), False),
    ],
)
def test_most_steps_of_a_long_answer_come_in_runs(
    options: HarnessOptions, policies: Sequence[str], in_runs: bool
) -> None:
    harness = Harness(*policies, replace(options, num_blocks=200))
    rows = Rows()
    harness.controller.watch((rows,))
    harness.simulator(SimulationOptions()).run([RequestSpec(f"r{index}", 0.0, 50, 400) for index in range(4)])
    assert len(rows.steps) >= 400
    assert (rows.num_in_runs > 0.9 * len(rows.steps)) == in_runs


class LeastServedOfAll(ByArrival):
    """Told when requests come and go, it looks at all that run anywhere: at figures that repeated steps keep moving."""

    key_motion = KeyMotion.STATIC

    def __init__(self) -> None:
        self._alive: dict[Any, None] = {}
        self._seen = 0

    def on_arrivals(self, requests: Sequence[Any], now: float) -> None:
        self._alive.update(dict.fromkeys(requests))
        self._look()

    def on_departures(self, requests: Sequence[Any], now: float) -> None:
        for request in requests:
            del self._alive[request]
        self._look()

    def key(self, request: Any, now: float) -> float:
        return request.index * self._seen % 7

    def _look(self) -> None:
        self._seen += 1 + sum(one.num_output_tokens + one.num_computed_tokens for one in self._alive)


class LooksOnAdmission(ByArrival):
    """Told of admissions alone, it reads the counters of everything that was admitted anywhere, whenever one is."""

    key_motion = KeyMotion.ARBITRARY

    def __init__(self) -> None:
        self._admitted: dict[Any, None] = {}
        self._seen = 0

    def on_admission(self, request: Any, replica_id: int, now: float) -> None:
        self._admitted[request] = None
        self._seen += self._sum()

    def key(self, request: Any, now: float) -> float:
        return float(request.index * self._seen % 7)

    def _sum(self) -> int:
        return sum(one.num_output_tokens + one.num_computed_tokens for one in self._admitted)


class LooksAtOthers(LooksOnAdmission):
    """Its keys read the counters of everything that was admitted anywhere, whenever they are read."""

    def key(self, request: Any, now: float) -> float:
        return float(request.index * self._sum() % 7)


@pytest.mark.parametrize("scenario", [LIGHT, OVERLOADED, STARVED, LEAVING, ALL_AT_ONCE], ids=lambda one: one.name)
@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("prioritizer", [LeastServedOfAll, LooksOnAdmission, LooksAtOthers])
def test_policies_that_hold_requests_see_the_same_figures(
    prioritizer: type[Any], scenario: Scenario, num_replicas: int
) -> None:
    policies = Policies(lambda context: prioritizer(), InTurn(), lambda context: PlainChunks())
    both_ways(scenario, policies, num_replicas)


def test_arrivals_and_ends_are_told_without_forming_every_step_by_itself() -> None:
    def num_asked(prioritizer: Any) -> int:
        scheduler = PlainChunks()
        asked = 0

        class Counted:
            traits = scheduler.traits

            def schedule(self, replica: Any, batch: Any, now: float) -> None:
                nonlocal asked
                asked += 1
                scheduler.schedule(replica, batch, now)

        harness = Harness(prioritizer, InTurn(), Counted(), HarnessOptions(num_blocks=64, check_conservation=False))
        harness.controller.watch(())
        harness.run([RequestSpec("a", 0.0, 16, 200)])
        return asked

    class ToldOfSteps(ByArrival):
        def on_step_end(self, step: Any) -> None: ...

    assert num_asked(LeastServedOfAll()) == num_asked(ByArrival()) < 20
    assert num_asked(ToldOfSteps()) == 200


def test_a_replicaset_is_selected_once_for_an_arrival() -> None:
    harness = Harness(LeastServedOfAll(), InTurn(), PlainChunks(), HarnessOptions(num_blocks=64))
    asked = []

    def select(facts: RequestFacts) -> str:
        asked.append(facts.request_id)
        return harness.replicaset.name

    harness.controller.select = select
    harness.run([RequestSpec(name, 0.1 * index, 16, 50) for index, name in enumerate("abc")])
    assert asked == ["a", "b", "c"]
