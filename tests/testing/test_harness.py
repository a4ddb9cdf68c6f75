"""Does the harness that plug-in authors use show what the mechanism really does?"""

from __future__ import annotations

import json
import tracemalloc
from typing import Any, cast

import numpy as np
import pytest

from vajra_py.contract import DecodeStop, KeyMotion, PolicyContext, Refusal, RequestView, fill
from vajra_py.errors import ConfigError, PluginError, PolicyError, UnknownNameError
from vajra_py.latency import AffineModel
from vajra_py.testing.harness import Harness, HarnessOptions
from vajra_py.testing.strict import StrictBatch, StrictViews
from vajra_py.workload.request import RequestSpec

WORKLOAD = [RequestSpec(f"r{i}", 0.0, 20 + 37 * i % 90, 1 + 5 * i % 17) for i in range(12)]


def everything(request: Any, batch: Any, replica: Any) -> int:
    return int(min(batch.max_chunk(request), batch.tokens_left))


class WholePrompts:
    """A policy of the user's own."""

    def __init__(self, limits: Any = None) -> None:
        self.limits = limits
        self.departed: list[str] = []

    def schedule(self, replica: Any, batch: Any, now: float) -> None:
        fill(replica, batch, everything)

    def on_departures(self, requests: Any, now: float) -> None:
        self.departed.extend(request.request_id for request in requests)


def test_by_hand_and_by_the_simulator_decide_alike() -> None:
    by_hand = Harness("lrs", "round_robin", "dynamic_chunk", HarnessOptions(num_blocks=20))
    for spec in WORKLOAD:
        by_hand.submit_spec(spec)
    by_hand.steps_until_idle()
    simulated = Harness("lrs", "round_robin", "dynamic_chunk", HarnessOptions(num_blocks=20))
    assert list(simulated.run(WORKLOAD)) == list(by_hand.steps)
    assert simulated.now == by_hand.now
    assert simulated.controller.num_alive == 0


def test_a_step_tells_what_ran_when_and_for_how_long() -> None:
    options = HarnessOptions(latency=AffineModel(base_s=0.5, per_token_s=0.25))
    harness = Harness("fcfs", "round_robin", WholePrompts, options)
    harness.wait(2.0)
    harness.submit("a", 6, 2)
    step = harness.step()
    assert step is not None
    assert (step.formed_at, step.ended_at, step.duration_s) == (2.0, 4.0, 2.0)
    assert step.tokens == {"a": 6}
    assert step.admitted == ["a"]
    assert (step.free_blocks, step.num_waiting, step.ended) == (63, 0, ())
    last = harness.step()
    assert last is not None
    assert last.entries[0].num_computed_before == 6
    assert last.ended == ("a",)
    assert harness.step() is None
    assert harness.request("a").ended_at == 4.75


def test_policies_come_as_names_objects_and_functions() -> None:
    contexts: list[PolicyContext] = []

    def build(context: PolicyContext) -> WholePrompts:
        contexts.append(context)
        return WholePrompts()

    harness = Harness(("edf", {"min_deadline_s": 1.0}), "pull", build, HarnessOptions(num_replicas=3, max_batch_size=5))
    assert len(contexts) == len({id(one) for one in harness.replica_schedulers}) == 3, "each replica has its own"
    assert contexts[0].limits.max_batch_size == 5
    mine = WholePrompts()
    shared = Harness("fcfs", "round_robin", mine, HarnessOptions(num_replicas=2))
    assert shared.replica_schedulers == [mine, mine]
    shared.run(WORKLOAD)
    assert sorted(mine.departed) == sorted(spec.request_id for spec in WORKLOAD), "told once, though it serves two"


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="dynamic_chunk"):
        Harness("fcfs", "pull", "dynamic_chunks")
    with pytest.raises(ConfigError, match="chunk_size"):
        Harness("fcfs", "pull", ("fixed_chunk", {"chunk_size": -1}))
    with pytest.raises(PluginError, match="schedule"):
        Harness("fcfs", "pull", lambda context: object())


