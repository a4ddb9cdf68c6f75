"""Read generation requests: body and gateway headers.

Read here and not by FastAPI, which takes longer for that than for everything else about a request; its OpenAPI document is
told.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from vajra_py.serve.errors import bad_request, not_json, of_validation
from vajra_py.serve.schema import GenerationBody, SchedulingHeaders

B = TypeVar("B", bound=GenerationBody)
_FIELDS = {name.replace("_", "-"): name for name in SchedulingHeaders.model_fields}
_NOTHING = SchedulingHeaders()


async def read_body(request: Request, kind: type[B]) -> B:
    """The body. Raises `ApiError`."""
    media_type = request.headers.get("content-type", "")
    if not _is_json(media_type):
        raise not_json(media_type)
    try:
        given = json.loads(await request.body())
    except json.JSONDecodeError as error:
        raise bad_request(f"the body is not JSON ({error})", code="not_json") from None
    except (ClientDisconnect, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the body cannot be read ({type(error).__name__})", code="not_json") from None
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise of_validation(error.errors()) from None


def _is_json(media_type: str) -> bool:
    kind = media_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def read_headers(headers: Headers) -> SchedulingHeaders:
    """What they say; of one that is there twice, the first. Raises `ApiError`."""
    given: dict[str, str] = {}
    for name, value in headers.items():
        if name in _FIELDS:
            given.setdefault(_FIELDS[name], value)
    if not given:
        return _NOTHING
    try:
        return SchedulingHeaders.model_validate(given)
    except ValidationError as error:
        named = [{**one, "loc": (str(one["loc"][0]).replace("_", "-"),)} for one in error.errors()]
        raise of_validation(named) from None


def documented(body: type[GenerationBody]) -> dict[str, Any]:
    """Body and headers of an operation of the OpenAPI document, whose components have the body's schema."""
    schemas = SchedulingHeaders.model_json_schema()["properties"]
    parameters = []
    for name, field in _FIELDS.items():
        shown = {key: value for key, value in schemas[field].items() if key != "default"}
        parameters.append({"name": name, "in": "header", "required": False, "schema": shown})
    reference = {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}
    return {"parameters": parameters, "requestBody": {"required": True, "content": {"application/json": reference}}}
