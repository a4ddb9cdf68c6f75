"""What goes wrong with one row of a batch ends that row, by name, and changes nothing of the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vajra_py.engine.compute import Chunk, NewRow, SamplingParams, StepInput, TableUpdate
from vajra_py.engine.params import check_sampling
from vajra_py.errors import ConfigError, ExecutorError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from vajra_py.engine.compute.interface import LOST_ROW  # noqa: E402
from vajra_py.engine.compute.sampling.sampler import NO_TOKEN, Sampler  # noqa: E402

VOCAB = 40
KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.9, seed=5),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, logprobs=2),
    SamplingParams(temperature=1.1, top_k=7, frequency_penalty=0.4, min_tokens=3, logprobs=0),
)
EDGES = [0.0, 1e-320, 1e-45, 1e-40, 2.0**-126, 1e-38, 1e-30, 1e-10, 0.5, 1.0, 2.0, 1e10, 1e38, 3.4e38, 1e39, 1e308]


def anything() -> st.SearchStrategy[SamplingParams]:
    """Parameters of any size, most of them from where a type ends."""
    number = st.sampled_from(EDGES) | st.floats(allow_nan=False, allow_infinity=False)
    return st.builds(
        SamplingParams,
        temperature=number,
        top_p=number,
        min_p=number,
        top_k=st.none() | st.integers(1, 2**70),
        presence_penalty=st.sampled_from([-2.0, -1e-320, 0.0, 1e-45, 2.0]),
        frequency_penalty=st.sampled_from([-2.0, 0.0, 1e-320, 2.0]),
        repetition_penalty=number,
        min_tokens=st.sampled_from([0, 1, 16]),
        logprobs=st.none() | st.integers(0, 100),
    )


def complaint(params: SamplingParams) -> str | None:
    try:
        check_sampling(params, vocab_size=VOCAB)
    except ConfigError as error:
        return str(error)
    return None


def outputs(params: list[SamplingParams], logits: Any, times: int = 3) -> list[list[int]]:
    sampler = Sampler(len(params), VOCAB, (1,), torch.device("cpu"))
    for slot, one in enumerate(params):
        sampler.add(NewRow(slot, one, slot, prompt_token_ids=[3, 4, 5]))
    return [sampler.sample(logits, np.arange(len(params)))[0].tolist() for _ in range(times)]


@given(st.lists(anything(), min_size=1, max_size=3), st.floats(0.01, 1e4))
@example([SamplingParams(temperature=1e-320)], 1.0)
@example([SamplingParams(temperature=1.0, repetition_penalty=1e-40)], 1.0)
@example([SamplingParams(temperature=1e-38, repetition_penalty=2.0**-126, presence_penalty=2.0)], 1e4)
@settings(max_examples=150)
def test_parameters_at_the_edge_of_a_type_are_refused_or_sample_and_harm_nobody(
    hostile: list[SamplingParams], scale: float
) -> None:
    taken = [one for one in hostile if complaint(one) is None]
    generator = torch.Generator().manual_seed(len(hostile))
    logits = torch.randn(len(KINDS) + len(taken), VOCAB, generator=generator) * scale
    alone = outputs(list(KINDS), logits[: len(KINDS)])
    together = outputs([*KINDS, *taken], logits)
    assert [step[: len(KINDS)] for step in together] == alone
    assert all(0 <= token < VOCAB for step in together for token in step)


IN_SEQUENCES: dict[str, Callable[[Any], Any]] = {
    "stop_token_ids": lambda value: (value,),
    "allowed_token_ids": lambda value: (value,),
    "bad_words": lambda value: (value,),
    "bad_words_token_ids": lambda value: ((value,),),
    "logit_bias": lambda value: ((value, 1.0), (5, value)),
}
"""Representation of a value inside fields that hold several."""

STRANGE = [10**400, -(10**5000), 1e-320, float("inf"), float("nan"), "1", [1.5], 2**70]


@pytest.mark.parametrize("name", [one.name for one in fields(SamplingParams) if one.name not in ("stop", "ignore_eos")])
def test_any_value_of_any_parameter_is_refused_in_a_line_or_taken(name: str) -> None:
    for value in STRANGE:
        said = complaint(SamplingParams(**{name: IN_SEQUENCES.get(name, lambda one: one)(value)}))
        assert said is None or (f"sampling.{name}" in said and len(said) < 600)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("victim", range(len(KINDS)))
def test_logits_that_are_not_numbers_give_no_token_and_harm_nobody(poison: float, victim: int) -> None:
    logits = torch.randn(len(KINDS), VOCAB, generator=torch.Generator().manual_seed(1))
    expected = outputs(list(KINDS), logits)
    logits[victim, 7 if poison != float("-inf") else slice(None)] = poison
    found = outputs(list(KINDS), logits)
    for step, clean in zip(found, expected, strict=True):
        assert step[victim] == NO_TOKEN
        assert [token for row, token in enumerate(step) if row != victim] == [
            token for row, token in enumerate(clean) if row != victim
        ]


def test_a_request_that_may_put_out_nothing_gives_no_token() -> None:
    everything = SamplingParams(temperature=1.0, min_tokens=5, stop_token_ids=tuple(range(VOCAB)))
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    assert [step[0] for step in outputs([everything, KINDS[0]], logits)] == [NO_TOKEN] * 3


PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16], [17, 18]]


def first_step(params: SamplingParams = KINDS[0], prompts: list[list[int]] = PROMPTS) -> StepInput:
    return StepInput(
        [Chunk(slot, prompt, 0, True) for slot, prompt in enumerate(prompts)],
        new=[NewRow(slot, params, slot, prompt_token_ids=prompt) for slot, prompt in enumerate(prompts)],
        tables=[TableUpdate(slot, 0, [4 * slot, 4 * slot + 1, 4 * slot + 2]) for slot in range(len(prompts))],
    )


def steps_of(runner: Any, steps: list[StepInput]) -> list[tuple[dict[int, int], dict[int, str]]]:
    """By step: tokens by slot of the rows that gave one, and the faults."""
    found = []
    for step in steps:
        output = runner.run(step)
        rows = zip(output.slots, output.token_ids, strict=True)
        found.append(({slot: token for slot, token in rows if slot not in output.faults}, dict(output.faults)))
    return found


def spoil(monkeypatch: pytest.MonkeyPatch, runner: Any, break_it: Callable[[Any, Any, Any], Any]) -> None:
    """Let `break_it(token_ids, rows, logits)` stand between the forward pass and the sampler."""
    plain = runner._model.forward

    def forward(token_ids: Any, positions: Any, rows: Any, metadata: Any, caches: Any) -> Any:
        return break_it(token_ids, rows, plain(token_ids, positions, rows, metadata, caches))

    object.__setattr__(runner._model, "forward", forward)


def test_a_row_of_nan_is_named_and_the_others_go_on(
    compute_kit: Any, small_models: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = compute_kit.runner(small_models("llama"))
    further = [StepInput(decodes=[0, 1, 3]), StepInput(decodes=[0, 3, 1], freed=[2])]
    (first, _), *after = steps_of(clean, [first_step(), *further])
    runner = compute_kit.runner(small_models("llama"))

    def break_it(token_ids: Any, rows: Any, logits: Any) -> Any:
        logits[token_ids[rows] == PROMPTS[2][-1], 3] = float("nan")
        return logits

    spoil(monkeypatch, runner, break_it)
    found = steps_of(runner, [first_step(), *further])
    del first[2]
    assert found == [(first, {2: LOST_ROW}), *after]


def test_a_row_that_breaks_the_forward_pass_is_found_and_the_others_get_their_tokens(
    compute_kit: Any, small_models: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    further = [StepInput(decodes=[0, 1, 2, 3]), StepInput(decodes=[0, 1, 3]), StepInput(decodes=[1, 0], freed=[2])]
    for params in KINDS:
        clean = compute_kit.runner(small_models("llama"))
        expected = steps_of(clean, [first_step(params), *further])
        poisonous = expected[0][0][2]
        runner = compute_kit.runner(small_models("llama"))

        def break_it(token_ids: Any, rows: Any, logits: Any, poisonous: int = poisonous) -> Any:
            if 2 in (token_ids == poisonous).sum(-1, keepdim=True) or (token_ids[rows] == poisonous).any():
                raise RuntimeError("a kernel does not take this token")
            return logits

        spoil(monkeypatch, runner, break_it)
        found = steps_of(runner, [first_step(params), *further])
        assert found[0] == expected[0]
        tokens, faults = found[1]
        assert "RuntimeError: a kernel does not take this token" in faults[2]
        for (tokens, faults), (whole, _) in zip(found[1:], expected[1:], strict=True):
            assert {**tokens, **{slot: whole[slot] for slot in faults}} == whole
            assert set(faults) <= {2} | {slot for slot, token in expected[0][0].items() if token == poisonous}


@pytest.mark.parametrize("token", [96, -1, 2**80])
def test_a_token_out_of_the_vocabulary_ends_its_row(
    compute_kit: Any, small_models: Callable[[str], str], token: int
) -> None:
    expected = steps_of(compute_kit.runner(small_models("llama")), [first_step(), StepInput(decodes=[0, 2, 3])])
    runner = compute_kit.runner(small_models("llama"))
    wrong = [PROMPTS[0], [9, token, 11], *PROMPTS[2:]]
    found = steps_of(runner, [first_step(prompts=wrong), StepInput(decodes=[0, 2, 3])])
    del expected[0][0][1]
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert list(found[0][1]) == [1]
    assert "cannot be computed" in found[0][1][1]
    again = StepInput([Chunk(1, PROMPTS[1], 0, True)], new=[NewRow(1, KINDS[0], 1)], freed=[1])
    assert steps_of(runner, [again])[0][1] == {}, "the slot's next request is as good as any"


def test_a_runner_that_computes_nothing_any_more_is_lost(
    compute_kit: Any, small_models: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = compute_kit.runner(small_models("llama"))

    def break_it(token_ids: Any, rows: Any, logits: Any) -> Any:
        raise RuntimeError("the library is gone")

    spoil(monkeypatch, runner, break_it)
    with pytest.raises(ExecutorError, match="the library is gone"):
        runner.run(first_step())
