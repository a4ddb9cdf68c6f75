"""Step log: one record for each completed plan; a plan of decodes and its repetitions share one record.

Other observers get every step separately, which would take too much time in long simulations. The data of a step is
packed once and shared by all logs (`share`).
"""

from __future__ import annotations

import json
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

RECORDS_PER_BATCH = 4_096
"""Number of records that are passed on to the logs together."""
CAME_BACK, ONLY_PREEMPTED, NEVER_CAME_BACK = 0, 1, 2
"""Values of a record's `status`: its steps completed, it only preempted, or its step never completed."""
LISTS = {
    "growth": ("growth",),
    "joined": ("joined", "joined_order", "joined_computed"),
    "left": ("left",),
    "chunks": ("chunk", "chunk_tokens", "chunk_computed", "chunk_kind", "chunk_after"),
    "preempted": ("preempted", "preempted_mode"),
    "finished": ("finished", "finished_reason"),
}
"""Lists of a record, with the columns of each; an entry has one number per column. Requests are identified by index.
`chunk_after`: number of decodes before the chunk. If no chunk is between decodes, it is -1 for every chunk; the first
`decodes_at` chunks are then before all decodes, and the others after them.
"""
FIELDS = (
    *("replicaset", "replica_id", "step", "formed", "kept", "num_decodes", "decodes_at", "free_blocks", "num_waiting"),
    *(
        "num_running",
        "num_preempted_before",
        "batch_decodes",
        "decode_tokens",
        "context_tokens",
        "num_prefills",
        "prefill_tokens",
    ),
    *("status", "num_steps", "num_waiting_after", *(f"num_{name}" for name in LISTS)),
)
"""Integers of a record: those of the plan, of its features (from `batch_decodes` on), of its outcome, and the number of
entries of each list. `kept`: tick at which the record was taken; `decodes_at`: number of chunks before the pool's
decodes; `num_waiting_after`: number of waiting requests in the steps after the first, if the record has several steps.
"""
_ROW = Struct(f"<{len(FIELDS)}q")
ROW_BYTES = _ROW.size
_pack = _ROW.pack
NO_LISTS = (0,) * (len(LISTS) - 1)
"""Number of entries in each of `LISTS` after the first list, for a record without such entries."""

Numbers: TypeAlias = Sequence[int]
_Finished: TypeAlias = Sequence[tuple[Request, EndReason]]


class Batch(NamedTuple):
    """Records that are passed on together; rows, ends and lists are packed 64-bit numbers."""

    replicasets: Sequence[str]
    rows: bytes
    ends: bytes
    """End ticks of the records' steps; for a step that never completed, the tick at which it was formed."""
    notes: Sequence[str]
    """Notes, one for each record; empty if no record has notes."""
    ids: Sequence[str]
    """Ids of the requests that arrived."""
    arrived: bytes
    """Index and arrival tick of each of these requests."""
    lists: Mapping[str, bytes]

    def columns(self) -> dict[str, NDArray[np.int64]]:
        """Return the columns of the rows, one for each of `FIELDS`."""
        rows = np.frombuffer(self.rows, dtype=np.int64).reshape(-1, len(FIELDS))
        return {name: rows[:, position] for position, name in enumerate(FIELDS)}


class PlanRepeats(NamedTuple):
    """End times of a plan and its repetitions."""

    ended_at: array[int]
    """Tick at which each step ended."""
    growth: array[int]
    """Number of decodes that took a block in each step after the first. If there are more such steps than numbers, the
    numbers repeat cyclically.
    """


