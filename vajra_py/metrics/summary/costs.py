"""Cost and energy of a run, from its devices' prices and from their power as a function of the tokens of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from msgspec import Struct

from vajra_py.latency.hardware.device_costs import DeviceCosts
from vajra_py.metrics.definitions import Window
from vajra_py.metrics.summary.rates import steady_window
from vajra_py.metrics.tables.replicas import ActiveTimes
from vajra_py.runtime.records.arrow_arrays import arrow_array, call, numpy_array

if TYPE_CHECKING:
    import pyarrow as pa

    ArrowTable: TypeAlias = pa.Table
else:
    ArrowTable = "pyarrow.Table"

_HOUR_S = 3600.0
_JOULES_PER_KWH = 3.6e6
_MILLION = 1e6


class ReplicasetDevices(Struct, frozen=True):
    """Devices of one replicaset, or of one of its pools."""

    costs: DeviceCosts
    devices_per_replica: int
    num_replicas: int
    num_stages: int = 1
    """Number of pipeline stages: a step occupies one stage's devices at a time."""
    active: ActiveTimes | None = None
    """Periods during which its replicas occupy their devices; None if all replicas always occupy them."""
    replicaset: str | None = None
    """Replicaset of a pool; None if these devices are listed under the replicaset's own name."""
    replica_ids: range | None = None
    """Ids of the pool's replicas; None for all replicas of the replicaset."""

    @property
    def num_devices(self) -> int:
        """Number of devices of all replicas together; with a scaler, those of the maximum number of replicas."""
        return self.devices_per_replica * self.num_replicas

    def mean_devices(self, window: Window) -> float:
        """Return the mean number of occupied devices over the window."""
        if self.active is None or not window.duration_s > 0:
            return self.num_devices
        return self.devices_per_replica * self.active.seconds(window) / window.duration_s

    def price_per_hour(self, window: Window) -> float | None:
        """Return the price of all occupied devices together, as a mean over the window, in US dollars per hour; None if
        unknown.
        """
        price = self.costs.price_per_hour
        return None if price is None else price * self.mean_devices(window)

    def energy_j(self, steps: ArrowTable, window: Window) -> float | None:
        """Return the energy used in the window, in joules: energy during steps, plus energy at idle power for the rest
        of the time. None if the devices' power is unknown.

        `steps` has the steps of this replicaset (or pool) only; it has no rows if the replicaset ran no steps.
        """
        power = self.costs.power
        if power is None:
            return None
        formed_at, duration_s = numpy_array(steps.column("formed_at")), numpy_array(steps.column("duration_s"))
        begins, ends = (np.clip(at, window.start_at, window.end_at) for at in (formed_at, formed_at + duration_s))
        device_s = (ends - begins) * self.devices_per_replica / self.num_stages
        tokens = numpy_array(steps.column("prefill_tokens")) + numpy_array(steps.column("decode_tokens"))
        idle_s = max(0.0, self.mean_devices(window) * window.duration_s - float(device_s.sum()))
        return float(np.dot(device_s, power.of_steps(tokens))) + power.idle_w * idle_s

    def mean_power_w(self, steps: ArrowTable, window: Window) -> float | None:
        """Return the mean power in the window, in watts; None for an empty window or if the energy is unknown."""
        energy_j = self.energy_j(steps, window) if window.duration_s > 0 else None
        return None if energy_j is None else energy_j / window.duration_s


