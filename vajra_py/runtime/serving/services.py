"""Operations that a driver offers to its parts. The parts move requests between replicas, scale replicasets and wake
policies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from vajra_py.contract.observer import EndReason
from vajra_py.errors import PolicyError
from vajra_py.runtime.records.input_log import Input
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.serving.backend import R, TierCopy, Transfer
from vajra_py.runtime.serving.controller import Controller
from vajra_py.runtime.serving.events import EventQueue
from vajra_py.runtime.serving.replica import Replica


class DriverServices(Protocol[R]):
    """Interface of the driver for its parts."""

    @property
    def now(self) -> int:
        """The present tick."""

    @property
    def events(self) -> EventQueue:
        """Future events."""

    @property
    def controller(self) -> Controller:
        """Replicasets and requests of the run."""

    # Replicas

    def replica(self, replicaset: str, replica_id: int) -> R:
        """Return a replica by id."""

    def replicas_of(self, replicaset: str) -> Sequence[R]:
        """Return the replicas of a replicaset, by id."""

    def wake(self, one: R) -> None:
        """Make a replica form a step after all other events of this tick, unless it is busy."""

    def wake_idle(self, replicaset: str) -> None:
        """Make the idle replicas of a replicaset form steps, and offer them its shared queue."""

    def call_off(self, one: R, *, is_lost: bool = False) -> None:
        """Cancel the steps that a replica executes; `is_lost`: the replica takes no further steps."""

    # Steps that a backend launched together

    def touch(self, one: R) -> None:
        """Apply the ended steps of a replica, and make the step in flight the last of the steps launched together."""

    def catch_up(self, one: R) -> None:
        """Apply the ended steps of a replica before blocks of its memory are taken; `blocks_taken` must follow."""

    def blocks_taken(self, one: R) -> None:
        """Check the steps launched together on a replica, because other requests took blocks after `catch_up`: only
        steps that certainly have enough blocks are kept.
        """

    def interrupt(self, replicaset: str) -> None:
        """Call `touch` for every replica of a replicaset."""

    def sync(self, replicaset: str) -> None:
        """Apply the ended steps of a replicaset; steps launched together continue."""

    # Requests

    def announce(self, request: Request, replica: Replica | None) -> None:
        """Notify the backend of a request that was queued at a replica, or in the shared queue (None), and wake
        replicas that may run it.
        """

    def announce_all(self, replicaset: str, placed: Iterable[tuple[Request, Replica | None]]) -> None:
        """Notify the backend of requests that were placed again, and wake the replicas that may run them."""

    def arrived(self, request: Request, one: R) -> None:
        """Notify the backend of a request that waits on its hand-off's target, before or after its KV has arrived."""

    def transfer(self, transfer: Transfer[R]) -> None:
        """Notify the backend of a transfer of KV from one replica to blocks reserved on another."""

    def cancel_transfer(self, transfer: Transfer[R]) -> None:
        """Notify the backend of a transfer whose KV is not needed any more."""

    def copy_tier(self, copy: TierCopy[R]) -> None:
        """Make the backend copy KV between memory tiers of a replica."""

    def cancel_tier_copy(self, copy: TierCopy[R]) -> None:
        """Notify the backend of a copy between memory tiers that no request waits for any more."""

    def settle(self, ended: Sequence[tuple[Request, EndReason]]) -> None:
        """Count requests that have ended, and notify the policies that listen to ends."""

    # Records and failures

    def record(self, entry: Input) -> None:
        """Write an input of the run to the input log, if there is one."""

    def isolate(self, replicaset: str, error: PolicyError) -> None:
        """Take a replicaset out of service, because one of its policies broke the contract; if policies are not
        isolated, raise the error instead.
        """
