"""Interface between a driver and the backend that executes its replicas' steps.

A backend launches a plan and responds, on its own clock, by pushing `Phase.STEP_END` and passing the result to
`Driver.complete`. The simulator, the engine and other backends (another system's workers, remote actors) differ only in
how they do so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct

from vajra_py.contract.observer import EndReason
from vajra_py.errors import PolicyError
from vajra_py.runtime.requests.adapters import AdapterLoad
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.serving.replica import Replica
from vajra_py.runtime.step.plan import StepPlan


@dataclass(eq=False, slots=True)
class BackendReplica:
    """One replica as driver and backend see it; backends add their own fields."""

    replica: Replica
    rank: int = field(default=0, kw_only=True)
    """Position of the replica among all replicas of the run, by which its events are ordered within a tick. The
    replicas of a run are ordered by replicaset, as in the settings, and then by id.
    """
    free_at: int = field(default=0, kw_only=True)
    """Tick from which the replica can take another step. `NEVER`: the tick is not known before the step in flight ends,
    or the replica takes no further steps.
    """
    is_idle: bool = field(default=True, kw_only=True)
    """True if no step could be formed, and the first pipeline stage is free; later stages may still execute steps."""
    form_pending: bool = field(default=False, kw_only=True)
    """True if the replica forms a step after all other events of this tick."""
    epoch: int = field(default=0, kw_only=True)
    """Number of times that the replica's steps were cancelled; step ends of an earlier epoch are ignored."""
    num_stages: int = field(init=False)
    """Number of pipeline stages, which is the number of steps that the replica can execute at once."""

    def __post_init__(self) -> None:
        """Read the number of pipeline stages, which does not change."""
        self.num_stages = self.replica.limits.pipeline_stages


R = TypeVar("R", bound=BackendReplica)
S = TypeVar("S", bound=BackendReplica, contravariant=True)


class Transfer(Struct, Generic[R], eq=False):
    """Transfer of a request's KV from one replica to blocks reserved on another.

    Attributes:
        number: position among the transfers of its replicaset.
        start: position of the first token whose KV the target lacks, which is the start of a KV block.
        end: position after the last token whose KV the target lacks.
    """

    number: int
    request: Request
    source: R
    target: R
    start: int
    end: int


class TierCopy(Struct, Generic[R], frozen=True, eq=False):
    """Copy of KV blocks from a replica's device to slots of its first memory tier, or back.

    Attributes:
        number: position among the transfers between tiers of its replicaset.
        is_upward: True if the copy goes from the tier to the device; False if from the device to the tier.
        pairs: (device block, slot in the tier) of each block.
    """

    number: int
    replica: R
    is_upward: bool
    pairs: Sequence[tuple[int, int]]


class Backend(Protocol[S]):
    """Executes the plans of a driver's replicas."""

    # Execution

    def launch(self, replica: S, plan: StepPlan) -> int:
        """Begin to execute a plan; return the tick from which the replica can take another one.

        `NEVER`: the replica can take another plan once this one has completed. With pipeline stages, it can do so
        earlier: once the driver has handled the `Phase.STAGE_END` that the backend pushes for this plan. The backend
        pushes the step's end as `(replica, anything, replica.epoch)`, with the replica's rank.
        """

    def cancel(self, replica: S) -> int:
        """Cancel the replica's steps; return the tick from which the replica is free. `NEVER`: the backend will call
        `Driver.freed` when the replica is free.
        """

    # Handlers of events whose payload the backend defines

    def on_arrival(self, payload: Any) -> None:
        """Pass a request that arrived to `Driver.submit`."""

    def on_step_end(self, replica: S, payload: Any) -> None:
        """Pass the step's result to `Driver.complete`."""

    def on_policy_change(self, payload: Any) -> None:
        """Pass the change of policy to `Driver.swap_policy`."""

    # Notifications about requests

    def on_submitted(self, request: Request, payload: Any) -> None:
        """Note the request created for `payload`, the argument of `Driver.submit`; the request may have ended
        already.
        """

    def on_placed(self, request: Request, replicas: Sequence[S]) -> None:
        """Note that the request waits, and may run on any of these replicas."""

    def on_transfer(self, transfer: Transfer[Any]) -> None:
        """Begin to move KV between two of the backend's replicas.

        Unless the driver models the links (`DriverOptions.times_transfers`), the backend pushes the transfer's end at a
        later tick: `Phase.TRANSFER` with a `TransferEnd`.
        """

    def on_transfer_cancelled(self, transfer: Transfer[Any]) -> None:
        """Note that the KV of this transfer is no longer needed: the target's blocks may be reused from now on."""

    def on_adapter_load(self, replica: S, load: AdapterLoad) -> None:
        """Begin to load an adapter into its slot. Steps that were launched before may still use the slot's previous
        adapter; no later step uses the slot until the load has ended.

        Called unless the driver times loads (`DriverOptions.times_transfers`); the backend pushes the load's end at a
        later tick: `Phase.TIER` with an `AdapterEnd`.
        """

    def on_tier_copy(self, copy: TierCopy[Any]) -> None:
        """Begin to copy KV between memory tiers of one of the backend's replicas. Not called if the driver models the
        links.

        A copy downwards reads the blocks' content before the replica's next step. A copy upwards writes blocks that no
        step uses before the copy's end. When the copy has ended, at a later tick, the backend
        pushes a `TierEnd` as an event of `Phase.TIER`.
        """
        raise RuntimeError(f"{type(self).__name__} copies no KV between memory tiers")

    def on_tier_copy_cancelled(self, copy: TierCopy[Any]) -> None:
        """Note that no request waits for this copy any more: its blocks may be reused from the next step on."""
        return

    def on_requests_ended(self, ended: Sequence[tuple[Request, EndReason]]) -> None:
        """Note that these requests have ended."""

    def on_isolated(self, replicaset: str, error: PolicyError) -> None:
        """Note that a replicaset is out of service because a policy broke the contract."""


class FastForward(Protocol[S]):
    """Decode fast-forward of a backend: launches a run of equal decode steps at once, and applies their results on
    demand.
    """

    def sync_all(self, replicaset: str) -> None:
        """Apply every ended step of a replicaset; steps in flight continue."""

    def sync_before(self, replica: S) -> None:
        """Apply the steps of the replicaset's other replicas that ended before this replica's step, which ends now.
        Steps that end now count as ended before if their replica has a lower rank.
        """

    def on_queued(self, replica: S) -> None:
        """Apply a replica's ended steps, because a request has joined its queue; end the run of equal steps if these
        steps depend on the queue.
        """

    def interrupt(self, replica: S, *, up_to_now: bool = True) -> None:
        """Apply a replica's ended steps and end the run of steps with the step in flight, because the replica's
        requests are about to change.

        `up_to_now`: True to apply also a step that ends now, because its end precedes the change.
        """

    def catch_up(self, replica: S, *, up_to_now: bool = True) -> None:
        """Apply a replica's ended steps; the run of steps continues. `up_to_now`: see `interrupt`."""

    def shorten(self, replica: S) -> None:
        """Shorten the run of equal steps, because other requests took blocks after `catch_up`: the run ends with the
        last step that certainly has enough blocks.
        """

    def interrupt_all(self, replicaset: str) -> None:
        """Call `interrupt` for every replica of a replicaset."""
