"""View of a program for policies, as far as its calls are known.

A program is the graph of calls of one agent, workflow or task, with tools that run between the calls. Its calls are the
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
    """No call is alive, and at least as many calls have ended as the client stated in `num_program_calls`."""
    IDLE = "idle"
    """No call was alive, and none arrived, for `programs.idle_s` seconds (a setting)."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash, of the name, is several times slower


class ProgramView(Protocol):
    """Read-only facts about one program; all except `end_reason` change only when one of its calls arrives or ends.

    The only facts about a program's future are those that its client has stated. The progress of running calls is in
    their own views, which policies receive by listening to requests (`ListensToRequests`). Two views are the same
    program if and only if they are the same object; programs are hashable by identity. A program that has ended is
    never resumed: a later call with its id begins a new program.
    """

    @property
    def program_id(self) -> str:
        """Name of the program, given by the client or the workload."""

    @property
    def arrived_at(self) -> float:
        """Arrival of the program's first call, seconds on the run's clock."""

    @property
    def deadline_at(self) -> float | None:
        """Deadline in seconds on the run's clock: `arrived_at` plus the latest `program_slo_s` that a call stated.

        None if no call stated one.
        """

    @property
    def num_calls(self) -> int:
        """Number of calls that have arrived, including refused ones."""

    @property
    def num_alive(self) -> int:
        """Number of calls that have arrived and not ended."""

    @property
    def num_ended(self) -> int:
        """Number of calls that have ended, for any reason."""

    @property
    def num_declared(self) -> int | None:
        """Total number of calls, from the latest `num_program_calls` that a call stated; None: unknown."""

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens, summed over the ended calls that were admitted."""

    @property
    def num_cached_tokens(self) -> int:
        """Number of the prompt tokens in `num_prompt_tokens` that were prefix hits."""

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens of the ended calls."""

    @property
    def service_tokens(self) -> int:
        """Attained service in tokens: output tokens of the ended calls plus those of their prompt tokens that were not
        prefix hits.
        """

    @property
    def run_s(self) -> float:
        """Attained service: seconds from admission to end, summed over the ended calls that were admitted."""

    @property
    def wait_s(self) -> float:
        """Seconds from arrival to admission (or to the end without admission), summed over ended calls."""

    @property
    def next_call_at(self) -> float | None:
        """Time at which the next call is expected, seconds on the run's clock; a tool runs until then.

        None while a call is alive, and if the call that ended last did not state `next_call_after_s`.
        """

    @property
    def last_active_at(self) -> float:
        """Latest time at which one of its calls arrived or ended, seconds on the run's clock."""

    @property
    def end_reason(self) -> ProgramEnd | None:
        """Reason of its end; None while it continues."""

    def siblings(self, request: RequestView) -> Sequence[str]:
        """Return the ids of the other calls that have arrived with the same `parent_calls`, in order of arrival.

        Empty for a call that states no parents.
        """
