"""The reference of devices, generated from their descriptions: every figure with its source.

python docs/tools/devices.py prints the page; `make site` builds it as reference/devices.md.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from vajra_py.latency import device_names
from vajra_py.latency.hardware.catalog import read_device_file

INTRODUCTION = """\
# Devices

Figures of the built-in devices with their sources, generated from `vajra_py/latency/hardware/*.json`. Peaks are dense.
*Assumption* marks what was neither measured nor published. To change figures, see
[Choose a latency model](../latency-models.md#roofline).
"""
UNITS: Mapping[str, tuple[str, float]] = {
    "peak_flops": ("dense peak, TFLOP/s", 1e12),
    "compute_fraction": ("fraction of it in products", 1),
    "attention_fraction": ("fraction of it in attention", 1),
    "memory_bandwidth": ("memory bandwidth, GB/s", 1e9),
    "bandwidth_fraction": ("fraction of it", 1),
    "memory_bytes": ("memory, GiB", 2**30),
    "link_bandwidth": ("link to peers, GB/s one way", 1e9),
    "link_fraction": ("fraction of it", 1),
    "link_latency_s": ("link latency, µs", 1e-6),
    "host_link_bandwidth": ("host link, GB/s", 1e9),
    "kernel_latency_s": ("kernel latency, µs", 1e-6),
    "step_overhead_s": ("step overhead, ms", 1e-3),
    "num_sms": ("streaming multiprocessors", 1),
    "sm_version": ("compute capability", 10),
    "price_per_hour": ("price per hour, USD", 1),
    "idle_w": ("power when idle, W", 1),
    "decode_w": ("power of one decode, W", 1),
    "prefill_w": ("power of saturating prefills, W", 1),
    "saturating_tokens": ("tokens that saturate power", 1),
}
"""What a figure is called, and the unit that it is shown in."""


def page() -> str:
    """Return the page."""
    return "\n".join([INTRODUCTION, *(section(name) for name in device_names())])


def section(name: str) -> str:
    """Return the section of one device."""
    description: Mapping[str, Any] = read_device_file(name)
    rows = [row(key, figure) for part in ("figures", "operation") for key, figure in description.get(part, {}).items()]
    heading = f"## `{name}`: {description['summary']}"
    return "\n".join([heading, "", "| figure | value | source |", "|---|---|---|", *rows, ""])


def row(key: str, figure: Mapping[str, Any]) -> str:
    """Return the row of one figure."""
    name, unit = UNITS.get(key, (key, 1))
    dated = f", {figure['date']}" if "date" in figure else ""
    return f"| {name} | {shown(figure['value'], unit)} | {figure['source']}{dated} |"


def shown(value: Any, unit: float) -> str:
    """Return a value in its unit; equal values of all dtypes are shown once."""
    if isinstance(value, Mapping):
        if len(set(value.values())) == 1:
            return shown(next(iter(value.values())), unit)
        return ", ".join(f"{dtype} {shown(one, unit)}" for dtype, one in value.items())
    return f"{value / unit:.4f}".rstrip("0").rstrip(".") if value else "none"


if __name__ == "__main__":
    sys.stdout.write(page())
