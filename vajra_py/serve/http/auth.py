"""Middleware for authentication, body size, the Host header, and cross-origin requests of browsers.

This is pure ASGI middleware, so that it does not buffer streams.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vajra_py.serve.http.access import route_path
from vajra_py.serve.http.errors import ApiError, bad_request
from vajra_py.serve.http.options import ServeOptions

HEALTH_PATHS = frozenset({"/health", "/ready"})
"""Paths of health probes; requests to these paths need no key by default."""
BROWSER_PATHS = frozenset({"/dashboard", "/dashboard/data"})
"""Paths that also accept the key as the password of HTTP Basic authentication, for which browsers prompt."""
TENANT = "vajra.tenant"
"""Key in a request's scope for the tenant of its API key; absent or None: the client may name its tenant."""
HAS_KEY = "vajra.has_key"
"""Key in a request's scope for a flag: True if the request has a valid API key, or if the server requires none."""
_HOST = re.compile(r"([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")


def _given_key(header: str, basic: bool) -> bytes:
    scheme, _, value = header.partition(" ")
    if scheme.lower() == "bearer":
        return value.encode("latin-1", "replace")
    if basic and scheme.lower() == "basic":
        with suppress(ValueError):
            return base64.b64decode(value, validate=True).partition(b":")[2]
    return b""


def open_paths(options: ServeOptions) -> frozenset[str]:
    """Return the paths that need no key."""
    health = frozenset[str]() if options.guard_health else HEALTH_PATHS
    return health if options.guard_metrics else health | {"/metrics"}


def is_admin_path(path: str) -> bool:
    """Return True if a path is for administrators, who may have their own key."""
    return path.startswith("/admin/")


class _Keys:
    """API keys and their tenants. Lookup uses hashes, so its time does not depend on the keys."""

    def __init__(self, keys: Mapping[str, str | None]) -> None:
        self._secret = secrets.token_bytes(32)
        self._tenants = {self._digest(key.encode("latin-1")): tenant for key, tenant in keys.items()}

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret).digest()

    def find(self, given: bytes) -> tuple[bool, str | None]:
        """Return True if the key is valid, and its tenant; the tenant is None if the key has none or is invalid."""
        digest = self._digest(given)
        return digest in self._tenants, self._tenants.get(digest)


class AuthMiddleware:
    """Middleware that checks the API key and the body size of every HTTP request."""

    def __init__(self, app: ASGIApp, options: ServeOptions) -> None:
        self._app = app
        self._keys = _Keys(options.read_keys())
        own = options.admin_api_key
        self._admin_key = None if own is None else own.encode("latin-1")
        self._open_paths = open_paths(options)
        self._max_bytes = options.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401 or 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        path = route_path(scope)
        given = _given_key(headers.get("authorization", ""), basic=path in BROWSER_PATHS)
        if is_admin_path(path) and self._admin_key is not None:
            is_let_in = hmac.compare_digest(given, self._admin_key)
        else:
            is_let_in, scope[TENANT] = (True, None) if not self._keys else self._keys.find(given)
        scope[HAS_KEY] = is_let_in
        if not is_let_in and path not in self._open_paths:
            response = ApiError(401, "the API key is missing or wrong", code="invalid_api_key").response()
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
        """Pass the request on; raise an error with status 413 once the received body is longer than allowed.

        The bytes are counted, since a body may have no stated length.
        """
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


class HostMiddleware:
    """Middleware that checks the `Host` header, which HTTP/1.1 requires, against the names allowed for this server.

    `allowed_hosts` protects against DNS rebinding: another site makes its own host name resolve to this server, so that
    its pages can send requests here. Such requests have the other site's name in the `Host` header.
    """

    def __init__(self, app: ASGIApp, options: ServeOptions) -> None:
        self._app = app
        self._allowed = [host.lower() for host in options.allowed_hosts]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 400."""
        error = self._wrong(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error.response()(scope, receive, send)

    def _wrong(self, scope: Scope) -> ApiError | None:
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 and (hosts or scope["http_version"] != "1.0"):
            message = f"the request has {len(hosts) or 'no'} Host headers. Allowed: one"
            return bad_request(message, "host", "invalid_host")
        if not hosts:
            return bad_request("the request has no Host header", "host", "invalid_host") if self._allowed else None
        found = _HOST.fullmatch(hosts[0])
        if found is None:
            return bad_request("the Host header is not a name and a port", "host", "invalid_host")
        name = found[1].lower()
        if not self._allowed or any(_is_called(name, pattern) for pattern in self._allowed):
            return None
        return bad_request("the server is not called so (see --allowed-hosts)", "host", "invalid_host")


def _is_called(name: str, pattern: str) -> bool:
    return name.endswith(pattern[1:]) if pattern.startswith("*.") else name == pattern


class BrowserMiddleware(CORSMiddleware):
    """CORS middleware, which gives pages of other origins access; its refusals have this server's error format."""

    def __init__(self, app: ASGIApp, options: ServeOptions) -> None:
        super().__init__(
            app,
            allow_origins=options.allowed_origins,
            allow_methods=options.allowed_methods,
            allow_headers=options.allowed_headers,
            allow_credentials=options.allow_credentials,
            expose_headers=("x-request-id", "retry-after"),
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """See `CORSMiddleware`."""
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        error = bad_request(bytes(response.body).decode(), code="disallowed_by_cors").response()
        error.headers.update(
            {name: value for name, value in response.headers.items() if name.startswith(("access-", "vary"))}
        )
        return error
