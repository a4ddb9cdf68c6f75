"""Parse facts that clients state in `extra_args` of vLLM (`vllm_xargs` of an HTTP request)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from vajra_py.contract.facts import DURATION_LIMITS_S, FACTS, INTEGER_LIMITS, FactKind
from vajra_py.errors import ConfigError, Problem, did_you_mean

PREFIX = "vajra_"
"""Prefix of the names of arguments for this scheduler."""


def stated_in(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts stated in `extra_args`, by name. Raises `ConfigError` for a wrong name or value."""
    stated: dict[str, Any] = {}
    for name, value in extra.items():
        if not name.startswith(PREFIX):
            continue
        key, where = name.removeprefix(PREFIX), f"extra_args.{name}"
        if key not in _KINDS:
            raise ConfigError(Problem(where, "is not known", did_you_mean(name, [PREFIX + one for one in _KINDS])))
        stated[key] = _READERS[_KINDS[key]](where, value)
        least = _LEAST.get(key)
        if least is not None and stated[key] < least:
            raise ConfigError(Problem(where, f"is too small ({value!r})", f"A whole number >= {least}"))
    return stated


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(Problem(where, f"is not a text ({value!r})"))
    return value


def _texts(where: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise ConfigError(Problem(where, f"is not a list of texts ({value!r})"))
    return tuple(value)


def _integer(where: str, value: Any) -> int:
    number = _finite(value)
    if number is None or number != int(number):
        raise ConfigError(Problem(where, f"is not a whole number ({value!r})"))
    smallest, largest = INTEGER_LIMITS
    if not smallest <= number <= largest:
        raise ConfigError(
            Problem(where, f"is out of range ({value!r})", f"A whole number from {smallest} to {largest}")
        )
    return int(number)


def _flag(where: str, value: Any) -> bool:
    flag = {"true": True, "1": True, "false": False, "0": False}.get(str(value).lower())
    if flag is None:
        raise ConfigError(Problem(where, f"is neither true nor false ({value!r})"))
    return flag


def _number(where: str, value: Any) -> float:
    number = _finite(value)
    if number is None:
        raise ConfigError(Problem(where, f"is not a number ({value!r})"))
    return number


def _seconds(where: str, value: Any) -> float:
    seconds = _finite(value)
    shortest, longest = DURATION_LIMITS_S
    if seconds is None or not shortest <= seconds <= longest:
        allowed = f"Seconds between {shortest:g} and {longest:,}"
        raise ConfigError(Problem(where, f"is not a time ({value!r})", allowed))
    return seconds


def _finite(value: Any) -> float | None:
    """Convert a number or text to a finite number; None if it is not one."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


_READERS: Mapping[FactKind, Callable[[str, Any], Any]] = {
    FactKind.TEXT: _text,
    FactKind.TEXTS: _texts,
    FactKind.INTEGER: _integer,
    FactKind.FLAG: _flag,
    FactKind.NUMBER: _number,
    FactKind.DURATION: _seconds,
}
_LEAST = {fact.name: fact.least for fact in FACTS if fact.least is not None}
_KINDS = {
    fact.name: fact.kind
    for kind in FactKind  # texts first: error messages list the names in this order
    for fact in FACTS
    if fact.kind is kind and fact.has_extra_arg
}
