"""Build the OpenAPI document: FastAPI's, corrected where the server behaves differently."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from vajra_py.serve.api.schema import ChatBody, CompletionBody
from vajra_py.serve.api.schema_admin import PolicyBody
from vajra_py.serve.api.schema_tokens import DetokenizeBody, TokenizeBody
from vajra_py.serve.http.auth import BROWSER_PATHS

NAMING = (CompletionBody, ChatBody)
"""Types of bodies whose field `model` the document restricts to the served names."""
BODIES = (*NAMING, TokenizeBody, DetokenizeBody, PolicyBody)


def true_document(app: FastAPI, names: Sequence[str], *, open_paths: Collection[str] | None) -> dict[str, Any]:
    """Return the corrected document. It lists the model `names`, and omits status 422, since invalid input gives 400.
    All paths but `open_paths` are marked as requiring an API key; with None, no path is marked.
    """
    if app.openapi_schema is not None:
        return app.openapi_schema
    document = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        separate_input_output_schemas=app.separate_input_output_schemas,
    )
    schemas = document["components"]["schemas"]
    schemas.update(_body_schemas())
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for body in NAMING:
        schemas[body.__name__]["properties"]["model"]["enum"] = list(names)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if open_paths is not None and path not in open_paths:
                basic: list[dict[str, list[str]]] = [{"basic": []}] if path in BROWSER_PATHS else []
                operation["security"] = [{"bearer": []}, *basic]
    if open_paths is not None:
        schemes = {name: {"type": "http", "scheme": name} for name in ("bearer", "basic")}
        document["components"]["securitySchemes"] = schemes
    app.openapi_schema = document
    return document


def _body_schemas() -> dict[str, Any]:
    """Return the schemas of the bodies that FastAPI does not read, and of the parts of these bodies."""
    whole = models_json_schema([(body, "validation") for body in BODIES], ref_template="#/components/schemas/{model}")[
        1
    ]
    schemas: dict[str, Any] = whole["$defs"]
    return schemas
