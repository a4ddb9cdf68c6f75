"""Peak speeds of devices, and the fractions of these speeds that kernels reach.

Each file `hardware/*.json` describes a device, with a source for every value. A user describes a device by the same
fields, but without sources. Either all fields are given, or only those that differ from a shipped device (`base`).
Peaks are those of dense matrices (no structured sparsity); bandwidths are those of one direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Struct, structs
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vajra_py.errors import ConfigError, Problem, did_you_mean
from vajra_py.latency.hardware.catalog import device_name, device_names, read_device_file
from vajra_py.latency.hardware.model_spec import DTYPE_BYTES


class DeviceSpec(Struct, frozen=True):
    """One device of a replica, with its links to peers and to the host."""

    name: str
    peak_flops: Mapping[str, float]
    """Operations per second by dtype of the matrix products; the device does not support dtypes that are not listed."""
    compute_fraction: Mapping[str, float]
    """Fraction of the peak that matrix products of a layer's size reach, by dtype."""
    attention_fraction: float
    """Fraction of the peak that attention kernels reach."""
    memory_bandwidth: float
    """Peak bandwidth of the device's memory, in bytes per second."""
    bandwidth_fraction: float
    memory_bytes: int
    """Memory in bytes, as the driver reports it."""
    link_bandwidth: float
    """Peak bandwidth to peers of the same replica in one direction, in bytes per second."""
    link_fraction: float
    link_latency_s: float
    """Time of an empty exchange between peers, in seconds."""
    host_link_bandwidth: float
    """Bandwidth that large copies to or from host memory reach, in bytes per second."""
    kernel_latency_s: float
    """Fixed time of one kernel in a replayed graph (start and drain), in seconds."""
    step_overhead_s: float
    """Time per step outside all kernels (scheduling, input preparation, launch, sampling), in seconds."""
    num_sms: int = 0
    """Number of streaming multiprocessors; 0: unknown, or none."""
    sm_version: int = 0
    """Compute capability times ten; 0: unknown, or none."""
    priced_as: str | None = None
    """Name by which `device_costs` looks up price and power; None: unknown. A device that the settings derive from a
    shipped one (`base`) has the name of the shipped one.
    """

    @property
    def uses_flash_attention_2(self) -> bool:
        """True if vLLM uses FlashAttention 2 on this device.

        vLLM uses FlashAttention 3 on Hopper and FlashInfer on data-centre Blackwell.
        """
        return self.num_sms > 0 and (80 <= self.sm_version < 90 or self.sm_version >= 120)

    def flops(self, dtype: str) -> float:
        """Return the attainable operations per second of matrix products in `dtype`."""
        return self.peak_flops[dtype] * self.compute_fraction[dtype]

    def attention_flops(self, dtype: str) -> float:
        """Return the attainable operations per second of attention on values of `dtype`."""
        return self.peak_flops[dtype] * self.attention_fraction

    @property
    def attainable_bandwidth(self) -> float:
        """Memory bandwidth that streaming kernels reach, in bytes per second."""
        return self.memory_bandwidth * self.bandwidth_fraction

    @property
    def attainable_link_bandwidth(self) -> float:
        """Link bandwidth that collectives reach in one direction, in bytes per second."""
        return self.link_bandwidth * self.link_fraction


_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Fraction = Annotated[float, Field(gt=0, le=1)]
_Duration = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Natural = Annotated[int, Field(ge=0, le=2**31 - 1)]


