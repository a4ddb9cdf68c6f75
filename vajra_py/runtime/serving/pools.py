"""Pools of a replicaset: live figures for admission policies and scalers, and a check for pools that no request can
reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vajra_py.contract import LeavesOutPools, PoolRole, ReplicaLoadView
from vajra_py.errors import ConfigError, Problem
from vajra_py.runtime.queues import RequestQueue

if TYPE_CHECKING:
    from vajra_py.config import SystemConfig
    from vajra_py.runtime.requests.request import Request
    from vajra_py.runtime.serving.controller import Controller
    from vajra_py.runtime.serving.replicaset import Replicaset


class PoolLoad:
    """`PoolView` with live figures."""

    __slots__ = ("_ids", "_replicaset", "max_replicas", "min_replicas", "name", "role")

    def __init__(self, replicaset: Replicaset, name: str, ids: Sequence[int], bounds: tuple[int, int]) -> None:
        """Create the view. `ids`: ids of the pool's replicas; `bounds`: the minimum and maximum number of replicas that
        a scaler may set.
        """
        self._replicaset = replicaset
        self._ids = ids
        self.name = name
        self.role = replicaset.replicas[ids[0]].parts.role.value
        self.min_replicas, self.max_replicas = bounds

    @property
    def replicas(self) -> Sequence[ReplicaLoadView]:
        """Loads of the pool's replicas in any state, by id."""
        loads = self._replicaset.live_loads()
        return [loads[one] for one in self._ids]

    @property
    def num_queued(self) -> int:
        """Number of requests that wait for one of the pool's replicas."""
        return sum(len(queue) for queue in self._queues()) + len(self._held_back())

    @property
    def num_queued_tokens(self) -> int:
        """Number of tokens that are left to compute for the queued requests."""
        held_back = sum(one.num_remaining_tokens for one in self._held_back())
        return sum(queue.num_tokens for queue in self._queues()) + held_back

    def _held_back(self) -> list[Request]:
        return [one for one in self._replicaset.held_back if one.replica_id in self._ids]

    def _queues(self) -> list[RequestQueue]:
        """Return the queues of the pool's replicas, and the shared queue unless the pool only decodes."""
        own = [self._replicaset.replicas[one].queue for one in self._ids]
        return own if self.role == PoolRole.DECODE.value else [*own, self._replicaset.shared]


def pool_loads(replicaset: Replicaset) -> Sequence[PoolLoad]:
    """Return the views of a replicaset's pools, in order of their replicas' ids."""
    ids: dict[str, list[int]] = {}
    for replica in replicaset.replicas:
        ids.setdefault(replica.parts.pool, []).append(replica.replica_id)
    bounds = {} if replicaset.scaling is None else replicaset.scaling.bounds
    return [PoolLoad(replicaset, name, own, bounds.get(name, (len(own), len(own)))) for name, own in ids.items()]


def check_reach(config: SystemConfig, controller: Controller) -> None:
    """Raise `ConfigError` for pools that no request can reach with these settings."""
    problems = []
    for name, replicaset in controller.replicasets.items():
        section = f"replicasets.{name}.scheduling" if config.replicasets else "scheduling"
        for pool in _unreached(replicaset):
            message = (
                f"{replicaset.scheduler_name} can never send a request to pool {pool!r}: its parameters leave it out"
            )
            allowed = "Allowed: parameters by which some request may come to each pool"
            problems.append(Problem(f"{section}.replicaset_scheduler", message, allowed))
    if problems:
        raise ConfigError(problems)


def _unreached(replicaset: Replicaset) -> Sequence[str]:
    """Return the pools that the scheduler never uses.

    If requests are handed off, and the scheduler does not choose their replicas after the prompt, only prefill pools
    are checked: any decode replica may be chosen then. With a scaler, no pool is checked: running requests of draining
    replicas may move to any pool.
    """
    scheduler = replicaset.scheduler
    if not isinstance(scheduler, LeavesOutPools) or replicaset.scaling is not None:
        return ()
    only_prefill = replicaset.hand_off is not None and not replicaset.places_itself
    roles = {one.parts.pool: one.parts.role for one in replicaset.replicas}
    return [
        pool
        for pool, role in roles.items()
        if not (only_prefill and role is not PoolRole.PREFILL) and not scheduler.may_take(pool, role.value)
    ]
