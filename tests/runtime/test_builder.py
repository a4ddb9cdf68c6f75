"""What the batch builder grants, what it refuses and why, and what a plan then looks like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from vajra_py.contract import BatchBuilder, BatchFeatures, LocalReplicaView, PreemptionMode, Refusal
from vajra_py.contract.observer import Observer, StepEnd
from vajra_py.errors import PolicyError
from vajra_py.latency import AffineModel
from vajra_py.runtime.kv import PrefixCacheOptions
from vajra_py.runtime.requests.request import RequestState
from vajra_py.runtime.step.plan import StepResult
from vajra_py.testing import ByArrival, Harness, HarnessOptions, InTurn, Shared, Step
from vajra_py.workload import PromptContent, RequestSpec

OPTIONS = HarnessOptions(block_size=4, num_blocks=20, max_batch_size=4, bytes_per_block=100)
CACHED = replace(OPTIONS, prefix_cache=PrefixCacheOptions())
SWAP = PreemptionMode.SWAP
Action = Callable[[LocalReplicaView, BatchBuilder], Any]


class Bench:
    """A replica whose steps are written in the test."""

    def __init__(self, options: HarnessOptions = OPTIONS, chooser: Any = None) -> None:
        self.action: Action = everything
        self.result: Any = None
        self.harness = Harness(ByArrival(), chooser or InTurn(), self, options)
        self.replica = self.harness.replica()

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        self.result = self.action(replica, batch)

    def submit(self, name: str, num_prompt: int, num_output: int = 100, prefix: int = 0) -> Any:
        """A request whose first `prefix` tokens are the same as everybody's."""
        own = ((name, num_prompt - prefix),) if num_prompt > prefix else ()
        content = PromptContent(((("shared", prefix),) if prefix else ()) + own)
        return self.harness.submit_spec(RequestSpec(name, 0.0, num_prompt, num_output, content=content))

    def step(self, action: Action | None = None) -> Step | None:
        self.action = action or everything
        return self.harness.step()

    def ask(self, action: Action) -> Any:
        """What an action returns in a step that is then formed with everything."""
        self.step(lambda replica, batch: (action(replica, batch), everything(replica, batch))[0])
        return self.result


def everything(replica: LocalReplicaView, batch: BatchBuilder) -> None:
    """All that runs, and all that waits, as far as it goes."""
    batch.add_running()
    for request in replica.waiting():
        if batch.slots_left and batch.tokens_left:
            batch.add(request, min(batch.max_chunk(request), batch.tokens_left))


# Refusals


def test_a_full_batch_and_a_spent_budget() -> None:
    bench = Bench(replace(OPTIONS, max_batch_size=2, max_batch_tokens=10))
    a, b, c = (bench.submit(name, 6) for name in "abc")

    def action(replica: LocalReplicaView, batch: BatchBuilder) -> list[Any]:
        answers = [batch.add(a, 6), batch.add(b, 5), batch.tokens_left, batch.add(b, 4), batch.slots_left]
        return [*answers, batch.add(c, 1), batch.add(a, 1)]

    bench.step(action)
    assert bench.result == [None, Refusal.TOKEN_BUDGET, 4, None, 0, Refusal.BATCH_FULL, Refusal.ALREADY_SCHEDULED]


def test_prompts_reserve_their_whole_length_or_just_the_chunk() -> None:
    for reserve_prompt, free in ((True, 10), (False, 18)):
        bench = Bench(replace(OPTIONS, reserve_prompt=reserve_prompt))
        request = bench.submit("a", 40)
        bench.step(lambda replica, batch, one=request: batch.add(one, 8))
        assert bench.replica.memory.free_blocks == free
    bench = Bench(replace(OPTIONS, reserve_prompt=False))
    request = bench.submit("a", 40)
    bench.step(lambda replica, batch: batch.add(request, 8, reserve_tokens=60))
    assert bench.replica.memory.free_blocks == 5


def test_spare_blocks_are_used_before_new_ones() -> None:
    bench = Bench(replace(OPTIONS, reserve_prompt=False))
    request = bench.submit("a", 8)
    bench.step(lambda replica, batch: batch.add(request, 4))
    bench.step(lambda replica, batch: batch.add(request, 4, reserve_tokens=16))
    assert bench.replica.memory.free_blocks == 16
    for _ in range(8):
        bench.step()
    assert bench.replica.memory.free_blocks == 16, "8 prompt tokens and 8 computed outputs fill the four blocks"
    bench.step()
    assert bench.replica.memory.free_blocks == 15


