"""Read a generation request: its JSON body, within bounds, and its scheduling headers.

FastAPI does not read the bodies, since this would take longer than all other work on a request; so the bodies are added
to its OpenAPI document explicitly.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from vajra_py.serve.api.schema import SchedulingHeaders
from vajra_py.serve.api.schema_facts import TENANT_HEADER, header_field
from vajra_py.serve.http.body_scan import JsonLimits, check_structure
from vajra_py.serve.http.errors import ApiError, bad_request, not_json, of_validation
from vajra_py.serve.http.options import ServeOptions

B = TypeVar("B", bound=BaseModel)
_FIELDS = {name.replace("_", "-"): name for name in SchedulingHeaders.model_fields}
_NOTHING = SchedulingHeaders()


SMALL_BODY = 2**16
"""Largest body, in bytes, that is parsed on the event loop; this takes a few milliseconds for any content."""
_MOST_FIELDS = 256
"""Maximum number of fields in a body, known or unknown."""


class BodyReader:
    """Reads bodies: small ones at once, large ones one after the other in a separate thread, within a memory limit."""

    def __init__(self, options: ServeOptions) -> None:
        self._limits = JsonLimits(options.max_body_values, options.max_body_containers)
        self._most_bytes = options.max_buffered_bytes
        self._retry_after_s = options.retry_after_s
        self._num_bytes = 0
        """Total bytes of large bodies in memory."""
        self._thread = ThreadPoolExecutor(1, "vajra-bodies")

    def close(self) -> None:
        """Stop reading bodies."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def read(self, request: Request, kind: type[B], max_bytes: int | None = None) -> B:
        """Read a body of at most `max_bytes` bytes (None: the server's limit). Raises `ApiError`."""
        return (await self.read_with_bytes(request, kind, max_bytes))[1]

    async def read_with_bytes(
        self, request: Request, kind: type[B], max_bytes: int | None = None
    ) -> tuple[bytearray, B]:
        """Read the body as `read` does; also return its bytes."""
        media_type = request.headers.get("content-type", "")
        if not _is_json(media_type):
            raise not_json(media_type)
        held = 0
        try:
            body = bytearray()
            async for piece in request.stream():
                body += piece
                if max_bytes is not None and len(body) > max_bytes:
                    raise ApiError(413, f"the body is larger than {max_bytes} bytes", code="request_too_large")
                if len(body) > SMALL_BODY:
                    self._num_bytes += len(body) - held
                    held = len(body)
                    self._check_room()
            if not held:
                return body, parsed(body, kind, self._limits if _may_be_deep(body, self._limits) else None)
            loop = asyncio.get_running_loop()
            return body, await loop.run_in_executor(self._thread, parsed, body, kind, self._limits)
        except ClientDisconnect:
            raise bad_request("the body is not complete", code="not_json") from None
        finally:
            self._num_bytes -= held

    def _check_room(self) -> None:
        if self._num_bytes > self._most_bytes:
            message = f"large requests are being read ({self._most_bytes} bytes at once are allowed); try again"
            raise ApiError(429, message, code="too_many_large_requests", retry_after_s=self._retry_after_s)


def parsed(body: bytearray, kind: type[B], limits: JsonLimits | None = None) -> B:
    """Parse a body; with `limits`, its structure is checked first. Raises `ApiError`."""
    if limits is not None:
        check_structure(body, limits)
    try:
        given = from_json(body, allow_inf_nan=False, cache_strings=False)
    except ValueError as error:
        raise bad_request(f"the body is not JSON ({error})", code="not_json") from None
    if not isinstance(given, dict):
        raise bad_request("the body is not a JSON object", code="not_an_object")
    if len(given) > _MOST_FIELDS:
        raise bad_request(f"the body has {len(given)} fields. Allowed: up to {_MOST_FIELDS}", code="too_complex")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise of_validation(error.errors(include_url=False, include_input=False)) from None


def _may_be_deep(body: bytearray, limits: JsonLimits) -> bool:
    """Return True if a small body has enough brackets to be nested too deeply, so that it must be checked."""
    return body.count(b"[") + body.count(b"{") > limits.max_depth


def _is_json(media_type: str) -> bool:
    kind = media_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def read_headers(headers: Headers) -> SchedulingHeaders:
    """Return the values of the scheduling headers; the first value of a repeated header counts. Raises `ApiError`."""
    given: dict[str, str] = {}
    for name, value in headers.items():
        field = _FIELDS.get(name.replace("_", "-"))  # some clients send `session_id` instead of `session-id`
        if field is not None:
            given.setdefault(field, value)
    if not given:
        return _NOTHING
    try:
        return SchedulingHeaders.model_validate(given)
    except ValidationError as error:
        named = [{**one, "loc": (str(one["loc"][0]).replace("_", "-"),)} for one in error.errors()]
        raise of_validation(named) from None


def with_tenant(headers: SchedulingHeaders, tenant: str | None) -> SchedulingHeaders:
    """Return the scheduling headers with the tenant of the request's API key filled in (None: the key has no tenant).

    The tenant of the key overrides the body's `user`. Raises `ApiError` if a header names another tenant.
    """
    if tenant is None:
        return headers
    field = header_field(TENANT_HEADER)
    named = getattr(headers, field)
    if named not in (None, "", tenant):
        raise bad_request("differs from the API key's tenant", TENANT_HEADER, "other_tenant")
    return headers.model_copy(update={field: tenant})


def documented_body(body: type[BaseModel]) -> dict[str, Any]:
    """Return the request body of an OpenAPI operation; its schema is in the document's components."""
    reference = {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}
    return {"requestBody": {"required": True, "content": {"application/json": reference}}}


def documented(body: type[BaseModel]) -> dict[str, Any]:
    """Return the scheduling headers and, as `documented_body` does, the request body of an OpenAPI operation."""
    schemas = SchedulingHeaders.model_json_schema()["properties"]
    parameters = []
    for name, field in _FIELDS.items():
        shown = {key: value for key, value in schemas[field].items() if key != "default"}
        parameters.append({"name": name, "in": "header", "required": False, "schema": shown})
    return {"parameters": parameters, **documented_body(body)}
