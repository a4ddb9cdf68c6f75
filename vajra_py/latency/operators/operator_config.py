"""Settings of `type: aiconfigurator`: engine, GPU, model, precision and parallelism of the operator tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import structs
from pydantic import Field

from vajra_py.errors import ConfigError
from vajra_py.latency.hardware.catalog import load_model
from vajra_py.latency.hardware.devices import DeviceSpec, load_device
from vajra_py.latency.hardware.model_spec import ModelSpec
from vajra_py.latency.operators.operator_settings import MeasuredOperatorsConfig

if TYPE_CHECKING:
    from vajra_py.latency.operators.operator_bundle import Precision
    from vajra_py.latency.operators.operator_model import OperatorTablesModel

DEVICES = {"a100_sxm": "a100-80gb-sxm", "rtx_pro_6000_server": "rtx-pro-6000"}
"""Names of devices by system, for devices that are not named like their system. All others have the system's name, with
dashes for underscores.
"""


class AiconfiguratorConfig(MeasuredOperatorsConfig):
    """`type: aiconfigurator`: operator times by size from `aiconfigurator-core`, measured inside an engine."""

    type: Literal["aiconfigurator"] = "aiconfigurator"
    path: str | None = Field(
        None, description="Folder with the tables (aiconfigurator_core/systems); null: of the installed package."
    )
    system: str = Field(
        "h100_sxm", description="GPU by its name in the tables: h100_sxm, h200_sxm, b200_sxm, a100_sxm, l40s, …."
    )
    engine: str = Field("vllm", description="Engine in which the operators were measured: vllm, sglang, trtllm.")
    version: str | None = Field(None, description="Version of the engine; null: the newest measured one.")
    model: str = Field("Llama-3.1-8B", description="Name of a described model, or path of a config.json or its folder.")
    precision: Literal["bfloat16", "fp8", "fp8_block", "nvfp4", "int4_wo"] = Field(
        "bfloat16", description="Precision of matrix products, by its name in the tables."
    )
    moe_precision: str | None = Field(
        None, description="Precision of the experts, by its name in the tables; null: as `precision`."
    )
    conversion: Literal["dynamic", "static", "fused"] = Field(
        "dynamic",
        description="Quantization of the inputs of fp8 products: with measured scales, with known scales, or within the operator before.",
    )
    fused_norms: bool = Field(False, description="Fuse norms into the all-reduce before them (TensorRT-LLM).")
    kv_dtype: Literal["bfloat16", "fp8"] = Field("bfloat16", description="Precision of the KV cache.")
    context_variation: Annotated[float, Field(ge=0, le=5)] = Field(
        0.0, description="Coefficient of variation of the decodes' context lengths in a step; 0: equal lengths."
    )
    reach: Annotated[float, Field(ge=1)] = Field(
        2.0, description="Multiple of the largest measured size up to which times are extrapolated linearly."
    )

    def build(self) -> OperatorTablesModel:
        """Return the latency model.

        Raises:
            ConfigError: the tables are missing, or lack this system, engine, model, precision or parallelism.
        """
        from vajra_py.latency.operators.collectives import Link
        from vajra_py.latency.operators.operator_bundle import Split, operators
        from vajra_py.latency.operators.operator_model import OperatorTablesModel
        from vajra_py.latency.operators.operator_tables import OperatorTables, tables_folder

        tables = OperatorTables(tables_folder(self.path), self.system, self.engine, self.version)
        model, device = self.model_spec(), self.device_spec()
        split = Split(self.tensor_parallel, self.data_parallel, self.expert_parallel)
        found = operators(tables, model, split, self._precision())
        link = None if device is None else Link(device.attainable_link_bandwidth, device.link_latency_s)
        options = self.options(found.bundle, model, device, link)
        return OperatorTablesModel(found, model, options, device)

    def model_spec(self) -> ModelSpec:
        """Return the model; weights of 4 bits count as 8 bits when memory is sized."""
        dtype = "bfloat16" if self.precision == "bfloat16" else "fp8"
        return structs.replace(load_model(self.model), dtype=dtype, kv_dtype=self.kv_dtype)

    def device_spec(self) -> DeviceSpec | None:
        """Return the system's device, which describes memory and link; None if it is not described."""
        try:
            return load_device(self.device_name)
        except ConfigError:
            return None

    @property
    def device_name(self) -> str:
        """Name under which the device of this system would be shipped; there may be no such device."""
        return DEVICES.get(self.system, self.system.replace("_", "-"))

    def _precision(self) -> Precision:
        from vajra_py.latency.operators.operator_bundle import Precision

        return Precision(self.precision, self.kv_dtype, self.moe_precision, self.conversion, self.fused_norms)
