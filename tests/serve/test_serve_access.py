"""Who may use a server, by what name, and what it shows of whom: keys and tenants, hosts, browsers, proxies, numbers, logs."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.fake_runner import FakeRunner
from vajra_py.engine.compute import RunnerOptions
from vajra_py.engine.processes import ProcessWorker
from vajra_py.serve.http.logs import JsonFormatter, LimitsRate, TextFormatter, logging_to_stderr

BODY = {"model": "puppet", "prompt": [1, 2, 3], "max_tokens": 2}


def raw(server: Any, sent: bytes) -> bytes:
    """Everything that comes back until the server closes."""
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port), timeout=60) as connection:
        connection.sendall(sent)
        found = b""
        while piece := connection.recv(65536):
            found += piece
    return found


def tenants(server: Any) -> list[str]:
    """Whom requests were served to, of now and before."""
    return sorted(server.service.stats.service_tokens)


# Keys


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text("# whose is whose\nkey-of-alice alice\nother-of-alice alice\n\nkey-of-bob Bob & Sons\nanybody\n")
    return file


def test_any_of_several_keys_lets_in(puppet_server: Callable[..., Any], keys: Path) -> None:
    server = puppet_server(api_key=("first", "second"), api_key_file=keys)
    for key in ("first", "second", "key-of-alice", "other-of-alice", "key-of-bob", "anybody"):
        assert httpx.get(f"{server.url}/v1/models", headers=bearer(key)).status_code == 200
    for key in ("firs", "first2", "alice", "key-of-alice alice", "#", "first\u00e9".encode().decode("latin-1")):
        headers = {b"authorization": b"Bearer " + key.encode("latin-1")}
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 401  # type: ignore[arg-type]
    assert httpx.get(f"{server.url}/v1/models").status_code == 401


def test_a_tenant_follows_from_its_key(puppet_server: Callable[..., Any], keys: Path) -> None:
    server = puppet_server(api_key_file=keys)

    def post(key: str, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
        return httpx.post(
            f"{server.url}/v1/completions", json={**BODY, **more}, headers={**bearer(key), **(headers or {})}
        )

    fairness = "x-llm-d-inference-fairness-id"
    assert post("key-of-alice").status_code == 200
    assert post("other-of-alice", user="bob").status_code == 200  # `user` names no tenant here
    assert post("key-of-alice", {fairness: "alice"}).status_code == 200
    assert tenants(server) == ["alice"]
    refused = post("key-of-alice", {fairness: "Bob & Sons"})
    assert refused.status_code == 400
    assert (refused.json()["error"]["param"], refused.json()["error"]["code"]) == (fairness, "other_tenant")
    assert post("key-of-bob").status_code == 200
    assert post("anybody", user="carol").status_code == 200  # a key without a tenant
    assert post("anybody", {fairness: "dave"}).status_code == 200
    assert tenants(server) == ["Bob & Sons", "alice", "carol", "dave"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no key"),
        ("# nothing\n", "has no key"),
        ("fine alice\nschl\u00fcssel bob\n", "line 2 is not a key and a tenant"),
        ("fine " + "x" * 300, "line 1 is not a key and a tenant"),
        ("fine a\u202eb", "line 1 is not a key and a tenant"),
        ("same alice\nsame bob\n", "line 2 has a key that was there before"),
    ],
)
def test_a_wrong_file_of_keys_starts_no_server_and_is_not_quoted(tmp_path: Path, text: str, said: str) -> None:
    from vajra_py.errors import ConfigError
    from vajra_py.serve.http.options import ServeOptions

    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        ServeOptions(api_key_file=file).check()
    assert said in str(refused.value)
    assert "same" not in str(refused.value).replace("keys", "")
    assert "fine" not in str(refused.value)


# Numbers


def test_numbers_need_the_key_where_they_are_guarded(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server(api_key="k", guard_metrics=True)
    assert httpx.get(f"{server.url}/metrics").status_code == 401
    assert httpx.get(f"{server.url}/metrics", headers=bearer("k")).status_code == 200
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_names_that_clients_chose_are_shown_to_nobody_without_a_key(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server(api_key="k")
    body = {**BODY, "user": "carol@example.org", "slo_class": "carols own", "ttft_slo_ms": 0.001}
    assert httpx.post(f"{server.url}/v1/completions", json=body, headers=bearer("k")).status_code == 200
    for headers, is_shown in (({}, False), (bearer("x"), False), (bearer("k"), True)):
        answer = httpx.get(f"{server.url}/metrics", headers=headers)
        assert answer.status_code == 200
        assert ("carol@example.org" in answer.text) is is_shown
        assert ("carols own" in answer.text) is is_shown
        broken = [
            line
            for line in answer.text.splitlines()
            if line.startswith("vajra:slo_violations") and 'slo="ttft"' in line
        ]
        assert [line.rsplit(" ", 1)[1] for line in broken] == ["1.0"]
        assert "vajra:request_success_total" in answer.text
    server = puppet_server()  # clients that can connect have full access anyway
    assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
    assert "carol@example.org" in httpx.get(f"{server.url}/metrics").text


def test_probes_are_no_errors(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server()
    server.drain()
    server.service.session.drain()
    before = dict(server.service.statuses)
    seen = set()
    for _ in range(3):
        try:
            seen.add(httpx.get(f"{server.url}/ready").status_code)
        except httpx.TransportError:  # it has ended
            break
    assert seen <= {503}
    assert server.service.num_errors == 0
    assert dict(server.service.statuses) == before


# Hosts


def test_http_1_1_wants_one_host(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server()
    rest = b"connection: close\r\n\r\n"
    for head, status in (
        (b"GET /health HTTP/1.1\r\nhost: x\r\n", 200),
        (b"GET /health HTTP/1.1\r\nhost: [::1]:80\r\n", 200),
        (b"GET /health HTTP/1.0\r\n", 200),
        (b"GET /health HTTP/1.1\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nhost: x\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nHost: y\r\n", 400),
        (b"GET /health HTTP/1.0\r\nhost: x\r\nhost: x\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: a b\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: x:y\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: <script>\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost:\r\n", 400),
    ):
        answer = raw(server, head + rest)
        assert answer.startswith(b"HTTP/1.1 %d" % status), (head, answer)
        if status == 400:
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_host"


def test_a_server_may_be_called_by_its_names_only(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server(allowed_hosts=("llm.example.org", "*.internal", "[::1]"), admin=True)
    port = httpx.URL(server.url).port
    for host, status in (
        ("llm.example.org", 200),
        (f"LLM.example.org:{port}", 200),
        ("a.b.internal", 200),
        ("[::1]:8000", 200),
        ("internal", 400),
        ("evil.org", 400),
        ("llm.example.org.evil.org", 400),
        ("evilinternal", 400),
        (f"127.0.0.1:{port}", 400),
    ):
        for path in ("/v1/models", "/admin/policy", "/health"):
            assert httpx.get(f"{server.url}{path}", headers={"host": host}).status_code == status, (host, path)


# Browsers


def test_no_page_of_another_origin_may_use_the_server_unless_told(puppet_server: Callable[..., Any]) -> None:
    ask = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    server = puppet_server()
    assert httpx.options(f"{server.url}/v1/completions", headers=ask).status_code == 405
    answer = server.post()
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_pages_of_allowed_origins_may(puppet_server: Callable[..., Any]) -> None:
    good = "https://chat.example.org"
    server = puppet_server(allowed_origins=(good,), api_key="k")
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    preflight = httpx.options(f"{server.url}/v1/completions", headers={"origin": good, **ask})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == good
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    for more in ({"origin": "https://evil.example"}, {"origin": good, "access-control-request-method": "DELETE"}):
        refused = httpx.options(f"{server.url}/v1/completions", headers={**ask, **more})
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "disallowed_by_cors"
        assert refused.headers.get("access-control-allow-origin") in (None, good)
    for origin, said in ((good, good), ("https://evil.example", None)):
        for stream in (False, True):
            headers = {"origin": origin, **bearer("k")}
            body = {**BODY, "stream": stream}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200
            assert answer.headers.get("access-control-allow-origin") == said
            assert "x-request-id" in answer.headers
            assert answer.text.endswith("[DONE]\n\n") is stream
    unknown = httpx.post(f"{server.url}/v1/completions", json=BODY, headers={"origin": good})
    assert (unknown.status_code, unknown.headers["access-control-allow-origin"]) == (401, good)  # the page may read why


def test_the_dashboard_runs_its_own_script_and_no_other(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server()
    answer = httpx.get(f"{server.url}/dashboard")
    rules = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    assert rules["default-src"] == rules["frame-ancestors"] == "'none'"
    assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", rules["script-src"])
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"\son[a-z]+=|javascript:|<script [^>]", answer.text)  # which these rules would stop


# Proxies and logs


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], list[str]]]:
    """What the server has logged, as text."""
    kept: list[str] = []

    def read() -> list[str]:
        kept.extend(capsys.readouterr().err.splitlines())
        return kept

    with logging_to_stderr("text", "info"):
        yield read


def test_forwarded_addresses_are_believed_of_named_proxies_alone(
    puppet_server: Callable[..., Any], lines: Callable[[], list[str]]
) -> None:
    forged = {"x-forwarded-for": "6.6.6.6", "x-forwarded-proto": "https"}
    for proxies, address in (((), "127.0.0.1:"), (("10.0.0.0/8",), "127.0.0.1:"), (("127.0.0.0/8",), "6.6.6.6:")):
        server = puppet_server(forwarded_allow_ips=proxies)
        before = len(lines())
        assert httpx.get(f"{server.url}/v1/models", headers=forged).status_code == 200
        server.stop()
        (line,) = [one for one in lines()[before:] if "/v1/models" in one]
        assert f"access: {address}" in line


def test_a_client_puts_nothing_but_printing_characters_into_the_log(
    puppet_server: Callable[..., Any], lines: Callable[[], list[str]]
) -> None:
    server = puppet_server(forwarded_allow_ips=("127.0.0.1",))
    path = "/v1/m%E2%80%A8x%C2%85y%0Bz%0Cw%1b%5b31m%E2%80%AE%00%0a%0dend"
    assert httpx.get(f"{server.url}{path}").status_code == 404
    assert httpx.get(f"{server.url}/{'a' * 50_000}").status_code == 404
    evil = b"evil GET /admin 200 \xc2\x85 FORGED" + b"x" * 3000
    raw(server, b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-forwarded-for: " + evil + b"\r\nconnection: close\r\n\r\n")
    server.stop()
    found = [one for one in lines() if "serve.http.access" in one]
    assert len(found) == 3
    assert all(one.isprintable() for one in found)
    assert "\\u2028x\\x85y\\x0bz\\x0cw\\x1b[31m\\u202e\\x00\\n\\rend" in found[0]
    assert max(map(len, found)) < 600
    assert "(50001 characters)" in found[1]


def record(message: str, *arguments: Any, name: str = "vajra_py.x", level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord(name, level, "x", 1, message, arguments, None)


HOSTILE = "a\u2028b\x85c\x1b[2Jd\x0be\x0cf\u202eg\ud800h\r\ni\U000e0001j"


def test_both_formats_escape_what_does_not_print() -> None:
    text, line = TextFormatter().format(record("%s", HOSTILE)), JsonFormatter().format(record("%s", HOSTILE))
    assert text.isprintable()
    assert line.isprintable()
    assert json.loads(line)["message"] == HOSTILE  # and nothing is lost
    assert len(TextFormatter().format(record("x" * 10**6))) < 5000
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        failed = logging.LogRecord("x", logging.ERROR, "x", 1, "m", (), (ValueError, error, error.__traceback__))
    first, *trace = TextFormatter().format(failed).split("\n")
    assert first.endswith("x: m")
    assert all(one.isprintable() for one in trace)


def test_a_flood_of_broken_requests_is_a_line_a_second() -> None:
    once = LimitsRate()
    passed = []
    for number in range(1000):
        one = record("Invalid HTTP request received.", name="uvicorn.error", level=logging.WARNING)
        one.created = 1000.0 + number / 250  # four seconds
        if once.filter(one):
            passed.append(one.getMessage())
    assert passed == [
        "Invalid HTTP request received.",
        *["Invalid HTTP request received. (249 more since the last such line)"] * 3,
    ]
    assert all(once.filter(record("said often")) for _ in range(5))
    assert all(once.filter(record("an error", name="uvicorn.error", level=logging.ERROR)) for _ in range(5))


# Protocols


def test_what_is_not_http_gets_an_error_of_the_usual_shape(
    puppet_server: Callable[..., Any], lines: Callable[[], list[str]]
) -> None:
    server = puppet_server()
    head, _, body = raw(server, b"\x16\x03\x01 hello\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert b"application/json" in head
    assert json.loads(body)["error"]["code"] == "not_http"
    upgrade = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port), timeout=60) as connection:
        connection.sendall(upgrade)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    server.stop()
    assert not [one for one in lines() if "pip install" in one]


def test_a_stream_to_an_old_client_has_no_chunks(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server()
    found = {}
    for version in (b"1.0", b"1.1"):
        content = json.dumps({**BODY, "max_tokens": 30, "stream": True}).encode()
        head = b"POST /v1/completions HTTP/%s\r\nhost: x\r\nconnection: close\r\n" % version
        head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content)
        found[version] = raw(server, head + content).partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in found[b"1.1"][0]
    head, _, body = found[b"1.0"]
    assert b"chunked" not in head
    assert b"content-length" not in head
    events = body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(one.removeprefix("data: "))["choices"] for one in events[:-2])
    whole = raw(server, b"GET /health HTTP/1.0\r\n\r\n").partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(whole[2]) in whole[0]


def test_a_socket_of_another_server_is_left_alone(tmp_path: Path) -> None:
    from vajra_py.serve.server import _unlink, bind_unix

    path = tmp_path / "s.sock"
    first = bind_unix(path)
    made = path.stat()
    path.unlink()
    second = bind_unix(path)
    _unlink(path, made)
    assert path.exists()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(os.fspath(path))
    _unlink(path, path.stat())
    assert not path.exists()
    _unlink(path, made)
    first.close()
    second.close()


# /admin/policy


def swap(server: Any, **body: Any) -> httpx.Response:
    given = {"layer": "replica_scheduler", "policy": "fixed_chunk", **body}
    return httpx.post(f"{server.url}/admin/policy", json=given, timeout=60)


def test_swaps_have_the_limits_of_other_bodies(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server(admin=True)
    before = httpx.get(f"{server.url}/admin/policy").json()
    nested: Any = 1
    for _ in range(900):
        nested = [nested]
    many = {f"p{k}": k for k in range(600)}
    for params, param in (
        ({"a": nested}, None),
        (many, "params"),
        ({"chunk_size": 2**70}, "params"),
        ({"chunk_size": [2**70]}, "params"),
        ({"chunk_size": "256"}, "params.chunk_size"),
        ({"chunk_size": 256.0}, "params.chunk_size"),
        ({"chunk_size": True}, "params.chunk_size"),
        ({"x" * 100_000: 1}, "params"),
    ):
        answer = swap(server, params=params)
        assert answer.status_code == 400, answer.text[:300]
        assert answer.json()["error"]["param"] == param
        assert len(answer.text) < 1000
    large = {f"parameter{k}": k for k in range(60_000)}
    assert swap(server, params=large).status_code == 413
    length = str(8 * 2**20)
    headers = {"content-type": "application/json"}
    assert httpx.post(f"{server.url}/admin/policy", content=b"[]" * 2**22, headers=headers).status_code == 413, length
    for content in (b"[]", b"null", b"{"):
        assert httpx.post(f"{server.url}/admin/policy", content=content, headers=headers).status_code == 400
    assert httpx.post(f"{server.url}/admin/policy", content=b"{}").status_code == 400  # not declared as JSON
    assert httpx.get(f"{server.url}/admin/policy").json() == before
    assert swap(server, params={"chunk_size": 256}).status_code == 200


# Logs of workers


class Talkative(FakeRunner):
    """Says something while it is loaded."""

    def __init__(self, options: RunnerOptions) -> None:
        super().__init__(options)
        logging.getLogger("vajra_py.engine.compute.step.runner").warning("slot %d is left out", 3)
        logging.getLogger("vajra_py.engine.compute.step.runner").debug("not wanted")


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_worker_processes_write_lines_as_their_server_does(
    log_format: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # the process finds this module
    with logging_to_stderr(log_format, "info"):
        worker = ProcessWorker(("default", 0), RunnerOptions(model="none"), 0, Talkative)
        try:
            worker.wait_loaded()
        finally:
            worker.close()
    (line,) = capfd.readouterr().err.splitlines()
    if log_format == "json":
        assert json.loads(line)["message"] == "slot 3 is left out"
    else:
        assert re.fullmatch(r"\S+Z WARNING vajra_py\.engine\.compute\.step\.runner: slot 3 is left out", line)


def test_what_the_server_fails_to_answer_is_a_warning(
    puppet_server: Callable[..., Any], lines: Callable[[], list[str]]
) -> None:
    server = puppet_server(engine={"recovery": {"max_restarts": 0}})
    server.strings.breaks = True
    assert server.post().status_code == 503
    server.thread.join(60)
    assert [one for one in lines() if " WARNING vajra_py.serve.http.access: " in one and " 503 " in one]
