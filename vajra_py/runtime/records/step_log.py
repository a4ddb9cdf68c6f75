"""Step log: one record of each plan that came back, and one of a run of decode steps that repeat it.

An `Observer` gets steps expanded; a log that keeps every step of a long simulation cannot afford that. What is kept of a
step is packed once, for all records of it (`share`).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from struct import Struct
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vajra_py.contract.observer import EndReason, Observer
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.requests.running_set import PoolChanges
from vajra_py.runtime.step.plan import StepPlan

RECORDS_PER_BATCH = 1_024
"""Number of records that are passed on together."""
CAME_BACK, ONLY_PREEMPTED, NEVER_CAME_BACK = 0, 1, 2
"""Values of a record's `status`."""
LISTS = {
    "growth": ("growth",),
    "joined": ("joined", "joined_order", "joined_computed"),
    "left": ("left",),
    "chunks": ("chunk", "chunk_tokens", "chunk_computed", "chunk_kind", "chunk_after"),
    "preempted": ("preempted", "preempted_mode"),
    "finished": ("finished", "finished_reason"),
}
"""Lists of a record: the columns of each, one number an entry. Requests are named by index; `chunk_after`: how many decodes come
before it; -1: before it if it is none of the first `decodes_at` chunks, else none of them."""
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
"""Whole numbers of a record: the plan's, of its features (from `batch_decodes` on), of what came of it, and entries of each list.
`kept`: the tick at which it was taken;
`decodes_at`: number of chunks before the pool's decodes; `num_waiting_after`: of the steps of a run after the first."""
_PACKED_AT_ONCE = 64
"""Number of records packed together, in half the time of one by one; few, so that their plans are still in the cache."""
_ROW = Struct(f"<{len(FIELDS)}q")
ROW_BYTES = _ROW.size
_TICK = Struct("<q")
NO_LISTS = (0,) * (len(LISTS) - 1)
"""Lengths of the lists after the first of a record without any entries in them."""

Numbers: TypeAlias = Sequence[int]
_Finished: TypeAlias = Sequence[tuple[Request, EndReason]]
_Taken: TypeAlias = "tuple[str, StepPlan, int, int, Any, array[int] | None, int, _Finished]"
"""(replicaset, plan, status, tick of taking, tick of its end, None, waiting, who ended), or of a run its ticks and growth."""


class Batch(NamedTuple):
    """Records that are passed on together; rows, ends and lists as 64-bit numbers."""

    replicasets: Sequence[str]
    rows: bytes
    ends: bytes
    """End ticks of the records' steps; for one that never came back, the tick at which it was formed."""
    notes: Sequence[str]
    """Notes, one for each record; empty when no record has any."""
    ids: Sequence[str]
    """Ids of the requests that arrived."""
    arrived: bytes
    """Index and arrival tick of each."""
    lists: Mapping[str, bytes]

    def columns(self) -> dict[str, NDArray[np.int64]]:
        """Return the columns of the rows, one for each of `FIELDS`."""
        rows = np.frombuffer(self.rows, dtype=np.int64).reshape(-1, len(FIELDS))
        return {name: rows[:, position] for position, name in enumerate(FIELDS)}


class PlanRepeats(NamedTuple):
    """End times of a plan and its repetitions."""

    ended_at: array[int]
    """Ticks."""
    growth: array[int]
    """Members that took a block in each step after the first; it repeats where there are more steps."""


