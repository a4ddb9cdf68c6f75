"""OpenAI-style error responses.

Invariants:
    - Every answer that is not a success has the body `{"error": {"message", "type", "param", "code"}}`.
    - Errors that an immediate retry cannot resolve have the header `x-should-retry: false`, which the openai client
      reads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from vajra_py.errors import ConfigError
from vajra_py.serve.http.unsupported import NOT_SUPPORTED, Unsupported, WrongField, not_supported, unsupported_path

TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_PREFIXES = ("body", "header", "query", "path")
_FORMS = ("str", "int", "float", "bool")
_NAME = re.compile(r"[A-Za-z0-9_-]+(?<!constrained-str)(?<!constrained-int)")
_MOST_SHOWN = 8


class ApiError(Exception):
    """An error response: status, message, parameter, stable code, and seconds after which to retry."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        """Return the body in OpenAI's format."""
        kind = TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Return the error's own headers, without those that describe the body."""
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        elif self.status not in (429, 503):
            headers["x-should-retry"] = "false"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers

    def response(self) -> JSONResponse:
        """Return the whole response."""
        return JSONResponse(self.body(), self.status, self.headers())


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Return the error for a request that its client can correct."""
    return ApiError(400, message, code=code, param=param)


def not_json(media_type: str) -> ApiError:
    """Return the error for a body that is not JSON."""
    message = f"the body is JSON and needs content-type: application/json (got {media_type or 'none'})"
    return bad_request(message, code="not_json")


def of_config_error(error: ConfigError) -> ApiError:
    """Return the error for a problem that the engine found with a request."""
    first = error.problems[0]
    return bad_request(str(error), first.where.split(".")[-1])


def of_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return one error with status 400 for pydantic's errors. It has the parameter of the first problem and the texts
    of all problems, up to `_MOST_SHOWN`.

    A value that fits none of several forms is one problem; the expectations of the forms are joined by "or".
    """
    for error in errors:
        cause = error.get("ctx", {}).get("error")
        if isinstance(cause, Unsupported):
            param = ".".join(filter(None, (_param(error["loc"]), cause.field)))
            return bad_request(str(cause), param, NOT_SUPPORTED)
    by_param: dict[str, list[str]] = {}
    named: set[str] = set()
    """Parameters whose error text already contains the parameter's name."""
    for error in errors:
        text = str(error["msg"]).removeprefix("Value error, ")
        cause = error.get("ctx", {}).get("error")
        is_named = isinstance(cause, WrongField)
        param = ".".join(filter(None, (_param(error["loc"]), cause.field))) if is_named else _param(error["loc"])
        if is_named:
            named.add(param)
        texts = by_param.setdefault(param, [])
        if text not in texts:
            texts.append(text)
    found = [
        f"{param}: {' or '.join(texts)}" if param and param not in named else " or ".join(texts)
        for param, texts in by_param.items()
    ]
    more = [f"and {len(found) - _MOST_SHOWN} more"] if len(found) > _MOST_SHOWN else []
    return bad_request("; ".join((*found[:_MOST_SHOWN], *more)), next((one for one in by_param if one), None))


def _param(place: Sequence[Any]) -> str:
    """Return the path of a parameter as the client wrote it, without pydantic's names for the members of a union."""
    parts = [str(part) for part in place]
    if parts and parts[0] in _PREFIXES:
        parts = parts[1:]
    kept = [part for part in parts if _NAME.fullmatch(part) and part not in _FORMS]
    return ".".join(kept)


def _no_such_path(path: str) -> ApiError:
    feature = unsupported_path(path)
    if feature is not None:
        return ApiError(404, not_supported(path, feature), code=NOT_SUPPORTED)
    return ApiError(404, f"there is nothing at {path}", code="not_found")


def install(app: FastAPI) -> None:
    """Install handlers that answer all errors of the application in OpenAI's format."""

    async def api_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error.response()

    async def validation_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        kind = request.headers.get("content-type", "")
        if request.method == "POST" and "json" not in kind:
            return not_json(kind).response()
        return of_validation(error.errors()).response()

    async def http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        status = error.status_code
        if status == 404:
            answer = _no_such_path(request.url.path)
        elif status == 405:
            answer = ApiError(405, f"{request.method} is not allowed at {request.url.path}", code="method_not_allowed")
        else:
            code = "request_too_large" if status == 413 else None
            answer = ApiError(status, str(error.detail), code=code)
        response = answer.response()
        response.headers.update(error.headers or {})
        return response

    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        return ApiError(500, "the server failed on this request; see its log", code="internal").response()

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, unexpected)
