"""Random policies that do random legal and illegal things to a replica: nothing is lost, exceeded or counted twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from vajra_py.contract import BatchBuilder, BatchFeatures, LocalReplicaView, PreemptionMode, Refusal
from vajra_py.contract.observer import EndReason, Observer
from vajra_py.metrics.tables.recorder import token_times
from vajra_py.runtime.kv import PrefixCacheOptions
from vajra_py.runtime.requests.request import Request, RequestState
from vajra_py.runtime.step.builder_options import DraftRules, IllegalPlan
from vajra_py.runtime.step.plan import StepPlan
from vajra_py.runtime.support.seeds import SeedTree
from vajra_py.sim.acceptance import RatesByPosition
from vajra_py.testing import ByArrival, BySlack, Harness, HarnessOptions, InTurn, PlainChunks, Shared
from vajra_py.workload import PromptContent, RequestSpec

TICKS = 10**9
BLOCK = 4
SMALL = HarnessOptions(
    block_size=BLOCK, num_blocks=14, max_batch_size=4, max_batch_tokens=20, max_model_len=56, bytes_per_block=64
)
CONFIGURATIONS = {
    "plain": SMALL,
    "no token budget, watermark": replace(SMALL, max_batch_tokens=None, watermark_blocks=2),
    "incremental reservation": replace(SMALL, reserve_prompt=False, max_batch_size=6),
    "swapping to a small host": replace(SMALL, host_blocks=6),
    "prefix cache": replace(SMALL, prefix_cache=PrefixCacheOptions(), host_blocks=3),
    "prefix cache, blocks forgotten": replace(
        SMALL, prefix_cache=PrefixCacheOptions(reuse_order="fifo", retain_freed=False), reserve_prompt=False
    ),
    "drafts": replace(
        SMALL,
        reserve_prompt=False,
        prefix_cache=PrefixCacheOptions(),
        host_blocks=3,
        drafts=DraftRules(num_tokens=2, max_tokens=6),
        acceptance=RatesByPosition([0.6], SeedTree(0), endless=True),
    ),
    "drafts that keep blocks and look ahead": replace(
        SMALL,
        prefix_cache=PrefixCacheOptions(retain_freed=False),
        cache_at_schedule=False,
        drafts=DraftRules(num_tokens=5, max_tokens=5, lookahead_tokens=5, keeps_blocks=True, past_max_tokens=True),
        acceptance=RatesByPosition([0.9, 0.5], SeedTree(1), endless=True),
    ),
    "three pipeline stages": replace(SMALL, pipeline_stages=3, prefix_cache=PrefixCacheOptions(), host_blocks=6),
    "two KV-parallel groups": replace(SMALL, kv_parallel_groups=2, kv_group_tokens=24, num_blocks=16, host_blocks=6),
    "KV-parallel and pipelined": replace(
        SMALL, kv_parallel_groups=2, kv_group_tokens=24, num_blocks=16, pipeline_stages=2, reserve_prompt=False
    ),
}


class Ends(Observer):
    """Counts how often each request ends."""

    def __init__(self) -> None:
        self.reasons: dict[str, list[EndReason]] = {}

    def on_ended(self, request: Any, reason: EndReason, detail: str, now: float) -> None:
        self.reasons.setdefault(request.request_id, []).append(reason)


class Scripted:
    """A replica scheduler that does whatever the test says."""

    def __init__(self) -> None:
        self.script: Callable[[LocalReplicaView, BatchBuilder, float], None] | None = None
        self._fill = PlainChunks(12)

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        (self.script or self._fill.schedule)(replica, batch, now)


class Machine(RuleBasedStateMachine):
    """One replica, driven step by step."""

    options = SMALL

    @initialize(shared=st.booleans(), by_slack=st.booleans())
    def start(self, shared: bool, by_slack: bool) -> None:
        self.policy = Scripted()
        chooser = Shared() if shared else InTurn()
        prioritizer: Any = (lambda context: BySlack(context.prefill_time)) if by_slack else ByArrival()
        self.harness = Harness(prioritizer, chooser, self.policy, self.options)
        self.ends = Ends()
        self.harness.controller.watch((self.ends,))
        self.replica = self.harness.replica()
        self.requests: list[Request] = []
        self.truth: dict[str, int] = {}
        self.in_flight: list[StepPlan] = []
        self.now = 0

    @property
    def alive(self) -> list[Request]:
        return [request for request in self.requests if request.state is not RequestState.ENDED]

    # Events at a replica

    @rule(
        prefix=st.integers(0, 2),
        num_shared=st.integers(0, 12),
        num_own=st.integers(1, 30),
        num_output=st.integers(1, 12),
        max_tokens=st.none() | st.integers(1, 12),
    )
    def arrive(self, prefix: int, num_shared: int, num_own: int, num_output: int, max_tokens: int | None) -> None:
        name = f"r{len(self.requests)}"
        segments = (((f"p{prefix}", num_shared),) if num_shared else ()) + ((name, num_own),)
        content = PromptContent(segments)
        spec = RequestSpec(name, 0.0, content.num_tokens, num_output, max_tokens=max_tokens, content=content)
        self.harness._now = self.now
        request = self.harness.submit_spec(spec)
        self.requests.append(request)
        self.truth[name] = num_output if request.max_tokens is None else min(num_output, request.max_tokens)
        fits = self.replica.memory.fits(spec.num_prompt_tokens + request.max_tokens - 1)
        assert (request.state is RequestState.ENDED) == (request.max_tokens < 1 or not fits), request.detail

    @precondition(lambda self: len(self.in_flight) < self.options.pipeline_stages)
    @rule(data=st.data(), num_actions=st.integers(1, 8))
    def form(self, data: st.DataObject, num_actions: int) -> None:
        """A step is formed by random actions; each is checked by itself."""

        def act(replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
            for _ in range(num_actions):
                self.act(data, replica, batch)

        self.policy.script = act
        self.form_step()

    @precondition(lambda self: len(self.in_flight) < self.options.pipeline_stages)
    @rule()
    def form_by_the_book(self) -> None:
        self.policy.script = None
        self.form_step()

    def form_step(self) -> None:
        self.now += TICKS
        before = self.replica.num_steps
        plan = self.replica.form_step(self.now)
        if plan is None or not plan.num_requests:
            assert self.replica.num_steps == before
            return
        assert self.replica.num_steps == before + 1
        self.check_plan(plan)
        self.in_flight.append(plan)

    def check_plan(self, plan: StepPlan) -> None:
        entries = list(plan.entries())
        assert len(entries) == plan.num_requests <= self.options.max_batch_size
        assert len({entry.request for entry in entries}) == len(entries)
        num_tokens = sum(entry.num_tokens for entry in entries)
        assert num_tokens <= (self.options.max_batch_tokens or num_tokens)
        for request, num_all, done, _ in entries:
            num_drafts = plan.drafts[request].num_tokens if request in plan.drafts else 0
            num_new = num_all - num_drafts
            assert num_drafts == 0 or (num_new == 1 and num_drafts <= self.options.limits().max_draft_tokens)
            assert self.replica.memory.num_held_blocks(request) * BLOCK >= done + num_all
            assert request.num_computed_tokens == done + num_new <= request.num_known_tokens
            assert self.replica.memory.num_held_blocks(request) * BLOCK >= done + num_new
            if self.options.kv_group_tokens:
                assert done // self.options.kv_group_tokens == (done + num_new - 1) // self.options.kv_group_tokens
        if self.options.kv_parallel_groups == 1:
            assert plan.features.num_tokens == num_tokens
            assert plan.features.num_requests == len(entries)
            contexts = plan.features.decode_context_tokens + plan.features.prefill_context_tokens
            assert contexts == sum(entry.num_computed_before for entry in entries)
        preempted = {request for request, _ in plan.preempted}
        assert not preempted & {entry.request for entry in entries}

    @precondition(lambda self: self.in_flight)
    @rule(position=st.integers(0, 2))
    def leave_first_stage(self, position: int) -> None:
        if self.options.pipeline_stages > 1 and position < len(self.in_flight):
            self.replica.first_stage_completed(self.in_flight[position])

    @precondition(lambda self: self.in_flight)
    @rule()
    def complete(self) -> None:
        """The oldest step comes back: whoever caught up has one token more."""
        self.now += TICKS
        plan = self.in_flight.pop(0)
        entries = list(plan.entries())
        outputs = [entry.request.num_output_tokens for entry in entries]
        counts = [plan.admissions is None or self.holds_its_memory(plan, entry.request) for entry in entries]
        ended = self.replica.complete_step(plan, self.harness._executor.result(plan), self.now)
        self.harness.controller.settle(ended, self.now)
        for entry, before, is_current in zip(entries, outputs, counts, strict=True):
            request = entry.request
            if request in plan.drafts:
                left = self.truth[request.request_id] - before
                most = 1 + min(plan.drafts[request].num_tokens, left - 1)
                assert 1 <= request.num_output_tokens - before <= most
                continue
            caught_up = entry.num_computed_before + entry.num_tokens == request.num_prompt_tokens + before
            assert request.num_output_tokens == before + (caught_up and is_current)

    @staticmethod
    def holds_its_memory(plan: StepPlan, request: Request) -> bool:
        """Whether a chunk in the pipeline is worth anything yet: its request may have been preempted since, or ended."""
        assert plan.admissions is not None
        return request.state is RequestState.RUNNING and plan.admissions[request] == request.admitted_index

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if not self.alive:
            return
        request = data.draw(st.sampled_from(self.alive))
        was_running = request.state is RequestState.RUNNING
        at_once = self.harness.controller.abort(request.request_id, EndReason.ABORTED, self.now)
        assert at_once == (not was_running or not self.in_flight)
        assert (request.state is RequestState.ENDED) == at_once

    # Operations of a policy

    def act(self, data: st.DataObject, replica: LocalReplicaView, batch: BatchBuilder) -> None:
        before = self.picture(batch)
        actions = ["add", "add", "add", "add_decodes", "add_running", "preempt", "ask", "nonsense"]
        if self.options.drafts is not None:
            actions.append("draft")
        action = data.draw(st.sampled_from(actions))
        if action == "add_decodes":
            self.bulk(replica, batch, batch.add_decodes(), decodes_only=True)
        elif action == "add_running":
            cap = data.draw(st.none() | st.integers(1, 9))
            self.bulk(replica, batch, batch.add_running(cap), decodes_only=False)
        elif self.alive:
            one = data.draw(st.sampled_from([*replica.running(), *replica.waiting(), *self.alive]))
            if action == "preempt":
                self.preempt(batch, one, data.draw(st.sampled_from(PreemptionMode)), before)
            elif action == "draft":
                refusal = batch.draft(one, data.draw(st.integers(0, self.options.limits().max_draft_tokens)))
                assert (refusal is Refusal.ALREADY_SCHEDULED) == (one in batch)
                assert self.picture(batch) == before
            elif action == "add":
                self.add(data, batch, one, before)
            elif action == "ask":
                self.ask(replica, batch, one)
                assert self.picture(batch) == before
            else:
                self.talk_nonsense(batch, one)
                assert self.picture(batch) == before
        self.check_batch(batch)

    def add(self, data: st.DataObject, batch: BatchBuilder, one: Any, before: object) -> None:
        limit = batch.max_chunk(one)
        num_tokens = data.draw(st.integers(1, max(limit, 1)))
        reserve = data.draw(st.none() | st.integers(1, 40))
        cached, free = batch.cached_tokens(one), batch.free_blocks
        has_memory = one.is_resident
        refusal = batch.add(one, num_tokens, reserve_tokens=reserve)
        if refusal is not None:
            assert self.picture(batch) == before
            assert one not in batch or refusal is Refusal.ALREADY_SCHEDULED
            return
        assert one in batch
        assert one.is_resident
        if not has_memory and not one.num_preemptions:
            assert one.num_cached_tokens == cached
            assert one.num_computed_tokens == cached
        assert batch.free_blocks <= free

    def talk_nonsense(self, batch: BatchBuilder, one: Any) -> None:
        for num_tokens in (0, -3):
            with pytest.raises(IllegalPlan):
                batch.add(one, num_tokens)
        gave_way = any(one is victim for victim, _ in self.replica.builder.preempted)
        too_many = batch.max_chunk(one) + 1
        if one in batch or one.in_flight or gave_way or too_many > batch.tokens_left or batch.slots_left < 1:
            assert isinstance(batch.add(one, too_many), Refusal)
        else:
            with pytest.raises(IllegalPlan):
                batch.add(one, too_many)

    def preempt(self, batch: BatchBuilder, one: Any, mode: PreemptionMode, before: object) -> None:
        if one.state is not RequestState.RUNNING:
            with pytest.raises(IllegalPlan):
                batch.preempt(one, mode)
            assert self.picture(batch) == before
            return
        refusal = batch.preempt(one, mode)
        if refusal is not None:
            assert refusal in (Refusal.HOST_BLOCKS, Refusal.IN_FLIGHT)
            assert self.picture(batch) == before
            return
        assert one not in batch
        assert not one.is_resident
        assert one.is_swapped == (mode is PreemptionMode.SWAP)
        assert batch.add(one, 1) in (Refusal.JUST_PREEMPTED, Refusal.BATCH_FULL, Refusal.TOKEN_BUDGET)

    def bulk(self, replica: LocalReplicaView, batch: BatchBuilder, stop: Any, *, decodes_only: bool) -> None:
        wanted = replica.decodes() if decodes_only else replica.running()
        if stop is None:
            assert all(request in batch for request in wanted)
        else:
            assert stop.request not in batch
            assert isinstance(stop.refusal, Refusal)
            earlier = [one for one in wanted if one.admitted_index < stop.request.admitted_index]
            assert all(request in batch for request in earlier)

    def ask(self, replica: LocalReplicaView, batch: BatchBuilder, one: Any) -> None:
        assert batch.blocks_needed(one, one.num_known_tokens) >= 0
        assert batch.cached_tokens(one) < max(one.num_known_tokens, 1)
        assert batch.predicted_time_with(one, 1) >= batch.predicted_time() > 0
        assert isinstance(batch.features(), BatchFeatures)
        assert replica.num_running == replica.num_decodes + replica.num_partial_prefills + len(
            [request for request in self.alive if request.in_flight]
        )
        urgencies = [replica.urgency(request) for request in replica.waiting()]
        assert urgencies == sorted(urgencies)
        assert len(urgencies) == replica.num_waiting

    def picture(self, batch: BatchBuilder) -> object:
        """Everything that a refusal must leave as it was."""
        memory = self.replica.memory
        requests = [
            (
                request.state,
                request.num_computed_tokens,
                request.num_output_tokens,
                request.num_preemptions,
                request.admitted_index,
                memory.num_held_blocks(request) if memory.is_registered(request) else 0,
                request in batch,
            )
            for request in self.requests
        ]
        figures = (batch.num_tokens, batch.num_requests, batch.tokens_left, batch.slots_left, batch.num_preempted)
        return requests, figures, memory.free_blocks, memory.free_host_blocks, batch.features()

    def check_batch(self, batch: BatchBuilder) -> None:
        options = self.options
        assert batch.slots_left == options.max_batch_size - batch.num_requests >= 0
        if options.max_batch_tokens is not None:
            assert batch.tokens_left == options.max_batch_tokens - batch.num_tokens >= 0
        assert batch.num_requests == sum(request in batch for request in self.requests)
        assert batch.free_blocks == self.replica.memory.free_blocks

    # Invariants

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.controller.check_conservation()
        assert self.replica.num_in_flight == len(self.in_flight)
        for request in self.requests:
            assert 0 <= request.num_computed_tokens <= request.num_known_tokens
            assert request.num_output_tokens <= max(self.truth[request.request_id], 0)
            assert len(token_times(request)) == request.num_output_tokens
            ends = self.ends.reasons.get(request.request_id, [])
            assert len(ends) == (request.state is RequestState.ENDED)
            if request.state in (RequestState.WAITING, RequestState.PREEMPTED):
                assert request.num_computed_tokens == 0
            if request.state is RequestState.RUNNING and not request.in_flight and not self.in_flight:
                assert request.num_remaining_tokens >= 1

    def teardown(self) -> None:
        """A plain policy finishes whatever the random one left behind."""
        if not hasattr(self, "harness"):
            return
        self.policy.script = None
        for _ in range(3000):
            while self.in_flight:
                self.complete()
            if not self.alive:
                break
            self.form_step()
        assert not self.alive, "a plain policy must be able to finish everything"
        self.everything_is_accounted_for()
        assert self.replica.memory.used_blocks == 0
        for request in self.requests:
            (reason,) = self.ends.reasons[request.request_id]
            if reason in (EndReason.STOP, EndReason.LENGTH):
                assert request.num_output_tokens == self.truth[request.request_id]
                times = token_times(request)
                assert (times[1:] >= times[:-1]).all()
                assert self.options.drafts is not None or (times[1:] > times[:-1]).all()
                assert request.num_output_tokens >= 1 + request.num_accepted_tokens
                assert request.num_accepted_tokens <= request.num_draft_tokens
                assert times[0] == request.first_token_at
                assert times[-1] == request.ended_at


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_nothing_is_lost_whatever_a_policy_does(name: str) -> None:
    machine = type("Configured", (Machine,), {"options": CONFIGURATIONS[name]})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=30, stateful_step_count=30, suppress_health_check=list(HealthCheck), deadline=None
        ),
    )
