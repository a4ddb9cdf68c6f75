"""Settings under `latency:` and `output_length:`, and the objects they build.

Each class holds the settings of one `type`; its fields are the parameters, with units in their names or descriptions.
A relative path is looked up in the folder `base_folder` of pydantic's validation context, if it is given, and then in
the current folder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import structs
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator

from vajra_py.contract.latency import LengthEstimate
from vajra_py.errors import ConfigError
from vajra_py.latency.hardware.catalog import load_model
from vajra_py.latency.hardware.deployment import Deployment, Parallelism
from vajra_py.latency.hardware.devices import DeviceConfig, DeviceSpec, load_device
from vajra_py.latency.hardware.model_spec import ModelSpec
from vajra_py.latency.models.constant import AffineModel, ConstantModel
from vajra_py.latency.models.overlapped import Overlap, OverlappedRooflineModel
from vajra_py.latency.models.roofline import RooflineModel
from vajra_py.latency.services.output_length import ConstantLengths, HistoryLengths, NoLengths, QuantileLengths

if TYPE_CHECKING:
    from vajra_py.latency.models.profiled import ProfiledModel
    from vajra_py.latency.models.recorded import RecordedModel

Dtype = Literal["float32", "bfloat16", "float16", "fp8"]
_Seconds = Annotated[float, Field(ge=0)]
_Degree = Annotated[int, Field(ge=1, le=1024)]


class SettingsModel(BaseModel):
    """Base class of the sections under `latency:` and `output_length:`.

    Objects are immutable; unknown keys, NaN and infinity are errors.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, validate_default=True, allow_inf_nan=False)


def resolved_path(path: str, info: ValidationInfo) -> str:
    """Return `path` below the context's `base_folder` if such a file or folder exists, else `path` unchanged."""
    folder = info.context.get("base_folder") if isinstance(info.context, dict) else None
    if folder is not None and not Path(path).is_absolute():
        candidate = Path(folder) / path
        if candidate.exists():
            return str(candidate)
    return path


def complain_as_value_error(load: Callable[[], object], field: str = "") -> None:
    """Run `load`, and convert its `ConfigError` to a ValueError.

    Pydantic adds the place, `field`, to a ValueError, so the place is removed from the texts of the problems.
    """
    try:
        load()
    except ConfigError as error:
        raise ValueError("\n".join(str(problem).removeprefix(f"{field}: ") for problem in error.problems)) from error


DeviceChoice = Annotated[
    Annotated[str, Tag("name")] | Annotated[DeviceConfig, Tag("figures")],
    Discriminator(lambda value: "name" if isinstance(value, str) else "figures"),
]


