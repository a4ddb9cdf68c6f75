"""What a replica does between two steps: parking, pipelining, ends of requests, aborts, runs of repeated steps."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from vajra_py.contract import BatchBuilder, LocalReplicaView, PreemptionMode
from vajra_py.contract.observer import EndReason, Observer, StepEnd
from vajra_py.errors import PolicyError
from vajra_py.metrics.tables.recorder import token_times
from vajra_py.runtime.kv import PrefixCacheOptions
from vajra_py.runtime.requests import decode_pool
from vajra_py.runtime.requests.request import Request, RequestState
from vajra_py.runtime.step.plan import StepPlan, StepResult
from vajra_py.testing import ByArrival, Harness, HarnessOptions, InTurn, PlainChunks

OPTIONS = HarnessOptions(block_size=4, num_blocks=20, max_batch_size=4)
SECOND = 10**12
Action = Callable[[LocalReplicaView, BatchBuilder], Any]


class Bench:
    """One replica on which any number of steps can be in flight."""

    def __init__(self, options: HarnessOptions = OPTIONS, scheduler: Any = None) -> None:
        self.action: Action | None = None
        self._plain = PlainChunks()
        self.harness = Harness(ByArrival(), InTurn(), scheduler or self, options)
        self.replica = self.harness.replica()
        self.now = 0

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        if self.action is None:
            self._plain.schedule(replica, batch, now)
        else:
            self.action(replica, batch)

    def submit(self, name: str, num_prompt: int, num_output: int = 100, **facts: Any) -> Request:
        return self.harness.submit(name, num_prompt, num_output, **facts)

    def form(self, action: Action | None = None) -> StepPlan:
        self.action = action
        self.now += SECOND
        plan = self.replica.next_plan(self.now)
        assert plan is not None
        return plan

    def complete(self, plan: StepPlan, **result: Any) -> list[tuple[str, EndReason]]:
        self.now += SECOND
        ended = self.replica.complete_step(plan, StepResult(**result), self.now)
        self.harness.controller.settle(ended, self.now)
        self.harness.controller.check_conservation()
        return [(request.request_id, reason) for request, reason in ended]

    def step(self, action: Action | None = None, **result: Any) -> list[tuple[str, EndReason]]:
        return self.complete(self.form(action), **result)


def test_nothing_to_do_is_no_step() -> None:
    bench = Bench()
    assert bench.replica.next_plan(0) is None
    assert bench.replica.num_steps == 0


def test_requests_end_where_the_truth_or_the_client_says() -> None:
    bench = Bench()
    bench.submit("stops", 4, 2)
    bench.submit("is cut", 4, 9, max_tokens=2)
    bench.submit("exact", 4, 2, max_tokens=2)
    assert bench.step() == []
    ends = bench.step()
    assert ends == [("stops", EndReason.STOP), ("is cut", EndReason.LENGTH), ("exact", EndReason.LENGTH)]
    assert [bench.harness.request(name).num_output_tokens for name, _ in ends] == [2, 2, 2]
    assert bench.replica.memory.used_blocks == 0


def test_an_executor_may_say_that_a_request_stopped() -> None:
    bench = Bench()
    a, b = bench.submit("a", 4), bench.submit("b", 4)
    bench.step()
    assert bench.step(stopped=frozenset({b})) == [("b", EndReason.STOP)]
    assert (a.num_output_tokens, b.num_output_tokens) == (2, 2)
    assert bench.step() == []
    assert a.num_output_tokens == 3


def test_tokens_are_told_when_their_step_ends() -> None:
    bench = Bench()
    a = bench.submit("a", 8, 4)
    bench.step(lambda replica, batch: batch.add(a, 4))
    assert a.num_output_tokens == 0
    for _ in range(4):
        bench.step()
    assert token_times(a).tolist() == [4.0, 6.0, 8.0, 10.0]
    assert (a.first_token_at, a.ended_at) == (4.0, 10.0)


def test_an_output_that_is_taken_back_takes_its_time_along() -> None:
    bench = Bench()
    a = bench.submit("a", 4, 9)
    log = array("q", [10, 20, 30])
    a.token_log[:] = [5, (log, 0, 2)]
    for left in ([5, (log, 0, 1)], [5], []):
        before = a.num_output_tokens
        a.take_back_output()
        assert (a.token_log, a.num_output_tokens) == (left, before - 1)


def test_decodes_know_which_tokens_begin_and_end_a_block() -> None:
    bench = Bench()
    requests = [bench.submit(str(size), size, 20) for size in (4, 5, 7)]
    bench.step()
    pool = bench.replica.running_set.pool

    def where(token: int) -> dict[str, int]:
        """Places in their blocks of the tokens beside the one of the last plan."""
        return {one.request_id: (one.num_computed_tokens - 1 + token) % 4 for one in requests}

    def named(members: Any) -> set[str]:
        return {one.request_id for one in members}

    for _ in range(9):
        plan = bench.form()
        assert named(pool.began_blocks()) == {name for name, place in where(0).items() if place == 0}
        assert named(pool.needing_blocks()) == {name for name, place in where(1).items() if place == 0}
        assert named(pool.filling_blocks()) == {name for name, place in where(1).items() if place == 3}
        bench.complete(plan)


@pytest.mark.parametrize("steps_per_log", [1, 3, 1 << 16])
def test_a_replica_that_never_rests_forgets_when_old_tokens_came(
    steps_per_log: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_pool, "STEPS_PER_LOG", steps_per_log)
    bench = Bench(replace(OPTIONS, num_blocks=40))
    a = bench.submit("a", 4, 60)
    for number in range(7):
        bench.submit(f"short {number}", 4, 2 + number)
        for _ in range(4):
            bench.step()
        if number == 3:
            bench.step(lambda replica, batch: batch.add(a, 1))
    late = bench.submit("late", 4, 6)
    while a.state is not RequestState.ENDED:
        bench.step()
    assert (len(token_times(a)), len(token_times(late))) == (60, 6)
    assert token_times(a).tolist() == [2.0 * step for step in range(1, 61)]
    assert max(len(entry[0]) for entry in late.token_log if isinstance(entry, tuple)) <= steps_per_log


def test_a_decode_that_is_left_out_keeps_its_place() -> None:
    bench = Bench()
    a, b, c = (bench.submit(name, 4) for name in "abc")
    bench.step()
    bench.step(lambda replica, batch: (batch.add(c, 1), batch.add(a, 1)))
    assert [one.num_output_tokens for one in (a, b, c)] == [2, 1, 2]
    seen: list[Any] = []
    plan = bench.form(lambda replica, batch: (seen.append(list(replica.decodes())), batch.add_decodes()))
    assert seen == [[a, b, c]]
    assert [entry.request for entry in plan.entries()] == [a, b, c]
    bench.complete(plan)
    assert [one.num_output_tokens for one in (a, b, c)] == [3, 2, 3]
    assert [len(token_times(one)) for one in (a, b, c)] == [3, 2, 3]


@pytest.mark.parametrize("mode", PreemptionMode)
def test_tokens_survive_a_preemption(mode: PreemptionMode) -> None:
    bench = Bench(replace(OPTIONS, host_blocks=8))
    a, b = bench.submit("a", 6, 8), bench.submit("b", 4, 30)
    for _ in range(4):
        bench.step()
    bench.step(lambda replica, batch: (batch.preempt(a, mode), batch.add_decodes()))
    assert (a.num_output_tokens, a.num_computed_tokens) == (4, 9 if mode is PreemptionMode.SWAP else 0)
    plan = bench.form()
    (again,) = [entry for entry in plan.entries() if entry.request is a]
    expected = (a, 1, 9, "resumed") if mode is PreemptionMode.SWAP else (a, 10, 0, "resumed")
    assert tuple(again) == expected, "what was generated is computed again, but not generated again"
    bench.complete(plan)
    assert a.num_output_tokens == 5
    while a.state is not RequestState.ENDED:
        bench.step()
    assert len(token_times(a)) == 8
    assert (a.num_preemptions, a.first_token_at) == (1, 2.0)
    assert b.num_preemptions == 0


def test_a_policy_that_only_preempts_is_stopped() -> None:
    bench = Bench(replace(OPTIONS, pipeline_stages=1))

    def shuffle(replica: LocalReplicaView, batch: BatchBuilder) -> None:
        if replica.num_running:
            batch.preempt(replica.running()[0])
        else:
            request = next(replica.waiting())
            batch.add(request, 1)
            batch.preempt(request)

    bench.submit("a", 4)
    with pytest.raises(
        PolicyError, match="policy Bench, replica 0, step 0: preempts in every step and never runs a request"
    ):
        bench.form(shuffle)


# Aborts


def test_whoever_runs_ends_with_its_step() -> None:
    bench = Bench()
    a, b = bench.submit("a", 4), bench.submit("b", 4)
    controller = bench.harness.controller
    plan = bench.form(lambda replica, batch: batch.add(a, 4))
    assert not controller.abort("a", EndReason.ABORTED, bench.now, "gone")
    assert controller.abort("b", EndReason.ABORTED, bench.now, "gone")
    assert (a.state, b.state) == (RequestState.RUNNING, RequestState.ENDED)
    assert bench.complete(plan) == [("a", EndReason.ABORTED)]
    assert (a.detail, a.num_output_tokens, a.ended_at) == ("gone", 1, 2.0)
    assert controller.num_ended == {EndReason.ABORTED: 2}


def test_who_was_aborted_in_a_step_gives_blocks_back_before_who_ends_with_it() -> None:
    bench = Bench()
    bench.submit("a", 4)
    ends = bench.submit("b", 4, num_output=1)
    plan = bench.form()
    (block,) = bench.replica.memory.block_table(ends)
    assert not bench.harness.controller.abort("a", EndReason.ABORTED, bench.now)
    assert bench.complete(plan) == [("b", EndReason.STOP), ("a", EndReason.ABORTED)]
    following = bench.submit("c", 4)
    bench.form()
    assert list(bench.replica.memory.block_table(following)) == [block], "the block that came back last is reused first"


def test_a_request_that_finishes_in_its_last_step_was_not_aborted() -> None:
    bench = Bench()
    bench.submit("a", 4, 1)
    plan = bench.form()
    assert not bench.harness.controller.abort("a", EndReason.ABORTED, bench.now)
    assert bench.complete(plan) == [("a", EndReason.STOP)]


def test_aborting_a_swapped_request_frees_the_host() -> None:
    bench = Bench(replace(OPTIONS, host_blocks=8))
    a, b = bench.submit("a", 8), bench.submit("b", 4)
    bench.step()
    bench.step(lambda replica, batch: (batch.preempt(a, PreemptionMode.SWAP), batch.add_decodes()))
    assert bench.replica.memory.free_host_blocks == 6
    assert bench.harness.controller.abort("a", EndReason.ABORTED, bench.now)
    assert bench.replica.memory.free_host_blocks == 8
    assert b.state is RequestState.RUNNING


# Pipelines


def test_several_steps_in_flight() -> None:
    """With two stages the next step is formed while the first is on its way; nobody is in both."""
    bench = Bench(replace(OPTIONS, pipeline_stages=2))
    a, b = bench.submit("a", 4, 3), bench.submit("b", 4, 3)
    first = bench.form(lambda replica, batch: batch.add(a, 4))
    second = bench.form(lambda replica, batch: (batch.add_running(), batch.add(b, 4)))
    assert [entry.request for entry in second.entries()] == [b]
    assert (a.in_flight, b.in_flight) == (True, True)
    bench.complete(first)
    assert (a.num_output_tokens, b.num_output_tokens) == (1, 0)
    third = bench.form(lambda replica, batch: batch.add_decodes())
    assert [entry.request for entry in third.entries()] == [a]
    bench.complete(second)
    bench.complete(third)
    assert (a.num_output_tokens, b.num_output_tokens) == (2, 1)


def test_a_long_prompt_follows_itself_through_the_stages() -> None:
    bench = Bench(replace(OPTIONS, pipeline_stages=3))
    a = bench.submit("a", 12, 2)
    plans = []
    for done in (0, 4, 8):
        assert bench.replica.num_pending_tokens == 12 - done
        plan = bench.form(lambda replica, batch: batch.add(a, 4))
        assert bench.replica.num_pending_tokens == 8 - done, "the rest of a prompt in flight is still to be computed"
        bench.replica.first_stage_completed(plan)
        plans.append(plan)
    assert a.num_computed_tokens == 12
    assert a.in_flight, "its last chunk must come out before it can decode"
    assert [bench.complete(plan) for plan in plans] == [[], [], []]
    assert (a.num_output_tokens, len(token_times(a))) == (1, 1)
    assert bench.step() == [("a", EndReason.STOP)]


def test_what_a_victim_had_in_the_pipeline_counts_for_nothing() -> None:
    bench = Bench(replace(OPTIONS, pipeline_stages=2))
    a, b = bench.submit("a", 12), bench.submit("b", 4)
    first = bench.form(lambda replica, batch: batch.add(a, 8))
    bench.replica.first_stage_completed(first)
    second = bench.form(lambda replica, batch: (batch.preempt(a), batch.add(b, 4)))
    bench.complete(first)
    assert (a.state, a.num_computed_tokens) == (RequestState.PREEMPTED, 0)
    third = bench.form(lambda replica, batch: batch.add(a, 12))
    bench.complete(second)
    bench.complete(third)
    assert (a.num_output_tokens, b.num_output_tokens) == (1, 1)


def test_a_chunk_of_an_aborted_prompt_is_its_last() -> None:
    bench = Bench(replace(OPTIONS, pipeline_stages=2))
    a = bench.submit("a", 40)
    plan = bench.form(lambda replica, batch: batch.add(a, 4))
    bench.harness.controller.abort("a", EndReason.ABORTED, bench.now)
    bench.replica.first_stage_completed(plan)
    bench.action = None
    assert bench.replica.next_plan(bench.now) is None, "it does not enter the pipeline again"
    assert bench.complete(plan) == [("a", EndReason.ABORTED)]


# When blocks can be found


@pytest.mark.parametrize(("cache_at_schedule", "cached"), [(True, 8), (False, 0)])
def test_blocks_are_found_from_their_step_on_or_after_it(cache_at_schedule: bool, cached: int) -> None:
    bench = Bench(replace(OPTIONS, prefix_cache=PrefixCacheOptions(), cache_at_schedule=cache_at_schedule))
    tokens = tuple(range(12))
    a = bench.submit("a", 12, 3, prompt_token_ids=tokens)
    b = bench.submit("b", 12, 3, prompt_token_ids=tokens)
    found: list[int] = []
    bench.step(lambda replica, batch: (batch.add(a, 12), found.append(batch.cached_tokens(b))))
    bench.step(lambda replica, batch: (found.append(batch.cached_tokens(b)), batch.add_decodes()))
    assert found == [cached, 8]


# Runs


class Ends(Observer):
    def __init__(self) -> None:
        self.rows: list[StepEnd] = []

    def on_step_end(self, step: StepEnd) -> None:
        self.rows.append(step)


def test_repeated_steps_are_the_same_one_by_one_or_at_once() -> None:
    rows, requests = [], []
    for at_once in (False, True):
        bench = Bench(scheduler=PlainChunks())
        ends = Ends()
        bench.harness.controller.watch((ends,))
        a, b = bench.submit("a", 6, 12), bench.submit("b", 3, 20)
        bench.complete(bench.form())
        plan = bench.form()
        num_steps = bench.replica.num_repeats(plan)
        assert num_steps == 10, "until a ends, the step in flight not counted"
        if at_once:
            bench.replica.note_waiting()
            ticks = array("q", [bench.now + SECOND + 2 * SECOND * step for step in range(num_steps)])
            bench.replica.complete_repeats(plan, ticks, ticks[-1])
            bench.now = ticks[-1]
        else:
            for _ in range(num_steps):
                bench.complete(plan)
                plan = bench.form()
        ended = bench.complete(plan)
        assert ended == [("a", EndReason.STOP)]
        rows.append([(row.step_index, row.features, row.free_blocks, row.num_running) for row in ends.rows])
        requests.append([(one.num_output_tokens, len(token_times(one)), one.num_computed_tokens) for one in (a, b)])
    assert rows[0] == rows[1]
    assert requests[0] == requests[1]


@pytest.mark.parametrize(
    "disturb",
    [
        lambda bench: bench.submit("late", 4),
        lambda bench: bench.harness.controller.watch((type("Nosy", (Observer,), {"wants_steps": True})(),)),
    ],
)
def test_nothing_is_repeated_when_something_waits_or_steps_are_watched(disturb: Callable[[Bench], Any]) -> None:
    bench = Bench(scheduler=PlainChunks())
    bench.harness.controller.watch(())
    bench.submit("a", 4)
    bench.complete(bench.form())
    plan = bench.form()
    assert bench.replica.num_repeats(plan) > 0
    disturb(bench)
    assert bench.replica.num_repeats(plan) == 0


def test_a_run_ends_before_blocks_are_lacking() -> None:
    bench = Bench(replace(OPTIONS, num_blocks=6), PlainChunks())
    bench.harness.controller.watch(())
    bench.submit("a", 4, 14)
    bench.submit("b", 3, 14)
    bench.complete(bench.form())
    plan = bench.form()
    num_steps = bench.replica.num_repeats(plan)
    ticks = array("q", [bench.now + SECOND * (step + 1) for step in range(num_steps)])
    bench.now = ticks[-1]
    bench.replica.complete_repeats(plan, ticks, bench.now)
    bench.complete(plan)
    victim = bench.form()
    assert [request.request_id for request, _ in victim.preempted] == ["b"], "the step after the run needs a victim"


def test_nothing_is_computed_of_what_a_lost_replica_had() -> None:
    bench = Bench()
    a, waits = bench.submit("a", 6, 9), bench.submit("waits", 70, 9)
    bench.step(lambda replica, batch: batch.add(a, 6))
    bench.step(lambda replica, batch: batch.add_decodes())
    assert a.num_computed_tokens > 0
    for request in (a, waits):
        bench.replica.lifecycle.requeue(request)
        assert (request.num_computed_tokens, request.replica_id, request.preempted_index) == (0, -1, 0)
