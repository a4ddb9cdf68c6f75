"""Authentication and body-size middleware.

Pure ASGI, so that nothing stands between an answer's stream and its client.
"""

from __future__ import annotations

import base64
import hmac
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vajra_py.serve.access import route_path
from vajra_py.serve.errors import ApiError
from vajra_py.serve.options import ServeOptions

HEALTH_PATHS = frozenset({"/health", "/ready"})
"""Paths that probes ask for; they need no key unless the server is told otherwise."""
BROWSER_PATHS = frozenset({"/dashboard", "/dashboard/data"})
"""Paths where the key may be a password, which a browser asks its user for."""


def _given_key(header: str, basic: bool) -> bytes:
    scheme, _, value = header.partition(" ")
    if scheme.lower() == "bearer":
        return value.encode("latin-1", "replace")
    if basic and scheme.lower() == "basic":
        with suppress(ValueError):
            return base64.b64decode(value, validate=True).partition(b":")[2]
    return b""


def open_paths(options: ServeOptions) -> frozenset[str]:
    """Paths that need no key."""
    return frozenset({"/metrics"}) if options.guard_health else HEALTH_PATHS | {"/metrics"}


def is_admin_path(path: str) -> bool:
    """Whether a path is for administrators, who may have a key of their own."""
    return path.startswith("/admin/")


class AuthMiddleware:
    """Key and size of every HTTP request."""

    def __init__(self, app: ASGIApp, options: ServeOptions) -> None:
        self._app = app
        self._key = None if options.api_key is None else options.api_key.encode("latin-1")
        own = options.admin_api_key
        self._admin_key = self._key if own is None else own.encode("latin-1")
        self._open_paths = open_paths(options)
        self._max_bytes = options.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer 401 or 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        path = route_path(scope)
        key = self._admin_key if is_admin_path(path) else self._key
        if key is not None and path not in self._open_paths:
            given = _given_key(headers.get("authorization", ""), basic=path in BROWSER_PATHS)
            if not hmac.compare_digest(given, key):
                error = ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
                response = error.response()
                if path in BROWSER_PATHS:
                    response.headers["www-authenticate"] = 'Basic realm="vajra"'
                await response(scope, receive, send)
                return
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_bytes:
            await self._too_large().response()(scope, receive, send)
            return
        await self._counted(scope, receive, send)

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """For bodies that do not say how long they are."""
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(413, self._too_large().message)
            return message

        await self._app(scope, limited, send)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_bytes} bytes", code="request_too_large")
