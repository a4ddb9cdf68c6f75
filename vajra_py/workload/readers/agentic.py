"""Read recorded coding-agent sessions as workloads with cacheable prefixes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from msgspec import Struct

from vajra_py.contract.facts import is_number
from vajra_py.errors import WorkloadError
from vajra_py.workload.arrays import F64, StringColumn
from vajra_py.workload.columns import Columns
from vajra_py.workload.content import NO_NODE, ContentBuilder, ContentColumn, SegmentSpace
from vajra_py.workload.files import file_facts, iter_json_lines
from vajra_py.workload.request import SegmentId
from vajra_py.workload.stated import FactColumn
from vajra_py.workload.workload import Workload

__all__ = ["AgenticSession", "AgenticTurn", "read_agentic", "read_agentic_sessions"]

SESSION_FIELDS = ("id", "block_size", "tool_tokens", "system_tokens", "requests")
TURN_LENGTH = 9
MOST_TOKENS = 2**31 - 1


class AgenticTurn(Struct, frozen=True):
    """One request of a session: its time, lengths, think time and blocks.

    Times are in seconds; `at_s` counts from the session's start. `runs` are pairs (first block id, number of blocks).
    """

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    think_time_s: float
    runs: tuple[tuple[int, int], ...]


class AgenticSession(Struct, frozen=True):
    """A session whose prompts begin with `tool_tokens` of tool definitions and `system_tokens` of system prompt."""

    session_id: str
    block_tokens: int
    tool_tokens: int
    system_tokens: int
    turns: tuple[AgenticTurn, ...]


def read_agentic_sessions(file: Path) -> list[AgenticSession]:
    """Read the sessions of a file with one JSON object per line.

    Keys: `id`, `block_size`, `tool_tokens`, `system_tokens`, `requests`. A request is a list: seconds from the
    session's start, prompt tokens, output tokens, seconds at the server, seconds of think time before it, seconds to
    the first token, user turn (0 or 1), leading blocks seen before, [first block id, number of blocks, …]. A think time
    of null stands for the time from the end of the previous request to the start of this one. Source: kv-cache-tester
    (callanjfox), run-length coded.

    Raises:
        WorkloadError: the file is not as described; the error gives the line.
    """
    sessions: list[AgenticSession] = []
    seen: set[str] = set()
    for line, record in iter_json_lines(file):
        session = _session(file, line, record)
        if session.session_id in seen:
            raise WorkloadError(
                file, line, f"session id used before ({session.session_id!r})", "A different id for each"
            )
        seen.add(session.session_id)
        sessions.append(session)
    return sessions


def _session(file: Path, line: int, record: dict[str, Any]) -> AgenticSession:
    for name in SESSION_FIELDS:
        if name not in record:
            allowed = f"Fields: {', '.join(SESSION_FIELDS)}"
            raise WorkloadError(file, line, f"has no field {name!r} ({', '.join(record)})", allowed)
    for name, least in (("block_size", 1), ("tool_tokens", 0), ("system_tokens", 0)):
        value = record[name]
        if type(value) is not int or value < least:
            raise WorkloadError(file, line, f"{name} cannot be used ({value!r})", f"A whole number >= {least}")
    requests = record["requests"]
    if not isinstance(requests, list) or not requests:
        raise WorkloadError(
            file, line, f"requests is not a list of requests ({str(requests)[:40]})", "At least one request"
        )
    turns: list[AgenticTurn] = []
    ended_s = 0.0
    for index, entry in enumerate(requests):
        problem = _turn_problem(entry, record["block_size"], turns[-1].at_s if turns else 0.0)
        if problem is not None:
            raise WorkloadError(file, line, f"request {index}: {problem[0]}", problem[1])
        at_s, prompt, output, served_s, think_s, _, _, _, runs = entry
        think = max(0.0, at_s - ended_s) if think_s is None else float(think_s)
        pairs = tuple(zip(runs[::2], runs[1::2], strict=True))
        turns.append(AgenticTurn(float(at_s), prompt, output, think if index else 0.0, pairs))
        ended_s = at_s + (served_s or 0.0)
    return AgenticSession(
        str(record["id"]), record["block_size"], record["tool_tokens"], record["system_tokens"], tuple(turns)
    )


def _turn_problem(entry: Any, block_tokens: int, before_s: float) -> tuple[str, str] | None:
    if not isinstance(entry, list) or len(entry) != TURN_LENGTH:
        return f"is not a list of {TURN_LENGTH} values ({str(entry)[:40]})", "A list as the format says"
    at_s, prompt, output, served_s, think_s, _, _, _, runs = entry
    for name, value in (("time", at_s), ("seconds at the server", served_s), ("seconds of thought", think_s)):
        if value is None and name != "time":
            continue
        if not is_number(value) or value < 0:
            return f"{name} cannot be used ({value!r})", "A finite number of seconds >= 0"
    if at_s < before_s:
        return f"comes before the request above it (at {at_s!r} s after {before_s!r} s)", "Ascending times"
    is_usable = (
        type(prompt) is int and type(output) is int and 1 <= prompt <= MOST_TOKENS and 0 <= output <= MOST_TOKENS
    )
    if not is_usable:
        allowed = f"Prompt >= 1, output >= 0 tokens, both at most {MOST_TOKENS}"
        return f"tokens cannot be used (prompt {prompt!r}, output {output!r})", allowed
    if not isinstance(runs, list) or len(runs) % 2 or not all(type(value) is int and value >= 0 for value in runs):
        return f"runs of block ids cannot be used ({str(runs)[:40]})", "Pairs of first id and number of blocks"
    if sum(runs[1::2]) * block_tokens > prompt or 0 in runs[1::2]:
        blocks = sum(runs[1::2])
        return (
            f"has {blocks} full blocks in a prompt of {prompt} tokens",
            f"At most one per {block_tokens} tokens, no empty run",
        )
    return None


@dataclass(slots=True)
class _Rows:
    """Requests read so far, one list per column."""

    arrived_at: list[float] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    follows: list[int] = field(default_factory=list)
    thinks: list[float] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)


def read_agentic(
    file: Path,
    starts: Callable[[int], F64] | None = None,
    *,
    num_sessions: int | None = None,
    mode: Literal["closed", "open", "programs"] = "closed",
) -> Workload:
    """Read the sessions of a file as a workload.

    Two sessions share their tool definitions if the lengths of these are equal. If they do, and the lengths of their
    system prompts are equal too, they also share the system prompts. Other content is unique to its session, even if
    recorded block ids are equal. Requests without output are dropped and counted.

    Args:
        file: file as described at `read_agentic_sessions`.
        starts: function that returns ascending start times, in seconds, for a number of sessions, since the trace has
            no clock across sessions; None starts all sessions at 0.
        num_sessions: number of sessions to take from the start of the file; None for all.
        mode: `closed` sends a turn as soon as its think time has passed since the end of the previous turn; `open`
            sends each turn at its recorded time; `programs` is like `closed`, but each session is also a program whose
            calls state their parents, and whose last call is marked as such.

    Raises:
        WorkloadError: the file is not as described, or has fewer than `num_sessions` sessions.
    """
    sessions = read_agentic_sessions(file)
    wanted = len(sessions) if num_sessions is None else num_sessions
    if wanted > len(sessions):
        raise WorkloadError(file, None, f"has {len(sessions)} sessions ({wanted} requested)", "At most so many")
    starts_s = np.zeros(wanted) if starts is None else starts(wanted)
    rows, content, num_dropped = _gather(sessions, starts_s.tolist())
    if not rows.nodes:
        raise WorkloadError(file, None, "no request is left with an output", "At least one request")
    closed = mode != "open"
    stated: dict[str, FactColumn] = {"session_id": StringColumn.of(rows.sessions)}
    if mode == "programs":
        followed = np.isin(np.arange(len(rows.nodes)), rows.follows)
        stated |= {"program_id": stated["session_id"], "is_last_call": (~followed).astype(np.int64)}
    columns = Columns(
        arrived_at=np.array(rows.arrived_at, dtype=np.float64),
        num_prompt_tokens=np.array(rows.prompts, dtype=np.int64),
        num_output_tokens=np.array(rows.outputs, dtype=np.int64),
        request_id=StringColumn.numbered("", np.arange(len(rows.nodes), dtype=np.int64)),
        stated=stated,
        follows=np.array(rows.follows, dtype=np.int64) if closed else None,
        think_time_s=np.array(rows.thinks, dtype=np.float64) if closed else None,
        content=content,
    )
    facts = {**file_facts("agentic", file), "num_sessions": wanted, "mode": mode, "num_dropped_empty": num_dropped}
    return Workload(columns, file.name.split(".")[0], facts)


def _gather(sessions: list[AgenticSession], starts: list[float]) -> tuple[_Rows, ContentColumn, int]:
    rows = _Rows()
    builder = ContentBuilder(())
    numbers: dict[SegmentId, int] = {}
    num_dropped = 0
    for session, start_s in zip(sessions, starts, strict=False):
        previous = -1
        for index, turn in enumerate(session.turns):
            if not turn.num_output_tokens:
                num_dropped += 1
                continue
            node = NO_NODE
            for segment_id, num_tokens in _segments(session, index):
                node = builder.add(node, 0, numbers.setdefault(segment_id, len(numbers)), num_tokens)
            rows.nodes.append(node)
            rows.arrived_at.append(start_s + turn.at_s)
            rows.prompts.append(turn.num_prompt_tokens)
            rows.outputs.append(turn.num_output_tokens)
            rows.sessions.append(session.session_id)
            rows.follows.append(previous)
            rows.thinks.append(turn.think_time_s if previous >= 0 else 0.0)
            previous = len(rows.nodes) - 1
    nodes = np.array(rows.nodes, dtype=np.int64)
    return rows, ContentColumn(builder.store((SegmentSpace("explicit", table=tuple(numbers)),)), nodes), num_dropped


def _segments(session: AgenticSession, index: int) -> list[tuple[SegmentId, int]]:
    """Return the content of a turn's prompt: tools, system prompt, runs of blocks, and tokens after the last block."""
    turn = session.turns[index]
    tools, system = session.tool_tokens, session.system_tokens
    segments: list[tuple[SegmentId, int]] = []
    first_id = session.turns[0].runs[0][0] if session.turns[0].runs else -1
    for place, (start, num_blocks) in enumerate(turn.runs):
        left = num_blocks * session.block_tokens
        if place == 0 and start == first_id:
            shared: tuple[tuple[SegmentId, int], ...] = ((("tools", tools), tools), (("system", tools, system), system))
            for segment_id, num_tokens in shared:
                if left and num_tokens:
                    segments.append((segment_id, min(left, num_tokens)))
                    left -= min(left, num_tokens)
        if left:
            segments.append(((session.session_id, start), left))
    rest = turn.num_prompt_tokens - sum(num_tokens for _, num_tokens in segments)
    if rest:
        segments.append(((session.session_id, "rest", index), rest))
    return segments