class RooflineConfig(SettingsModel):
    """`type: roofline`: step times from a model's config.json and a device's figures, without measurements."""

    type: Literal["roofline"] = "roofline"
    model: str = Field("Llama-3.1-8B", description="Name of a described model, or path of a config.json or its folder.")
    device: DeviceChoice = Field(
        "a100-80gb-sxm",
        description="Name of a described device, or a device's figures (base: NAME changes a described one).",
    )
    tensor_parallel: _Degree = Field(1, description="Number of devices that each layer is divided among.")
    pipeline_parallel: _Degree = Field(1, description="Pipeline stages, each with its part of the layers.")
    kv_parallel: _Degree = Field(
        1, description="Number of groups that the KV cache of a long request may be spread over."
    )
    dtype: Dtype | None = Field(None, description="Data type of weights and matrix products; default: the model's.")
    kv_dtype: Dtype | None = Field(None, description="Data type of the KV cache; default: that of the activations.")
    overlap: Overlap = Field(
        "partial",
        description=(
            "Overlap of arithmetic, memory traffic and communication between devices: none; of the first two in part within an operator (`partial`); in full within an operator (`operators`), with prefill and decode attention as one (`attention`), or over the whole step (`step`)."
        ),
    )

    @field_validator("model")
    @classmethod
    def _known_model(cls, value: str, info: ValidationInfo) -> str:
        value = resolved_path(value, info)
        complain_as_value_error(lambda: load_model(value), "model")
        return value

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str | DeviceConfig) -> str | DeviceConfig:
        complain_as_value_error(lambda: load_device(value), "device")
        return value

    @model_validator(mode="after")
    def _can_be_split(self) -> RooflineConfig:
        complain_as_value_error(self.deployment)
        return self

    def model_spec(self) -> ModelSpec:
        """Return the model with the configured dtypes."""
        model = load_model(self.model)
        dtype = self.dtype or model.dtype
        kv_dtype = self.kv_dtype or ("bfloat16" if dtype == "fp8" else dtype)
        return structs.replace(model, dtype=dtype, kv_dtype=kv_dtype)

    def device_spec(self) -> DeviceSpec:
        """Return the configured device."""
        return load_device(self.device)

    def deployment(self) -> Deployment:
        """Return the model on its devices, which determines the memory for KV.

        Raises:
            ConfigError: the model cannot be divided over the configured devices.
        """
        split = Parallelism(self.tensor_parallel, self.pipeline_parallel, self.kv_parallel)
        return Deployment(self.model_spec(), self.device_spec(), split)

    def build(self) -> RooflineModel | OverlappedRooflineModel:
        """Return the latency model."""
        deployment = self.deployment()
        if self.overlap != "partial":
            return OverlappedRooflineModel(
                deployment.model, deployment.device, deployment.parallelism, overlap=self.overlap
            )
        return RooflineModel(deployment.model, deployment.device, deployment.parallelism)


class ProfiledConfig(SettingsModel):
    """`type: profiled`: a fit to step times of a model on a device, measured by `vajra profile` or by the user."""

    type: Literal["profiled"] = "profiled"
    path: str = Field(
        description="Profile that `vajra profile` wrote, or a table of measured steps (.csv, .csv.gz, .npz, .parquet)."
    )
    variation: bool = Field(True, description="Vary the times of equal steps as much as the measured ones varied.")

    @field_validator("path")
    @classmethod
    def _resolve(cls, value: str, info: ValidationInfo) -> str:
        return resolved_path(value, info)

    def build(self) -> ProfiledModel:
        """Return the latency model.

        Raises:
            ConfigError: the file is missing or broken.
        """
        from vajra_py.latency.models.fitting import is_steps_table, profile_of_steps
        from vajra_py.latency.models.profiled import ProfiledModel, read_profile

        profile = profile_of_steps(self.path) if is_steps_table(self.path) else read_profile(self.path)
        return ProfiledModel(profile, varies=self.variation)


class ConstantConfig(SettingsModel):
    """`type: constant`: every step takes the same time."""

    type: Literal["constant"] = "constant"
    step_time_s: Annotated[float, Field(gt=0)] = Field(0.02, description="Constant time of a step, seconds.")
    num_stages: _Degree = Field(1, description="Number of pipeline stages, which share the time equally.")

    def build(self) -> ConstantModel:
        """Return the latency model."""
        return ConstantModel(self.step_time_s, self.num_stages)


class AffineConfig(SettingsModel):
    """`type: affine`: a base time, plus a time per token, request and attended token."""

    type: Literal["affine"] = "affine"
    base_s: _Seconds = Field(0.01, description="Constant time of a step, seconds.")
    per_token_s: _Seconds = Field(0.0, description="Seconds per query token.")
    per_request_s: _Seconds = Field(0.0, description="Seconds per request in the batch.")
    per_prefill_pair_s: _Seconds = Field(0.0, description="Seconds per query-key pair of prefill attention.")
    per_decode_context_token_s: _Seconds = Field(0.0, description="Seconds per cached token that decodes attend to.")
    per_swap_byte_s: _Seconds = Field(0.0, description="Seconds per byte swapped.")
    num_stages: _Degree = Field(1, description="Number of pipeline stages, which share the time equally.")
    overlap: bool = Field(
        False,
        description=(
            "Overlap the time of tokens and prefill pairs (arithmetic) with that of attended cached tokens (memory), so that the longer of the two counts; false: their sum."
        ),
    )

    @model_validator(mode="after")
    def _takes_time(self) -> AffineConfig:
        if self.base_s == 0 and self.per_token_s == 0:
            raise ValueError("a step would take no time (base_s and per_token_s are 0). Allowed: at least one above 0")
        return self

    def build(self) -> AffineModel:
        """Return the latency model."""
        return AffineModel(**self.model_dump(exclude={"type"}))


