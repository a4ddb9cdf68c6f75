"""Stop strings over HTTP: streams and whole answers agree with a plain search, and their length is limited."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.naive_stops import NaiveSearch
from tests.serve.processes import SOON_S, ServerProcess
from vajra_py.engine.compute import SamplingParams
from vajra_py.engine.outputs import OutputBuffer, detokenize
from vajra_py.engine.requests import load_tokenizer
from vajra_py.engine.tokenizer import text_stream

NUM_TOKENS = 24


def complete(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """The choices of an answer; those of a stream are put together."""
    body = {"model": "tiny", "max_tokens": NUM_TOKENS, "temperature": 0, "return_token_ids": True, **body}
    answer = client.post("/v1/completions", json={**body, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        choices: list[dict[str, Any]] = answer.json()["choices"]
        return choices
    found: dict[int, dict[str, Any]] = {}
    for line in answer.text.split("\n\n")[:-2]:
        for one in json.loads(line.removeprefix("data: "))["choices"]:
            known = found.setdefault(one["index"], {"text": "", "token_ids": [], "tokens": []})
            known["text"] += one["text"]
            known["token_ids"] += one.get("token_ids") or []
            known["tokens"] += (one.get("logprobs") or {"tokens": []})["tokens"]
            known["finish_reason"] = one["finish_reason"]
            known["stop_reason"] = one.get("stop_reason")
    return [found[index] for index in sorted(found)]


@pytest.mark.slow
def test_streams_and_answers_end_where_a_plain_search_ends(tiny_server: ServerProcess, tiny_model: Path) -> None:
    tokenizer, draw = load_tokenizer(tiny_model), random.Random(24)
    assert tokenizer is not None
    with httpx.Client(base_url=tiny_server.url, timeout=SOON_S) as client:
        outputs = []
        for _ in range(10):
            prompt = [draw.randrange(1, 1000) for _ in range(draw.randrange(1, 12))]
            outputs.append((prompt, complete(client, prompt=prompt)[0]))
        num_stopped = 0
        for number in range(150):
            prompt, whole = outputs[number % len(outputs)]
            text = whole["text"]
            stops = []
            for _ in range(draw.randrange(1, 5)):
                begin = draw.randrange(len(text))
                stops.append(text[begin : begin + draw.randrange(1, 9)] + draw.choice(("", "", "x")))
            body: dict[str, Any] = {"prompt": prompt, "stop": stops, "echo": draw.random() < 0.3}
            body |= {"n": draw.choice((1, 2)), "min_tokens": draw.choice((0, 0, 3, 12))}
            if draw.random() < 0.3:
                body["logprobs"] = 1
            expected = OutputBuffer(
                SamplingParams(stop=tuple(stops), min_tokens=body["min_tokens"]), (), text_stream(tokenizer)
            )
            expected._search = NaiveSearch(stops)  # type: ignore[assignment]
            for token in whole["token_ids"]:
                expected.append(token)
                detokenize([expected])
                if expected.stopped_by is not None:
                    break
            expected.finish()
            num_stopped += expected.stopped_by is not None
            answers, streamed = complete(client, **body), complete(client, **body, stream=True)
            assert len(answers) == len(streamed) == body["n"]
            for answer, stream in zip(answers, streamed, strict=True):
                assert answer["text"].endswith(expected.text)
                assert body["echo"] or answer["text"] == expected.text
                assert answer["token_ids"] == expected.token_ids
                assert answer["finish_reason"] == ("length" if expected.stopped_by is None else "stop")
                assert stream["text"] == answer["text"]
                assert stream["token_ids"] == answer["token_ids"]
                assert stream["finish_reason"] == answer["finish_reason"]
                assert stream["tokens"] == (answer.get("logprobs") or {"tokens": []})["tokens"]
    assert num_stopped > 40


@pytest.mark.parametrize(("stop", "says"), [("s" * 1025, "1025"), (["s" * 1024] * 5, "5120")])
def test_stop_strings_that_are_too_long_are_refused_by_name(puppet_server: Any, stop: Any, says: str) -> None:
    server = puppet_server()
    refused = server.post(stop=stop)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "stop"
    assert says in error["message"]
    assert "1024 characters each" in error["message"]
    assert "too long" not in server.post(stop=["s" * 1024] * 4).text  # the scripted runner produces no text
