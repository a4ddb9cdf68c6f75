"""Drain replicas by migration: running requests move to other replicas that have room, and continue to compute
meanwhile.
"""

from __future__ import annotations

from typing import Generic

from vajra_py.contract import PoolRole
from vajra_py.contract.views import ReplicaState
from vajra_py.runtime.requests.request import Request, RequestState
from vajra_py.runtime.serving.backend import R
from vajra_py.runtime.serving.migration import Migrations
from vajra_py.runtime.serving.replicaset import Replicaset
from vajra_py.runtime.serving.services import DriverServices
from vajra_py.runtime.support.clock import to_seconds

_DRAIN = "its replica drains"
"""Reason for these migrations, as reported to observers."""


class Drains(Generic[R]):
    """Draining replicas of one replicaset whose running requests move to other replicas.

    A request for which no replica has room continues where it is, until a replica has room or the request ends.
    Requests of a replica that only computes prompts leave it by hand-off anyway.
    """

    def __init__(self, replicaset: Replicaset, migrations: Migrations[R], driver: DriverServices[R]) -> None:
        self._replicaset = replicaset
        self._migrations = migrations
        self._driver = driver
        self.draining: dict[int, R] = {}
        """Replicas whose requests move away, by id; if empty, `advance` has nothing to do."""
        self._num_admissions: dict[int, int] = {}
        """Number of admissions of each draining replica at the last check; if it has grown, the replica has admitted a
        request whose KV was in transit when the drain began.
        """
        self._is_due = False
        """True if a request that could not move at the last check may be able to move now."""

    def begin(self, one: R) -> None:
        """Begin to move the running requests of a draining replica away, unless it only computes prompts. Raises
        `PolicyError`.
        """
        if one.replica.parts.role is not PoolRole.PREFILL:
            self.draining[one.replica.replica_id] = one
            one.replica.drains_by_migration = True
            self.room_changed()
            self.advance()

    def room_changed(self) -> None:
        """Note that some replica may have gained room."""
        self._is_due = True

    def advance(self, ended: R | None = None) -> None:
        """Begin the migrations that are possible now.

        If some replica may have gained room since the last call (`room_changed`), all draining replicas are considered.
        Otherwise, a draining replica is considered if it has admitted a request since it was last considered. `ended`:
        check this only for this replica, whose step has just ended; None: check it for all.

        Raises `PolicyError` if the replicaset scheduler, which chooses targets, breaks the contract.
        """
        for replica_id, one in list(self.draining.items()):
            if self._replicaset.state_of(replica_id) is not ReplicaState.DRAINING:
                self._forget(replica_id)
                continue
            num_admissions = one.replica.running_set.num_admissions
            has_admitted = ended in (None, one) and num_admissions != self._num_admissions.get(replica_id)
            if self._is_due or has_admitted:
                self._num_admissions[replica_id] = num_admissions
                self._move_from(one)
        self._is_due = False

    def _move_from(self, one: R) -> None:
        self._driver.touch(one)
        running_set = one.replica.running_set
        for request in [*running_set.running(), *running_set.in_flight]:
            if not self._migrations.has_slot(one.replica.replica_id):
                return
            if request.state is RequestState.RUNNING and request not in one.replica.to_end:
                self._move(request)

    def _move(self, request: Request) -> None:
        if self._migrations.is_moving(request):
            return
        able = []
        for replica in self._replicaset.bounds.holders(request).of_decodes:
            if self._replicaset.is_up(replica.replica_id) and self._migrations.has_slot(replica.replica_id):
                self._driver.touch(self._driver.replica(self._replicaset.name, replica.replica_id))
                if replica.has_room_for(request):
                    able.append(replica)
        target = self._replicaset.place_running(request, able, to_seconds(self._driver.now))
        if target is not None:
            self._migrations.begin(request, target, _DRAIN)

    def _forget(self, replica_id: int) -> None:
        self.draining.pop(replica_id).replica.drains_by_migration = False

    def clear(self) -> None:
        """Drop all drains."""
        for replica_id in list(self.draining):
            self._forget(replica_id)
        self._num_admissions.clear()
