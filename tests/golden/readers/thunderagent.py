"""Check the rules of `thunderagent` against decisions of Dynamo's program-level router, of format thunderagent-golden/1.

Each operation is done on a table of programs. What may go on because of it is compared, and the state of every program where it is
recorded; the order of programs that go on together is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from tests.golden.readers.trace import Difference, Result
from vajra_policies.routers.thunderagent_programs import AgentProgram, ThunderAgentConfig
from vajra_policies.routers.thunderagent_rules import Passage, ThunderTable

SCHEMA = "thunderagent-golden/1"
UNIT = "operations"
_ROUNDING_S = 1e-6


class RankedTable(ThunderTable):
    """Replicas are (worker, rank): a program whose rank is gone stays while its worker is there. Notes since when calls are held."""

    waits_since: dict[str, float]

    def before_call(self, program_id: str, prompt_tokens: int, now: float) -> Passage | None:
        """See `ThunderTable`."""
        passage = super().before_call(program_id, prompt_tokens, now)
        if passage is None:
            self.waits_since[program_id] = now
        return passage

    def has_no_place(self, program: AgentProgram) -> bool:
        place: Any = program.replica
        return place is None or place[0] not in {worker for worker, _ in cast("Any", self.capacity)}


def rules_of(config: Mapping[str, Any]) -> ThunderAgentConfig:
    """Return the recorded options."""
    return ThunderAgentConfig(
        pause_threshold=config["pause_threshold"],
        pause_target=config["pause_target"],
        soft_demote_threshold=config["soft_demote_threshold"],
        soft_demote_priority_jump_s=config["soft_demote_priority_jump"],
        resume_hysteresis=config["resume_hysteresis"],
        resume_priority_boost_s=config["resume_priority_boost"],
        acting_token_weight=config["acting_token_weight"],
        acting_decay_tau_s=config["acting_decay_tau_seconds"],
        scheduler_interval_s=config["scheduler_interval_seconds"],
        buffer_tokens=config["buffer_per_program"],
    )


def table_of(case: Mapping[str, Any]) -> RankedTable:
    """Return the table before the first operation."""
    table = RankedTable(rules_of(case["config"]), {tuple(place): tokens for place, tokens in case["replicas"]})
    table.waits_since = {}
    return table


def _before(table: RankedTable, op: Mapping[str, Any], timeout_s: float) -> Sequence[Passage]:
    passage = table.before_call(op["id"], op["estimated_prompt_tokens"], op["t"])
    return [] if passage is None else [passage]


def _output(table: RankedTable, op: Mapping[str, Any], timeout_s: float) -> Sequence[Passage]:
    if op["id"] in table.programs:
        table.programs[op["id"]].tokens += op["delta"]
    return ()


def _after(table: RankedTable, op: Mapping[str, Any], timeout_s: float) -> Sequence[Passage]:
    table.after_call(op["id"], op["prompt_tokens"] + op["completion_tokens"], op["t"])
    return ()


def _end(table: RankedTable, op: Mapping[str, Any], timeout_s: float) -> Sequence[Passage]:
    table.end_program(op["id"])
    return ()


def _gone(table: RankedTable, op: Mapping[str, Any], timeout_s: float) -> Sequence[Passage]:
    table.lose_replica(tuple(op["replica"]))
    return ()


def _tick(table: RankedTable, op: Mapping[str, Any], timeout_s: float) -> Sequence[Passage]:
    return table.tick(op["t"])


def _forced(table: RankedTable, op: Mapping[str, Any], timeout_s: float) -> Sequence[Passage]:
    """Resume everyone whose call has waited for so long."""
    waiting = [one for one in table.programs.values() if one.is_waiting]
    since = {one.program_id: table.waits_since[one.program_id] for one in waiting}
    due = [one for one, at in since.items() if op["t"] - at >= timeout_s - _ROUNDING_S]
    passages = [table.force(one, op["t"]) for one in sorted(due, key=since.__getitem__)]
    return [one for one in passages if one is not None]


_OPERATIONS: Mapping[str, Callable[[RankedTable, Mapping[str, Any], float], Sequence[Passage]]] = {
    "before_request": _before,
    "record_output_tokens": _output,
    "after_request": _after,
    "end_program": _end,
    "replica_gone": _gone,
    "tick": _tick,
    "forced_resume": _forced,
}


def admitted(passages: Sequence[Passage]) -> list[list[Any]]:
    """Return what goes on, as it is recorded, by program."""
    rows = [[one.program_id, _place(one.replica), one.priority_jump_s] for one in passages]
    return sorted(rows, key=lambda row: str(row[0]))


def states(programs: Sequence[AgentProgram], now: float) -> list[list[Any]]:
    """Return the state of each program, as it is recorded."""
    return [
        [
            one.program_id,
            "paused" if one.is_paused else "active",
            "reasoning" if one.is_reasoning or one.is_waiting else "acting",
            _place(one.replica),
            one.tokens,
            one.turn,
            int(one.is_marked),
            round(max(0.0, one.soft_until - now), 6),
        ]
        for one in programs
    ]


def _place(replica: Any) -> Any:
    return None if replica is None else list(replica)


def compare(system: str, name: str, case: Mapping[str, Any]) -> Result:
    """Compare one run operation by operation."""
    table = table_of(case)
    for number, op in enumerate(case["ops"]):
        found = admitted(_OPERATIONS[op["op"]](table, op, case["timeout"]))
        # the jump shows the same as the columns after it: whether the program was paused, and moved behind others
        expected = sorted((row[:3] for row in op.get("admitted", [])), key=lambda row: str(row[0]))
        pairs = [("admitted", expected, found)]
        if "state" in op:
            mine = states(list(table.programs.values()), op["t"])
            theirs = [[*row[:-1], round(row[-1], 6)] for row in op["state"]]
            pairs.append(("state", *(sorted(rows, key=lambda row: str(row[0])) for rows in (theirs, mine))))
        for field, recorded, here in pairs:
            if recorded != here:
                told = [f"operation: {op['op']} at {op['t']}", f"used: {table.used()} of {table.capacity}"]
                return Result(system, name, number + 1, Difference(str(number), field, recorded, here, told), UNIT)
    return Result(system, name, len(case["ops"]), unit=UNIT)
