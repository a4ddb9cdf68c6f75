"""HTTP to servers: one exchange at a time, with limits on everything that a server may send."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from pydantic_core import from_json

from vajra_py.route.config import RouteConfig

_MOST_METRICS_BYTES = 4 * 2**20
_POLL_S = 2.0
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_KV = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_KNOWN = frozenset((*_RUNNING, *_WAITING, *_KV))
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


class ServerFault(Exception):
    """A server did not answer as it should.

    Attributes:
        is_down: True if it takes no connections.
        status: its answer's; 0: there was none.
    """

    def __init__(self, message: str, *, is_down: bool = False, status: int = 0, body: bytes = b"") -> None:
        self.is_down = is_down
        self.status = status
        self.body = body
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a server's /metrics say of it."""

    num_running: int
    num_waiting: int
    kv_fraction: float


def read_figures(text: str) -> Figures | None:
    """Return the figures of a Prometheus exposition, those of several engines added (usage: their mean); None if it has none."""
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


def _no_connection(error: aiohttp.ClientConnectorError) -> str:
    """Return why a server takes no connection, without its address: clients read it."""
    number = error.os_error.errno
    return f"it takes no connection ({type(error.os_error).__name__ if number is None else os.strerror(number)})"


class ServerClient:
    """Connections to all servers."""

    def __init__(self, settings: RouteConfig, key: str | None) -> None:
        self._settings = settings
        self._key = key
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=60),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=settings.connect_timeout_s, sock_read=settings.first_token_timeout_s
            ),
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._http.close()

    def headers(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return the headers of a request to a server: those given, and its key."""
        headers = {**given, "content-type": "application/json", "accept-encoding": "identity"}
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        return headers

    @asynccontextmanager
    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request; the body of the answer is for the caller to read. Raises `ServerFault`, in the middle of the answer too."""
        try:
            async with self._http.post(url, data=body, headers=headers, allow_redirects=False) as response:
                yield response
        except aiohttp.ClientConnectorError as error:
            raise ServerFault(_no_connection(error), is_down=True) from None
        except aiohttp.ServerTimeoutError:
            raise ServerFault("it did not answer in time") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ServerFault(f"its connection broke ({type(error).__name__})") from None

    async def read(self, response: aiohttp.ClientResponse, most: int) -> bytes:
        """Return the whole body of an answer. Raises `ServerFault` where it is larger."""
        body = bytearray()
        async for piece in response.content.iter_any():
            body += piece
            if len(body) > most:
                raise ServerFault(f"its answer is larger than {most} bytes")
        return bytes(body)

    async def prompt_params(self, url: str, body: bytes, headers: Mapping[str, str]) -> Any:
        """Let a server compute a prompt; returns the `kv_transfer_params` by which another one gets its KV. Raises `ServerFault`."""
        async with self.post(url, body, headers) as response:
            answer = await self.read(response, self._settings.max_answer_bytes)
            if response.status != 200:
                raise ServerFault(f"it answered {response.status}", status=response.status, body=answer)
        try:
            found = from_json(answer)
        except ValueError:
            raise ServerFault("its answer is not JSON") from None
        return found.get("kv_transfer_params") if isinstance(found, dict) else None

    async def figures(self, url: str) -> Figures | None:
        """Return what a server says of itself; None if it says nothing. Raises `ServerFault` when it does not answer."""
        status, text = await self._get(f"{url}/metrics")
        return read_figures(text) if status == 200 else None

    async def is_healthy(self, url: str) -> bool:
        """Return whether a server says that it is."""
        try:
            return (await self._get(f"{url}/health"))[0] == 200
        except ServerFault:
            return False

    async def models(self, url: str) -> bytes:
        """Return a server's list of models. Raises `ServerFault`."""
        return (await self._get(f"{url}/v1/models"))[1].encode()

    async def _get(self, url: str) -> tuple[int, str]:
        timeout = aiohttp.ClientTimeout(total=_POLL_S)
        try:
            async with self._http.get(url, timeout=timeout, headers=self.headers({}), allow_redirects=False) as answer:
                return answer.status, (await self.read(answer, _MOST_METRICS_BYTES)).decode("utf-8", "replace")
        except aiohttp.ClientConnectorError as error:
            raise ServerFault(_no_connection(error), is_down=True) from None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ServerFault(f"it does not answer ({type(error).__name__})") from None
