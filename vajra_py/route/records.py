"""Log of a router's decisions: one JSON line for each placement, sending and end of a request.

`{"at": seconds, "request_id": …, "what": "placed" | "sent" | "again" | "handed_off" | "ended", …}`, in the order of the
decisions. The same events give the same bytes.
"""

from __future__ import annotations

from vajra_py.contract import RequestView
from vajra_py.contract.observer import EndReason, Observer
from vajra_py.contract.requests import ReplicaId
from vajra_py.runtime.records.json_lines import JsonLinesFile

PLACEMENTS_FILE = "placements.jsonl.gz"


class PlacementLog(JsonLinesFile, Observer):
    """Writes `placements.jsonl.gz` during a run."""

    wants_step_ends = False

    def _write(self, request: RequestView, what: str, replica_id: ReplicaId | None, now: float, **more: object) -> None:
        row = {"at": now, "request_id": request.request_id, "what": what, "replicaset": request.replicaset}
        self.write({**row, "replica_id": replica_id, **more})

    def on_assigned(self, request: RequestView, replica_id: ReplicaId | None, now: float) -> None:
        """Write the assigned server; null means the shared queue."""
        self._write(request, "placed", replica_id, now)

    def on_admitted(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Write the server to which the request was sent."""
        self._write(request, "sent", replica_id, now, num_cached_tokens=request.num_computed_tokens)

    def on_requeued(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Write the server from which the request was taken back."""
        self._write(request, "again", replica_id, now)

    def on_held(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Write the server that computed the prompt."""
        self._write(request, "handed_off", replica_id, now)

    def on_ended(self, request: RequestView, reason: EndReason, detail: str, now: float) -> None:
        """Write the reason why the request ended."""
        self._write(request, "ended", None, now, reason=reason.value, detail=detail)
