"""Draw conversations whose prompts grow by each answer and share system prompts.

A turn's prompt is the previous prompt, its output, and new text; a session's first prompt is a system prompt and new
text. So later turns of a session hit its history in the prefix cache, and sessions hit the system prompts of others.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from msgspec import Struct, structs
from pydantic import BaseModel, ConfigDict, Field

from vajra_py.errors import WorkloadError
from vajra_py.workload.arrays import F64, I64, BoolArray, StringColumn
from vajra_py.workload.arrivals import ArrivalProcess, arrival_times
from vajra_py.workload.columns import Columns
from vajra_py.workload.content import NO_NODE, ContentColumn, ContentStore, SegmentSpace
from vajra_py.workload.distributions import (
    Constant,
    Distribution,
    NonNegative,
    correlated_normals,
    sample,
    to_tokens,
    zipf_shares,
)
from vajra_py.workload.synthetic import RngFor
from vajra_py.workload.workload import Workload

__all__ = ["Sessions", "SystemPrompts", "sessions_workload", "system_prompts"]


class SystemPrompts(BaseModel):
    """System prompts with which sessions start, and the distribution of their use."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    count: int = Field(1, ge=1, le=1_000_000, description="Number of different system prompts.")
    tokens: Distribution = Field(description="Length of a system prompt in tokens, drawn once for each.")
    zipf_exponent: NonNegative = Field(
        0.0, description="Exponent of their popularity: the k-th is used in proportion to 1 / k^exponent (0: uniform)."
    )


