"""Readers of what a prioritizer returns (keys, lines, groups, times, slack), which check it against the contract.

Every key that a queue uses is checked here: it must be a finite number, or a tuple of finite numbers of constant
length; otherwise a `PolicyError` names the policy and the request.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from math import isfinite
from numbers import Integral, Real
from typing import Any, NoReturn

from vajra_py.contract import (
    CountsKeyChanges,
    FallsWithTime,
    GroupsRequests,
    PredictsSlack,
    RequestPrioritizer,
    RequestView,
    TimeLinearPrioritizer,
)
from vajra_py.errors import POLICY_EXCEPTIONS, PolicyError, place_of_definition

_NUMBER = 0
"""Length recorded for a key that is a number rather than a tuple."""


class KeyReader:
    """Reads keys of one prioritizer for one queue; all keys must have the shape of the first key."""

    __slots__ = ("_key", "_length", "_policy")

    def __init__(self, prioritizer: RequestPrioritizer, name: str | None = None) -> None:
        self._policy = name or type(prioritizer).__name__
        self._key = prioritizer.key
        self._length: int | None = None

    def key(self, request: RequestView, now: float) -> Any:
        """Return the request's key at `now`, checked against the contract."""
        try:
            key = self._key(request, now)
        except PolicyError:
            raise
        except POLICY_EXCEPTIONS as error:
            raise _raised(self._policy, request, "key", error) from error
        if self._length == _NUMBER and ((type(key) is float and isfinite(key)) or type(key) is int):
            return key
        return self._checked(key, request)

    def _checked(self, key: object, request: RequestView) -> Any:
        checked, self._length = _checked_key(key, self._length, "key()", lambda message: self.blame(request, message))
        return checked

    def blame(self, request: RequestView, message: str) -> NoReturn:
        """Raise `PolicyError` because a request's key breaks the contract."""
        place = place_of_definition(self._key)
        raise PolicyError(self._policy, message, request_id=request.request_id, place=place)


class GroupReader:
    """Reads the groups of requests and the keys of groups; all group keys must have the shape of the first one."""

    __slots__ = ("_group", "_key", "_length", "policy")

    def __init__(self, prioritizer: GroupsRequests, name: str | None = None) -> None:
        self.policy = name or type(prioritizer).__name__
        self._group = prioritizer.group
        self._key = prioritizer.group_key
        self._length: int | None = None

    def group(self, request: RequestView) -> str:
        """Return the name of the request's group, checked against the contract."""
        try:
            group = self._group(request)
        except PolicyError:
            raise
        except POLICY_EXCEPTIONS as error:
            raise _raised(self.policy, request, "group", error) from error
        given: object = group  # a plug-in may return anything
        if not isinstance(given, str):
            message = f"group() is no name (got {given!r}). Allowed: a text."
            place = place_of_definition(self._group)
            raise PolicyError(self.policy, message, request_id=request.request_id, place=place)
        return group

    def key(self, group: str) -> Any:
        """Return the group's present key, checked against the contract."""
        try:
            key = self._key(group)
        except PolicyError:
            raise
        except POLICY_EXCEPTIONS as error:
            message = f"group_key({group!r}) raised {type(error).__name__}: {error}"
            raise PolicyError.caused_by(self.policy, error, message=message) from error
        if self._length == _NUMBER and ((type(key) is float and isfinite(key)) or type(key) is int):
            return key
        checked, self._length = _checked_key(key, self._length, f"group_key({group!r})", self.blame)
        return checked

    def blame(self, message: str) -> NoReturn:
        """Raise `PolicyError` because a group's key breaks the contract."""
        raise PolicyError(self.policy, message, place=place_of_definition(self._key))


class LineReader:
    """Reads the straight lines that the keys of one prioritizer follow in time."""

    __slots__ = ("_line", "_policy")

    def __init__(self, prioritizer: TimeLinearPrioritizer, name: str | None = None) -> None:
        self._policy = name or type(prioritizer).__name__
        self._line: Callable[[RequestView], tuple[float, float]] = prioritizer.line

    def line(self, request: RequestView) -> tuple[float, float]:
        """Return (intercept, slope) of the request's key, checked against the contract."""
        try:
            line = self._line(request)
        except PolicyError:
            raise
        except POLICY_EXCEPTIONS as error:
            raise _raised(self._policy, request, "line", error) from error
        if type(line) is tuple and len(line) == 2:
            intercept, slope = line
            if type(intercept) is float and type(slope) is float and isfinite(intercept) and isfinite(slope):
                return line
        return self._checked(line, request)

    def _checked(self, line: object, request: RequestView) -> tuple[float, float]:
        if isinstance(line, tuple) and len(line) == 2:
            intercept, slope = map(finite_number, line)
            if intercept is not None and slope is not None:
                with contextlib.suppress(OverflowError):  # raised by an integer beyond the range of floats
                    return float(intercept), float(slope)
        allowed = "Allowed: (intercept, slope), two finite numbers."
        self._blame(request, f"line() is not a line (got {line!r}). {allowed}")

    def reject(self, request: RequestView, key: float, now: float) -> NoReturn:
        """Raise `PolicyError` because the line has left the range of floating-point numbers."""
        message = f"its key is not finite at {now!r} s (got {key!r}). Allowed: a line that stays finite while the request waits."
        self._blame(request, message)

    def _blame(self, request: RequestView, message: str) -> NoReturn:
        place = place_of_definition(self._line)
        raise PolicyError(self._policy, message, request_id=request.request_id, place=place)


