"""Copies between the device and the host tier of an engine's replicas, and the messages to their workers.

The blocks of a tier come after the host blocks for swapping, in the same memory. Workers copy concurrently with their
steps, and a step that overwrites blocks of a copy in flight waits for the copy (`kv_copier`):
    - A copy to the host is submitted before the step that overwrites the copy's blocks.
    - A copy to the device is submitted in the turn of the loop in which it begins. If its replica forms a step in this
      turn, the copy is submitted just before that step. The step's swapping may still read the blocks that the copy
      overwrites, so the worker swaps before it copies. No step uses these blocks before the copy has ended. If the
      copy is cancelled, a later step may reuse the blocks; that step waits for the copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from vajra_py.engine.kv_copy import KvMove
from vajra_py.engine.replica import EngineReplica
from vajra_py.engine.worker import KvMoved, ReplicaKey
from vajra_py.errors import Problem
from vajra_py.runtime.kv import BlockCopy, CopyDirection
from vajra_py.runtime.records.input_log import TierEnd
from vajra_py.runtime.serving.backend import TierCopy
from vajra_py.runtime.serving.replica import Replica
from vajra_py.runtime.serving.replicaset import Replicaset


class TierCopies:
    """Copies in flight, by replica and number."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[ReplicaKey, int], TierCopy[EngineReplica]] = {}
        self._to_load: list[TierCopy[EngineReplica]] = []
        """Copies to the device that have not been submitted to their workers."""

    def __len__(self) -> int:
        """Return the number of copies in flight."""
        return len(self._under_way)

    def begin(self, copy: TierCopy[EngineReplica]) -> None:
        """Start a copy: to the host at once, to the device with the next `load` or `load_rest`."""
        self._under_way[_key(copy)] = copy
        if copy.is_upward:
            self._to_load.append(copy)
        else:
            copy.replica.move_kv(_move(copy, ()))

    def cancel(self, copy: TierCopy[EngineReplica]) -> None:
        """Forget a copy. If it was already sent to its worker, later steps that use its blocks wait for it."""
        self._under_way.pop(_key(copy), None)  # absent if the copy ended in this turn of the loop

    def load(self, replica: EngineReplica, swaps: Sequence[BlockCopy]) -> bool:
        """Submit a replica's waiting copies, just before its next step; return False if there are none.

        `swaps`: the block copies for swapping with which the next step would begin. If the replica has waiting copies,
        the worker makes the `swaps` before all of these copies, and the step must not make the `swaps` again.
        """
        if not self._to_load:
            return False
        mine = [copy for copy in self._to_load if copy.replica is replica and _key(copy) in self._under_way]
        self._to_load = [copy for copy in self._to_load if copy.replica is not replica]
        for place, copy in enumerate(mine):
            replica.move_kv(_move(copy, () if place else swaps))
        return bool(mine)

    def load_rest(self) -> None:
        """Submit the other waiting copies: those of replicas without a step in this turn."""
        copies, self._to_load = self._to_load, []
        for copy in copies:
            if _key(copy) in self._under_way:
                copy.replica.move_kv(_move(copy, copy.replica.replica.memory.take_copies()))

    def moved(self, news: KvMoved, now: int) -> TierEnd | None:
        """Return the driver's input for a finished copy; None if it was cancelled."""
        copy = self._under_way.pop((news.replica, news.number), None)
        return None if copy is None else TierEnd(now, news.replica[0], news.number)


def num_host_blocks(replica: Replica) -> int:
    """Return the number of host blocks of a replica's worker: those for swapping, then those of its tier."""
    tiers = replica.memory.tiers
    return replica.limits.host_blocks + (0 if tiers is None else sum(store.num_blocks for store in tiers.stores))


def tiers_beside_moves(where: str, replicaset: Replicaset) -> list[Problem]:
    """Return a problem if a replicaset has memory tiers and also moves requests with their KV.

    Such moves take blocks between steps, and do not wait for copies of a tier.
    """
    if replicaset.tiers is None:
        return []
    message = (
        f"requests that move with their KV ({replicaset.scheduler_name}) cannot be combined with a host tier there"
    )
    advice = "Allowed: null, or one pool and a scheduler that lets requests stay; simulate both with `simulator`"
    return [Problem(f"{where}replica.memory.tiers", message, advice)]


def _key(copy: TierCopy[EngineReplica]) -> tuple[ReplicaKey, int]:
    replica = copy.replica.replica
    return (replica.replicaset, replica.replica_id), copy.number


def _move(copy: TierCopy[EngineReplica], swaps: Sequence[BlockCopy]) -> KvMove:
    first = copy.replica.replica.limits.host_blocks
    if not copy.is_upward:
        return KvMove(copy.number, [BlockCopy(one, first + slot, CopyDirection.TO_HOST) for one, slot in copy.pairs])
    loads = [BlockCopy(first + slot, one, CopyDirection.TO_DEVICE) for one, slot in copy.pairs]
    return KvMove(copy.number, loads, swaps)
