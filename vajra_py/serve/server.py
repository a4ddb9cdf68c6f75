"""Life cycle of the server process.

SIGTERM or SIGINT: nothing new is taken (503), what runs may finish within the grace time, the rest is answered 503, then the
process ends. A second signal ends the wait.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
import stat
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, cast

import uvicorn
from uvicorn.server import HANDLED_SIGNALS

from vajra_py.errors import ConfigError, Problem
from vajra_py.serve.access import AccessLog
from vajra_py.serve.app import Service, create_app
from vajra_py.serve.connections import Connections
from vajra_py.serve.options import ServeOptions
from vajra_py.serve.session import SessionState

_log = logging.getLogger(__name__)
_BACKLOG = 2048
_LAST_BYTES_S = 5.0
"""How long connections get, at the very end, to take what was written to them."""


class DrainingServer(uvicorn.Server):
    """uvicorn, except that a signal first lets the session drain."""

    def __init__(self, service: Service) -> None:
        self.connections = Connections(service.options)
        super().__init__(_config(service, self.connections))
        self._service = service
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None
        self.on_listening: Callable[[], None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal has come; called between two bytecodes of the main thread."""
        if self._event_loop is None or self._drain is not None:
            self.should_exit = True
            return
        self._event_loop.call_soon_threadsafe(self.begin_drain)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle signals while the server runs, and ignore them from then on: its end decides how the process ends.

        uvicorn restores the handlers of before and raises again what came: a signal between that and the end of the process
        would then be what ended it.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        for signal_number in HANDLED_SIGNALS:
            signal.signal(signal_number, self.handle_exit)
        try:
            yield
        finally:
            for signal_number in HANDLED_SIGNALS:
                signal.signal(signal_number, signal.SIG_IGN)

    def begin_drain(self) -> None:
        """Stop taking requests, and exit when those that run are done; in the event loop's thread."""
        if self._drain is None:
            self._drain = asyncio.get_running_loop().create_task(self._drained())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn; a task watches over the session from here on."""
        await super().startup(sockets)
        self._event_loop = asyncio.get_running_loop()
        self._watch = self._event_loop.create_task(self._until_engine_ends())
        if self.on_listening is not None:
            self.on_listening()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: close connections that take too long, and end when nothing can be served any more."""
        self.connections.end_late(asyncio.get_running_loop().time())
        if not self._service.options.admin:
            self._service.session.end_if_out_of_service()
        return await super().on_tick(counter)

    async def _until_engine_ends(self) -> None:
        """An engine that fails takes the server with it: whoever runs it starts it again."""
        await self._service.session.ended()
        if self._service.session.state is SessionState.FAILED:
            self.begin_drain()

    async def _drained(self) -> None:
        service, session = self._service, self._service.session
        session.drain()
        _log.info("draining: %d requests are being answered", service.num_exchanges)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + service.options.grace_s
        while service.num_exchanges and loop.time() < deadline and not self.should_exit:
            await asyncio.sleep(0.02)
        await session.close()
        deadline = loop.time() + _LAST_BYTES_S
        while service.num_exchanges and loop.time() < deadline:
            await asyncio.sleep(0.01)
        self.should_exit = True


def _address(bound: socket.socket, options: ServeOptions) -> str:
    """Where clients find the server."""
    if options.uds is not None:
        return f"unix:{options.uds}"
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'http' if options.ssl_certfile is None else 'https'}://{shown}:{port}{options.root_path}"


def _config(service: Service, connections: Connections) -> uvicorn.Config:
    options = service.options
    return uvicorn.Config(
        AccessLog(create_app(service), service.statuses, enabled=options.access_log),
        http=cast(Any, connections.make),  # what uvicorn calls for each connection; it need not be a class
        log_config=None,
        access_log=False,
        proxy_headers=bool(options.forwarded_allow_ips),
        forwarded_allow_ips=list(options.forwarded_allow_ips),
        server_header=False,
        timeout_keep_alive=service.options.idle_timeout_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=int(_LAST_BYTES_S),
        ws="none",
        lifespan="on",
        root_path=options.root_path,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile_password=options.ssl_keyfile_password,
        ssl_ca_certs=None if options.ssl_ca_certs is None else str(options.ssl_ca_certs),
        ssl_cert_reqs=ssl.CERT_NONE if options.ssl_ca_certs is None else ssl.CERT_REQUIRED,
    )


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound, so that the port is known before anything heavy is loaded. Raises `ConfigError`."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = infos[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(Problem("host", f"cannot be listened on ({host!r}: {error})")) from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        message = f"cannot be listened on ({host} port {port}: {error.strerror})"
        raise ConfigError(Problem("port", message, "A free port; 0 takes one")) from None
    bound.listen(_BACKLOG)
    bound.setblocking(False)
    return bound


def bind_unix(path: Path) -> socket.socket:
    """A bound Unix socket; one that nobody listens on any longer is replaced. Raises `ConfigError`."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
                if other.connect_ex(str(path)) != 0:
                    path.unlink()
        bound.bind(str(path))
    except OSError as error:
        bound.close()
        message = f"cannot be listened on ({path}: {error.strerror or error})"
        raise ConfigError(Problem("uds", message, "A path where there is nothing")) from None
    bound.listen(_BACKLOG)
    bound.setblocking(False)
    return bound


def _unlink(path: Path, made: os.stat_result | None) -> None:
    """Remove a Unix socket, unless another server's is there by now."""
    with suppress(OSError):
        found = path.stat()
        if made is not None and (found.st_dev, found.st_ino) == (made.st_dev, made.st_ino):
            path.unlink()


def serve(service: Service, on_listening: Callable[[str], None]) -> None:
    """Listen and answer until a signal comes. Raises what ended the engine, if anything did."""
    options = service.options
    options.check()
    bound = bind(options.host, options.port) if options.uds is None else bind_unix(options.uds)
    made = None if options.uds is None else options.uds.stat()
    server = DrainingServer(service)
    server.on_listening = lambda: on_listening(_address(bound, options))
    try:
        server.run(sockets=[bound])
    finally:
        bound.close()
        if options.uds is not None:
            _unlink(options.uds, made)
    if service.session.error is not None:
        raise service.session.error
