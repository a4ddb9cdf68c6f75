"""Accept connections.

A socket counts as a connection as soon as it is accepted, before its TLS handshake, which has its own time limit.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

from vajra_py.serve.http.connections import Connection, Connections

_log = logging.getLogger(__name__)
_MOST_AT_ONCE = 64
"""Largest number of sockets accepted in one turn of the event loop."""
_PAUSE_S = 0.5
"""Seconds for which no connection is accepted after the system ran out of resources for sockets."""
_SHUTDOWN_S = 5.0
"""Seconds that a client may take to confirm the end of a TLS connection."""
_PASSING = (errno.ECONNABORTED, errno.EINTR, errno.EPROTO, errno.EPERM)
"""Error numbers that concern one connection only; the next connection may be accepted at once."""


class Listener:
    """Accepts the connections of one socket; implements the part of `asyncio.Server` that uvicorn uses."""

    def __init__(
        self,
        bound: socket.socket,
        connections: Connections,
        make: Callable[[str, str | None], Connection],
        context: ssl.SSLContext | None,
    ) -> None:
        """Start to accept connections.

        `make` returns the protocol of a socket, given the client's address and the reason to refuse the client (None:
        the client is accepted).
        """
        self.sockets = (bound,)
        self._bound = bound
        self._connections = connections
        self._make = make
        self._tls: dict[str, Any] = {}
        if context is not None:
            handshake_s = connections.options.header_timeout_s
            self._tls = {"ssl": context, "ssl_handshake_timeout": handshake_s, "ssl_shutdown_timeout": _SHUTDOWN_S}
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._begin()

    def _begin(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._bound.fileno(), self._accept)

    def close(self) -> None:
        """Stop accepting."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._bound.fileno())
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until no handshake is in progress."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _accept(self) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                accepted, address = self._bound.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _PASSING:
                    continue
                self._connections.note("accept", f"a connection cannot be accepted: {error.strerror or error}")
                self._loop.remove_reader(self._bound.fileno())
                self._loop.call_later(_PAUSE_S, self._begin)
                return
            self._let_in(accepted, address[0] if isinstance(address, tuple) else "")

    def _let_in(self, accepted: socket.socket, host: str) -> None:
        accepted.setblocking(False)
        refusal = self._connections.enter(host)
        if refusal is not None and self._tls:  # no answer, because it would require the TLS handshake
            self._connections.note_refusal(host, 503, refusal)
            self._connections.leave(host)
            accepted.close()
            return
        task = self._loop.create_task(self._connect(accepted, host, refusal))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, accepted: socket.socket, host: str, refusal: str | None) -> None:
        made: list[Connection] = []

        def make() -> Connection:
            made.append(self._make(host, refusal))
            return made[0]

        try:
            await self._loop.connect_accepted_socket(make, accepted, **self._tls)
        except BaseException as error:
            if not made or not made[0].was_made:
                self._connections.leave(host)
                accepted.close()
            if not isinstance(error, OSError | asyncio.CancelledError):
                raise
            if self._tls and not self._is_closed:
                why = str(error) or type(error).__name__
                self._connections.note("handshake", f"a TLS handshake of {host or 'a Unix socket'} failed: {why}")
