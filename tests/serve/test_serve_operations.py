"""What an operator of a server needs: logs, request ids, keys, TLS, sockets, prefixes, probes."""

from __future__ import annotations

import json
import logging
import re
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from vajra_py.serve.http.logs import FIELDS, JsonFormatter, TextFormatter, logging_to_stderr

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING|ERROR) [\w.]+: .+")


@pytest.fixture
def access(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, Any]]]:
    """The facts of the access log's lines so far."""
    caplog.set_level(logging.INFO, "vajra_py")
    return lambda: [getattr(one, FIELDS) for one in caplog.records if one.name == "vajra_py.serve.http.access"]


def test_each_request_has_one_line_and_an_id(
    puppet_server: Callable[..., Any], access: Callable[[], list[dict[str, Any]]], until: Callable[..., None]
) -> None:
    server = puppet_server()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    answer = client.completions.create(
        model="puppet", prompt=[1, 2], max_tokens=2, extra_headers={"x-request-id": "r-7"}
    )
    assert answer._request_id == "r-7"
    stream = client.completions.create(model="puppet", prompt=[1, 2], max_tokens=2, stream=True)
    assert list(stream)
    client.close()
    refused = httpx.get(f"{server.url}/nowhere", headers={"x-request-id": "bad id\twith blanks"})
    assert re.fullmatch(r"[0-9a-f]{32}", refused.headers["x-request-id"])
    assert httpx.get(f"{server.url}/health").headers["x-request-id"]  # a probe that succeeds has no line
    until(lambda: len(access()) == 3, "three lines")
    first, second, third = access()
    assert (first["request_id"], first["answer_id"], first["status"]) == ("r-7", answer.id, 200)
    assert (first["method"], first["path"]) == ("POST", "/v1/completions")
    assert first["duration_ms"] > 0
    assert second["answer_id"].startswith("cmpl-")
    assert second["status"] == 200
    assert (third["path"], third["status"], third["request_id"]) == ("/nowhere", 404, refused.headers["x-request-id"])


def test_without_an_access_log_there_are_ids_all_the_same(
    puppet_server: Callable[..., Any], access: Callable[[], list[dict[str, Any]]]
) -> None:
    server = puppet_server(access_log=False)
    assert server.post().headers["x-request-id"]
    assert access() == []


def test_lines_have_time_and_level_and_stay_lines() -> None:
    record = logging.LogRecord("vajra_py.x", logging.WARNING, "", 0, "a\nb %s", ("c",), None)
    setattr(record, FIELDS, {"status": 200})
    assert LINE.fullmatch(TextFormatter().format(record))
    row = json.loads(JsonFormatter().format(record))
    assert (row["level"], row["logger"], row["message"], row["status"]) == ("warning", "vajra_py.x", "a\nb c", 200)
    assert row["time"].endswith("Z")


def test_logging_goes_to_standard_error_once(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        with logging_to_stderr("json", "info"):
            logging.getLogger("vajra_py.x").info("hello")
            logging.getLogger("vajra_py.x").debug("quiet")
            logging.getLogger("other").info("quiet")
        logging.getLogger("vajra_py.x").info("afterwards")
    lines = capsys.readouterr().err.splitlines()
    assert [json.loads(line)["message"] for line in lines] == ["hello", "hello"]


def test_a_command_logs_json_over_a_unix_socket_and_takes_it_away(
    start_server_process: Callable[..., Any], tiny_model: Path, until: Callable[..., None], tmp_path: Path
) -> None:
    path = tmp_path / "server.sock"
    flags = ["--model", str(tiny_model), "--uds", str(path), "--log-format", "json", "--num-gpu-blocks-override", "64"]
    server = start_server_process(*flags, "--max-model-len", "128")
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://server") as client:
        until(lambda: client.get("/ready").status_code == 200, "the server is ready", 240.0)
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 2}
        assert client.post("/v1/completions", json=body).status_code == 200
    assert server.terminate() == 0
    rows = [json.loads(line) for line in server.log]
    assert all(row["time"] and row["level"] for row in rows)
    assert any(row.get("path") == "/v1/completions" and row["status"] == 200 for row in rows)
    assert f"listening on unix:{path}" in rows[[row["logger"] for row in rows].index("vajra_py.cli.serve")]["message"]
    assert not path.exists()


def test_head_is_answered_like_get_without_a_body(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server()
    for path in ("/health", "/ready", "/version", "/metrics", "/v1/models", "/dashboard"):
        answer = httpx.head(server.url + path)
        assert (answer.status_code, answer.content) == (200, b"")
    assert httpx.head(f"{server.url}/v1/completions").status_code == 405


def test_administrators_have_a_key_of_their_own(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server(admin=True, api_key="user-key", admin_api_key="admin-key")

    def status(path: str, key: str) -> int:
        return httpx.get(server.url + path, headers={"authorization": f"Bearer {key}"}).status_code

    assert [status("/admin/policy", key) for key in ("user-key", "admin-key", "x")] == [401, 200, 401]
    assert [status("/v1/models", key) for key in ("user-key", "admin-key", "x")] == [200, 401, 401]


def test_behind_a_prefix_the_key_guards_the_same_paths(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server(root_path="/llm", api_key="k")
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/v1/models").status_code == 401
    assert httpx.get(f"{server.url}/v1/models", headers={"authorization": "Bearer k"}).status_code == 200


def test_a_certificate_makes_it_speak_tls(puppet_server: Callable[..., Any], tls_files: tuple[Path, Path]) -> None:
    key, certificate = tls_files
    server = puppet_server(ssl_keyfile=key, ssl_certfile=certificate)
    context = ssl.create_default_context(cafile=str(certificate))
    with httpx.Client(verify=context, base_url=server.url.replace("http:", "https:")) as client:
        assert client.get("/health").status_code == 200
        body = {"model": "puppet", "prompt": [1], "max_tokens": 3, "stream": True}
        assert client.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
