"""Where a server listens and for how many: sockets that are taken, sockets that nobody listens on any longer, open files."""

from __future__ import annotations

import json
import logging
import re
import resource
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vajra_py.cli.main import main
from vajra_py.config import load_system, system_from_mapping
from vajra_py.errors import ConfigError
from vajra_py.plugins import load_registry
from vajra_py.serve.http.descriptors import most_connections
from vajra_py.serve.http.logs import JsonFormatter, TextFormatter
from vajra_py.serve.http.options import ServeOptions
from vajra_py.serve.server import bind, bind_unix, serve
from vajra_py.serve.session.session import EngineSession, SessionParts


@pytest.fixture
def opened() -> Iterator[Callable[[socket.socket], socket.socket]]:
    """Keeps sockets until the test has ended."""
    with ExitStack() as stack:
        yield stack.enter_context


Opened = Callable[[socket.socket], socket.socket]


def reaches(family: socket.AddressFamily, address: Any) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as client:
        return client.connect_ex(address) == 0


# Ports


def test_port_0_is_a_free_one_that_can_be_reached_at_once(opened: Opened) -> None:
    one, other = (opened(bind("127.0.0.1", 0)) for _ in range(2))
    ports = [bound.getsockname()[1] for bound in (one, other)]
    assert ports[0] != ports[1]
    assert min(ports) > 0
    assert reaches(socket.AF_INET, ("127.0.0.1", ports[0]))
    assert not one.getblocking()


def test_a_port_that_is_taken_is_named(opened: Opened) -> None:
    port = opened(bind("127.0.0.1", 0)).getsockname()[1]
    with pytest.raises(ConfigError, match=rf"port: cannot be listened on \(127.0.0.1 port {port}: .*0 takes one"):
        bind("127.0.0.1", port)


def test_an_address_of_another_machine_is_none_to_listen_on() -> None:
    with pytest.raises(ConfigError, match="port: cannot be listened on"):
        bind("192.0.2.1", 0)


@pytest.mark.parametrize("host", ["256.0.0.1.invalid:", "127..0.1"])
def test_a_host_that_is_no_name(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"host: cannot be listened on \('{re.escape(host)}'"):
        bind(host, 0)


# TLS


@pytest.mark.parametrize("wrong", ["certificate", "password", "key", "authorities"])
def test_files_that_do_not_make_tls_are_named(wrong: str, tls_files: tuple[Path, Path], tmp_path: Path) -> None:
    key, certificate = tls_files
    options = ServeOptions(port=0, ssl_keyfile=key, ssl_certfile=certificate)
    if wrong == "certificate":
        options = replace(options, ssl_certfile=Path(__file__))
    elif wrong == "authorities":
        options = replace(options, ssl_ca_certs=Path(__file__))
    else:
        made = tmp_path / "other.pem"
        how = ["rsa", "-aes128", "-passout", "pass:right", "-in", str(key)] if wrong == "password" else ["genrsa"]
        subprocess.run(["openssl", *how, "-out", str(made)], check=True, capture_output=True)
        options = replace(options, ssl_keyfile=made, ssl_keyfile_password="wrong")
    service: Any = SimpleNamespace(options=options, most_sent_on=0, statuses=Counter(), make_app=lambda: None)
    with pytest.raises(ConfigError, match=r"ssl_certfile: cannot be used with the given key, password and authorities"):
        serve(service, lambda address: None)


# Unix sockets