def test_too_few_blocks() -> None:
    bench = Bench()
    a, b = bench.submit("a", 60, 10), bench.submit("b", 30, 10)
    bench.step(lambda replica, batch: (batch.add(a, 10), batch.blocks_needed(b, 30), batch.add(b, 10)))
    assert bench.result == (None, 8, Refusal.KV_BLOCKS)


def test_the_watermark_guards_admission_while_something_runs() -> None:
    bench = Bench(replace(OPTIONS, watermark_blocks=4))
    a, b = bench.submit("a", 70, 4), bench.submit("b", 4, 4)
    bench.step(lambda replica, batch: (batch.add(a, 10), batch.add(b, 4)))
    assert bench.result == (None, Refusal.WATERMARK), "a is alone and may have what it needs; b is not"


def test_swapping_needs_room_on_the_host() -> None:
    bench = Bench(replace(OPTIONS, host_blocks=2))
    a, b = bench.submit("a", 12), bench.submit("b", 40)
    bench.step(lambda replica, batch: (batch.add(a, 12), batch.add(b, 8)))
    bench.step(lambda replica, batch: (batch.preempt(a, SWAP), batch.preempt(b, SWAP), batch.add_decodes()))
    assert bench.result == (Refusal.HOST_BLOCKS, None, None), "b holds ten blocks, but only two are computed"
    assert b.is_swapped
    assert b.num_computed_tokens == 8
    step = bench.step(lambda replica, batch: (batch.add(b, 32), batch.features().swap_bytes))
    assert bench.result == (None, 200)
    assert step is not None
    assert [entry.num_computed_before for entry in step.entries] == [8]


def test_what_an_empty_step_swapped_takes_its_time_in_the_next() -> None:
    """A step that only preempts does not run: its copies, and their time, belong to the one formed right after it."""
    bench = Bench(replace(OPTIONS, host_blocks=8))
    a, b = bench.submit("a", 12), bench.submit("b", 4)
    bench.step(lambda replica, batch: batch.add(a, 12))
    ends: list[StepEnd] = []

    class Watch(Observer):
        def on_step_end(self, step: StepEnd) -> None:
            ends.append(step)

    bench.harness.controller.watch((Watch(),))
    bench.action = lambda replica, batch: batch.preempt(a, SWAP) if a.is_resident else batch.add(b, 4)
    plan = bench.replica.next_plan(10**12)
    assert plan is not None
    assert plan.features == BatchFeatures().with_chunk(4, 0)._replace(swap_bytes=300)
    bench.replica.complete_step(plan, StepResult(), 2 * 10**12)
    assert [(end.num_preempted, end.features.swap_bytes) for end in ends] == [(1, 300)]
    bench.action = everything
    later = bench.replica.next_plan(3 * 10**12)
    assert later is not None
    assert later.features.swap_bytes == 300, "the way back, and nothing twice"


def test_who_gave_way_stays_out_of_the_step() -> None:
    bench = Bench()
    a = bench.submit("a", 12)
    bench.step()
    step = bench.step(lambda replica, batch: give_way(a, batch))
    assert step is not None
    assert step.admitted == ["a"]
    assert a.num_preemptions == 1


def give_way(request: Any, batch: BatchBuilder) -> None:
    """Preempt it once; afterwards admit it."""
    if request.is_resident:
        assert batch.preempt(request) is None
        assert batch.num_preempted == 1
        assert batch.add(request, 1) is Refusal.JUST_PREEMPTED
    else:
        assert batch.add(request, batch.max_chunk(request)) is None


def test_a_request_in_the_pipeline_cannot_be_touched() -> None:
    bench = Bench(replace(OPTIONS, pipeline_stages=2))
    a = bench.submit("a", 12)
    bench.action = lambda replica, batch: batch.add(a, 4)
    assert bench.replica.next_plan(0) is not None
    bench.submit("b", 4)
    bench.action = lambda replica, batch: (batch.add(a, 4), batch.preempt(a), everything(replica, batch))
    assert bench.replica.next_plan(1) is not None
    assert bench.result[:2] == (Refusal.IN_FLIGHT, Refusal.IN_FLIGHT)


def test_busy_groups_take_nobody_on() -> None:
    bench = Bench(replace(OPTIONS, kv_parallel_groups=2, kv_group_tokens=1000, num_blocks=600, max_model_len=2000))
    requests = [bench.submit(name, 600, 4) for name in "abc"]
    bench.step(lambda replica, batch: [batch.add(request, 520) for request in requests])
    assert bench.result == [None, None, Refusal.GROUP_BUSY], "each of the two groups computes 520 tokens already"


