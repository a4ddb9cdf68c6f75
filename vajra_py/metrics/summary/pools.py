"""Section `pools` of a summary: utilisation and cost of each pool of the replicasets with pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Struct, field

from vajra_py.metrics.definitions import Window
from vajra_py.metrics.summary.costs import ReplicasetDevices, cost_of_run, of_pool
from vajra_py.metrics.summary.resources import busy_seconds, resources_of
from vajra_py.metrics.tables.replicas import replica_figures, scaled_replicasets

if TYPE_CHECKING:
    import pyarrow as pa

    ArrowTable: TypeAlias = pa.Table
else:
    ArrowTable = "pyarrow.Table"

_RESOURCES = (
    *("num_steps", "num_preempted", "mean_step_tokens", "prefill_tokens_per_s", "decode_tokens_per_s"),
    *("mean_used_fraction", "max_used_fraction", "mean_num_running", "mean_num_waiting"),
)


class Pool(Struct, frozen=True):
    """A pool of a replicaset."""

    replicaset: str
    name: str
    role: str
    replica_ids: range

    @property
    def key(self) -> str:
        """Unique name among the pools of all replicasets."""
        return f"{self.replicaset}/{self.name}"


def titles_of(pools: Sequence[Pool]) -> list[str]:
    """Return the displayed name of each pool, prefixed with its replicaset if there are several replicasets."""
    is_one = len({pool.replicaset for pool in pools}) == 1
    return [pool.name if is_one else pool.key for pool in pools]


class PoolInputs(Struct, frozen=True):
    """Inputs of the section `pools`."""

    steps: ArrowTable
    window: Window
    steady: Window
    """Part of the window in which requests arrived; means and rates are computed over this part."""
    replicas: ArrowTable | None = None
    """States of replicas over time (`ReplicaStates.table`); None without a scaler."""
    devices: Mapping[str, ReplicasetDevices] = field(default_factory=dict)
    """Devices by `Pool.key`, where they are known."""


def pools_section(pools: Sequence[Pool], inputs: PoolInputs) -> dict[str, Any]:
    """Return the section `pools`; empty without pools.

    `busy_fraction` is the time with a step in flight, summed over the replicas of a pool, divided by the pool's
    replica-seconds. The replica-seconds include those of replicas that ran no step.
    """
    figures = {title: _figures(pool, inputs) for title, pool in zip(titles_of(pools), pools, strict=True)}
    return {"pools": figures} if figures else {}


def _figures(pool: Pool, inputs: PoolInputs) -> dict[str, Any]:
    steps = inputs.steps.filter(of_pool(inputs.steps, pool.replicaset, pool.replica_ids))
    measured = inputs.steady if inputs.steady.duration_s > 0 else inputs.window
    count, ids = len(pool.replica_ids), pool.replica_ids
    figures: dict[str, Any] = {
        "mean": float(count), "max": count, "active_s": count * inputs.window.duration_s,
        "starting_s": 0.0, "draining_s": 0.0, "num_starts": 0, "num_stops": 0,
    }  # fmt: skip
    if inputs.replicas is not None and pool.replicaset in scaled_replicasets(inputs.replicas):
        figures = replica_figures(inputs.replicas, pool.replicaset, inputs.window, inputs.steady, ids)
    resources = resources_of(steps, inputs.window, inputs.steady)
    measured_s = figures["mean"] * measured.duration_s
    devices = inputs.devices.get(pool.key)
    return {
        "replicaset": pool.replicaset,
        "pool": pool.name,
        "role": pool.role,
        "first_replica_id": ids.start,
        "num_replicas": count,
        "replicas": figures,
        "busy_fraction": busy_seconds(steps, measured) / measured_s if measured_s > 0 else None,
        **{name: resources[name] for name in _RESOURCES},
        "cost": None if devices is None else cost_of_run(devices, inputs.window),
    }