def test_a_unix_socket_can_be_reached_at_once(opened: Opened, tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    opened(bind_unix(path))
    assert reaches(socket.AF_UNIX, str(path))


def test_a_unix_socket_of_a_server_that_was_killed_is_replaced(opened: Opened, tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    bind_unix(path).close()  # which leaves the file
    assert path.exists()
    assert not reaches(socket.AF_UNIX, str(path))
    opened(bind_unix(path))
    assert reaches(socket.AF_UNIX, str(path))


def test_a_unix_socket_of_another_server_is_left_to_it(opened: Opened, tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    opened(bind_unix(path))
    with pytest.raises(ConfigError, match=r"uds: cannot be listened on \(.*s.sock: Address already in use"):
        bind_unix(path)
    assert reaches(socket.AF_UNIX, str(path))


def test_a_file_that_is_no_socket_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="uds: cannot be listened on"):
        bind_unix(path)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("path", ["nowhere/s.sock", "x" * 200])
def test_a_path_that_can_be_no_socket(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"uds: cannot be listened on .*A path where there is nothing"):
        bind_unix(tmp_path / path)


# Open files


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "most", "raised_to"),
    [
        (10_000, 10_000, 4096, 4096, None),
        (1024, 1_000_000, 4096, 4096, "just enough"),
        (1024, resource.RLIM_INFINITY, 4096, 4096, "just enough"),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 4096, 4096, None),
    ],
)
def test_as_many_connections_as_are_wanted_where_files_may_be_opened(
    soft: int, hard: int, wanted: int, most: int, raised_to: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: limits.append(pair))
    assert min(most_connections(wanted), wanted) == most
    assert bool(limits) is (raised_to is not None)
    if limits:
        ((new_soft, new_hard),) = limits
        assert wanted < new_soft < wanted + 1000
        assert new_hard == hard


@pytest.mark.parametrize(
    ("limit", "most_sent_on", "most"),
    [(10_000, 512, 4096), (4096 + 512 + 256, 512, 4096), (4096 + 256, 512, 4096 - 512), (1024, 512, 384), (2, 512, 1)],
)
def test_requests_that_are_sent_on_need_descriptors_too(
    limit: int, most_sent_on: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    assert min(most_connections(4096, most_sent_on), 4096) == most


@pytest.mark.parametrize("limit", [1024, 64, 2])
def test_fewer_connections_where_files_may_not_be_opened_and_a_line_says_so(
    limit: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    most = most_connections(4096)
    assert 1 <= most < limit
    assert f"at most {most} connections: the limit of open files is {limit}" in caplog.text


# Configurations that cannot be served


@pytest.mark.parametrize(
    ("more", "what"), [("sweep: {seed: [1, 2]}", "sweep"), ("replications: 3", "replications")], ids=lambda one: one[:5]
)
def test_a_server_runs_one_experiment(more: str, what: str, tmp_path: Path) -> None:
    file = tmp_path / "many.yaml"
    latency = "latency: {type: constant, step_time_s: 0.1}"
    file.write_text(f"version: 1\npreset: vajra\nbackend: {{engine: {{model: m, {latency}}}}}\n{more}\n")
    with pytest.raises(ConfigError, match=f"many.yaml {what}: expected one system.*Leave the {what} out"):
        load_system(file, (), load_registry())


def test_a_simulation_cannot_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "simulated.yaml"
    file.write_text(
        "version: 1\npreset: vajra\nbackend: {simulator: {latency: {type: constant, step_time_s: 0.1}}}\n"
        "replica: {max_model_len: 100, memory: {num_blocks: 10}}\n"
    )
    with pytest.raises(SystemExit) as end:
        main(["serve", str(file)])
    assert end.value.code == 2
    assert "backend: a server needs a backend that computes with a model (got 'simulator')" in capsys.readouterr().err
    registry = load_registry()
    config = system_from_mapping(load_system(file, (), registry).model_dump(exclude_none=True), (), registry)
    with pytest.raises(ConfigError, match="a server needs a backend that computes with a model"):
        EngineSession(SessionParts(config, registry))


# Lines of the log


def failed() -> logging.LogRecord:
    try:
        raise ValueError("a\nb")
    except ValueError as error:
        return logging.LogRecord("vajra_py.x", logging.ERROR, "", 0, "it\r\nfailed", (), (ValueError, error, None))


def test_a_failure_has_its_trace_in_the_line_as_json_and_below_it_as_text() -> None:
    (line,) = JsonFormatter().format(failed()).splitlines()
    assert json.loads(line)["exception"] == "ValueError: a\nb"
    first, *rest = TextFormatter().format(failed()).splitlines()
    assert first.endswith("ERROR vajra_py.x: it\\r\\nfailed")
    assert rest == ["ValueError: a", "b"]
