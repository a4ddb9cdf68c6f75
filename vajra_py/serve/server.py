"""Life cycle of the server process.

On SIGTERM or SIGINT the server stops accepting requests (503). Running requests may finish within the grace time;
requests that do not are answered 503, and the process ends. A second signal ends the grace time. Even if a worker,
driver, policy or log hangs, a thread ends the process `END_S` after the grace time.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import ssl
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import HANDLED_SIGNALS

from vajra_py.errors import ConfigError, Problem
from vajra_py.serve.http.access import AccessLog
from vajra_py.serve.http.connections import Connection, Connections
from vajra_py.serve.http.listener import Listener
from vajra_py.serve.http.options import ServeOptions
from vajra_py.serve.session.session import RECORD_S, STOP_S, SessionState

_log = logging.getLogger(__name__)
_BACKLOG = 2048
_LAST_BYTES_S = 1.0
"""Least number of seconds that connections get at the very end to transmit written data. If more of the grace time is
left, they get up to `_MOST_LAST_BYTES_S`.
"""
_MOST_LAST_BYTES_S = 5.0
END_S = 8.0
"""Seconds for the rest of a shutdown after the grace time or a second signal, before the process is ended forcibly."""
EXIT_STUCK = 5
"""Exit code of a process whose engine or event loop did not stop."""
_LOG_S = 0.5
_GUARD_PAUSE_S = 0.25


class ServedSession(Protocol):
    """Session behind a server: an engine's, or a router's."""

    state: SessionState
    error: BaseException | None
    is_left_behind: bool
    is_stuck: bool

    @property
    def is_writing(self) -> bool:
        """True while a recording is being completed."""

    async def ended(self) -> None:
        """Wait until the session can serve no more requests."""

    def end_if_out_of_service(self) -> None:
        """End the session of an engine with an error if policies took every replicaset out of service; a router's
        session continues.
        """

    def drain(self) -> None:
        """Stop accepting requests."""

    async def close(self, stop_s: float = STOP_S) -> None:
        """End all remaining requests and close the session."""


class Served(Protocol):
    """An application with its session, as run by `serve`."""

    options: ServeOptions
    statuses: Counter[int]

    @property
    def session(self) -> ServedSession:
        """Session that answers the application's requests."""

    @property
    def num_generating(self) -> int:
        """Number of generation requests in progress."""

    @property
    def most_sent_on(self) -> int:
        """Largest number of requests that are at other servers at once; each needs a connection there."""

    def make_app(self) -> ASGIApp:
        """Return the application, which starts and closes the session."""


class DrainingServer(uvicorn.Server):
    """uvicorn server in which a signal first drains the session."""

    def __init__(self, service: Served) -> None:
        self.connections = Connections(service.options, service.most_sent_on)
        super().__init__(_config(service))
        self._service = service
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None
        self.on_listening: Callable[[], None] | None = None
        self.guard: Guard | None = None
        """Ends the process if it does not end by itself; None: no limit."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal; called between two bytecodes of the main thread."""
        is_first = self._event_loop is not None and self._drain is None
        if self.guard is not None:
            self.guard.end_within(self._service.options.grace_s + END_S if is_first else END_S)
        if not is_first:
            self.should_exit = True
            return
        assert self._event_loop is not None
        self._event_loop.call_soon_threadsafe(self.begin_drain)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle signals while the server runs, and ignore them afterwards.

        The exit code thus reflects how the server ended. uvicorn's own method restores the earlier handlers and raises
        the received signals again, so a signal could end the process before it returns this exit code.
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
        """Stop accepting requests, and exit when running ones are done; called in the event loop's thread."""
        if self._drain is None:
            if self.guard is not None:  # limits the time of the drain, even if no signal started it
                self.guard.end_within(self._service.options.grace_s + END_S)
            self._drain = asyncio.get_running_loop().create_task(self._drained())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does, but accept connections with `Listener`; also start a task that watches the session."""
        await super().startup([])
        config, state = self.config, self.server_state
        make = partial(self.connections.make, config, state, self.lifespan.state)
        self.servers = [Listener(one, self.connections, make, config.ssl) for one in sockets or ()]  # type: ignore[misc]
        self._event_loop = asyncio.get_running_loop()
        self._watch = self._event_loop.create_task(self._until_engine_ends())
        if self.on_listening is not None:
            self.on_listening()

    async def on_tick(self, counter: int) -> bool:
        """Close connections that exceed a time limit or were left by their clients, and end the session if every
        replicaset is out of service.

        Called ten times a second. A session whose policies can be swapped does not end.
        """
        self.connections.end_late(asyncio.get_running_loop().time())
        if not self._service.options.admin:
            self._service.session.end_if_out_of_service()
        return await super().on_tick(counter)

    async def _until_engine_ends(self) -> None:
        """Drain and end the server if the engine fails, so that a process supervisor can restart it."""
        await self._service.session.ended()
        if self._service.session.state is SessionState.FAILED:
            self.begin_drain()

    async def _drained(self) -> None:
        service, session = self._service, self._service.session
        session.drain()
        _log.info("draining: %d requests are being answered", service.num_generating)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + service.options.grace_s
        while service.num_generating and loop.time() < deadline and not self.should_exit:
            await asyncio.sleep(0.02)
        left_s = 0.0 if self.should_exit else deadline - loop.time()
        await session.close(0.5 if self.should_exit else STOP_S)
        last_bytes_s = min(max(left_s, _LAST_BYTES_S), _MOST_LAST_BYTES_S)
        self.config.timeout_graceful_shutdown = round(last_bytes_s)
        deadline = loop.time() + last_bytes_s
        while service.num_generating and loop.time() < deadline:
            await asyncio.sleep(0.01)
        self.should_exit = True


class Guard(threading.Thread):
    """Ends the process from a separate thread that never waits for anything that may hang."""

    def __init__(self, is_writing: Callable[[], bool]) -> None:
        """Create the thread.

        `is_writing` returns True while a recording is being completed. As long as it does, the process is ended only
        `RECORD_S` after the deadline that `end_within` sets.
        """
        super().__init__(name="vajra-guard", daemon=True)
        self._is_writing = is_writing
        self._deadline = float("inf")
        self._is_over = False

    def __enter__(self) -> Guard:
        """Start the thread."""
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        """Remove the deadline, since the server has ended."""
        self._is_over = True

    def end_within(self, seconds: float) -> None:
        """End the process after `seconds` unless it has ended by then; an earlier deadline is kept."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def run(self) -> None:
        """Poll until the deadline has passed, then end the process. With polling, the signal handler, which sets the
        deadline, needs no lock.
        """
        while not self._is_over:
            late_s = time.monotonic() - self._deadline
            if late_s > (RECORD_S if self._is_writing() else 0.0):
                end_process(EXIT_STUCK, "the server does not end by itself; its process is ended")
            time.sleep(_GUARD_PAUSE_S)


