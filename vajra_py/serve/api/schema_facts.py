"""Fields of bodies and headers for the facts of `vajra_py.contract.facts` that clients state, by kind of fact."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, BeforeValidator, Field

from vajra_py.contract.facts import DURATION_LIMITS_S, FACTS, INTEGER_LIMITS, Fact, FactKind

Name: TypeAlias = Annotated[str, Field(strict=True, max_length=256)]
_MAX_NAMES = 64
_PLAIN_NUMBER = re.compile(r"\d+(\.\d*)?([eE][+-]?\d+)?")
_SIGNED_NUMBER = re.compile(rf"[+-]?{_PLAIN_NUMBER.pattern}")


def _written_as(pattern: re.Pattern[str]) -> BeforeValidator:
    """Return a validator for a number written as text in a header; it is stricter than Python's conversion."""

    def check(given: Any) -> Any:
        if isinstance(given, str) and not pattern.fullmatch(given.strip(" ")):
            raise ValueError("is not a number")
        return given

    return BeforeValidator(check)


def null_is(value: Any, kind: Any) -> BeforeValidator:
    """Return a validator for a field of type `kind` that replaces `null` by `value`, the value of an absent field."""
    return BeforeValidator(lambda given: value if given is None else given, json_schema_input_type=kind | None)


def _split(given: Any) -> Any:
    return [part.strip() for part in given.split(",")] if isinstance(given, str) else given


def _flag(given: Any) -> Any:
    """Convert `true`, `false`, `1` and `0` in a header to booleans, and other text to a text that pydantic refuses."""
    written = given.strip().lower() if isinstance(given, str) else given
    return (
        {"true": True, "1": True, "false": False, "0": False}.get(written, "?") if isinstance(written, str) else given
    )


_SHORTEST_MS, _LONGEST_MS = (1000 * seconds for seconds in DURATION_LIMITS_S)
_SMALLEST, _LARGEST = INTEGER_LIMITS
Milliseconds: TypeAlias = Annotated[float, Field(ge=_SHORTEST_MS, le=_LONGEST_MS), _written_as(_PLAIN_NUMBER)]
_IN_BODY: Mapping[FactKind, Any] = {
    FactKind.TEXT: Name,
    FactKind.TEXTS: Annotated[list[Name], Field(fail_fast=True, max_length=_MAX_NAMES)],
    FactKind.INTEGER: Annotated[int, Field(strict=True, ge=_SMALLEST, le=_LARGEST)],
    FactKind.FLAG: Annotated[bool, Field(strict=True)],
    FactKind.NUMBER: Annotated[float, Field(strict=True)],
    FactKind.DURATION: Milliseconds,
}
_IN_HEADERS: Mapping[FactKind, Any] = {
    FactKind.TEXT: Annotated[str, Field(max_length=256)],
    FactKind.TEXTS: Annotated[list[Name], Field(max_length=_MAX_NAMES), BeforeValidator(_split)],
    FactKind.INTEGER: Annotated[int, Field(ge=_SMALLEST, le=_LARGEST), _written_as(_SIGNED_NUMBER)],
    FactKind.FLAG: Annotated[bool, BeforeValidator(_flag)],
    FactKind.NUMBER: Annotated[float, _written_as(_SIGNED_NUMBER)],
    FactKind.DURATION: Milliseconds,
}


def header_field(header: str) -> str:
    """Return the name of the field for a header."""
    return header.replace("-", "_")


_HEADERS_OF: Sequence[tuple[Fact, tuple[str, ...]]] = [(fact, tuple(map(header_field, fact.headers))) for fact in FACTS]
TENANT_HEADER = next(fact.headers[0] for fact in FACTS if fact.name == "tenant")


def body_fields() -> dict[str, Any]:
    """Return the pydantic type and field of every fact in a body, by field name."""
    return {fact.body: _body_field(fact) for fact in FACTS}


def _body_field(fact: Fact) -> tuple[Any, Any]:
    kind = _bounded(fact, _IN_BODY[fact.kind])
    words = f"{fact.meaning}; as `{fact.headers[0]}`." if fact.headers else f"{fact.meaning}."
    if fact.kind in (FactKind.INTEGER, FactKind.FLAG) and not fact.is_optional:
        return Annotated[kind, null_is(fact.default, kind)], Field(fact.default, description=words)
    return kind | None, Field(None, description=words)


def _bounded(fact: Fact, kind: Any) -> Any:
    return kind if fact.least is None else Annotated[kind, Field(ge=fact.least)]


def header_fields() -> dict[str, Any]:
    """Return the pydantic type and default of every header, by field name."""
    return {
        name: (_bounded(fact, _IN_HEADERS[fact.kind]) | None, None) for fact, names in _HEADERS_OF for name in names
    }


def stated_in(headers: BaseModel, body: BaseModel) -> dict[str, Any]:
    """Return the facts that a request states, by name; a header overrides the body's field."""
    stated: dict[str, Any] = {}
    named, in_body = headers.model_fields_set, body.model_fields_set
    for fact, names in _HEADERS_OF:
        if fact.body not in in_body and named.isdisjoint(names):
            continue
        given = [getattr(headers, name) for name in names]
        given.append(getattr(body, fact.body))
        nothing = ("", None) if fact.kind is FactKind.TEXT else (None,)
        value = next((one for one in given if one not in nothing), None)
        if value is not None:
            stated[fact.name] = _value(fact.kind, value)
    return stated


def _value(kind: FactKind, given: Any) -> Any:
    if kind is FactKind.DURATION:
        return given / 1000.0
    return tuple(given) if kind is FactKind.TEXTS else given
