"""Write ordinary values as YAML, many times faster than the parser's package."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

_WORDS = re.compile(r"[A-Za-z_/][A-Za-z0-9_.,/-]*( [A-Za-z0-9_.,/-]+)*")
"""Texts that need no quotes, apart from the words of YAML itself."""
_NO_TEXTS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


def dump_yaml(data: Any) -> str:
    """Return mappings, lists, texts, numbers and None as YAML in block style, keys in their order."""
    return "".join(f"{line}\n" for line in _lines(data))


def _lines(data: Any) -> Iterator[str]:
    if isinstance(data, Mapping) and data:
        for key, value in data.items():
            first, *others = _lines(value)
            is_block = isinstance(value, Mapping | list | tuple) and len(value) > 0
            indent = "  " if isinstance(value, Mapping) else ""
            yield f"{_scalar(key)}:" if is_block else f"{_scalar(key)}: {first}"
            yield from (f"{indent}{line}" for line in ([first, *others] if is_block else others))
    elif isinstance(data, list | tuple) and data:
        for value in data:
            first, *others = _lines(value)
            yield f"- {first}"
            yield from (f"  {line}" for line in others)
    else:
        yield _scalar(data)


def _scalar(value: Any) -> str:
    if isinstance(value, Mapping | list | tuple):
        return "{}" if isinstance(value, Mapping) else "[]"
    if isinstance(value, str):
        is_plain = _WORDS.fullmatch(value) is not None and value.lower() not in _NO_TEXTS
        return value if is_plain else _quoted(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
        text = repr(value)
        return text if "." in text else text.replace("e", ".0e")  # a number of YAML 1.1 has a point
    if value is None or isinstance(value, bool | int):
        return json.dumps(value)
    raise TypeError(f"{type(value).__name__} is no ordinary value ({value!r})")


def _quoted(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    return (
        quoted
        if quoted.isprintable()
        else "".join(one if one.isprintable() else f"\\U{ord(one):08x}" for one in quoted)
    )
