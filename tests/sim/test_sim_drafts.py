"""Drafts in simulations: what is accepted, what it costs, and that nothing of what is rejected stays."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from vajra_py.config import config_from_mapping
from vajra_py.contract import BatchBuilder, BatchFeatures, LocalReplicaView, Refusal
from vajra_py.contract.fill import fill
from vajra_py.errors import ConfigError, PolicyError
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.latency import AffineModel
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.metrics.tables.recorder import token_times
from vajra_py.runtime.kv import PrefixCacheOptions
from vajra_py.runtime.kv.block_hashes import output_segment
from vajra_py.runtime.records.draft_log import DRAFTS_FILE
from vajra_py.runtime.requests.request import DraftedOutputs, Request
from vajra_py.runtime.step.builder_options import DraftRules
from vajra_py.runtime.support.seeds import SeedTree
from vajra_py.sim.acceptance import AcceptedInTrace, RatesByPosition, read_acceptance
from vajra_py.sim.executor import SimulatedExecutor
from vajra_py.testing import Harness, HarnessOptions
from vajra_py.workload import PromptContent, RequestSpec

ALL = RatesByPosition([1.0], SeedTree(0), endless=True)
NONE = RatesByPosition([0.0], SeedTree(0), endless=True)
FOUR = DraftRules(num_tokens=4, max_tokens=4)


def harness(drafts: DraftRules | None = FOUR, acceptance: Any = ALL, **options: Any) -> Harness:
    return Harness("fcfs", "round_robin", "vllm_v1", HarnessOptions(drafts=drafts, acceptance=acceptance, **options))


def test_a_step_gives_one_token_and_what_is_accepted() -> None:
    world = harness()
    request = world.submit("a", num_prompt_tokens=10, num_output_tokens=12, max_tokens=30)
    steps = world.steps_until_idle()
    assert [step.num_tokens for step in steps] == [10, 5, 5, 5]
    assert request.num_output_tokens == 12  # 1 + 5 + 5 + 1: its end cuts what was accepted
    times = token_times(request)
    assert len(times) == 12
    assert len(set(times.tolist())) == 4
    assert request.draft_log == [(1, 4, 4), (6, 4, 4), (11, 4, 0)]
    assert (request.num_draft_tokens, request.num_accepted_tokens) == (12, 8)


def test_without_acceptance_drafts_are_lost_work() -> None:
    plain, drafting = harness(None, None), harness(acceptance=NONE)
    lengths = []
    for world in (plain, drafting):
        world.submit("a", num_prompt_tokens=10, num_output_tokens=8, max_tokens=30)
        lengths.append([step.num_tokens for step in world.steps_until_idle()])
    assert lengths == [[10] + [1] * 7, [10] + [5] * 7]
    assert drafting.now == pytest.approx(plain.now + 7 * 4 * 1e-4)


def test_drafts_are_cut_by_budget_and_lengths() -> None:
    world = harness(max_batch_tokens=7)
    for name in "ab":
        world.submit(name, num_prompt_tokens=3, num_output_tokens=7, max_tokens=7)
    first, second, third = world.steps_until_idle()
    assert first.tokens == {"a": 3, "b": 3}
    assert second.tokens == {"a": 5, "b": 2}  # what the budget has left
    assert third.tokens == {"a": 1, "b": 4}  # no draft beyond max_tokens
    past = harness(structs.replace(FOUR, past_max_tokens=True), max_model_len=14)
    past.submit("a", num_prompt_tokens=6, num_output_tokens=6, max_tokens=6)
    assert [step.num_tokens for step in past.steps_until_idle()] == [6, 5]
    past.submit("b", num_prompt_tokens=9, num_output_tokens=4, max_tokens=4)
    assert [step.num_tokens for step in past.steps_until_idle()] == [9, 4]  # a token behind the drafts fits, too


@pytest.mark.parametrize("lookahead", [0, 4])
def test_drafts_are_cut_where_even_an_empty_memory_has_no_room_for_them(lookahead: int) -> None:
    rules = structs.replace(FOUR, past_max_tokens=True, lookahead_tokens=lookahead)
    options = HarnessOptions(drafts=rules, acceptance=NONE, num_blocks=4, block_size=16)
    world = Harness("fcfs", "round_robin", "orca", options)
    request = world.submit("a", num_prompt_tokens=40, num_output_tokens=25, max_tokens=25)  # 64 of 65 tokens have KV
    world.steps_until_idle()
    assert request.num_output_tokens == 25
    assert [tried for _, tried, _ in request.draft_log] == [4] * 20 + [3, 2, 1]  # then none at all


def test_no_drafts_are_looked_for_where_none_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def num_drafts(executor: SimulatedExecutor, requests: Sequence[Request], at_most: int) -> list[int]:
        asked.extend([at_most] * len(requests))
        return [at_most] * len(requests)

    monkeypatch.setattr(SimulatedExecutor, "num_drafts", num_drafts)
    world = harness(acceptance=NONE)
    world.submit("a", num_prompt_tokens=3, num_output_tokens=4, max_tokens=4)
    assert [step.num_tokens for step in world.steps_until_idle()] == [3, 3, 2, 1]
    assert asked == [2, 1]


@pytest.mark.parametrize("keeps", [False, True])
def test_blocks_of_rejected_drafts(keeps: bool) -> None:
    rules = structs.replace(FOUR, keeps_blocks=keeps)
    world = harness(rules, NONE, block_size=4, num_blocks=6, reserve_prompt=False)
    request = world.submit("a", num_prompt_tokens=4, num_output_tokens=9, max_tokens=20)
    memory = world.replica().memory
    held = []
    for _ in range(3):
        world.step()
        held.append(memory.num_held_blocks(request))
    # The prompt fills a block; then token 5 and four drafts take three blocks, of which one holds what is accepted.
    assert held == ([1, 3, 3] if keeps else [1, 2, 2])
    world.steps_until_idle()
    assert memory.free_blocks == 6


def test_no_more_blocks_are_taken_than_the_drafts_fill() -> None:
    world = harness(structs.replace(FOUR, keeps_blocks=True), NONE, block_size=4, reserve_prompt=False)
    request = world.submit("a", num_prompt_tokens=3, num_output_tokens=9, max_tokens=20)
    world.step()
    world.step()
    assert world.replica().memory.num_held_blocks(request) == 2  # 3 + 1 + 4 tokens


def test_what_a_policy_reserved_stays() -> None:
    world = Harness("fcfs", "round_robin", "orca", HarnessOptions(drafts=FOUR, acceptance=NONE, block_size=4))
    request = world.submit("a", num_prompt_tokens=4, num_output_tokens=3, max_tokens=40)
    world.step()
    held = world.replica().memory.num_held_blocks(request)
    assert held == 11
    world.step()
    assert world.replica().memory.num_held_blocks(request) == held


def test_lookahead_takes_blocks_too() -> None:
    world = harness(
        structs.replace(FOUR, lookahead_tokens=8, keeps_blocks=True), NONE, block_size=4, reserve_prompt=False
    )
    request = world.submit("a", num_prompt_tokens=4, num_output_tokens=9, max_tokens=20)
    world.step()
    world.step()
    assert world.replica().memory.num_held_blocks(request) == 5  # 4 + 1 + 4 + 8 tokens


def test_only_accepted_tokens_enter_the_prefix_cache() -> None:
    options = HarnessOptions(
        drafts=FOUR, acceptance=NONE, block_size=4, prefix_cache=PrefixCacheOptions(), reserve_prompt=False
    )
    world = Harness("fcfs", "round_robin", "vllm_v1", options)
    content = PromptContent((("a", 4),))
    world.submit("a", num_prompt_tokens=4, num_output_tokens=5, max_tokens=20, content=content)
    world.steps_until_idle()
    longer = PromptContent((("a", 4), (("a", "output"), 5), ("b", 7)))
    second = world.submit("b", num_prompt_tokens=longer.num_tokens, num_output_tokens=1, content=longer)
    world.steps_until_idle()
    assert second.num_cached_tokens <= 8


def cached_world(rules: DraftRules, acceptance: Any, cache: PrefixCacheOptions | None = None, **given: Any) -> Harness:
    options: dict[str, Any] = {"block_size": 4, "reserve_prompt": False, "prefix_cache": cache or PrefixCacheOptions()}
    return Harness(
        "fcfs", "round_robin", "vllm_v1", HarnessOptions(drafts=rules, acceptance=acceptance, **options, **given)
    )


def submit_same(world: Harness, name: str, *, prompt: int, output: int) -> Any:
    content = PromptContent((("a", prompt),))
    return world.submit(name, num_prompt_tokens=prompt, num_output_tokens=output, max_tokens=output, content=content)


@pytest.mark.parametrize("keeps", [False, True])
def test_who_is_admitted_with_a_token_left_has_places_for_drafts_if_wanted(keeps: bool) -> None:
    rules = structs.replace(FOUR, pads_admitted=True, keeps_blocks=keeps, past_max_tokens=True)
    plain, padding = cached_world(structs.replace(rules, pads_admitted=False), ALL), cached_world(rules, ALL)
    for world, tokens in ((plain, 1), (padding, 5)):
        submit_same(world, "a", prompt=9, output=1)
        world.steps_until_idle()
        second = submit_same(world, "b", prompt=9, output=3)
        step = world.step()
        assert step is not None
        assert step.tokens == {"b": tokens}
        held = world.replica().memory.num_held_blocks(second)
        assert held == (4 if keeps and tokens == 5 else 3)
        assert (second.num_output_tokens, second.num_draft_tokens) == (1, 0)  # nothing of it is a draft
        world.steps_until_idle()
        assert second.num_output_tokens == 3
        assert world.replica().memory.free_blocks == world.replica().memory.num_blocks


def test_places_that_do_not_fit_the_rest_of_the_budget_wait_and_those_beyond_it_are_left_out() -> None:
    rules = structs.replace(FOUR, pads_admitted=True, past_max_tokens=True)
    world = cached_world(rules, NONE, max_batch_tokens=8)
    submit_same(world, "a", prompt=9, output=1)
    world.steps_until_idle()
    submit_same(world, "b", prompt=9, output=9)
    submit_same(world, "c", prompt=9, output=2)
    first, second = world.step(), world.step()
    assert first is not None
    assert second is not None
    assert (first.tokens, second.tokens) == ({"b": 5}, {"b": 5})  # of eight, three are left
    small = cached_world(rules, NONE, max_batch_tokens=4)
    submit_same(small, "a", prompt=9, output=1)
    small.steps_until_idle()
    submit_same(small, "b", prompt=9, output=1)
    assert [step.tokens for step in small.steps_until_idle()] == [{"b": 1}]


@pytest.mark.parametrize("is_late", [False, True])
def test_what_was_accepted_last_is_found_unless_it_is_published_with_the_next_step(is_late: bool) -> None:
    world = cached_world(structs.replace(FOUR, publishes_late=is_late), ALL)
    content = PromptContent((("a", 4),))
    world.submit("a", num_prompt_tokens=4, num_output_tokens=6, max_tokens=6, content=content)
    world.steps_until_idle()  # 4 tokens, then five in one step, of which the last ones fill the second block
    longer = PromptContent((("a", 4), (output_segment("a"), 6), ("b", 7)))
    second = world.submit("b", num_prompt_tokens=longer.num_tokens, num_output_tokens=1, content=longer)
    world.steps_until_idle()
    assert second.num_cached_tokens == (4 if is_late else 8)


def test_the_last_hit_is_computed_anew_if_wanted_and_prompts_have_blocks_ahead() -> None:
    rules = structs.replace(FOUR, lookahead_tokens=4)
    world = cached_world(rules, NONE, PrefixCacheOptions(drop_last_hit=True))
    first = submit_same(world, "a", prompt=12, output=2)
    world.step()
    assert world.replica().memory.num_held_blocks(first) == 4  # of four tokens behind the prompt
    world.steps_until_idle()
    second = submit_same(world, "b", prompt=12, output=1)
    world.steps_until_idle()
    assert second.num_cached_tokens == 4  # two blocks are found


class Scripted:
    """Asks for as many drafts as a list says, by request."""

    def __init__(self, wishes: dict[str, int]) -> None:
        self.wishes = wishes
        self.answers: list[Refusal | None] = []

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        for request in replica.decodes():
            self.answers.append(batch.draft(request, self.wishes[request.request_id]))
        fill(replica, batch, lambda request, batch, replica: min(batch.max_chunk(request), batch.tokens_left))
        for request in replica.decodes():
            assert batch.draft(request, 1) in (Refusal.ALREADY_SCHEDULED, Refusal.NO_DRAFTS)


def test_a_policy_says_how_many_for_whom() -> None:
    policy = Scripted({"a": 0, "b": 3})
    options = HarnessOptions(drafts=DraftRules(num_tokens=1, max_tokens=3), acceptance=ALL)
    world = Harness("fcfs", "round_robin", policy, options)
    for name in "ab":
        world.submit(name, num_prompt_tokens=3, num_output_tokens=5, max_tokens=20)
    assert world.step().tokens == {"a": 3, "b": 3}  # type: ignore[union-attr]
    assert world.step().tokens == {"a": 1, "b": 4}  # type: ignore[union-attr]
    assert world.replica().limits.max_draft_tokens == 3
    for wish, allowed in ((4, "0 to 3"), (1.5, "whole numbers")):
        policy.wishes["a"] = wish  # type: ignore[assignment]
        with pytest.raises(PolicyError, match=rf"request a, .*cannot verify {wish} drafts. Allowed: {allowed}"):
            world.step()


def test_the_same_policy_runs_without_drafts() -> None:
    policy = Scripted({"a": 3})
    world = Harness("fcfs", "round_robin", policy)
    world.submit("a", num_prompt_tokens=3, num_output_tokens=5)
    world.steps_until_idle()
    assert set(policy.answers) == {Refusal.NO_DRAFTS}


def test_predictions_and_features_have_drafts() -> None:
    seen: list[tuple[BatchFeatures, float, float]] = []

    class Looks:
        def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
            for request in replica.decodes():
                before = batch.predicted_time_with(request, 1)
                batch.add(request, 1)
                seen.append((batch.features(), before, batch.predicted_time()))
            fill(replica, batch, lambda request, batch, replica: batch.max_chunk(request))

    rules = structs.replace(FOUR, step_s=0.5, token_s=0.25)
    options = HarnessOptions(drafts=rules, acceptance=NONE, latency=AffineModel(base_s=1.0, per_token_s=0.01))
    world = Harness("fcfs", "round_robin", Looks(), options)
    for name in "ab":
        world.submit(name, num_prompt_tokens=6, num_output_tokens=3, max_tokens=9)
    world.step()
    step = world.step()
    assert step is not None
    (one, told, is_so), (two, _, _) = seen
    assert one == BatchFeatures(num_decodes=1, decode_context_tokens=6, num_draft_tokens=4)
    assert two == BatchFeatures(num_decodes=2, decode_context_tokens=12, num_draft_tokens=8)
    assert told == is_so == pytest.approx(1.05 + 0.5 + 4 * 0.25)
    assert step.duration_s == pytest.approx(1.1 + 0.5 + 8 * 0.25)


@settings(max_examples=40, deadline=None)
@given(
    rates=st.lists(st.floats(0, 1), min_size=1, max_size=4),
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 25)), min_size=1, max_size=8),
    blocks=st.integers(14, 40),
    rules=st.builds(
        DraftRules,
        num_tokens=st.integers(0, 4),
        max_tokens=st.just(4),
        lookahead_tokens=st.integers(0, 4),
        keeps_blocks=st.booleans(),
        past_max_tokens=st.booleans(),
    ),
    scheduler=st.sampled_from(["vllm_v1", "fixed_chunk", "orca", "nano_vllm", "preemptive"]),
)
def test_every_request_gets_its_tokens(
    rates: list[float], lengths: list[tuple[int, int]], blocks: int, rules: DraftRules, scheduler: str
) -> None:
    options = HarnessOptions(
        block_size=4,
        num_blocks=blocks,
        max_batch_size=4,
        max_batch_tokens=40,
        reserve_prompt=False,
        max_model_len=64,
        drafts=rules,
        acceptance=RatesByPosition(rates, SeedTree(0), endless=True),
    )
    world = Harness("fcfs", "round_robin", scheduler, options)
    specs = [RequestSpec(f"r{k}", 0.003 * k, *both) for k, both in enumerate(lengths)]
    world.run(specs)
    for spec in specs:
        request = world.request(spec.request_id)
        assert request.num_output_tokens == len(token_times(request)) == spec.num_output_tokens
    assert world.replica().memory.free_blocks == blocks


def accepted_by(acceptance: RatesByPosition, lengths: Sequence[int]) -> list[int]:
    """Drafts that are accepted of a lone request, with so many drafts in turn."""
    world = harness(None, None)
    request = world.submit("a", num_prompt_tokens=1, num_output_tokens=400, max_tokens=400)
    found, outputs = [], DraftedOutputs()
    for count in lengths:
        found.append(acceptance.num_accepted(request, count))
        outputs.add([request], [0], [found[-1]], 1, 0)
    return found


def test_acceptance_by_position_has_its_mean() -> None:
    rates = [0.8, 0.5, 0.9]
    worlds = [RatesByPosition(rates, SeedTree(seed)) for seed in range(60)]
    found = np.concatenate([accepted_by(world, [3] * 60) for world in worlds])
    expected = 0.8 + 0.8 * 0.5 + 0.8 * 0.5 * 0.9
    assert np.mean(found) == pytest.approx(expected, abs=4 * np.std(found) / np.sqrt(len(found)))
    for position, rate in enumerate(rates):
        tried = found[found >= position]
        assert np.mean(tried > position) == pytest.approx(rate, abs=4 * np.sqrt(0.25 / len(tried)))
    assert worlds[0].max_tokens == 3


def test_a_token_is_guessed_or_not_whatever_the_steps() -> None:
    def guessed(lengths: Sequence[int]) -> tuple[set[int], set[int]]:
        place, right, wrong = 0, set(), set()
        accepted = accepted_by(RatesByPosition([0.6], SeedTree(3), endless=True), lengths)
        for drafts, count in zip(lengths, accepted, strict=True):
            right |= set(range(place, place + count))
            wrong |= {place + count} if count < drafts else set()
            place += 1 + count
        return right, wrong

    (right, wrong), (others_right, others_wrong) = guessed([4] * 40), guessed([1, 2, 6] * 20)
    assert not right & others_wrong
    assert not wrong & others_right
    assert len(right & others_right) > 10


def test_a_token_is_judged_by_the_number_at_its_place_in_the_stream_of_its_request() -> None:
    numbers = SeedTree(5).stream("a").random(400)
    accepted, place = accepted_by(RatesByPosition([0.7], SeedTree(5), endless=True), [3] * 80), 0
    for count in accepted:
        assert (numbers[place : place + count] < 0.7).all()
        assert count == 3 or numbers[place + count] >= 0.7
        place += 1 + count
    assert place > 128  # more than are drawn in one call


def test_a_number_that_equals_the_rate_is_a_rejection() -> None:
    rate = float(SeedTree(5).stream("a").random())
    assert 0.0 < rate < 1.0
    assert accepted_by(RatesByPosition([rate], SeedTree(5), endless=True), [1]) == [0]


SYSTEM: dict[str, Any] = {
    "version": 1,
    "seed": 4,
    "scheduling": {"preset": "vllm-v1"},
    "replica": {"max_model_len": 1024, "memory": {"num_blocks": 120}, "draft": {"num_tokens": 3}},
    "workload": {
        "type": "synthetic",
        "num_requests": 40,
        "arrivals": {"type": "poisson", "rate": 40.0},
        "prompt_tokens": {"type": "uniform", "min": 1, "max": 300},
        "output_tokens": {"type": "uniform", "min": 1, "max": 120},
    },
    "backend": {
        "simulator": {"latency": {"type": "affine", "base_s": 0.01, "per_token_s": 1e-4}, "drafts": {"rate": 0.7}}
    },
}


def run_it(folder: Path, drafts: dict[str, Any] | None = None, **replica: Any) -> RunData:
    mapping = json.loads(json.dumps(SYSTEM))
    mapping["replica"] |= replica
    if drafts is not None:
        mapping["backend"]["simulator"]["drafts"] = drafts
    return run_experiment(config_from_mapping(mapping), folder=folder)


def test_a_run_says_what_became_of_drafts_and_is_a_trace(tmp_path: Path) -> None:
    run = run_it(tmp_path / "run")
    requests = run.requests().to_pylist()
    assert run.summary is not None
    section = run.summary.data["drafts"]
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert section[name] == sum(one[name] for one in requests) > 0
    assert section["mean_acceptance_length"] == 1 + section["num_accepted_tokens"] / section["num_drafts"]
    for one in requests:
        # One token comes from the prompt, and each verification gives one besides what is accepted.
        assert one["num_output_tokens"] >= 1 + one["num_drafts"] + one["num_accepted_tokens"]
        if one["num_drafts"]:
            assert one["acceptance_length"] == 1 + one["num_accepted_tokens"] / one["num_drafts"]
    steps = run.steps()
    verified = sum(steps.column("decode_tokens").to_pylist()) - sum(steps.column("num_decodes").to_pylist())
    assert verified == section["num_draft_tokens"]
    again = run_it(tmp_path / "again", {"trace": str(tmp_path / "run" / DRAFTS_FILE)})
    for name in ("decisions.parquet", DRAFTS_FILE, "requests.parquet"):
        assert (again.path / name).read_bytes() == (run.path / name).read_bytes()
    shorter = run_it(tmp_path / "shorter", {"trace": str(tmp_path / "run" / DRAFTS_FILE)}, draft={"num_tokens": 1})
    assert shorter.summary is not None
    assert 0 < shorter.summary.data["drafts"]["num_accepted_tokens"] < section["num_accepted_tokens"]


def test_a_run_without_drafts_knows_nothing_of_them(tmp_path: Path) -> None:
    run = run_it(tmp_path / "run", draft={})
    assert "num_drafts" not in run.requests().column_names
    assert run.summary is not None
    assert "drafts" not in run.summary.data
    assert not (run.path / DRAFTS_FILE).exists()
    assert "draft:" not in (run.path / "config.yaml").read_text()


def test_a_measured_table(tmp_path: Path) -> None:
    table = tmp_path / "acceptance.csv"
    table.write_text("position,acceptance\n1,0.8\n2,0.4\n3,0.3\n")
    assert read_acceptance(table) == pytest.approx([0.8, 0.5, 0.75])


@pytest.mark.parametrize(("text", "message"), [
    ("position,acceptance\n1,0.8\n3,0.4\n", r":3: position is not the next one \(got 3\)"),
    ("position,acceptance\n1,0.8\n2,0.9\n", r":3: acceptance is no part of that at the position before \(got 0.9\)"),
    ("place,acceptance\n1,0.8\n", "is no table of acceptance by position"),
    ("position,acceptance\n", "has no rows"),
])  # fmt: skip
def test_tables_that_are_none(text: str, message: str, tmp_path: Path) -> None:
    table = tmp_path / "acceptance.csv"
    table.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_acceptance(table)


@pytest.mark.parametrize(("replica", "drafts", "message"), [
    ({"draft": {"num_tokens": 1024}}, None, r"replica.draft.num_tokens: .*no room for as many drafts \(got 1024\)"),
    ({"draft": {"num_tokens": 3}}, {"rates": [0.5, 0.5]}, r"replica.draft.num_tokens: .*fewer positions \(got 3\)"),
    ({}, {"rate": 0.5, "rates": [0.5]}, "exactly one of rate, rates, table, trace is needed"),
    ({}, {"rate": 1.5}, "at most 1"),
    ({}, {"trace": "nowhere.jsonl.gz"}, "nowhere.jsonl.gz cannot be read"),
    ({"kv_parallel": {"groups": 2, "group_tokens": 512}, "memory": {"num_blocks": 120, "prefix_cache": {"enabled": False}}}, None,
     "several KV-parallel groups"),
])  # fmt: skip
def test_what_is_refused(replica: dict[str, Any], drafts: dict[str, Any] | None, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        run_it(tmp_path / "run", drafts, **replica)


def test_a_broken_trace_is_refused(tmp_path: Path) -> None:
    file = tmp_path / DRAFTS_FILE
    with gzip.open(file, "wt") as out:
        out.write('{"request_id": "a", "places": [1], "accepted": [1, 2]}\n')
    with pytest.raises(ConfigError, match="cannot be read"):
        run_it(tmp_path / "run", {"trace": str(file)})


def test_a_request_that_the_trace_lacks_guesses_nothing() -> None:
    world = harness(FOUR, AcceptedInTrace({"a": [(1, 2), (4, 0)]}))
    requests = [world.submit(name, num_prompt_tokens=4, num_output_tokens=6, max_tokens=30) for name in "ab"]
    world.steps_until_idle()
    assert [one.num_accepted_tokens for one in requests] == [2, 0]