class StepLog(Observer):
    """Packs a record of each completed plan; a subclass stores the records (`_keep`) and may add lists
    (`_count_lists`).
    """

    wants_step_ends = False
    wants_plans = True
    """True if plans are reported to this observer; read once, before the run."""

    def __init__(self, records_per_batch: int | None = None) -> None:
        """Create an empty log. `records_per_batch`: number of records passed on together; None: `RECORDS_PER_BATCH`."""
        self._keepers: list[Callable[[Batch], None]] = [self._keep]
        self._replicasets: dict[str, int] = {}
        self._batch_size = records_per_batch or RECORDS_PER_BATCH
        self._rows: list[bytes] = []
        """Packed records; joined only when they are passed on, because a growing buffer is copied again and again."""
        self._ends = array("q")
        self._growth = array("q")
        self._lists: dict[str, list[int]] = {name: [] for name in LISTS if name != "growth"}
        self._notes: dict[int, str] = {}
        """Notes of the batch being collected, by position of the record."""
        self._ids: list[str] = []
        self._arrived: list[int] = []
        self._tick = 0
        """Tick of the latest record or arrival."""

    def share(self, keeper: Callable[[Batch], None]) -> None:
        """Pass all batches of records to `keeper` too."""
        self._keepers.append(keeper)

    def hand_on(self) -> None:
        """Pass the records collected so far on to the logs."""
        if not self._rows and not self._ids:
            return
        notes = [self._notes.get(record, "") for record in range(len(self._rows))] if self._notes else []
        lists = {name: array("q", numbers).tobytes() for name, numbers in self._lists.items()}
        batch = Batch(
            replicasets=list(self._replicasets),
            rows=b"".join(self._rows),
            ends=self._ends.tobytes(),
            notes=notes,
            ids=self._ids,
            arrived=array("q", self._arrived).tobytes(),
            lists={"growth": self._growth.tobytes(), **lists},
        )
        self._notes, self._ids = {}, []
        self._rows.clear()
        self._arrived.clear()
        for numbers in self._lists.values():
            numbers.clear()
        self._ends, self._growth = array("q"), array("q")
        for keep in self._keepers:
            keep(batch)

    def on_plan(self, replicaset: str, plan: StepPlan, changes: PoolChanges) -> None:
        """Do nothing; a subclass may note the new plan. A plan without entries only preempts and never completes."""

    def on_plan_end(
        self, replicaset: str, plan: StepPlan, finished: Sequence[tuple[Request, EndReason]], now: int
    ) -> None:
        """Record a plan whose step has completed."""
        self._take(replicaset, plan, CAME_BACK, now, finished)

    def on_plan_repeats(
        self, replicaset: str, plan: StepPlan, repeats: PlanRepeats, num_waiting: int, now: int
    ) -> None:
        """Record a plan of decodes and its repetitions, which are applied now; from now on, `plan` represents one more
        repetition, which is in flight.

        `num_waiting`: number of waiting requests during the repetitions.
        """
        if now > self._tick:
            self._tick = now
        ended_at, growth = repeats
        self._ends += ended_at
        self._growth += growth
        self._record(replicaset, plan, CAME_BACK, (), num_waiting, (len(ended_at), len(growth)))

    def _take(self, replicaset: str, plan: StepPlan, status: int, ended: int, finished: _Finished) -> None:
        """Record one step, which ended at tick `ended`."""
        if ended > self._tick:
            self._tick = ended
        self._ends.append(ended)
        self._record(replicaset, plan, status, finished, plan.num_waiting)

    def _record(
        self,
        replicaset: str,
        plan: StepPlan,
        status: int,
        finished: _Finished,
        num_waiting: int,
        counts: tuple[int, int] = (1, 0),
    ) -> None:
        """Pack a record. `counts`: number of steps (their ends have been noted already), and number of entries in
        `growth`.
        """
        code = self._replicasets.get(replicaset)
        if code is None:
            code = self._replicasets[replicaset] = len(self._replicasets)
        if plan.notes:
            self._notes[len(self._rows)] = json.dumps(plan.notes, separators=(",", ":"))
        features, rows = plan.features, self._rows
        num_decodes, (num_steps, num_growths) = features.num_decodes, counts
        num_joined, num_left, num_chunks, num_preempted, num_finished = self._count_lists(plan, finished, self._lists)
        row = _pack(
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
            num_decodes,
            num_decodes + features.num_draft_tokens,
            features.decode_context_tokens,
            features.num_prefills,
            features.prefill_tokens,
            status,
            num_steps,
            num_waiting,
            num_growths,
            num_joined,
            num_left,
            num_chunks,
            num_preempted,
            num_finished,
        )
        rows.append(row)
        if len(rows) >= self._batch_size:
            self.hand_on()

    def _keep(self, batch: Batch) -> None:
        """Store these records; does nothing here."""

    def _count_lists(self, plan: StepPlan, finished: _Finished, lists: Mapping[str, list[int]]) -> Numbers:
        """Return a record's number of entries in each of `LISTS` after the first list; a subclass may append the
        entries to `lists`.
        """
        return (0, 0, 0, len(plan.preempted), len(finished)) if plan.preempted or finished else NO_LISTS
