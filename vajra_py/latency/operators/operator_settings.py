"""Settings of all latency models of measured operators: parallelism, host overhead, CUDA graphs, reach, fallback."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from vajra_py.errors import ConfigError, Problem
from vajra_py.latency.config import SettingsModel, complain_as_value_error, resolved_path
from vajra_py.latency.hardware.deployment import Parallelism
from vajra_py.latency.hardware.devices import DeviceSpec
from vajra_py.latency.hardware.host_overhead import CAPTURE_LIMIT, HOST_OVERHEADS, HostOverhead, host_overhead
from vajra_py.latency.hardware.model_spec import ModelSpec
from vajra_py.latency.models.roofline import RooflineModel

if TYPE_CHECKING:
    from vajra_py.latency.operators.bundle_files import Bundle
    from vajra_py.latency.operators.calibration_file import Calibration
    from vajra_py.latency.operators.collectives import Link
    from vajra_py.latency.operators.expert_times import Routing
    from vajra_py.latency.operators.profile_bundle import BundleOptions

Micros = Annotated[float, Field(ge=0)]
Degree = Annotated[int, Field(ge=1)]


class MeasuredOperatorsConfig(SettingsModel):
    """Base class of the settings of latency models whose operator times were measured inside an engine."""

    type: str
    path: str | None = Field(None, description="Folder with the measured times.")
    tensor_parallel: Degree = Field(1, description="Number of GPUs that each layer is divided among.")
    data_parallel: Degree = Field(
        1,
        description="Number of data-parallel ranks that step together and share the experts; together they are one replica.",
    )
    expert_parallel: bool = Field(
        False, description="Distribute whole experts over the ranks instead of splitting each."
    )
    host: str = Field("vllm-0.19-async", description=f"Host overhead by name: {', '.join(HOST_OVERHEADS)}.")
    host_step_us: Micros | None = Field(None, description="Host time of a step, microseconds; null: that of `host`.")
    host_per_request_us: Micros | None = Field(
        None, description="Host time for each request of a step, microseconds; null: that of `host`."
    )
    host_exposed_us: Micros | None = Field(
        None,
        description="Idle GPU time of a step with asynchronous scheduling, microseconds; null: that of `host`.",
    )
    arrival_us: Micros | None = Field(
        None, description="Time from arrival to the scheduler's queue, microseconds; null: that of `host`."
    )
    first_token_us: Micros | None = Field(
        None, description="Time from a step's end to the client, microseconds; null: that of `host`."
    )
    cuda_graphs: bool = Field(True, description="Pad small batches to the sizes of captured CUDA graphs.")
    capture_limit: Annotated[int, Field(ge=1)] = Field(CAPTURE_LIMIT, description="Largest captured batch, tokens.")
    context_variation: Annotated[float, Field(ge=0, le=5)] = Field(
        description="Coefficient of variation of the decodes' context lengths in a step; 0: equal lengths."
    )
    reach: Annotated[float, Field(ge=1)] = Field(
        description="Multiple of the largest measured size up to which times are extrapolated linearly."
    )
    fallback: Literal["roofline"] | None = Field(
        None, description="Latency model for steps beyond the extrapolated range; null: such a step is an error."
    )
    calibration: str | None = Field(None, description="Calibration that `vajra calibrate` wrote for these times.")

    @field_validator("path", "model", "calibration", check_fields=False)
    @classmethod
    def _resolve(cls, value: str | None, info: ValidationInfo) -> str | None:
        return None if value is None else resolved_path(value, info)

    @field_validator("host")
    @classmethod
    def _known_host(cls, value: str) -> str:
        complain_as_value_error(lambda: host_overhead(value), "host")
        return value

    @property
    def device_name(self) -> str | None:
        """Name of the device that ran the operators, whether it is described or not; None if it is unknown."""
        raise NotImplementedError

    def options(
        self,
        bundle: Bundle,
        model: ModelSpec,
        device: DeviceSpec | None,
        link: Link | None,
        routing: Routing | None = None,
    ) -> BundleOptions:
        """Return the model's options other than operator times. Raises `ConfigError` if the calibration does not fit
        the bundle, or the fallback cannot be used.
        """
        from vajra_py.latency.operators.calibration_file import read_calibration
        from vajra_py.latency.operators.expert_times import Routing
        from vajra_py.latency.operators.profile_bundle import BundleOptions

        calibration = read_calibration(self.calibration) if self.calibration else None
        if calibration is not None:
            calibration.check_fits(bundle)
        return BundleOptions(
            link=link,
            host=self._host_overhead(calibration),
            context_variation=self.context_variation,
            cuda_graphs=self.cuda_graphs,
            capture_limit=self.capture_limit,
            reach=self.reach,
            data_parallel=self.data_parallel,
            routing=routing or Routing(),
            scales=dict(calibration.scales) if calibration else {},
            fallback=self._roofline(model, device),
            calibration=calibration,
        )

    def _host_overhead(self, calibration: Calibration | None) -> HostOverhead:
        """Return the named host overhead; calibrated values replace its values, and configured values replace both."""
        figures = dict(calibration.host) if calibration else {}
        given = {
            "step_base_s": self.host_step_us,
            "step_per_request_s": self.host_per_request_us,
            "exposed_s": self.host_exposed_us,
            "arrival_s": self.arrival_us,
            "first_token_s": self.first_token_us,
        }
        figures.update({name: 1e-6 * value for name, value in given.items() if value is not None})
        return host_overhead(self.host, **figures)

    def _roofline(self, model: ModelSpec, device: DeviceSpec | None) -> RooflineModel | None:
        """Return the fallback model for steps beyond the reach. Raises `ConfigError` if the device is not described, or
        if there are several data-parallel ranks.
        """
        if self.fallback is None:
            return None
        if device is None:
            message = f"needs a described device, and {self.device_name} is not one"
            raise ConfigError(Problem("fallback", message, "Allowed: null"))
        if self.data_parallel > 1:
            message = f"the roofline has no data-parallel ranks that share experts (data_parallel {self.data_parallel})"
            raise ConfigError(Problem("fallback", message, "Allowed: null"))
        return RooflineModel(model, device, Parallelism(tensor=self.tensor_parallel))
