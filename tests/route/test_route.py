"""Requests that go through a router: whole answers, failures of servers, refusals, and what is passed on."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pyarrow.parquet as pq
import pytest

from tests.route.route_harness import REGISTRY, Router, replayed, routing, system, words
from vajra_py.config import system_from_mapping
from vajra_py.contract import (
    Accept,
    AdmissionDecision,
    AdmissionSpec,
    PolicyConfig,
    PolicyContext,
    ReplicasetView,
    RequestView,
)
from vajra_py.contract.observer import EndReason
from vajra_py.errors import ConfigError
from vajra_py.plugins import load_registry
from vajra_py.route.build import build_router
from vajra_py.route.session import RouteSession
from vajra_py.serve.api.reading import SMALL_BODY, parsed


class NoParameters(PolicyConfig):
    """No parameters."""


def ask(router: Router, prompt: str, num_tokens: int = 4, **more: Any) -> httpx.Response:
    body = {"model": "m", "prompt": prompt, "max_tokens": num_tokens, **more}
    return router.client.post("/v1/completions", json=body)


def started_clients(router: Router, answers: dict[int, httpx.Response], num_tokens: int) -> list[threading.Thread]:
    """Eight clients, each with 25 requests one after the other; answers come by number."""

    def many(first: int) -> None:
        for number in range(first, first + 25):
            answers[number] = ask(router, f"prompt {number}", num_tokens)

    clients = [threading.Thread(target=many, args=(25 * number,)) for number in range(8)]
    for one in clients:
        one.start()
    return clients


def text_of(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["text"])


def until(holds: Any, seconds: float = 20.0) -> None:
    """Wait for what other threads do."""
    waited = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if holds():
            return
        waited.wait(0.01)
    raise AssertionError("it does not happen")


def test_whole_answers_streams_and_the_replay(tmp_path: Path) -> None:
    with routing(2, tmp_path / "run") as (router, fakes):
        for number in range(6):
            answer = ask(router, f"prompt {number}", ttft_slo_ms=500, user="alice")
            assert answer.status_code == 200
            assert text_of(answer) == "".join(words(f"prompt {number}", 4))
        client = openai.OpenAI(base_url=f"{router.url}/v1", api_key="k")
        pieces = client.completions.create(model="m", prompt="streamed", max_tokens=7, stream=True)
        assert [one.choices[0].text for one in pieces] == words("streamed", 7)
        assert [len(one.bodies) > 0 for one in fakes] == [True, True]
        assert fakes[0].bodies[0]["headers"]["content-type"] == "application/json"
        assert [one.id for one in client.models.list()] == ["fake"]
        assert router.client.get("/ready").status_code == 200
        assert 'vajra:route_requests_ended_total{reason="length"} 7' in router.client.get("/metrics").text
    report = replayed(tmp_path / "run")
    assert report.is_equal, report.difference
    assert report.num_requests == 7
    requests = pq.read_table(tmp_path / "run" / "requests.parquet").to_pylist()
    assert [one["num_output_tokens"] for one in requests] == [4] * 6 + [7]


def test_an_open_door_for_errors_of_clients() -> None:
    with routing(1, route={"models": ["m"]}) as (router, fakes):
        assert ask(router, "x", model="other").status_code == 404
        post = router.client.post
        assert post("/v1/completions", content=b"{", headers={"content-type": "application/json"}).status_code == 400
        assert post("/v1/completions", content=b"{}").status_code == 400
        assert router.client.get("/v1/completions").status_code == 405
        assert router.client.get("/nothing").status_code == 404
        fakes[0].status = 422
        answer = ask(router, "what the server refuses")
        assert (answer.status_code, answer.json()) == (422, {"error": {"message": "broken"}})
        assert len(fakes[0].bodies) == 1


def test_a_server_that_fails_is_tried_no_more_than_allowed() -> None:
    with routing(2) as (router, fakes):
        fakes[0].status = fakes[1].status = 500
        answer = ask(router, "nobody")
        assert (answer.status_code, answer.json()) == (500, {"error": {"message": "broken"}})
        assert sum(len(one.bodies) for one in fakes) == 3
        fakes[0].status = fakes[1].status = 200
        assert ask(router, "somebody").status_code == 200


def test_a_stream_that_breaks_after_a_token_ends_with_an_error_event(tmp_path: Path) -> None:
    with routing(1, tmp_path / "run") as (router, fakes):
        fakes[0].cut_after = 3
        body = {"model": "m", "prompt": "x", "max_tokens": 9, "stream": True}
        answer = router.client.post("/v1/completions", json=body)
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert [json.loads(one)["choices"][0]["text"] for one in events[:3]] == words("x", 3)
        assert json.loads(events[-2])["error"]["code"] == "server_failed"
        assert events[-1] == "[DONE]"
        fakes[0].cut_after = None
        assert ask(router, "again").status_code == 200
    assert replayed(tmp_path / "run").is_equal


def test_an_answer_that_breaks_before_a_token_comes_from_another_server() -> None:
    with routing(2) as (router, fakes):
        fakes[0].cut_after = fakes[1].cut_after = 0
        first = fakes[0]

        async def mend(number: int) -> None:
            fakes[1].cut_after = None

        first.hold = mend
        for number in range(4):
            answer = ask(router, f"p {number}", stream=number % 2 == 0)
            assert answer.status_code == 200
            first.cut_after = 0


def test_a_server_that_is_well_and_breaks_every_answer_loses_no_request(tmp_path: Path) -> None:
    for policy in ("least_loaded", "endpoint_picker", "pull"):
        scheduling = {"replicaset_scheduler": {"policy": policy}}
        with routing(2, tmp_path / policy, scheduling=scheduling) as (router, fakes):
            fakes[0].cut_after = 0
            answers = [ask(router, f"p {number}", stream=number % 2 == 0) for number in range(6)]
            assert [one.headers.get("x-vajra-server") for one in answers] == ["default/1"] * 6
            assert 0 < len(fakes[0].bodies) <= 6
        report = replayed(tmp_path / policy)
        assert report.is_equal, report.difference


def test_servers_that_take_no_connection_cost_a_request_no_try(tmp_path: Path) -> None:
    with routing(5, tmp_path / "run", route={"metrics_interval_s": None}) as (router, fakes):
        for one in fakes[:4]:
            one.kill()
        assert ask(router, "x").headers["x-vajra-server"] == "default/4"
    report = replayed(tmp_path / "run")
    assert report.is_equal, report.difference


def test_a_client_that_leaves_takes_its_request_from_the_server() -> None:
    with routing(1) as (router, fakes):
        asked = threading.Event()

        async def wait(number: int) -> None:
            if number == 1:
                asked.set()
                await asyncio.sleep(60)

        fakes[0].hold = wait
        body = {"model": "m", "prompt": "x", "max_tokens": 9, "stream": True}
        with router.client.stream("POST", "/v1/completions", json=body) as answer:
            assert next(answer.iter_lines())
            assert asked.wait(20)
        until(lambda: fakes[0].num_left == 1 and router.session.controller.num_alive == 0)


def test_a_client_that_leaves_while_its_large_body_is_read_is_computed_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsing, may_parse = threading.Event(), threading.Event()

    def when_allowed(*given: Any) -> Any:
        parsing.set()
        assert may_parse.wait(20)
        return parsed(*given)

    monkeypatch.setattr("vajra_py.serve.api.reading.parsed", when_allowed)
    with routing(1) as (router, fakes):
        body = json.dumps({"prompt": [1] * 50_000, "max_tokens": 5}).encode()
        assert len(body) > SMALL_BODY
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        address = httpx.URL(router.url)
        with socket.create_connection((address.host, address.port)) as client:
            client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert parsing.wait(20)
        until(lambda: not router.connections.alive)
        may_parse.set()
        until(lambda: router.session.controller.num_ended[EndReason.ABORTED] == 1)
        assert text_of(ask(router, "next")) == "".join(words("next", 4))
        assert [one["prompt"] for one in fakes[0].bodies] == ["next"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_shutdown_answers_503_to_what_no_server_has_begun_to_answer(stream: bool, tmp_path: Path) -> None:
    with routing(1, tmp_path / "run", options={"grace_s": 0}) as (router, fakes):
        asked = threading.Event()

        async def wait(number: int) -> None:
            asked.set()
            await asyncio.sleep(60)

        fakes[0].hold = wait
        found: list[httpx.Response] = []
        client = threading.Thread(target=lambda: found.append(ask(router, "x", stream=stream)))
        client.start()
        assert asked.wait(20)
        router.drain()
        client.join(30)
        assert (found[0].status_code, found[0].json()["error"]["message"]) == (503, "the server is shutting down")
        assert "retry-after" in found[0].headers
    assert pq.read_table(tmp_path / "run" / "requests.parquet")["reason"].to_pylist() == ["aborted"]
    assert replayed(tmp_path / "run").is_equal


def test_a_server_that_says_nothing_is_given_up() -> None:
    with routing(2, route={"first_token_timeout_s": 0.2, "metrics_interval_s": None}) as (router, fakes):
        hanging = fakes[0]

        async def wait(number: int) -> None:
            await asyncio.sleep(60)

        hanging.hold = wait
        answers = [ask(router, f"p {number}", stream=True) for number in range(3)]
        assert [one.status_code for one in answers] == [200] * 3
        assert hanging.num_left > 0


def test_a_killed_server_loses_no_request_and_comes_back(tmp_path: Path) -> None:
    with routing(2, tmp_path / "run") as (router, fakes):
        killed = threading.Event()
        answers: dict[int, httpx.Response] = {}

        async def slowly(number: int) -> None:
            if not killed.is_set():
                await asyncio.sleep(0.01)

        for one in fakes:
            one.hold = slowly

        clients = started_clients(router, answers, 8)
        until(lambda: len(answers) > 20)
        fakes[0].kill()
        killed.set()
        for one in clients:
            one.join(60)
        assert [answers[number].status_code for number in range(200)] == [200] * 200
        assert [text_of(answers[number]) for number in range(200)] == [
            "".join(words(f"prompt {number}", 8)) for number in range(200)
        ]
        until(lambda: router.session.num_up == 1)
        fakes[0].revive()
        until(lambda: router.session.num_up == 2)
        before = len(fakes[0].bodies)
        for number in range(6):
            ask(router, f"later {number}")
        assert len(fakes[0].bodies) > before
    report = replayed(tmp_path / "run")
    assert report.is_equal, report.difference


def test_requests_wait_for_a_server_and_fail_when_none_comes() -> None:
    with routing(1, route={"wait_s": 0.2}) as (router, fakes):
        waiting = threading.Event()

        async def wait(number: int) -> None:
            waiting.set()
            await asyncio.sleep(60)

        fakes[0].hold = wait
        found: list[httpx.Response] = []
        client = threading.Thread(target=lambda: found.append(ask(router, "x")))
        client.start()
        assert waiting.wait(20)
        fakes[0].kill()
        client.join(30)
        assert found[0].status_code == 503
        assert "127.0.0.1" not in found[0].text
        assert str(fakes[0].port) not in found[0].text
        assert router.client.get("/ready").status_code == 503
        refused = ask(router, "y")
        assert refused.status_code == 503
        assert "127.0.0.1" not in refused.text


def test_admission_refuses_by_what_servers_report(tmp_path: Path) -> None:
    scheduling = {"admission": {"policy": "max_load", "params": {"max_requests": 1, "when_closed": "refuse"}}}
    with routing(1, tmp_path / "run", scheduling=scheduling) as (router, fakes):
        entered, go_on = threading.Event(), threading.Event()

        async def wait(number: int) -> None:
            entered.set()
            while not go_on.is_set():
                await asyncio.sleep(0.01)

        fakes[0].hold = wait
        client = threading.Thread(target=lambda: ask(router, "first"))
        client.start()
        assert entered.wait(20)
        answer = ask(router, "second")
        go_on.set()
        client.join(30)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "shed")
    assert replayed(tmp_path / "run").is_equal


class TwoTokens:
    """Reduces every request to two output tokens."""

    def __init__(self, config: PolicyConfig, context: PolicyContext) -> None:
        pass

    def admit(self, request: RequestView, replicasets: Sequence[ReplicasetView], now: float) -> AdmissionDecision:
        return Accept(max_tokens=2)


def test_a_limit_that_admission_reduces_reaches_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AdmissionSpec("two_tokens", NoParameters, TwoTokens, "Two tokens for everybody.")
    monkeypatch.setattr("tests.route.route_harness.REGISTRY", load_registry().with_policies([spec]))
    with routing(1, tmp_path / "run", scheduling={"admission": "two_tokens"}) as (router, fakes):
        assert text_of(ask(router, "prompt", 6)) == "".join(words("prompt", 2))
        ask(router, "another", 6, max_completion_tokens=6)
        assert fakes[0].bodies[0]["max_tokens"] == 2
        assert fakes[0].bodies[1]["max_completion_tokens"] == 2
    assert replayed(tmp_path / "run").is_equal


def test_figures_of_servers_decide(tmp_path: Path) -> None:
    scheduling = {
        "replicaset_scheduler": {"policy": "endpoint_picker", "params": {"scorers": ["kv-cache-utilization-scorer"]}}
    }
    with routing(2, tmp_path / "run", scheduling=scheduling) as (router, fakes):
        fakes[0].metrics = 'vllm:num_requests_running{engine="0"} 9.0\nvllm:kv_cache_usage_perc{engine="0"} 0.9\n'
        fakes[1].metrics = "vllm:num_requests_running 1.0\nvllm:kv_cache_usage_perc 0.1\n"
        until(lambda: router.session.status()["default/0"]["num_running"] == 9)
        until(lambda: router.session.status()["default/1"]["num_running"] == 1)
        assert {ask(router, f"p {number}").headers["x-vajra-server"] for number in range(4)} == {"default/1"}
    report = replayed(tmp_path / "run")
    assert report.is_equal, report.difference


def test_prefixes_go_where_they_were_sent() -> None:
    scheduling = {"replicaset_scheduler": {"policy": "endpoint_picker", "params": {"scorers": ["prefix-cache-scorer"]}}}
    with routing(3, scheduling=scheduling) as (router, _):
        shared = "a system prompt " * 100
        assert len({ask(router, f"{shared}{number}").headers["x-vajra-server"] for number in range(5)}) == 1


def test_a_key_of_the_router_does_not_reach_servers() -> None:
    with routing(1, options={"api_key": "secret"}) as (router, fakes):
        assert ask(router, "x").status_code == 401
        body = {"model": "m", "prompt": "x", "max_tokens": 1}
        headers = {"authorization": "Bearer secret", "x-request-id": "abc"}
        assert router.client.post("/v1/completions", json=body, headers=headers).status_code == 200
        sent = fakes[0].bodies[0]["headers"]
        assert "authorization" not in sent
        assert sent["x-request-id"] == "abc"


def test_models_are_listed_with_the_key_of_the_client() -> None:
    with routing(2) as (router, fakes):
        for one in fakes:
            one.key = "k"
        get = router.client.get
        refused = get("/v1/models")
        assert (refused.status_code, refused.json()) == (401, {"error": {"message": "no key"}})
        fakes[0].key = "of another server"
        assert get("/v1/models", headers={"authorization": "Bearer k"}).json()["data"] == [{"id": "fake"}]


def test_metadata_name_no_other_model_than_the_body() -> None:
    replicasets = {name: {"num_replicas": 1, "select": {"models": [name]}} for name in ("small", "big")}
    with routing(2, sets=["small", "big"], replicasets=replicasets) as (router, _):
        answer = ask(router, "x", model="small", metadata={"model": "big"})
        assert answer.headers["x-vajra-server"] == "small/0"


def test_no_output_tokens_are_a_matter_of_the_server() -> None:
    with routing(1) as (router, fakes):
        assert ask(router, "x", 0, echo=True).status_code == 200
        assert (fakes[0].bodies[0]["max_tokens"], fakes[0].bodies[0]["echo"]) == (0, True)


@pytest.mark.parametrize("key", ["secret\n", "schlüssel", "€"])
def test_a_key_of_servers_that_no_header_carries_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_SERVERS", key)
    config = system_from_mapping(
        system([{"url": "http://x"}], {"api_key_variable": "KEY_OF_SERVERS"}), registry=REGISTRY
    )
    with pytest.raises(ConfigError, match="'KEY_OF_SERVERS' has characters that a header cannot carry") as raised:
        RouteSession(config, REGISTRY)
    assert key not in str(raised.value)


def test_metrics_without_end_take_a_server_down_and_not_the_router() -> None:
    with routing(2) as (router, fakes):
        fakes[0].metrics = "x 1\n" * 2_000_000
        until(lambda: router.session.num_up == 1)
        assert ask(router, "x").headers["x-vajra-server"] == "default/1"


POOLS = {"prefill": {"num_replicas": 1, "role": "prefill"}, "decode": {"num_replicas": 1, "role": "decode"}}


def test_two_pools_hand_a_request_over(tmp_path: Path) -> None:
    with routing(2, tmp_path / "run", ["prefill", "decode"], pools=POOLS, hand_off="vllm-pd") as (router, fakes):
        prefill, decode = fakes
        answer = ask(router, "prompt", 5, min_tokens=3)
        assert text_of(answer) == "".join(words("prompt", 5))
        sent, then = prefill.bodies[0], decode.bodies[0]
        assert (sent["max_tokens"], sent["stream"], "min_tokens" in sent) == (1, False, False)
        assert sent["kv_transfer_params"]["do_remote_decode"]
        assert (then["max_tokens"], then["min_tokens"], then["kv_transfer_params"]) == (5, 3, prefill.kv)
        prefill.status = 500
        assert text_of(ask(router, "alone", 5)) == "".join(words("alone", 5))
        assert "kv_transfer_params" not in decode.bodies[1]
        prefill.status, decode.cut_after = 200, 0

        async def mend(number: int) -> None:
            decode.hold, decode.cut_after = None, 0
            decode.thread.loop.call_soon(lambda: setattr(decode, "cut_after", None))

        decode.hold = mend
        assert text_of(ask(router, "twice", 5)) == "".join(words("twice", 5))
        assert [one["prompt"] for one in prefill.bodies] == ["prompt", "alone", "twice", "twice"]
    report = replayed(tmp_path / "run")
    assert report.is_equal, report.difference


def test_a_lost_pair_of_pools_loses_no_request(tmp_path: Path) -> None:
    pools = {"prefill": {"num_replicas": 2, "role": "prefill"}, "decode": {"num_replicas": 2, "role": "decode"}}
    places = ["prefill", "prefill", "decode", "decode"]
    with routing(4, tmp_path / "run", places, pools=pools, hand_off="vllm-pd") as (router, fakes):
        answers: dict[int, httpx.Response] = {}

        async def slowly(number: int) -> None:
            await asyncio.sleep(0.002)

        for one in fakes:
            one.hold = slowly

        clients = started_clients(router, answers, 4)
        until(lambda: len(answers) > 20)
        fakes[0].kill()
        until(lambda: len(answers) > 60)
        fakes[2].kill()
        for one in clients:
            one.join(60)
        assert [answers[number].status_code for number in range(200)] == [200] * 200
        assert [text_of(answers[number]) for number in range(200)] == [
            "".join(words(f"prompt {number}", 4)) for number in range(200)
        ]
    report = replayed(tmp_path / "run")
    assert report.is_equal, report.difference


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_replicas": 3}, "num_replicas: is not the number of its servers (got 3, and 1 servers)"),
        ({"backend": {"route": {"servers": [{"url": "ftp://x"}]}}}, "is not the address of a server"),
        ({"backend": {"route": {"servers": [{"url": "http://127.0.0.1:80000"}]}}}, "is not the address of a server"),
        ({"backend": {"route": {"servers": [{"url": "http://127.0.0.1:0"}]}}}, "is not the address of a server"),
        ({"backend": {"route": {"servers": [{"url": "http://[::1"}]}}}, "is not the address of a server"),
        ({"backend": {"route": {"servers": [{"url": "http://x", "pool": "y"}]}}}, "no such pool (got 'y')"),
    ],
)
def test_mistakes_of_a_file_are_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build_router(system_from_mapping({**system([{"url": "http://x"}]), **change}, registry=REGISTRY), REGISTRY)
    assert says in str(raised.value)
