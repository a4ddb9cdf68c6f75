"""Common parts of the conformance suites for all kinds of policies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from vajra_py.contract import AnyPolicySpec
from vajra_py.errors import ConfigError, DidNotReturn, VajraError
from vajra_py.plugins.watchdog import no_endless_calls
from vajra_py.testing.purity import ImpureError, only_pure
from vajra_py.testing.scenarios import Outcome, StuckError

POLICY_TIMEOUT_S = 30.0
"""Time limit of one policy call under test, in seconds of real time."""


def run_checks(
    what: str,
    checks: Mapping[str, Callable[[], object]],
    policy_timeout_s: float = POLICY_TIMEOUT_S,
    needed: Collection[str] = (),
) -> None:
    """Run checks by name; each policy call in them may take up to `policy_timeout_s` seconds of real time.

    Raises `AssertionError` that names the policy (`what`) and, one per line, every failed check with its finding. The
    remaining checks are skipped after a check named in `needed` has failed, and after a policy call did not return in
    time, since further calls might not return either.
    """
    failures = []
    for name, check in checks.items():
        is_endless = False
        try:
            with no_endless_calls(policy_timeout_s):
                check()
            continue
        except (AssertionError, VajraError, StuckError, RuntimeError, ImpureError, DidNotReturn) as error:
            text, is_endless = str(error), _is_from_endless_call(error)
        except Exception as error:  # a policy's constructor may raise anything
            text = f"{type(error).__name__}: {error}"
        failures.append(f"  {name}: {text}")
        if is_endless or name in needed:
            break
    if failures:
        raise AssertionError("\n".join([f"{what} breaks the contract:", *failures]))


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
    """Raise `AssertionError` unless a policy can be built, has the right methods and satisfies its Protocol."""
    message = f"cannot be built from {dict(params) or 'its default parameters'}"
    try:
        policy = build()
    except ConfigError as error:
        raise AssertionError(f"{message}: {error}") from error
    except Exception as error:
        raise AssertionError(f"{message}: {type(error).__name__}: {error}") from error
    try:
        check_shape(policy)
    except VajraError as error:
        raise AssertionError(str(error)) from error
    require(isinstance(policy, protocol), f"{policy!r} is not a {protocol.__name__}")


def require_all_end(outcome: Outcome, where: str = "") -> None:
    """Raise `AssertionError` unless every request ended exactly once; `where` is appended to the message."""
    require(outcome.num_unfinished == 0, f"{outcome.num_unfinished} requests never ended{where}")
    num_ends = len({end[0] for end in outcome.ends})
    is_once = num_ends == len(outcome.ends) == len(outcome.requests)
    require(is_once, f"a request ended twice or not at all{where}")


def packages_of(*parts: object) -> set[str]:
    """Return the names of the packages that define these functions and classes, without `vajra_py`."""
    return {str(getattr(one, "__module__", "")).partition(".")[0] for one in parts} - {"vajra_py"}


def check_situations(
    what: str,
    spec: AnyPolicySpec,
    run: Callable[[Mapping[str, Any]], object],
    situations: Mapping[str, Mapping[str, Any]],
    otherwise: str,
    policy_timeout_s: float,
) -> None:
    """Run a policy twice with the settings of each situation.

    Raises like `run_checks`; if the second run differs, the message contains `otherwise`.
    """
    packages = packages_of(spec.config, spec.build)
    checks = {
        name: partial(_require_same_again, partial(run, settings), packages, otherwise)
        for name, settings in situations.items()
    }
    run_checks(what, checks, policy_timeout_s)


def _require_same_again(run: Callable[[], object], packages: set[str], otherwise: str) -> None:
    """Raise `AssertionError` unless two runs return the same; in the second, clocks and unseeded randomness raise."""
    first = run()
    violations: list[str] = []
    try:
        with only_pure(packages, violations):
            again = run()
    except VajraError:
        if violations:
            raise AssertionError(violations[0]) from None
        raise
    require(first == again, otherwise)
