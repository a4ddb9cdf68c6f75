"""Are tokens sampled from the distribution that the parameters describe, for each request by itself?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vajra_py.engine.compute import Chunk, NewRow, SamplingParams, StepInput, TableUpdate

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from vajra_py.engine.compute.sampling.penalties import apply_penalties  # noqa: E402
from vajra_py.engine.compute.sampling.sampler import Sampler, truncate, uniform_numbers  # noqa: E402

VOCAB = 40


def sampler_for(rows: list[SamplingParams], seeds: list[int] | None = None, **facts: Any) -> Sampler:
    made = Sampler(len(rows), VOCAB, (1,), torch.device("cpu"))
    for slot, params in enumerate(rows):
        made.add(NewRow(slot, params, seeds[slot] if seeds else slot, **facts))
    return made


def kept_by(params: SamplingParams, logits: Any) -> set[int]:
    """Tokens that come out in many draws."""
    count = 4000
    sampler = Sampler(count, VOCAB, (1,), torch.device("cpu"))
    for slot in range(count):
        sampler.add(NewRow(slot, params, slot))
    tokens, _ = sampler.sample(logits.expand(count, -1), np.arange(count))
    return set(tokens.tolist())


def test_frequencies_follow_probabilities() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    count = 20000
    sampler = Sampler(count, VOCAB, (), torch.device("cpu"))
    for slot in range(count):
        sampler.add(NewRow(slot, SamplingParams(temperature=0.7), slot * 7919))
    tokens, _ = sampler.sample(logits.expand(count, -1), np.arange(count))
    observed = torch.bincount(tokens, minlength=VOCAB).double()
    expected = torch.softmax(logits[0].double() / 0.7, -1) * count
    chi_squared = float(((observed - expected) ** 2 / expected).sum())
    # 39 degrees of freedom: above 80 once in ten thousand.
    assert chi_squared < 80.0


@pytest.mark.parametrize(
    ("params", "processors"),
    [
        (SamplingParams(top_k=5), lambda w: [w.TopKLogitsWarper(5)]),
        (SamplingParams(top_p=0.6), lambda w: [w.TopPLogitsWarper(0.6)]),
        (SamplingParams(min_p=0.3), lambda w: [w.MinPLogitsWarper(0.3)]),
        (
            SamplingParams(temperature=1.7, top_k=12, top_p=0.8, min_p=0.2),
            lambda w: [
                w.TemperatureLogitsWarper(1.7),
                w.TopKLogitsWarper(12),
                w.TopPLogitsWarper(0.8),
                w.MinPLogitsWarper(0.2),
            ],
        ),
    ],
    ids=["top_k", "top_p", "min_p", "all"],
)
def test_truncation_keeps_what_transformers_keeps(
    params: SamplingParams, processors: Callable[[Any], list[Any]]
) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5
    scores = logits.clone()
    for processor in processors(transformers.generation.logits_process):
        scores = processor(None, scores)
    # Tokens less likely than one in 500 may be absent from 4000 draws.
    probabilities = torch.softmax(scores, -1)[0]
    allowed = set(torch.nonzero(probabilities > 0).flatten().tolist())
    likely = set(torch.nonzero(probabilities > 0.002).flatten().tolist())
    assert likely <= kept_by(params, logits) <= allowed
    assert 1 < len(allowed) < VOCAB


def test_greedy_and_top_k_of_one_agree() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(5))
    sampler = sampler_for([SamplingParams(temperature=0.0), SamplingParams(top_k=1), SamplingParams(top_p=1e-6)])
    tokens, _ = sampler.sample(logits, np.arange(3))
    assert tokens.tolist() == logits.argmax(-1).tolist()


def test_a_row_does_not_depend_on_its_mates() -> None:
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(6, VOCAB, generator=generator) * 2
    rows = [
        SamplingParams(temperature=0.9),
        SamplingParams(temperature=1.3, top_k=7),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.1, top_p=0.8, repetition_penalty=1.4),
        SamplingParams(temperature=2.0, min_p=0.1, presence_penalty=0.5),
        SamplingParams(temperature=1.0, min_tokens=9, stop_token_ids=(3, 4)),
    ]
    together = sampler_for(rows)
    tokens = [together.sample(logits, np.arange(6))[0].tolist() for _ in range(5)]
    for slot in range(6):
        alone = sampler_for(rows)
        by_itself = [int(alone.sample(logits[slot : slot + 1], np.array([slot]))[0]) for _ in range(5)]
        assert by_itself == [step[slot] for step in tokens]
    assert len({tuple(step) for step in tokens}) > 1


def test_a_stream_goes_on_where_it_was() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    params = SamplingParams(temperature=1.0, frequency_penalty=0.8)
    first = sampler_for([params], [99])
    whole = [int(first.sample(logits, np.array([0]))[0]) for _ in range(8)]
    second = sampler_for([params], [99], output_token_ids=whole[:5], num_output_tokens=5)
    assert [int(second.sample(logits, np.array([0]))[0]) for _ in range(3)] == whole[5:]


def test_other_seeds_give_other_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    streams = []
    for seed in (1, 2, -1, 2**63):
        sampler = sampler_for([SamplingParams()], [seed])
        streams.append(tuple(int(sampler.sample(logits, np.array([0]))[0]) for _ in range(12)))
    assert len(set(streams)) == 4


def test_uniform_numbers_fill_the_unit_interval() -> None:
    numbers = uniform_numbers(np.arange(5000, dtype=np.uint64) % 7, np.arange(5000) // 7)
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    assert abs(float(np.histogram(numbers, 10, (0, 1))[0].std())) < 60.0
    assert len(set(numbers.tolist())) == 5000


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(4))
    seen = [5, 6, 9, 9, 17]
    expected = transformers.generation.logits_process.RepetitionPenaltyLogitsProcessor(1.8)(
        torch.tensor([seen]), logits.clone()
    )
    params = SamplingParams(temperature=0.0, repetition_penalty=1.8)
    sampler = sampler_for([params], prompt_token_ids=seen[:3], output_token_ids=seen[3:], num_output_tokens=2)
    torch.testing.assert_close(apply_penalties(logits, sampler._parameters, sampler._histories), expected)


def test_presence_and_frequency_count_the_output_alone() -> None:
    logits = torch.zeros(1, VOCAB)
    params = SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25)
    sampler = sampler_for([params], prompt_token_ids=[2], output_token_ids=[7, 7, 7, 8], num_output_tokens=4)
    adjusted = apply_penalties(logits, sampler._parameters, sampler._histories)[0]
    assert adjusted[2] == 0.0
    assert adjusted[7] == pytest.approx(-0.5 - 3 * 0.25)
    assert adjusted[8] == pytest.approx(-0.5 - 0.25)


def test_ending_tokens_wait_for_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 1], logits[0, 3], logits[0, 20] = 9.0, 8.0, 7.0
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(3,))
    sampler = sampler_for([params])
    assert [int(sampler.sample(logits, np.array([0]))[0]) for _ in range(3)] == [20, 20, 1]
    ignoring = sampler_for([SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(3,), ignore_eos=True)])
    assert [int(ignoring.sample(logits, np.array([0]))[0]) for _ in range(3)] == [1, 1, 1]


def test_an_ending_token_beyond_the_vocabulary_keeps_nothing_from_being_sampled() -> None:
    sampler = Sampler(1, VOCAB, (1, VOCAB, 128001), torch.device("cpu"))
    sampler.add(NewRow(0, SamplingParams(temperature=0.0, min_tokens=1), 0))
    logits = torch.zeros(1, VOCAB)
    logits[0, 1], logits[0, 20] = 9.0, 7.0
    assert [int(sampler.sample(logits, np.array([0]))[0]) for _ in range(2)] == [20, 1]


def test_logprobs_are_the_models_own() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(8))
    params = SamplingParams(temperature=3.0, top_k=4, repetition_penalty=2.0, logprobs=3)
    sampler = sampler_for([params, SamplingParams(temperature=0.0, logprobs=0)])
    tokens, (slots, pending) = sampler.sample(logits, np.arange(2))
    found = dict(zip(slots, pending.result(), strict=True))
    expected = torch.log_softmax(logits, -1)
    best = expected[0].topk(3)
    assert found[0].logprob == pytest.approx(float(expected[0, tokens[0]]), abs=1e-5)
    assert [token for token, _ in found[0].top] == best.indices.tolist()
    assert found[0].rank == int((expected[0] > expected[0, tokens[0]]).sum()) + 1
    assert found[1].rank == 1
    assert found[1].top == ()


def test_sampled_requests_are_the_same_alone_and_together(compute_kit: Any, small_models: Callable[[str], str]) -> None:
    """Through the whole runner, under preemption and with other batch mates."""
    directory = small_models("qwen3")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 90, int(n)).tolist() for n in rng.integers(2, 20, 6)]
    params = [
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.2, top_p=0.9),
        SamplingParams(temperature=1.0, top_k=20, frequency_penalty=0.7),
        SamplingParams(temperature=1.0, repetition_penalty=1.3, min_p=0.05),
        SamplingParams(temperature=1.0, min_tokens=4),
    ]
    jobs = [
        compute_kit.job(prompt, 8, one, seed=index)
        for index, (prompt, one) in enumerate(zip(prompts, params, strict=True))
    ]
    driver = compute_kit.driver(compute_kit.runner(directory, num_blocks=12), 12, 1)
    driver.run(jobs, together=5)
    assert driver.counts["recompute"] > 0
    for index, job in enumerate(jobs):
        alone = compute_kit.job(job.prompt, 8, job.sampling, seed=index)
        compute_kit.driver(compute_kit.runner(directory, num_blocks=12), 12, 2, max_chunk=64).run([alone])
        assert alone.outputs == job.outputs


def test_decodes_take_the_last_token_from_the_device(compute_kit: Any, small_models: Callable[[str], str]) -> None:
    """A second step can be handed over before the first one's token is looked at."""
    directory = small_models("llama")
    runner = compute_kit.runner(directory)
    new = NewRow(2, SamplingParams(temperature=0.0), 0)
    first = runner.submit(StepInput([Chunk(2, [5, 6, 7], 0, True)], new=[new], tables=[TableUpdate(2, 0, [1, 4])]))
    second = runner.submit(StepInput(decodes=[2]))
    tokens = [*first.result().token_ids, *second.result().token_ids]
    logits = compute_kit.expected_logits(directory, [5, 6, 7, tokens[0]])
    assert tokens == logits[2:].argmax(-1).tolist()