def end_process(code: int, why: str) -> NoReturn:
    """End the process and its workers at once, without any operation that may hang."""
    for child in multiprocessing.active_children():
        child.kill()
    log = threading.Thread(target=lambda: _log.warning("%s (exit code %d)", why, code), daemon=True)
    log.start()
    log.join(_LOG_S)
    os._exit(code)


def _address(bound: socket.socket, options: ServeOptions) -> str:
    """Return the address under which clients reach the server."""
    if options.uds is not None:
        return f"unix:{options.uds}"
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'http' if options.ssl_certfile is None else 'https'}://{shown}:{port}{options.root_path}"


def _config(service: Served) -> uvicorn.Config:
    """Return the loaded configuration. Raises `ConfigError` if the files for TLS cannot be used."""
    options = service.options
    config = uvicorn.Config(
        AccessLog(service.make_app(), service.statuses, enabled=options.access_log),
        http=cast(Any, Connection),
        log_config=None,
        access_log=False,
        proxy_headers=bool(options.forwarded_allow_ips),
        forwarded_allow_ips=list(options.forwarded_allow_ips),
        server_header=False,
        timeout_keep_alive=service.options.idle_timeout_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=round(_LAST_BYTES_S),
        ws="none",
        lifespan="on",
        root_path=options.root_path,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile_password=options.ssl_keyfile_password,
        ssl_ca_certs=None if options.ssl_ca_certs is None else str(options.ssl_ca_certs),
        ssl_cert_reqs=ssl.CERT_NONE if options.ssl_ca_certs is None else ssl.CERT_REQUIRED,
    )
    try:
        config.load()
    except ssl.SSLError as error:
        message = f"cannot be used with the given key, password and authorities ({error.reason or error})"
        allowed = "Allowed: files in PEM format, the key of the certificate, and the password of the key"
        raise ConfigError(Problem("ssl_certfile", message, allowed)) from None
    return config


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket, so that the port is known before a model is loaded. Raises `ConfigError`."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = infos[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
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
    """Return a bound Unix socket. A socket file on which no process listens is replaced. Raises `ConfigError`."""
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
    """Remove a Unix socket's file, unless another server has replaced it with its own."""
    with suppress(OSError):
        found = path.stat()
        if made is not None and (found.st_dev, found.st_ino) == (made.st_dev, made.st_ino):
            path.unlink()


def serve(service: Served, on_listening: Callable[[str], None]) -> None:
    """Listen and answer until a signal arrives or the engine fails. Raises the error that ended the engine, if any.

    Does not return if something hangs that cannot be stopped: the process is ended instead.
    """
    options = service.options
    options.check()
    server = DrainingServer(service)
    bound = bind(options.host, options.port) if options.uds is None else bind_unix(options.uds)
    made = None if options.uds is None else options.uds.stat()
    session = service.session
    server.on_listening = lambda: on_listening(_address(bound, options))
    with Guard(lambda: session.is_writing) as server.guard:
        try:
            server.run(sockets=[bound])
        finally:
            bound.close()
            if options.uds is not None:
                _unlink(options.uds, made)
            for child in multiprocessing.active_children():  # workers of an abandoned model load may hang
                child.kill()
        error = session.error
        if session.is_left_behind:
            code = EXIT_STUCK if session.is_stuck else getattr(error, "exit_code", 1) if error is not None else 0
            end_process(code, "something of the engine hangs and is left behind")
    if error is not None:
        raise error
