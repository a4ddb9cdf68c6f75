"""Learn the durations of programs' tools from the gaps between the end of a call and the program's next call."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from vajra_py.contract import PolicyConfig, ProgramView, RequestView

_MOST_TOOLS = 1_000
"""Maximum number of remembered tools; the least recently used ones are dropped. Needed since clients choose the names
of tools, so that there may be any number of them.
"""


class ToolGapConfig(PolicyConfig):
    """Parameters of Continuum's time to live; the defaults are those of its code."""

    ttl_s: float = Field(2.0, ge=0, description="Time for which the content of a program stays after a call, seconds.")
    max_mean_gap_s: float = Field(
        2.0, ge=0, description="Mean time of a tool so far above which content is not kept, seconds."
    )
    tool_metadata: str = Field(
        "tool",
        description="Metadata key with the name of the tool that runs after a call; where it is absent, the call's stage.",
    )


class ToolGaps:
    """Mean duration of each tool, which decides the time to live of a program's content. The policy forwards its
    callbacks to this object.
    """

    def __init__(self, config: ToolGapConfig) -> None:
        self._config = config
        self._last: dict[ProgramView, tuple[str, float]] = {}
        """Tool that each program runs, and its start time."""
        self._sums: dict[str, tuple[float, int]] = {}
        """(sum in seconds, number) of the durations of each tool, the most recently used tool last."""

    def arrive(self, requests: Iterable[RequestView], now: float) -> None:
        """Record the duration of each program's tool, which has ended when the program's next call arrives."""
        for request in requests:
            begun = None if request.program is None else self._last.pop(request.program, None)
            if begun is not None:
                total, count = self._sums.pop(begun[0], (0.0, 0))
                self._sums[begun[0]] = (total + now - begun[1], count + 1)
                if len(self._sums) > _MOST_TOOLS:
                    del self._sums[next(iter(self._sums))]

    def depart(self, requests: Iterable[RequestView], now: float) -> None:
        """Record the start of a tool after each call that ran and is not the last of its program."""
        for request in requests:
            program = request.program
            has_run = request.admitted_index > 0
            if program is not None and has_run and not request.is_last_call and program.end_reason is None:
                self._last[program] = (self._tool(request), now)

    def end(self, program: ProgramView) -> None:
        """Forget a program that has ended."""
        self._last.pop(program, None)

    def ttl_s(self, request: RequestView) -> float:
        """Return the seconds for which the content of an ending call is kept: the configured `ttl_s`, or 0 if no tool
        of a program follows, if the call never ran, or if the tool's mean time exceeds `max_mean_gap_s`.
        """
        if request.program is None or request.is_last_call or not request.admitted_index:
            return 0.0
        total, count = self._sums.get(self._tool(request), (0.0, 0))
        is_slow = count > 0 and total / count > self._config.max_mean_gap_s
        return 0.0 if is_slow else self._config.ttl_s

    def _tool(self, request: RequestView) -> str:
        return str(request.metadata.get(self._config.tool_metadata, request.stage))
