"""Connections are bounded before the key: how many, how large a head is, how long each part may take."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from vajra_py.serve.http.connections import Connections
from vajra_py.serve.http.options import ServeOptions

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@contextmanager
def connected(server: Any) -> Iterator[socket.socket]:
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port), timeout=60) as connection:
        yield connection


def received(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    found = bytearray()
    try:
        while piece := connection.recv(65536):
            found += piece
    except ConnectionResetError:
        pass
    return bytes(found)


def error_of(answer: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]
    return error


SLOW = [
    ("nothing at all", b"", None),
    ("an empty line", b"\r\n", 408),
    ("half a head", HEAD, 408),
    ("half a body", HEAD + b"content-length: 100\r\n\r\n{", 408),
    ("half a chunk", HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\n{", 408),
]


@pytest.mark.parametrize(("what", "sent", "status"), SLOW)
def test_a_client_that_does_not_go_on_is_closed(
    what: str, sent: bytes, status: int | None, puppet_server: Callable[..., Any], until: Callable[..., None]
) -> None:
    server = puppet_server(api_key="sesame", header_timeout_s=0.2, body_timeout_s=0.2)
    with connected(server) as connection:
        connection.sendall(sent)
        answer = received(connection)
    if what == "half a body" or what == "half a chunk":  # the key is missed before the body is
        assert answer.startswith(b"HTTP/1.1 401 ")
    elif status is None:
        assert answer == b""
    else:
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert error_of(answer)["code"] == "request_timeout"
    until(lambda: not server.server.connections.alive, "it is forgotten")
    assert not server.server.connections.per_client


def test_a_body_that_does_not_come_is_answered_408(
    puppet_server: Callable[..., Any], until: Callable[..., None]
) -> None:
    server = puppet_server(body_timeout_s=0.2)
    with connected(server) as connection:
        connection.sendall(HEAD + b"content-length: 100\r\n\r\n{")
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert "0.2 s" in error_of(answer)["message"]
    assert server.post().status_code == 200
    until(lambda: server.service.num_generating == 0, "nothing is left of it")


def test_an_idle_connection_is_closed_and_a_request_on_it_may_take_long(
    puppet_server: Callable[..., Any], until: Callable[..., None]
) -> None:
    server = puppet_server(header_timeout_s=0.2, body_timeout_s=0.2, idle_timeout_s=0.3)
    server.strings.hold()
    body = b'{"model":"puppet","prompt":[1,2,3],"max_tokens":2}'
    with connected(server) as connection:
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        until(lambda: server.service.num_generating == 1, "it is let in")
        since = server.server.connections
        loop_time = next(iter(since.alive)).loop.time
        began = loop_time()
        until(lambda: loop_time() > began + 0.7, "more than every limit has passed")
        server.strings.let_go()
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 200 ")
    until(lambda: not since.alive, "it is closed, being idle")


@pytest.mark.parametrize("sent", [b"x-filler: ", b"GET /", b"a:b\r\n"])
def test_a_head_has_a_largest_size(sent: bytes, puppet_server: Callable[..., Any]) -> None:
    server = puppet_server(api_key="sesame", max_header_bytes=4096)
    with connected(server) as connection:
        if not sent.startswith(b"GET"):
            connection.sendall(HEAD)
        connection.sendall(sent)
        try:
            for _ in range(4096):
                connection.sendall((sent if sent.endswith(b"\n") else b"y" * 4) * 4096)
        except OSError:
            pass
        else:
            pytest.fail("the server took 64 MiB of head")
        answer = received(connection)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")  # where the kernel has not thrown it away
    assert server.server.connections.num_refused == 1
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_head_that_comes_at_once_is_measured_too(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server(max_header_bytes=4096)
    answer = httpx.get(f"{server.url}/health", headers={"x-filler": "y" * 5000})
    assert answer.status_code == 431
    assert answer.json()["error"]["code"] == "header_too_large"
    with connected(server) as connection:
        connection.sendall(
            b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 200
            + b"GET /health HTTP/1.1\r\nconnection: close\r\nhost: x\r\n\r\n"
        )
        assert received(connection).count(b"HTTP/1.1 200 ") == 201


def test_connections_are_counted_for_each_client_and_in_all(
    puppet_server: Callable[..., Any], until: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    server = puppet_server(max_connections_per_client=3, max_connections=5)
    address = httpx.URL(server.url)
    held = [socket.create_connection((address.host, address.port), timeout=60) for _ in range(3)]
    try:
        until(lambda: len(server.server.connections.alive) == 3, "they are connected")
        refused = httpx.get(f"{server.url}/health")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "too_many_connections"
        lines = [one for one in caplog.messages if "is refused with 503" in one]
        assert lines == ["a connection of 127.0.0.1 is refused with 503: " + refused.json()["error"]["message"]]
        other = httpx.HTTPTransport(local_address="127.0.0.2")
        with httpx.Client(transport=other) as client:
            assert client.get(f"{server.url}/health").status_code == 200
            held += [socket.create_connection((address.host, address.port), 60, ("127.0.0.3", 0)) for _ in range(1)]
            until(lambda: len(server.server.connections.alive) == 5, "they are connected")
            with httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.4")) as late:
                assert late.get(f"{server.url}/health").status_code == 503
    finally:
        for one in held:
            one.close()
    until(lambda: not server.server.connections.alive, "all are gone")
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_client_that_reads_nothing_loses_its_place(
    puppet_server: Callable[..., Any], until: Callable[..., None]
) -> None:
    server = puppet_server(
        {"replica": {"max_batch_size": 32, "memory": {"num_blocks": 1024}}}, send_timeout_s=0.3, max_concurrent=1
    )
    with server.asked_for_much() as connection:
        until(lambda: server.service.num_generating == 1, "it is let in")
        until(lambda: server.service.num_generating == 0, "it has lost its place")
        assert server.server.connections.num_late == 1
        assert server.post().status_code == 200
        assert b"[DONE]" not in received(connection)


def test_a_client_that_reads_slowly_keeps_its_place() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        """Answer nothing."""

    async def main() -> None:
        config = Config(app, log_config=None)
        connection = Connections(ServeOptions(send_timeout_s=60)).make(config, ServerState(), {})
        ours, theirs = socket.socketpair()
        with theirs:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, ours)
            connection.transport.write(bytes(4_000_000))
            waits = connection.transport.get_write_buffer_size()
            connection.check(0.0)
            for now in (40.0, 80.0, 120.0):
                theirs.recv(65536)  # the kernel had this already
                connection.check(now)
                assert connection.transport.get_write_buffer_size() == waits
                assert not connection.transport.is_closing()
            connection.check(181.0)
            assert connection.transport.is_closing()

    asyncio.run(main())


def test_probes_need_no_key_unless_they_shall(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server(api_key="sesame")
    assert [httpx.get(server.url + path).status_code for path in ("/health", "/ready")] == [200, 200]
    server = puppet_server(api_key="sesame", guard_health=True)
    assert [httpx.get(server.url + path).status_code for path in ("/health", "/ready")] == [401, 401]


def test_places_of_clients_that_left_are_free_for_those_that_come(
    puppet_server: Callable[..., Any], until: Callable[..., None]
) -> None:
    places = 40
    server = puppet_server({"replica": {"max_batch_size": 64, "memory": {"num_blocks": 1024}}}, max_concurrent=places)
    address = httpx.URL(server.url)
    body = b'{"model":"puppet","prompt":[1,2,3],"max_tokens":2,"stream":true}'
    request = HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    def crowd(num_alive: int) -> list[socket.socket]:
        found = [socket.create_connection((address.host, address.port), timeout=60) for _ in range(places)]
        until(lambda: len(server.server.connections.alive) == num_alive, "they are connected", 10.0)
        return found

    server.strings.hold()
    first = crowd(places)
    for one in first:
        one.sendall(request)
    until(lambda: server.service.num_generating == places, "all places are taken", 10.0)
    second = crowd(2 * places)
    for old, new in zip(first, second, strict=True):
        old.close()
        new.sendall(request)
    until(lambda: len(server.server.connections.alive) <= places, "the first have gone", 10.0)
    server.strings.let_go()
    answers = [received(one) for one in second]
    for one in second:
        one.close()
    assert [answer[:13] for answer in answers] == [b"HTTP/1.1 200 "] * places
    until(lambda: server.service.num_generating == 0, "nothing is left", 10.0)


@pytest.mark.parametrize("jump_s", [-1e9, 1e9])
def test_a_clock_that_is_set_while_requests_wait_ends_none(
    puppet_server: Callable[..., Any], until: Callable[..., None], monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    server = puppet_server(idle_timeout_s=5)
    server.strings.hold()
    found: list[httpx.Response] = []
    waits = threading.Thread(target=lambda: found.append(server.post(expires_after_ms=600_000)))
    waits.start()
    until(lambda: server.service.num_generating == 1, "it is let in")
    now, now_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: now() + jump_s)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + int(jump_s * 1e9))
    server.strings.let_go()
    waits.join(60)
    assert [one.status_code for one in found] == [200]
    assert server.post().status_code == 200
    assert httpx.get(f"{server.url}/metrics").status_code == 200
    assert httpx.get(f"{server.url}/health").json()["status"] == "ready"
