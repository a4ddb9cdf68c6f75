"""Turn validation errors into messages for the author of the file.

Converts pydantic's errors into findings: the path in the file, the problem with the given value, and the allowed
values, with the nearest known name for an unknown one. Several errors for one value (one for each member of a union)
are merged into one.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from vajra_py.config.places import Entries, Finding, KeyPath, get, has, locate
from vajra_py.errors import did_you_mean

MAX_SHOWN = 60
LIMITS: Mapping[str, tuple[str, str]] = {
    "greater_than": ("must be greater than", "gt"),
    "greater_than_equal": ("must be at least", "ge"),
    "less_than": ("must be less than", "lt"),
    "less_than_equal": ("must be at most", "le"),
    "multiple_of": ("must be a multiple of", "multiple_of"),
}


def explain(error: ValidationError, annotation: Any, root: Entries, base: KeyPath = ()) -> list[Finding]:
    """Return the findings for `error`, the result of validating the tree's part at `base` against `annotation` (a model
    class or a union of model classes).
    """
    part = get(root, *base)
    grouped: dict[KeyPath, list[Mapping[str, Any]]] = {}
    for each in error.errors(include_url=False):
        if _lacks_wrong_items(each):
            continue
        missing = each["type"] in ("missing", "union_tag_not_found")
        path = _written_path(part, annotation, each["loc"], missing)
        if each["type"] in ("union_tag_not_found", "union_tag_invalid"):
            path = (*path, _discriminator(each))
        grouped.setdefault(path, []).append(each)
    findings = []
    for path, complaints in grouped.items():
        message, allowed = _text(complaints, annotation)
        findings.append(Finding(locate(root, (*base, *path)), (*base, *path), message, allowed))
    return findings


def show(value: Any) -> str:
    """Return a short form of a value, for `(got …)`."""
    if isinstance(value, Mapping):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if value else "an empty list"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


def _lacks_wrong_items(each: Mapping[str, Any]) -> bool:
    """Return True if a list counts as too short only because its wrong items, reported separately, were dropped."""
    value = each["input"]
    return each["type"] == "too_short" and isinstance(value, list | tuple) and len(value) > each["ctx"]["actual_length"]


def _written_path(part: Any, annotation: Any, loc: Sequence[str | int], missing: bool) -> KeyPath:
    """Return the steps of pydantic's location that exist in the file, without names of union members and validators."""
    path: list[str | int] = []
    candidates = _members(annotation)
    for index, step in enumerate(loc):
        candidates, names_member = _descend(candidates, step)
        if names_member:
            continue
        if has(part, step):
            path.append(step)
            part = part[step]
        elif missing and index == len(loc) - 1:
            path.append(step)
    return tuple(path)


def _text(complaints: Sequence[Mapping[str, Any]], annotation: Any) -> tuple[str, str | None]:
    if len(complaints) == 1:
        return _message(complaints[0], annotation)
    parts = [_message(each, annotation) for each in complaints]
    choices = [match for each in complaints for match in _expected(each)]
    message = " or ".join(dict.fromkeys(_without_got(text) for text, _ in parts))
    value = complaints[0]["input"]
    allowed = did_you_mean(value, choices) if isinstance(value, str) and choices else None
    return f"{message} (got {show(value)})", allowed


