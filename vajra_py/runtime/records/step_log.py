"""Step log: one record of each plan that came back, and one of a run of decode steps that repeat it.

An `Observer` gets steps expanded; a log that keeps every step of a long simulation cannot afford that. What is kept of a
step is packed once, for everyone who keeps some of it (`share`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from struct import Struct
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vajra_py.contract.observer import EndReason, Observer
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.requests.running_set import PoolChanges
from vajra_py.runtime.step.plan import StepPlan

RECORDS_PER_BATCH = 1_024
"""Records that are handed on together."""
CAME_BACK, ONLY_PREEMPTED, NEVER_CAME_BACK = 0, 1, 2
"""A record's `status`."""
LISTS = {
    "growth": ("growth",),
    "joined": ("joined", "joined_order", "joined_computed"),
    "left": ("left",),
    "chunks": ("chunk", "chunk_tokens", "chunk_computed", "chunk_kind", "chunk_after"),
    "preempted": ("preempted", "preempted_mode"),
    "finished": ("finished", "finished_reason"),
}
"""Lists of a record: the columns of each, one number an entry. Requests are named by index; `chunk_after`: how many decodes stand
before it; -1: before it if it is none of the first `decodes_at` chunks, else none of them."""
FIELDS = (
    *("replicaset", "replica_id", "step", "formed", "kept", "num_decodes", "decodes_at", "free_blocks", "num_waiting"),
    *("num_running", "num_preempted_before", "batch_decodes", "num_prefills", "prefill_tokens", "context_tokens"),
    *("status", "num_steps", "num_waiting_after", *(f"num_{name}" for name in LISTS)),
)
"""Whole numbers of a record: the plan's, of its shape (from `batch_decodes` on), of what came of it, and entries of each list.
`kept`: the tick at which it was taken;
`decodes_at`: how many chunks stand before the pool's decodes; `num_waiting_after`: of the steps of a run after the first."""
_ROW = Struct(f"<{len(FIELDS)}q")

Numbers: TypeAlias = Sequence[int]


class Batch(NamedTuple):
    """Records that are handed on together; rows, ends and lists as 64-bit numbers."""

    replicasets: Sequence[str]
    rows: bytes
    ends: bytes
    """Ticks at which the steps of the records ended; where one never came back, at which it was formed."""
    notes: Sequence[str]
    """One a record; empty when no record has any."""
    ids: Sequence[str]
    """Of the requests that arrived."""
    arrived: bytes
    """Index of each, and the tick at which it arrived."""
    lists: Mapping[str, bytes]

    def columns(self) -> dict[str, NDArray[np.int64]]:
        """Each of `FIELDS`, a number a record."""
        rows = np.frombuffer(self.rows, dtype=np.int64).reshape(-1, len(FIELDS))
        return {name: rows[:, position] for position, name in enumerate(FIELDS)}


class PlanRepeats(NamedTuple):
    """When a plan and repetitions of it came back."""

    ended_at: Numbers
    """Ticks."""
    growth: Numbers
    """Members that took a block in each step after the first; it repeats where there are more steps."""


class StepLog(Observer):
    """Packs a record of each plan that came back; a subclass keeps them (`_keep`) and may list more of each (`_lists_of`)."""

    wants_step_ends = False
    wants_plans = True
    """Whether it is to be told of any plan; read once, before the run."""

    def __init__(self) -> None:
        self._keepers: list[Callable[[Batch], None]] = [self._keep]
        self._replicasets: dict[str, int] = {}
        self._rows = bytearray()
        self._ends = array("q")
        self._notes: list[str] = []
        self._ids: list[str] = []
        self._arrived = array("q")
        self._tick = 0
        """Of what was taken last."""
        self._lists = {name: array("q") for name in LISTS}
        self._batch_bytes = RECORDS_PER_BATCH * _ROW.size
        """Size of the rows of a full batch."""

    def share(self, keeper: Callable[[Batch], None]) -> None:
        """Hand all records to this one too."""
        self._keepers.append(keeper)

    def hand_on(self) -> None:
        """Hand on what was recorded so far."""
        if not self._rows and not self._ids:
            return
        notes = self._notes if any(self._notes) else []
        lists = {name: numbers.tobytes() for name, numbers in self._lists.items()}
        names, arrived = list(self._replicasets), self._arrived.tobytes()
        batch = Batch(names, bytes(self._rows), self._ends.tobytes(), notes, self._ids, arrived, lists)
        self._notes, self._ids = [], []
        for numbers in (self._rows, self._ends, self._arrived, *self._lists.values()):
            del numbers[:]
        for keep in self._keepers:
            keep(batch)

    def on_plan(self, replicaset: str, plan: StepPlan, changes: PoolChanges) -> None:
        """A plan was made; without entries, nothing comes back from it."""

    def on_plan_end(
        self, replicaset: str, plan: StepPlan, finished: Sequence[tuple[Request, EndReason]], now: int
    ) -> None:
        """A plan's step came back."""
        self._ends.append(now)
        self._tick = max(self._tick, now)
        self._record(replicaset, plan, CAME_BACK, 1, plan.num_waiting, 0, *self._lists_of(plan, finished))

    def on_plan_repeats(
        self, replicaset: str, plan: StepPlan, repeats: PlanRepeats, following: StepPlan, now: int
    ) -> None:
        """A plan of decodes and repetitions of it came back, which is applied now; `following`, one more, is in flight."""
        ended_at, growth = repeats
        self._ends.extend(ended_at)
        self._lists["growth"].extend(growth)
        self._tick = max(self._tick, now)
        lists = self._lists_of(plan, ())
        self._record(replicaset, plan, CAME_BACK, len(ended_at), following.num_waiting, len(growth), *lists)

    def _keep(self, batch: Batch) -> None:
        """Keep these records, whatever else becomes of them."""

    def _lists_of(self, plan: StepPlan, finished: Sequence[tuple[Request, EndReason]]) -> Numbers:
        """How many entries the record has in each of `LISTS` after the first; who wants them appends them here."""
        return 0, 0, 0, len(plan.preempted), len(finished)

    def _record(self, replicaset: str, plan: StepPlan, *outcome: int) -> None:
        """Pack a record; `outcome`: `FIELDS` from the status on."""
        code = self._replicasets.get(replicaset)
        if code is None:
            code = self._replicasets[replicaset] = len(self._replicasets)
        shape = plan.shape
        self._rows += _ROW.pack(
            code,
            plan.replica_id,
            plan.step_index,
            plan.formed_at,
            self._tick,
            plan.num_pool_decodes,
            plan.pool_position,
            plan.free_blocks,
            plan.num_waiting,
            plan.num_running,
            plan.num_preempted_before,
            shape.num_decodes,
            shape.num_prefills,
            shape.prefill_tokens,
            shape.decode_context_tokens,
            *outcome,
        )
        if len(self._rows) >= self._batch_bytes:
            self.hand_on()
