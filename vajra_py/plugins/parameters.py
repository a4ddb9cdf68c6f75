"""Parameters of a policy with units and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from pydantic import BaseModel

UNITS: Mapping[str, str] = {
    "_s": "seconds",
    "_ms": "milliseconds",
    "_at": "seconds on the run's clock",
    "_tokens": "tokens",
    "_blocks": "KV blocks",
    "_bytes": "bytes",
    "_fraction": "fraction, 0 to 1",
    "_requests": "requests",
    "_per_s": "per second",
}
"""Unit by suffix of a field's name; the longest matching suffix counts."""


class Parameter(Struct, frozen=True):
    """One parameter of a policy, with texts for listings."""

    name: str
    type: str
    default: Any
    """Default value; None if there is none: see `required`."""
    required: bool
    unit: str
    """Unit; empty if there is none."""
    limits: str
    """Constraints on the value in addition to its type, such as `> 0`; empty if there are none."""
    description: str


def parameters_of(config: type[BaseModel]) -> tuple[Parameter, ...]:
    """Return the parameters of a policy's (or a model's) configuration, in definition order."""
    schema = config.model_json_schema(mode="validation")
    definitions: Mapping[str, Any] = schema.get("$defs", {})
    properties: Mapping[str, Any] = schema.get("properties", {})
    return tuple(
        _parameter(name, properties.get(name, {}), definitions, field.is_required(), config)
        for name, field in config.model_fields.items()
    )


def _parameter(
    name: str, schema: Mapping[str, Any], definitions: Mapping[str, Any], required: bool, config: type[BaseModel]
) -> Parameter:
    field = config.model_fields[name]
    default = None if required else field.get_default(call_default_factory=True, validated_data={})
    return Parameter(
        name=name,
        type=_type_text(schema, definitions),
        default=schema.get("default", default),
        required=required,
        unit=str(schema.get("unit", unit_of(name))),
        limits=_limits(schema),
        description=" ".join((field.description or "").split()),
    )


def unit_of(name: str) -> str:
    """Return the unit that belongs to the suffix of a field's name (`UNITS`); empty if there is none."""
    endings = [ending for ending in UNITS if name.endswith(ending) or name == ending[1:]]
    return UNITS[max(endings, key=len)] if endings else ""


def _type_text(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return _type_text(definitions.get(schema["$ref"].rsplit("/", 1)[-1], {}), definitions)
    if "const" in schema:
        return repr(schema["const"])
    if "enum" in schema:
        return " | ".join(map(repr, schema["enum"]))
    variants = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if variants:
        return " | ".join(dict.fromkeys(_type_text(variant, definitions) for variant in variants))
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"list of {_type_text(schema.get('items', {}), definitions)}"
    return {"integer": "int", "number": "float", "string": "str", "boolean": "bool", "object": "mapping"}.get(
        kind, kind
    )


def _limits(schema: Mapping[str, Any]) -> str:
    symbols = {
        "exclusiveMinimum": ">",
        "minimum": ">=",
        "exclusiveMaximum": "<",
        "maximum": "<=",
        "multipleOf": "multiple of",
    }
    parts: list[str] = []
    for each in [schema, *schema.get("anyOf", [])]:
        parts += [f"{symbol} {each[key]}" for key, symbol in symbols.items() if key in each]
    return ", ".join(dict.fromkeys(parts))