def kept_by_definition(probabilities: Any, top_k: int | None, top_p: float, min_p: float) -> tuple[set[int], set[int]]:
    """(tokens that are kept for certain, tokens that may be): those at a threshold, within rounding, are only the latter."""
    one = probabilities.double()

    def kept(slack: float) -> set[int]:
        left = one.clone()
        if top_k is not None:
            left[left < left.topk(min(top_k, len(left))).values[-1] * slack] = 0.0
        left /= left.sum()
        ranked, order = left.sort(descending=True)
        before = ranked.cumsum(0) - ranked
        inside = {int(token) for token, mass in zip(order, before, strict=True) if mass * slack < top_p}
        largest = float(left.max())
        return {token for token in inside if left[token] > 0 and float(left[token]) >= min_p * largest * slack}

    likeliest = {int(one.argmax())}
    return kept(1.0 + 1e-4) | likeliest, kept(1.0 - 1e-4) | likeliest


@given(
    seed=st.integers(0, 10**6),
    scale=st.floats(0.2, 4.0),
    temperature=st.floats(0.2, 3.0),
    top_k=st.none() | st.integers(1, VOCAB),
    top_p=st.sampled_from([1.0]) | st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0]) | st.floats(1e-6, 1.0),
)
@settings(max_examples=150)
def test_truncation_follows_its_definition(
    seed: int, scale: float, temperature: float, top_k: int | None, top_p: float, min_p: float
) -> None:
    """The kept tokens are those of the definition, whose thresholds are sharp to a part in ten thousand."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    scores = (logits - logits.amax(-1, keepdim=True)) / temperature
    found = truncate(scores, sampler_for([params])._parameters)
    certain, possible = kept_by_definition(torch.softmax(scores, -1)[0], top_k, top_p, min_p)
    tokens = set(torch.nonzero(found[0] > float("-inf")).flatten().tolist())
    assert certain <= tokens <= possible, (seed, scale, temperature, top_k, top_p, min_p, certain - tokens)
