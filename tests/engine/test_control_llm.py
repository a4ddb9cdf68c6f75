"""Tokens of prompts as lists, as text and as streams, and clear errors where there are none."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.fake_runner import EOS_TOKEN_ID, VOCAB_SIZE, FakeRunner, expected_output
from vajra_py import LLM, AsyncLLM, SamplingParams
from vajra_py.contract.facts import StatedFacts
from vajra_py.contract.latency import LAST_S
from vajra_py.engine.compute import RunnerOptions, StepInput, StepOutput
from vajra_py.engine.outputs import OutputBuffer, detokenize
from vajra_py.engine.requests import RequestMaker
from vajra_py.engine.tokenizer import text_stream
from vajra_py.errors import ConfigError, ExecutorError, PolicyError
from vajra_py.runtime.serving.replica import Replica

SIZES = {"replica": {"max_model_len": 200, "memory": {"block_size": 8, "num_blocks": 60}}}
PROMPTS = [[1, 2, 3], [500], list(range(90)), [3, 2, 1]]


def settings(**engine: Any) -> dict[str, Any]:
    return {**SIZES, "backend": {"engine": {"random_weights": True, **engine}}}


@pytest.fixture
def llm(hollow_model: Path) -> Iterator[LLM]:
    with LLM(hollow_model, settings(), load=FakeRunner) as one:
        yield one


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=20, ignore_eos=True))
    assert [output.token_ids for output in outputs] == [expected_output(prompt, 20) for prompt in PROMPTS]
    assert {output.finish_reason for output in outputs} == {"length"}
    for output in outputs:
        assert output.metrics.ttft_s is not None
        assert output.metrics.ttft_s > 0
    again = llm.generate(PROMPTS[2], SamplingParams(max_tokens=3))
    assert again[0].token_ids == expected_output(PROMPTS[2], 3)
    assert again[0].metrics.num_cached_tokens == 88  # the prompt's full blocks are still there


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (1, 2, 3, 4)]
    assert [len(output.token_ids) for output in llm.generate(PROMPTS, params)] == [1, 2, 3, 4]
    with pytest.raises(ConfigError, match="are not one for each prompt"):
        llm.generate(PROMPTS, params[:2])


def test_n_outputs_of_a_prompt(llm: LLM) -> None:
    outputs = llm.generate([[1], [2]], SamplingParams(max_tokens=2), n=3)
    assert [list(output.prompt_token_ids) for output in outputs] == [[1]] * 3 + [[2]] * 3


def prompt_with_eos(after: int) -> tuple[list[int], list[int]]:
    """A prompt whose output has its end of sequence within `after` tokens, and that output."""
    for first in range(10**5):
        output = expected_output([first % VOCAB_SIZE, first // VOCAB_SIZE], after, stops_at_eos=True)
        if output[-1] == EOS_TOKEN_ID and len(output) > 2:
            return [first % VOCAB_SIZE, first // VOCAB_SIZE], output
    raise AssertionError


def test_where_a_request_stops(llm: LLM) -> None:
    prompt, output = prompt_with_eos(after=12)
    (stopped,) = llm.generate(prompt, SamplingParams(max_tokens=50))
    assert (stopped.token_ids, stopped.finish_reason, stopped.stopped_by) == (output, "stop", EOS_TOKEN_ID)
    (ignoring,) = llm.generate(prompt, SamplingParams(max_tokens=15, ignore_eos=True))
    assert ignoring.token_ids == expected_output(prompt, 15)
    (by_token,) = llm.generate(prompt, SamplingParams(max_tokens=50, stop_token_ids=(output[1],)))
    assert (by_token.token_ids, by_token.stopped_by) == (output[:2], output[1])
    (at_least,) = llm.generate(prompt, SamplingParams(max_tokens=len(output) + 2, min_tokens=len(output) + 1))
    assert len(at_least.token_ids) > len(output)
    assert EOS_TOKEN_ID not in at_least.token_ids[: len(output)]


def test_log_probabilities_are_those_of_the_tokens(llm: LLM) -> None:
    (output,) = llm.generate([5, 6], SamplingParams(max_tokens=4, logprobs=1, ignore_eos=True))
    assert output.logprobs is not None
    assert [entry.top[0][0] for entry in output.logprobs] == list(output.token_ids)
    assert llm.generate([5, 6], SamplingParams(max_tokens=4))[0].logprobs is None


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, r"prompts\[0\]: is empty"),
        (list(range(200)), {}, r"prompts\[0\]: is too long \(200 tokens"),
        ([VOCAB_SIZE], {}, "not in the model's vocabulary"),
        ([-1], {}, "not in the model's vocabulary"),
        ("text", {}, "the model has no tokenizer"),
        ([1.5], {}, "neither text nor token ids"),
        (None, {}, "neither text nor token ids"),
        (1.5, {}, "neither text nor token ids"),
        (b"hi", {}, r"prompts\[0\]: is neither text nor token ids \(bytes\)"),
        (np.array(5), {}, r"prompts\[0\]: "),
        ({1: 2}, {}, r"neither text nor token ids \(dict\)"),
        ({1, 2}, {}, r"neither text nor token ids \(set\)"),
        ([1], {"temperature": -0.1}, "temperature: is out of range"),
        ([1], {"temperature": float("nan")}, "temperature: is out of range"),
        ([1], {"top_p": 0.0}, "top_p: is out of range"),
        ([1], {"min_p": 1.1}, "min_p: is out of range"),
        ([1], {"top_k": 0}, "top_k: is out of range"),
        ([1], {"max_tokens": 0}, "max_tokens: is out of range"),
        ([1], {"min_tokens": 17}, "min_tokens: is above max_tokens"),
        ([1], {"repetition_penalty": 0.0}, "repetition_penalty: is out of range"),
        ([1], {"frequency_penalty": 2.5}, "frequency_penalty: is out of range"),
        ([1], {"logprobs": -1}, "logprobs: is out of range"),
        ([1], {"seed": -3}, "seed: is out of range"),
        ([1], {"seed": "7"}, "seed: is out of range"),
        ([1], {"stop": ("",)}, "stop: has an empty string"),
        ([1], {"stop": ("a",)}, "stop: needs a tokenizer"),
        ([1], {"stop": "The end"}, r"stop: is not a list \('The end'\)\. Allowed: a list or tuple of strings"),
        ([1], {"stop": [5, "a"]}, r"stop: has entries of another type \(5\)"),
        ([1], {"stop_token_ids": 5}, r"stop_token_ids: is not a list \(5\)"),
        ([1], {"logit_bias": {5: 1.0}}, r"logit_bias: is not a list .* Allowed: a list or tuple of pairs"),
        ([1], {"logit_bias": [5]}, r"logit_bias: has entries of another type \(5\)"),
        ([1], {"bad_words": "word"}, r"bad_words: is not a list \('word'\)"),
        ([1], {"bad_words": ["a\ud800"]}, r"bad_words: has what is no word"),
        ([1], {"bad_words_token_ids": [7]}, r"bad_words_token_ids: has entries of another type \(7\)"),
        ([1], {"stop_token_ids": (VOCAB_SIZE,)}, "stop_token_ids: are not tokens of the model"),
    ],
)
def test_bad_input_is_one_clear_line(llm: LLM, prompt: Any, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        llm.generate([prompt], SamplingParams(**params))
    assert len(caught.value.problems) == 1
    assert llm.generate([1], SamplingParams(max_tokens=2))[0].token_ids == expected_output([1], 2)


@pytest.mark.parametrize(
    ("prompts", "changed", "message"),
    [
        ({"prompt": "hi"}, {}, r"prompts\[0\]: is neither text nor token ids \(dict\)"),
        ({"hi", "there"}, {}, r"prompts\[0\]: is neither text nor token ids \(set\)"),
        (b"hi", {}, r"prompts\[0\]: is neither text nor token ids \(bytes\)"),
        ([[1]], {"params": {"max_tokens": 3}}, r"sampling: are no sampling parameters .* Allowed: SamplingParams"),
        ([[1]], {"params": [None]}, r"sampling: are no sampling parameters \(None\)"),
        ([[1]], {"n": "2"}, r"n: is out of range \('2'\)"),
        ([[1]], {"facts": {"adapter": ""}}, "facts: are no facts .* Allowed: StatedFacts, or None"),
    ],
)
def test_a_value_of_another_type_is_one_clear_line(
    llm: LLM, prompts: Any, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        llm.generate(prompts, **changed)


def test_prompts_may_come_from_any_iterable(llm: LLM) -> None:
    given: Any = (iter(prompt) for prompt in PROMPTS)
    outputs = llm.generate(given, SamplingParams(max_tokens=2), n=2)
    assert [output.prompt_token_ids for output in outputs] == [prompt for prompt in PROMPTS for _ in range(2)]


@pytest.mark.parametrize("messages", ["hello", ["hello"], {"role": "user", "content": "hello"}, None])
def test_messages_are_a_list_of_mappings(llm: LLM, messages: Any) -> None:
    words: Any = Words()
    assert llm.engine is not None
    llm._requests = RequestMaker(llm.engine, words)
    with pytest.raises(ConfigError, match=r"messages: are no list of mappings \(.*Allowed: a list of mappings with"):
        llm.chat(messages)


def test_a_layer_of_another_type_is_one_clear_line(llm: LLM) -> None:
    layer: Any = ["request_prioritizer"]
    with pytest.raises(ConfigError, match="layer: there is no such layer"):
        llm.swap_policy(layer, "fcfs")


def test_lists_are_as_good_as_tuples(llm: LLM) -> None:
    words: Any = Words()
    assert llm.engine is not None
    llm._requests = RequestMaker(llm.engine, words)
    lists = SamplingParams(
        stop=["END"], stop_token_ids=[3], logit_bias=[[5, 1.0]], allowed_token_ids=[5, 6], bad_words_token_ids=[[7]]  # type: ignore[arg-type]
    )  # fmt: skip
    made = llm._requests.make([1], lists).output.sampling
    assert (made.stop, made.stop_token_ids, made.logit_bias) == (("END",), (3,), ((5, 1.0),))
    assert (made.allowed_token_ids, made.bad_words_token_ids) == ((5, 6), ((7,),))


def test_half_of_a_character_is_refused_before_it_is_tokenized(llm: LLM) -> None:
    words: Any = Words()
    assert llm.engine is not None
    llm._requests = RequestMaker(llm.engine, words)
    with pytest.raises(ConfigError, match=r"prompts\[0\]: has half of a surrogate pair"):
        llm.generate("a\ud800b")
    with pytest.raises(ConfigError, match="messages: has half of a surrogate pair"):
        llm.chat([{"role": "user", "content": "\ud800"}])


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e308, -1.0, "1"])
def test_a_duration_that_no_clock_holds_ends_its_own_call_alone(llm: LLM, seconds: Any) -> None:
    allowed = r"is out of range \(.*\)\. Allowed: 0 to 9,000,000 s, or None"
    for name in ("expires_after_s", "deadline_s"):
        with pytest.raises(ConfigError, match=f"facts.{name}: {allowed}"):
            llm.generate([1], facts=StatedFacts(**{name: seconds}))
    (output,) = llm.generate([1], SamplingParams(max_tokens=2), facts=StatedFacts(expires_after_s=LAST_S))
    assert output.token_ids == expected_output([1], 2)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("priority", "high", r"is out of range \('high'\)\. Allowed: a whole number from -2147483648 to 2147483647"),
        ("priority", float("nan"), "is out of range"),
        ("priority", None, "is out of range"),
        ("priority", True, "is out of range"),
        ("priority", 10**400, "is out of range"),
        ("tenant", ["x"], r"is no text \(\['x'\]\)\. Allowed: a text of whole characters"),
        ("session_id", "\ud800", "is no text"),
        ("program_id", None, "is no text"),
        ("parent_calls", 5, r"is no list of texts \(5\)"),
        ("parent_calls", "call", "is no list of texts"),
        ("parent_calls", ("call", 5), "is no list of texts"),
        ("num_program_calls", "3", "Allowed: a whole number from 1 to 2147483647, or None"),
        ("num_program_calls", 0, "is out of range"),
        ("is_last_call", "no", "is neither True nor False"),
    ],
)
def test_a_fact_of_another_kind_ends_its_own_call_alone(llm: LLM, name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"facts\.{name}: .*{message}"):
        llm.generate([1], facts=StatedFacts(**{name: value}))
    parents: Any = ["call"]
    stated = StatedFacts(
        priority=np.int64(-1),  # type: ignore[arg-type]
        tenant="x",
        program_id="p",
        parent_calls=parents,
        num_program_calls=1,
    )
    (output,) = llm.generate([1], SamplingParams(max_tokens=2), facts=stated)
    assert output.token_ids == expected_output([1], 2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"replica": {"memory": {"prefix_cache": {"unscheduled": "keep"}}}}, "would let requests read KV blocks"),
        ({"scheduling": {"request_prioritizer": "fcsf"}}, "Did you mean 'fcfs'"),
        ({"backend": {"simulator": {}}}, "an LLM computes with a model"),
        ({"backend": {"engine": {"device": "tpu"}}}, "backend.engine.device"),
        (
            {"backend": {"engine": {"output_length": {"type": "oracle"}}}},
            "output_length: the output lengths .* Allowed: none, ",
        ),
        ({"backend": {"engine": {"sampling": {"top_p": 2.0}}}}, "sampling: top_p: is out of range .* up to 1"),
    ],
)
def test_bad_settings_are_found_before_a_model_is_loaded(
    hollow_model: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(hollow_model, changed, load=refuses_to_load)
    with pytest.raises(ConfigError, match="there is no such directory"):
        LLM(hollow_model / "absent", load=refuses_to_load)


def refuses_to_load(options: object) -> Any:
    raise AssertionError("loaded")


@pytest.mark.parametrize(("layer", "policy"), [("request_prioritizer", "lrs"), ("replica_scheduler", "dynamic_chunk")])
def test_a_policy_that_needs_predictions_says_so_before_a_model_is_loaded(
    layer: str, policy: str, hollow_model: Path
) -> None:
    layers = {"request_prioritizer": "fcfs", "replicaset_scheduler": "pull", "replica_scheduler": "fixed_chunk"}
    with pytest.raises(ConfigError, match=r"^backend\.engine\.latency: is missing"):
        LLM(hollow_model, {**settings(), "scheduling": {**layers, layer: policy}}, load=refuses_to_load)


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_an_llm_whose_memory_does_not_fit_leaves_nothing_behind(kind: type[LLM | AsyncLLM], hollow_model: Path) -> None:
    class Full(FakeRunner):
        def __init__(self, options: RunnerOptions) -> None:
            super().__init__(options)
            left.add(self)

        def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
            raise ExecutorError("KV memory: does not fit")

        def close(self) -> None:
            left.discard(self)

    left: set[FakeRunner] = set()
    with pytest.raises(ExecutorError, match="does not fit"):
        kind(hollow_model, {**settings(), "num_replicas": 2}, load=Full)
    assert not left


def test_an_engine_that_ended_is_closed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise PolicyError("some policy", "broke the contract")

    monkeypatch.setattr(Replica, "next_plan", broken)
    with pytest.raises(PolicyError, match="broke the contract"):
        llm.generate([1, 2])
    with pytest.raises(ExecutorError, match="closed"):
        llm.generate([1, 2])


# Streams


def async_llm(model: Path, **replaced: Any) -> AsyncLLM:
    return AsyncLLM(model, settings(), **{"load": FakeRunner, **replaced})


def test_garbage_collections_leave_out_what_existed_before_a_run(hollow_model: Path) -> None:
    class Watching(FakeRunner):
        def run(self, step: StepInput) -> StepOutput:
            frozen.append(gc.get_freeze_count())
            return super().run(step)

    frozen: list[int] = []
    before = gc.get_freeze_count(), gc.get_threshold(), gc.isenabled()
    with LLM(hollow_model, settings(), load=Watching) as one:
        frozen.clear()  # loading may have run a step
        one.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
        assert min(frozen) > 10_000
    assert gc.get_freeze_count() <= before[0]  # objects that were frozen before may have been freed meanwhile
    assert (gc.get_threshold(), gc.isenabled()) == before[1:]


def test_a_stream_gives_what_is_new(hollow_model: Path) -> None:
    async def read() -> None:
        async with async_llm(hollow_model) as llm:
            parts = [part async for part in llm.stream([1, 2], SamplingParams(max_tokens=9, ignore_eos=True))]
            assert [token for part in parts for token in part.token_ids] == expected_output([1, 2], 9)
            assert all(part.output is None for part in parts[:-1])
            assert parts[-1].output is not None
            assert parts[-1].output.token_ids == expected_output([1, 2], 9)
            params = SamplingParams(max_tokens=9, ignore_eos=True)
            outputs = await asyncio.gather(*(llm.generate(prompt, params) for prompt in PROMPTS))
            assert [one.token_ids for one in outputs] == [expected_output(prompt, 9) for prompt in PROMPTS]
            with pytest.raises(ConfigError, match="is empty"):
                await llm.generate([])

    asyncio.run(read())


def test_who_stops_reading_takes_the_request_back(hollow_model: Path) -> None:
    async def read() -> None:
        async with async_llm(hollow_model) as llm:
            stream = llm.stream([1, 2], SamplingParams(max_tokens=190, ignore_eos=True))
            async for _ in stream:
                break
            await stream.aclose()
            # A later request is served after the other's memory is freed, however scarce memory is.
            await llm.generate(list(range(190)), SamplingParams(max_tokens=5, ignore_eos=True))
            controller = llm.engine.controller
            await llm.generate([7], SamplingParams(max_tokens=5, ignore_eos=True))
            counts = {reason.value: count for reason, count in controller.num_ended.items()}
            assert controller.num_alive == 0
            assert counts in ({"aborted": 1, "length": 2}, {"length": 3})

    asyncio.run(read())


def test_an_engine_that_ends_tells_its_readers(hollow_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def read() -> None:
        llm = async_llm(hollow_model)

        def broken(*_: Any) -> Any:
            raise PolicyError("some policy", "broke the contract")

        monkeypatch.setattr(Replica, "next_plan", broken)
        for _ in range(2):
            with pytest.raises(PolicyError, match="broke the contract"):
                await llm.generate([1])
        llm.close()
        llm.close()

    asyncio.run(read())


# Text


class Words:
    """A tokenizer of bytes."""

    def __init__(self, stripped_blanks: int | None = None) -> None:
        self.stripped_blanks = stripped_blanks
        self.calls: list[int] = []

    def encode(self, text: str, *, is_rendered: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("utf-8", "replace")

    def decode_all(self, rows: Sequence[Sequence[int]]) -> list[str]:
        self.calls.append(len(rows))
        return [self.decode(row) for row in rows]

    def piece(self, token_id: int) -> bytes | None:
        return bytes([token_id])

    def render_chat(self, messages: Any) -> str:
        return "".join(message["content"] for message in messages)


def collect(text: str, stripped_blanks: int | None = None, **params: Any) -> tuple[list[str], OutputBuffer, bool]:
    stream = text_stream(Words(stripped_blanks))
    buffer = OutputBuffer(SamplingParams(max_tokens=100, **params), (), stream)
    seen, stopped = [], False
    for token in text.encode():
        buffer.append(token)
        seen.append(buffer.text)
        stopped = buffer.stopped_by is not None
        if stopped:
            break
    buffer.finish()
    return seen, buffer, stopped


@pytest.mark.parametrize("stripped_blanks", [None, 0])
def test_text_grows_by_whole_characters(stripped_blanks: int | None) -> None:
    text = "naïve — 日本 🚀!"
    seen, buffer, _ = collect(text, stripped_blanks)
    assert buffer.text == text
    assert all(text.startswith(part) for part in seen)
    _, cut, _ = collect("a", stripped_blanks)
    assert cut.text == "a"


@pytest.mark.parametrize("stripped_blanks", [None, 0])
def test_an_incomplete_character_at_the_end_shows_as_one(stripped_blanks: int | None) -> None:
    buffer = OutputBuffer(SamplingParams(), (), text_stream(Words(stripped_blanks)))
    for token in "a日".encode()[:-1]:
        buffer.append(token)
        assert buffer.text == "a"
    buffer.finish()
    assert buffer.text == "a\ufffd"
    assert buffer.text == "a\ufffd"


@pytest.mark.parametrize(("stripped_blanks", "expected"), [(0, "  a  b"), (1, " a  b"), (2, "a  b"), (3, "a  b")])
def test_blanks_are_stripped_at_the_beginning_alone(stripped_blanks: int, expected: str) -> None:
    seen, buffer, _ = collect("  a  b", stripped_blanks)
    assert buffer.text == seen[-1] == expected


def test_text_that_nobody_reads_is_made_at_the_end_at_once() -> None:
    words = Words()
    buffer = OutputBuffer(SamplingParams(), (ord("!"),), text_stream(words))
    assert [buffer.append(token) for token in b"hello!"] == [False] * 5 + [True]
    buffer.finish()
    assert words.calls == []
    assert (buffer.text, buffer.stopped_by) == ("hello", ord("!"))
    assert words.calls == [2, 2]  # the text, and whether something is left


def test_a_step_is_detokenized_in_one_call_of_the_tokenizer() -> None:
    words = Words()
    outputs = [OutputBuffer(SamplingParams(), (), text_stream(words)) for _ in range(5)]
    outputs.append(OutputBuffer(SamplingParams(), ()))  # one without a tokenizer
    for number, one in enumerate(outputs):
        one.append(ord("a") + number)
    detokenize(outputs)
    assert [one.text for one in outputs] == ["a", "b", "c", "d", "e", ""]
    assert words.calls == [10]


@pytest.mark.parametrize(
    ("text", "stops", "min_tokens", "expected", "stopped_by"),
    [
        ("hello world", ("o w",), 0, "hell", "o w"),
        ("hello world", ("xyz", "world"), 0, "hello ", "world"),
        ("hello", ("lol", "lo!"), 0, "hello", None),
        ("aab aab!", ("aab!",), 0, "aab ", "aab!"),
        ("one. two.", (".",), 3, "one", "."),
        (
            "one. two.",
            (".",),
            4,
            "one. two",
            ".",
        ),  # as in vLLM, a stop string ends behind the first `min_tokens` tokens
        ("ab", ("b", "ab"), 0, "", "ab"),
    ],
)
def test_stop_strings(
    text: str, stops: tuple[str, ...], min_tokens: int, expected: str, stopped_by: str | None
) -> None:
    seen, buffer, stopped = collect(text, stop=stops, min_tokens=min_tokens)
    assert (buffer.text, buffer.stopped_by, stopped) == (expected, stopped_by, stopped_by is not None)
    assert all(expected.startswith(part) for part in seen)  # no text is shown that is retracted later
