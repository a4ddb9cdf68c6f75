"""Fields of vLLM's API that change the answer: honoured, against transformers' tokenizer and model, or refused by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.processes import ServerProcess

TEXT = "The river was wide and the old man"
MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Tell me about rivers"}]


@pytest.fixture(scope="module")
def client(tiny_server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny_server.url, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


def answered(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    """The choice of a greedy completion, its tokens said."""
    asked = {"model": "tiny", "prompt": TEXT, "max_tokens": 12, "temperature": 0, "return_token_ids": True, **body}
    choice: dict[str, Any] = answered(client, "/v1/completions", **asked)["choices"][0]
    return choice


def chat(client: httpx.Client, **body: Any) -> dict[str, Any]:
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "temperature": 0, "return_token_ids": True, **body}
    return answered(client, "/v1/chat/completions", **asked)


def error_of(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json={"model": "tiny", **body})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


# Prompts


def test_special_tokens_are_put_around_prompts_as_asked(client: httpx.Client, tokenizer: Any) -> None:
    for adds in (True, False):
        expected = tokenizer.encode(TEXT, add_special_tokens=adds)
        assert complete(client, add_special_tokens=adds)["prompt_token_ids"] == expected
    assert complete(client)["prompt_token_ids"] == tokenizer.encode(TEXT)
    rendered = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    for adds in (True, False):
        (choice,) = chat(client, add_special_tokens=adds)["choices"]
        assert choice["prompt_token_ids"] == tokenizer.encode(rendered, add_special_tokens=adds)


CONVERSATIONS: list[tuple[list[dict[str, str]], dict[str, bool], dict[str, bool]]] = [
    (MESSAGES, {}, {"add_generation_prompt": True}),
    (MESSAGES, {"add_generation_prompt": False}, {}),
    ([*MESSAGES, {"role": "assistant", "content": "Rivers are"}], {"add_generation_prompt": False}, {}),
    (
        [*MESSAGES, {"role": "assistant", "content": "Rivers are"}],
        {"continue_final_message": True},
        {"continue_final_message": True},
    ),
    (
        [*MESSAGES, {"role": "assistant", "content": "Rivers are"}],
        {"continue_final_message": True, "add_generation_prompt": False},
        {"continue_final_message": True},
    ),
]


@pytest.mark.parametrize(("messages", "asked", "means"), CONVERSATIONS)
def test_conversations_end_as_asked(
    client: httpx.Client,
    tokenizer: Any,
    messages: list[dict[str, str]],
    asked: dict[str, bool],
    means: dict[str, bool],
) -> None:
    text = tokenizer.apply_chat_template(messages, tokenize=False, **means)
    expected = tokenizer.encode(text, add_special_tokens=False)
    (choice,) = chat(client, messages=messages, **asked)["choices"]
    assert choice["prompt_token_ids"] == expected
    assert answered(client, "/tokenize", messages=messages, **asked)["tokens"] == expected
    if "continue_final_message" in asked:
        assert text.endswith("Rivers are")


def test_what_cannot_end_so_is_refused(client: httpx.Client) -> None:
    both = {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True}
    for path in ("/v1/chat/completions", "/tokenize"):
        error = error_of(client, path, **both)
        assert (error["param"], error["code"]) == ("continue_final_message", "invalid_value")
    empty = [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]
    assert client.post(
        "/v1/chat/completions", json={"model": "tiny", "messages": empty, "continue_final_message": True}
    ).status_code in (200, 400)


def test_developers_are_the_system_where_the_template_lacks_them(client: httpx.Client) -> None:
    developer = [{**MESSAGES[0], "role": "developer"}, MESSAGES[1]]
    said, expected = chat(client, messages=developer)["choices"], chat(client)["choices"]
    assert said == expected
    assert (
        "Roles are"
        in error_of(client, "/v1/chat/completions", messages=[{"role": "critic", "content": "x"}])["message"]
    )


# Outputs


def test_the_stop_is_part_of_the_output_where_it_is_wanted(client: httpx.Client, tokenizer: Any) -> None:
    free = complete(client)
    text, stop = free["text"], free["text"][5:8]
    without, with_it = (complete(client, stop=[stop], include_stop_str_in_output=given) for given in (False, True))
    assert without["text"] == text[: text.index(stop)]
    assert with_it["text"] == text[: text.index(stop) + len(stop)]
    assert with_it["token_ids"] == without["token_ids"]
    assert with_it["stop_reason"] == without["stop_reason"] == stop
    token = free["token_ids"][4]
    until = free["token_ids"][: free["token_ids"].index(token) + 1]
    without, with_it = (
        complete(client, stop_token_ids=[token], include_stop_str_in_output=given) for given in (False, True)
    )
    assert without["token_ids"] == with_it["token_ids"] == until
    assert without["text"] == tokenizer.decode(until[:-1])
    assert with_it["text"] == tokenizer.decode(until)
    streamed = streamed_text(client, stop=[stop], include_stop_str_in_output=True)
    assert streamed == text[: text.index(stop) + len(stop)]


def streamed_text(client: httpx.Client, **body: Any) -> str:
    import json

    asked = {"model": "tiny", "prompt": TEXT, "max_tokens": 12, "temperature": 0, "stream": True, **body}
    with client.stream("POST", "/v1/completions", json=asked) as answer:
        assert answer.status_code == 200
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])


def test_special_tokens_are_written_out_where_they_are_wanted(client: httpx.Client, tokenizer: Any) -> None:
    special = tokenizer.convert_tokens_to_ids(["<|user|>", "<|pad|>", "<|end|>"])
    bias = {str(token): 100 for token in special}
    more = {"logit_bias": bias, "temperature": 1.0, "seed": 3, "ignore_eos": True, "logprobs": 0}
    skipped, written = (complete(client, **more, skip_special_tokens=given) for given in (True, False))
    assert skipped["token_ids"] == written["token_ids"]
    assert set(written["token_ids"]) <= set(special)
    assert skipped["text"] == ""
    assert written["text"] == tokenizer.decode(written["token_ids"], skip_special_tokens=False)
    assert written["logprobs"]["tokens"] == tokenizer.convert_ids_to_tokens(written["token_ids"])
    assert streamed_text(client, **{**more, "logprobs": None}, skip_special_tokens=False) == written["text"]
    ended = complete(client, logit_bias={str(special[2]): 100}, skip_special_tokens=False)
    assert (ended["text"], ended["finish_reason"]) == ("", "stop")
    ended = complete(
        client, logit_bias={str(special[2]): 100}, skip_special_tokens=False, include_stop_str_in_output=True
    )
    assert ended["text"] == "<|end|>"


def test_tokens_are_named_by_their_ids_where_asked(client: httpx.Client) -> None:
    choice = complete(client, logprobs=1, return_tokens_as_token_ids=True)
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for name in top)
    (said,) = chat(client, logprobs=True, return_tokens_as_token_ids=True)["choices"]
    assert [one["token"] for one in said["logprobs"]["content"]] == [f"token_id:{token}" for token in said["token_ids"]]


# Which tokens


def test_only_allowed_tokens_come_and_biases_are_added(client: httpx.Client) -> None:
    allowed = [300, 301, 302, 77]
    greedy = complete(client, allowed_token_ids=allowed)["token_ids"]
    sampled = complete(client, allowed_token_ids=[*allowed, *allowed], temperature=5.0, seed=1)["token_ids"]
    assert set(greedy) | set(sampled) <= set(allowed)
    assert len(set(sampled)) > 1
    assert complete(client, logit_bias={"55": 100})["token_ids"] == [55] * 12
    free = complete(client)["token_ids"]
    assert free[0] not in complete(client, logit_bias={str(free[0]): -100})["token_ids"]
    assert complete(client, logit_bias={"55": 0.0}) == complete(client)
    (said,) = chat(client, allowed_token_ids=allowed)["choices"]
    assert set(said["token_ids"]) <= set(allowed)


def test_bad_words_do_not_come(client: httpx.Client, tokenizer: Any) -> None:
    free = complete(client)
    words = [tokenizer.decode(free["token_ids"][k : k + 2]) for k in (0, 3)] + [
        tokenizer.decode([free["token_ids"][6]])
    ]
    words = [word for word in words if word.strip()]
    kept = complete(client, bad_words=words)
    banned = [tokenizer.encode(word.lstrip(), add_special_tokens=False) for word in words]
    for sequence in banned:
        places = range(len(kept["token_ids"]) - len(sequence) + 1)
        assert all(kept["token_ids"][k : k + len(sequence)] != sequence for k in places)
    assert kept["token_ids"] != free["token_ids"]
    assert complete(client, bad_words=[]) == free


def test_what_leaves_no_token_is_the_clients_mistake(client: httpx.Client, tokenizer: Any) -> None:
    word = "a"
    (token,) = tokenizer.encode(word, add_special_tokens=False)
    error = error_of(client, "/v1/completions", prompt=TEXT, allowed_token_ids=[token], bad_words=[word])
    assert error["param"] == "allowed_token_ids"
    ending = tokenizer.eos_token_id
    error = error_of(client, "/v1/completions", prompt=TEXT, allowed_token_ids=[ending], min_tokens=2)
    assert error["code"] == "no_token_left"
    assert complete(client)["token_ids"]  # and its replica continues to serve


# Log-probabilities of prompts


def test_prompts_are_scored_as_vllm_writes_it(client: httpx.Client, tokenizer: Any, tiny_model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    choice = complete(client, prompt_logprobs=3)
    ids = choice["prompt_token_ids"]
    with torch.inference_mode():
        rows = AutoModelForCausalLM.from_pretrained(tiny_model)(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    first, *scores = choice["prompt_logprobs"]
    assert first is None
    assert len(scores) == len(ids) - 1
    for place, (token, found) in enumerate(zip(ids[1:], scores, strict=True)):
        row = rows[place]
        assert next(iter(found)) == str(token)
        assert set(found) == {str(token), *map(str, row.topk(3).indices.tolist())}
        for name, one in found.items():
            assert one["logprob"] == pytest.approx(float(row[int(name)]), abs=1e-4)
            assert one["rank"] == int((row > row[int(name)] + 1e-5).sum()) + 1
        assert found[str(token)]["decoded_token"] == tokenizer.decode([token])
    whole = chat(client, prompt_logprobs=0, n=2)
    assert len(whole["prompt_logprobs"]) == len(whole["choices"][0]["prompt_token_ids"])
    assert {len(one) for one in whole["prompt_logprobs"][1:]} == {1}
    assert "prompt_logprobs" not in complete(client)


def test_scores_beside_an_echo_have_each_their_own_number(client: httpx.Client) -> None:
    for echoed, ranked in ((1, 4), (4, 1)):
        choice = complete(client, echo=True, logprobs=echoed, prompt_logprobs=ranked, max_tokens=1)
        assert max(len(one) for one in choice["prompt_logprobs"][1:]) == ranked + 1
        assert max(len(one) for one in choice["logprobs"]["top_logprobs"][1:]) == echoed + 1
    error = error_of(client, "/v1/completions", prompt=TEXT, prompt_logprobs=1, stream=True)
    assert error["param"] == "prompt_logprobs"


# The prefix cache


def test_a_salt_keeps_prefixes_apart(client: httpx.Client) -> None:
    prompt = [7 + k % 90 for k in range(80)]

    def cached(**more: Any) -> int:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, **more}
        usage = answered(client, "/v1/completions", **body)["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="mine") == 64
    assert cached() == 0
    assert cached(cache_salt="yours") == 0
    assert cached() == 64
    assert cached(cache_salt="mine", user="somebody") == 0  # another tenant's salt is another salt
    assert error_of(client, "/v1/completions", prompt=prompt, cache_salt="")["param"] == "cache_salt"


# /tokenize and /detokenize


def test_texts_become_tokens_and_tokens_texts(client: httpx.Client, tokenizer: Any) -> None:
    for text in (TEXT, "", "naïve 日本 \U0001f600", "<|user|>x<|end|>", "x" * 30_000):
        for adds in (True, False):
            found = answered(client, "/tokenize", model="tiny", prompt=text, add_special_tokens=adds)
            assert found["tokens"] == tokenizer.encode(text, add_special_tokens=adds)
            assert found["count"] == len(found["tokens"])
            assert found["max_model_len"] == 512
            assert found["token_strs"] is None
            said = answered(client, "/detokenize", tokens=found["tokens"])
            assert said == {"prompt": tokenizer.decode(found["tokens"])}
    named = answered(client, "/tokenize", prompt=TEXT, return_token_strs=True)
    assert named["token_strs"] == tokenizer.convert_ids_to_tokens(named["tokens"])


def test_what_cannot_be_tokenized_is_refused_soon(client: httpx.Client) -> None:
    started = time.monotonic()
    for path, body, param in (
        ("/tokenize", {}, None),
        ("/tokenize", {"prompt": TEXT, "messages": MESSAGES}, None),
        ("/tokenize", {"prompt": "a b " * 1_500_000}, "prompt"),
        ("/tokenize", {"messages": MESSAGES, "tools": [{}]}, "tools"),
        ("/detokenize", {"tokens": [1024]}, "tokens"),
        ("/detokenize", {"tokens": ["a"] * 400_000}, "tokens.0"),
        ("/detokenize", {"tokens": [1] * 400_000}, "tokens"),
        ("/detokenize", {"tokens": TEXT}, "tokens"),
    ):
        error = error_of(client, path, **body)
        assert error["param"] == param, (path, error)
        assert len(error["message"]) < 400
    assert time.monotonic() - started < 60
    missing = client.post("/tokenize", json={"model": "other", "prompt": TEXT})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


# What is refused

HOSTILE: list[tuple[str, Any, str | None]] = [
    ("allowed_token_ids", [], "allowed_token_ids"),
    ("allowed_token_ids", ["x"] * 300_000, "allowed_token_ids.0"),
    ("allowed_token_ids", [1024], "allowed_token_ids"),
    ("allowed_token_ids", list(range(1024, 200_000)), "allowed_token_ids"),
    ("allowed_token_ids", [-1], "allowed_token_ids.0"),
    ("logit_bias", {str(k): 1 for k in range(200_000)}, "logit_bias"),
    ("logit_bias", {"x": 1}, "logit_bias"),
    ("logit_bias", {"5": 101}, "logit_bias"),
    ("logit_bias", {"5": "1"}, "logit_bias"),
    ("logit_bias", {"5": True}, "logit_bias"),
    ("logit_bias", {"5": 1, "05": 2}, "logit_bias"),
    ("logit_bias", {"4294967296": 1}, "logit_bias"),
    ("logit_bias", [5, 1], "logit_bias"),
    ("bad_words", ["x"] * 300_000, "bad_words"),
    ("bad_words", [1] * 300_000, "bad_words.0"),
    ("bad_words", ["fine", " \n"], "bad_words"),
    ("bad_words", ["x" * 300], "bad_words.0"),
    ("bad_words", "fine", "bad_words"),
    ("prompt_logprobs", -1, "prompt_logprobs"),
    ("prompt_logprobs", 101, "prompt_logprobs"),
    ("cache_salt", "x" * 1000, "cache_salt"),
    ("deadline_ms", 9_000_000_001, "deadline_ms"),
    ("add_special_tokens", "yes", "add_special_tokens"),
]


@pytest.mark.parametrize(("field", "value", "param"), HOSTILE)
def test_hostile_values_get_one_small_error(client: httpx.Client, field: str, value: Any, param: str) -> None:
    error = error_of(client, "/v1/completions", prompt=TEXT, **{field: value})
    assert error["param"] == param, error
    assert len(error["message"]) < 300


REFUSED = {
    "detokenize": False,
    "include_reasoning": False,
    "logprob_token_ids": [1],
    "structural_tag": {"x": 1},
    "request_id": "mine",
    "media_io_kwargs": {"image": {}},
    "mm_processor_kwargs": {"x": 1},
    "truncate_prompt_tokens": 4,
    "truncation_side": "left",
    "best_of": 2,
    "thinking_token_budget": 0,
    "return_token_offsets": True,
    "return_prompt_text": True,
    "repetition_detection": {"x": 1},
    "stream_interval": 2,
    "ec_transfer_params": {"x": 1},
    "kv_transfer_params": {"x": 1},
    "use_beam_search": True,
    "watermarking": True,
    "suffix": "x",
}
NEUTRAL = {
    "detokenize": True,
    "include_reasoning": True,
    "best_of": 1,
    "length_penalty": 1.0,
    "spaces_between_special_tokens": False,
    "mm_payload": "tensors",
    "stream_interval": 1,
    "routed_experts_prompt_start": 0,
    "truncate_prompt_tokens": None,
    "return_token_offsets": False,
    "structured_outputs": {},
}


def test_what_would_change_the_answer_and_is_not_there_is_refused_by_name(client: httpx.Client) -> None:
    for field, value in REFUSED.items():
        for path, prompt in (("/v1/completions", {"prompt": TEXT}), ("/v1/chat/completions", {"messages": MESSAGES})):
            error = error_of(client, path, **prompt, **{field: value})
            assert (error["param"], error["code"]) == (field, "not_supported"), error
    free = complete(client)
    assert complete(client, **NEUTRAL) == free
    assert error_of(client, "/v1/completions", prompt=TEXT, messages=MESSAGES)["param"] == "messages"
    assert error_of(client, "/v1/chat/completions", messages=MESSAGES, prompt=TEXT)["param"] == "prompt"


def test_every_field_that_vllm_documents_is_known() -> None:
    """A field of vLLM 0.32 is this server's own, or asks for nothing, or is refused by name: none is merely ignored."""
    from vajra_py.serve.api.schema import ChatBody, CompletionBody
    from vajra_py.serve.http.unsupported import is_known_elsewhere

    both = [
        "model",
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "max_tokens",
        "n",
        "presence_penalty",
        "response_format",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "temperature",
        "thinking_token_budget",
        "top_p",
        "user",
        "use_beam_search",
        "top_k",
        "min_p",
        "repetition_penalty",
        "watermarking",
        "length_penalty",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "min_tokens",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "truncate_prompt_tokens",
        "truncation_side",
        "prompt_logprobs",
        "logprob_token_ids",
        "allowed_token_ids",
        "bad_words",
        "echo",
        "add_special_tokens",
        "structured_outputs",
        "priority",
        "request_id",
        "session_id",
        "return_tokens_as_token_ids",
        "return_token_ids",
        "routed_experts_prompt_start",
        "return_token_offsets",
        "mm_payload",
        "return_mm_kwargs",
        "cache_salt",
        "kv_transfer_params",
        "ec_transfer_params",
        "vllm_xargs",
        "repetition_detection",
        "stream_interval",
    ]
    chats = [
        "messages",
        "top_logprobs",
        "max_completion_tokens",
        "tools",
        "tool_choice",
        "reasoning_effort",
        "include_reasoning",
        "parallel_tool_calls",
        "add_generation_prompt",
        "continue_final_message",
        "documents",
        "chat_template",
        "chat_template_kwargs",
        "media_io_kwargs",
        "mm_processor_kwargs",
        "return_prompt_text",
    ]
    for kind, fields in ((ChatBody, [*both, *chats]), (CompletionBody, [*both, "prompt", "suffix", "prompt_embeds"])):
        assert [one for one in fields if one not in kind.model_fields and not is_known_elsewhere(one)] == []