class StepLog(Observer):
    """Packs a record of each plan that came back; a subclass keeps them (`_keep`) and may count and list more of each (`_count_lists`)."""

    wants_step_ends = False
    wants_plans = True
    """True if plans are reported to it; read once, before the run."""

    def __init__(self, records_per_batch: int | None = None) -> None:
        """`records_per_batch`: number of records passed on together; None: `RECORDS_PER_BATCH`."""
        self._keepers: list[Callable[[Batch], None]] = [self._keep]
        self._replicasets: dict[str, int] = {}
        self._batch_size = records_per_batch or RECORDS_PER_BATCH
        self._num_packed = 0
        self._taken: list[_Taken] = []
        """Records of this batch that are not packed yet."""
        self._parts: dict[str, list[bytes]] = {name: [] for name in ("rows", "ends", *LISTS)}
        """Packed parts; joined when they are passed on, since a growing buffer is copied again and again."""
        self._notes: dict[int, str] = {}
        """Notes by record of this batch."""
        self._ids: list[str] = []
        self._arrived: list[int] = []
        self._tick = 0
        """Tick of the latest record."""

    def share(self, keeper: Callable[[Batch], None]) -> None:
        """Pass all records to this log too."""
        self._keepers.append(keeper)

    def hand_on(self) -> None:
        """Pass on the records so far."""
        self._pack()
        if not self._num_packed and not self._ids:
            return
        notes = [self._notes.get(record, "") for record in range(self._num_packed)] if self._notes else []
        packed = {name: b"".join(parts) for name, parts in self._parts.items()}
        rows, ends, arrived = packed.pop("rows"), packed.pop("ends"), array("q", self._arrived).tobytes()
        batch = Batch(list(self._replicasets), rows, ends, notes, self._ids, arrived, packed)
        self._num_packed, self._notes, self._ids = 0, {}, []
        self._arrived.clear()
        for parts in self._parts.values():
            parts.clear()
        for keep in self._keepers:
            keep(batch)

    def _pack(self) -> None:
        """Pack the records that were taken."""
        rows: list[bytes] = []
        ends: list[bytes | array[int]] = []
        growths: list[array[int]] = []
        lists: dict[str, list[int]] = {name: [] for name in LISTS if name != "growth"}
        codes, count_lists, pack = self._replicasets, self._count_lists, _ROW.pack
        for replicaset, plan, status, tick, ended, growth, num_waiting, finished in self._taken:
            code = codes.get(replicaset)
            if code is None:
                code = codes[replicaset] = len(codes)
            if plan.notes:
                self._notes[self._num_packed + len(rows)] = json.dumps(plan.notes, separators=(",", ":"))
            num_steps, num_growths = 1, 0
            if growth is None:
                ends.append(_TICK.pack(ended))
            else:
                ends.append(ended)
                growths.append(growth)
                num_steps, num_growths = len(ended), len(growth)
            features = plan.features
            rows.append(
                pack(
                    code,
                    plan.replica_id,
                    plan.step_index,
                    plan.formed_at,
                    tick,
                    plan.num_pool_decodes,
                    plan.pool_position,
                    plan.free_blocks,
                    plan.num_waiting,
                    plan.num_running,
                    plan.num_preempted_before,
                    features.num_decodes,
                    features.num_decodes + features.num_draft_tokens,
                    features.decode_context_tokens,
                    features.num_prefills,
                    features.prefill_tokens,
                    status,
                    num_steps,
                    num_waiting,
                    num_growths,
                    *count_lists(plan, finished, lists),
                )
            )
        self._num_packed += len(rows)
        self._taken.clear()
        parts = self._parts
        for name, own in (("rows", rows), ("ends", ends), ("growth", growths)):
            parts[name].append(b"".join(own))
        for name, numbers in lists.items():
            if numbers:
                parts[name].append(array("q", numbers).tobytes())

    def on_plan(self, replicaset: str, plan: StepPlan, changes: PoolChanges) -> None:
        """Note a new plan; one without entries only preempts, and nothing comes back from it."""

    def on_plan_end(
        self, replicaset: str, plan: StepPlan, finished: Sequence[tuple[Request, EndReason]], now: int
    ) -> None:
        """Record a plan whose step came back."""
        self._take(replicaset, plan, CAME_BACK, now, finished)

    def on_plan_repeats(
        self, replicaset: str, plan: StepPlan, repeats: PlanRepeats, following: StepPlan, now: int
    ) -> None:
        """Record a plan of decodes and its repetitions, which are applied now; `following`, one more, is in flight."""
        if now > self._tick:
            self._tick = now
        self._taken.append((replicaset, plan, CAME_BACK, self._tick, *repeats, following.num_waiting, ()))
        if len(self._taken) >= _PACKED_AT_ONCE:
            self._pack_or_hand_on()

    def _take(
        self, replicaset: str, plan: StepPlan, status: int, ended: int, finished: Sequence[tuple[Request, EndReason]]
    ) -> None:
        if ended > self._tick:
            self._tick = ended
        self._taken.append((replicaset, plan, status, self._tick, ended, None, plan.num_waiting, finished))
        if len(self._taken) >= _PACKED_AT_ONCE:
            self._pack_or_hand_on()

    def _keep(self, batch: Batch) -> None:
        """Keep these records."""

    def _pack_or_hand_on(self) -> None:
        self._pack()
        if self._num_packed >= self._batch_size:
            self.hand_on()

    def _count_lists(self, plan: StepPlan, finished: _Finished, lists: Mapping[str, list[int]]) -> Numbers:
        """Return a record's number of entries in each of `LISTS` after the first; a subclass may append them to `lists`."""
        return (0, 0, 0, len(plan.preempted), len(finished)) if plan.preempted or finished else NO_LISTS
