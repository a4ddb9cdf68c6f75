"""View of a program for policies: a set of related calls, as far as they are known now.

A program is the graph of calls of one agent, workflow or task, with tools that run in between. Its calls are the
requests that state its `program_id`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from vajra_py.contract.requests import RequestView


class ProgramEnd(Enum):
    """Reason that a program ended."""

    LAST_CALL = "last call"
    """A call with `is_last_call` has arrived, and every call has ended."""
    ALL_CALLS = "all calls"
    """The number of ended calls is `num_program_calls`."""
    IDLE = "idle"
    """No call was alive, and none arrived, for `programs.idle_s` seconds (a setting)."""

    __hash__ = object.__hash__  # members are singletons; hashing the name is ten times slower


class ProgramView(Protocol):
    """Read-only facts about one program. They change when one of its calls arrives or ends, and at no other time.

    The only facts about a program's future are those that its client has stated. Progress of running calls is in their
    own views, which policies receive by listening to requests (`ListensToRequests`). Two views are the same program if
    and only if they are the same object; programs are hashable by identity. A program that has ended is never resumed:
    a later call with its id begins another one.
    """

    @property
    def program_id(self) -> str:
        """The name that the client or the workload gave."""

    @property
    def arrived_at(self) -> float:
        """Arrival of its first call, seconds on the run's clock."""

    @property
    def deadline_at(self) -> float | None:
        """Deadline, seconds on the run's clock: `arrived_at` plus the `program_slo_s` stated last by a call."""

    @property
    def num_calls(self) -> int:
        """Number of calls that have arrived, including refused ones."""

    @property
    def num_alive(self) -> int:
        """Number of calls that have arrived and not ended."""

    @property
    def num_ended(self) -> int:
        """Number of calls that have ended, in whatever way."""

    @property
    def num_declared(self) -> int | None:
        """Total number of its calls, as its client stated last (`num_program_calls`); None: unknown."""

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens of ended calls that were admitted."""

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens of ended calls that were prefix hits."""

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens that ended calls generated."""

    @property
    def service_tokens(self) -> int:
        """Attained service: tokens computed for ended calls, which are outputs and prompts without prefix hits."""

    @property
    def run_s(self) -> float:
        """Attained service: seconds from admission to end, summed over ended calls."""

    @property
    def wait_s(self) -> float:
        """Seconds from arrival to admission (or to the end without admission), summed over ended calls."""

    @property
    def next_call_at(self) -> float | None:
        """Time at which its next call is expected, seconds on the run's clock: a tool runs until then.

        None while a call is alive, and if the last call to end did not state `next_call_after_s`.
        """

    @property
    def last_active_at(self) -> float:
        """Time at which a call of it arrived or ended last, seconds on the run's clock."""

    @property
    def end_reason(self) -> ProgramEnd | None:
        """Reason of its end; None while it continues."""

    def siblings(self, request: RequestView) -> Sequence[str]:
        """Return the ids of the other calls that have arrived with the same `parent_calls`, in order of arrival.

        Empty for a call that states no parents.
        """
