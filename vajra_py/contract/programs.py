"""View of a program for policies: the calls that belong together, as far as they are known now.

A program is what one agent, workflow or task sends: calls that follow one another, run side by side and are joined, with tools that run
in between. Its calls are requests that state its `program_id`.
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
    """No call came for so long (`programs.idle_s` of the settings)."""

    __hash__ = object.__hash__  # members are singletons; hashing the name is ten times slower


class ProgramView(Protocol):
    """Read-only facts about one program. They change when one of its calls arrives or ends, and at no other time.

    Nothing of a program's future is known here but what its client has stated. What a call that runs has computed so far is in the
    request's own view, for policies that listen to requests (`ListensToRequests`) and so hold it. Two views are the same program exactly
    when they are the same object; programs are hashable by identity. A program that has ended does not come back: a later call with
    its id begins another one.
    """

    @property
    def program_id(self) -> str:
        """The name that the client or the workload gave."""

    @property
    def arrived_at(self) -> float:
        """Arrival of its first call, seconds on the run's clock."""

    @property
    def deadline_at(self) -> float | None:
        """Promised end, seconds on the run's clock: the latest `program_slo_s` that a call stated, from `arrived_at`."""

    @property
    def num_calls(self) -> int:
        """Calls that have arrived, those that were refused among them."""

    @property
    def num_alive(self) -> int:
        """Calls that have arrived and not ended."""

    @property
    def num_ended(self) -> int:
        """Calls that have ended, in whatever way."""

    @property
    def num_declared(self) -> int | None:
        """Calls that it makes in all, as its client stated last (`num_program_calls`); None: unknown."""

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of ended calls that were admitted."""

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens of the same calls that the prefix cache spared."""

    @property
    def num_output_tokens(self) -> int:
        """Tokens that ended calls generated."""

    @property
    def service_tokens(self) -> int:
        """Attained service: tokens computed for ended calls, prompts without what the cache spared and outputs."""

    @property
    def run_s(self) -> float:
        """Attained service: seconds from admission to end, summed over ended calls."""

    @property
    def wait_s(self) -> float:
        """Seconds from arrival to admission (or to the end, where there was none), summed over ended calls."""

    @property
    def next_call_at(self) -> float | None:
        """Time at which its next call is expected, seconds on the run's clock: a tool runs until then.

        None while a call is alive, and where the last call to end did not state it (`next_call_after_s`).
        """

    @property
    def last_active_at(self) -> float:
        """Time at which a call of it arrived or ended last, seconds on the run's clock."""

    @property
    def end_reason(self) -> ProgramEnd | None:
        """Reason that it ended; None: it goes on."""

    def siblings(self, request: RequestView) -> Sequence[str]:
        """Ids of the calls that have arrived with the same parents as this one (`parent_calls`), in order, without it.

        Empty for a call that states no parents.
        """
