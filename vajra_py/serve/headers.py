"""What did a gateway say about a request in its headers?

Read here, for every request, since FastAPI takes longer for these few headers than for everything else about a request.
"""

from __future__ import annotations

from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.datastructures import Headers

from vajra_py.serve.schema import SchedulingHeaders

_FIELDS = {name.replace("_", "-"): name for name in SchedulingHeaders.model_fields}
_NOTHING = SchedulingHeaders()


def scheduling_headers(headers: Headers) -> SchedulingHeaders:
    """What they say; of one that is there twice, the first. Raises `RequestValidationError`."""
    given: dict[str, str] = {}
    for header, value in headers.items():
        if header in _FIELDS:
            given.setdefault(_FIELDS[header], value)
    if not given:
        return _NOTHING
    try:
        return SchedulingHeaders.model_validate(given)
    except ValidationError as error:
        found = [{**one, "loc": ("header", str(one["loc"][0]).replace("_", "-"))} for one in error.errors()]
        raise RequestValidationError(found) from None


def documented() -> dict[str, Any]:
    """The same for the OpenAPI document."""
    schemas = SchedulingHeaders.model_json_schema()["properties"]
    parameters = []
    for header, name in _FIELDS.items():
        schema = {key: value for key, value in schemas[name].items() if key != "default"}
        parameters.append({"name": header, "in": "header", "required": False, "schema": schema})
    return {"parameters": parameters}