class Sessions(BaseModel):
    """Distributions from which sessions are drawn."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    turns: Distribution = Field(description="Turns (requests) of a session, at least 1.")
    first_turn_tokens: Distribution = Field(
        description="New text of the first turn in tokens, after the system prompt."
    )
    first_turn_tokens_include_system: bool = Field(
        False, description="Count the system prompt in the first turn's text (of which at least 1 token stays)."
    )
    turn_tokens: Distribution = Field(description="New text of each later turn in tokens.")
    turn_tokens_include_output: bool = Field(
        False,
        description="Count the answer before it in a later turn's new text (of which at least 1 token stays).",
    )
    output_tokens: Distribution = Field(description="Output length in tokens.")
    correlation: float = Field(
        0.0, ge=-1, le=1, description="Correlation of new text and output in the Gaussian copula."
    )
    think_time_s: Distribution = Field(
        Constant(value=0.0),
        description="Seconds from the end of a turn (open: from its arrival) to the arrival of the next.",
    )
    system_prompts: SystemPrompts | None = Field(None, description="The system prompts; null: none.")
    reset_fraction: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Probability that a later turn starts over with the system prompt and a first turn's text.",
    )
    max_context_tokens: int | None = Field(
        None,
        ge=1,
        le=1_000_000_000,
        description="Maximum prompt length, tokens: a session ends before a turn with a longer one; null: no bound.",
    )
    mode: Literal["closed", "open"] = Field(
        "closed",
        description="closed: a turn arrives a think time after the end of the one before; open: after its arrival.",
    )


class _Turns(Struct, frozen=True):
    """Turns of all sessions, session after session; arrays have one element per turn."""

    session: I64
    first: BoolArray  # True for a session's first turn
    fresh: BoolArray  # True if the prompt starts over: for first turns and resets
    text: I64
    output: I64
    think_s: F64

    def take(self, keep: BoolArray) -> _Turns:
        return _Turns(
            self.session[keep],
            self.first[keep],
            self.fresh[keep],
            self.text[keep],
            self.output[keep],
            self.think_s[keep],
        )


def sessions_workload(
    sessions: Sessions,
    arrivals: ArrivalProcess,
    rng_for: RngFor,
    *,
    num_sessions: int | None = None,
    duration_s: float | None = None,
) -> Workload:
    """Draw sessions that start according to an arrival process, whose rate is in sessions per second.

    Sessions start until `num_sessions` have started or `duration_s` seconds have passed. Streams: `arrivals`,
    `arrival_rates`, `turns`, `lengths`, `think_times`, `system_prompts`, `resets`.

    Raises:
        WorkloadError: neither `num_sessions` nor `duration_s` is given for an endless process, or no turn fits
            `max_context_tokens`.
    """
    starts = arrival_times(
        arrivals, rng_for("arrivals"), rng_for("arrival_rates"), num_requests=num_sessions, duration_s=duration_s
    )
    system_of, system_tokens = system_prompts(sessions.system_prompts, rng_for, len(starts))
    turns, prompts = _turns(sessions, rng_for, system_tokens[system_of])
    num_cut = 0
    if sessions.max_context_tokens is not None:
        keep = _before_first(prompts > sessions.max_context_tokens, turns)
        num_cut = int((~keep).sum())
        turns, prompts = turns.take(keep), prompts[keep]
    if not len(prompts):
        allowed = "A higher max_context_tokens or shorter texts"
        raise WorkloadError(
            "sessions", None, f"no prompt fits max_context_tokens ({sessions.max_context_tokens})", allowed
        )
    columns = _session_columns(turns, starts, prompts, closed=sessions.mode == "closed")
    content = _content(turns, columns.request_id, system_of, system_tokens)
    order = np.argsort(columns.arrived_at, kind="stable")
    facts: dict[str, Any] = {"kind": "sessions", "num_sessions": len(starts), "num_turns_cut": num_cut}
    return Workload(structs.replace(columns, content=content).take(order), "sessions", facts)


def system_prompts(prompts: SystemPrompts | None, rng_for: RngFor, num_sessions: int) -> tuple[I64, I64]:
    """Return the index of each session's (or program's) system prompt, and the length of each system prompt in tokens.

    If `prompts` is None, all sessions use a single system prompt of 0 tokens.
    """
    if prompts is None:
        return np.zeros(num_sessions, dtype=np.int64), np.zeros(1, dtype=np.int64)
    rng = rng_for("system_prompts")
    lengths = to_tokens(prompts.tokens, rng.standard_normal(prompts.count))
    bounds = np.cumsum(zipf_shares(prompts.count, prompts.zipf_exponent))
    chosen = np.searchsorted(bounds, rng.random(num_sessions), side="right")
    return np.minimum(chosen, prompts.count - 1).astype(np.int64), lengths


def _turns(sessions: Sessions, rng_for: RngFor, system: I64) -> tuple[_Turns, I64]:
    """Draw the turns of the sessions; return the turns and the lengths of their prompts in tokens.

    `system` holds the length of each session's system prompt in tokens.
    """
    counts = to_tokens(sessions.turns, rng_for("turns").standard_normal(len(system)))
    session = np.repeat(np.arange(len(system), dtype=np.int64), counts)
    size = len(session)
    first = np.ones(size, dtype=np.bool_)
    first[1:] = session[1:] != session[:-1]
    resets = rng_for("resets").random(size) < sessions.reset_fraction
    fresh = first | resets
    z_text, z_output = correlated_normals(rng_for("lengths"), size, sessions.correlation)
    output = to_tokens(sessions.output_tokens, z_output)
    answered = np.concatenate([[0], output[:-1]])
    begin, later = to_tokens(sessions.first_turn_tokens, z_text), to_tokens(sessions.turn_tokens, z_text)
    if sessions.first_turn_tokens_include_system:
        begin = np.maximum(begin - system[session], 1)
    if sessions.turn_tokens_include_output:
        later = np.maximum(later - answered, 1)
    think_s = np.where(first, 0.0, sample(sessions.think_time_s, rng_for("think_times"), size))
    turns = _Turns(session, first, fresh, np.where(fresh, begin, later), output, think_s)
    added = turns.text + np.where(fresh, system[session], answered)
    return turns, _since(fresh, added)


def _since(marks: BoolArray, values: Any) -> Any:
    """Return the running sum of the values, restarted at each marked row."""
    sums = np.cumsum(values)
    rows = np.nonzero(marks)[0]
    before = np.where(rows > 0, sums[rows - 1], 0)
    return sums - np.repeat(before, np.diff(np.append(rows, len(marks))))


def _before_first(marks: BoolArray, turns: _Turns) -> BoolArray:
    """Return a mask of the turns before the first marked turn of their session."""
    keep: BoolArray = _since(turns.first, marks.astype(np.int64)) == 0
    return keep


def _session_columns(turns: _Turns, starts: F64, prompts: I64, *, closed: bool) -> Columns:
    """Return the turns as requests, session after session; ids are numbers in order of arrival."""
    rows = np.arange(len(prompts), dtype=np.int64)
    arrived_at = starts[turns.session] + _since(turns.first, turns.think_s)
    rank = np.empty(len(prompts), dtype=np.int64)
    rank[np.argsort(arrived_at, kind="stable")] = rows
    return Columns(
        arrived_at=arrived_at,
        num_prompt_tokens=prompts,
        num_output_tokens=turns.output,
        request_id=StringColumn.numbered("", rank),
        stated={"session_id": StringColumn.numbered("session-", turns.session)},
        follows=np.where(turns.first, -1, rows - 1) if closed else None,
        think_time_s=turns.think_s if closed else None,
    )


def _content(turns: _Turns, request_id: StringColumn, system_of: I64, system_tokens: I64) -> ContentColumn:
    """Return the contents of the prompts.

    Nodes of their `ContentStore` are the system prompts, and after them two for each turn: its new text and its output.
    """
    num_systems, size = len(system_tokens), len(turns.session)
    text_node = num_systems + 2 * np.arange(size, dtype=np.int64)
    start = np.where(system_tokens > 0, np.arange(num_systems), NO_NODE)[system_of[turns.session]]
    parent = np.full(num_systems + 2 * size, NO_NODE, dtype=np.int64)
    parent[num_systems::2] = np.where(turns.fresh, start, text_node - 1)
    parent[num_systems + 1 :: 2] = text_node
    space = np.zeros(len(parent), dtype=np.int64)
    space[num_systems::2], space[num_systems + 1 :: 2] = 1, 2
    numbers = request_id.numbers if request_id.numbers is not None else np.arange(size, dtype=np.int64)
    number = np.concatenate([np.arange(num_systems, dtype=np.int64), np.repeat(numbers, 2)])
    tokens = np.zeros(len(parent), dtype=np.int64)
    tokens[:num_systems] = system_tokens
    tokens[num_systems::2], tokens[num_systems + 1 :: 2] = turns.text, turns.output
    spaces = (SegmentSpace("number", "system"), SegmentSpace("number", "text"), SegmentSpace("output"))
    return ContentColumn(ContentStore(spaces, parent, space, number, tokens), text_node)
