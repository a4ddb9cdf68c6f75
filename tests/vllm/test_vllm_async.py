"""Asynchronous scheduling, in a harness that calls a scheduler as vLLM's engine core does with a queue of two steps."""

from __future__ import annotations

import random

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from tests.vllm.core import Core, make_scheduler, vllm_config
from tests.vllm.test_vllm_decisions import options, workload
from vajra_py.vllm import Scheduler


@pytest.mark.parametrize("seed", range(24))
def test_every_request_gets_the_tokens_that_vllms_gives_it(tiny_model: str, seed: int) -> None:
    rng = random.Random(seed)
    by_priority, caches = seed % 3 == 2, seed % 2 == 0
    block_size = rng.choice((4, 16))
    num_blocks = rng.choice((8, 12, 20, 200)) * 16 // block_size + 1
    given = options(rng, by_priority, caches)
    scripts = list(workload(rng, block_size, num_blocks, 256, by_priority))
    runs = []
    for cls in (AsyncScheduler, Scheduler):
        config = vllm_config(tiny_model, is_async=True, **given)
        core = Core(make_scheduler(cls, config, num_blocks, block_size), is_async=True)
        core.run(scripts, block_size, caches)
        runs.append(core)
    own, ours = runs
    aborted = {one.name for one in scripts if one.aborts is not None}
    assert own.reasons.keys() == ours.reasons.keys()
    for name in own.reasons.keys() - aborted:
        assert own.tokens[name] == ours.tokens[name], name
        assert own.reasons[name] == ours.reasons[name]
    assert len(ours.steps) <= len(own.steps) + 2
    ours.scheduler.shutdown()
    assert ours.scheduler.mechanism.replica.memory.free_blocks == num_blocks - 1
    ours.scheduler.mechanism.controller.check_conservation()
