"""What reaches a server before it has looked at a key: pipelines, trailers, bodies that nobody wants, handshakes that never come."""

from __future__ import annotations

import errno
import json
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

WIDE = {"replica": {"max_batch_size": 16, "memory": {"num_blocks": 1024}}}
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
UPGRADE = HEAD + b"connection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAMA\r\nupgrade: h2c\r\n"
LAST = GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


def asks(size: int = 0, **body: Any) -> bytes:
    """A completion as bytes, with as much in its body again as `size` says."""
    wanted = {"model": "puppet", "prompt": [1, 2, 3], "max_tokens": 4, "metadata": {"a": "b"}, **body}
    content = json.dumps(wanted).encode() + b" " * size
    return HEAD + b"content-length: %d\r\n\r\n" % len(content) + content


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


# Pipelines


BEHIND = {
    "nothing": b"",
    "another request": GET,
    "many requests": GET * 20_000,
    "another completion": asks(),
    "a long completion": asks(2_000_000),
    "half a head": HEAD,
    "half a body": HEAD + b"content-length: 100000\r\n\r\n{" + b" " * 90_000,
    "more than the system takes": HEAD + b"content-length: 8000000\r\n\r\n" + b"[" * 7_000_000,
    "empty lines": b"\r\n" * 100,
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("behind", BEHIND)
def test_a_client_that_leaves_takes_its_request_with_it_whatever_it_sent_behind(
    behind: str, stream: bool, puppet_server: Callable[..., Any], until: Callable[..., None]
) -> None:
    server = puppet_server(WIDE)
    server.strings.hold()
    address = httpx.URL(server.url)
    sent = asks(stream=stream, max_tokens=200) + BEHIND[behind]
    with socket.create_connection((address.host, address.port), timeout=60) as connection:
        connection.setblocking(False)
        num_sent = connection.send(sent)  # the first request, and as much of the rest as the socket accepts
        assert num_sent >= len(sent) - len(BEHIND[behind])
        until(lambda: server.service.num_generating == 1, "it is let in")
        try:
            while num_sent < len(sent):
                num_sent += connection.send(sent[num_sent:])
        except BlockingIOError:
            pass
    until(lambda: server.service.num_generating == 0, "its request has ended with it, the step still being computed")
    until(lambda: not server.server.connections.alive, "its connection is forgotten")
    assert server.server.connections.num_open == 0
    server.strings.let_go()
    until(lambda: server.service.session.controller.num_alive == 0, "nothing runs")
    assert server.post().status_code == 200


def test_clients_that_left_keep_nobody_out(puppet_server: Callable[..., Any], until: Callable[..., None]) -> None:
    server = puppet_server(WIDE, max_concurrent=8)
    server.strings.hold()
    address = httpx.URL(server.url)
    for _ in range(20):
        with socket.create_connection((address.host, address.port), timeout=60) as connection:
            connection.sendall(asks(max_tokens=200) + GET)
    until(lambda: not server.server.connections.alive, "all have gone")
    until(lambda: server.service.num_generating == 0, "nobody is being answered")
    server.strings.let_go()
    assert server.post().status_code == 200


def test_pipelined_requests_are_answered_in_order(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server(WIDE)
    with connected(server) as connection:
        connection.sendall(GET * 2000 + LAST)
        assert received(connection).count(b"HTTP/1.1 200 ") == 2001
    with connected(server) as connection:
        connection.sendall(b"".join(asks(max_tokens=1 + number % 7) for number in range(50)) + LAST)
        answers = received(connection)
    assert answers.count(b"HTTP/1.1 200 ") == 51
    counts = [int(found) for found in re.findall(rb'"completion_tokens":(\d+)', answers)]
    assert counts == [1 + number % 7 for number in range(50)]


@pytest.mark.parametrize("size", [100_000, 100])
def test_a_request_to_upgrade_is_answered_as_any_other(size: int, puppet_server: Callable[..., Any]) -> None:
    server = puppet_server(WIDE)
    whole = asks(20_000, max_tokens=3).replace(HEAD, UPGRADE)
    content = b'{"model":"puppet","prompt":[1],"max_tokens":2}'
    in_chunks = UPGRADE + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % len(content) + content
    without_body = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    sent = whole + in_chunks + b"\r\n0\r\nupgrade: h2c\r\n\r\n" + without_body + LAST
    with connected(server) as connection:
        for start in range(0, len(sent), size):
            connection.sendall(sent[start : start + size])
        answers = received(connection)
    assert answers.count(b"HTTP/1.1 ") == answers.count(b"HTTP/1.1 200 ") == 4
    assert re.findall(rb'"completion_tokens":(\d+)', answers) == [b"3", b"2"]


def test_the_body_of_a_request_to_upgrade_is_no_request(puppet_server: Callable[..., Any]) -> None:
    with connected(puppet_server(WIDE)) as connection:
        connection.sendall(UPGRADE + b"content-length: %d\r\n\r\n" % len(GET) + GET + LAST)
        answers = received(connection)
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"400", b"200"]


def test_an_answer_to_head_before_the_body_is_sent(puppet_server: Callable[..., Any]) -> None:
    with connected(puppet_server(WIDE)) as connection:
        connection.sendall(b"HEAD /health HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        assert received(connection).startswith(b"HTTP/1.1 ")


def test_few_of_many_pipelined_requests_are_kept_at_once(
    puppet_server: Callable[..., Any], until: Callable[..., None]
) -> None:
    server = puppet_server(WIDE)
    server.strings.hold()
    with connected(server) as connection:
        connection.sendall(asks())
        until(lambda: server.service.num_generating == 1, "it is let in")
        connection.sendall(GET * 5000)
        one = next(iter(server.server.connections.alive))
        until(lambda: one.flow.read_paused, "it is not read any more")
        assert len(one.pipeline) < 200
        server.strings.let_go()
        found = b""
        while found.count(b"HTTP/1.1 200 ") < 5001:
            found += connection.recv(65536)


# Unwanted bodies, and data around bodies


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/completions", 401), ("/metrics", 405), ("/v1/nothing", 401), ("/health", 405)]
)
def test_an_answer_before_the_body_is_the_last_of_its_connection(
    path: str, status: int, puppet_server: Callable[..., Any], until: Callable[..., None]
) -> None:
    server = puppet_server(api_key="sesame")
    with connected(server) as connection:
        connection.sendall(CHUNKED.replace(b"/v1/completions", path.encode()) + b"5\r\nhello\r\n")
        answer = received(connection)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b"\r\nconnection: close\r\n" in answer
        connection.sendall(b"5\r\nhello\r\n" * 1000)  # this is allowed, since it is not parsed
    until(lambda: not server.server.connections.alive, "it is closed")


def test_a_body_that_is_too_large_is_answered_and_closed(
    puppet_server: Callable[..., Any], until: Callable[..., None]
) -> None:
    server = puppet_server(max_body_bytes=100_000)
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a" * 3_000_000})
    assert answer.status_code == 413
    assert answer.headers["connection"] == "close"
    with connected(server) as connection:
        connection.sendall(CHUNKED + (b"4000\r\n" + b" " * 0x4000 + b"\r\n") * 10)
        answer_bytes = received(connection)
        assert answer_bytes.startswith(b"HTTP/1.1 413 ")
    until(lambda: not server.server.connections.alive, "it is closed")


def test_a_client_that_goes_on_after_its_last_answer_is_cut_off(
    puppet_server: Callable[..., Any], until: Callable[..., None]
) -> None:
    server = puppet_server(api_key="sesame", body_timeout_s=0.2)
    with connected(server) as connection:
        connection.sendall(CHUNKED)
        until(lambda: not server.server.connections.alive, "it is closed")
        try:
            for _ in range(4096):
                connection.sendall(b"a:b\r\n" * 1024)
        except OSError:
            return
    pytest.fail("the server took 20 MiB")


UNCOUNTED = {
    "trailers": (b"0\r\n", b"a:b\r\n"),
    "one trailer": (b"0\r\na: ", b"bbbb"),
    "extensions of a chunk": (b"5;", b"a=b;"),
    "extensions of chunks": (b"", b"1;" + b"a" * 200 + b"\r\nx\r\n"),
    "empty lines": (GET, b"\r\n"),
}


@pytest.mark.parametrize("what", UNCOUNTED)
def test_what_comes_with_a_body_counts_as_a_head_does(what: str, puppet_server: Callable[..., Any]) -> None:
    server = puppet_server(max_header_bytes=4096)
    first, again = UNCOUNTED[what]
    with connected(server) as connection:
        connection.sendall((b"" if what == "empty lines" else CHUNKED) + first)
        try:
            for _ in range(256):
                connection.sendall(again * (65536 // len(again)))
        except OSError:
            pass
        else:
            pytest.fail("the server took 16 MiB")
        answer = received(connection)
    assert answer == b"" or b"HTTP/1.1 431 " in answer  # where the kernel has not thrown it away
    assert server.server.connections.num_refused == 1


def test_few_trailers_and_small_chunks_harm_nobody(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server(max_header_bytes=4096)
    content = asks(20_000, max_tokens=2).split(b"\r\n\r\n", 1)[1]
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in content)
    with connected(server) as connection:
        connection.sendall(CHUNKED + chunks + b"0\r\nx-sum: 7\r\n\r\n")
        connection.sendall(GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        answers = received(connection)
    assert answers.count(b"HTTP/1.1 200 ") == 2


# Handshakes


def secure(server: Any, certificate: Path, **more: Any) -> httpx.Client:
    context = ssl.create_default_context(cafile=str(certificate))
    transport = httpx.HTTPTransport(verify=context, **more)
    return httpx.Client(transport=transport, base_url=server.url.replace("http:", "https:"))


def test_a_handshake_that_never_comes_has_the_time_of_a_head(
    puppet_server: Callable[..., Any], tls_files: tuple[Path, Path], until: Callable[..., None], caplog: Any
) -> None:
    key, certificate = tls_files
    server = puppet_server(ssl_keyfile=key, ssl_certfile=certificate, header_timeout_s=0.3)
    with connected(server) as connection:
        until(lambda: server.server.connections.num_open == 1, "it counts before its handshake")
        assert received(connection) == b""
    until(lambda: server.server.connections.num_open == 0, "it is forgotten")
    assert not server.server.connections.per_client
    assert "a TLS handshake of 127.0.0.1 failed" in caplog.text
    with connected(server) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert b"HTTP" not in received(connection)
    until(lambda: server.server.connections.num_open == 0, "it is forgotten")
    with secure(server, certificate) as client:
        assert client.get("/health").status_code == 200
    until(lambda: server.server.connections.num_open == 0, "it is forgotten")


def test_handshakes_count_as_connections_do(
    puppet_server: Callable[..., Any], tls_files: tuple[Path, Path], until: Callable[..., None], caplog: Any
) -> None:
    key, certificate = tls_files
    server = puppet_server(ssl_keyfile=key, ssl_certfile=certificate, max_connections=8, max_connections_per_client=5)
    with ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(connected(server))
        until(lambda: server.server.connections.num_open == 5, "they are connected")
        with connected(server) as one_more:
            assert received(one_more) == b""
        assert "127.0.0.1 has 5 connections; no more are allowed from one address" in caplog.text
        with secure(server, certificate, local_address="127.0.0.2") as client:
            assert client.get("/health").status_code == 200
    until(lambda: server.server.connections.num_open == 0, "all are gone")
    with secure(server, certificate) as client:
        assert client.get("/health").status_code == 200


def test_a_system_without_room_for_sockets_is_named_and_connections_come_back(
    puppet_server: Callable[..., Any], caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = puppet_server()
    bound = server.server.servers[0]._bound
    failures = [OSError(errno.EMFILE, "Too many open files"), OSError(errno.ECONNABORTED, "Connection aborted")]

    class Full:
        def accept(self) -> Any:
            if failures:
                raise failures.pop(0)
            return bound.accept()

        def fileno(self) -> int:
            return int(bound.fileno())

    monkeypatch.setattr(server.server.servers[0], "_bound", Full())
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
    assert not failures
    assert "a connection cannot be accepted: Too many open files" in caplog.text
