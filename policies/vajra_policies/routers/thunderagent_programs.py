"""Programs of ThunderAgent's router: their replicas, the sizes of their contexts, and their pauses."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TypeAlias

from pydantic import Field

from vajra_py.contract import PolicyConfig

ReplicaKey: TypeAlias = Hashable


class ThunderAgentConfig(PolicyConfig):
    """Parameters of `thunderagent`, with Dynamo's defaults."""

    pause_threshold: float = Field(
        0.95, gt=0, le=1, description="Fraction of a replica's tokens above which programs are paused."
    )
    pause_target: float = Field(
        0.80, gt=0, le=1, description="Fraction of a replica's tokens down to which programs are paused."
    )
    soft_demote_threshold: float = Field(
        0.80,
        gt=0,
        le=1,
        description="Fraction of a replica's tokens from which the calls of its programs go behind other calls.",
    )
    soft_demote_priority_jump_s: float = Field(
        -2.0, description="Seconds by which such a call goes ahead of its time of arrival; negative: behind it."
    )
    resume_hysteresis: float = Field(
        0.10,
        ge=0,
        lt=1,
        description="Fraction of a replica's tokens below pause_threshold that stays free when programs are resumed.",
    )
    resume_priority_boost_s: float = Field(1.0, description="Seconds by which calls of resumed programs are put ahead.")
    resume_timeout_s: float = Field(
        1800.0,
        gt=0,
        description="Time after which a paused program is resumed on the replica with the most room, seconds.",
    )
    acting_token_weight: float = Field(1.0, ge=0, le=1, description="Weight of the tokens of programs whose tool runs.")
    acting_decay_tau_s: float = Field(
        1.0,
        gt=0,
        description="Half-life of the tokens of programs whose tool runs, where a program is resumed after resume_timeout_s, seconds.",
    )
    scheduler_interval_s: float = Field(5.0, gt=0, description="Interval at which all programs are checked, seconds.")
    buffer_tokens: int = Field(100, ge=0, description="Tokens that every program counts beyond its context.")


@dataclass(eq=False, slots=True)
class AgentProgram:
    """One program as the router sees it."""

    program_id: str
    tokens: int = 0
    """Number of prompt and output tokens of the program's live calls or, while a tool runs, of its last call."""
    turn: int = 0
    """Number of calls that the program has sent."""
    is_reasoning: bool = False
    """True while a call of the program runs or may run; False while a tool runs."""
    is_paused: bool = False
    is_marked: bool = False
    """True if the program is to be paused when its turn ends."""
    replica: ReplicaKey | None = None
    soft_until: float = 0.0
    """Time until which the program's calls are ordered after other calls, seconds on the run's clock."""
    pause_order: int = 0
    """Position of the program's latest pause in the sequence of all pauses, from 1."""
    is_waiting: bool = False
    """True if a call of the program is held."""
    acting_since: float = 0.0


@dataclass(slots=True)
class ProgramTable:
    """The programs and replicas of a router, in the order in which they became known."""

    rules: ThunderAgentConfig
    capacity: dict[ReplicaKey, int]
    """Size of each replica's KV memory, in tokens."""
    programs: dict[str, AgentProgram] = field(default_factory=dict)
    num_pauses: int = 0

    # Queries

    def used(self) -> dict[ReplicaKey, int]:
        """Return for each replica the sum of `counted` over its programs."""
        found = dict.fromkeys(self.capacity, 0)
        for one in self.programs.values():
            if not one.is_paused and one.replica in found:
                found[one.replica] += self.counted(one)
        return found

    def counted(self, one: AgentProgram) -> int:
        """Return the number of tokens counted for a program at its replica: those of its context, fewer of them while
        its tool runs, plus `buffer_tokens`.
        """
        weight = 1.0 if one.is_reasoning else self.rules.acting_token_weight
        return int(one.tokens * weight) + self.rules.buffer_tokens

    def needed(self, one: AgentProgram) -> int:
        """Return the number of tokens that must be free at a replica for a program to be placed there."""
        return one.tokens + self.rules.buffer_tokens

    @property
    def has_paused(self) -> bool:
        """True if any program is paused."""
        return any(one.is_paused for one in self.programs.values())

    def programs_on(self, replica: ReplicaKey) -> list[AgentProgram]:
        """Return the programs of a replica."""
        return [one for one in self.programs.values() if one.replica == replica and not one.is_paused]

    # Pausing, resuming and placing one program

    def pause(self, program: AgentProgram) -> None:
        """Detach a program from its replica; its next call is held."""
        self.num_pauses += 1
        program.is_paused = True
        program.pause_order = self.num_pauses
        program.replica = None

    def go_on(self, program: AgentProgram, replica: ReplicaKey | None) -> None:
        """Resume a paused program on this replica; with None, the program's next call chooses a replica."""
        program.is_paused = False
        program.replica = replica
        program.is_reasoning = program.is_waiting
        program.is_waiting = False

    def has_no_place(self, program: AgentProgram) -> bool:
        """Return True if a program has no replica, or its replica is no longer up."""
        return program.replica not in self.capacity

    def roomiest_for(self, program: AgentProgram) -> ReplicaKey | None:
        """Return the replica with the fewest used tokens among those that can hold the program; None if none can."""
        used, need = self.used(), self.needed(program)
        free = [key for key, capacity in self.capacity.items() if capacity - used[key] >= need]
        return min(free, key=used.__getitem__, default=None)

    def least_bad(self, now: float) -> ReplicaKey | None:
        """Return the replica with the most free tokens; None if there is no replica.

        The longer the tool of a program has run, the less the tokens of this program count.
        """
        left = dict(self.capacity)
        for one in self.programs.values():
            if one.is_paused or one.replica not in left:
                continue
            tokens = float(one.tokens)
            if not one.is_reasoning:
                idle_s = max(0.0, now - one.acting_since)
                tokens *= 2.0 ** (-idle_s / self.rules.acting_decay_tau_s)
            left[one.replica] -= int(tokens) + self.rules.buffer_tokens
        return max(left, key=left.__getitem__, default=None)
