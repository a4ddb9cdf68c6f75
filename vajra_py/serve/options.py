"""Server options besides the experiment."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vajra_py.errors import ConfigError, Problem

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
    """How a server listens, what it lets in, and what it shows.

    Attributes:
        host: address to listen on; loopback unless told otherwise.
        port: 0 takes a free one.
        api_key: what every request but those for `/health`, `/ready` and `/metrics` has to carry; None: nothing.
        served_names: names of the model, the first one being what answers say; empty: the model directory's name.
        max_body_bytes: largest request body.
        max_body_values: most JSON values of a request body; each token id of a prompt is one.
        max_body_containers: most JSON arrays and objects of a request body; each message is one.
        max_buffered_bytes: most bytes of request bodies above 64 KiB that are read at once; more are answered 429.
        max_connections: most connections at once; fewer where the process may not open so many files.
        max_connections_per_client: most of them from one address.
        max_header_bytes: largest head of a request: its line and its headers.
        header_timeout_s: how long a client may take to send a request's head, seconds, from its first byte or from connecting.
        body_timeout_s: how long it may take to send the body, seconds.
        idle_timeout_s: how long a connection stays open between two requests, seconds.
        send_timeout_s: how long a client may take nothing of what was sent to it, seconds; then its connection is closed.
        guard_health: whether `/health` and `/ready` need the key too.
        max_choices: most outputs of one HTTP request: prompts times `n`.
        max_concurrent: most HTTP requests that generate at once; more are answered 429.
        strict_fields: whether fields of a body that nobody knows are refused instead of ignored.
        retry_after_s: when a client that got a 429 or 503 should come back, seconds.
        grace_s: how long a shutdown lets requests finish, seconds.
        metric_names: `vajra` (own prefix) or `vllm` (vLLM's names where the thing is the same).
        max_labels: tenants, and classes of service, that numbers tell apart; further ones count as "other".
        otlp_traces_endpoint: where spans go, by OTLP over HTTP; None: where the variables `OTEL_*` say, or nowhere.
        admin: whether `/admin/policy` is there, by which whoever may use the server swaps its policies.
        save_run: folder that gets the session as a run; None: it is not recorded.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
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
    max_choices: int = 64
    max_concurrent: int = 512
    strict_fields: bool = False
    retry_after_s: float = 1.0
    grace_s: float = 30.0
    metric_names: Literal["vajra", "vllm"] = "vajra"
    max_labels: int = 100
    otlp_traces_endpoint: str | None = None
    admin: bool = False
    save_run: Path | None = None

    @property
    def traces(self) -> bool:
        """Whether spans are wanted: by the option, or by a variable that names an exporter or an endpoint."""
        if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
            return False
        exporter = os.environ.get("OTEL_TRACES_EXPORTER", "")
        named = any(os.environ.get(name) for name in OTLP_VARIABLES)
        return self.otlp_traces_endpoint is not None or exporter not in ("", "none") or (named and exporter != "none")

    def check(self) -> None:
        """Raises `ConfigError` with everything that cannot be."""
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
            problems.append(Problem("port", f"is no port ({self.port})", "Allowed: 0 to 65535; 0 takes a free one"))
        if self.api_key is not None and not re.fullmatch(r"[\x21-\x7e]+", self.api_key):
            problems.append(Problem("api_key", "has characters that a header cannot carry", "Allowed: visible ASCII"))
        if any(not one.strip() for one in self.served_names):
            problems.append(Problem("served_names", "has an empty name", "Allowed: one character or more"))
        if problems:
            raise ConfigError(problems)
