"""Who gets in? Key and size are checked before anything of a request is read further.

Pure ASGI, so that nothing stands between an answer's stream and its client.
"""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vajra_py.serve.errors import ApiError
from vajra_py.serve.options import ServeOptions

OPEN_PATHS = frozenset({"/health", "/metrics"})
"""Paths that need no key."""


class Gate:
    """Key and size of every HTTP request."""

    def __init__(self, app: ASGIApp, options: ServeOptions) -> None:
        self._app = app
        self._key = None if options.api_key is None else f"Bearer {options.api_key}".encode("latin-1")
        self._max_bytes = options.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer 401 or 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if self._key is not None and scope["path"] not in OPEN_PATHS:
            given = headers.get("authorization", "").encode("latin-1", "replace")
            if not hmac.compare_digest(given, self._key):
                error = ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
                await error.response()(scope, receive, send)
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