def _message(each: Mapping[str, Any], annotation: Any) -> tuple[str, str | None]:
    """Return two texts for one error: the problem, and the allowed values (None if they cannot be listed)."""
    kind, value = str(each["type"]), each["input"]
    context: Mapping[str, Any] = each.get("ctx") or {}
    if kind == "missing":
        return "is missing", None
    if kind == "union_tag_not_found":
        return "is missing", None
    if kind == "union_tag_invalid":
        return f"is not known (got {context.get('tag')!r})", did_you_mean(str(context.get("tag")), _expected(each))
    if kind == "extra_forbidden":
        names = allowed_names(annotation, each["loc"][:-1])
        return "unknown key", did_you_mean(str(each["loc"][-1]), names) if names else "No keys are allowed here"
    if kind in LIMITS:
        words, name = LIMITS[kind]
        limit = context[name]
        return f"{words} {int(limit) if limit == int(limit) else limit} (got {show(value)})", None
    if kind in ("literal_error", "enum"):
        choices = _expected(each)
        allowed = did_you_mean(str(value), choices) if choices else f"Allowed: {context.get('expected')}"
        return f"is not known (got {show(value)})", allowed
    if kind in ("value_error", "assertion_error"):
        reason = str(context.get("error", each["msg"]))
        has_value = "(got" in reason or isinstance(value, Mapping | list | tuple | BaseModel) or show(value) in reason
        return (reason if has_value else f"{reason} (got {show(value)})"), None
    if kind in ("model_type", "dict_type", "model_attributes_type", "mapping_type"):
        names = allowed_names(annotation, each["loc"])
        return f"must be a mapping (got {show(value)})", f"Keys: {', '.join(sorted(names))}" if names else None
    return f"{_reworded(str(each['msg']))} (got {show(value)})", None


def _reworded(message: str) -> str:
    message = message.partition(", unable to parse")[0]
    message = re.sub(r"^Input should be a valid (list|tuple).*", "must be a list", message)
    message = re.sub(r"^Input should be a valid dictionary", "must be a mapping", message)
    message = re.sub(r"^Input should be a valid ([aeiou])", r"must be an \1", message)
    message = re.sub(r"^Input should be a valid ", "must be a ", message)
    message = re.sub(r"^Input should ", "must ", message)
    message = re.sub(r"^(String|List|Tuple|Value) should ", "must ", message)
    return message[:1].lower() + message[1:] if message[:2] != message[:2].upper() else message


def _without_got(text: str) -> str:
    return re.sub(r" \(got [^)]*\)$", "", text)


def _expected(each: Mapping[str, Any]) -> list[str]:
    """Return the names that a choice would accept, from the error of its validation."""
    context: Mapping[str, Any] = each.get("ctx") or {}
    text = str(context.get("expected", "")) or str(context.get("expected_tags", ""))
    return re.findall(r"'([^']*)'", text)


def _discriminator(each: Mapping[str, Any]) -> str:
    context: Mapping[str, Any] = each.get("ctx") or {}
    return str(context.get("discriminator", "type")).strip("'")


def allowed_names(annotation: Any, loc: Sequence[str | int]) -> set[str]:
    """Return the keys that a mapping at this location may have, as far as models define them."""
    candidates = _members(annotation)
    for step in loc:
        candidates, _ = _descend(candidates, step)
    return {name for each in candidates if _is_model(each) for name in _fields(each)}


def _descend(candidates: Sequence[Any], step: str | int) -> tuple[list[Any], bool]:
    """Return the types after one step of a location, and True if the step only names a member of a union.

    If several models are possible, pydantic puts the chosen model's name before the field's name.
    """
    models = [each for each in candidates if _is_model(each)]
    members = [each for each in models if step == each.__name__ or (len(models) > 1 and step in _tags(each))]
    if members:
        return members, True
    found: list[Any] = []
    for each in candidates:
        if _is_model(each):
            names = _fields(each)
            if step in names:
                found += _members(names[str(step)])
        elif get_origin(each) in (dict, Mapping):
            found += _members(get_args(each)[1])
        elif get_origin(each) in (list, tuple, Sequence) and isinstance(step, int):
            found += _members(get_args(each)[0])
    return found or list(candidates), False


def _members(annotation: Any) -> list[Any]:
    """Return the member types of a union, with annotations removed and named aliases resolved."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _members(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [member for each in get_args(annotation) for member in _members(each)]
    if hasattr(annotation, "__value__"):
        return _members(annotation.__value__)
    return [annotation]


def _is_model(candidate: Any) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, BaseModel)


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _tags(model: type[BaseModel]) -> set[Any]:
    """Return the tags that identify this member of a tagged union."""
    values = [
        get_args(field.annotation) for field in model.model_fields.values() if get_origin(field.annotation) is Literal
    ]
    return {each[0] for each in values if len(each) == 1}
