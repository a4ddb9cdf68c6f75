"""Server options that are not part of the experiment."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path
from typing import Literal, TypeAlias

from vajra_py.errors import ConfigError, Problem
from vajra_py.serve.http.logs import LogFormat, LogLevel

MetricNames: TypeAlias = Literal["vajra", "vllm", "both"]
OTLP_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
LOOPBACK = ("127.0.0.1", "::1", "localhost")

_COUNTS = (
    "max_body_bytes",
    "max_body_values",
    "max_body_containers",
    "max_buffered_bytes",
    "max_connections",
    "max_connections_per_client",
    "max_header_bytes",
    "max_choices",
    "max_concurrent",
    "max_labels",
)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of a server: listening, access, limits, output.

    Attributes:
        host: address to listen on; loopback by default.
        port: port to listen on; 0 takes a free one.
        api_key: API key, or several keys; requests need one of them, except for the paths `/health`, `/ready` and
            `/metrics`; None: no key is required, unless there is an `api_key_file`.
        api_key_file: file with further keys, one per line, each with its tenant.
        served_names: names of the model; the first one labels metrics; empty: the name of the model's directory.
        max_body_bytes: largest request body, in bytes.
        max_body_values: maximum number of JSON values in a request body; each token id of a prompt is one.
        max_body_containers: maximum number of JSON arrays and objects in a request body; each message is one.
        max_buffered_bytes: maximum total bytes that request bodies larger than 64 KiB occupy at once; further ones are
            answered 429.
        max_connections: maximum number of connections; lower if the process may not open that many files.
        max_connections_per_client: maximum number of connections from one address.
        max_header_bytes: largest head of a request (request line and headers), in bytes.
        header_timeout_s: seconds that a client may take to send a request's head, counted from the head's first byte
            or, for the first request of a connection, from the start of the connection.
        body_timeout_s: seconds that a client may take to send the body.
        idle_timeout_s: seconds that a connection stays open between two requests.
        send_timeout_s: seconds for which a client may read none of the sent data before its connection is closed.
        guard_health: True if `/health` and `/ready` need the key too.
        guard_metrics: True if `/metrics` needs the key.
        allowed_hosts: names by which clients may address the server; a leading `*.` matches all subdomains; empty: any.
        allowed_origins: origins whose pages may use the server from a browser (CORS), `*` for all; empty: none.
        allowed_methods: methods that pages of `allowed_origins` may use.
        allowed_headers: headers that pages of `allowed_origins` may send.
        allow_credentials: True if pages of `allowed_origins` may send cookies and other credentials.
        forwarded_allow_ips: addresses or networks of proxies whose `X-Forwarded-For` and `X-Forwarded-Proto` are
            trusted, `*` for all; empty: none.
        max_choices: maximum number of outputs of one HTTP request: prompts times `n`.
        max_concurrent: maximum number of HTTP generation requests in progress; further ones are answered 429.
        strict_fields: True to refuse unknown fields of a body instead of ignoring them.
        retry_after_s: seconds after which a client that got a 429 or 503 may retry.
        grace_s: seconds that requests may take to finish during a shutdown.
        metric_names: `vajra` (own prefix), `vllm` (vLLM's names for metrics that vLLM has too), or `both`.
        max_labels: maximum number of tenants, and of service classes, that are counted separately; further ones count
            as "other".
        otlp_traces_endpoint: endpoint for spans, by OTLP over HTTP; None: the variables `OTEL_*` may name one.
        admin: True to offer `/admin/policy`, which swaps policies.
        admin_api_key: API key that `/admin/policy` requires instead of `api_key`; must be set if there is an `api_key`.
        access_log: True to log a line for each request.
        log_format: `text` or `json`.
        log_level: lowest level of log lines that are written.
        uds: path of a Unix socket to listen on instead of `host` and `port`.
        root_path: prefix that a proxy adds to the server's paths.
        ssl_keyfile: file of the private key for TLS.
        ssl_certfile: file of the certificate; if set, the server uses TLS.
        ssl_keyfile_password: password of an encrypted key.
        ssl_ca_certs: file of the CA certificates for client certificates; if set, clients need a certificate.
        save_run: folder to record the session in as a run; None: no recording.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | tuple[str, ...] | None = field(default=None, repr=False)
    api_key_file: Path | None = None
    served_names: tuple[str, ...] = ()
    max_body_bytes: int = 8 * 2**20
    max_body_values: int = 2**19
    max_body_containers: int = 2**13
    max_buffered_bytes: int = 64 * 2**20
    max_connections: int = 4096
    max_connections_per_client: int = 1024
    max_header_bytes: int = 2**16
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    idle_timeout_s: float = 75.0
    send_timeout_s: float = 60.0
    guard_health: bool = False
    guard_metrics: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("GET", "POST")
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    forwarded_allow_ips: tuple[str, ...] = ()
    max_choices: int = 64
    max_concurrent: int = 512
    strict_fields: bool = False
    retry_after_s: float = 1.0
    grace_s: float = 30.0
    metric_names: MetricNames = "both"
    max_labels: int = 100
    otlp_traces_endpoint: str | None = None
    admin: bool = False
    admin_api_key: str | None = field(default=None, repr=False)
    access_log: bool = True
    log_format: LogFormat = "text"
    log_level: LogLevel = "info"
    uds: Path | None = None
    root_path: str = ""
    ssl_keyfile: Path | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile_password: str | None = field(default=None, repr=False)
    ssl_ca_certs: Path | None = None
    save_run: Path | None = None

    @property
    def traces(self) -> bool:
        """True if spans are exported: by the option, or by a variable that names an exporter or an endpoint."""
        if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
            return False
        exporter = os.environ.get("OTEL_TRACES_EXPORTER", "")
        named = any(os.environ.get(name) for name in OTLP_VARIABLES)
        return self.otlp_traces_endpoint is not None or exporter not in ("", "none") or (named and exporter != "none")

    def check(self) -> None:
        """Raise `ConfigError` with all invalid or contradictory options."""
        problems = [
            Problem(name, f"is too small ({getattr(self, name)})", "Allowed: 1 or more")
            for name in _COUNTS
            if getattr(self, name) < 1
        ]
        problems += [
            Problem(name, f"is out of range ({getattr(self, name)})", "Allowed: 0 or more seconds")
            for name in ("grace_s", "retry_after_s")
            if not 0 <= getattr(self, name) < float("inf")
        ]
        problems += [
            Problem(name, f"is out of range ({getattr(self, name)})", "Allowed: above 0 seconds")
            for name in ("header_timeout_s", "body_timeout_s", "idle_timeout_s", "send_timeout_s")
            if not 0 < getattr(self, name) < float("inf")
        ]
        if not 0 <= self.port <= 65535:
            problems.append(Problem("port", f"is not a port ({self.port})", "Allowed: 0 to 65535; 0 takes a free one"))
        admin_keys = () if self.admin_api_key is None else (self.admin_api_key,)
        problems += [
            Problem(name, "is empty, or has characters that a header cannot carry", "Allowed: visible ASCII")
            for name, keys in (("api_key", self._given_keys), ("admin_api_key", admin_keys))
            if not all(map(is_key, keys))
        ]
        problems += [*self._admin_problems(), *self._listening_problems(), *self._browser_problems()]
        try:
            self.read_keys()
        except ConfigError as error:
            problems += error.problems
        if any(not one.strip() for one in self.served_names):
            problems.append(Problem("served_names", "has an empty name", "Allowed: one character or more"))
        if problems:
            raise ConfigError(problems)

    @property
    def _given_keys(self) -> tuple[str, ...]:
        return (self.api_key,) if isinstance(self.api_key, str) else self.api_key or ()

    @property
    def has_keys(self) -> bool:
        """True if requests need an API key."""
        return bool(self._given_keys) or self.api_key_file is not None

    def read_keys(self) -> dict[str, str | None]:
        """Return the tenant of each API key, by key; None: the client names its tenant. Raises `ConfigError`."""
        keys: dict[str, str | None] = dict.fromkeys(self._given_keys)
        if self.api_key_file is None:
            return keys
        try:
            lines = self.api_key_file.read_text("utf-8").splitlines()
        except (OSError, ValueError) as error:
            problem = Problem("api_key_file", f"cannot be read ({error})", "A text file: KEY and TENANT on each line")
            raise ConfigError(problem) from None
        problems, num_before = [], len(keys)
        for number, line in enumerate(lines, 1):
            key, _, tenant = line.strip().partition(" ")
            if not key or key.startswith("#"):
                continue
            tenant = tenant.strip()
            if not is_key(key) or len(tenant) > 256 or not tenant.isprintable():
                message = f"line {number} is not a key and a tenant"
                problems.append(Problem("api_key_file", message, "Allowed: visible ASCII, a blank, a name"))
            elif key in keys:
                problems.append(Problem("api_key_file", f"line {number} has a key that was there before"))
            keys[key] = tenant or None
        if len(keys) == num_before and not problems:
            problems.append(Problem("api_key_file", "has no key", "A key on each line"))
        if problems:
            raise ConfigError(problems)
        return keys

    def _browser_problems(self) -> list[Problem]:
        """Return the problems of the settings for host names, CORS and trusted proxies."""
        problems = []
        wrong = [
            one for one in self.allowed_hosts if not re.fullmatch(r"(\*\.)?[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]", one)
        ]
        if wrong:
            message = f"contains an invalid host name ({wrong[0]!r})"
            problems.append(Problem("allowed_hosts", message, "Names or addresses without port; *.NAME for all below"))
        wrong = [
            one for one in self.allowed_origins if one != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", one)
        ]
        if wrong:
            message = f"contains an invalid origin ({wrong[0]!r})"
            problems.append(Problem("allowed_origins", message, "Such as https://chat.example.org, or *"))
        if self.allow_credentials and ("*" in self.allowed_origins or not self.allowed_origins):
            message = "must list origins: with '*' any page could use the credentials that a browser stores"
            problems.append(Problem("allow_credentials", message, "allowed_origins without *"))
        wrong = [one for one in self.forwarded_allow_ips if one != "*" and not _is_network(one)]
        if wrong:
            message = f"contains an invalid address ({wrong[0]!r})"
            problems.append(Problem("forwarded_allow_ips", message, "Addresses, networks such as 10.0.0.0/8, or *"))
        return problems

    def _admin_problems(self) -> list[Problem]:
        if self.admin and self.has_keys and self.admin_api_key is None:
            message = "is missing: every user of the server could swap its policies"
            return [Problem("admin_api_key", message, "Another key for /admin (VAJRA_ADMIN_API_KEY), or no --admin")]
        if self.admin_api_key is not None and not self.admin:
            return [Problem("admin_api_key", "does nothing without --admin")]
        return []

    def _listening_problems(self) -> list[Problem]:
        problems = [
            Problem(name, f"is not a file ({path})", "A file in PEM format")
            for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs")
            if (path := getattr(self, name)) is not None and not path.is_file()
        ]
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            problems.append(Problem("ssl_certfile", "is missing, and TLS is asked for", "The certificate's file"))
        if self.root_path and not re.fullmatch(r"(/[^/?#\s]+)+", self.root_path):
            problems.append(
                Problem("root_path", f"is not a prefix of paths ({self.root_path!r})", "Allowed: such as /llm")
            )
        return problems


def is_key(text: str) -> bool:
    """Return True if an API key can be sent in a header: it is not empty, and all its characters are visible ASCII."""
    return re.fullmatch(r"[\x21-\x7e]+", text) is not None


def _is_network(text: str) -> bool:
    try:
        ip_network(text)
    except ValueError:
        return False
    return True
