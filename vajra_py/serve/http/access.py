"""Request ids, access log, and HEAD requests, for all paths.

This is pure ASGI middleware. It reads only the first message of an answer; the chunks of a stream pass unchanged.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vajra_py.serve.http.logs import FIELDS, cut

_log = logging.getLogger(__name__)
DIRECT_SEND = "vajra.send"
"""Key in a request's scope for the `send` of the protocol, without the wrappers of the middleware."""
ANSWER_ID = "vajra.answer_id"
"""Key in a request's scope where a handler may store the id of its answer for the access log."""
_HEADER = b"x-request-id"
_ALLOWED = re.compile(rb"[\x21-\x7e]{1,128}")
PROBES = frozenset({"/health", "/ready"})
"""Paths of health probes; their answers are not counted in the server's statistics."""
_OFTEN = PROBES | {"/metrics", "/dashboard/data"}
"""Paths that are polled; their successes are logged at debug level."""


class AccessLog:
    """Middleware that logs each request."""

    def __init__(self, app: ASGIApp, statuses: Counter[int], enabled: bool = True) -> None:
        self._app = app
        self._statuses = statuses
        self._enabled = enabled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, add its id to the answer's headers, and log a line when the request has ended."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        request_id = _request_id(scope)
        # HEAD is answered like GET: uvicorn keeps the original scope, whose method is HEAD, and so sends no body.
        inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        inner[DIRECT_SEND] = send
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (_HEADER, request_id)]
            await send(message)

        try:
            await self._app(inner, receive, watched)
        except BaseException:
            status = status or 500
            raise
        finally:
            # Probes are not counted: while a model loads, they are answered with 503, which is no failure.
            if route_path(scope) not in PROBES:
                self._statuses[status] += 1
            if self._enabled:
                self._write(scope, inner.get(ANSWER_ID, ""), status, request_id.decode(), time.perf_counter() - started)

    def _write(self, scope: Scope, answer_id: str, status: int, request_id: str, seconds: float) -> None:
        is_asked_often, path = route_path(scope) in _OFTEN, cut(scope["path"])
        level = logging.DEBUG if status < 400 and is_asked_often else logging.INFO
        if status >= 500 and not is_asked_often:
            level = logging.WARNING
        if not _log.isEnabledFor(level):
            return
        client = scope.get("client")
        address = "-" if client is None else f"{cut(client[0], 64)}:{client[1]}"
        fields = {
            "client": address,
            "method": scope["method"],
            "path": path,
            "status": status,
            "duration_ms": round(1e3 * seconds, 1),
            "request_id": request_id,
            "answer_id": answer_id,
        }
        _log.log(
            level,
            "%s %s %s %d %.1f ms %s %s",
            address,
            scope["method"],
            path,
            status,
            1e3 * seconds,
            request_id,
            answer_id,
            extra={FIELDS: fields},
        )


def _request_id(scope: Scope) -> bytes:
    """Return the client's request id if it is valid in a header and a log line, else a new id."""
    for name, value in scope["headers"]:
        if name == _HEADER and _ALLOWED.fullmatch(value):
            given: bytes = value
            return given
    return uuid4().hex.encode()


def route_path(scope: Scope) -> str:
    """Return the path without the prefix (`root_path`) that a proxy adds."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
