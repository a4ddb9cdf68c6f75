"""HTTP client of the router: forwards requests of clients to servers, and polls metrics, health and models."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic_core import from_json

from vajra_py.route.config import RouteConfig
from vajra_py.route.connections import Address, Connection, ConnectionPool, ServerAnswer, ServerFault

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]
"""Pairs of header name and value, as received."""
_MOST_METRICS_BYTES = 4 * 2**20
_POLL_S = 2.0
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_KV = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_KNOWN = frozenset((*_RUNNING, *_WAITING, *_KV))
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


@dataclass(frozen=True, slots=True)
class Figures:
    """Load of a server according to its /metrics."""

    num_running: int
    num_waiting: int
    kv_fraction: float


def read_figures(text: str) -> Figures | None:
    """Return the load in a text of Prometheus metrics; None if the text has no number of running requests.

    Figures of several engines are summed, except for the KV usage, which is averaged.
    """
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        found_name = _NAME.match(line)
        if found_name is None or found_name[0] not in _KNOWN:
            continue
        rest = line.rpartition("}")[2] if "}" in line else line[found_name.end() :]
        try:
            value = float(rest.split()[0])
        except (ValueError, IndexError):
            continue
        if 0 <= value < 1e9:
            found.setdefault(found_name[0], []).append(value)
    running = next((found[name] for name in _RUNNING if name in found), None)
    if running is None:
        return None
    waiting = next((found[name] for name in _WAITING if name in found), [0.0])
    usage = next((found[name] for name in _KV if name in found), [0.0])
    return Figures(int(sum(running)), int(sum(waiting)), min(sum(usage) / len(usage), 1.0))


class ServerClient:
    """HTTP client for all servers."""

    def __init__(self, settings: RouteConfig, key: str | None) -> None:
        self._settings = settings
        self._key = None if key is None else b"authorization: Bearer " + key.encode("latin-1")
        self._pool = ConnectionPool(settings.connect_timeout_s)
        self._addresses = {one.url: Address.of(one.url) for one in settings.servers}

    async def close(self) -> None:
        """Close every connection."""
        await self._pool.close()

    async def connect(self, url: str) -> Connection:
        """Return a connection to a server, on which a request must be sent at once. Raises `ServerFault`."""
        return await self._pool.connect(self._addresses[url])

    async def post(self, connection: Connection, path: str, body: bytes, headers: Headers) -> ServerAnswer:
        """Send a request and return its answer, which the caller must read and release.

        Raises `ServerFault`, as does reading the answer.
        """
        lines = [b"content-type: application/json", b"content-length: %d" % len(body)]
        return await self._send(connection, b"POST", path, lines + self._lines(headers), body)

    def _lines(self, headers: Headers) -> list[bytes]:
        """Return a client's headers as lines, without the client's key if the settings have a key for the servers."""
        return [name + b": " + value for name, value in headers if self._key is None or name != b"authorization"]

    async def _send(
        self, connection: Connection, method: bytes, path: str, lines: list[bytes], body: bytes = b""
    ) -> ServerAnswer:
        address = connection.address
        head = [b"%s %s%s HTTP/1.1" % (method, address.path, path.encode()), b"host: " + address.name]
        head += [b"accept-encoding: identity", b"user-agent: vajra-py", *lines]
        if self._key is not None:
            head.append(self._key)
        return await connection.ask(head, body, self._settings.first_token_timeout_s)

    async def read(self, answer: ServerAnswer, most: int) -> bytes:
        """Return the whole body of an answer. Raises `ServerFault`, also if the body exceeds `most` bytes."""
        body = bytearray()
        while piece := await answer.read():
            body += piece
            if len(body) > most:
                raise ServerFault(f"its answer is larger than {most} bytes")
        return bytes(body)

    async def prompt_params(self, connection: Connection, path: str, body: bytes, headers: Headers) -> Any:
        """Make a server compute a prompt; return the `kv_transfer_params` with which another server fetches the
        prompt's KV.

        Raises `ServerFault`.
        """
        answer = await self.post(connection, path, body, headers)
        try:
            text = await self.read(answer, self._settings.max_answer_bytes)
        finally:
            answer.release()
        if answer.status != 200:
            raise ServerFault(f"it answered with status {answer.status}", status=answer.status, body=text)
        try:
            found = from_json(text)
        except ValueError:
            raise ServerFault("its answer is not JSON") from None
        return found.get("kv_transfer_params") if isinstance(found, dict) else None

    async def figures(self, url: str) -> Figures | None:
        """Return a server's load from /metrics; None if the load is not reported.

        Raises `ServerFault` if the server does not answer.
        """
        status, text = await self._get(url, "/metrics")
        return read_figures(text) if status == 200 else None

    async def is_healthy(self, url: str) -> bool:
        """Return whether a server reports itself healthy."""
        try:
            return (await self._get(url, "/health"))[0] == 200
        except ServerFault:
            return False

    async def models(self, url: str, headers: Headers) -> bytes:
        """Return a server's list of models. Raises `ServerFault`, also for any status other than 200."""
        status, text = await self._get(url, "/v1/models", headers)
        if status != 200:
            raise ServerFault(f"it answered with status {status}", status=status, body=text.encode())
        return text.encode()

    async def _get(self, url: str, path: str, headers: Headers = ()) -> tuple[int, str]:
        try:
            async with asyncio.timeout(_POLL_S):
                answer = await self._send(await self.connect(url), b"GET", path, self._lines(headers))
                try:
                    return answer.status, (await self.read(answer, _MOST_METRICS_BYTES)).decode("utf-8", "replace")
                finally:
                    answer.release()
        except TimeoutError:
            raise ServerFault(f"it does not answer within {_POLL_S:g} s") from None
