"""The error tree and the exit codes of the command line.

The tree, with the exit code of the process in brackets:

    VajraError [1]
    ├── ConfigError [2]             the user's input is wrong: lists all problems
    │   └── WorkloadError [2]       a trace or length file is malformed: file and line
    ├── PluginError [2]             an installed package fails to import, clashes with another, or violates the hooks
    ├── UnknownNameError [2]        no installed package offers that name
    ├── PolicyError [3]             a policy broke the contract: policy, request and step
    ├── ExecutorError [4]           a step could not be executed or predicted
    ├── RunError [1]                a run, or its files, cannot be used as requested
    └── RunInterrupted [130]        the user interrupted the run; its files stay readable

A problem is printed on one line as `where: what is wrong (got). what is allowed.` Refusals that occur in normal
operation of a policy are values of the contract, not exceptions.
"""

from __future__ import annotations

import difflib
import dis
import inspect
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ClassVar

__all__ = [
    "POLICY_EXCEPTIONS",
    "ConfigError",
    "DidNotReturn",
    "ExecutorError",
    "PluginError",
    "PolicyError",
    "Problem",
    "RunError",
    "RunInterrupted",
    "UnknownNameError",
    "VajraError",
    "WorkloadError",
    "check_is_own_fault",
    "did_you_mean",
    "place_of_definition",
    "place_of_frame",
]


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem at one place.

    `where` is a place that the user can open (`file.yaml:12 scheduling.replica_scheduler.policy`, `trace.csv:7`, `--set
    seed`); `message` describes what is wrong, with the value in brackets; `allowed` is a full sentence without its
    final full stop, or None if there is no advice.
    """

    where: str
    message: str
    allowed: str | None = None

    def __str__(self) -> str:
        """Return the problem on one line, even if its parts contain line breaks."""
        parts = [f"{self.where}: {self.message.rstrip('.')}."]
        if self.allowed:
            parts.append(f"{self.allowed.rstrip('.')}.")
        return " ".join(" ".join(parts).split())


class VajraError(Exception):
    """Base class of this package's errors; the text is shown to the user without a stack trace."""

    exit_code: ClassVar[int] = 1


class ConfigError(VajraError):
    """Error in the user's input; carries every problem found, in file order."""

    exit_code: ClassVar[int] = 2

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        if not self.problems:
            raise ValueError("a ConfigError needs at least one problem")
        super().__init__(self.problems)

    def __str__(self) -> str:
        """Return one line per problem."""
        return "\n".join(map(str, self.problems))


class WorkloadError(ConfigError):
    """Malformed trace or length file, at a known line (1 is the first line; None means the whole file)."""

    def __init__(self, file: str | Path, line: int | None, message: str, allowed: str | None = None) -> None:
        self.file = Path(file)
        self.line = line
        where = str(file) if line is None else f"{file}:{line}"
        super().__init__(Problem(where, message, allowed))
        self._arguments = (file, line, message, allowed)

    def __reduce__(self) -> tuple[type[WorkloadError], tuple[str | Path, int | None, str, str | None]]:
        """Pickle the error by its own arguments."""
        return (type(self), self._arguments)


class PluginError(VajraError):
    """Installed package that fails to import, clashes with another, or does not implement the hooks as specified.

    `plugin` names the package or entry point, with its version if known.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, plugin: str, message: str) -> None:
        self.plugin = plugin
        self.message = message
        super().__init__(plugin, message)

    def __str__(self) -> str:
        """Return the plug-in and its problem."""
        return f"plug-in {self.plugin}: {self.message}"


class UnknownNameError(VajraError):
    """Name of a given kind (`replica scheduler`, `latency model`, …) that no installed package provides."""

    exit_code: ClassVar[int] = 2

    def __init__(self, kind: str, name: str, choices: Iterable[str]) -> None:
        self.kind = kind
        self.name = name
        self.choices: tuple[str, ...] = tuple(sorted(choices))
        super().__init__(kind, name, self.choices)

    def __str__(self) -> str:
        """Return the unknown name, the nearest installed one, and all installed names."""
        message = f"no installed package offers that name ({self.name!r})"
        return str(Problem(self.kind, message, did_you_mean(self.name, self.choices)))


class DidNotReturn(BaseException):
    """Raised inside a plug-in's call that exceeds its time limit; a plug-in's own `except Exception` does not catch it.

    Callers of policies catch it, like every exception in `POLICY_EXCEPTIONS`, and convert it to `PolicyError`.
    """

    message: ClassVar[str] = "did not return"

    def __str__(self) -> str:
        """Return the message as a predicate, to follow the name of the call."""
        return self.message


POLICY_EXCEPTIONS: tuple[type[BaseException], ...] = (Exception, DidNotReturn, SystemExit, KeyboardInterrupt)
"""Exceptions that can escape from a policy through its own fault, unless a signal raised them: see
`check_is_own_fault`.
"""


def check_is_own_fault(error: BaseException) -> None:
    """Re-raise the exception if it came from a signal and not from the policy, so that the process's main program
    handles it.
    """
    if _is_of_a_signal(error):
        raise error


class PolicyError(VajraError):
    """Violation of the contract by a policy: a non-finite key, more tokens than remain, an unknown request, or an
    exception that escapes from the policy.

    `policy` is the registered name; `replica_id`, `request_id` and `step` locate the violation in the run (None if
    unknown); `time_s` is the time of a violation outside steps, in seconds on the run's clock; `place` is the location
    in the policy's code (`fair.py:41 in key`), None if unknown.
    """

    exit_code: ClassVar[int] = 3

    def __init__(
        self,
        policy: str,
        message: str,
        *,
        request_id: str | int | None = None,
        step: int | None = None,
        place: str | None = None,
    ) -> None:
        self.policy = policy
        self.message = message
        self.replica_id: int | None = None
        self.request_id = request_id
        self.step = step
        self.time_s: float | None = None
        self.place = place
        super().__init__(policy, message)

    @classmethod
    def caused_by(
        cls,
        policy: str,
        error: BaseException,
        *,
        message: str | None = None,
        request_id: str | int | None = None,
        step: int | None = None,
    ) -> PolicyError:
        """Return the error for an exception that escaped from a policy; the caller raises the error `from` that
        exception. `message` replaces the exception's own text.

        Re-raises the exception if it came from a signal (see `check_is_own_fault`).
        """
        check_is_own_fault(error)
        if isinstance(error, DidNotReturn):
            message = str(error)
        elif message is None:
            message = f"{type(error).__name__}: {error}"
        return cls(policy, message, request_id=request_id, step=step, place=_place_in_policy(error.__traceback__))

    def at(self, replica_id: int, step: int) -> PolicyError:
        """Set the replica and step of the error, unless its step is set already; return the error."""
        if self.step is None:
            self.replica_id, self.step = replica_id, step
        return self

    def at_time(self, time_s: float) -> PolicyError:
        """Set the time of the error, unless its step or time is set already; return the error."""
        if self.step is None and self.time_s is None:
            self.time_s = time_s
        return self

    def __str__(self) -> str:
        """Return the policy, the place in the run, the message, and the place in the policy's code."""
        places = [f"policy {self.policy}"]
        if self.replica_id is not None:
            places.append(f"replica {self.replica_id}")
        if self.request_id is not None:
            places.append(f"request {self.request_id}")
        if self.step is not None:
            places.append(f"step {self.step}")
        if self.time_s is not None:
            places.append(f"at {self.time_s:.12g} s")
        code = "" if self.place is None else f" ({self.place})"
        return f"{', '.join(places)}: {self.message}{code}"


