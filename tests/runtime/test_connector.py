"""KV through a connector: what waits, what is loaded within a step, whose blocks are kept, and what failed loads leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.golden.readers.driver import Arrival, Driver, Setup
from vajra_py.contract import BatchBuilder, LocalReplicaView
from vajra_py.contract.observer import EndReason
from vajra_py.errors import ConfigError
from vajra_py.runtime.requests.connector import ConnectorRules, KvReport, Match
from vajra_py.runtime.requests.request import Request, RequestState
from vajra_py.runtime.step.plan import PlannedChunk
from vajra_py.testing import Harness, HarnessOptions

BLOCK = 4
MAX_STEPS = 2000
Schedule = Callable[[LocalReplicaView, BatchBuilder, float], None]


class Source:
    """A connector with given answers, and what it was told."""

    def __init__(self, answer: Callable[[Request, int], Match | None], *, keeps: bool = False) -> None:
        self._answer = answer
        self._keeps = keeps
        self.asked: list[str] = []
        self.loading: list[Request] = []
        """Requests whose load has begun and was not reported."""
        self.kept: list[Request] = []

    def matched(self, request: Request, num_local_tokens: int) -> Match | None:
        self.asked.append(request.request_id)
        return self._answer(request, num_local_tokens)

    def begins(self, request: Request, num_local_tokens: int, num_tokens: int) -> None:
        self.loading.append(request)

    def allocated(self, request: Request, num_tokens: int) -> None:
        assert num_tokens == 0 or request.state in (RequestState.LOADING, RequestState.RUNNING)

    def ended(self, request: Request, num_blocks: int) -> bool:
        keeps = self._keeps and num_blocks > 0
        if keeps:
            self.kept.append(request)
        return keeps


class Bench(Driver):
    """One vLLM replica with a connector, whose steps run something whenever somebody can run."""

    def __init__(self, source: Source, num_blocks: int = 12, rules: ConnectorRules | None = None) -> None:
        memory = {"block_size": BLOCK, "num_blocks": num_blocks}
        replica = {"max_batch_size": 4, "max_batch_tokens": 24, "max_model_len": 40, "memory": memory}
        super().__init__(Setup("vllm-v1", replica))
        self.source = source
        self.connected = self.replica.use_connector(source, rules or ConnectorRules())
        self.num_arrived = 0
        self.ended: dict[str, EndReason] = {}

    def form(self) -> tuple[list[PlannedChunk], list[str]]:
        self._plan = plan = self.replica.next_plan(self._now)
        return ([], []) if plan is None else (list(plan.entries()), [])

    def wrap(self, wrapped: Callable[[Schedule], Schedule]) -> None:
        """Call what `wrapped` makes of the scheduler's method in place of it."""
        self.replica.around = lambda replicaset, layer, name, schedule: wrapped(schedule)
        self.replica.bind_policy(self.replica.parts)

    def ask(self, num_prompt: int, num_output: int = 2, first: int | None = None) -> Request:
        """A request arrives; prompts with an equal `first` token share what they can."""
        number, token = self.num_arrived, 1000 + self.num_arrived if first is None else first
        self.num_arrived += 1
        self.arrive(Arrival(f"r{number}", [token] * num_prompt, num_output, number, float(number)))
        return self.requests[f"r{number}"]

    def step(self, **report: Any) -> list[PlannedChunk]:
        """One step; returns its entries."""
        entries, _ = self.form()
        ends = self.complete(entries, lambda request: (request.index, False), KvReport(**report))
        self.ended.update(ends)
        self.replica.memory.check()
        self.replica.running_set.check()
        return entries


def beside(num_tokens: int) -> Callable[[Request, int], Match | None]:
    """All requests have so many tokens outside, which are loaded beside steps."""
    return lambda request, local: Match(max(num_tokens - local, 0), is_async=num_tokens > local)


def test_a_load_takes_blocks_and_neither_slot_nor_tokens() -> None:
    bench = Bench(Source(beside(10)))
    loading = bench.ask(20)
    assert bench.step() == []
    assert (loading.state, bench.replica.memory.num_held_blocks(loading)) == (RequestState.LOADING, 3)
    assert bench.replica.running_set.num_running == 0
    assert bench.step(received=[loading]) == []
    (chunk,) = bench.step()
    assert (chunk.num_computed_before, chunk.num_tokens) == (10, 10)
    assert bench.source.asked == ["r0"]


