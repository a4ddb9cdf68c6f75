"""HTTP/1.1 connections to servers: kept open for the next request, with limits on everything that a server may send.

The parser's callback passes each piece of an answer directly to the waiting reader, without a layer in between: a
router forwards thousands of pieces per second.
"""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from socket import gaierror
from typing import cast
from urllib.parse import urlsplit

import httptools

_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
"""Error numbers of attempts to connect that fail because this machine lacks resources; no fault of the server."""
_MOST_HEAD_BYTES = 2**16
_MOST_UNREAD_BYTES = 2**18
"""Number of unread bytes of an answer above which reading from its connection is paused."""
_KEPT_S = 15.0
"""Seconds for which an idle connection is kept for another request."""
_LAST_BYTES_S = 1.0
"""Seconds to wait for the last bytes of an answer whose content is not needed any more, so that its connection can be
kept; also seconds to wait for connections to close when the pool is closed.
"""
_JOINED_BYTES = 2**16
"""Maximum size in bytes of a body that is sent in one piece with the head."""


class ServerFault(Exception):
    """Raised if a server does not answer, or its answer is invalid or reports a failure.

    Attributes:
        is_down: True if the server accepts no connections.
        status: HTTP status of the answer; 0 if there is none.
    """

    def __init__(self, message: str, *, is_down: bool = False, status: int = 0, body: bytes = b"") -> None:
        self.is_down = is_down
        self.status = status
        self.body = body
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a server.

    Attributes:
        name: host and port in the form of the header `Host`.
        path: prefix of the path of each request.
    """

    host: str
    port: int
    is_secure: bool
    name: bytes
    path: bytes

    @classmethod
    def of(cls, url: str) -> Address:
        """Parse the address of a URL."""
        parts = urlsplit(url)
        is_secure = parts.scheme == "https"
        host = parts.hostname or ""
        name = parts.netloc.rpartition("@")[2]
        return cls(host, parts.port or (443 if is_secure else 80), is_secure, name.encode(), parts.path.encode())


class ServerAnswer:
    """Answer of a server to one request, whose body is read piece by piece."""

    __slots__ = (
        "_connection",
        "_fault",
        "_limit_s",
        "_loop",
        "_num_unread",
        "_pieces",
        "_silence",
        "_timer",
        "_waiter",
        "_waits_since",
        "content_type",
        "has_head",
        "is_complete",
        "status",
    )

    def __init__(self, connection: Connection, limit_s: float) -> None:
        """Create an empty answer; `limit_s` is the maximum time in seconds that a reader waits for the next piece."""
        self.status = 0
        self.content_type = ""
        self.has_head = False
        self.is_complete = False
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._pieces: list[bytes] = []
        self._num_unread = 0
        self._waiter: asyncio.Future[None] | None = None
        self._fault: ServerFault | None = None
        self._waits_since = 0.0
        self._limit_s = limit_s
        self._silence = "it did not answer in time"
        self._timer = self._loop.call_later(limit_s, self._check)

    async def head(self) -> None:
        """Wait for status and headers. Raises `ServerFault`."""
        while not self.has_head:
            await self._wait()

    async def read(self) -> bytes:
        """Return the part of the body received since the last call; wait for data if there is none.

        Returns `b""` at the end of the body. Raises `ServerFault`.
        """
        while not self._pieces:
            if self.is_complete:
                return b""
            await self._wait()
        pieces = self._pieces
        piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if self._num_unread > _MOST_UNREAD_BYTES:
            self._connection.resume()
        self._num_unread = 0
        return piece

    def limit(self, limit_s: float, silence: str) -> None:
        """From now on, fail the answer with the message `silence` if its reader waits longer than `limit_s` seconds for
        a piece.
        """
        self._limit_s, self._silence = limit_s, silence
        self._timer.cancel()
        self._timer = self._loop.call_later(limit_s, self._check)

    async def _wait(self) -> None:
        if self._fault is not None:
            raise self._fault
        self._waits_since = self._loop.time()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _check(self) -> None:
        """Fail the answer if the server has been silent for too long; time without a waiting reader does not count."""
        if self.is_complete or self._fault is not None:
            return
        now = self._loop.time()
        left_s = self._waits_since + self._limit_s - now if self._waiter is not None else self._limit_s
        if left_s <= 0:
            self.fail(ServerFault(self._silence))
        else:
            self._timer = self._loop.call_later(left_s, self._check)

    # Called by the connection

    def wake(self) -> None:
        """Resume the waiting reader."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def add(self, piece: bytes) -> None:
        """Store a piece of the body for the reader."""
        self._pieces.append(piece)
        self._num_unread += len(piece)
        if self._num_unread > _MOST_UNREAD_BYTES:
            self._connection.pause()
        self.wake()

    def complete(self) -> None:
        """Mark the body as complete."""
        self.is_complete = True
        self._timer.cancel()
        self.wake()

    def fail(self, fault: ServerFault) -> None:
        """End the answer with a fault; the part already received can still be read."""
        if not self.is_complete and self._fault is None:
            self._fault = fault
            self._timer.cancel()
            self.wake()

    def release(self, *, is_at_end: bool = False) -> None:
        """Keep the connection if the answer is complete or its last bytes are expected (`is_at_end`); else close it."""
        self._timer.cancel()
        self._connection.release(self.is_complete, is_at_end=is_at_end and self._fault is None)


