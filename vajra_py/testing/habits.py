"""Detect faults that no single decision shows: references to ended requests, uncalled methods, futile preemptions."""

from __future__ import annotations

import dis
import gc
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from vajra_py.contract import PolicyContext, ProgramView, SharedState
from vajra_py.runtime.requests.programs import Program
from vajra_py.runtime.requests.request import Request

_NOT_ENTERED = (ModuleType, type, CodeType, FrameType, BuiltinFunctionType, str, bytes, int, float, complex)
_ENTERED_OF_THE_FRAMEWORK = (PolicyContext, SharedState)


# Methods that are never called


def uncalled_methods(policy: Any, hooks: frozenset[str]) -> list[str]:
    """Return public methods of a policy that are neither hooks of its layer nor read by a function of its package."""
    package = type(policy).__module__.partition(".")[0]
    own = {
        name
        for kind in type(policy).__mro__
        if kind.__module__.partition(".")[0] == package
        for name, value in vars(kind).items()
        if isinstance(value, FunctionType) and not name.startswith("_")
    }
    candidates = own - hooks
    return sorted(candidates - attributes_read_in(package)) if candidates else []


def attributes_read_in(package: str) -> frozenset[str]:
    """Return the names of all attributes that functions in the loaded modules of a package (or in one module) read.

    Text constants are included, since `getattr` may use them.
    """
    found: set[str] = set()
    for name, module in list(sys.modules.items()):
        if not f"{name}.".startswith(f"{package}.") or not isinstance(module, ModuleType):
            continue
        for code in _codes_of(vars(module), name):
            for instruction in dis.get_instructions(code):
                if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "LOAD_CONST"):
                    found.update([instruction.argval] if isinstance(instruction.argval, str) else ())
    return frozenset(found)


def _codes_of(members: Mapping[str, Any], module: str) -> Iterator[CodeType]:
    """Yield the code objects of the functions and methods in `members` that `module` defines, nested ones included."""
    for value in list(members.values()):
        function = getattr(value, "__func__", value)
        if isinstance(function, FunctionType) and function.__module__ == module:
            yield from _with_inner(function.__code__)
        elif isinstance(value, property) and isinstance(value.fget, FunctionType):
            yield from _with_inner(value.fget.__code__)
        elif isinstance(value, type) and value.__module__ == module:
            yield from _codes_of(vars(value), module)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


# References to ended requests


def kept_requests(policies: Iterable[Any], ended: Iterable[Request]) -> set[str]:
    """Return ids of ended requests that are still reachable from the policies, as objects or by their ids."""
    return _kept(policies, {request.request_id for request in ended})


def kept_programs(policies: Iterable[Any], ended: Iterable[ProgramView]) -> set[str]:
    """Return ids of ended programs that are still reachable from the policies, as objects or by their ids."""
    return _kept(policies, {program.program_id for program in ended})


def _kept(policies: Iterable[Any], ids: set[str]) -> set[str]:
    found: set[str] = set()
    seen: set[int] = set()
    left = list(policies)
    left += [value for policy in policies for value in _on_the_class(type(policy))]
    roots = {id(policy) for policy in policies}
    while left:
        value = left.pop()
        if isinstance(value, Request):
            found.update({value.request_id} & ids)
            continue
        if isinstance(value, Program):
            found.update({value.program_id} & ids)
            continue
        if isinstance(value, str):
            found.update({value} & ids)
            continue
        if id(value) in seen or (id(value) not in roots and not _is_entered(value)):
            continue
        seen.add(id(value))
        left.extend(_within(value))
    return found


def _on_the_class(kind: type) -> Iterator[Any]:
    """Yield the class attributes, without methods, of a policy's class and of its base classes in the same package."""
    package = kind.__module__.partition(".")[0]
    for one in kind.__mro__:
        if one.__module__.partition(".")[0] == package:
            yield from (value for value in vars(one).values() if not isinstance(value, FunctionType))


def _within(value: Any) -> Sequence[Any]:
    if isinstance(value, FunctionType):  # its globals are left out: everything is reachable from them
        return [value.__defaults__, value.__kwdefaults__, value.__closure__]
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, dict):  # `gc.get_referents` leaves out the keys if all are strings
        return [*value.keys(), *value.values()]
    return gc.get_referents(value)


def _is_entered(value: Any) -> bool:
    """Return True if references from a value are followed, because the value may belong to a policy."""
    if isinstance(value, _NOT_ENTERED):
        return False
    is_framework = type(value).__module__.partition(".")[0] == "vajra_py"
    return not is_framework or isinstance(value, _ENTERED_OF_THE_FRAMEWORK)


# Futile preemptions


def futile_preemptions(decisions: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Return (number of preemptions, number of futile ones).

    A preemption is futile if its replica admitted no new request before it resumed the victim.

    Only meaningful for runs with memory to spare, in which no other request needs a victim's blocks.
    """
    away: dict[str, int] = {}
    """For each preempted request, by its id: number of admissions on its replica until it was preempted."""
    admissions: dict[int, int] = {}
    num_preemptions = num_futile = 0
    for row in decisions:
        replica = row["replica_id"]
        for request_id, _ in row["preempted"]:
            away[request_id] = admissions.get(replica, 0)
            num_preemptions += 1
        for request_id, _, _, kind in row["chunks"]:
            if kind == "running":
                continue
            if request_id in away:
                num_futile += admissions.get(replica, 0) == away.pop(request_id)
            else:
                admissions[replica] = admissions.get(replica, 0) + 1
    return num_preemptions, num_futile