def test_a_prompt_that_was_loaded_whole_computes_its_last_token() -> None:
    bench = Bench(Source(beside(20)))
    loading = bench.ask(20)
    bench.step(received=[loading])
    (chunk,) = bench.step()
    assert (chunk.num_computed_before, chunk.num_tokens) == (19, 1)


def test_a_load_within_the_step_is_a_hit() -> None:
    bench = Bench(Source(lambda request, local: Match(10)))
    request = bench.ask(20)
    (chunk,) = bench.step()
    assert (chunk.num_computed_before, chunk.num_tokens) == (10, 10)
    assert request.num_cached_tokens == 10
    assert not bench.source.loading


def test_who_waits_for_an_answer_is_passed_over_and_a_load_that_does_not_fit_is_not() -> None:
    answers = {
        "r0": None,
        "r1": Match(0),
        "r2": Match(24, is_async=True),
        "r3": Match(24, is_async=True),
        "r4": Match(0),
    }
    bench = Bench(Source(lambda request, local: answers[request.request_id]))
    for num_prompt in (8, 8, 24, 24, 4):
        bench.ask(num_prompt)
    entries = bench.step()
    assert [entry.request.request_id for entry in entries] == ["r1"]
    assert [one.request_id for one in bench.source.loading] == ["r2"]
    assert bench.source.asked == ["r0", "r1", "r2", "r3"]


@pytest.mark.parametrize(("num_tokens", "begins"), [(16, True), (17, False)])
def test_a_load_leaves_prompts_under_way_their_blocks(num_tokens: int, begins: bool) -> None:
    """A prompt that has 1 of its 9 blocks needs 8 more; of the 12 that are free, a load may take 4."""
    answers = {"r0": Match(4, is_async=True), "r1": Match(num_tokens, is_async=True)}
    bench = Bench(Source(lambda request, local: answers[request.request_id]), num_blocks=13)
    bench.ask(36)
    bench.ask(num_tokens + 1)
    bench.step()
    assert [one.request_id for one in bench.source.loading] == (["r0", "r1"] if begins else ["r0"])


@pytest.mark.parametrize("is_received", [False, True])
def test_an_ended_request_keeps_its_blocks_until_they_were_sent(is_received: bool) -> None:
    bench = Bench(Source(beside(8 if is_received else 0), keeps=True))
    request = bench.ask(8, num_output=1)
    bench.step(received=[request] if is_received else [])
    if is_received:
        bench.step()
    assert bench.ended == {"r0": EndReason.LENGTH}
    assert bench.replica.memory.free_blocks == 10
    assert not bench.replica.is_empty
    bench.step(sent=[request])
    assert bench.replica.memory.free_blocks == 12
    assert bench.replica.is_empty
    bench.step(sent=[request], received=[request])  # no component refers to it any more


