"""Record of changes during a run: swapped policies, lost and restored replicas, replicasets that went out of service,
and cache resets.

Each change is a plain mapping for the manifest, in order of time; the timeline shows changes as marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vajra_py.contract import ReplicaId, RequestView
from vajra_py.contract.observer import Observer, PolicySwap


class Changes(Observer):
    """Collects changes; `rows` is empty for a run without any."""

    wants_step_ends = False

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_policy_swapped(self, swap: PolicySwap, now: float) -> None:
        """Add a row."""
        self._note(
            now,
            swap.replicaset,
            "policy",
            layer=swap.layer.value,
            was={"policy": swap.old_policy, "params": dict(swap.old_params)},
            now={"policy": swap.policy, "params": dict(swap.params)},
            num_requeued=swap.num_requeued,
        )

    def on_out_of_service(self, replicaset: str, detail: str, now: float) -> None:
        """Add a row."""
        self._note(now, replicaset, "out of service", detail=detail)

    def on_replica_lost(self, replicaset: str, replica_id: ReplicaId, detail: str, now: float) -> None:
        """Add a row."""
        self._note(now, replicaset, "lost", replica_id=replica_id, detail=detail)

    def on_replica_restored(self, replicaset: str, replica_id: ReplicaId, now: float) -> None:
        """Add a row."""
        self._note(now, replicaset, "restored", replica_id=replica_id)

    def on_cache_reset(
        self, replicaset: str, replica_id: ReplicaId, requests: Sequence[RequestView], now: float
    ) -> None:
        """Add a row."""
        self._note(now, replicaset, "cache reset", replica_id=replica_id, num_requeued=len(requests))

    def facts(self) -> dict[str, Any]:
        """Return the manifest's entry for changes; empty if nothing changed."""
        return {"changes": self.rows} if self.rows else {}

    def _note(self, at_s: float, replicaset: str, what: str, **more: Any) -> None:
        self.rows.append({"at_s": at_s, "replicaset": replicaset, "what": what, **more})
