"""Prices and power of devices: the values under `operation` in `hardware/*.json`, which a user may change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec import Struct, field, structs
from numpy.typing import NDArray

from vajra_py.errors import ConfigError
from vajra_py.latency.hardware.catalog import device_name, read_device_file

POWER_FIELDS = ("idle_w", "decode_w", "prefill_w", "saturating_tokens")


class DevicePower(Struct, frozen=True):
    """Electrical power of one device by kind of work, in watts.

    Decoding one sequence leaves the arithmetic units idle (`decode_w`); prefills use them fully (`prefill_w`). In
    between, power rises with the number of tokens in the step, up to `saturating_tokens`: 128 decodes draw more than
    one (Patel et al., "Splitwise", ISCA 2024, figures 8 and 9; ML.ENERGY Benchmark 3.0).
    """

    idle_w: float
    decode_w: float
    prefill_w: float
    saturating_tokens: float

    def of_steps(self, num_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the power in watts during steps, given the number of tokens of each step."""
        share = np.minimum(np.maximum(num_tokens - 1, 0) / max(self.saturating_tokens - 1, 1), 1.0)
        power: NDArray[np.float64] = self.decode_w + (self.prefill_w - self.decode_w) * share
        return power


class DeviceCosts(Struct, frozen=True):
    """Costs of one device: price per hour and power; None if unknown."""

    device: str
    price_per_hour: float | None = None
    power: DevicePower | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    """Sources by field: of `price_per_hour` (with its date) and of each power value."""

    def changed(self, given: Mapping[str, float], source: str) -> DeviceCosts:
        """Return the costs with values given by the user: `price_per_hour` and the `POWER_FIELDS`.

        If the power is unknown, it stays unknown unless all `POWER_FIELDS` are given.
        """
        watts = {name: value for name, value in given.items() if name in POWER_FIELDS}
        power = self.power
        if watts and power is not None:
            power = structs.replace(power, **watts)
        elif set(watts) == set(POWER_FIELDS):
            power = DevicePower(**watts)
        price = given.get("price_per_hour", self.price_per_hour)
        return DeviceCosts(self.device, price, power, {**self.sources, **dict.fromkeys(given, source)})


def device_costs(name: str) -> DeviceCosts:
    """Return the known costs of a device by name (any case, short names too); the result has no values if the device is
    not described.
    """
    try:
        canonical = device_name(name)
    except ConfigError:
        return DeviceCosts(name)
    figures: Mapping[str, Any] = read_device_file(canonical).get("operation", {})
    values = {key: float(figure["value"]) for key, figure in figures.items()}
    sources = {key: f"{figure['source']}, {figure['date']}" if "date" in figure else figure["source"] for key, figure in figures.items()}  # fmt: skip
    watts = {key: values[key] for key in POWER_FIELDS if key in values}
    power = DevicePower(**watts) if len(watts) == len(POWER_FIELDS) else None
    return DeviceCosts(canonical, values.get("price_per_hour"), power, sources)
