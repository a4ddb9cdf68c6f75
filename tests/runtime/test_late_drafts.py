"""Drafts of a step that ends before it is known which of them are accepted: the next step is formed meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.test_replica import SECOND, Bench
from vajra_py.contract import BatchBuilder, LocalReplicaView, PreemptionMode, Refusal
from vajra_py.contract.observer import EndReason
from vajra_py.metrics.tables.recorder import token_times
from vajra_py.runtime.requests.request import Request, RequestState
from vajra_py.runtime.step.builder_options import DraftRules
from vajra_py.runtime.step.plan import StepPlan
from vajra_py.testing import HarnessOptions

THREE = DraftRules(num_tokens=3, max_tokens=3, keeps_blocks=True, past_max_tokens=True)


class Ahead(Bench):
    """A replica whose steps end when the next one is formed, and whose drafts are verified after that."""

    def __init__(self, **options: Any) -> None:
        given = {"block_size": 4, "num_blocks": 20, "max_batch_size": 4, "drafts": THREE} | options
        super().__init__(HarnessOptions(**given))

    def begin(self, *requests: tuple[str, int, int]) -> StepPlan:
        """Compute prompts of these lengths, with outputs of these lengths; return the first step with drafts."""
        for name, num_prompt, num_output in requests:
            self.submit(name, num_prompt, num_output, max_tokens=num_output)
        self.ahead(self.form())
        return self.form()

    def ahead(self, plan: StepPlan) -> None:
        assert self.complete(plan, is_ahead=True) == []

    def verify(self, **accepted: int) -> list[tuple[str, EndReason]]:
        self.now += SECOND
        found = {self.harness.request(name): count for name, count in accepted.items()}
        ended = self.replica.verify(found, self.now)
        self.harness.controller.settle(ended, self.now)
        self.harness.controller.check_conservation()
        return [(request.request_id, reason) for request, reason in ended]

    def request(self, name: str) -> Request:
        return self.harness.request(name)


def chunk_of(plan: StepPlan) -> tuple[int, int, int]:
    """Tokens before, tokens, and drafts that may stand in front, of a plan's only entry."""
    (chunk,), (drafts,) = plan.chunks, plan.drafts.values()
    return chunk.num_computed_before, chunk.num_tokens, drafts.num_unverified


def test_the_next_step_has_room_behind_all_drafts_and_what_is_rejected_is_taken_back() -> None:
    bench = Ahead()
    first = bench.begin(("a", 8, 40))
    a = bench.request("a")
    assert chunk_of(first) == (8, 4, 0)
    bench.ahead(first)
    assert (a.num_output_tokens, a.num_computed_tokens) == (2, 9)  # the token that the step samples without drafts
    second = bench.form()
    assert chunk_of(second) == (9, 4, 3)
    assert bench.replica.memory.num_held_blocks(a) == 4  # up to 9 + 3 + 4 tokens
    assert bench.verify(a=1) == []
    assert (a.num_output_tokens, a.num_computed_tokens) == (3, 11)  # one more is computed by the step in flight
    bench.ahead(second)
    third = bench.form()
    assert chunk_of(third) == (11, 4, 3)
    assert bench.verify() == []
    assert a.draft_log == [(1, 3, 1), (3, 3, 0)]
    assert bench.complete(third, accepted={a: 3}) == []  # the token is known by now
    assert chunk_of(bench.form()) == (15, 4, 0)
    assert (a.num_output_tokens, a.num_draft_tokens, a.num_accepted_tokens) == (8, 9, 4)
    assert len(token_times(a)) == 8


def test_who_has_reached_its_length_ends_with_the_step_that_it_is_in_and_gets_nothing_of_that() -> None:
    bench = Ahead()
    bench.ahead(bench.begin(("a", 8, 5), ("b", 8, 40)))
    plan = bench.form()
    assert bench.verify(a=3, b=1) == []
    a = bench.request("a")
    assert a.num_output_tokens == 5
    assert bench.complete(plan, is_ahead=True) == [("a", EndReason.LENGTH)]
    assert (a.num_output_tokens, a.num_accepted_tokens) == (5, 3)
    assert len(token_times(a)) == 5
    assert bench.replica.running_set.unverified.keys() == {bench.request("b")}


