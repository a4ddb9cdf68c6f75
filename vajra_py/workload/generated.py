"""Functions that are written out field by field, since a loop over fields takes several times as long.

They are made for millions of requests. Constructors of frozen dataclasses set each field through `object.__setattr__`, which takes many
times as long as an assignment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

__all__ = ["copier", "maker"]

T = TypeVar("T")


def maker(made: type[T], names: Sequence[str]) -> Callable[..., T]:
    """A constructor of a slotted class without checks or defaults: the values of all its fields, in the order of `names`.

    A frozen class takes no assignments, so its fields are assigned to an object of a class alike, whose class is then changed.
    """
    alike = type(
        made.__name__,
        made.__bases__,
        {
            "__slots__": made.__dict__["__slots__"],
            "__setattr__": object.__setattr__,
            "__delattr__": object.__delattr__,
        },
    )
    lines = [f"def make({', '.join(names)}):", "    made = new(alike)", *(f"    made.{n} = {n}" for n in names)]
    known = {"new": object.__new__, "alike": alike, "cls": made}
    make: Callable[..., T] = _compiled([*lines, "    made.__class__ = cls", "    return made"], known)
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
