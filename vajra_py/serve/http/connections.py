"""HTTP connections with limits on their number, on the head of a request, and on the time of each phase.

The limits apply before the API key is checked, since a connection can be held open without one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from vajra_py.serve.http.descriptors import is_closed_by_client, most_connections, num_undelivered
from vajra_py.serve.http.errors import ApiError
from vajra_py.serve.http.options import ServeOptions

_log = logging.getLogger(__name__)
_LOG_EVERY_S = 1.0
_HEAD_PIECE, _BODY_PIECE = 2**12, 2**14
"""Maximum number of bytes that are parsed between two checks of the limits: in a head, and in a body."""
_MOST_QUEUED = 8
"""Number of pipelined requests that may wait behind the current one; with so many, parsing of received data pauses."""
_MOST_AHEAD = 2**17
"""Maximum number of bytes kept ahead while a request is answered: unparsed bytes and the bodies of pipelined requests.
Above it, the server pauses reading from the connection.
"""
_CHUNK_BYTES = 24
"""Maximum number of bytes that frame a chunk without extensions: the digits of its length, and two line ends."""
_LINGER_S = 5.0
"""Seconds that a client may keep sending an unwanted body, so that it can read the answer before the connection is
closed. Also the seconds that a request may run while reading is paused and pipelined requests wait.
"""


class Connections:
    """All connections of a server, and their limits."""

    def __init__(self, options: ServeOptions, most_sent_on: int = 0) -> None:
        """Create the limits; `most_sent_on`: largest number of requests that are at other servers at once."""
        self.options = options
        wanted = options.max_connections
        self.max_connections = min(wanted, most_connections(wanted, most_sent_on))
        self.max_per_client = min(options.max_connections_per_client, max(1, self.max_connections * 3 // 4))
        """Largest number of connections of one address; below the total, so that no address can take all."""
        self.per_client: Counter[str] = Counter()
        """Number of accepted sockets by address, including those in a TLS handshake."""
        self.num_open = 0
        """Number of open connections of all addresses."""
        self.alive: set[Connection] = set()
        self.num_refused = 0
        self.num_late = 0
        self._logged_at: dict[object, float] = {}
        """Time of the last log line for each kind of problem, on the monotonic clock."""
        self._num_unlogged: Counter[object] = Counter()

    def enter(self, host: str) -> str | None:
        """Count an accepted socket of an address ("": a Unix socket); return the reason to refuse it, or None."""
        self.num_open += 1
        self.per_client[host] += 1
        if self.num_open > self.max_connections:
            return f"the server has {self.max_connections} connections; no more are allowed"
        if host and self.per_client[host] > self.max_per_client:
            return f"{host} has {self.max_per_client} connections; no more are allowed from one address"
        return None

    def leave(self, host: str) -> None:
        """Stop counting a socket of this address."""
        self.num_open -= 1
        self.per_client[host] -= 1
        if not self.per_client[host]:
            del self.per_client[host]

    def make(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        host: str = "",
        refusal: str | None = None,
    ) -> Connection:
        """Return the protocol of a socket that was counted by `enter`; with a `refusal` it answers 503 and closes."""
        return Connection(self, host, refusal, config, server_state, app_state)

    def note_refusal(self, client: str, status: int, message: str) -> None:
        """Count and log a refused connection, which has no access-log line; at most one line per second and status."""
        self.num_refused += 1
        self.note(status, f"a connection of {client or 'a Unix socket'} is refused with {status}: {message}")

    def note(self, kind: object, message: str) -> None:
        """Log a problem with connections; at most one line per second and kind."""
        now = time.monotonic()
        if now - self._logged_at.get(kind, -_LOG_EVERY_S) < _LOG_EVERY_S:
            self._num_unlogged[kind] += 1
            return
        self._logged_at[kind] = now
        more = self._num_unlogged.pop(kind, 0)
        _log.warning("%s%s", message, f" ({more} more since the last such line)" if more else "")

    def end_late(self, now: float) -> None:
        """Close the connections that have exceeded a time limit, or whose client has disconnected."""
        for connection in list(self.alive):
            connection.check(now)


class Phase(Enum):
    """Phase of a connection: the data that the server expects from the client."""

    HEAD = "the head of a request"
    BODY = "the body of a request"
    NOTHING = "nothing"
    END = "the end"
    """The last answer was sent; all further data is an unwanted body."""


class _UntilClosed(int):
    """Content length of a body that ends with its connection; it stays the same when uvicorn subtracts sent bytes."""

    def __lt__(self, other: object) -> bool:
        return False

    def __isub__(self, other: object) -> _UntilClosed:
        return self

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


class _HeldHead:
    """Transport that delays an answer's head, to send it together with the first part of the body.

    If the body does not follow in the same turn of the event loop, the head is sent alone.
    """

    __slots__ = ("_cycle", "_head", "_transport")

    def __init__(
        self, cycle: RequestResponseCycle, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._cycle = cycle
        self._transport = transport
        self._head = b""
        loop.call_soon(self.flush)

    def write(self, data: bytes) -> None:
        """Keep the head, or send it with the following data."""
        is_first = not self._head
        self._head += data
        if not is_first:
            self.flush()

    def close(self) -> None:
        """Close the connection once everything is sent."""
        self.flush()
        self._transport.close()

    def flush(self) -> None:
        """Send the head, if it is not sent yet."""
        head, self._head = self._head, b""
        self._cycle.transport = self._transport
        if head and not self._transport.is_closing():
            self._transport.write(head)


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol with limits.

    Invariants:
        - When a client disconnects, all requests of the connection end, both the current and the pipelined ones,
          whether or not the connection is being read.
        - Data that a client sends ahead is kept only up to a bound: `_MOST_AHEAD` plus the bytes of one read. Above the
          bound, reading is paused. A client whose answer then takes longer than `_LINGER_S` counts as disconnected,
          since the server may not detect that a client has disconnected while data of this client is unread.
    """

    def __init__(self, all_connections: Connections, host: str, refusal: str | None, *args: Any) -> None:
        super().__init__(*args)
        self._all = all_connections
        self._limits = all_connections.options
        self._host = host
        self._refusal = refusal
        self._phase = Phase.HEAD
        self._since = self.loop.time()
        """Start of the phase, on the monotonic clock."""
        self._num_head_bytes = 0
        self._num_framing_bytes = 0
        """Number of bytes received around a body: chunk extensions and trailers."""
        self._num_unwanted_bytes = 0
        """Number of bytes received after the last answer."""
        self._unparsed = bytearray()
        self._running: RequestResponseCycle | None = None
        """Current request, or the last one."""
        self._running_since = 0.0
        self._is_refused = False
        self.was_made = False
        """True once `connection_made` was called; only then will `connection_lost` be called."""
        self._unsent = self._undelivered = 0
        """Numbers of bytes at the last check: not yet passed to the kernel, and not yet delivered by the kernel."""
        self._unsent_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the client, or answer 503 if there are too many connections."""
        super().connection_made(transport)
        self.was_made = True
        self._all.alive.add(self)
        if self._refusal is not None:
            self._refuse(503, self._refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection, and end its requests."""
        self._all.alive.discard(self)
        self._all.leave(self._host)
        self._disconnect()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, as far as the limits allow now."""
        if self._phase is Phase.END:
            self._num_unwanted_bytes += len(data)
            if self._num_unwanted_bytes > self._limits.max_body_bytes:
                self.transport.abort()
        if self._is_refused or self._phase is Phase.END:
            return
        self._unparsed += data
        self._parse()

    def _parse(self) -> None:
        """Parse received bytes, but at most a few pipelined requests beyond the current one."""
        left = self._unparsed
        while left and len(self.pipeline) < _MOST_QUEUED and not self._is_refused and not self.transport.is_closing():
            if self._phase is Phase.NOTHING and not self._is_answering:
                self._enter(Phase.HEAD)
            size = _BODY_PIECE if self._phase is Phase.BODY else _HEAD_PIECE
            piece = bytes(left[:size])
            del left[:size]
            if self._phase is Phase.BODY:
                self._num_framing_bytes += len(piece)
            else:
                self._num_head_bytes += len(piece)
            self._feed(piece)
            self._check_sizes()
        if self.pipeline:
            self._read_ahead()

    def _feed(self, piece: bytes) -> None:
        """Parse a piece. A request to upgrade to another protocol is read as an ordinary request, as HTTP allows.

        The parser skips the body of such a request; therefore a new parser continues, from the same head without
        `upgrade`.
        """
        self._unset_keepalive_if_required()
        while True:
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserError:
                message = "Invalid HTTP request received."
                self.logger.warning(message)
                self.send_400_response(message)
            except httptools.HttpParserUpgrade as upgrade:
                if self._asks_to_upgrade and not self._is_refused:
                    piece = self._ordinary_head() + piece[upgrade.args[0] :]
                    self._renew_parser()
                    continue
            return

    @property
    def _asks_to_upgrade(self) -> bool:
        """True if the current request asks for another protocol; False for CONNECT, whose body no parser reads."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _ordinary_head(self) -> bytes:
        """Return the head of the current request without `upgrade`."""
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join((*lines, b"", b""))

    def _renew_parser(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        with suppress(AttributeError):  # as uvicorn does: httptools before 0.6.3 has no such setting
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _read_ahead(self) -> None:
        """Read ahead while a request is answered, to detect that the client disconnects; pause reading if too much is
        kept.
        """
        if len(self._unparsed) + sum(len(queued.body) for queued, _ in self.pipeline) > _MOST_AHEAD:
            self.flow.pause_reading()
        else:
            self.flow.resume_reading()

    def _check_sizes(self) -> None:
        most = self._limits.max_header_bytes
        if self._phase is Phase.BODY and self._num_framing_bytes > most:
            self._refuse(431, f"trailers and extensions of chunks are larger than {most} bytes")
        elif self._phase is not Phase.BODY and self._num_head_bytes > most:
            self._refuse_head()

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP in the server's error format."""
        error = ApiError(400, "the request is not HTTP that this server reads", code="not_http")
        self._write_error(error)

    def on_message_begin(self) -> None:
        """Begin a request."""
        if self._is_refused:
            return
        if self._phase is not Phase.HEAD:
            self._enter(Phase.HEAD)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header; trailers are ignored."""
        if self._phase is not Phase.BODY and not self._is_refused:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Handle a complete head, after which the body follows."""
        if self._is_refused:
            return
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.max_header_bytes:
            self._refuse_head()
            return
        if self._asks_to_upgrade:  # `_feed` parses this request again, from its head without `upgrade`
            return
        self._enter(Phase.BODY)
        super().on_headers_complete()
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False  # the unread body of a CONNECT must not count as a request
        if self.scope["http_version"] == "1.0":  # HTTP/1.0 has no chunked encoding: the answer ends with the connection
            self.cycle.chunked_encoding = False
            self.cycle.expected_content_length = _UntilClosed()

    def on_chunk_header(self) -> None:
        """Begin a chunk."""
        self._num_framing_bytes -= _CHUNK_BYTES

    def on_body(self, body: bytes) -> None:
        """Store a part of the body."""
        self._num_framing_bytes -= len(body)
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Handle a complete request. The client then need not send anything; only uvicorn's idle timeout applies."""
        if not self._is_refused and not self._asks_to_upgrade:
            self._enter(Phase.NOTHING)
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running, self._running_since = cycle, self.loop.time()
        cycle.send = partial(self._send, cycle)  # type: ignore[method-assign]
        super()._start_asgi_task(cycle, app)

    async def _send(self, cycle: RequestResponseCycle, message: Any) -> None:
        """Send a part of an answer.

        An answer sent before the request's body is complete is the last of its connection.
        """
        if message["type"] == "http.response.start":
            cycle.transport = cast(asyncio.Transport, _HeldHead(cycle, self.transport, self.loop))
        if cycle.more_body and not cycle.disconnected:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            elif not message.get("more_body", False):
                cycle.keep_alive = True  # uvicorn must not close the connection: `on_response_complete` ends it
        await RequestResponseCycle.send(cycle, message)

    def on_response_complete(self) -> None:
        """After an answer was sent, start the next request or end the connection."""
        if self._running is not None and self._running.more_body and not self.transport.is_closing():
            self._enter(Phase.END)
            self._unparsed.clear()
            held: object = self._running.transport
            if isinstance(held, _HeldHead):  # held to be sent with the body, which an answer to HEAD lacks
                held.flush()
            if self.transport.can_write_eof():
                self.transport.write_eof()
        super().on_response_complete()
        if self._unparsed:
            self._parse()

    def check(self, now: float) -> None:
        """Close the connection if its client has disconnected, or takes too long to send or to read data."""
        limits = self._limits
        unsent = self.transport.get_write_buffer_size()
        undelivered = num_undelivered(self.transport) if unsent else 0
        if unsent == 0 or unsent < self._unsent or undelivered < self._undelivered or not self._unsent:
            self._unsent_since = now
        self._unsent, self._undelivered = unsent, undelivered
        if unsent and now - self._unsent_since > limits.send_timeout_s:
            self._all.num_late += 1
            _log.info("%s has taken nothing for %g s; its connection is closed", self.client, limits.send_timeout_s)
            self.transport.abort()
        elif self.flow.read_paused and self._is_answering and self._has_left(now):
            self.transport.abort()
        elif self.transport.is_closing() or self._phase is Phase.NOTHING:
            return
        elif self._phase is Phase.END:
            if now - self._since > min(_LINGER_S, limits.body_timeout_s):
                self.transport.abort()
        elif self.flow.read_paused or self._unparsed:
            self._since = now  # the server has paused reading, so the client is not late
        elif now - self._since > (
            allowed := limits.header_timeout_s if self._phase is Phase.HEAD else limits.body_timeout_s
        ):
            self._all.num_late += 1
            if self._phase is Phase.HEAD and not self._num_head_bytes:
                self.transport.close()
            else:
                self._refuse(408, f"{self._phase.value} did not come within {allowed:g} s")

    def _has_left(self, now: float) -> bool:
        """Return True if the client has closed the connection, or counts as disconnected after a time limit."""
        is_late = bool(self.pipeline) and now - self._running_since > _LINGER_S
        return is_late or is_closed_by_client(self.transport)

    @property
    def _is_answering(self) -> bool:
        return bool(self.pipeline) or (self._running is not None and not self._running.response_complete)

    def _disconnect(self) -> None:
        """Notify every request of the connection that its client has disconnected."""
        for cycle in (self._running, *(queued for queued, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        self._unparsed.clear()

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._since = self.loop.time()
        self._num_head_bytes = self._num_framing_bytes = 0

    def _refuse_head(self) -> None:
        self._refuse(431, f"the head of the request is larger than {self._limits.max_header_bytes} bytes")

    def _refuse(self, status: int, message: str) -> None:
        """Answer with an error, unless another answer is in progress, and close."""
        self._is_refused = True
        self._all.note_refusal(self._host, status, message)
        has_begun = self._is_answering and self._running is not None and self._running.response_started
        self._disconnect()
        if has_begun:
            self.transport.abort()
            return
        codes = {408: "request_timeout", 431: "header_too_large", 503: "too_many_connections"}
        self._write_error(ApiError(status, message, code=codes[status], retry_after_s=1 if status == 503 else None))

    def _write_error(self, error: ApiError) -> None:
        """Answer with an error without using the application, and close."""
        response = error.response()
        head = [STATUS_LINE[error.status], b"connection: close\r\n"]
        head += [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
        self.transport.write(b"".join((*head, b"\r\n", response.body)))
        self.transport.close()
