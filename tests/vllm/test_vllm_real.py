"""A real vLLM, scheduled by this project's policies, on a tiny model."""

from __future__ import annotations

import gc
import os
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError

from vajra_py.vllm import Scheduler

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 128,
    "enforce_eager": True,
    "disable_log_stats": False,
    "block_size": 32,
    "num_gpu_blocks_override": 40,
}


def prompts(number: int, seed: int = 0) -> list[dict[str, list[int]]]:
    rng = random.Random(seed)
    common = [rng.randrange(3, 1000) for _ in range(300)]
    return [
        {
            "prompt_token_ids": common[: rng.choice((0, 130, 270))]
            + [rng.randrange(3, 1000) for _ in range(rng.randint(1, 60))]
        }
        for _ in range(number)
    ]


def greedy(rng: random.Random, **given: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 80), **given)


@pytest.fixture(scope="module")
def ours(tiny_model: str) -> Iterator[LLM]:
    llm = LLM(tiny_model, scheduler_cls=Scheduler, **OPTIONS)
    yield llm
    del llm
    gc.collect()


@pytest.fixture(scope="module")
def vllms(tiny_model: str) -> Iterator[LLM]:
    llm = LLM(tiny_model, async_scheduling=False, **OPTIONS)
    yield llm
    del llm
    gc.collect()


def scheduler_of(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def said(llm: LLM, wanted: list[Any], params: list[SamplingParams]) -> list[Any]:
    outputs = llm.generate(wanted, params, use_tqdm=False)
    return [
        [(list(one.token_ids), one.text, one.finish_reason, one.stop_reason) for one in each.outputs]
        for each in outputs
    ]


def test_the_process_is_one(ours: LLM) -> None:
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert isinstance(scheduler_of(ours), Scheduler)


@pytest.mark.parametrize("seed", range(3))
def test_greedy_tokens_are_vllms(ours: LLM, vllms: LLM, seed: int) -> None:
    rng = random.Random(seed)
    wanted = prompts(40, seed)
    params = [greedy(rng, ignore_eos=rng.random() < 0.5) for _ in wanted]
    assert said(ours, wanted, params) == said(vllms, wanted, params)
    memory = scheduler_of(ours).mechanism.replica.memory
    assert memory.num_blocks == 39


def test_prefix_hits_chunked_prompts_and_preemptions_are_among_what_runs(
    ours: LLM, vllms: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[Any] = []
    for llm in (ours, vllms):
        llm.reset_prefix_cache()
    schedule = scheduler_of(ours).schedule

    def spy(*given: Any) -> Any:
        steps.append(schedule(*given))
        return steps[-1]

    monkeypatch.setattr(scheduler_of(ours), "schedule", spy)
    wanted = prompts(24, 11)
    params = [SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True) for _ in wanted]
    found, expected = (llm.generate(wanted, params, use_tqdm=False) for llm in (ours, vllms))
    for one, other in zip(found, expected, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.num_cached_tokens == other.num_cached_tokens
    assert any(one.num_cached_tokens for one in found)
    assert any(step.preempted_req_ids for step in steps)
    new = [(one, step) for step in steps for one in step.scheduled_new_reqs]
    parts = [step.num_scheduled_tokens[one.req_id] + one.num_computed_tokens for one, step in new]
    assert any(part < len(one.prompt_token_ids) for part, (one, _) in zip(parts, new, strict=True))


def test_n_stop_strings_and_logprobs(ours: LLM, vllms: LLM) -> None:
    wanted = prompts(6, 7)
    wanted[1] = {"prompt_token_ids": list(range(30, 50))}  # with a seed, vLLM cannot cut a prompt on a CPU
    first = said(vllms, wanted, [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)] * 6)
    piece = next(text for [(_, text, _, _)] in first if len(text) > 12)[6:9]
    params = [
        SamplingParams(temperature=0.0, max_tokens=40, stop=[piece]),
        SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=12),
        SamplingParams(temperature=0.0, max_tokens=12, logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=1),
        SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=list(range(3, 200))),
        SamplingParams(temperature=0.0, max_tokens=30, min_tokens=9, stop_token_ids=list(range(3, 500))),
    ]
    assert said(ours, wanted, params) == said(vllms, wanted, params)
    both = [llm.generate(wanted, params, use_tqdm=False) for llm in (ours, vllms)]
    for one, other in zip(*both, strict=True):
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)
        assert (one.outputs[0].logprobs is None) == (other.outputs[0].logprobs is None)
        if one.outputs[0].logprobs is not None:
            pairs = zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True)
            for a, b in pairs:
                assert {k: round(v.logprob, 3) for k, v in a.items()} == {k: round(v.logprob, 3) for k, v in b.items()}
        if one.prompt_logprobs is not None:
            for a, b in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
                assert {k: round(v.logprob, 3) for k, v in a.items()} == {k: round(v.logprob, 3) for k, v in b.items()}


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"regex": "[0-4]{3}-x"}, "[0-4]{3}-x"),
        ({"json": {"enum": ["ab", 7]}}, '"ab"|7'),
    ],
)
def test_structured_output(ours: LLM, vllms: LLM, constraint: dict[str, Any], pattern: str) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    given = StructuredOutputsParams(**constraint)
    params = [SamplingParams(temperature=0.0, max_tokens=40, structured_outputs=given)] * 5
    found = said(ours, prompts(5), params)
    assert found == said(vllms, prompts(5), params)
    for [(_, text, reason, _)] in found:
        assert re.fullmatch(pattern, text), text
        assert reason == "stop"


def test_abort(ours: LLM) -> None:
    engine = ours.llm_engine
    engine.add_request("a", prompts(1)[0], SamplingParams(max_tokens=200, ignore_eos=True))
    engine.add_request("b", prompts(1)[0], SamplingParams(max_tokens=20, ignore_eos=True))
    for _ in range(5):
        engine.step()
    engine.abort_request(["a"])
    ended = []
    while engine.has_unfinished_requests():
        ended += [one.request_id for one in engine.step() if one.finished]
    assert ended == ["b"]


def test_wrong_objectives_are_refused_with_the_reason(ours: LLM) -> None:
    params = SamplingParams(max_tokens=4, extra_args={"vajra_ttft_slo_s": -1})
    fine = SamplingParams(max_tokens=4, extra_args={"vajra_ttft_slo_s": 0.5, "vajra_tenant": "a"}, ignore_eos=True)
    engine = ours.llm_engine
    with pytest.raises(VLLMValidationError, match="vajra_ttft_slo_s"):
        engine.add_request("wrong", prompts(1)[0], params)
    engine.add_request("fine", prompts(1)[0], fine)
    ended = {}
    while engine.has_unfinished_requests():
        ended |= {one.request_id: one.outputs[0] for one in engine.step() if one.finished}
    assert list(ended) == ["fine"]
    assert ended["fine"].finish_reason == "length"


def test_nothing_is_left(ours: LLM) -> None:
    scheduler = scheduler_of(ours)
    scheduler.schedule()
    memory = scheduler.mechanism.replica.memory
    assert memory.free_blocks == memory.num_blocks
    scheduler.mechanism.controller.check_conservation()
