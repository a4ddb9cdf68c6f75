"""Tokens, penalties and log-probabilities of vLLM's workers, against the built-in engine on the same model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.vllm.shared import ARGUMENTS, BLOCK_SIZE, MAX_LEN, NUM_BLOCKS, SharedWorkers
from vajra_py import LLM, SamplingParams
from vajra_py.engine.requests import RequestOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def workers(tiny_model: str) -> Iterator[SharedWorkers]:
    made = SharedWorkers(tiny_model)
    yield made
    made.shut_down()


def prompts(number: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 1000) for _ in range(rng.randint(1, 120))] for _ in range(number)]


def sizes(kind: str, **replica: Any) -> dict[str, Any]:
    memory = {
        "block_size": BLOCK_SIZE,
        "num_blocks": NUM_BLOCKS,
        "reservation": "incremental",
        "watermark_fraction": 0.0,
        "prefix_cache": {"enabled": True},
    }
    return {
        "scheduling": {
            "request_prioritizer": "fcfs",
            "replicaset_scheduler": "round_robin",
            "replica_scheduler": {"policy": "fixed_chunk", "params": {"chunk_size": 40}},
        },
        "replica": {"max_batch_size": 8, "max_model_len": MAX_LEN, "memory": memory, **replica},
        "backend": {kind: {"engine_args": ARGUMENTS} if kind == "vllm" else {}},
    }


def said(workers: SharedWorkers, model: str, wanted: Any, params: Any, **replica: Any) -> list[RequestOutput]:
    workers.engine = None
    with LLM(model, sizes("vllm", **replica), load=workers.load) as llm:
        return llm.generate(wanted, params)


def said_by_engine(model: str, wanted: Any, params: Any) -> list[RequestOutput]:
    with LLM(model, sizes("engine")) as llm:
        return llm.generate(wanted, params)


def test_greedy_tokens_are_the_engines_through_chunks_preemptions_and_cached_prefixes(
    workers: SharedWorkers, tiny_model: str
) -> None:
    wanted = prompts(20)
    wanted += [[*wanted[3], *one[:9]] for one in wanted[:6]]
    ours = said(workers, tiny_model, wanted, GREEDY)
    assert [one.token_ids for one in ours] == [one.token_ids for one in said_by_engine(tiny_model, wanted, GREEDY)]
    assert sum(one.metrics.num_preemptions for one in ours) > 0


PENALTIES = [
    replace(GREEDY, frequency_penalty=1.5),
    replace(GREEDY, presence_penalty=2.0),
    replace(GREEDY, repetition_penalty=1.7),
    replace(GREEDY, presence_penalty=-1.0, frequency_penalty=0.7, repetition_penalty=1.2),
]


def test_penalties_count_the_tokens_from_before_a_preemption(workers: SharedWorkers, tiny_model: str) -> None:
    wanted = prompts(16, 1)
    params = [PENALTIES[index % len(PENALTIES)] for index in range(16)]
    ours = said(workers, tiny_model, wanted, params)
    assert [one.token_ids for one in ours] == [one.token_ids for one in said_by_engine(tiny_model, wanted, params)]
    assert sum(one.metrics.num_preemptions for one in ours) > 0
    assert [one.token_ids for one in ours] != [one.token_ids for one in said(workers, tiny_model, wanted, GREEDY)]


def test_nothing_of_a_request_is_lost_if_more_requests_have_begun_than_two_steps_hold(
    workers: SharedWorkers, tiny_model: str
) -> None:
    wanted = [one[:20] for one in prompts(12, 4)]
    params = [replace(PENALTIES[index % len(PENALTIES)], prompt_logprobs=1) for index in range(12)]
    prompts_first = sizes("vllm", max_batch_size=2)
    prompts_first["scheduling"]["replica_scheduler"] = "nano_vllm"
    workers.engine = None
    with LLM(tiny_model, prompts_first, load=workers.load) as llm:
        ours = llm.generate(wanted, params)
    assert [one.token_ids for one in ours] == [one.token_ids for one in said_by_engine(tiny_model, wanted, params)]


def test_log_probabilities_are_the_engines(workers: SharedWorkers, tiny_model: str) -> None:
    wanted = prompts(12, 2)
    params = [replace(GREEDY, logprobs=index % 3, prompt_logprobs=(None, 0, 2)[index % 3]) for index in range(12)]
    ours, engines = said(workers, tiny_model, wanted, params), said_by_engine(tiny_model, wanted, params)
    for index, (one, other) in enumerate(zip(ours, engines, strict=True)):
        assert one.token_ids == other.token_ids
        assert one.logprobs is not None
        assert other.logprobs is not None
        pairs = [*zip(one.logprobs, other.logprobs, strict=True)]
        if index % 3:
            assert one.prompt_logprobs is not None
            assert other.prompt_logprobs is not None
            assert one.prompt_logprobs[0] is other.prompt_logprobs[0] is None
            scored = zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True)
            pairs += [(a, b) for a, b in scored if a is not None and b is not None]
            assert len(pairs) == len(one.token_ids) + len(wanted[index]) - 1
        for a, b in pairs:
            assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
            assert a.rank == b.rank
            assert [token for token, _ in a.top] == [token for token, _ in b.top]


def test_stop_tokens_and_least_lengths(workers: SharedWorkers, tiny_model: str) -> None:
    wanted = prompts(6, 3)
    plain = said(workers, tiny_model, wanted, GREEDY)
    stops = [one.token_ids[7] for one in plain]
    params = [replace(GREEDY, stop_token_ids=(stop,)) for stop in stops]
    params += [replace(GREEDY, stop_token_ids=(stop,), min_tokens=20) for stop in stops]
    ours = said(workers, tiny_model, [*wanted, *wanted], params)
    engines = said_by_engine(tiny_model, [*wanted, *wanted], params)
    assert [one.token_ids for one in ours] == [one.token_ids for one in engines]
    assert all(len(one.token_ids) <= 8 for one in ours[:6])
    assert all(len(one.token_ids) >= 20 for one in ours[6:])


def test_drawn_tokens_are_the_requests_own_whatever_else_is_in_the_batch(
    workers: SharedWorkers, tiny_model: str
) -> None:
    """No request is preempted here; prompts are computed in chunks, with which vLLM alone fails on a CPU."""
    params = [
        SamplingParams(temperature=0.9, top_k=50, top_p=0.95, seed=seed, max_tokens=12, ignore_eos=True)
        for seed in (3, 3, 4)
    ]
    prompt = list(range(30, 150))
    together = said(workers, tiny_model, [prompt] * 3, params)
    alone = said(workers, tiny_model, [prompt], params[:1])
    first, second, third = (one.token_ids for one in together)
    assert first == second == alone[0].token_ids
    assert first != third
    greedy = said(workers, tiny_model, [prompt], replace(GREEDY, max_tokens=12))
    assert first != greedy[0].token_ids


def test_drawn_tokens_go_on_after_a_preemption(workers: SharedWorkers, tiny_model: str) -> None:
    params = [
        SamplingParams(
            temperature=1.0, seed=seed, max_tokens=60, ignore_eos=True, frequency_penalty=0.5 if seed % 2 else 0.0
        )
        for seed in range(12)
    ]
    ours = said(workers, tiny_model, prompts(12, 5), params)
    assert sum(one.metrics.num_preemptions for one in ours) > 0
    for one in ours:
        assert len(one.token_ids) == 60
        assert len(set(one.token_ids)) > 20  # not the same draw each time
