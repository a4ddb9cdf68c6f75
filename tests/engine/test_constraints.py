"""Tokens that requests allow, favour and forbid, against transformers' own processors of logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

PROMPTS = [[5 + (7 * k + 3 * j * j) % 300 for j in range(length)] for k, length in enumerate((3, 17, 33, 41))]
COUNT = 20


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from vajra_py.engine.tiny import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def sizes(num_blocks: int = 64, **engine: Any) -> dict[str, Any]:
    memory = {"block_size": 8, "num_blocks": num_blocks, "reservation": "incremental", "watermark_fraction": 0.0}
    return {
        "scheduling": {
            "request_prioritizer": "fcfs",
            "replicaset_scheduler": "round_robin",
            "replica_scheduler": {"policy": "fixed_chunk", "params": {"chunk_size": 24}},
        },
        "replica": {"max_batch_size": 4, "max_model_len": 160, "memory": memory},
        "backend": {"engine": engine},
    }


class Reference:
    """transformers' forward pass and processors, one request at a time, the largest score each time."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model)

    def tokens(self, prompt: list[int], params: Any) -> list[int]:
        import torch
        from transformers.generation import logits_process as w

        vocab, outputs = self.model.config.vocab_size, list[int]()
        for _ in range(COUNT):
            with torch.inference_mode():
                scores = self.model(torch.tensor([[*prompt, *outputs]])).logits[:, -1].float()
            ids = torch.tensor([outputs], dtype=torch.long)
            if params.allowed_token_ids is not None:
                others = sorted(set(range(vocab)) - set(params.allowed_token_ids))
                scores = w.SuppressTokensLogitsProcessor(others)(ids, scores)
            if params.bad_words_token_ids:
                words = [list(word) for word in params.bad_words_token_ids]
                scores = w.NoBadWordsLogitsProcessor(words)(ids, scores)
            if params.logit_bias:
                bias = {(token,): value for token, value in params.logit_bias}
                scores = w.SequenceBiasLogitsProcessor(bias)(ids, scores)
            if params.repetition_penalty != 1.0:
                both = torch.tensor([[*prompt, *outputs]])
                scores = w.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(both, scores)
            outputs.append(int(scores.argmax()))
        return outputs


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


def greedy(**given: Any) -> Any:
    from vajra_py import SamplingParams

    return SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True, **given)


@pytest.fixture(scope="module")
def cases(reference: Reference) -> list[tuple[list[int], Any]]:
    """Prompts and parameters that each change what the request before them put out."""
    made = []
    for prompt in PROMPTS:
        free = reference.tokens(prompt, greedy())
        pairs = tuple((free[k], free[k + 1]) for k in (2, 5, 9))
        mixed = {
            "allowed_token_ids": (*tuple(range(0, 1024, 3)), free[0]),
            "bad_words_token_ids": (pairs[0], (free[0], free[1], free[2]), (free[6],)),
            "logit_bias": ((9, 4.0), (12, 2.5), (free[3], -3.0)),
            "repetition_penalty": 1.3,
        }
        made += [
            (prompt, greedy(bad_words_token_ids=(*pairs, tuple(free[3:7]), (free[4],)))),
            (prompt, greedy(allowed_token_ids=(8, 9, 10, 400, 401, 1023))),
            (prompt, greedy(logit_bias=((free[0], -100.0), (77, 2.0), (78, 0.25), (free[7], -1.5)))),
            (prompt, greedy(**mixed)),
        ]
    return made


@pytest.fixture(scope="module")
def expected(cases: list[tuple[list[int], Any]], reference: Reference) -> list[list[int]]:
    return [reference.tokens(prompt, params) for prompt, params in cases]


def test_greedy_outputs_are_those_of_transformers(
    tiny_model: Path, cases: list[tuple[list[int], Any]], expected: list[list[int]], reference: Reference
) -> None:
    from vajra_py import LLM

    prompts, params = [one for one, _ in cases], [one for _, one in cases]
    free = {tuple(prompt): reference.tokens(prompt, greedy()) for prompt in PROMPTS}
    assert all(free[tuple(prompt)] != output for prompt, output in zip(prompts, expected, strict=True))
    # in company of requests without constraints, and preempted: twelve blocks are few
    with LLM(tiny_model, sizes(12)) as llm:
        outputs = llm.generate([*prompts, *PROMPTS], [*params, *[greedy()] * len(PROMPTS)])
    assert [one.token_ids for one in outputs[: len(prompts)]] == expected
    assert [one.token_ids for one in outputs[len(prompts) :]] == list(free.values())
    assert sum(one.metrics.num_preemptions for one in outputs) > 0


def test_they_are_so_with_ranks_in_processes_and_decodes_begun_ahead(
    tiny_model: Path, cases: list[tuple[list[int], Any]], expected: list[list[int]]
) -> None:
    from vajra_py import LLM

    engine = {"workers": "process", "tensor_parallel": 2, "look_ahead": True, "num_threads": 1}
    with LLM(tiny_model, sizes(20, **engine)) as llm:
        outputs = llm.generate([one for one, _ in cases], [one for _, one in cases])
    assert [one.token_ids for one in outputs] == expected


