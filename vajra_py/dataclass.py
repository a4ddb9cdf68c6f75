"""`dataclass` of the standard library, with methods that are compiled when they are first used.

The standard decorator writes and compiles six functions for each frozen class as its module is imported: a quarter of the
CPU time of a short run, which calls few of them. Here `__init__`, `__eq__` and `__hash__` are compiled one by one when they
are first looked up, and the others are common to all classes. Fields, slots, `replace` and `asdict` are the standard
library's, and so is all of a class that derives from a dataclass, defines some of these methods, or has other options.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, FrozenInstanceError
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]

if TYPE_CHECKING:  # type checkers know the standard one
    from dataclasses import dataclass
else:

    def dataclass(cls=None, /, **options):
        """Make a class a dataclass; the options are the standard decorator's."""
        return _decorated(cls, **options) if cls is not None else lambda given: _decorated(given, **options)


_OPTIONS = {"eq", "frozen", "kw_only", "slots"}
_METHODS = {"__init__", "__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__", "__getstate__", "__setstate__"}


def _decorated(cls: type, **options: bool) -> type:
    annotations = inspect.get_annotations(cls).values()
    standard: Any = dataclasses.dataclass
    if (
        not options.keys() <= _OPTIONS
        or not _METHODS.isdisjoint(cls.__dict__)
        or dataclasses.is_dataclass(cls)
        or any("InitVar" in str(annotation) for annotation in annotations)
    ):
        made: Any = standard(cls, **options)
        return made  # type: ignore[no-any-return]
    has_eq, is_frozen = options.pop("eq", True), options.pop("frozen", False)
    cls.__doc__ = cls.__doc__ or cls.__name__  # else the standard one writes a signature
    made = standard(cls, init=False, repr=False, eq=False, **options)
    made.__init__ = _Late(made, "__init__", lambda: _init_of(made, is_frozen))
    made.__repr__ = _repr
    if has_eq:
        made.__eq__ = _Late(made, "__eq__", lambda: _eq_of(made))
        made.__hash__ = _Late(made, "__hash__", lambda: _hash_of(made)) if is_frozen else None
    if is_frozen:
        made.__setattr__, made.__delattr__ = _refusals(made)
        if options.get("slots", False):
            made.__getstate__, made.__setstate__ = _state, _restore
    facts = made.__dataclass_params__
    facts.init, facts.repr, facts.eq, facts.frozen = True, True, has_eq, is_frozen
    return made  # type: ignore[no-any-return]


class _Late:
    """Method of a class that is made when it is first looked up, and takes this one's place then."""

    def __init__(self, cls: type, name: str, make: Callable[[], Any]) -> None:
        self._cls = cls
        self._name = name
        self._make = make

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        method = self._make()
        setattr(self._cls, self._name, method)
        return method.__get__(instance, owner)


def _init_of(cls: Any, is_frozen: bool) -> Any:
    names: dict[str, Any] = {"_set": object.__setattr__, "_MISSING": MISSING}
    positional, by_name, lines = ["self"], ["*"], []
    fields = dataclasses.fields(cls)
    for one in fields:
        name, value, default = one.name, one.name, ""
        if one.default_factory is not MISSING:
            names[f"_new_{name}"] = one.default_factory
            value = f"_new_{name}() if {name} is _MISSING else {name}" if one.init else f"_new_{name}()"
            default = "=_MISSING"
        elif one.default is not MISSING:
            names[f"_default_{name}"] = one.default
            value = name if one.init else f"_default_{name}"
            default = f"=_default_{name}"
        elif not one.init:
            continue  # set by the class itself
        if one.init:
            (by_name if one.kw_only else positional).append(name + default)
        lines.append(f"_set(self, {name!r}, {value})" if is_frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    method = _compiled(cls, "__init__", positional + (by_name if len(by_name) > 1 else []), lines or ["pass"], names)
    method.__annotations__ = {**{one.name: one.type for one in fields if one.init}, "return": None}
    return method


def _eq_of(cls: Any) -> Any:
    compared = [one.name for one in dataclasses.fields(cls) if one.compare]
    equal = f"return {_tuple('self', compared)} == {_tuple('other', compared)}"
    lines = ["if other.__class__ is self.__class__:", f"  {equal}", "return NotImplemented"]
    return _compiled(cls, "__eq__", ["self", "other"], lines, {})


def _hash_of(cls: Any) -> Any:
    hashed = [one.name for one in dataclasses.fields(cls) if (one.compare if one.hash is None else one.hash)]
    return _compiled(cls, "__hash__", ["self"], [f"return hash({_tuple('self', hashed)})"], {})


def _tuple(owner: str, names: Sequence[str]) -> str:
    return f"({''.join(f'{owner}.{name}, ' for name in names)})"


def _compiled(cls: type, name: str, parameters: Sequence[str], lines: Sequence[str], names: Mapping[str, Any]) -> Any:
    """Return a function of the class's module; `names` are those of its own."""
    body = "".join(f"    {line}\n" for line in lines)
    text = f"def make({', '.join(names)}):\n  def {name}({', '.join(parameters)}):\n{body}  return {name}"
    made: dict[str, Any] = {}
    exec(text, vars(sys.modules[cls.__module__]), made)
    method = made["make"](**names)
    method.__qualname__ = f"{cls.__qualname__}.{name}"
    return method


@recursive_repr()
def _repr(self: Any) -> str:
    shown = ", ".join(f"{one.name}={getattr(self, one.name)!r}" for one in dataclasses.fields(self) if one.repr)
    return f"{type(self).__qualname__}({shown})"


def _refusals(cls: Any) -> tuple[Callable[[Any, str, Any], None], Callable[[Any, str], None]]:
    """`__setattr__` and `__delattr__` of a frozen class; a subclass may have attributes of its own."""

    def set_attribute(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in cls.__dataclass_fields__:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def delete_attribute(self: Any, name: str) -> None:
        if type(self) is cls or name in cls.__dataclass_fields__:
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return set_attribute, delete_attribute


def _state(self: Any) -> list[Any]:
    return [getattr(self, one.name) for one in dataclasses.fields(self)]


def _restore(self: Any, state: Sequence[Any]) -> None:
    for one, value in zip(dataclasses.fields(self), state, strict=False):
        object.__setattr__(self, one.name, value)