def _is_of_a_signal(error: BaseException) -> bool:
    """Return True if a signal handler, and not the policy's own code, raised the exception while a policy was
    running.
    """
    if not isinstance(error, SystemExit | KeyboardInterrupt) or error.__traceback__ is None:
        return False
    handlers = {getattr(signal.getsignal(one), "__code__", None) for one in (signal.SIGINT, signal.SIGTERM)} - {None}
    traceback: TracebackType | None = error.__traceback__
    last = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code in handlers:
            return True
        last, traceback = traceback, traceback.tb_next
    # Python's own handler of SIGINT has no frame: its exception appears at whichever instruction was being executed.
    raises = dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]]
    return isinstance(error, KeyboardInterrupt) and raises not in ("RAISE_VARARGS", "RERAISE")


_FRAMEWORK = "vajra_py"


def _place_in_policy(traceback: TracebackType | None) -> str | None:
    """Return the innermost source location in the policy's own package at which an exception passed; None if unknown.

    The policy's package is the first one outside this framework in the traceback. The innermost frame of all may lie
    in another package that the policy called, such as numpy.
    """
    package: str | None = None
    found: TracebackType | None = None
    while traceback is not None:
        root = str(traceback.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        if package is None and root != _FRAMEWORK:
            package = root
        if package is None or root == package:
            found = traceback
        traceback = traceback.tb_next
    if found is None:
        return None
    code = found.tb_frame.f_code
    return f"{_short_path(code.co_filename)}:{found.tb_lineno} in {code.co_name}"


def place_of_frame(frame: FrameType) -> str:
    """Return the current source location of a call (`fair.py:41 in key`)."""
    return f"{_short_path(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def place_of_definition(method: Callable[..., Any]) -> str | None:
    """Return the source location of a method (`fair.py:38 in key`); None if it is not written in Python."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return None if code is None else f"{_short_path(code.co_filename)}:{code.co_firstlineno} in {code.co_name}"


def _short_path(path: str) -> str:
    """Return a path below the working directory as a relative path, any other unchanged."""
    below = os.path.join(os.getcwd(), "")
    return path.removeprefix(below)


class ExecutorError(VajraError):
    """Step that could not be executed (a worker died, a kernel failed) or whose duration could not be predicted."""

    exit_code: ClassVar[int] = 4


class RunError(VajraError):
    """Run that cannot start, resume or be read as requested: its folder is taken, incomplete, or written by another
    version.
    """


class RunInterrupted(VajraError):
    """Interruption of the run by the user; the tables written so far are complete, and the manifest marks the run as
    interrupted.
    """

    exit_code: ClassVar[int] = 130


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return a text for `Problem.allowed`: the names in `choices` nearest to `name`, and all `choices`.

    >>> did_you_mean("fcsf", ["edf", "fcfs"])
    "Did you mean 'fcfs'? Allowed: edf, fcfs"
    """
    known: Sequence[str] = sorted(choices)
    if not known:
        return "There are none to choose from"
    lowered = {choice.lower().replace("-", "_"): choice for choice in known}
    nearest = difflib.get_close_matches(name.lower().replace("-", "_"), lowered, n=1, cutoff=0.6)
    allowed = f"Allowed: {', '.join(known)}"
    return f"Did you mean {lowered[nearest[0]]!r}? {allowed}" if nearest else allowed
