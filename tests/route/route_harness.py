"""Fake model servers on loopback, and a router in front of them, each in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from aiohttp import web

from vajra_py.config import load_system, system_from_mapping
from vajra_py.experiment.runs.replay import ReplayReport
from vajra_py.plugins import load_registry
from vajra_py.route.app import RouteService
from vajra_py.route.replay import replay_route
from vajra_py.route.session import RouteSession
from vajra_py.serve.http.options import ServeOptions
from vajra_py.serve.server import DrainingServer, bind

REGISTRY = load_registry()


class LoopThread:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


def replayed(path: Path) -> ReplayReport:
    """The replay of a recorded session."""
    return replay_route(path, load_system(path / "config.yaml", registry=REGISTRY), REGISTRY)


def words(prompt: str, num_tokens: int) -> list[str]:
    """What every server answers to a prompt, so that it does not matter which one did."""
    return [f"{prompt[-8:]}-{number} " for number in range(num_tokens)]


class FakeServer:
    """An OpenAI server whose answers follow from the prompt; it fails on demand."""

    def __init__(self, thread: LoopThread, port: int = 0) -> None:
        self.thread = thread
        self.bodies: list[dict[str, Any]] = []
        self.status = 200
        self.metrics = ""
        self.hold: Callable[[int], Coroutine[Any, Any, None]] | None = None
        """Awaited before each token, with its number."""
        self.cut_after: int | None = None
        """Tokens after which connections break; None: they do not."""
        self.key: str | None = None
        """Key that the list of models needs; None: none."""
        self.num_running = 0
        self.num_left = 0
        self.kv: dict[str, Any] = {"do_remote_prefill": True, "remote_block_ids": [1, 2]}
        self._runner: web.AppRunner | None = None
        self._listening: socket.socket | None = None
        self.port = port
        thread.run(self._start())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _start(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._tell)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        self._listening = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listening.getsockname()[1]
        await web.SockSite(self._runner, self._listening).start()

    def kill(self) -> None:
        """Break every connection, and take none."""

        def break_all() -> None:
            assert self._runner is not None
            assert self._runner.server is not None
            for connection in self._runner.server.connections:
                if connection.transport is not None:
                    connection.transport.abort()

        async def stop() -> None:
            assert self._runner is not None
            assert self._listening is not None
            break_all()
            self.thread.loop.remove_reader(self._listening)
            for _ in range(
                10
            ):  # a connection that was just accepted comes to be; asyncio loses it once the server is closed
                await asyncio.sleep(0)
            break_all()
            await self._runner.cleanup()
            self._runner = None

        if self._runner is not None:
            self.thread.run(stop())

    def revive(self) -> None:
        self.thread.run(self._start())

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.status)

    async def _tell(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def _models(self, request: web.Request) -> web.Response:
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "no key"}}, status=401)
        return web.json_response({"object": "list", "data": [{"id": "fake"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append({**body, "headers": {name.lower(): value for name, value in request.headers.items()}})
        if self.status != 200:
            return web.json_response({"error": {"message": "broken"}}, status=self.status)
        self.num_running += 1
        try:
            return await self._answer(request, body)
        except asyncio.CancelledError:
            self.num_left += 1
            raise
        finally:
            self.num_running -= 1

    async def _answer(self, request: web.Request, body: Mapping[str, Any]) -> web.StreamResponse:
        said = words(body["prompt"], body.get("max_tokens", 4))
        if not body.get("stream"):
            for number in range(len(said)):
                await self._before(request, number)
            usage = {"completion_tokens": len(said)}
            choices = [{"text": "".join(said), "finish_reason": "length"}]
            extra = {"kv_transfer_params": self.kv} if "kv_transfer_params" in body else {}
            return web.json_response({"choices": choices, "usage": usage, **extra})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number, word in enumerate(said):
            await self._before(request, number)
            reason = "length" if number + 1 == len(said) else None
            piece = {"choices": [{"text": word, "finish_reason": reason}]}
            await response.write(b"data: " + json.dumps(piece).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _before(self, request: web.Request, number: int) -> None:
        if self.hold is not None:
            await self.hold(number)
        if self.cut_after == number:
            assert request.transport is not None
            request.transport.abort()
            await asyncio.sleep(0)
            raise ConnectionResetError


def system(servers: list[Mapping[str, Any]], route: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "version": 1,
        "preset": "vllm-v1",
        "replica": {"memory": {"num_blocks": 4096, "block_size": 16}},
        "backend": {
            "route": {"servers": servers, "health_interval_s": 0.02, "metrics_interval_s": 0.02, **(route or {})}
        },
    }
    if "pools" not in more and "replicasets" not in more:
        settings["num_replicas"] = len(servers)
    return {**settings, **more}


class Router:
    """A router that listens."""

    def __init__(self, settings: Mapping[str, Any], save_run: Path | None, **options: Any) -> None:
        config = system_from_mapping(settings, registry=REGISTRY)
        self.session = RouteSession(config, REGISTRY, save_run)
        self.service = RouteService(self.session, ServeOptions(access_log=False, **options))
        self._server = DrainingServer(self.service)
        self.connections = self._server.connections
        self._bound = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._bound.getsockname()[1]}"
        self.client = httpx.Client(base_url=self.url, timeout=30)
        listening = threading.Event()
        self._server.on_listening = listening.set
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._bound]}, daemon=True)
        self._thread.start()
        assert listening.wait(20)

    def drain(self) -> None:
        loop = self._server._event_loop
        assert loop is not None
        with suppress(RuntimeError):  # the server has ended already
            loop.call_soon_threadsafe(self._server.begin_drain)

    def close(self) -> None:
        self.drain()
        self._thread.join(30)
        self._bound.close()
        self.client.close()
        assert not self._thread.is_alive()


@contextmanager
def routing(
    num_servers: int,
    save_run: Path | None = None,
    places: list[str] | None = None,
    sets: list[str] | None = None,
    **more: Any,
) -> Iterator[tuple[Router, list[FakeServer]]]:
    """A router in front of so many fakes; `places`: their pools; `sets`: their replicasets."""
    thread = LoopThread()
    fakes = [FakeServer(thread) for _ in range(num_servers)]
    servers = [{"url": one.url} for one in fakes]
    if places is not None:
        servers = [{"url": one.url, "pool": pool} for one, pool in zip(fakes, places, strict=True)]
    if sets is not None:
        servers = [{"url": one.url, "replicaset": name} for one, name in zip(fakes, sets, strict=True)]
    options = more.pop("options", {})
    router = Router(system(servers, more.pop("route", None), **more), save_run, **options)
    try:
        yield router, fakes
    finally:
        router.close()
        for one in fakes:
            one.kill()
        thread.close()
