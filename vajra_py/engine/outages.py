"""Track outages of replicasets: periods in which no request can be served from its prompt to its end.

In an outage of a replicaset without pools, no replica is up. With pools, replicas may be up, but only for prefill or
only for decoding.
"""

from __future__ import annotations

from collections.abc import Mapping

from vajra_py.engine.replica import EngineReplica
from vajra_py.engine.worker import ReplicaKey
from vajra_py.runtime.serving.controller import Controller
from vajra_py.runtime.support.clock import NEVER, to_ticks


class Outages:
    """Lost replicas of an engine that are being restarted, and replicasets whose requests wait for them."""

    def __init__(self, controller: Controller, replicas: Mapping[ReplicaKey, EngineReplica], wait_s: float) -> None:
        """`wait_s`: longest time, in seconds, that requests wait in an outage for replicas that are being restarted."""
        self._controller = controller
        self._replicas = replicas
        self._wait_ticks = to_ticks(wait_s)
        self.restarting: set[ReplicaKey] = set()
        self._ends: dict[str, int] = {}
        """By replicaset with an outage, the tick until which its requests wait."""

    def could_serve(self, replicaset: str) -> bool:
        """Return True if the replicas that are up or being restarted could serve a request to its end."""
        restarting = [replica_id for name, replica_id in self.restarting if name == replicaset]
        return self._controller.replicasets[replicaset].can_serve_with([*self._up(replicaset), *restarting])

    def begin(self, replicaset: str, now: int) -> None:
        """Begin an outage if the replicas that are up cannot serve the replicaset's requests to their end.

        Requests wait up to a time limit for replicas that are being restarted. If these could not end the outage, the
        limit is `now`.
        """
        if not self._controller.replicasets[replicaset].can_serve_with(self._up(replicaset)):
            until = now + (self._wait_ticks if self.could_serve(replicaset) else 0)
            self._ends[replicaset] = min(until, self._ends.get(replicaset, NEVER))

    def restored(self, replica: ReplicaKey) -> None:
        """Record that a replica is up again; end its replicaset's outage if requests can now be served to their end."""
        self.restarting.discard(replica)
        name = replica[0]
        if self._controller.replicasets[name].can_serve_with(self._up(name)):
            self._ends.pop(name, None)

    def given_up(self, replica: ReplicaKey) -> bool:
        """Record that a replica will not be restarted; return True if its replicaset has an outage that cannot end."""
        self.restarting.discard(replica)
        return replica[0] in self._ends and not self.could_serve(replica[0])

    def end(self, replicaset: str) -> None:
        """End the outage of a replicaset."""
        self._ends.pop(replicaset, None)

    def over(self, now: int) -> list[str]:
        """Return the replicasets whose requests have waited up to the time limit."""
        return [name for name, tick in self._ends.items() if tick <= now]

    def next_due(self) -> int:
        """Return the next tick at which waiting requests reach the time limit; `NEVER` if none wait."""
        return min(self._ends.values(), default=NEVER)

    def _up(self, replicaset: str) -> list[int]:
        return [key[1] for key, one in self._replicas.items() if key[0] == replicaset and not one.is_lost]
