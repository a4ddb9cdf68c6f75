"""Settings of `type: aiconfigurator`: which engine's operator tables on which GPU, for which model, precision and parallelism."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from vajra_py.errors import ConfigError, Problem
from vajra_py.latency.calibration_file import Calibration, read_calibration
from vajra_py.latency.catalog import load_model
from vajra_py.latency.config import SettingsModel, complain_as_value_error, resolved_path
from vajra_py.latency.deployment import Parallelism
from vajra_py.latency.devices import DeviceSpec, load_device
from vajra_py.latency.host_overhead import HOST_OVERHEADS, HostOverhead, host_overhead
from vajra_py.latency.model_spec import ModelSpec
from vajra_py.latency.operator_bundle import Precision, Split, operators
from vajra_py.latency.operator_model import OperatorTablesModel
from vajra_py.latency.operator_tables import OperatorTables, tables_folder
from vajra_py.latency.profile_bundle import CAPTURE_LIMIT, BundleOptions, Link
from vajra_py.latency.roofline import RooflineModel

_Micros = Annotated[float, Field(ge=0)]
_Degree = Annotated[int, Field(ge=1)]
DEVICES = {"a100_sxm": "a100-80gb-sxm", "rtx_pro_6000_server": "rtx-pro-6000"}
"""Described devices whose names are not the system's with dashes."""


class AiconfiguratorConfig(SettingsModel):
    """`type: aiconfigurator`: operator times by size, measured inside an engine, from the tables of `aiconfigurator-core`."""

    type: Literal["aiconfigurator"] = "aiconfigurator"
    path: str | None = Field(
        None, description="Folder with the tables (aiconfigurator_core/systems); null: of the installed package."
    )
    system: str = Field(
        "h100_sxm", description="GPU by the tables' name: h100_sxm, h200_sxm, b200_sxm, a100_sxm, l40s, …."
    )
    engine: str = Field("vllm", description="Engine inside which the operators ran: vllm, sglang, trtllm.")
    version: str | None = Field(None, description="The engine's version; null: the newest that was measured.")
    model: str = Field("Llama-3.1-8B", description="Name of a described model, or path of a config.json or its folder.")
    precision: Literal["bfloat16", "fp8", "fp8_block", "nvfp4", "int4_wo"] = Field(
        "bfloat16", description="Of the matrix products, by the tables' name."
    )
    moe_precision: str | None = Field(
        None, description="Of the experts, by the tables' name; null: that of `precision`."
    )
    conversion: Literal["dynamic", "static", "fused"] = Field(
        "dynamic",
        description="Of the inputs of fp8 products: scaled as measured, by known scales, or within the operator before.",
    )
    fused_norms: bool = Field(False, description="Norms are computed by the all-reduce before them (TensorRT-LLM).")
    kv_dtype: Literal["bfloat16", "fp8"] = Field("bfloat16", description="Of the KV cache.")
    tensor_parallel: _Degree = Field(1, description="GPUs that share every layer.")
    data_parallel: _Degree = Field(
        1, description="Ranks of attention that step together and share the experts; the replica is all of them."
    )
    expert_parallel: bool = Field(False, description="Experts are spread over the ranks instead of being split.")
    host: str = Field("vllm-0.19-async", description=f"Host overhead by name: {', '.join(HOST_OVERHEADS)}.")
    host_step_us: _Micros | None = Field(
        None, description="Host time of every step, microseconds; null: as `host` says."
    )
    host_per_request_us: _Micros | None = Field(
        None, description="Host time for each request of a step, microseconds; null: as `host` says."
    )
    host_exposed_us: _Micros | None = Field(
        None,
        description="Idle GPU time of every step with asynchronous scheduling, microseconds; null: as `host` says.",
    )
    arrival_us: _Micros | None = Field(
        None, description="From arrival to the scheduler's queue, microseconds; null: as `host` says."
    )
    first_token_us: _Micros | None = Field(
        None, description="From a step's end to the client, microseconds; null: as `host` says."
    )
    context_variation: Annotated[float, Field(ge=0, le=5)] = Field(
        0.0, description="Standard deviation over mean of the contexts of the decodes in a step; 0: equal contexts."
    )
    cuda_graphs: bool = Field(True, description="Small batches are padded to the sizes of captured CUDA graphs.")
    capture_limit: Annotated[int, Field(ge=1)] = Field(CAPTURE_LIMIT, description="Largest captured batch, tokens.")
    reach: Annotated[float, Field(ge=1)] = Field(
        2.0, description="How many times the largest measured size is still answered, along the last line."
    )
    fallback: Literal["roofline"] | None = Field(
        None, description="What answers beyond the reach; null: such a step is an error."
    )
    calibration: str | None = Field(None, description="Calibration that `vajra calibrate` wrote for these tables.")

    @field_validator("path", "model", "calibration")
    @classmethod
    def _resolve(cls, value: str | None, info: ValidationInfo) -> str | None:
        return None if value is None else resolved_path(value, info)

    @field_validator("host")
    @classmethod
    def _known_host(cls, value: str) -> str:
        complain_as_value_error(lambda: host_overhead(value), "host")
        return value

    def build(self) -> OperatorTablesModel:
        """The latency model.

        Raises:
            ConfigError: the tables are missing, or do not hold this system, engine, model, precision or parallelism.
        """
        tables = OperatorTables(tables_folder(self.path), self.system, self.engine, self.version)
        model, device = self.model_spec(), self.device_spec()
        split = Split(self.tensor_parallel, self.data_parallel, self.expert_parallel)
        found = operators(tables, model, split, self._precision())
        calibration = read_calibration(self.calibration) if self.calibration else None
        if calibration is not None:
            calibration.check_fits(found.bundle)
        options = BundleOptions(
            link=None if device is None else Link(device.attainable_link_bandwidth, device.link_latency_s),
            host=self._host(calibration),
            context_variation=self.context_variation,
            cuda_graphs=self.cuda_graphs,
            capture_limit=self.capture_limit,
            reach=self.reach,
            data_parallel=self.data_parallel,
            scales=dict(calibration.scales) if calibration else {},
            fallback=self._fallback(model, device),
            calibration=calibration,
        )
        return OperatorTablesModel(found, model, options, device)

    def model_spec(self) -> ModelSpec:
        """The model; weights of 4 bits count as 8 where memory is sized."""
        dtype = "bfloat16" if self.precision == "bfloat16" else "fp8"
        return replace(load_model(self.model), dtype=dtype, kv_dtype=self.kv_dtype)

    def device_spec(self) -> DeviceSpec | None:
        """The system's described device, for memory and link; None where it is not described."""
        try:
            return load_device(self._device_name)
        except ConfigError:
            return None

    def replica_devices(self) -> tuple[str | None, int]:
        """Name of the device and how many a replica has."""
        return self._device_name, self.tensor_parallel * self.data_parallel

    @property
    def _device_name(self) -> str:
        return DEVICES.get(self.system, self.system.replace("_", "-"))

    def _precision(self) -> Precision:
        return Precision(self.precision, self.kv_dtype, self.moe_precision, self.conversion, self.fused_norms)

    def _host(self, calibration: Calibration | None) -> HostOverhead:
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

    def _fallback(self, model: ModelSpec, device: DeviceSpec | None) -> RooflineModel | None:
        if self.fallback is None:
            return None
        if device is None:
            message = f"needs a described device, and {self.system} is not one"
            raise ConfigError(Problem("fallback", message, "Allowed: null"))
        return RooflineModel(model, device, Parallelism(tensor=self.tensor_parallel))
