"""A policy breaks the contract in the middle of a real vLLM's work, and another takes over: clients notice nothing."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output import StructuredOutputManager

from tests.vllm.plugins import install_broken
from vajra_py.plugins import build_registry
from vajra_py.vllm import Scheduler

STEPS = (2, 7, 13, 24)
"""In which the policy breaks the contract: while prompts are computed, and later."""


@pytest.fixture(scope="module")
def vllm(tiny_model: str) -> Iterator[LLM]:
    llm = LLM(
        tiny_model,
        dtype="float32",
        block_size=32,
        max_model_len=256,
        max_num_seqs=16,
        max_num_batched_tokens=1024,  # with a seed, vLLM cannot cut a prompt on a CPU
        enforce_eager=True,
        enable_prefix_caching=False,  # the schedulers take turns, and do not know what others write
        async_scheduling=False,
        num_gpu_blocks_override=25,
    )
    yield llm
    del llm
    gc.collect()


@pytest.fixture
def breaking(vllm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Puts a scheduler in place whose policy breaks the contract at a step."""
    install_broken(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = build_registry(metadata.entry_points(group="vajra"))
    monkeypatch.setattr("vajra_py.vllm.scheduler.load_registry", lambda: registry)
    core: Any = vllm.llm_engine.engine_core.engine_core
    own = core.scheduler
    config = core.vllm_config
    made: list[Any] = []

    def schedule_by(at_step: int, fallback: str = "vllm-v1") -> Any:
        file = tmp_path / "experiment.yaml"
        file.write_text(
            "version: 1\npreset: sarathi\n"
            f"scheduling: {{replica_scheduler: {{policy: breaks, params: {{at_step: {at_step}}}}}}}\n"
            f"backend: {{vllm: {{fallback: {fallback}}}}}\n"
        )
        config.additional_config = {"vajra": {"experiment": str(file)}}
        manager = StructuredOutputManager(config)
        core.structured_output_manager = manager
        core.scheduler = Scheduler(config, own.kv_cache_config, manager, config.cache_config.block_size)
        made.append(core.scheduler)
        return core.scheduler

    manager = core.structured_output_manager
    yield schedule_by
    for one in made:
        one.schedule()  # the workers forget what has ended
        one.shutdown()
    core.scheduler, core.structured_output_manager = own, manager
    sys.modules.pop("broken_policies", None)


def prompts(number: int) -> list[dict[str, list[int]]]:
    rng = random.Random(3)
    return [{"prompt_token_ids": [rng.randrange(3, 1000) for _ in range(rng.randint(5, 60))]} for _ in range(number)]


def said(llm: LLM, wanted: list[Any], params: list[SamplingParams]) -> list[Any]:
    """All that clients are told."""
    return [
        (
            [(list(one.token_ids), one.text, one.finish_reason, one.stop_reason) for one in each.outputs],
            [_rounded(one.logprobs) for one in each.outputs],
            _rounded(each.prompt_logprobs),
        )
        for each in llm.generate(wanted, params, use_tqdm=False)
    ]


def _rounded(logprobs: Any) -> Any:
    if logprobs is None:
        return None
    return [
        None if one is None else {token: (round(value.logprob, 3), value.rank) for token, value in one.items()}
        for one in logprobs
    ]


@pytest.mark.parametrize("at_step", STEPS)
def test_clients_get_what_they_would_have_had(vllm: LLM, breaking: Callable[..., Any], at_step: int) -> None:
    wanted = prompts(8)
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    text = vllm.generate(wanted[:1], greedy, use_tqdm=False)[0].outputs[0].text
    params = [
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=[text[20:24]]),
        SamplingParams(temperature=0.9, seed=5, n=3, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=30, logprobs=3, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=30, structured_outputs=StructuredOutputsParams(regex="[ab]{24}")),
        SamplingParams(
            temperature=0.0, max_tokens=25, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])
        ),
        SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=list(range(3, 100)), min_tokens=8),
        SamplingParams(temperature=0.0, max_tokens=30, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=9, prompt_logprobs=1, ignore_eos=True),
    ]
    expected = said(vllm, wanted, params)
    scheduler = breaking(at_step)
    assert said(vllm, wanted, params) == expected
    assert scheduler._fault is not None
    assert scheduler.mechanism.fault is None
    assert scheduler.mechanism.num_steps > at_step
    scheduler.schedule()
    memory = scheduler.mechanism.replica.memory
    assert memory.free_blocks == memory.num_blocks
    assert not scheduler.requests


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_abort_around_the_change_is_kept(vllm: LLM, breaking: Callable[..., Any], when: str) -> None:
    scheduler = breaking(6)
    engine: Any = vllm.llm_engine
    for name, tokens in zip("abc", prompts(3), strict=True):
        engine.add_request(f"{when}-{name}", tokens, SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0))
    ended: dict[str, int] = {}

    def step() -> None:
        for one in engine.step():
            if one.finished:
                ended[one.request_id] = len(one.outputs[0].token_ids)

    while scheduler.mechanism.num_steps < 5:
        step()
    if when == "after":
        while scheduler._fault is None:
            step()
    engine.abort_request([f"{when}-b"])
    while engine.has_unfinished_requests():
        step()
    assert scheduler._fault is not None
    assert ended == {f"{when}-a": 30, f"{when}-c": 30}
    assert not scheduler.requests


def test_without_a_second_fallback_the_reason_is_told(
    vllm: LLM, breaking: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = breaking(4)
    change = scheduler.mechanism.change_policies

    def then_break(choices: Any) -> None:
        change(choices)

        def slip(*_: Any) -> None:
            raise ZeroDivisionError("again")

        monkeypatch.setattr(scheduler.mechanism.replica, "_schedule", slip)

    monkeypatch.setattr(scheduler.mechanism, "change_policies", then_break)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    outputs = [one.outputs[0] for one in vllm.generate(prompts(3), params, use_tqdm=False)]
    assert {one.finish_reason for one in outputs} == {"error"}
    assert all("ZeroDivisionError: again" in str(one.stop_reason) for one in outputs)
