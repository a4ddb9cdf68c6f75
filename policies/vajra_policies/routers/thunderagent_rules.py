"""Rules of ThunderAgent's router: programs are placed, paused and resumed as wholes, by the tokens that their contexts hold.

Everything here is the parameters, a table of programs and a few operations on it; each operation gets the time in seconds, and nothing is
read from anywhere. `thunderagent.py` calls it for each event.

Source: ThunderAgent (arXiv:2602.13692) as in Dynamo 1.6 (`dynamo.thunderagent_router`, Apache-2.0); rules read there, code and words here.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from pydantic import Field

from vajra_py.contract import PolicyConfig

ReplicaKey: TypeAlias = Hashable
_CALLING, _FIRST_TURN, _OTHERS = 0, 1, 2
"""Order in which paused programs are resumed: a call waits, they have only begun, a tool runs."""


class ThunderAgentConfig(PolicyConfig):
    """Parameters of `thunderagent`, with Dynamo's defaults."""

    pause_threshold: float = Field(
        0.95, gt=0, le=1, description="Part of a replica's tokens above which programs are paused."
    )
    pause_target: float = Field(0.80, gt=0, le=1, description="Part of them down to which programs are paused.")
    soft_demote_threshold: float = Field(
        0.80, gt=0, le=1, description="Part of them from which its programs' calls are put behind others."
    )
    soft_demote_priority_jump_s: float = Field(-2.0, description="Seconds by which these calls are put ahead (behind).")
    resume_hysteresis: float = Field(
        0.10,
        ge=0,
        lt=1,
        description="Part of a replica's tokens below pause_threshold that stays free when programs are resumed.",
    )
    resume_priority_boost_s: float = Field(1.0, description="Seconds by which calls of resumed programs are put ahead.")
    resume_timeout_s: float = Field(
        1800.0, gt=0, description="Time after which a paused program is resumed wherever most room is."
    )
    acting_token_weight: float = Field(1.0, ge=0, le=1, description="Weight of the tokens of programs whose tool runs.")
    acting_decay_tau_s: float = Field(
        1.0, gt=0, description="Half-life of their tokens where a program is resumed after resume_timeout_s."
    )
    scheduler_interval_s: float = Field(5.0, gt=0, description="Time between two looks at all programs.")
    buffer_tokens: int = Field(100, ge=0, description="Tokens that every program counts beyond its context.")


@dataclass(eq=False, slots=True)
class AgentProgram:
    """One program as the router sees it."""

    program_id: str
    tokens: int = 0
    """Prompt and output of its last turn."""
    turn: int = 0
    """Calls that it has sent."""
    is_reasoning: bool = False
    """A call of it is here or on its way; otherwise a tool runs."""
    is_paused: bool = False
    is_marked: bool = False
    """Mark of a program that is to be paused when its turn ends."""
    replica: ReplicaKey | None = None
    soft_until: float = 0.0
    """Time until which its calls are put behind others."""
    pause_order: int = 0
    """Position of its pause in the sequence of all."""
    is_waiting: bool = False
    """A call of it is held."""
    acting_since: float = 0.0


@dataclass(frozen=True, slots=True)
class Passage:
    """A call that may go on: where to (None: anywhere), and with which change of its priority."""

    program_id: str
    replica: ReplicaKey | None
    priority_jump_s: float