class Connection(asyncio.Protocol):
    """Connection to a server; one request at a time."""

    def __init__(self, pool: ConnectionPool, address: Address) -> None:
        self._pool = pool
        self.address = address
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: ServerAnswer | None = None
        self._is_wanted = False
        """True if the rest of the answer is passed on; False if it is discarded."""
        self._num_head_bytes = 0
        self._has_length = False
        """True if the headers determine where the body ends; False if it ends when the server closes the connection."""
        self._is_kept = True
        self.is_paused = False
        """True while reading is paused."""
        self._is_ended = False
        """True if the connection is to be closed, even if it is not yet established."""
        self._ending: asyncio.TimerHandle | None = None
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport has these methods, but is no subclass
        self._pool.open.add(self)
        if self._is_ended:
            self._transport.abort()

    @property
    def is_open(self) -> bool:
        """True if a request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, head: Sequence[bytes], body: bytes, limit_s: float) -> ServerAnswer:
        """Send a request; return its answer once status and headers have arrived.

        `head` holds the lines of the request's head. Raises `ServerFault`.
        """
        answer = self._send(b"\r\n".join((*head, b"", b"")), body, limit_s)
        try:
            await answer.head()
        except BaseException:
            answer.release()
            raise
        return answer

    def _send(self, head: bytes, body: bytes, limit_s: float) -> ServerAnswer:
        if self._transport is None:
            raise ServerFault("its connection was closed")
        answer = self._answer = ServerAnswer(self, limit_s)
        self._is_wanted, self._num_head_bytes, self._has_length = True, 0, False
        if len(body) <= _JOINED_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        return answer

    def release(self, is_complete: bool, *, is_at_end: bool) -> None:
        """Return the connection to the pool if it can be reused, otherwise close it. If the answer is not complete but
        `is_at_end`, the connection is returned after the answer's last bytes.
        """
        if self.is_paused:
            self.resume()
        if is_complete:
            self._rest()
        elif is_at_end and self._is_kept and self.is_open:
            self._is_wanted = False
            self._ending = asyncio.get_running_loop().call_later(_LAST_BYTES_S, self.close)
        else:
            self.close()

    def _rest(self) -> None:
        self._answer = None
        if self._is_kept and self.is_open:
            self.idle_since = asyncio.get_running_loop().time()
            self._pool.put(self.address, self)
        else:
            self.close()

    def close(self) -> None:
        """Close at once, so that the server aborts the request."""
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        self._is_ended = True
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """Pause reading."""
        if self._transport is not None and not self.is_paused and self.is_open:
            self.is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Resume reading."""
        if self._transport is not None and self.is_paused:
            self.is_paused = False
            if self.is_open:
                self._transport.resume_reading()

    # Received data

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        answer = self._answer
        if answer is None:  # no request awaits these data
            self.close()
            return
        if not answer.has_head:
            self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._break("its answer is not HTTP that is read")
            return
        if not answer.has_head and self._num_head_bytes > _MOST_HEAD_BYTES:
            self._break(f"the head of its answer is larger than {_MOST_HEAD_BYTES} bytes")

    def _break(self, message: str) -> None:
        if self._answer is not None:
            self._answer.fail(ServerFault(message))
        self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._pool.forget(self.address, self)
        self._transport = None
        if self._ending is not None:
            self._ending.cancel()
        answer = self._answer
        if answer is None:
            return
        if exc is None and answer.has_head and not self._has_length:
            answer.complete()
        else:
            kind = "closed" if exc is None else type(exc).__name__
            answer.fail(ServerFault(f"its connection broke ({kind})"))

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        """Mark the connection as not reusable if no request awaits this answer."""
        if self._answer is None or self._answer.is_complete:
            self._is_kept = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Read a header, if it is the content type or states the body's length."""
        name = name.lower()
        answer = self._answer
        if name == b"content-type":
            if answer is not None and not answer.has_head:
                answer.content_type = value.decode("latin-1")
        elif name in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        """Store the status; interim answers (1xx) are ignored."""
        answer, status = self._answer, self._parser.get_status_code()
        if answer is not None and not answer.has_head and status >= 200:
            answer.status, answer.has_head = status, True
            answer.wake()

    def on_body(self, body: bytes) -> None:
        """Add a piece of the body to the answer, unless it is discarded."""
        answer = self._answer
        if answer is not None and self._is_wanted and not answer.is_complete:
            answer.add(body)

    def on_message_complete(self) -> None:
        """Complete the answer."""
        answer = self._answer
        if answer is None or answer.is_complete or not answer.has_head:
            return
        self._is_kept = self._is_kept and self._parser.should_keep_alive()
        answer.complete()
        if not self._is_wanted:
            if self._ending is not None:
                self._ending.cancel()
                self._ending = None
            self._rest()