def test_sampled_outputs_keep_to_them_and_repeat(tiny_model: Path) -> None:
    from vajra_py import LLM, SamplingParams

    def sampled(seed: int, **given: Any) -> Any:
        return SamplingParams(max_tokens=COUNT, temperature=3.0, seed=seed, ignore_eos=True, **given)

    few = tuple(range(30, 38))
    pairs = tuple((one, other) for one in few for other in few[:4])  # only the last four may follow anything
    params = [sampled(k, allowed_token_ids=few, bad_words_token_ids=pairs, logit_bias=((33, 100.0),)) for k in range(8)]
    prompts = [PROMPTS[k % 4] for k in range(8)]
    with LLM(tiny_model, sizes(14)) as llm:
        together = llm.generate(prompts, params)
    with LLM(tiny_model, sizes(64)) as llm:
        alone = [llm.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert sum(one.metrics.num_preemptions for one in together) > 0
    for one, other in zip(together, alone, strict=True):
        assert one.token_ids == other.token_ids
        assert one.token_ids[0] == 33  # likelier than e^33 others, while nothing stands before it
        assert set(one.token_ids[1:]) <= set(few[4:])
    assert len({tuple(one.token_ids) for one in together}) > 1


def test_words_become_the_sequences_that_vllm_makes_of_them(tiny_model: Path) -> None:
    """The rule of vLLM's `SamplingParams.update_from_tokenizer`, computed here in its own way."""
    from transformers import AutoTokenizer

    from vajra_py.engine.requests import load_tokenizer
    from vajra_py.engine.tokenizer import with_bad_words

    own = AutoTokenizer.from_pretrained(tiny_model)
    words = ["the", " the", "river", "xqzzy", "a", "\nthe", "über", "the"]
    wanted: list[list[int]] = []
    for word in words:
        for blank in ("", " "):
            ids = own.encode(blank + word.lstrip(), add_special_tokens=False)
            if not blank or (ids[0] != wanted[-1][0] and len(ids) == len(wanted[-1])):
                wanted.append(ids)
    made = with_bad_words(greedy(bad_words=tuple(words)), load_tokenizer(str(tiny_model)))
    assert list(made.bad_words_token_ids) == list(dict.fromkeys(map(tuple, wanted)))
    assert made.bad_words == ()
    assert any(len(one) > 1 for one in made.bad_words_token_ids)
    assert len(made.bad_words_token_ids) > len({word.strip() for word in words})


def test_words_do_not_occur_in_the_text(tiny_model: Path) -> None:
    from vajra_py import LLM

    with LLM(tiny_model, sizes()) as llm:
        (free,) = llm.generate(["Once upon a time"], greedy())
        assert llm.tokenizer is not None
        words = tuple({llm.tokenizer.decode([token]).strip() for token in free.token_ids[:8]} - {""})
        (kept,) = llm.generate(["Once upon a time"], greedy(bad_words=words))
        assert free.token_ids[0] != kept.token_ids[0]
        forbidden = {tuple(llm.tokenizer.encode(word, is_rendered=True)) for word in words}
        assert not any((token,) in forbidden for token in kept.token_ids)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"allowed_token_ids": ()}, "sampling.allowed_token_ids: is empty"),
        ({"allowed_token_ids": (5, 1024)}, "sampling.allowed_token_ids: are not tokens of the model (1024)"),
        ({"allowed_token_ids": (5,), "bad_words_token_ids": ((5,),)}, "sampling.allowed_token_ids: leaves no token"),
        ({"logit_bias": ((3, 100.5),)}, "sampling.logit_bias: is out of range (100.5). Allowed: -100 to 100"),
        ({"logit_bias": ((3, float("nan")),)}, "sampling.logit_bias: is out of range (nan)"),
        ({"logit_bias": ((-1, 1.0),)}, "sampling.logit_bias: are not tokens of the model (-1)"),
        ({"logit_bias": tuple((k, 1.0) for k in range(1025))}, "sampling.logit_bias: has too many tokens (1025)"),
        ({"bad_words": ("fine", " ")}, "sampling.bad_words: has what is no word"),
        ({"bad_words_token_ids": ((),)}, "sampling.bad_words_token_ids: has an empty sequence"),
        ({"bad_words_token_ids": ((4, 2**70),)}, "sampling.bad_words_token_ids: are not tokens of the model (1180"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], said: str) -> None:
    from vajra_py.engine.params import check_sampling
    from vajra_py.errors import ConfigError

    with pytest.raises(ConfigError) as refused:
        check_sampling(greedy(**given), "sampling", 1024)
    assert said in [str(one)[: len(said)] for one in refused.value.problems]
