"""Functions that are written out field by field, since a loop over fields takes several times as long.

They are made for millions of requests. Constructors of frozen dataclasses set each field through `object.__setattr__`, which takes twice as
long as its slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

__all__ = ["copier", "maker"]

T = TypeVar("T")


def maker(made: type[T], names: Sequence[str]) -> Callable[..., T]:
    """A constructor of a slotted class without checks or defaults: the values of all its fields, in the order of `names`."""
    lines = [f"def make({', '.join(names)}):", "    made = new(cls)", *(f"    set_{n}(made, {n})" for n in names)]
    setters = {f"set_{name}": getattr(made, name).__set__ for name in names}
    make: Callable[..., T] = _compiled([*lines, "    return made"], {"new": object.__new__, "cls": made} | setters)
    return make


def copier(names: Sequence[str]) -> Callable[[Any, Any], None]:
    """A function that sets these attributes of its second argument to those of its first."""
    lines = ["def make(source, target):", *(f"    target.{name} = source.{name}" for name in names)]
    copy: Callable[[Any, Any], None] = _compiled(lines, {})
    return copy


def _compiled(lines: Sequence[str], known: dict[str, Any]) -> Any:
    """The function `make` of these lines."""
    exec("\n".join(lines), known)
    return known["make"]