def cost_sections(
    by_replicaset: Mapping[str, ReplicasetDevices], summary: Mapping[str, Any], steps: ArrowTable
) -> dict[str, Any]:
    """Return the sections `cost` (US dollars) and `energy` of a summary; a value is None if it needs a price or power
    that is unknown for the devices of some replicaset.

    The run's cost and energy cover the whole window, including the drain after the last arrival: devices cost money,
    and draw at least idle power, all the time. With a scaler, a replica's devices count while it is starting, up or
    draining. The cost per request or token is the price per second divided by `throughput`, and the energy per request
    or token is the mean power while requests arrive divided by `throughput`, so that neither depends on the length of
    the drain.
    """
    window = Window(summary["window"]["start_s"], summary["window"]["end_s"])
    steady = steady_window(window, summary["rates"])
    rates = {name: rate or 0.0 for name, rate in summary["overall"]["throughput"].items()}
    prices = {name: one.price_per_hour(window) for name, one in by_replicaset.items()}
    steady_prices = {name: one.price_per_hour(steady) for name, one in by_replicaset.items()}
    own_steps = {name: _of(steps, one.replicaset or name, one.replica_ids) for name, one in by_replicaset.items()}
    has_steps = steps.num_rows > 0  # otherwise no steps were recorded
    energies = {
        name: one.energy_j(own_steps[name], window) if has_steps else None for name, one in by_replicaset.items()
    }
    powers = {
        name: one.mean_power_w(own_steps[name], steady) if has_steps else None for name, one in by_replicaset.items()
    }
    per_hour, energy_j, mean_w = _sum(prices), _sum(energies), _sum(powers)
    steady_per_hour = _sum(steady_prices)
    cost = _over(per_hour, window)
    return {
        "cost": {
            "per_hour": per_hour,
            "run": cost,
            **_per(None if steady_per_hour is None else steady_per_hour / _HOUR_S, rates),
            "devices": {name: _section(one, window) for name, one in by_replicaset.items()},
        },
        "energy": {
            "run_kwh": None if energy_j is None else energy_j / _JOULES_PER_KWH,
            "mean_w": mean_w,
            "per_request_j": _ratio(mean_w, rates["requests_per_s"]),
            "per_output_token_j": _ratio(mean_w, rates["output_tokens_per_s"]),
            "per_token_j": _ratio(mean_w, rates["output_tokens_per_s"] + rates["prompt_tokens_per_s"]),
            "by_replicaset_kwh": {
                name: None if one is None else one / _JOULES_PER_KWH for name, one in energies.items()
            },
        },
    }


def cost_of_run(devices: ReplicasetDevices, window: Window) -> dict[str, float | None]:
    """Return the cost of these devices per hour (`per_hour`) and over the window (`run`), in US dollars; None if their
    price is unknown.
    """
    per_hour = devices.price_per_hour(window)
    return {"per_hour": per_hour, "run": _over(per_hour, window)}


def _over(per_hour: float | None, window: Window) -> float | None:
    return None if per_hour is None else per_hour * window.duration_s / _HOUR_S


def _per(cost_per_s: float | None, rates: Mapping[str, float]) -> dict[str, float | None]:
    output = rates["output_tokens_per_s"]
    return {
        "per_request": _ratio(cost_per_s, rates["requests_per_s"]),
        "per_million_output_tokens": _ratio(cost_per_s, output / _MILLION),
        "per_million_tokens": _ratio(cost_per_s, (output + rates["prompt_tokens_per_s"]) / _MILLION),
    }


def _section(one: ReplicasetDevices, window: Window) -> dict[str, Any]:
    power = one.costs.power
    scaled = {} if one.active is None else {"mean_count": one.mean_devices(window)}
    return {
        "device": one.costs.device,
        "count": one.num_devices,
        **scaled,
        "price_per_hour": one.costs.price_per_hour,
        "power_w": None if power is None else [power.idle_w, power.decode_w, power.prefill_w],
        "saturating_tokens": None if power is None else power.saturating_tokens,
        "sources": dict(one.costs.sources),
    }


def _of(steps: ArrowTable, replicaset: str, replica_ids: range | None) -> ArrowTable:
    if not steps.num_rows:
        return steps
    read = steps.select(["formed_at", "duration_s", "prefill_tokens", "decode_tokens"])
    if replica_ids is not None:
        return call("filter", read, of_pool(steps, replicaset, replica_ids))
    if call("unique", steps.column("replicaset")).to_pylist() == [replicaset]:
        return read
    return call("filter", read, call("equal", steps.column("replicaset"), arrow_array([replicaset])[0]))


def of_pool(steps: ArrowTable, replicaset: str, replica_ids: range) -> Any:
    """Return a mask of the steps that ran on these replicas."""
    import pyarrow.compute as pc

    ids = steps.column("replica_id")
    inside = pc.and_(pc.greater_equal(ids, replica_ids.start), pc.less(ids, replica_ids.stop))
    return pc.and_(inside, pc.equal(steps.column("replicaset"), arrow_array([replicaset])[0]))


def _sum(values: Mapping[str, float | None]) -> float | None:
    """Return the sum of all values; None if one is unknown."""
    known = [value for value in values.values() if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _ratio(amount: float | None, whole: float) -> float | None:
    return None if amount is None or not whole > 0 else amount / whole
