"""Programs of a run, with their calls (each is a request), the costs of the calls, and the ends of programs.

A program changes when one of its calls arrives or ends. When none of its calls is alive, it ends if its client has
declared that no further call comes, or else after an idle time. Ends are events of the driver, which notifies observers
and policies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from vajra_py.contract.observer import EndReason
from vajra_py.contract.programs import ProgramEnd
from vajra_py.contract.requests import RequestView
from vajra_py.runtime.requests.request import Request, RequestFacts

_WITH_RESULT = (EndReason.STOP, EndReason.LENGTH)


class Program:
    """State of one program; policies see it as `vajra_py.contract.ProgramView`."""

    __slots__ = (
        "_arrived",
        "_has_last",
        "_slo_s",
        "activity",
        "arrived_at",
        "end_reason",
        "failed",
        "last_active_at",
        "next_call_at",
        "num_alive",
        "num_cached_tokens",
        "num_calls",
        "num_declared",
        "num_ended",
        "num_output_tokens",
        "num_prompt_tokens",
        "program_id",
        "replicasets",
        "run_s",
        "wait_s",
    )

    def __init__(self, program_id: str, arrived_at: float) -> None:
        self.program_id = program_id
        self.arrived_at = arrived_at
        self.last_active_at = arrived_at
        self.next_call_at: float | None = None
        self.end_reason: ProgramEnd | None = None
        self.num_calls = 0
        self.num_alive = 0
        self.num_ended = 0
        self.num_declared: int | None = None
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.run_s = 0.0
        self.wait_s = 0.0
        self.activity = 0
        """Number of arrivals plus number of ends of calls so far; a scheduled end of the program is ignored if this
        number has changed since the end was scheduled.
        """
        self.failed: dict[str, EndReason] = {}
        """Calls that ended without a result, by id."""
        self.replicasets: dict[str, None] = {}
        """Replicasets of the calls, each once, in order of first use."""
        self._slo_s: float | None = None
        self._has_last = False
        self._arrived: dict[tuple[str, ...], list[str]] = {}

    def __repr__(self) -> str:
        return f"Program({self.program_id!r}, {self.num_ended} of {self.num_calls} calls ended)"

    @property
    def deadline_at(self) -> float | None:
        """Deadline in seconds on the run's clock; None without one."""
        return None if self._slo_s is None else self.arrived_at + self._slo_s

    @property
    def service_tokens(self) -> int:
        """Number of tokens computed for ended calls: prompt tokens that were not prefix hits, plus output tokens."""
        return self.num_prompt_tokens - self.num_cached_tokens + self.num_output_tokens

    def siblings(self, request: RequestView) -> Sequence[str]:
        """Return the ids of the program's other calls that have arrived and have the same parents as `request`; empty
        for a call without parents.
        """
        same = self._arrived.get(request.parent_calls, ())
        return tuple(one for one in same if one != request.request_id)

    @property
    def due_end(self) -> ProgramEnd | None:
        """Reason for which the program ends now, according to its client's declarations; None if it continues."""
        if self.num_alive:
            return None
        if self._has_last:
            return ProgramEnd.LAST_CALL
        return ProgramEnd.ALL_CALLS if self.num_declared is not None and self.num_ended >= self.num_declared else None

    def add(self, request: Request) -> None:
        """Add a call that has arrived."""
        self.activity += 1
        self.num_calls += 1
        self.num_alive += 1
        self.last_active_at = request.arrived_at
        self.next_call_at = None
        self.replicasets.setdefault(request.replicaset)
        self._has_last = self._has_last or request.is_last_call
        if request.num_program_calls is not None:
            self.num_declared = request.num_program_calls
        if request.program_slo_s is not None:
            self._slo_s = request.program_slo_s
        if request.parent_calls:
            self._arrived.setdefault(request.parent_calls, []).append(request.request_id)
        if self.failed:
            self.failed.pop(request.request_id, None)  # a failed call that is sent again no longer counts as failed

    def end_call(self, request: Request, reason: EndReason, now: float) -> None:
        """Count a call that has ended."""
        self.activity += 1
        self.num_alive -= 1
        self.num_ended += 1
        self.last_active_at = now
        after_s = request.next_call_after_s
        self.next_call_at = None if self.num_alive or after_s is None else now + after_s
        if reason not in _WITH_RESULT:
            self.failed[request.request_id] = reason
        admitted_at = request.admitted_at
        if admitted_at is None:
            self.wait_s += now - request.arrived_at
            return
        self.wait_s += admitted_at - request.arrived_at
        self.run_s += now - admitted_at
        self.num_prompt_tokens += request.num_prompt_tokens
        self.num_cached_tokens += request.num_cached_tokens
        self.num_output_tokens += request.num_output_tokens


class Programs:
    """The programs of a run that have not ended, by id."""

    def __init__(self, idle_s: float | None = None) -> None:
        """Create an empty collection. `idle_s`: number of seconds after which a program ends if none of its calls is
        alive; None: a program ends only by its client's declarations.
        """
        self.idle_s = idle_s
        self.on_pause: Callable[[Program], None] | None = None
        """Callback of the driver, called with a program when the last of its alive calls has ended."""
        self._open: dict[str, Program] = {}

    def __len__(self) -> int:
        """Return the number of programs that have not ended."""
        return len(self._open)

    def __iter__(self) -> Iterator[Program]:
        return iter(self._open.values())

    def find(self, program_id: str) -> Program | None:
        """Return the program with this id that has not ended; None if there is none."""
        return self._open.get(program_id)

    def join(self, request: Request) -> None:
        """Add an arrived request, as a call, to the program that its client named."""
        program = self._open.get(request.program_id)
        if program is None:
            program = self._open[request.program_id] = Program(request.program_id, request.arrived_at)
        request.program = program
        program.add(request)

    def why_never(self, facts: RequestFacts) -> str | None:
        """Return the reason why a call can never be served: another call, whose result it needs, has ended without one.
        Returns None if the call can be served.
        """
        program = self._open.get(facts.program_id)
        if program is None or not program.failed:
            return None
        for parent in facts.parent_calls:
            reason = program.failed.get(parent)
            if reason is not None:
                return f"call {parent!r} of its program, whose result it needs, ended without one ({reason.value})"
        return None

    def leave(self, request: Request, reason: EndReason, now: float) -> None:
        """Count the end of a request that belongs to a program."""
        program = request.program
        assert program is not None
        program.end_call(request, reason, now)
        if not program.num_alive and self.on_pause is not None:
            self.on_pause(program)

    def end(self, program: Program, reason: ProgramEnd) -> None:
        """End a program."""
        program.end_reason = reason
        del self._open[program.program_id]