@dataclass(slots=True)
class ThunderTable:
    """The programs and replicas of a router, in the order in which they became known."""

    rules: ThunderAgentConfig
    capacity: dict[ReplicaKey, int]
    """Tokens of each replica's KV memory."""
    programs: dict[str, AgentProgram] = field(default_factory=dict)
    num_pauses: int = 0

    # Figures

    def used(self) -> dict[ReplicaKey, int]:
        """Tokens that the programs of each replica count."""
        found = dict.fromkeys(self.capacity, 0)
        for one in self.programs.values():
            if not one.is_paused and one.replica in found:
                found[one.replica] += self._counted(one)
        return found

    def _counted(self, one: AgentProgram) -> int:
        weight = 1.0 if one.is_reasoning else self.rules.acting_token_weight
        return int(one.tokens * weight) + self.rules.buffer_tokens

    @property
    def has_paused(self) -> bool:
        """True if some program is paused."""
        return any(one.is_paused for one in self.programs.values())

    # What happens

    def before_call(self, program_id: str, prompt_tokens: int, now: float) -> Passage | None:
        """Place a call of a program; None: it is held until its program is resumed. `prompt_tokens` 0: unknown."""
        program = self.programs.get(program_id)
        is_new = program is None
        if program is None:
            program = self.programs[program_id] = AgentProgram(program_id)
        program.turn += 1
        if prompt_tokens:
            program.tokens = prompt_tokens
        if is_new and self.has_paused:
            self._pause(program)
        elif not program.is_paused and self._has_no_place(program):
            program.replica = self._roomiest_for(program)
            if program.replica is None and is_new:
                self._pause(program)
        if program.is_paused:
            program.is_waiting = True
            return None
        program.is_reasoning = True
        return self._passage(program, now, was_paused=False)

    def after_call(self, program_id: str, num_tokens: int, now: float) -> None:
        """Count a call of a program that has ended with so many tokens, prompt and output."""
        program = self.programs.get(program_id)
        if program is None:
            return
        program.tokens = num_tokens
        program.is_reasoning = False
        program.acting_since = now
        if program.is_marked:
            program.is_marked = False
            self._pause(program)

    def end_program(self, program_id: str) -> None:
        """Forget a program that has ended."""
        self.programs.pop(program_id, None)

    def lose_replica(self, replica: ReplicaKey) -> None:
        """Forget a replica that is gone; its programs are placed anew at their next calls, and counted nowhere until then."""
        self.capacity.pop(replica, None)

    def tick(self, now: float) -> list[Passage]:
        """Demote, resume and pause; returns the calls that may go on."""
        used = self.used()
        self._demote(used, now)
        resumed = self._resume(used)
        for replica in self.capacity:
            self._relieve(replica, used)
        return [self._passage(one, now, was_paused=True) for one in resumed if one.is_reasoning]

    def force(self, program_id: str, now: float) -> Passage | None:
        """Resume a program that was paused for too long, wherever most room is; its call, if one waits."""
        program = self.programs.get(program_id)
        if program is None or not program.is_paused:
            return None
        self._go_on(program, self._least_bad(now))
        return self._passage(program, now, was_paused=True) if program.is_reasoning else None

    # Steps of a tick

    def _demote(self, used: Mapping[ReplicaKey, int], now: float) -> None:
        rules = self.rules
        for replica, capacity in self.capacity.items():
            if rules.soft_demote_threshold <= used[replica] / capacity < rules.pause_threshold:
                for one in self._on(replica):
                    if not one.is_marked:
                        one.soft_until = now + 1.5 * rules.scheduler_interval_s

    def _on(self, replica: ReplicaKey) -> list[AgentProgram]:
        return [one for one in self.programs.values() if one.replica == replica and not one.is_paused]

    def _relieve(self, replica: ReplicaKey, used: dict[ReplicaKey, int]) -> None:
        """Pause programs of a replica that has too many tokens: those whose tool runs, else all the others after their turns."""
        rules, capacity = self.rules, self.capacity[replica]
        if not used[replica] > rules.pause_threshold * capacity:
            return
        target = min(rules.pause_target, rules.pause_threshold) * capacity
        for one in sorted((one for one in self._on(replica) if not one.is_reasoning), key=lambda one: one.tokens):
            if used[replica] <= target:
                return
            used[replica] -= self._counted(one)
            self._pause(one)
        if used[replica] > target:
            for one in self._on(replica):
                one.is_marked = one.is_marked or one.is_reasoning

    def _resume(self, used: dict[ReplicaKey, int]) -> list[AgentProgram]:
        """Resume the most urgent programs that fit, the largest placed first."""
        rules = self.rules
        share = max(0.0, rules.pause_threshold - rules.resume_hysteresis)
        rooms = {key: int(capacity * share) - used[key] for key, capacity in self.capacity.items()}
        rooms = {key: room for key, room in rooms.items() if room > rules.buffer_tokens}
        left = sum(rooms.values())
        paused = sorted((one for one in self.programs.values() if one.is_paused), key=self._urgency)
        chosen: list[AgentProgram] = []
        for one in paused:
            need = one.tokens + rules.buffer_tokens
            if need <= left:
                chosen.append(one)
                left -= need
        smallest = min((one.tokens + rules.buffer_tokens for one in chosen), default=0)
        resumed: list[AgentProgram] = []
        for one in sorted(chosen, key=lambda one: -one.tokens):
            if not rooms:
                break
            roomiest = max(rooms, key=rooms.__getitem__)
            need = one.tokens + rules.buffer_tokens
            if rooms[roomiest] < smallest:
                break
            if rooms[roomiest] < need:
                continue
            self._go_on(one, roomiest)
            rooms[roomiest] -= need
            used[roomiest] += need
            resumed.append(one)
        return resumed

    def _urgency(self, one: AgentProgram) -> tuple[int, int, int]:
        group = _FIRST_TURN if one.turn <= 1 else _CALLING if one.is_waiting else _OTHERS
        return group, one.tokens, one.pause_order

    # Moves of one program

    def _pause(self, program: AgentProgram) -> None:
        self.num_pauses += 1
        program.is_paused = True
        program.pause_order = self.num_pauses
        program.replica = None

    def _go_on(self, program: AgentProgram, replica: ReplicaKey | None) -> None:
        program.is_paused = False
        program.replica = replica
        program.is_reasoning = program.is_waiting
        program.is_waiting = False

    def _has_no_place(self, program: AgentProgram) -> bool:
        return program.replica not in self.capacity

    def _roomiest_for(self, program: AgentProgram) -> ReplicaKey | None:
        """The replica with the least used tokens among those with room for the program."""
        used, need = self.used(), program.tokens + self.rules.buffer_tokens
        free = [key for key, capacity in self.capacity.items() if capacity - used[key] >= need]
        return min(free, key=used.__getitem__, default=None)

    def _least_bad(self, now: float) -> ReplicaKey | None:
        """The replica with most room, tokens of programs whose tool runs counted less the longer it does."""
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

    def _passage(self, program: AgentProgram, now: float, *, was_paused: bool) -> Passage:
        jump = self.rules.resume_priority_boost_s if was_paused else 0.0
        if now < program.soft_until:
            jump += self.rules.soft_demote_priority_jump_s
        return Passage(program.program_id, program.replica, jump)