# Nonsense


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda batch, a, other: batch.add(a, 0), "request a, step 0: cannot add 0 tokens. A chunk has at least 1"),
        (
            lambda batch, a, other: batch.add(a, 13),
            "request a, step 0: cannot add 13 tokens. Its next chunk may have at most 12",
        ),
        (
            lambda batch, a, other: batch.add(a, 12 / 2),
            "request a, step 0: cannot add 6.0 tokens. Allowed: whole numbers",
        ),
        (lambda batch, a, other: batch.preempt(a), "request a, step 0: cannot preempt what is waiting"),
        (
            lambda batch, a, other: batch.add(other, 1),
            "request other, step 0: it is not one of this replica's requests",
        ),
        (lambda batch, a, other: batch.add(None, 1), "step 0: AttributeError"),
    ],
)
def test_nonsense_ends_the_run_with_names(action: Any, message: str) -> None:
    bench = Bench(replace(OPTIONS, num_replicas=2))
    other, a = bench.submit("other", 4), bench.submit("a", 12)
    assert (a.replica_id, other.replica_id) == (0, 1)
    with pytest.raises(PolicyError, match="policy Bench, ") as caught:
        bench.step(lambda replica, batch: action(batch, a, other))
    assert message in str(caught.value)


# Bulk operations


def test_decodes_go_on_where_they_stopped() -> None:
    bench = Bench(replace(OPTIONS, num_blocks=7))
    a, b, c = (bench.submit(name, 8) for name in "abc")
    bench.step()
    assert [one.is_resident for one in (a, b, c)] == [True, True, True]

    def action(replica: LocalReplicaView, batch: BatchBuilder) -> Any:
        first = batch.add_decodes()
        assert first is not None
        batch.preempt(c)
        return first, batch.add_decodes(), [one in batch for one in (a, b, c)]

    bench.step(action)
    stop, second, inside = bench.result
    assert (stop.request, stop.refusal) == (b, Refusal.KV_BLOCKS), "a took the last free block"
    assert second is None
    assert inside == [True, True, False]


def test_decodes_and_running_do_not_mix_up_what_is_left() -> None:
    bench = Bench(replace(OPTIONS, max_batch_tokens=8))
    decode, long = bench.submit("decode", 2), bench.submit("long", 30)
    bench.step(lambda replica, batch: (batch.add(decode, 2), batch.add(long, 6)))
    late = bench.submit("late", 4)
    bench.step(lambda replica, batch: batch.add(late, 4))

    def action(replica: LocalReplicaView, batch: BatchBuilder) -> Any:
        batch.add(decode, 1)
        stop = batch.add_running(3)
        batch.preempt(long)
        return stop, batch.add_decodes(), long in batch, late in batch

    bench.step(action)
    assert bench.result == (None, None, False, True)

    def stopped(replica: LocalReplicaView, batch: BatchBuilder) -> Any:
        return batch.add_running(), batch.add_decodes(), [one in batch for one in (long, decode, late)]

    bench.step(lambda replica, batch: batch.add(long, 8))
    bench.step(stopped)
    assert bench.result == (None, None, [True, True, True])


def test_the_bulk_of_decodes_is_worth_its_parts() -> None:
    """One call for all decodes, or one for each: the plan is the same."""
    plans = []
    for action in (
        lambda replica, batch: batch.add_decodes(),
        lambda replica, batch: [batch.add(one, 1) for one in replica.decodes()],
        lambda replica, batch: batch.add_running(),
        lambda replica, batch: (batch.add(replica.decodes()[0], 1), batch.add_decodes()),
    ):
        bench = Bench()
        for name, length in (("a", 3), ("b", 4), ("c", 5)):
            bench.submit(name, length)
        bench.step()
        bench.action = action
        plan = bench.replica.next_plan(10)
        assert plan is not None
        entries = [(entry.request.request_id, *entry[1:]) for entry in plan.entries()]
        plans.append((entries, plan.features, plan.free_blocks, plan.num_running))
    assert plans.count(plans[0]) == len(plans)
    assert [entry[0] for entry in plans[0][0]] == ["a", "b", "c"]
    assert plans[0][1] == BatchFeatures(num_decodes=3, decode_context_tokens=12)


