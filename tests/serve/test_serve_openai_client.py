"""Does the official openai client work against a server process as it comes?"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

MODEL = "tiny"
TEXT = "The scheduler decides which requests run"


@pytest.fixture(scope="module")
def client(tiny_server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0, timeout=120) as one:
        yield one


def complete(client: openai.OpenAI, **given: Any) -> Any:
    return client.completions.create(**{"model": MODEL, "prompt": TEXT, "max_tokens": 12, "temperature": 0, **given})


def chat(client: openai.OpenAI, **given: Any) -> Any:
    messages = [{"role": "user", "content": "Say something"}]
    return client.chat.completions.create(
        **{"model": MODEL, "messages": messages, "max_tokens": 12, "temperature": 0, **given}
    )


def test_models_are_listed(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    assert models[0].max_model_len == 512  # type: ignore[attr-defined]


def test_completion_says_what_it_took(client: openai.OpenAI) -> None:
    answer = complete(client, extra_body={"return_token_ids": True})
    choice = answer.choices[0]
    assert choice.finish_reason in ("length", "stop")
    assert answer.usage.completion_tokens == len(choice.token_ids)
    assert answer.usage.prompt_tokens == len(choice.prompt_token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_greedy_is_repeatable_and_streams_the_same(client: openai.OpenAI) -> None:
    whole = complete(client)
    assert complete(client).choices[0].text == whole.choices[0].text
    pieces = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].text for piece in pieces[:-1]) == whole.choices[0].text
    assert [piece.choices[0].finish_reason for piece in pieces[:-1]][-1] == whole.choices[0].finish_reason
    assert all(piece.usage is None for piece in pieces[:-1])
    assert pieces[-1].choices == []
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(pieces) > 3


def test_chat_streams_what_it_answers(client: openai.OpenAI) -> None:
    whole = chat(client)
    assert whole.choices[0].message.role == "assistant"
    pieces = list(chat(client, stream=True))
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_chat_parts_read_like_a_text(client: openai.OpenAI) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "Say something"}]}]
    assert chat(client, messages=parts).choices[0].message.content == chat(client).choices[0].message.content


def test_token_ids_read_like_their_text(client: openai.OpenAI) -> None:
    by_text = complete(client, extra_body={"return_token_ids": True})
    ids = by_text.choices[0].prompt_token_ids
    assert complete(client, prompt=ids).choices[0].text == by_text.choices[0].text
    both = complete(client, prompt=[ids, ids[:3]])
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[0].text == by_text.choices[0].text
    assert both.usage.prompt_tokens == len(ids) + 3


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    text = complete(client, max_tokens=40).choices[0].text
    stop = text[6:9]
    stopped = complete(client, max_tokens=40, stop=[stop])
    assert stopped.choices[0].text == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].stop_reason == stop
    pieces = list(complete(client, max_tokens=40, stop=stop, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == stopped.choices[0].text


def test_a_seed_repeats_and_outputs_of_one_request_differ(client: openai.OpenAI) -> None:
    def sample(seed: int | None) -> list[str]:
        answer = complete(client, temperature=1.5, seed=seed, n=3, max_tokens=8)
        return [choice.text for choice in answer.choices]

    assert sample(7) == sample(7)
    assert sample(7) != sample(8)
    assert len(set(sample(7))) == 3
    assert sample(None) != sample(None)


def test_lengths_can_be_forced(client: openai.OpenAI) -> None:
    answer = complete(client, extra_body={"ignore_eos": True, "min_tokens": 30}, max_tokens=30)
    assert answer.usage.completion_tokens == 30
    assert answer.choices[0].finish_reason == "length"


def test_log_probabilities_agree_between_forms(client: openai.OpenAI) -> None:
    columns = complete(client, logprobs=3).choices[0].logprobs
    assert len(columns.tokens) == len(columns.token_logprobs) == len(columns.top_logprobs) == 12
    assert all(logprob <= 0 for logprob in columns.token_logprobs)
    for logprob, top in zip(columns.token_logprobs, columns.top_logprobs, strict=True):
        assert logprob == max(top.values())  # greedy
    content = chat(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in content)
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    streamed = [
        logprob
        for piece in complete(client, logprobs=3, stream=True)
        for logprob in piece.choices[0].logprobs.token_logprobs
    ]
    assert streamed == columns.token_logprobs


def test_a_cached_prefix_is_counted(client: openai.OpenAI) -> None:
    prompt = [3 + k % 200 for k in range(100)]
    first = complete(client, prompt=prompt, max_tokens=2)
    again = complete(client, prompt=prompt, max_tokens=2)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens == 96  # six whole blocks of 16
    assert again.choices[0].text == first.choices[0].text


def test_outputs_under_load_equal_outputs_alone(tiny_server: Any, client: openai.OpenAI) -> None:
    prompts = [[5 + (7 * k + j) % 300 for j in range(4 + 5 * k)] for k in range(12)]
    alone = [complete(client, prompt=prompt, max_tokens=24).choices[0].text for prompt in prompts]

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{tiny_server.url}/v1", api_key="none", timeout=120) as many:

            async def one(prompt: list[int], number: int) -> str:
                stream = await many.completions.create(
                    model=MODEL,
                    prompt=prompt,
                    max_tokens=24,
                    temperature=0,
                    stream=True,
                    extra_body={"priority": number % 3},
                )
                return "".join([piece.choices[0].text async for piece in stream])

            return list(await asyncio.gather(*(one(prompt, k) for k, prompt in enumerate(prompts))))

    assert asyncio.run(together()) == alone


def test_async_chat(tiny_server: Any, client: openai.OpenAI) -> None:
    async def ask() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{tiny_server.url}/v1", api_key="none", timeout=120) as many:
            return await chat(many)  # type: ignore[arg-type]

    assert asyncio.run(ask()).choices[0].message.content == chat(client).choices[0].message.content


def test_errors_come_as_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        complete(client, model="none")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        complete(client, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        complete(client, prompt=[1] * 600)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as too_much:
        complete(client, max_tokens=10_000)
    assert too_much.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError) as vocabulary:
        complete(client, prompt=[10**6])
    assert vocabulary.value.param == "prompt"


def test_a_conversation_goes_on_with_the_servers_own_answers(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Say something"}]
    answer = chat(client, messages=messages)
    messages.append(answer.choices[0].message)
    messages.append({"role": "user", "content": "And again"})
    assert chat(client, messages=messages).choices[0].message.role == "assistant"
    refused: dict[str, Any] = {
        "role": "assistant",
        "content": None,
        "refusal": "no",
        "annotations": [],
        "audio": None,
        "tool_calls": None,
    }
    assert chat(client, messages=[refused, messages[0]]).choices[0].message.content


def test_what_other_servers_do_is_refused_by_name(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(openai.BadRequestError) as tools:
        chat(client, tools=[tool])
    assert (tools.value.param, tools.value.code) == ("tools", "not_supported")
    assert "tools is not supported: this server does not offer tool calls" in tools.value.message
    with pytest.raises(openai.BadRequestError) as structured:
        chat(client, response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {}}})
    assert structured.value.code == "not_supported"
    part = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
    with pytest.raises(openai.BadRequestError) as image:
        chat(client, messages=[{"role": "user", "content": [part]}])
    assert image.value.code == "not_supported"
    with pytest.raises(openai.NotFoundError) as embeddings:
        client.embeddings.create(model=MODEL, input="x")
    assert (embeddings.value.code, "not supported" in embeddings.value.message) == ("not_supported", True)
    with pytest.raises(openai.NotFoundError) as responses:
        client.responses.create(model=MODEL, input="x")
    assert responses.value.code == "not_supported"


def test_bytes_and_offsets_of_tokens_are_those_of_the_text(client: openai.OpenAI) -> None:
    # a model with random weights generates all kinds of incomplete characters
    for seed in range(4):
        choice = complete(client, logprobs=1, max_tokens=40, temperature=1.3, seed=seed).choices[0]
        columns, text = choice.logprobs, choice.text
        assert columns.text_offset == sorted(columns.text_offset)
        for token, offset in zip(columns.tokens, columns.text_offset, strict=True):
            if not token.startswith(("bytes:", "token_id:")):
                assert text[offset : offset + len(token)] == token
        sampled = {"logprobs": True, "top_logprobs": 2, "temperature": 1.3, "seed": seed, "max_tokens": 40}
        answer = chat(client, **sampled).choices[0]
        joined = b"".join(bytes(entry.bytes or []) for entry in answer.logprobs.content)
        assert joined.decode("utf-8", "replace") == answer.message.content


def test_echo_scores_the_prompt_as_evaluation_harnesses_ask(client: openai.OpenAI) -> None:
    plain = complete(client, extra_body={"return_token_ids": True}, logprobs=1).choices[0]
    ids = plain.prompt_token_ids
    for prompt in (TEXT, ids):
        echoed = complete(client, prompt=prompt, max_tokens=1, logprobs=1, echo=True)
        choice, columns = echoed.choices[0], echoed.choices[0].logprobs
        assert choice.text.startswith(TEXT)
        assert echoed.usage.completion_tokens == 1
        lengths = {len(getattr(columns, name)) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        assert lengths == {len(ids) + 1}
        assert columns.token_logprobs[0] is None
        assert columns.top_logprobs[0] is None
        assert all(
            logprob <= max(top.values()) <= 0
            for logprob, top in zip(columns.token_logprobs[1:], columns.top_logprobs[1:], strict=True)
        )
        for token, offset in zip(columns.tokens, columns.text_offset, strict=True):
            assert token.startswith(("bytes:", "token_id:")) or choice.text[offset : offset + len(token)] == token
        # the log-probabilities of the prompt equal those of the same tokens when generated
        first = complete(client, prompt=ids[:5], max_tokens=1, logprobs=5).choices[0].logprobs.top_logprobs[0]
        if columns.tokens[5] in first:
            assert columns.token_logprobs[5] == pytest.approx(first[columns.tokens[5]], abs=1e-4)
        greedy = max(columns.top_logprobs[5].items(), key=lambda one: one[1])
        assert greedy[1] == pytest.approx(max(first.values()), abs=1e-4)
        assert columns.token_logprobs[-1] == pytest.approx(plain.logprobs.token_logprobs[0], abs=1e-4)


def test_an_echo_streams_what_it_answers_and_may_be_all(client: openai.OpenAI) -> None:
    whole = complete(client, echo=True, logprobs=2, n=2, temperature=0.9, seed=4)
    pieces = list(complete(client, echo=True, logprobs=2, n=2, temperature=0.9, seed=4, stream=True))
    for index in (0, 1):
        said = [piece.choices[0] for piece in pieces if piece.choices[0].index == index]
        expected = whole.choices[index]
        assert "".join(one.text for one in said) == expected.text
        for name in ("tokens", "text_offset", "token_logprobs"):
            assert [entry for one in said for entry in getattr(one.logprobs, name)] == pytest.approx(
                getattr(expected.logprobs, name)
            )
    alone = complete(client, echo=True, logprobs=0, max_tokens=0)
    assert (alone.choices[0].text, alone.usage.completion_tokens) == (TEXT, 0)
    assert alone.choices[0].finish_reason == "length"
    assert len(alone.choices[0].logprobs.tokens) == alone.usage.prompt_tokens
    assert complete(client, echo=True).choices[0].text == TEXT + complete(client).choices[0].text