class DeviceConfig(BaseModel):
    """Device described by the user: all values, or changes to the shipped device named by `base`."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False)

    base: str | None = Field(None, description="Described device that provides the figures left out here.")
    name: str | None = Field(None, description="Name of the device in reports.")
    peak_flops: dict[str, _Positive] | None = Field(
        None, description="Dense floating-point operations per second by dtype (float32, bfloat16, float16, fp8)."
    )
    compute_fraction: _Fraction | dict[str, _Fraction] | None = Field(
        None, description="Fraction of the peak that matrix products reach: one number, or by dtype."
    )
    attention_fraction: _Fraction | None = Field(None, description="Fraction of the peak that attention kernels reach.")
    memory_bandwidth: _Positive | None = Field(None, description="Bytes per second of the device's memory.")
    bandwidth_fraction: _Fraction | None = Field(None, description="Fraction of the bandwidth that kernels reach.")
    memory_bytes: Annotated[int, Field(gt=0, le=2**63 - 1)] | None = Field(
        None, description="Memory that the driver reports, bytes."
    )
    link_bandwidth: _Positive | None = Field(None, description="Bytes per second to peer devices, one direction.")
    link_fraction: _Fraction | None = Field(
        None, description="Fraction of the link's bandwidth that collectives reach."
    )
    link_latency_s: _Duration | None = Field(None, description="Latency of a collective without data, seconds.")
    host_link_bandwidth: _Positive | None = Field(None, description="Bytes per second to and from host memory.")
    kernel_latency_s: _Duration | None = Field(None, description="Minimum time of a kernel, seconds.")
    step_overhead_s: _Duration | None = Field(None, description="Time of a step outside all kernels, seconds.")
    num_sms: _Natural | None = Field(None, description="Number of streaming multiprocessors; 0: unknown.")
    sm_version: _Natural | None = Field(None, description="Compute capability times ten, as 89 for 8.9; 0: unknown.")

    def to_device(self) -> DeviceSpec:
        """Return the complete device.

        Raises:
            ConfigError: the base or a dtype is unknown, or a value is given neither here nor by the base.
        """
        given = {key: value for key, value in self.model_dump(exclude={"base"}).items() if value is not None}
        figures = {**_figures(self.base), **given} if self.base else given
        problems = [
            Problem(f"device.{one.name}", "is missing", "Give it, or name a shipped device as base")
            for one in structs.fields(DeviceSpec)
            if one.required and one.name not in figures and one.name != "name"
        ]
        peaks = figures.get("peak_flops", {})
        fractions = figures.get("compute_fraction", {})
        if not isinstance(fractions, Mapping):
            fractions = dict.fromkeys(peaks, fractions)
        for dtype in peaks:
            if dtype not in DTYPE_BYTES:
                problems.append(
                    Problem("device.peak_flops", f"has an unknown dtype ({dtype!r})", did_you_mean(dtype, DTYPE_BYTES))
                )
            elif dtype not in fractions and "compute_fraction" in figures:
                problems.append(
                    Problem("device.compute_fraction", f"has no figure for {dtype}", "Give one number, or one by dtype")
                )
        if problems:
            raise ConfigError(problems)
        name = self.name or f"{self.base or 'own device'} (changed)"
        return DeviceSpec(
            **{**figures, "name": name, "compute_fraction": dict(fractions), "priced_as": self.base or self.name}
        )


def load_device(description: str | Mapping[str, Any] | DeviceConfig) -> DeviceSpec:
    """Return the shipped device with this name (any case), or the device that a mapping describes.

    Raises:
        ConfigError: the device does not exist, or values are wrong or missing; reports all problems at once.
    """
    if isinstance(description, str):
        name = device_name(description)
        return DeviceSpec(name=name, priced_as=name, **_figures(description))
    if isinstance(description, DeviceConfig):
        return description.to_device()
    try:
        return DeviceConfig.model_validate(dict(description)).to_device()
    except ValidationError as error:
        raise ConfigError([_problem(detail) for detail in error.errors()]) from error


def _problem(detail: Any) -> Problem:
    where = ".".join(["device", *map(str, detail["loc"])])
    if detail["type"] == "extra_forbidden":
        return Problem(where, "is not known", did_you_mean(str(detail["loc"][-1]), DeviceConfig.model_fields))
    return Problem(where, f"{detail['msg']} ({detail['input']!r})")


def _figures(name: str) -> dict[str, Any]:
    return {key: figure["value"] for key, figure in read_device_file(name)["figures"].items()}


def device_sources(name: str) -> dict[str, str]:
    """Return the source of each value of a shipped device, by field.

    Raises:
        ConfigError: there is no device of that name.
    """
    return {key: figure["source"] for key, figure in read_device_file(name)["figures"].items()}


__all__ = ["DeviceConfig", "DeviceSpec", "device_names", "device_sources", "load_device"]