class ConnectionPool:
    """Connections to all servers."""

    def __init__(self, connect_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._idle: dict[Address, list[Connection]] = {}
        self._tls: ssl.SSLContext | None = None
        self.open: set[Connection] = set()
        """Every open connection."""
        self._is_closing = False
        self._all_closed = asyncio.Event()

    async def connect(self, address: Address) -> Connection:
        """Return an idle or new connection; the caller must send a request at once. Raises `ServerFault`."""
        return self._take(address) or await self._connect(address)

    def _take(self, address: Address) -> Connection | None:
        """Return the most recently used idle connection, or None; close connections that were idle for too long."""
        idle = self._idle.get(address)
        if not idle:
            return None
        oldest = asyncio.get_running_loop().time() - _KEPT_S
        while idle and idle[0].idle_since < oldest:
            idle.pop(0).close()
        while idle:
            found = idle.pop()
            if found.is_open:
                return found
        return None

    async def _connect(self, address: Address) -> Connection:
        if address.is_secure and self._tls is None:
            self._tls = ssl.create_default_context()
        connect = asyncio.get_running_loop().create_connection
        made: list[Connection] = []

        def make() -> Connection:
            made.append(Connection(self, address))
            return made[-1]

        try:
            async with asyncio.timeout(self._connect_timeout_s):
                tls = self._tls if address.is_secure else None
                _, connection = await connect(make, address.host, address.port, ssl=tls)
        except BaseException as error:
            for one in made:
                one.close()
            if not isinstance(error, OSError | UnicodeError):  # UnicodeError: invalid host name
                raise
            if isinstance(error, TimeoutError):
                raise ServerFault("it did not answer in time") from None
            is_down = getattr(error, "errno", None) not in _SHORTAGES
            what = "it refuses connections" if is_down else "the router cannot connect to it"
            raise ServerFault(f"{what} ({_why(error)})", is_down=is_down) from None
        return connection

    def put(self, address: Address, connection: Connection) -> None:
        """Store an idle connection for reuse."""
        self._idle.setdefault(address, []).append(connection)

    @property
    def num_idle(self) -> int:
        """Number of idle connections."""
        return sum(map(len, self._idle.values()))

    def forget(self, address: Address, connection: Connection) -> None:
        """Remove a lost connection."""
        self.open.discard(connection)
        idle = self._idle.get(address, [])
        if connection in idle:
            idle.remove(connection)
        if self._is_closing and not self.open:
            self._all_closed.set()

    async def close(self) -> None:
        """Close every connection."""
        for one in list(self.open):
            one.close()
        self._is_closing = True
        if self.open:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._all_closed.wait(), _LAST_BYTES_S)


def _why(error: OSError | UnicodeError) -> str:
    """Return the reason why a server accepts no connection, without its address, because clients see the text."""
    if isinstance(error, UnicodeError | gaierror | ssl.SSLError) or error.errno is None:
        return type(error).__name__
    return os.strerror(error.errno)
