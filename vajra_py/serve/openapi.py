"""Does the OpenAPI document say what the server does? FastAPI's, less what is not so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from vajra_py.serve.gate import BROWSER_PATHS, OPEN_PATHS


def true_document(app: FastAPI, names: Sequence[str], *, has_key: bool) -> dict[str, Any]:
    """The document: no 422 (wrong input is 400 here), the models' names, and the key where one is asked for."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    document = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        separate_input_output_schemas=app.separate_input_output_schemas,
    )
    schemas = document.get("components", {}).get("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for body in ("CompletionBody", "ChatBody"):
        schemas[body]["properties"]["model"]["enum"] = list(names)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if has_key and path not in OPEN_PATHS:
                basic: list[dict[str, list[str]]] = [{"basic": []}] if path in BROWSER_PATHS else []
                operation["security"] = [{"bearer": []}, *basic]
    if has_key:
        schemes = {name: {"type": "http", "scheme": name} for name in ("bearer", "basic")}
        document["components"]["securitySchemes"] = schemes
    app.openapi_schema = document
    return document
