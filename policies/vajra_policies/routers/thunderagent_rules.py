"""Rules by which ThunderAgent's router places, pauses and resumes whole programs, from the tokens of their contexts.

All rules are operations on a table of programs; they get the present time, in seconds, as an argument.
`thunderagent.py` calls them for each event.

Source: ThunderAgent (arXiv:2602.13692) as in Dynamo 1.6 (`dynamo.thunderagent_router`, Apache-2.0); the rules follow
that source, the code is new.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vajra_policies.routers.thunderagent_programs import AgentProgram, ProgramTable, ReplicaKey

_CALLING, _FIRST_TURN, _OTHERS = 0, 1, 2
"""Order in which paused programs are resumed: programs past their first turn with a held call, then programs in their
first turn, then programs whose tool runs.
"""


@dataclass(frozen=True, slots=True)
class Passage:
    """Permission for a call to run: its replica (None: any), and the change of its priority."""

    program_id: str
    replica: ReplicaKey | None
    priority_jump_s: float


class ThunderTable(ProgramTable):
    """Table of programs, with the operations on them."""

    def before_call(self, program_id: str, prompt_tokens: int, now: float) -> Passage | None:
        """Place a new call of a program and return its passage; None if the call is held until the program is resumed.

        `prompt_tokens`: number of tokens of the program's calls, including this one; 0 if unknown.
        """
        program = self.programs.get(program_id)
        is_new = program is None
        if program is None:
            program = self.programs[program_id] = AgentProgram(program_id)
        program.turn += 1
        if prompt_tokens:
            program.tokens = prompt_tokens
        if is_new and self.has_paused:
            self.pause(program)
        elif not program.is_paused and self.has_no_place(program):
            program.replica = self.roomiest_for(program)
            if program.replica is None and is_new:
                self.pause(program)
        if program.is_paused:
            program.is_waiting = True
            return None
        program.is_reasoning = True
        return self._passage(program, now, was_paused=False)

    def after_call(self, program_id: str, num_tokens: int, now: float) -> None:
        """Record the end of a program's call; `num_tokens`: number of the call's prompt and output tokens."""
        program = self.programs.get(program_id)
        if program is None:
            return
        program.tokens = num_tokens
        program.is_reasoning = False
        program.acting_since = now
        if program.is_marked:
            program.is_marked = False
            self.pause(program)

    def end_program(self, program_id: str) -> None:
        """Forget a program that has ended."""
        self.programs.pop(program_id, None)

    def lose_replica(self, replica: ReplicaKey) -> None:
        """Remove a lost replica; its programs are placed again at their next calls, and are not counted until then."""
        self.capacity.pop(replica, None)

    def tick(self, now: float) -> list[Passage]:
        """Demote, resume and pause programs; return the passages of the calls that may run now."""
        used = self.used()
        self._demote(used, now)
        resumed = self._resume(used)
        for replica in self.capacity:
            self._relieve(replica, used)
        return [self._passage(one, now, was_paused=True) for one in resumed if one.is_reasoning]

    def force(self, program_id: str, now: float) -> Passage | None:
        """Resume a program that was paused for too long, on the replica with the most room. Returns the passage of its
        waiting call; None if no call waits.
        """
        program = self.programs.get(program_id)
        if program is None or not program.is_paused:
            return None
        self.go_on(program, self.least_bad(now))
        return self._passage(program, now, was_paused=True) if program.is_reasoning else None

    # Actions of a tick

    def _demote(self, used: Mapping[ReplicaKey, int], now: float) -> None:
        rules = self.rules
        for replica, capacity in self.capacity.items():
            if rules.soft_demote_threshold <= used[replica] / capacity < rules.pause_threshold:
                for one in self.programs_on(replica):
                    if not one.is_marked:
                        one.soft_until = now + 1.5 * rules.scheduler_interval_s

    def _relieve(self, replica: ReplicaKey, used: dict[ReplicaKey, int]) -> None:
        """If the replica has too many tokens, pause programs whose tools run, the smallest first; if that is not
        enough, mark the others, which are then paused when their turns end.
        """
        rules, capacity = self.rules, self.capacity[replica]
        if not used[replica] > rules.pause_threshold * capacity:
            return
        target = min(rules.pause_target, rules.pause_threshold) * capacity
        for one in sorted(
            (one for one in self.programs_on(replica) if not one.is_reasoning), key=lambda one: one.tokens
        ):
            if used[replica] <= target:
                return
            used[replica] -= self.counted(one)
            self.pause(one)
        if used[replica] > target:
            for one in self.programs_on(replica):
                one.is_marked = one.is_marked or one.is_reasoning

    def _resume(self, used: dict[ReplicaKey, int]) -> list[AgentProgram]:
        """Resume the most urgent programs that fit together; of these, place the largest first."""
        rules = self.rules
        share = max(0.0, rules.pause_threshold - rules.resume_hysteresis)
        rooms = {key: int(capacity * share) - used[key] for key, capacity in self.capacity.items()}
        rooms = {key: room for key, room in rooms.items() if room > rules.buffer_tokens}
        left = sum(rooms.values())
        paused = sorted((one for one in self.programs.values() if one.is_paused), key=self._urgency)
        chosen: list[AgentProgram] = []
        for one in paused:
            if self.needed(one) <= left:
                chosen.append(one)
                left -= self.needed(one)
        smallest = min(map(self.needed, chosen), default=0)
        resumed: list[AgentProgram] = []
        for one in sorted(chosen, key=lambda one: -one.tokens):
            if not rooms:
                break
            roomiest = max(rooms, key=rooms.__getitem__)
            need = self.needed(one)
            if rooms[roomiest] < smallest:
                break
            if rooms[roomiest] < need:
                continue
            self.go_on(one, roomiest)
            rooms[roomiest] -= need
            used[roomiest] += need
            resumed.append(one)
        return resumed

    def _urgency(self, one: AgentProgram) -> tuple[int, int, int]:
        group = _FIRST_TURN if one.turn <= 1 else _CALLING if one.is_waiting else _OTHERS
        return group, one.tokens, one.pause_order

    def _passage(self, program: AgentProgram, now: float, *, was_paused: bool) -> Passage:
        jump = self.rules.resume_priority_boost_s if was_paused else 0.0
        if now < program.soft_until:
            jump += self.rules.soft_demote_priority_jump_s
        return Passage(program.program_id, program.replica, jump)
