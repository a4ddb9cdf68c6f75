"""ThunderAgent's router: programs keep their replicas, and whole programs are paused if not all contexts fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vajra_policies.routers.thunderagent_programs import AgentProgram, ThunderAgentConfig
from vajra_policies.routers.thunderagent_rules import Passage, ThunderTable
from vajra_policies.routing import PeriodicWakeUps, has_room, load_in, those_up
from vajra_py.contract import (
    EmitFigure,
    EndReason,
    Layer,
    PolicyContext,
    PolicySpec,
    ProgramView,
    QueueView,
    ReplicaId,
    ReplicaLoadView,
    RequestView,
    WakeUps,
)

_TICK = "tick"
_UNPLACED = -1


class ThunderAgent:
    """When a program sends its first call, binds the program to the replica with the fewest tokens, and keeps it there.

    The tokens of a program are those of its context, also while a tool runs. If the tokens of a replica's programs
    exceed `pause_threshold` of its memory, programs whose tools are running are paused, the smallest first; if that is
    not enough, the other programs are paused when their live calls end. The next call of a paused program waits in the
    shared queue until the program is resumed. For a program with several concurrent calls, all their contexts count.
    Requests without a program go to the replica with the fewest tokens. A call may be put ahead of other calls, or
    behind them, by a number of seconds, which is emitted as `priority_jump_s`. A replica takes calls from the shared
    queue in the order of the time at which they were allowed to run, less these seconds.

    Left out: parts of the paper that Dynamo's router lacks.

    Source: ThunderAgent (arXiv:2602.13692) as in Dynamo 1.6 (`dynamo.thunderagent_router`).
    """

    def __init__(self, config: ThunderAgentConfig, block_size: int, wake: WakeUps, emit: EmitFigure) -> None:
        self._block_size = block_size
        self._timeout_s = config.resume_timeout_s
        self._load = load_in("tokens")
        self._wake = wake
        self._emit = emit
        self._table = ThunderTable(config, {})
        self._replicas: dict[ReplicaId, ReplicaLoadView] = {}
        """Latest view of each replica."""
        self._calls: dict[str, dict[RequestView, None]] = {}
        """Live calls of each program that were allowed to run."""
        self._held: dict[str, dict[RequestView, None]] = {}
        """Calls of each paused program."""
        self._ready: dict[ReplicaId, dict[RequestView, float]] = {}
        """Calls in the shared queue that each replica may take, with the time by which they are ordered. Key -1: calls
        that any replica may take.
        """
        self._ticks = PeriodicWakeUps(wake, config.scheduler_interval_s, _TICK)

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Return the replica of the request's program; None while the program is paused."""
        self._replicas.update((one.replica_id, one) for one in replicas)
        self._look_at_replicas()
        if request.program is None:
            return self._least_loaded(request, replicas)
        self._ticks.start(now)
        name = request.program.program_id
        # If the call is already recorded, it was placed before, and is placed again after a failure.
        if request in self._calls.get(name, ()) or request in self._held.get(name, ()):
            program = self._table.programs.get(name)
            return self._at(None if program is None else program.replica, request, replicas)
        passage = self._table.before_call(name, self._num_tokens(name) + request.num_known_tokens, now)
        if passage is None:
            self._held.setdefault(name, {})[request] = None
            self._wake.at(now + self._timeout_s, name)
            return None
        self._calls.setdefault(name, {})[request] = None
        self._note(request, passage, now)
        return self._at(passage.replica, request, replicas)

    def pull(self, replica: ReplicaLoadView, queued: QueueView, now: float) -> Iterable[str]:
        """Return the ids of the queued requests that this replica may take, ordered by time; none if the replica is
        full.
        """
        if not has_room(replica):
            return ()
        ready = [*self._ready.get(replica.replica_id, {}).items(), *self._ready.get(_UNPLACED, {}).items()]
        return [request.request_id for request, _ in sorted(ready, key=lambda one: (one[1], one[0].index))]

    def on_wake(self, key: str, now: float) -> None:
        """Apply the rules to all programs or, if `key` is a program, resume this program, which was paused for too
        long.
        """
        self._look_at_replicas()
        if key != _TICK:
            passage = self._table.force(key, now)
            self._let_go_on([] if passage is None else [passage], now)
            return
        for name, calls in self._calls.items():
            program = self._table.programs.get(name)
            if program is not None and calls:
                program.tokens = self._num_tokens(name)
        self._let_go_on(self._table.tick(now), now)
        self._ticks.woken(now, goes_on=bool(self._table.programs))

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Stop offering the request to replicas, if it was in the shared queue."""
        self._forget_ready(request)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """End a program's turn when the last of its live calls has ended."""
        for request in requests:
            self._forget_ready(request)
            if request.program is None:
                continue
            name = request.program.program_id
            held = self._held.get(name, {})
            if request in held:
                self._drop_held(name, request, held)
                continue
            calls = self._calls.get(name, {})
            if calls.pop(request, self) is self or calls:
                continue
            del self._calls[name]
            program = self._table.programs.get(name)
            has_result = request.end_reason in (EndReason.STOP, EndReason.LENGTH)
            if program is not None:
                self._table.after_call(name, request.num_known_tokens if has_result else program.tokens, now)

    def on_program_end(self, program: ProgramView, now: float) -> None:
        """Forget a program that has ended."""
        self._table.end_program(program.program_id)

    # Replicas and their programs

    def _look_at_replicas(self) -> None:
        """Add the capacities, in tokens, of replicas that came up, and remove replicas that are no longer up."""
        capacity = self._table.capacity
        for replica in self._replicas.values():
            if replica.is_up and replica.replica_id not in capacity:
                capacity[replica.replica_id] = replica.num_blocks * self._block_size
            elif not replica.is_up and replica.replica_id in capacity:
                self._table.lose_replica(replica.replica_id)
                self._ready.setdefault(_UNPLACED, {}).update(self._ready.pop(replica.replica_id, {}))

    def _at(self, place: object, request: RequestView, replicas: Sequence[ReplicaLoadView]) -> ReplicaId | None:
        """Return `place` if it is a replica that is up, else the least loaded replica; None if none is up."""
        found = (one.replica_id for one in replicas if one.is_up and one.replica_id == place)
        replica_id = next(found, None)
        return self._least_loaded(request, replicas) if replica_id is None else replica_id

    def _least_loaded(self, request: RequestView, replicas: Sequence[ReplicaLoadView]) -> ReplicaId | None:
        best = min(those_up(replicas), key=lambda one: (self._load(one), one.replica_id), default=None)
        if best is None:
            self._ready.setdefault(_UNPLACED, {})[request] = request.arrived_at
            return None
        return best.replica_id

    def _num_tokens(self, name: str) -> int:
        """Return the total number of known tokens of the program's calls that were allowed to run."""
        return sum(request.num_known_tokens for request in self._calls.get(name, ()))

    # Held calls

    def _let_go_on(self, passages: Iterable[Passage], now: float) -> None:
        for passage in passages:
            name = passage.program_id
            self._wake.cancel(name)
            for request in self._held.pop(name, {}):
                self._calls.setdefault(name, {})[request] = None
                self._note(request, passage, now)
                place = passage.replica if isinstance(passage.replica, int) else _UNPLACED
                self._ready.setdefault(place, {})[request] = now - passage.priority_jump_s

    def _drop_held(self, name: str, request: RequestView, held: dict[RequestView, None]) -> None:
        """Forget a held call that was withdrawn, as if it had not been sent."""
        del held[request]
        program: AgentProgram | None = self._table.programs.get(name)
        if program is not None:
            program.turn -= 1
            program.is_waiting = bool(held)
        if not held:
            del self._held[name]
            self._wake.cancel(name)

    def _forget_ready(self, request: RequestView) -> None:
        for ready in self._ready.values():
            ready.pop(request, None)

    def _note(self, request: RequestView, passage: Passage, now: float) -> None:
        if passage.priority_jump_s:
            self._emit("priority_jump_s", passage.priority_jump_s, now, request)


def _build(config: ThunderAgentConfig, context: PolicyContext) -> ThunderAgent:
    return ThunderAgent(config, context.limits.block_size, context.wake, context.emit)


SPEC = PolicySpec(
    name="thunderagent",
    layer=Layer.REPLICASET_SCHEDULER,
    config=ThunderAgentConfig,
    build=_build,
    summary=(
        "Programs keep their replica; whole programs are paused and resumed, depending on the tokens of their contexts."
    ),
    source="ThunderAgent (arXiv:2602.13692) as in Dynamo 1.6",
    advice=(
        "Use it for agents with tools whose contexts together exceed the memory: whole programs wait. Not for single "
        "requests."
    ),
)
