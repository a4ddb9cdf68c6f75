"""Preset vllm-v1 decides what vLLM's own scheduler decides."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler as VllmsOwn

from tests.vllm.core import Core, RequestScript, Step, make_scheduler, vllm_config
from vajra_py.vllm import Scheduler


def workload(
    rng: random.Random, block_size: int, num_blocks: int, max_len: int, by_priority: bool
) -> list[RequestScript]:
    capacity = min((num_blocks - 1) * block_size, max_len)
    scripts, arrives = [], 0
    shared = [rng.randrange(500) for _ in range(capacity)]
    for index in range(rng.randint(3, 24)):
        arrives += rng.choice((0, 0, 0, 1, 2, 9))
        prompt = rng.randint(1, max(1, capacity * 2 // 3))
        common = rng.randint(0, prompt) if rng.random() < 0.6 else 0
        tokens = shared[:common] + [rng.randrange(500) for _ in range(prompt - common)]
        longest = max(1, capacity - prompt)
        output = rng.randint(1, min(longest, 60))
        scripts.append(
            RequestScript(
                f"r-{index}",
                tuple(tokens),
                output,
                arrives,
                priority=rng.randrange(3) if by_priority else 0,
                aborts=arrives + rng.randint(0, 20) if rng.random() < 0.1 else None,
                ends_at=rng.randint(1, output) if rng.random() < 0.3 else None,
                salt=rng.choice((None, "a")) if rng.random() < 0.2 else None,
            )
        )
    return scripts


def options(rng: random.Random, by_priority: bool, caches: bool) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "max_num_seqs": rng.choice((1, 2, 4, 8, 64)),
        "max_model_len": 256,
        "enable_prefix_caching": caches,
        "scheduling_policy": "priority" if by_priority else "fcfs",
        "max_num_batched_tokens": rng.choice((16, 64, 256)),
    }
    if rng.random() < 0.3:
        chosen["long_prefill_token_threshold"] = rng.choice((8, 24))
    if rng.random() < 0.2:
        chosen["watermark"] = 0.1
    if rng.random() < 0.2:
        chosen["prefill_schedule_interval"] = rng.choice((2, 3, 7))
    chosen["max_num_seqs"] = min(chosen["max_num_seqs"], chosen["max_num_batched_tokens"])
    return chosen


def _that_run(steps: list[Step]) -> list[Step]:
    """The steps that run something; who was preempted in an attempt that ran nothing was preempted in the next."""
    found: list[Step] = []
    preempted: list[str] = []
    for step in steps:
        preempted = sorted({*preempted, *step.preempted})
        if step.scheduled:
            found.append(replace(step, preempted=preempted))
            preempted = []
    return found


def same(model: str, seed: int, *, is_async: bool = False) -> None:
    rng = random.Random(seed)
    by_priority, caches = seed % 3 == 2, seed % 2 == 0
    block_size = rng.choice((4, 16))
    num_blocks = rng.choice((8, 12, 20, 200)) * 16 // block_size + 1
    given = options(rng, by_priority, caches)
    scripts = workload(rng, block_size, num_blocks, 256, by_priority)
    runs = []
    for cls in (VllmsOwn, Scheduler):
        config = vllm_config(model, is_async=is_async, **given)
        core = Core(make_scheduler(cls, config, num_blocks, block_size), is_async)
        core.run(scripts, block_size, caches)
        runs.append(core)
    own, ours = runs
    pairs = zip(_that_run(own.steps), _that_run(ours.steps), strict=True)
    for number, (one, other) in enumerate(pairs):
        assert one == other, f"step {number}"
    assert own.tokens == ours.tokens
    assert own.reasons == ours.reasons
    assert ours.steps[-1].free == num_blocks - 1
    ours.scheduler.mechanism.replica.memory.check()
    ours.scheduler.mechanism.controller.check_conservation()


@pytest.mark.parametrize("seed", range(40))
def test_decisions_are_vllms(tiny_model: str, seed: int) -> None:
    same(tiny_model, seed)
