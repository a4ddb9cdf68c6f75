"""Guard that detects policies which read a clock, sleep, or draw unseeded random numbers."""

from __future__ import annotations

import datetime
import os
import random
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")


class ImpureError(Exception):
    """Raised by a forbidden call within `only_pure`."""


@contextmanager
def only_pure(packages: Iterable[str], violations: list[str]) -> Iterator[None]:
    """Make clocks, sleeping and unseeded randomness raise in this thread, and record attempts in `violations`.

    This includes names that modules of `packages` (top-level names) have imported from the modules of clocks and
    randomness.
    """
    owner = threading.get_ident()

    def forbidden(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != owner or (name == "numpy.random.default_rng" and (args or kwargs)):
                return original(*args, **kwargs)
            message = f"calls {name}; time and randomness are arguments (`now`, `PolicyContext.random_stream`)"
            violations.append(message)
            raise ImpureError(message)

        return call

    replaced = {id(original): forbidden(name, original) for name, original in _forbidden_calls()}
    replaced |= {id(original): _without_clock(original, forbidden) for original in (datetime.datetime, datetime.date)}
    undo: list[tuple[ModuleType, str, Any]] = []
    tops = set(packages)
    sources = [time, random, secrets, os, uuid, datetime, np.random]
    users = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in tops]
    try:
        for module in [*sources, *users]:
            for name, value in list(vars(module).items()):
                if id(value) in replaced:
                    undo.append((module, name, value))
                    setattr(module, name, replaced[id(value)])
        yield
    finally:
        for module, name, value in reversed(undo):
            setattr(module, name, value)


def _forbidden_calls() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in _CLOCKS:
        yield f"time.{name}", getattr(time, name)
        yield f"time.{name}_ns", getattr(time, f"{name}_ns")
    yield "time.sleep", time.sleep
    hidden = random._inst  # the generator behind the module's functions
    for name, value in vars(random).items():
        if getattr(value, "__self__", None) is hidden:
            yield f"random.{name}", value
    for name in np.random.__all__:
        if not isinstance(getattr(np.random, name), type):
            yield f"numpy.random.{name}", getattr(np.random, name)
    for name in ("choice", "randbelow", "randbits", "token_bytes", "token_hex"):
        yield f"secrets.{name}", getattr(secrets, name)
    yield from (("os.urandom", os.urandom), ("uuid.uuid1", uuid.uuid1), ("uuid.uuid4", uuid.uuid4))


def _without_clock(
    kind: type[datetime.date], forbidden: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> type:
    names = [name for name in ("now", "utcnow", "today") if hasattr(kind, name)]
    members = {name: staticmethod(forbidden(f"datetime.{kind.__name__}.{name}", getattr(kind, name))) for name in names}
    return type(kind.__name__, (kind,), members)
