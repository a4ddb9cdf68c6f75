"""Drafts are planned as vLLM plans them: the same tokens for the same requests, blocks and preemptions, step by step."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from tests.vllm.core import RequestScript, made_up_token, make_scheduler, request_of, vllm_config
from vajra_py.contract import RequestView
from vajra_py.runtime.step.builder_options import DraftRules
from vajra_py.testing import Harness, HarnessOptions

BLOCK = 16


@dataclass(frozen=True)
class Case:
    num_drafts: int
    num_blocks: int
    budget: int
    max_seqs: int
    max_model_len: int
    scripts: tuple[RequestScript, ...]


def case_of(seed: int) -> Case:
    rng = random.Random(seed)
    longest = rng.choice([64, 160])
    scripts = []
    for number in range(rng.randint(6, 14)):
        prompt = rng.randint(2, longest // 2)
        tokens = rng.randint(1, longest - prompt)
        scripts.append(RequestScript(f"r-{number}", tuple(range(10, 10 + prompt)), tokens, rng.randint(0, 25)))
    return Case(
        num_drafts=rng.randint(1, 6),
        num_blocks=-(-longest // BLOCK) + rng.randint(1, 12),
        budget=rng.choice([8, 24, 64]),
        max_seqs=rng.randint(1, 6),
        max_model_len=longest,
        scripts=tuple(scripts),
    )


def num_accepted(name: str, place: int, num_drafts: int) -> int:
    """Drafts that are accepted behind so many outputs: some tokens of a request are guessed, others are not."""
    count = 0
    while count < num_drafts and zlib.crc32(f"{name} {place + count} guessed".encode()) % 3:
        count += 1
    return count


class Guesses:
    """The same for this project's mechanism."""

    max_tokens = None

    def num_accepted(self, request: RequestView, num_drafts: int) -> int:
        return num_accepted(request.request_id, request.num_output_tokens, num_drafts)

    def release(self, request: RequestView) -> None:
        """Nothing is kept."""


@dataclass
class Taken:
    """A step's decisions: tokens by request, requests that were preempted, free blocks."""

    tokens: dict[str, int]
    preempted: list[str]
    free: int


def by_vllm(model: str, case: Case) -> list[Taken]:
    config = configuration(model, case)
    scheduler = make_scheduler(Scheduler, config, case.num_blocks + 1, BLOCK, log_stats=False)
    scripts, steps = {one.name: one for one in case.scripts}, []
    for turn in range(5000):
        for script in case.scripts:
            if script.arrives == turn:
                scheduler.add_request(request_of(script, BLOCK, caches=False))
        if not scheduler.has_requests():
            if turn > 30:
                return steps
            continue
        output = scheduler.schedule()
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        preempted = sorted(output.preempted_req_ids or ())
        if output.num_scheduled_tokens:
            steps.append(Taken(dict(output.num_scheduled_tokens), preempted, free))
        sampled = []
        names = list(output.num_scheduled_tokens)
        for name in names:
            request = scheduler.requests[name]
            drafts = output.scheduled_spec_decode_tokens.get(name, [])
            place = request.num_output_tokens
            if request.num_computed_tokens < request.num_tokens:
                sampled.append([])
                continue
            count = 1 + num_accepted(name, place, len(drafts))
            sampled.append([made_up_token(name, place + k) for k in range(count)])
        result = ModelRunnerOutput(names, {name: k for k, name in enumerate(names)}, sampled)
        scheduler.update_from_output(output, result)
        drafted = [name for name, tokens in zip(names, sampled, strict=True) if tokens and name in scheduler.requests]
        scheduler.update_draft_token_ids(DraftTokenIds(drafted, [[1] * case.num_drafts for _ in drafted]))
        assert all(scripts[name] for name in names)
    raise AssertionError("vLLM does not finish")


_MADE: dict[int, Any] = {}


def configuration(model: str, case: Case) -> Any:
    config = _MADE.get(case.num_drafts)
    if config is None:
        speculative = {"method": "ngram", "num_speculative_tokens": case.num_drafts, "prompt_lookup_max": 3}
        config = vllm_config(model, max_model_len=512, enforce_eager=True, speculative_config=speculative)
        _MADE[case.num_drafts] = config
    config.cache_config.enable_prefix_caching = False
    config.model_config.max_model_len = case.max_model_len
    config.scheduler_config.max_num_batched_tokens = case.budget
    config.scheduler_config.max_num_scheduled_tokens = case.budget
    config.scheduler_config.max_num_seqs = case.max_seqs
    config.scheduler_config.scheduler_reserve_full_isl = True
    return config


def by_vajra(case: Case) -> list[Taken]:
    rules = DraftRules(num_tokens=case.num_drafts, max_tokens=case.num_drafts, keeps_blocks=True, past_max_tokens=True)
    options = HarnessOptions(
        block_size=BLOCK,
        num_blocks=case.num_blocks,
        max_batch_size=case.max_seqs,
        max_batch_tokens=case.budget,
        max_model_len=case.max_model_len,
        reserve_prompt=False,
        drafts=rules,
        acceptance=Guesses(),
    )
    harness = Harness(("fcfs", {"preempted": "first"}), "round_robin", "vllm_v1", options)
    steps: list[Taken] = []
    for turn in range(5000):
        for script in case.scripts:
            if script.arrives == turn:
                harness.submit(script.name, len(script.prompt), script.max_tokens, max_tokens=script.max_tokens)
        step = harness.step()
        if step is not None:
            steps.append(Taken(step.tokens, sorted(name for name, _ in step.preempted), step.free_blocks))
        elif turn > 30:
            return steps
    raise AssertionError("it does not finish")


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_steps_with_drafts_are_vllms(first: int, tiny_model: str) -> None:
    happened: Counter[str] = Counter()
    for seed in range(first, first + 20):
        case = case_of(seed)
        theirs, ours = by_vllm(tiny_model, case), by_vajra(case)
        for number, (one, other) in enumerate(zip(theirs, ours, strict=False)):
            assert one == other, f"seed {seed}, step {number}"
        assert len(theirs) == len(ours), f"seed {seed}"
        happened["preempted"] += sum(len(step.preempted) for step in ours)
        happened["steps"] += len(ours)
        happened["several"] += sum(
            sum(1 < count <= 1 + case.num_drafts for count in step.tokens.values()) for step in ours
        )
    assert happened["preempted"] > 3
    assert happened["several"] > 100