def test_the_bodys_own_shape(client: httpx.Client) -> None:
    for content in (b"null", b"[]", b'"x"', b"3"):
        answer = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "the body is not a JSON object"
    deep = b'{"model": "tiny", "prompt": "x", "x": ' + b"[" * 200 + b"]" * 200 + b"}"
    answer = client.post("/v1/completions", content=deep, headers={"content-type": "application/json"})
    assert answer.json()["error"]["code"] == "too_complex"
    assert error_of(client, "/v1/completions", prompt=TEXT, max_tokens=0)["message"] == (
        "max_tokens: is 0. Allowed: 1 or more; 0 with echo, for the prompt alone"
    )
    for value in ("1_0", "5e-324", "0.0001", "٣", "0x10", "inf"):
        answer = client.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": TEXT},
            headers={b"x-slo-ttft-ms": value.encode()},  # type: ignore[dict-item]
        )
        assert answer.status_code == 400, value
        assert answer.json()["error"]["param"] == "x-slo-ttft-ms"
    fine = client.post(
        "/v1/completions", json={"model": "tiny", "prompt": TEXT, "max_tokens": 1}, headers={"x-slo-ttft-ms": "0.001"}
    )
    assert fine.status_code == 200


# Recordings


def test_a_session_of_constrained_and_salted_requests_replays_equal(
    tiny_model: Path, tmp_path: Path, start_server_process: Callable[..., ServerProcess], until: Callable[..., None]
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from vajra_py.experiment.runs.replay import replay

    folder = tmp_path / "session"
    flags = ["--num-gpu-blocks-override", "24", "--block-size", "16", "--max-model-len", "256", "--max-num-seqs", "8"]
    server = start_server_process("--model", str(tiny_model), *flags, "--save-run", str(folder))
    more: list[dict[str, Any]] = [
        {"cache_salt": "a"},
        {"cache_salt": "b", "allowed_token_ids": [40, 41, 42, 43], "bad_words": ["a", "the river"]},
        {"logit_bias": {"50": 4, "51": -100}, "prompt_logprobs": 2},
        {"bad_words": ["old man", "x y"], "stop": ["zzz"], "include_stop_str_in_output": True},
    ]
    bodies = [
        {"model": "tiny", "prompt": [9 + k % 50 for k in range(70)], "max_tokens": 60, "ignore_eos": True}
        | {"temperature": 0.7 * (number % 2), "seed": number, "return_token_ids": True, **more[number % 4]}
        for number in range(16)
    ]
    try:
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 200, "the server is ready", 240)

        def ask(body: dict[str, Any]) -> list[int]:
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            tokens: list[int] = answer.json()["choices"][0]["token_ids"]
            return tokens

        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(ask, bodies))
        numbers = httpx.get(f"{server.url}/metrics").text
        alone = [ask(body) for body in bodies]
    finally:
        assert server.terminate() == 0, "".join(server.log)
    assert together == alone
    assert float(numbers.partition("vajra:num_preemptions_total{")[2].split("} ")[1].split("\n")[0]) > 0
    report = replay(folder)
    assert report.difference is None
    assert report.num_requests == 32
    assert "cache_salt" not in (folder / "manifest.json").read_text()