def test_a_policy_that_leaves_requests_standing_is_found_out() -> None:
    class Idle:
        def schedule(self, replica: Any, batch: Any, now: float) -> None: ...

    with pytest.raises(PolicyError, match="scheduled nothing"):
        Harness("fcfs", "pull", Idle()).run(WORKLOAD)


def test_refusals_of_the_real_builder_reach_the_policy() -> None:
    refusals: list[Refusal | None] = []

    class Greedy(WholePrompts):
        def schedule(self, replica: Any, batch: Any, now: float) -> None:
            batch.add_decodes()
            refusals.extend(batch.add(one, one.num_remaining_tokens) for one in list(replica.waiting()))

    harness = Harness(
        "fcfs", "round_robin", Greedy(), HarnessOptions(num_blocks=8, max_batch_size=2, watermark_blocks=2)
    )
    for name, tokens in [("a", 64), ("b", 40), ("c", 10), ("d", 10)]:
        harness.submit(name, tokens)
    harness.step()
    assert refusals == [None, Refusal.WATERMARK, None, Refusal.BATCH_FULL]


def test_lost_memory_is_noticed() -> None:
    harness = Harness("fcfs", "round_robin", WholePrompts())
    request = harness.submit("a", 40, 5)
    harness.step()
    harness.replica().memory.free(request)
    with pytest.raises(Exception, match=r"\ba\b|block"):
        harness.steps_until_idle()


def test_an_endless_run_is_cut_off() -> None:
    harness = Harness("fcfs", "round_robin", WholePrompts())
    harness.submit("a", 10, 100)
    with pytest.raises(RuntimeError, match="still busy after 20 steps"):
        harness.steps_until_idle(at_most=20)


def test_notes_of_a_decision_are_kept() -> None:
    class Explains(WholePrompts):
        def schedule(self, replica: Any, batch: Any, now: float) -> None:
            super().schedule(replica, batch, now)
            for request in replica.partial_prefills():
                batch.note(request, why="urgent", score=np.int64(2), share=np.float32(0.5), is_late=np.bool_(True))

    class ByName:
        key_motion = KeyMotion.STATIC

        def key(self, request: Any, now: float) -> float:
            return float(ord(request.request_id))

    harness = Harness(ByName(), "round_robin", Explains())
    harness.submit("a", 10)
    step = harness.step()
    assert step is not None
    assert json.dumps(step.notes) == '{"a": {"why": "urgent", "score": 2, "share": 0.5, "is_late": true}}'


def test_counting_everything_costs_what_was_used_not_what_there_is() -> None:
    """Blocks that were never taken are not listed: no more memory is needed for two hundred thousand than for some."""

    def peak_bytes(num_blocks: int) -> int:
        harness = Harness("fcfs", "round_robin", "fixed_chunk", HarnessOptions(num_blocks=num_blocks))
        harness.submit("a", 100, 5)
        tracemalloc.start()
        harness.steps_until_idle()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    assert peak_bytes(200_000) < 2 * peak_bytes(200)


def test_strict_views_hand_on_a_verb_that_they_do_not_know() -> None:
    """A new verb of the builder needs no line in them."""

    class Builder:
        def shelve(self, request: object, *, until: float, behind: object = None) -> DecodeStop:
            self.given = (request, until, behind)
            return DecodeStop(cast(RequestView, request), Refusal.TOKEN_BUDGET)

    views, target = StrictViews(), Builder()
    one, other = (Harness("fcfs", "round_robin", "fixed_chunk").submit(name, 8, 2) for name in "ab")
    batch: Any = StrictBatch(views, target, frozenset({"shelve"}))
    stop = batch.shelve(views.request(one), until=1.0, behind=views.request(other))
    assert target.given == (one, 1.0, other)
    assert stop.request is views.request(one)
    assert stop.refusal is Refusal.TOKEN_BUDGET
    with pytest.raises(AttributeError, match="take_away"):
        batch.take_away(views.request(one))
