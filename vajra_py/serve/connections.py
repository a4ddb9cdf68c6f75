"""HTTP connections with limits: how many, how large a request's head is, and how long each part of an exchange may take.

The limits hold before the key is checked, since whoever holds a connection open need not have one.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections import Counter
from enum import Enum
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from vajra_py.serve.errors import ApiError
from vajra_py.serve.options import ServeOptions

_log = logging.getLogger(__name__)
_OTHER_DESCRIPTORS = 256
"""File descriptors that are not connections: listeners, workers, logs, recordings."""
_LOG_EVERY_S = 1.0


class Connections:
    """All connections of a server, and their limits."""

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        self.max_connections = min(options.max_connections, most_connections(options.max_connections))
        self.max_per_client = min(options.max_connections_per_client, max(1, self.max_connections * 3 // 4))
        """One address never has all connections."""
        self.per_client: Counter[str] = Counter()
        self.alive: set[Connection] = set()
        self.num_refused = 0
        self.num_late = 0
        self._logged_at: dict[int, float] = {}
        """By status, when a refusal was last logged, on the monotonic clock."""
        self._num_unlogged: Counter[int] = Counter()

    def make(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> Connection:
        """A protocol for a new connection, as uvicorn makes them."""
        return Connection(self, config, server_state, app_state, _loop)

    def note_refusal(self, client: str, status: int, message: str) -> None:
        """Count and log a refusal: no request line follows, and a flood of them writes one line a second for each status."""
        self.num_refused += 1
        now = time.monotonic()
        if now - self._logged_at.get(status, -_LOG_EVERY_S) < _LOG_EVERY_S:
            self._num_unlogged[status] += 1
            return
        self._logged_at[status] = now
        more = self._num_unlogged.pop(status, 0)
        since = f" ({more} more since the last such line)" if more else ""
        _log.warning("a connection of %s is refused with %d: %s%s", client or "a Unix socket", status, message, since)

    def end_late(self, now: float) -> None:
        """Close the connections that have taken longer than they may."""
        for connection in list(self.alive):
            connection.check(now)


def most_connections(wanted: int) -> int:
    """How many connections the process has file descriptors for, after it has raised its own limit where it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        if raised > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    if soft == resource.RLIM_INFINITY:
        return wanted
    most = max(soft - _OTHER_DESCRIPTORS, soft // 2, 1)
    if most < wanted:
        _log.warning("at most %d connections: the limit of open files is %d", most, soft)
    return most


class Phase(Enum):
    """What a connection waits for from its client."""

    HEAD = "the head of a request"
    BODY = "the body of a request"
    NOTHING = "nothing"


class _UntilClosed(int):
    """The length of a body that ends with its connection, for uvicorn, which counts down to 0."""

    def __lt__(self, other: object) -> bool:
        return False

    def __isub__(self, other: object) -> _UntilClosed:
        return self

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol with limits."""

    def __init__(self, all_connections: Connections, *args: Any) -> None:
        super().__init__(*args)
        self._all = all_connections
        self._limits = all_connections.options
        self._phase = Phase.HEAD
        self._since = self.loop.time()
        """When the phase began."""
        self._num_head_bytes = 0
        self._is_refused = False
        self._unsent = 0
        self._unsent_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Let the client in, or answer 503 where there are too many."""
        super().connection_made(transport)
        everyone = self._all
        everyone.alive.add(self)
        host = "" if self.client is None else self.client[0]
        everyone.per_client[host] += 1
        if len(everyone.alive) > everyone.max_connections:
            self._refuse(503, f"the server has {everyone.max_connections} connections; no more are allowed")
        elif host and everyone.per_client[host] > (most := everyone.max_per_client):
            self._refuse(503, f"{host} has {most} connections; no more are allowed from one address")

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        everyone = self._all
        everyone.alive.discard(self)
        host = "" if self.client is None else self.client[0]
        everyone.per_client[host] -= 1
        if not everyone.per_client[host]:
            del everyone.per_client[host]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what has come, unless a request's head is too large."""
        if self._is_refused:
            return
        if self._phase is Phase.NOTHING and not self._is_answering:
            self._enter(Phase.HEAD)
        if self._phase is Phase.HEAD:
            self._num_head_bytes += len(data)
        super().data_received(data)
        if self._phase is Phase.HEAD and self._num_head_bytes > self._limits.max_header_bytes:
            self._refuse_head()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP as everything else that is wrong."""
        error = ApiError(400, "the request is not HTTP that this server reads", code="not_http")
        self._write_error(error)

    def _unsupported_upgrade_warning(self) -> None:
        """Another protocol is asked for: the request is answered as if it were not, which is what HTTP says."""

    def on_message_begin(self) -> None:
        """A request begins."""
        if self._is_refused:
            return
        if self._phase is not Phase.HEAD:
            self._enter(Phase.HEAD)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is there: what follows is the body."""
        if self._is_refused:
            return
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.max_header_bytes:
            self._refuse_head()
            return
        self._enter(Phase.BODY)
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":  # it knows no chunks: the answer ends with the connection
            self.cycle.chunked_encoding = False
            self.cycle.expected_content_length = _UntilClosed()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is there; what takes time now is the server's affair."""
        if not self._is_refused:
            self._enter(Phase.NOTHING)
            super().on_message_complete()

    def check(self, now: float) -> None:
        """Close the connection when its client takes too long to send, or to take what was sent to it."""
        limits = self._limits
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or unsent < self._unsent or not self._unsent:
            self._unsent_since = now
        self._unsent = unsent
        if unsent and now - self._unsent_since > limits.send_timeout_s:
            self._all.num_late += 1
            _log.info("%s has taken nothing for %g s; its connection is closed", self.client, limits.send_timeout_s)
            self.transport.abort()
        elif self.transport.is_closing() or self._phase is Phase.NOTHING:
            return
        elif self._phase is Phase.BODY and self.flow.read_paused:
            self._since = now  # the server does not read: no fault of the client
        elif now - self._since > (
            allowed := limits.header_timeout_s if self._phase is Phase.HEAD else limits.body_timeout_s
        ):
            self._all.num_late += 1
            if self._phase is Phase.HEAD and not self._num_head_bytes:
                self.transport.close()
            else:
                self._refuse(408, f"{self._phase.value} did not come within {allowed:g} s")

    @property
    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._since = self.loop.time()
        self._num_head_bytes = 0

    def _refuse_head(self) -> None:
        self._refuse(431, f"the head of the request is larger than {self._limits.max_header_bytes} bytes")

    def _refuse(self, status: int, message: str) -> None:
        """Answer, where nothing is being answered, and close."""
        self._is_refused = True
        self._all.note_refusal("" if self.client is None else self.client[0], status, message)
        if self._is_answering:
            if self.cycle.response_started:
                self.transport.abort()
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        codes = {408: "request_timeout", 431: "header_too_large", 503: "too_many_connections"}
        self._write_error(ApiError(status, message, code=codes[status], retry_after_s=1 if status == 503 else None))

    def _write_error(self, error: ApiError) -> None:
        """Answer with an error, past the application, and close."""
        response = error.response()
        head = [STATUS_LINE[error.status], b"connection: close\r\n"]
        head += [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
        self.transport.write(b"".join((*head, b"\r\n", response.body)))
        self.transport.close()