def test_entries_stand_in_the_order_in_which_they_were_added() -> None:
    bench = Bench()
    for name in "abcd":
        bench.submit(name, 8)
    bench.step(lambda replica, batch: [batch.add(one, 8) for one in list(replica.waiting())[:2]])
    c, d = bench.harness.request("c"), bench.harness.request("d")
    step = bench.step(lambda replica, batch: (batch.add(d, 4), batch.add_decodes(), batch.add(c, 4)))
    assert step is not None
    assert list(step.tokens) == ["d", "a", "b", "c"]
    step = bench.step(lambda replica, batch: (batch.add(c, 4), batch.add_running()))
    assert step is not None
    assert list(step.tokens) == ["a", "b", "d", "c"], "running entries in order of admission"


# Leaving a batch


def test_a_victim_takes_its_tokens_out_of_the_batch() -> None:
    bench = Bench(replace(OPTIONS, max_batch_tokens=16, host_blocks=8))
    a, b, c = (bench.submit(name, 12) for name in "abc")
    bench.step(lambda replica, batch: (batch.add(a, 12), batch.add(b, 4)))

    def action(replica: LocalReplicaView, batch: BatchBuilder) -> Any:
        batch.preempt(a, SWAP)
        batch.add(b, 6)
        batch.add(c, 5)
        before = batch.features(), batch.tokens_left, batch.num_requests
        batch.preempt(b)
        return before, (batch.features(), batch.tokens_left, batch.num_requests), b in batch

    bench.step(action)
    before, after, inside = bench.result
    assert before == (BatchFeatures().with_chunk(6, 4).with_chunk(5, 0)._replace(swap_bytes=300), 5, 2)
    assert after == (BatchFeatures().with_chunk(5, 0)._replace(swap_bytes=300), 11, 1), "what was swapped stays swapped"
    assert not inside
    assert b.state is RequestState.PREEMPTED


def test_nobody_leaves_on_whom_another_builds() -> None:
    bench = Bench(CACHED)
    a, b = bench.submit("a", 12, prefix=8), bench.submit("b", 12, prefix=8)
    bench.step(lambda replica, batch: (batch.add(a, 12), batch.add(b, 4), batch.preempt(a), batch.preempt(b)))
    assert bench.result == (None, None, Refusal.IN_FLIGHT, None), "b attached what a is about to compute"
    assert a.is_resident
    assert b.num_cached_tokens == 8


def test_what_a_victim_would_have_computed_is_not_found() -> None:
    bench = Bench(CACHED)
    a, b = bench.submit("a", 12, prefix=8), bench.submit("b", 12, prefix=8)
    bench.step(lambda replica, batch: (batch.add(a, 12), batch.preempt(a), batch.cached_tokens(b), batch.add(b, 12)))
    assert bench.result == (None, None, 0, None)


# Prefix cache


def test_chunks_begin_behind_the_cached_prefix() -> None:
    bench = Bench(CACHED)
    a = bench.submit("a", 12, 1, prefix=12)
    bench.step()
    assert a.state is RequestState.ENDED
    b = bench.submit("b", 12, prefix=12)
    step = bench.step(
        lambda replica, batch: (batch.cached_tokens(b), batch.max_chunk(b), batch.add(b, batch.max_chunk(b)))
    )
    assert bench.result == (8, 4, None), "one token at least is computed, and blocks are attached whole"
    assert step is not None
    assert [(entry.num_tokens, entry.num_computed_before) for entry in step.entries] == [(4, 8)]
    assert b.num_cached_tokens == 8


def test_looking_at_the_shared_queue_leaves_nothing_behind() -> None:
    bench = Bench(replace(CACHED, num_replicas=2), Shared())
    a = bench.submit("a", 12)
    other = bench.harness.replica(1)
    bench.action = lambda replica, batch: batch.cached_tokens(a) if replica.replica_id else everything(replica, batch)
    assert other.next_plan(0) is None
    assert not other.memory.is_registered(a)
    assert bench.harness.step(0) is not None
    assert a.replica_id == 0


# Predictions and KV parallelism


def test_predictions_are_what_the_step_then_takes() -> None:
    bench = Bench()
    a, b = bench.submit("a", 12), bench.submit("b", 20)
    bench.step(lambda replica, batch: batch.add(a, 12))

    def action(replica: LocalReplicaView, batch: BatchBuilder) -> Any:
        answers = []
        for request, num_tokens in ((a, 1), (b, 9)):
            answers.append(batch.predicted_time_with(request, num_tokens))
            batch.add(request, num_tokens)
            answers.append(batch.predicted_time())
        return answers

    step = bench.step(action)
    assert step is not None
    assert bench.result[0] == bench.result[1]
    assert bench.result[2] == bench.result[3] == pytest.approx(step.duration_s)