def test_accepted_drafts_beyond_the_length_are_no_output() -> None:
    bench = Ahead()
    bench.ahead(bench.begin(("a", 8, 4)))
    plan = bench.form()
    assert bench.verify(a=3) == []
    assert bench.request("a").draft_log == [(1, 3, 2)]
    assert bench.complete(plan) == [("a", EndReason.LENGTH)]


def test_where_one_token_is_left_the_step_ends_the_request_whatever_is_accepted() -> None:
    bench = Ahead()
    plan = bench.begin(("a", 8, 2))
    assert bench.complete(plan, is_ahead=True) == [("a", EndReason.LENGTH)]
    assert bench.request("a").draft_log == [(1, 3, 0)]
    assert bench.verify() == []
    assert bench.replica.memory.used_blocks == 0


def test_who_is_left_out_of_the_next_step_ends_before_the_one_after_it() -> None:
    bench = Ahead(max_batch_tokens=16)
    bench.ahead(bench.begin(("a", 8, 5), ("b", 8, 40)))

    def only_b(replica: LocalReplicaView, batch: BatchBuilder) -> None:
        assert batch.add(bench.request("b"), 1) is None

    plan = bench.form(only_b)
    assert bench.verify(a=3) == []
    assert bench.complete(plan, is_ahead=True) == [("a", EndReason.LENGTH)]


@pytest.mark.parametrize(("num_output", "state"), [(40, RequestState.PREEMPTED), (5, RequestState.ENDED)])
def test_what_was_accepted_counts_for_who_was_preempted_meanwhile(num_output: int, state: RequestState) -> None:
    bench = Ahead()
    bench.ahead(bench.begin(("a", 8, num_output), ("b", 8, 40)))

    def without_a(replica: LocalReplicaView, batch: BatchBuilder) -> None:
        assert batch.preempt(bench.request("a"), PreemptionMode.RECOMPUTE) is None
        assert batch.add_decodes() is None

    plan = bench.form(without_a)
    a = bench.request("a")
    assert bench.verify(a=3, b=0) == ([("a", EndReason.LENGTH)] if state is RequestState.ENDED else [])
    assert (a.state, a.num_output_tokens, a.num_computed_tokens) == (state, 5, 0)
    assert a.draft_log == [(1, 3, 3)]
    if state is RequestState.PREEMPTED:
        assert bench.replica.queue.num_tokens == 13  # the whole request must be recomputed
        bench.ahead(plan)
        again = bench.form()
        assert [one.num_tokens for one in again.chunks if one.request is a] == [13]


def test_who_may_have_the_greatest_length_waits_until_it_is_known() -> None:
    bench = Ahead(max_model_len=13)
    bench.ahead(bench.begin(("a", 8, 5), ("b", 2, 9)))  # with its drafts, a's next token is the last that has a place
    refusals = []

    def one_by_one(replica: LocalReplicaView, batch: BatchBuilder) -> None:
        refusals.extend(batch.add(request, 1) for request in replica.decodes())

    plan = bench.form(one_by_one)
    assert refusals == [Refusal.IN_FLIGHT, None]
    bench.verify(a=1, b=0)
    bench.ahead(plan)
    assert {one.request.request_id: one.num_tokens for one in bench.form().chunks} == {"a": 2, "b": 4}


def test_in_bulk_who_waits_is_passed_over() -> None:
    bench = Ahead(max_model_len=13)
    bench.ahead(bench.begin(("a", 8, 5), ("b", 2, 9)))
    plan = bench.form(lambda replica, batch: batch.add_decodes())
    assert [one.request.request_id for one in plan.chunks] == ["b"]
    assert bench.replica.builder.slots_left == 3


def test_an_abort_while_nothing_is_known_leaves_nothing_behind() -> None:
    bench = Ahead()
    bench.ahead(bench.begin(("a", 8, 40)))
    plan, a = bench.form(), bench.request("a")
    assert not bench.replica.abort(a, EndReason.ABORTED, 0.0)
    assert bench.verify(a=2) == []
    assert bench.complete(plan, is_ahead=True) == [("a", EndReason.ABORTED)]
    assert bench.replica.memory.used_blocks == 0
    assert not bench.replica.running_set.unverified
