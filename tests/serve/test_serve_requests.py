"""What reaches the policies, what is refused, and what happens when clients go away, without a real model."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from vajra_py.contract import RequestView
from vajra_py.contract.observer import Observer


class Watcher(Observer):
    """Keeps the requests that arrive."""

    def __init__(self) -> None:
        self.requests: list[RequestView] = []

    def on_arrival(self, request: RequestView, now: float) -> None:
        self.requests.append(request)


def alive(server: Any) -> list[Any]:
    return list(server.service.session.controller.alive())


def arrived(server: Any, **given: Any) -> RequestView:
    """A request as policies saw it."""
    watcher = Watcher()
    server.service.session.controller.watch([watcher])
    body = {"model": "puppet", "prompt": [1, 2, 3], "max_tokens": 1, **given.get("body", {})}
    response = httpx.post(f"{server.url}/v1/completions", json=body, headers=given.get("headers"))
    assert response.status_code == 200, response.text
    return watcher.requests[0]


def test_body_fields_reach_the_policies(puppet_server: Callable[..., Any]) -> None:
    body = {
        "priority": -3,
        "slo_class": "chat",
        "ttft_slo_ms": 250,
        "tpot_slo_ms": 40,
        "tbt_slo_ms": 90,
        "deadline_ms": 1500,
        "expires_after_ms": 60_000,
        "session_id": "s-1",
        "user": "ada",
        "metadata": {"experiment": "7"},
    }
    request: Any = arrived(puppet_server(), body=body)
    assert (request.priority, request.slo_class, request.session_id, request.tenant) == (-3, "chat", "s-1", "ada")
    assert (request.ttft_slo_s, request.tpot_slo_s, request.tbt_slo_s) == (0.25, 0.04, 0.09)
    assert request.deadline_at == pytest.approx(request.arrived_at + 1.5)
    assert request.expires_at == pytest.approx(request.arrived_at + 60)
    assert dict(request.metadata) == {"experiment": "7", "model": "puppet"}
    assert (request.num_prompt_tokens, request.max_tokens) == (3, 1)


@pytest.mark.parametrize("prefix", ["x-", "x-llm-d-"])
def test_headers_go_before_the_body(puppet_server: Callable[..., Any], prefix: str) -> None:
    headers = {
        f"{prefix}slo-ttft-ms": "100",
        f"{prefix}slo-tpot-ms": "12.5",
        "x-slo-tbt-ms": "50",
        "x-llm-d-inference-fairness-id": "team-a",
        "x-slo-class": "batch",
        "x-deadline-ms": "2000",
    }
    body = {
        "ttft_slo_ms": 9,
        "tpot_slo_ms": 9,
        "tbt_slo_ms": 9,
        "user": "nobody",
        "slo_class": "none",
        "deadline_ms": 9,
    }
    request: Any = arrived(puppet_server(), body=body, headers=headers)
    assert (request.ttft_slo_s, request.tpot_slo_s, request.tbt_slo_s) == (0.1, 0.0125, 0.05)
    assert (request.tenant, request.slo_class) == ("team-a", "batch")
    assert request.deadline_at == pytest.approx(request.arrived_at + 2)


def test_priority_decides_who_runs_first(puppet_server: Callable[..., Any], until: Callable[..., None]) -> None:
    settings = {"preset": "vllm-v1-priority", "replica": {"max_batch_size": 1, "memory": {"num_blocks": 64}}}
    server = puppet_server(settings)
    server.strings.hold()
    order: list[str] = []

    def ask(name: str, priority: int) -> None:
        assert server.post(priority=priority).status_code == 200
        order.append(name)

    threads = []
    for number, (name, priority) in enumerate([("first", 0), ("late", 5), ("urgent", -5)]):
        threads.append(threading.Thread(target=ask, args=(name, priority)))
        threads[-1].start()
        until(lambda number=number: len(alive(server)) == number + 1, "the request is taken in")
        if name == "first":
            until(lambda: alive(server)[0].is_resident, "the first one runs")
    for done, thread in ((1, threads[0]), (2, threads[2]), (3, threads[1])):
        server.strings.step(4 if done < 3 else 16)
        thread.join(60)
    assert order == ["first", "urgent", "late"]


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_goes_away_frees_its_blocks_within_one_step(
    puppet_server: Callable[..., Any], until: Callable[..., None], streams: bool
) -> None:
    server = puppet_server()
    server.strings.hold()
    controller = server.service.session.controller
    memory = controller.replicas()[0].memory
    body = json.dumps({"model": "puppet", "prompt": [1] * 40, "max_tokens": 100, "stream": streams}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port), timeout=60) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        server.strings.step(2)
        until(lambda: controller.replicas()[0].num_steps == 3, "two steps are done, and the third is being computed")
        if streams:
            assert connection.recv(15).startswith(b"HTTP/1.1 200")
    until(lambda: server.service.num_generating == 0, "the server notices")
    steps = server.strings.num_steps
    assert len(alive(server)) == 1  # its step is still being computed
    server.strings.step(1)
    until(lambda: not alive(server), "the request is gone")
    assert server.strings.num_steps == steps + 1
    assert memory.free_blocks == memory.num_blocks
    assert controller.num_ended.total() == 1
    controller.check_conservation()


def test_a_request_that_waits_too_long_expires(puppet_server: Callable[..., Any], until: Callable[..., None]) -> None:
    server = puppet_server({"replica": {"max_batch_size": 1, "memory": {"num_blocks": 64}}})
    server.strings.hold()
    runs = threading.Thread(target=server.post)
    runs.start()
    until(lambda: alive(server) and alive(server)[0].is_resident, "the first one runs")
    response = server.post(expires_after_ms=20)
    assert response.status_code == 408
    assert response.json()["error"]["code"] == "expired"
    assert response.headers["x-should-retry"] == "false"
    server.strings.let_go()
    runs.join(60)


def test_full_queues_are_429_and_what_was_taken_is_served(
    puppet_server: Callable[..., Any], until: Callable[..., None]
) -> None:
    settings = {
        "replica": {"max_batch_size": 1, "memory": {"num_blocks": 64}},
        "admission": {"max_queued_requests": 2},
    }
    server = puppet_server(settings, retry_after_s=3)
    server.strings.hold()
    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(server.post().status_code)) for _ in range(3)]
    for number, thread in enumerate(threads):
        thread.start()
        until(lambda number=number: len(alive(server)) == number + 1, "the request is taken in")
        if number == 0:
            until(lambda: alive(server)[0].is_resident, "the first one runs")
    for streams in (False, True):
        refused = server.post(stream=streams)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "3"
        assert refused.json()["error"]["code"] == "queue_full"
    server.strings.let_go()
    for thread in threads:
        thread.join(60)
    assert results == [200, 200, 200]


def test_a_broken_replica_is_said_before_and_within_a_stream(
    puppet_server: Callable[..., Any], until: Callable[..., None]
) -> None:
    server = puppet_server()
    server.strings.hold()
    lines: list[str] = []

    def listen() -> None:
        body = {"model": "puppet", "prompt": [1], "max_tokens": 50, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            assert response.status_code == 200
            lines.extend(line for line in response.iter_lines() if line)

    thread = threading.Thread(target=listen)
    thread.start()
    server.strings.step(2)
    until(lambda: server.strings.num_steps == 2, "two steps are done")
    server.strings.breaks = True
    server.strings.let_go()
    thread.join(60)
    assert lines[-1] == "data: [DONE]"
    error = json.loads(lines[-2].removeprefix("data: "))["error"]
    assert error["code"] == "replica_failed"
    assert "the puppet is broken" in error["message"]
    after = server.post()
    assert after.status_code == 503
    assert after.headers["retry-after"] == "1"
    assert httpx.get(f"{server.url}/ready").status_code == 503


def test_whole_answers_have_openais_shape(puppet_server: Callable[..., Any]) -> None:
    answer = puppet_server().post(prompt=[[1, 2], [3]], n=2, return_token_ids=True).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["choices"][0]["token_ids"] == [12, 13, 14, 15]
    assert answer["choices"][2]["token_ids"] == [11, 12, 13, 14]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 16,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert answer["object"] == "text_completion"


def test_streams_say_usage_as_they_go_when_asked(puppet_server: Callable[..., Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = puppet_server().post(stream=True, stream_options=options, n=2, return_token_ids=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    for index in (0, 1):
        said = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == index]
        assert [token for choice in said for token in choice["token_ids"]] == [13, 14, 15, 16]
        assert [choice["finish_reason"] for choice in said if choice["finish_reason"]] == ["length"]


def test_a_model_without_a_tokenizer_takes_token_ids_only(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server()
    for path, body in (
        ("completions", {"prompt": "text"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "text"}]}),
        ("completions", {"prompt": [1], "stop": "x"}),
    ):
        response = httpx.post(f"{server.url}/v1/{path}", json={"model": "puppet", **body})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "no_tokenizer"
    assert server.service.num_generating == 0