class RecordedConfig(SettingsModel):
    """`type: recorded`: the step durations of an earlier run, in order."""

    type: Literal["recorded"] = "recorded"
    steps: str = Field(description="Steps table of the recorded run (columns replica_id, step_index, duration_s).")

    @field_validator("steps")
    @classmethod
    def _resolve(cls, value: str, info: ValidationInfo) -> str:
        return resolved_path(value, info)

    def build(self) -> RecordedModel:
        """Return the latency model, at the start of its recording.

        Raises:
            ConfigError: the table is missing or broken.
        """
        from vajra_py.latency.models.recorded import RecordedDurations, RecordedModel

        return RecordedModel(RecordedDurations.from_steps_table(self.steps))


class NoLengthsConfig(SettingsModel):
    """`none`: no estimates."""

    def build(self) -> NoLengths:
        """Return the predictor."""
        return NoLengths()


class ConstantLengthsConfig(SettingsModel):
    """`constant`: one estimate for all requests."""

    mean_tokens: Annotated[float, Field(gt=0)] = Field(256.0, description="Mean output length.")
    p50_tokens: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Median output length; default: the mean."
    )
    p90_tokens: Annotated[float, Field(gt=0)] | None = Field(
        None, description="90th percentile of output lengths; default: the mean."
    )

    def build(self) -> ConstantLengths:
        """Return the predictor."""
        mean = self.mean_tokens
        return ConstantLengths(LengthEstimate(mean, self.p50_tokens or mean, self.p90_tokens or mean))


class QuantileLengthsConfig(SettingsModel):
    """`histogram`: lengths follow given quantiles, conditioned on the tokens that a request has generated."""

    quantiles: dict[float, float] = Field(
        default={0.0: 1.0, 0.25: 64.0, 0.5: 180.0, 0.75: 350.0, 0.9: 600.0, 0.99: 1200.0, 1.0: 2048.0},
        description="Quantiles of output lengths: tokens by fraction of requests, from 0 to 1.",
    )

    @field_validator("quantiles")
    @classmethod
    def _a_distribution(cls, value: dict[float, float]) -> dict[float, float]:
        fractions = sorted(value)
        if len(fractions) < 2 or fractions[0] != 0.0 or fractions[-1] != 1.0:
            raise ValueError(f"fractions do not reach from 0 to 1 (got {fractions}). Allowed: ascending from 0 to 1")
        tokens = [value[fraction] for fraction in fractions]
        if tokens[0] < 0 or tokens != sorted(tokens):
            raise ValueError(f"tokens are negative or descend (got {tokens}). Allowed: not falling as fractions rise")
        return value

    def build(self) -> QuantileLengths:
        """Return the predictor."""
        return QuantileLengths(self.quantiles)


class HistoryLengthsConfig(SettingsModel):
    """`history`: lengths are like those of the requests that ended most recently."""

    window: Annotated[int, Field(ge=1)] = Field(5, description="Number of most recent requests that count.")
    by_tenant: bool = Field(True, description="Count only requests of the same tenant.")

    def build(self) -> HistoryLengths:
        """Return the predictor, without any history."""
        return HistoryLengths(self.window, by_tenant=self.by_tenant)


class OracleLengthsConfig(SettingsModel):
    """`oracle`: the true lengths."""


class NoisyOracleLengthsConfig(SettingsModel):
    """`noisy_oracle`: the true lengths with random errors."""

    sigma: Annotated[float, Field(ge=0, le=20)] = Field(
        0.3, description="Standard deviation of the logarithm of the error."
    )