def test_chunks_end_at_the_boundary_of_a_kv_parallel_group() -> None:
    bench = Bench(replace(OPTIONS, kv_parallel_groups=3, kv_group_tokens=16, num_blocks=24))
    a = bench.submit("a", 40)
    chunks = [bench.ask(lambda replica, batch: batch.max_chunk(a)) for _ in range(4)]
    assert chunks == [16, 16, 8, 1]
    with pytest.raises(PolicyError, match="Its next chunk may have at most 1"):
        bench.step(lambda replica, batch: batch.add(a, 2))


def test_a_step_is_as_slow_as_its_slowest_group() -> None:
    bench = Bench(replace(OPTIONS, kv_parallel_groups=2, kv_group_tokens=16, num_blocks=16))
    long, short = bench.submit("long", 24, 20), bench.submit("short", 4, 20)
    bench.step(lambda replica, batch: (batch.add(long, 16), batch.features()))
    assert bench.result[1] == BatchFeatures().with_chunk(16, 0)
    bench.step(lambda replica, batch: (batch.add(long, 8), batch.add(short, 4), batch.features(), batch.num_tokens))
    groups = [BatchFeatures().with_chunk(8, 16), BatchFeatures().with_chunk(8, 0)]
    features, num_tokens = bench.result[2:]
    assert num_tokens == 12
    assert features.num_merged_tokens == 8, "both groups work on the long request's chunk"
    assert features.prefill_tokens == 12, "and the slower one on the short request too"
    assert groups[0].prefill_tokens == 8


def test_reasons_are_kept_for_those_who_watch() -> None:
    bench = Bench()
    a = bench.submit("a", 4)
    step = bench.step(lambda replica, batch: (batch.note(a, slack=0.5), batch.add(a, 4), batch.note(a, rule="first")))
    assert step is not None
    assert step.notes == {"a": {"slack": 0.5, "rule": "first"}}
    bench.harness.controller.watch(())
    bench.action = lambda replica, batch: (batch.note(a, slack=0.5), batch.add_decodes())
    plan = bench.replica.next_plan(10**12)
    assert plan is not None
    assert plan.notes == {}


@pytest.mark.parametrize("num_done", [0, 5])
def test_one_token_of_a_prompt_is_predicted_as_a_chunk(num_done: int) -> None:
    latency = AffineModel(base_s=0.01, per_token_s=0.001, per_decode_context_token_s=0.1)
    bench = Bench(replace(OPTIONS, latency=latency))
    new = bench.submit("new", 9)
    bench.submit("old", 6)
    if num_done:
        bench.step(lambda replica, batch: batch.add(new, num_done))

    def times(replica: LocalReplicaView, batch: BatchBuilder) -> tuple[float, float]:
        before = batch.predicted_time_with(new, 1)
        assert batch.add(new, 1) is None
        return before, batch.predicted_time()

    before, after = bench.ask(times)
    assert before == pytest.approx(after) == pytest.approx(0.011)


def test_a_chunk_that_fits_what_is_left_may_be_too_long_for_its_group() -> None:
    bench = Bench(replace(OPTIONS, kv_parallel_groups=2, kv_group_tokens=16, num_blocks=16, max_batch_tokens=100))
    request = bench.submit("long", 30)
    bench.step(lambda replica, batch: batch.add(request, 10))
    with pytest.raises(PolicyError, match=r"cannot add 20 tokens. Its next chunk may have at most 6"):
        bench.step(lambda replica, batch: batch.add(request, 20))


def test_decodes_are_added_once_however_often_one_asks() -> None:
    bench = Bench()
    for name in ("a", "b"):
        bench.submit(name, 3)
    bench.step()

    def twice(replica: LocalReplicaView, batch: BatchBuilder) -> tuple[int, int, int]:
        batch.add_decodes()
        first = batch.num_tokens
        batch.add_decodes()
        return first, batch.num_tokens, batch.slots_left

    step = bench.step(twice)
    assert bench.result == (2, 2, 2)
    assert step is not None
    assert step.tokens == {"a": 1, "b": 1}


def test_each_decode_takes_one_slot_and_one_token() -> None:
    bench = Bench(replace(OPTIONS, max_batch_tokens=9))
    requests = [bench.submit(name, 2) for name in "abc"]
    bench.step()

    def one_by_one(replica: LocalReplicaView, batch: BatchBuilder) -> Any:
        return [(batch.add(one, 1), batch.slots_left, batch.tokens_left) for one in requests]

    step = bench.step(one_by_one)
    assert bench.result == [(None, 3, 8), (None, 2, 7), (None, 1, 6)]
    assert step is not None
    assert step.num_tokens == 3
