"""What the conformance suites of all kinds of policies have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vajra_py.errors import DidNotReturn, VajraError
from vajra_py.plugins.watchdog import no_endless_calls
from vajra_py.testing.purity import ImpureError
from vajra_py.testing.scenarios import Outcome, StuckError


@dataclass(frozen=True, slots=True)
class Failure:
    """A check that failed."""

    text: str
    is_endless: bool = False
    """True if a call did not return: every further call would take as long."""


def failure_of(check: Callable[[], object], policy_timeout_s: float) -> Failure | None:
    """Run a check, in which each call may take this long (seconds of real time); None if it passes."""
    try:
        with no_endless_calls(policy_timeout_s):
            check()
    except (AssertionError, VajraError, StuckError, RuntimeError, ImpureError, DidNotReturn) as error:
        return Failure(str(error), _is_from_endless_call(error))
    except Exception as error:  # raised by the policy while it was built
        return Failure(f"{type(error).__name__}: {error}")
    return None


def _is_from_endless_call(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, DidNotReturn):
        error = error.__cause__
    return error is not None


def require(condition: bool, message: str) -> None:
    """Raise `AssertionError` with this message unless the condition holds."""
    if not condition:
        raise AssertionError(message)


def require_built(
    build: Callable[[], object], params: Mapping[str, Any], check_shape: Callable[[object], None], protocol: type
) -> None:
    """Raise `AssertionError` unless a policy can be built, has the right shape and keeps to its Protocol."""
    try:
        policy = build()
    except Exception as error:
        message = f"cannot be built from {dict(params) or 'its default parameters'}"
        raise AssertionError(f"{message}: {type(error).__name__}: {error}") from error
    try:
        check_shape(policy)
    except VajraError as error:
        raise AssertionError(str(error)) from error
    require(isinstance(policy, protocol), f"{policy!r} is not a {protocol.__name__}")


def require_all_end(outcome: Outcome, where: str = "") -> None:
    """Raise `AssertionError` unless every request ended exactly once; `where` ends the message."""
    require(outcome.num_unfinished == 0, f"{outcome.num_unfinished} requests never ended{where}")
    num_ends = len({end[0] for end in outcome.ends})
    is_once = num_ends == len(outcome.ends) == len(outcome.requests)
    require(is_once, f"a request ended twice or not at all{where}")


def packages_of(*parts: object) -> set[str]:
    """Names of the packages that define these functions and classes, this one aside."""
    return {str(getattr(one, "__module__", "")).partition(".")[0] for one in parts} - {"vajra_py"}