class FallReader:
    """Reads the times at which keys of one prioritizer may fall because time passes."""

    __slots__ = ("_at", "policy")

    def __init__(self, prioritizer: FallsWithTime, name: str | None = None) -> None:
        self.policy = name or type(prioritizer).__name__
        self._at = prioritizer.falls_at

    def falls_at(self, request: RequestView, now: float) -> float | None:
        """Return the time at which the key may fall next, in seconds on the run's clock, checked against the contract;
        None: never.
        """
        try:
            given = self._at(request, now)
        except PolicyError:
            raise
        except POLICY_EXCEPTIONS as error:
            raise _raised(self.policy, request, "falls_at", error) from error
        if given is None or (type(given) is float and isfinite(given)):
            return given
        number = finite_number(given)
        if number is None:
            message = (
                f"falls_at() is not a finite number (got {given!r}). Allowed: seconds on the run's clock, or None."
            )
            place = place_of_definition(self._at)
            raise PolicyError(self.policy, message, request_id=request.request_id, place=place)
        return float(number)


class EpochReader:
    """Reads a prioritizer's count of changes of its keys."""

    __slots__ = ("_epoch", "policy")

    def __init__(self, prioritizer: CountsKeyChanges, name: str | None = None) -> None:
        self.policy = name or type(prioritizer).__name__
        self._epoch = prioritizer.key_epoch

    def epoch(self) -> int:
        """Return the present count of changes, checked against the contract."""
        try:
            epoch = self._epoch()
        except POLICY_EXCEPTIONS as error:
            message = f"key_epoch() raised {type(error).__name__}: {error}"
            raise PolicyError.caused_by(self.policy, error, message=message) from error
        if type(epoch) is not int:
            message = f"key_epoch() is not a whole number (got {epoch!r})"
            raise PolicyError(self.policy, message, place=place_of_definition(self._epoch))
        return epoch


class SlackReader:
    """Reads the slack that a prioritizer predicts, and checks it."""

    __slots__ = ("_fraction", "_policy", "_seconds")

    def __init__(self, prioritizer: PredictsSlack, name: str | None = None) -> None:
        self._policy = name or type(prioritizer).__name__
        self._seconds = prioritizer.slack_s
        self._fraction = prioritizer.slack_fraction

    def slack_s(self, request: RequestView, now: float) -> float:
        """Return the slack at `now` in seconds."""
        return self._read(self._seconds, "slack_s", request, now)

    def slack_fraction(self, request: RequestView, now: float) -> float:
        """Return the slack at `now` as a fraction of the time from arrival to deadline."""
        return self._read(self._fraction, "slack_fraction", request, now)

    def _read(
        self, method: Callable[[RequestView, float], float], called: str, request: RequestView, now: float
    ) -> float:
        try:
            given = method(request, now)
        except PolicyError:
            raise
        except POLICY_EXCEPTIONS as error:
            raise _raised(self._policy, request, called, error) from error
        number = finite_number(given)
        if number is None:
            message = f"{called}() is not a finite number (got {given!r})"
            place = place_of_definition(method)
            raise PolicyError(self._policy, message, request_id=request.request_id, place=place)
        return float(number)


def _checked_key(key: object, length: int | None, called: str, blame: Callable[[str], NoReturn]) -> tuple[Any, int]:
    """Return the key as Python numbers, and its length. Calls `blame` with a message if the key is invalid or its
    length is not `length` (None: any).
    """
    parts = [finite_number(part) for part in (key if isinstance(key, tuple) else (key,))]
    if not parts or None in parts:
        allowed = "Allowed: a finite number, or a tuple of finite numbers."
        blame(f"{called} is not finite numbers (got {key!r}). {allowed}")
    found = len(parts) if isinstance(key, tuple) else _NUMBER
    if length is not None and length != found:
        allowed = f"Allowed: {_shape(length)}, as its first key here."
        blame(f"{called} changed its shape (got {_shape(found)}: {key!r}). {allowed}")
    return (parts[0] if found == _NUMBER else tuple(parts)), found


def finite_number(part: object) -> float | int | None:
    """Convert a number that a policy returned, alone or in a tuple, to a Python number, since NumPy numbers compare
    slowly and overflow; return None if it is not a finite number.
    """
    if type(part) is not float:
        if isinstance(part, Integral):
            return int(part)
        if not isinstance(part, Real):
            return None
        try:
            part = float(part)
        except OverflowError:
            return None
    return part if isfinite(part) else None


def _shape(length: int) -> str:
    return "a number" if length == _NUMBER else f"a tuple of length {length}"


def _raised(policy: str, request: RequestView, method: str, error: BaseException) -> PolicyError:
    message = f"{method}() raised {type(error).__name__}: {error}"
    return PolicyError.caused_by(policy, error, message=message, request_id=request.request_id)