def test_a_scheduler_is_not_asked_while_nobody_waits() -> None:
    bench = Bench(Source(beside(8), keeps=True))
    asked_at: list[float] = []

    def counted(schedule: Schedule) -> Schedule:
        def call(replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
            asked_at.append(now)
            schedule(replica, batch, now)

        return call

    bench.wrap(counted)
    bench.step()
    request = bench.ask(8, num_output=1)
    bench.step()
    bench.step(received=[request])
    bench.step()
    assert bench.ended == {"r0": EndReason.LENGTH}
    bench.step(sent=[request])
    bench.step()
    assert asked_at == [1.0, 2.0, 3.0]


def test_a_request_that_is_aborted_while_it_loads_keeps_its_blocks_until_then() -> None:
    bench = Bench(Source(beside(10)))
    request = bench.ask(20)
    bench.step()
    bench.abort("r0")
    assert (request.state, bench.replica.memory.free_blocks) == (RequestState.ENDED, 9)
    bench.step(received=[request])
    assert bench.replica.memory.free_blocks == 12


@pytest.mark.parametrize("on_failure", ["fail", "recompute"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_block_that_was_not_loaded(on_failure: Any, is_async: bool) -> None:
    source = Source(lambda request, local: Match(max(12 - local, 0), is_async and local < 12))
    bench = Bench(source, rules=ConnectorRules(on_failure=on_failure))
    first = bench.ask(16, first=7)
    second = bench.ask(18, first=7)
    if is_async:
        bench.abort("r1")
    entries, _ = bench.form()
    bad = frozenset([bench.replica.memory.block_table(first)[1]])
    report = KvReport(received=[first] if is_async else [], bad_blocks=bad)
    bench.ended.update(bench.complete(entries, lambda request: (1, False), report))
    if on_failure == "fail":
        assert bench.ended == dict.fromkeys(["r0"] if is_async else ["r0", "r1"], EndReason.FAILED)
        assert bench.replica.memory.free_blocks == 12
        third = bench.ask(18, first=7)
        assert bench.replica.memory.cached_tokens(third) <= BLOCK
        return
    again = {entry.request: (entry.num_computed_before, entry.num_tokens) for entry in bench.step()}
    assert again[first] == (4, 12)
    if not is_async:
        assert again[second] == (16, 2)  # the first one computes the block that they share
    assert first.num_output_tokens == 1


def test_a_load_of_which_nothing_came_is_asked_for_again() -> None:
    bench = Bench(Source(beside(10)), rules=ConnectorRules(on_failure="recompute"))
    request = bench.ask(20)
    bench.step()
    bench.step(failed=[request], received=[request])
    bench.step()
    assert bench.source.asked == ["r0", "r0"]
    assert request.state is RequestState.LOADING


def test_who_is_asked_about_again_is_offered_when_the_answer_is_known() -> None:
    """A load brought nothing, and the connector does not know at once what it has now."""
    answers = [Match(10, is_async=True)]
    bench = Bench(
        Source(lambda request, local: answers[-1] if answers else None), rules=ConnectorRules(on_failure="recompute")
    )
    request = bench.ask(20)
    bench.step()
    offered: list[list[str]] = []

    def looks(replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        offered.append([one.request_id for one in replica.waiting()])

    bench.wrap(lambda schedule: looks)
    answers.clear()
    bench.step(failed=[request], received=[request])
    bench.step()
    assert offered == [[], []]
    answers.append(Match(0))
    bench.step()
    assert offered == [[], [], ["r0"]]


def test_who_gives_up_what_was_loaded_computes_it() -> None:
    """Nobody runs, blocks that are being sent do not come back, and the others do not suffice."""
    answers = {"r0": Match(0), "r1": Match(16, is_async=True)}
    rules = ConnectorRules(reports_with_steps=False)
    bench = Bench(Source(lambda request, local: answers[request.request_id], keeps=True), rules=rules)
    sending, loading = bench.ask(12, num_output=5), bench.ask(36)
    bench.step()
    bench.step(received=[loading])
    while not bench.ended:
        bench.step()
    assert bench.replica.memory.free_blocks == 4
    assert bench.step() == []
    assert bench.replica.memory.free_blocks == 8
    bench.step(sent=[sending])
    (chunk,) = bench.step()
    assert (chunk.request, chunk.num_computed_before) == (loading, 16)  # its blocks are still in the prefix cache
    assert bench.source.asked.count("r1") == 1


def test_a_load_behind_one_that_lacks_blocks_is_seen_when_its_turn_comes() -> None:
    """Nobody runs until blocks have been sent; the first load lacks them, and nobody has looked at the second."""
    answers = {"r0": Match(0), "r1": Match(16, is_async=True), "r2": Match(4, is_async=True)}
    source = Source(lambda request, local: answers[request.request_id], keeps=True)
    bench = Bench(source, num_blocks=14)
    sending, first, second = bench.ask(12, num_output=9), bench.ask(36), bench.ask(6)
    while not bench.ended:
        bench.step()
    bench.step(received=[first, second])
    assert bench.step() == []
    assert (first.state, second.state) == (RequestState.LOADED, RequestState.LOADING)
    bench.step(sent=[sending])
    assert [chunk.request for chunk in bench.step()] == [first, second]


def test_a_load_that_never_leaves_room_for_drafts_begins_when_nothing_else_is_in_progress() -> None:
    """It takes 9 of 12 blocks, and a decode with its drafts 4."""
    answers = {"r0": Match(0), "r1": Match(36, is_async=True)}
    bench = Bench(Source(lambda request, local: answers[request.request_id]), rules=ConnectorRules(draft_tokens=16))
    bench.ask(4, num_output=1)
    loading = bench.ask(37)
    bench.step()
    assert not bench.source.loading
    bench.step()
    assert bench.source.loading == [loading]


@pytest.mark.parametrize("on_failure", ["fail", "recompute"])
def test_who_is_aborted_with_a_failed_block_in_its_step_is_no_more_concerned(on_failure: Any) -> None:
    bench = Bench(Source(lambda request, local: Match(max(8 - local, 0))), rules=ConnectorRules(on_failure=on_failure))
    request = bench.ask(20)
    entries, _ = bench.form()
    (bad, *_) = bench.replica.memory.block_table(request)
    assert not bench.replica.abort(request, EndReason.ABORTED, 0.0)
    ended = bench.complete(entries, lambda request: (1, False), KvReport(bad_blocks=frozenset({bad})))
    assert ended == [("r0", EndReason.ABORTED)]
    assert bench.replica.memory.free_blocks == 12


def test_a_lost_replica_forgets_loads_and_kept_blocks() -> None:
    bench = Bench(Source(beside(10), keeps=True))
    request = bench.ask(20)
    bench.step()
    ((ended, reason),) = bench.replica.lose("the device is gone", 1.0)
    assert (ended, reason) == (request, EndReason.FAILED)
    assert bench.replica.is_empty
    bench.replica.take_report(KvReport(received=[request], sent=[request]), 2)
    assert bench.replica.memory.free_blocks == 12


def test_kv_parallelism_is_refused_by_name() -> None:
    options = HarnessOptions(kv_parallel_groups=2, kv_group_tokens=64)
    replica = Harness("fcfs", "round_robin", "fixed_chunk", options).replica()
    with pytest.raises(ConfigError, match=r"replica\.kv_parallel\.groups: .* \(2 groups\)\. Allowed: 1"):
        replica.use_connector(Source(beside(1)), ConnectorRules())


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    rules=st.builds(
        ConnectorRules,
        holding_order=st.sampled_from(["begin", "urgency"]),
        on_failure=st.sampled_from(["fail", "recompute"]),
    ),
    keeps=st.booleans(),
)
def test_nothing_is_lost_and_everybody_ends(data: st.DataObject, rules: ConnectorRules, keeps: bool) -> None:
    """Random answers, late and failed loads, late sends, aborts, in memory for a few requests."""
    draw = data.draw

    def answer(request: Request, num_local: int) -> Match | None:
        kind = draw(st.sampled_from(["later", "none", "beside", "within"]))
        if kind == "later":
            return None
        return Match(draw(st.integers(1, 30)) if kind != "none" else 0, is_async=kind == "beside")

    bench = Bench(Source(answer, keeps=keeps), rules=rules)
    source = bench.source
    arrived = [
        bench.ask(draw(st.integers(1, 30)), draw(st.integers(1, 8)), draw(st.sampled_from([None, 1, 2])))
        for _ in range(draw(st.integers(1, 6)))
    ]
    for _ in range(MAX_STEPS):
        if not bench.requests and not source.loading and not source.kept:
            break
        entries, _ = bench.form()
        received = [one for one in source.loading if draw(st.booleans())]
        sent = [one for one in source.kept if draw(st.booleans())]
        failed = [one for one in received if draw(st.integers(0, 3)) == 0]
        held = [one for one in (*source.loading, *(entry.request for entry in entries)) if one.end_reason is None]
        tables = [block for one in held for block in bench.replica.memory.block_table(one)]
        bad = draw(st.sampled_from(tables)) if tables and draw(st.integers(0, 5)) == 0 else None
        source.loading = [one for one in source.loading if one not in received]
        source.kept = [one for one in source.kept if one not in sent]
        report = KvReport(received, sent, failed, frozenset() if bad is None else frozenset([bad]))
        bench.ended.update(bench.complete(entries, lambda request: (request.index, False), report))
        bench.replica.memory.check()
        bench.replica.running_set.check()
        if bench.requests and draw(st.integers(0, 9)) == 0:
            name = draw(st.sampled_from(sorted(bench.requests)))
            bench.abort(name)
            bench.ended[name] = EndReason.ABORTED
    assert not bench.requests
    assert len(bench.ended) == len(arrived)
    assert bench.replica.is_empty
    assert bench.replica.memory.free_blocks == 12
    for request in arrived:
        if bench.ended[request.request_id] is EndReason.LENGTH:
            assert request.num_output_tokens == request.max_tokens
