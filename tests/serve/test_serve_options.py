"""Options of a server: how flags and the environment reach it, and what it refuses before it loads anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from vajra_py.cli.main import main
from vajra_py.errors import ConfigError
from vajra_py.serve.http.options import OTLP_VARIABLES, ServeOptions

SECRETS = ("VAJRA_API_KEY", "VAJRA_ADMIN_API_KEY", "VAJRA_SSL_KEYFILE_PASSWORD")
TRACING = (*OTLP_VARIABLES, "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER")


@pytest.fixture(autouse=True)
def _nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SECRETS, *TRACING):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ServeOptions]:
    """`vajra serve --model x` up to the moment at which the server would be made: its options."""
    found: list[ServeOptions] = []

    def run(config: Any, registry: Any, given: dict[str, Any], cluster: Any) -> None:
        found.append(ServeOptions(**given))

    monkeypatch.setattr("vajra_py.cli.serve._run", run)
    monkeypatch.setattr("vajra_py.cli.serve._leave", lambda: None)

    def start(*arguments: str) -> ServeOptions:
        with pytest.raises(SystemExit) as end:
            main(["serve", "--model", "x", *arguments])
        assert end.value.code == 0
        return found.pop()

    return start


def test_without_flags_a_server_has_its_defaults(started: Callable[..., ServeOptions]) -> None:
    assert started() == ServeOptions()


FLAGS: dict[str, tuple[tuple[str, ...], Any]] = {
    "host": (("--host", "::1"), "::1"),
    "port": (("--port", "0"), 0),
    "api_key": (("--api-key", "k"), "k"),
    "served_names": (("--served-model-name", "a", "--served-model-name", "b"), ("a", "b")),
    "max_body_bytes": (("--max-body-bytes", "7"), 7),
    "max_body_values": (("--max-body-values", "7"), 7),
    "max_body_containers": (("--max-body-containers", "7"), 7),
    "max_buffered_bytes": (("--max-buffered-bytes", "7"), 7),
    "max_connections": (("--max-connections", "7"), 7),
    "max_connections_per_client": (("--max-connections-per-client", "7"), 7),
    "max_header_bytes": (("--max-header-bytes", "7"), 7),
    "header_timeout_s": (("--header-timeout", "0.5"), 0.5),
    "body_timeout_s": (("--body-timeout", "0.5"), 0.5),
    "idle_timeout_s": (("--idle-timeout", "0.5"), 0.5),
    "send_timeout_s": (("--send-timeout", "0.5"), 0.5),
    "guard_health": (("--guard-health",), True),
    "guard_metrics": (("--guard-metrics",), True),
    "api_key_file": (("--api-key-file", "keys"), Path("keys")),
    "allowed_hosts": (("--allowed-hosts", "a", "--allowed-hosts", "*.b, c"), ("a", "*.b", "c")),
    "allowed_origins": (("--allowed-origins", '["http://a", "http://b"]'), ("http://a", "http://b")),
    "allowed_methods": (("--allowed-methods", "PUT"), ("PUT",)),
    "allowed_headers": (("--allowed-headers", "x-a,x-b"), ("x-a", "x-b")),
    "allow_credentials": (("--allow-credentials",), True),
    "forwarded_allow_ips": (("--forwarded-allow-ips", "10.0.0.1", "--forwarded-allow-ips", "*"), ("10.0.0.1", "*")),
    "max_choices": (("--max-choices", "7"), 7),
    "max_concurrent": (("--max-concurrent", "7"), 7),
    "strict_fields": (("--strict-fields",), True),
    "grace_s": (("--grace", "0"), 0),
    "metric_names": (("--metric-names", "vllm"), "vllm"),
    "otlp_traces_endpoint": (("--otlp-traces-endpoint", "http://h/v1/traces"), "http://h/v1/traces"),
    "admin": (("--admin",), True),
    "admin_api_key": (("--admin-api-key", "k"), "k"),
    "access_log": (("--no-access-log",), False),
    "log_format": (("--log-format", "json"), "json"),
    "log_level": (("--log-level", "debug"), "debug"),
    "uds": (("--uds", "s.sock"), Path("s.sock")),
    "root_path": (("--root-path", "/llm"), "/llm"),
    "ssl_keyfile": (("--ssl-keyfile", "k.pem"), Path("k.pem")),
    "ssl_certfile": (("--ssl-certfile", "c.pem"), Path("c.pem")),
    "ssl_keyfile_password": (("--ssl-keyfile-password", "p"), "p"),
    "ssl_ca_certs": (("--ssl-ca-certs", "ca.pem"), Path("ca.pem")),
    "save_run": (("--save-run", "here"), Path("here")),
}
WITHOUT_A_FLAG = {"retry_after_s", "max_labels"}


def test_every_option_has_a_flag_or_is_known_to_have_none() -> None:
    assert {one.name for one in fields(ServeOptions)} == FLAGS.keys() | WITHOUT_A_FLAG


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_sets_its_option_and_no_other(name: str, started: Callable[..., ServeOptions]) -> None:
    flags, value = FLAGS[name]
    options, default = started(*flags), ServeOptions()
    differing = {one.name for one in fields(options) if getattr(options, one.name) != getattr(default, one.name)}
    assert differing == {name}
    assert getattr(options, name) == value


# Secrets


def test_secrets_come_from_the_environment_and_a_flag_wins(
    started: Callable[..., ServeOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, f"of {name}")
    options = started("--admin")
    found = options.api_key, options.admin_api_key, options.ssl_keyfile_password
    assert found == tuple(f"of {name}" for name in SECRETS)
    assert started("--api-key", "mine").api_key == "mine"
    assert started("--api-key", "mine", "--api-key", "yours").api_key == ("mine", "yours")


def test_an_empty_variable_is_no_key(started: Callable[..., ServeOptions], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VAJRA_API_KEY", "")
    assert started().api_key is None


def test_an_empty_key_on_the_command_line_does_not_open_the_server(
    started: Callable[..., ServeOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VAJRA_API_KEY", "of the environment")
    (problem,) = problems_of(started("--api-key", ""))
    assert problem.startswith("api_key: is empty")


def test_an_admin_key_of_the_environment_waits_for_admin(
    started: Callable[..., ServeOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VAJRA_ADMIN_API_KEY", "everywhere")
    assert started().admin_api_key is None
    assert started("--admin").admin_api_key == "everywhere"
    assert started("--admin-api-key", "said").admin_api_key == "said"  # and `check` reports that it has no effect


def test_secrets_are_not_shown() -> None:
    shown = repr(ServeOptions(api_key="hidden1", admin_api_key="hidden2", ssl_keyfile_password="hidden3"))
    assert "hidden" not in shown
    assert "port=8000" in shown


@pytest.mark.parametrize(
    ("arguments", "is_told"),
    [
        ((), False),
        (("--host", "localhost"), False),
        (("--host", "0.0.0.0"), True),
        (("--host", "0.0.0.0", "--api-key", "k"), False),
        (("--host", "0.0.0.0", "--uds", "s.sock"), False),
    ],
)
def test_a_server_that_anyone_can_use_says_so(
    arguments: tuple[str, ...],
    is_told: bool,
    started: Callable[..., ServeOptions],
    capsys: pytest.CaptureFixture[str],
) -> None:
    started(*arguments)
    assert ("anyone who reaches 0.0.0.0 can use this server" in capsys.readouterr().err) is is_told


# Invalid options


def problems_of(options: ServeOptions) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        options.check()
    return [str(one) for one in refused.value.problems]


def test_the_defaults_are_fine() -> None:
    ServeOptions().check()
    ServeOptions(host="0.0.0.0", port=65535, api_key="~!x", admin=True, admin_api_key="y", root_path="/a/b").check()


INFINITY = float("inf")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_choices": 0}, "max_choices: is too small (0). Allowed: 1 or more"),
        ({"max_connections": -1}, "max_connections: is too small (-1)"),
        ({"grace_s": -0.1}, "grace_s: is out of range (-0.1). Allowed: 0 or more seconds"),
        ({"grace_s": INFINITY}, "grace_s: is out of range (inf)"),
        ({"retry_after_s": float("nan")}, "retry_after_s: is out of range (nan)"),
        ({"idle_timeout_s": 0.0}, "idle_timeout_s: is out of range (0.0). Allowed: above 0 seconds"),
        ({"send_timeout_s": INFINITY}, "send_timeout_s: is out of range (inf)"),
        ({"port": -1}, "port: is not a port (-1). Allowed: 0 to 65535"),
        ({"port": 65536}, "port: is not a port (65536)"),
        ({"api_key": "two words"}, "api_key: is empty, or has characters that a header cannot carry"),
        ({"api_key": "a\r\nX-Evil: 1"}, "api_key: is empty, or has characters that a header cannot carry"),
        ({"api_key": "schlüssel"}, "api_key: is empty, or has characters that a header cannot carry"),
        (
            {"admin": True, "admin_api_key": "a b"},
            "admin_api_key: is empty, or has characters that a header cannot carry",
        ),
        ({"admin": True, "api_key": "k"}, "admin_api_key: is missing: every user of the server could swap"),
        ({"admin_api_key": "k"}, "admin_api_key: does nothing without --admin"),
        ({"ssl_certfile": Path("nowhere.pem")}, "ssl_certfile: is not a file (nowhere.pem)"),
        ({"ssl_keyfile": Path(__file__)}, "ssl_certfile: is missing, and TLS is asked for"),
        ({"ssl_ca_certs": Path(__file__)}, "ssl_certfile: is missing, and TLS is asked for"),
        ({"api_key": ("fine", "not fine")}, "api_key: is empty, or has characters that a header cannot carry"),
        ({"api_key_file": Path("nowhere.txt")}, "api_key_file: cannot be read ("),
        ({"api_key": ("k",), "admin": True}, "admin_api_key: is missing"),
        ({"allowed_hosts": ("a:80",)}, "allowed_hosts: contains an invalid host name ('a:80')"),
        (
            {"allowed_origins": ("chat.example.org",)},
            "allowed_origins: contains an invalid origin ('chat.example.org')",
        ),
        ({"allow_credentials": True}, "allow_credentials: must list origins"),
        ({"allow_credentials": True, "allowed_origins": ("*",)}, "allow_credentials: must list origins"),
        ({"forwarded_allow_ips": ("proxy",)}, "forwarded_allow_ips: contains an invalid address ('proxy')"),
        ({"root_path": "llm"}, "root_path: is not a prefix of paths ('llm'). Allowed: such as /llm"),
        ({"root_path": "/llm/"}, "root_path: is not a prefix of paths ('/llm/')"),
        ({"root_path": "/a?b"}, "root_path: is not a prefix of paths ('/a?b')"),
        ({"api_key": ""}, "api_key: is empty"),
        ({"api_key": ("", "secret")}, "api_key: is empty"),
        ({"admin": True, "admin_api_key": ""}, "admin_api_key: is empty"),
        ({"served_names": ("",)}, "served_names: has an empty name"),
        ({"served_names": ("fine", " ")}, "served_names: has an empty name"),
    ],
)
def test_what_a_server_refuses(given: dict[str, Any], said: str) -> None:
    (problem,) = problems_of(ServeOptions(**given))
    assert problem.startswith(said)


def test_everything_wrong_is_said_together_and_no_key_is_repeated() -> None:
    said = problems_of(ServeOptions(port=-1, max_choices=0, api_key="s e c r e t", root_path="x", grace_s=-1.0))
    assert [one.partition(":")[0] for one in said] == ["max_choices", "grace_s", "port", "api_key", "root_path"]
    assert "s e c r e t" not in "".join(said)


# Spans


@pytest.mark.parametrize(
    ("variables", "is_wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "True"}, False),
        ({"OTEL_SDK_DISABLED": "false", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://h"}, True),
    ],
)
def test_spans_are_wanted_where_a_variable_says_where_they_go(
    variables: dict[str, str], is_wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ServeOptions().traces is is_wanted


def test_the_option_asks_for_spans_unless_they_are_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ServeOptions(otlp_traces_endpoint="http://h/v1/traces")
    assert options.traces
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not options.traces
