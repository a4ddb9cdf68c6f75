"""What is kept out: strangers, oversized and broken requests; and what every refusal looks like."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

BROKEN: list[tuple[str, Any, str | None]] = [
    ("no model", {"prompt": [1]}, "model"),
    ("no prompt", {"model": "puppet"}, "prompt"),
    ("an empty prompt", {"model": "puppet", "prompt": []}, "prompt"),
    ("an empty text", {"model": "puppet", "prompt": ""}, "prompt"),
    ("an empty prompt among others", {"model": "puppet", "prompt": [[1], []]}, "prompt.1"),
    ("a negative token", {"model": "puppet", "prompt": [-1]}, "prompt.0"),
    ("a token beyond the vocabulary", {"model": "puppet", "prompt": [1000]}, "prompt"),
    ("too long a prompt", {"model": "puppet", "prompt": [1] * 256}, "prompt"),
    ("too long an output", {"model": "puppet", "prompt": [1], "max_tokens": 256}, "max_tokens"),
    ("no output", {"model": "puppet", "prompt": [1], "max_tokens": 0}, "max_tokens"),
    ("a number as text", {"model": "puppet", "prompt": [1], "max_tokens": "4"}, "max_tokens"),
    ("a switch as number", {"model": "puppet", "prompt": [1], "stream": 1}, "stream"),
    ("more minimum than maximum", {"model": "puppet", "prompt": [1], "min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ("cold", {"model": "puppet", "prompt": [1], "temperature": -0.1}, "temperature"),
    ("too many outputs", {"model": "puppet", "prompt": [1], "n": 9}, "n"),
    ("too many prompts", {"model": "puppet", "prompt": [[1]] * 9}, "n"),
    ("a huge n", {"model": "puppet", "prompt": [1], "n": 10**9}, "n"),
    ("an unknown stop token", {"model": "puppet", "prompt": [1], "stop_token_ids": [1000]}, "stop_token_ids"),
    ("stream options without a stream", {"model": "puppet", "prompt": [1], "stream_options": {}}, None),
    ("an empty stop", {"model": "puppet", "prompt": [1], "stop": ["a", ""]}, None),
    ("what is not supported", {"model": "puppet", "prompt": [1], "suffix": "x"}, "suffix"),
    ("a field of chats", {"model": "puppet", "prompt": [1], "max_completion_tokens": 3}, "max_completion_tokens"),
    ("a list", [1, 2], None),
    ("nothing", None, None),
]


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def test_wrong_input_is_400_and_touches_nothing(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server(max_choices=8)
    with httpx.Client(base_url=server.url) as client:
        for what, body, param in BROKEN:
            response = client.post("/v1/completions", json=body)
            assert response.status_code == 400, what
            error = error_of(response)
            assert error["type"] == "invalid_request_error"
            assert error["param"] == param, what
        for content in (b"{", b"\xff\xfe", b'{"model": NaN}', b"", b'{"model":"puppet","prompt":[1],"n":1e999}'):
            response = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
            assert response.status_code == 400, content
            error_of(response)
        for kind in ({}, {"content-type": "application/x-www-form-urlencoded"}):  # the default of curl -d
            response = client.post("/v1/completions", content=b'{"model":"puppet","prompt":[1]}', headers=kind)
            assert response.status_code == 400
            assert "content-type: application/json" in error_of(response)["message"]
        wrong_header = {"x-slo-ttft-ms": "soon"}
        response = client.post("/v1/completions", json={"model": "puppet", "prompt": [1]}, headers=wrong_header)
        assert response.status_code == 400
        assert error_of(response)["param"] == "x-slo-ttft-ms"
    assert server.service.session.controller.num_submitted == 0
    assert server.service.num_generating == 0
    assert server.post().status_code == 200


def test_unknown_paths_methods_and_models(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server()
    assert error_of(httpx.get(f"{server.url}/v2"))["code"] == "not_found"
    wrong = httpx.get(f"{server.url}/v1/completions")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    error_of(wrong)
    missing = server.post(model="other")
    assert missing.status_code == 404
    assert error_of(missing)["param"] == "model"
    assert "puppet" in error_of(missing)["message"]


def test_a_key_guards_every_path_but_those_of_probes(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server(api_key="sesame-9")
    assert httpx.get(f"{server.url}/health").status_code == 200
    for path in ("/v1/models", "/version", "/openapi.json", "/nowhere"):
        for key in (None, "wrong", "sesame-9x"):
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            response = httpx.get(server.url + path, headers=headers)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert error_of(response)["code"] == "invalid_api_key"
    headers = {"authorization": "Bearer sesame-9"}
    assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200
    assert "sesame" not in repr(server.service.options)


def test_bodies_have_a_largest_size(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server(max_body_bytes=1000)
    large = server.post(prompt=[1] * 1000)
    assert large.status_code == 413
    assert error_of(large)["code"] == "request_too_large"

    def pieces() -> Iterator[bytes]:  # sent without a content-length
        yield from [b"[" + b"1," * 100] * 100

    headers = {"content-type": "application/json"}
    unsaid = httpx.post(f"{server.url}/v1/completions", content=pieces(), headers=headers)
    assert unsaid.status_code == 413
    assert error_of(unsaid)["code"] == "request_too_large"
    assert server.post().status_code == 200


def test_so_many_at_once_and_no_more(puppet_server: Callable[..., Any], until: Callable[..., None]) -> None:
    server = puppet_server(max_concurrent=2)
    server.strings.hold()
    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(server.post().status_code)) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: server.service.num_generating == 2, "both are let in")
    refused = server.post()
    assert refused.status_code == 429
    assert error_of(refused)["code"] == "too_many_requests"
    assert refused.headers["retry-after"] == "1"
    server.strings.let_go()
    for thread in threads:
        thread.join(60)
    assert results == [200, 200]
    assert server.post().status_code == 200


NULLS = (
    "n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "stream_options", "echo",
    "ignore_eos", "priority", "user", "metadata", "logit_bias", "tools", "reasoning_effort", "best_of", "suffix",
)  # fmt: skip


def test_null_is_as_if_absent(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server()
    plain = server.post().json()["choices"]
    for name in NULLS:
        answer = server.post(**{name: None, "max_tokens": 4})
        assert answer.status_code == 200, (name, answer.text)
        assert answer.json()["choices"] == plain


def test_unknown_fields_are_ignored_with_one_line_in_the_log(
    puppet_server: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    server = puppet_server()
    for _ in range(3):
        assert server.post(temprature=1, annotations=[], best_of=1).status_code == 200
    said = [one.getMessage() for one in caplog.records if "unknown field" in one.getMessage()]
    assert said == ["the unknown field 'temprature' of requests is ignored"]


def test_a_strict_server_refuses_unknown_fields_by_name(puppet_server: Callable[..., Any]) -> None:
    error = puppet_server(strict_fields=True).post(temprature=1).json()["error"]
    assert (error["param"], error["code"]) == ("temprature", "unknown_field")
    assert "Did you mean 'temperature'?" in error["message"]


def test_ids_are_unlike_in_every_server_and_seeds_repeat_outputs(puppet_server: Callable[..., Any]) -> None:
    def served(**settings: Any) -> tuple[str, int]:
        server = puppet_server(settings)
        seeds: list[int] = []
        submit = server.service.session.submit

        def watched(streams: Any) -> None:
            seeds.extend(stream.submission.seed for stream in streams)
            submit(streams)

        server.service.session.submit = watched
        return server.post().json()["id"], seeds[0]

    first, second, *seeded = (served(), served(), served(seed=5), served(seed=5))
    assert len({one[0] for one in (first, second, *seeded)}) == 4
    assert first[1] != second[1]
    assert seeded[0][1] == seeded[1][1]


def test_what_can_never_wait_is_400_and_not_429(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server({"admission": {"max_queued_requests": 6, "max_queued_tokens": 40}})
    for body, param in (({"n": 8}, "n"), ({"prompt": [[1]] * 7}, "n"), ({"prompt": [1] * 41}, "prompt")):
        refused = server.post(**body)
        assert refused.status_code == 400
        assert error_of(refused)["param"] == param
        assert "Allowed: up to" in error_of(refused)["message"]
    assert server.post(n=6).status_code == 200
    assert server.post(prompt=[1] * 40).status_code == 200
