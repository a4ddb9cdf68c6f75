"""Settings of `type: profile_bundle`: which bundle, on how many GPUs, with which host overhead and calibration."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from vajra_py.errors import ConfigError
from vajra_py.latency.bundle_files import Bundle, bundle_hardware, read_bundle
from vajra_py.latency.calibration_file import Calibration, read_calibration
from vajra_py.latency.catalog import load_model, model_names
from vajra_py.latency.config import SettingsModel, complain_as_value_error, resolved_path
from vajra_py.latency.deployment import Parallelism
from vajra_py.latency.devices import DeviceSpec, load_device
from vajra_py.latency.expert_times import Routing
from vajra_py.latency.host_overhead import HOST_OVERHEADS, HostOverhead, host_overhead
from vajra_py.latency.model_spec import ModelSpec
from vajra_py.latency.profile_bundle import CAPTURE_LIMIT, BundleOptions, Link, ProfileBundleModel
from vajra_py.latency.roofline import RooflineModel

_Micros = Annotated[float, Field(ge=0)]
_Degree = Annotated[int, Field(ge=1)]
_TUNED = re.compile(r"(?i)-(instruct|chat|base|thinking|it|hf)(-.*)?$")


class ProfileBundleConfig(SettingsModel):
    """`type: profile_bundle`: operator times measured on the same GPU and model, inside an engine."""

    type: Literal["profile_bundle"] = "profile_bundle"
    path: str = Field(description="Folder with the bundle's meta.yaml: PROFILES/HARDWARE/MODEL/VARIANT.")
    tensor_parallel: _Degree = Field(1, description="GPUs that share every layer; the bundle has a folder for each.")
    data_parallel: _Degree = Field(
        1, description="Ranks that step together and share the experts; the replica is all of them."
    )
    expert_parallel: bool = Field(False, description="Experts are spread over the ranks instead of being split.")
    expert_routing: Literal["uniform", "balanced"] = Field(
        "uniform", description="How tokens spread over experts: each at random, or equally many to all."
    )
    expert_imbalance: Annotated[float, Field(ge=1)] = Field(
        1.0, description="Tokens of the fullest rank over the mean of the ranks (expert_parallel)."
    )
    model: str | None = Field(
        None, description="Name of a described model, or path of a config.json; null: the bundle's own."
    )
    device: str | None = Field(
        None, description="Described device, for the link and the memory; null: the one the bundle names, if described."
    )
    link_bandwidth_gb_s: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Bandwidth that collectives reach, GB/s one way; null: the device's."
    )
    link_latency_us: _Micros | None = Field(
        None, description="Microseconds of an empty collective; null: the device's."
    )
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
        0.4, description="Standard deviation over mean of the contexts of the decodes in a step; 0: equal contexts."
    )
    cuda_graphs: bool = Field(True, description="Small batches are padded to the sizes of captured CUDA graphs.")
    capture_limit: Annotated[int, Field(ge=1)] = Field(CAPTURE_LIMIT, description="Largest captured batch, tokens.")
    reach: Annotated[float, Field(ge=1)] = Field(
        4.0, description="How many times the largest measured size is still answered, along the last line."
    )
    fallback: Literal["roofline"] | None = Field(
        None, description="What answers beyond the reach; null: such a step is an error."
    )
    calibration: str | None = Field(None, description="Calibration that `vajra calibrate` wrote for this bundle.")

    @field_validator("path", "calibration")
    @classmethod
    def _resolve(cls, value: str | None, info: ValidationInfo) -> str | None:
        return None if value is None else resolved_path(value, info)

    @field_validator("host")
    @classmethod
    def _known_host(cls, value: str) -> str:
        complain_as_value_error(lambda: host_overhead(value), "host")
        return value

    def build(self) -> ProfileBundleModel:
        """The latency model.

        Raises:
            ConfigError: the bundle is missing or broken, does not have this model or parallelism, or nothing describes the link.
        """
        bundle = read_bundle(self.path, self.tensor_parallel)
        model = self.model_spec(bundle)
        device = self.device_spec(bundle)
        calibration = read_calibration(self.calibration) if self.calibration else None
        if calibration is not None:
            calibration.check_fits(bundle)
        options = BundleOptions(
            link=self._link(device),
            host=self._host(calibration),
            context_variation=self.context_variation,
            cuda_graphs=self.cuda_graphs,
            capture_limit=self.capture_limit,
            reach=self.reach,
            data_parallel=self.data_parallel,
            routing=self._routing(),
            scales=dict(calibration.scales) if calibration else {},
            fallback=self._fallback(model, device),
            calibration=calibration,
        )
        return ProfileBundleModel(bundle, model, options, device)

    def replica_devices(self) -> tuple[str | None, int]:
        """Name of the device and how many a replica has."""
        return self.device or bundle_hardware(self.path), self.tensor_parallel * self.data_parallel

    def model_spec(self, bundle: Bundle | None = None) -> ModelSpec:
        """The model in the bundle's precision: the one named here, else the bundle's, whose tuned variants have its shape."""
        bundle = bundle or read_bundle(self.path, self.tensor_parallel)
        name = self.model
        if name is None:
            name = bundle.model.rsplit("/", 1)[-1]
            shipped = {one.lower() for one in model_names()}
            if name.lower() not in shipped and (plain := _TUNED.sub("", name)).lower() in shipped:
                name = plain
        model = load_model(name)
        weights, _, cache = bundle.variant.partition("-kv")
        dtype = {"bf16": "bfloat16", "fp16": "float16", "fp8": "fp8", "fp32": "float32"}.get(weights, model.dtype)
        return replace(
            model, dtype=dtype, kv_dtype="fp8" if cache == "fp8" else "bfloat16" if dtype == "fp8" else dtype
        )

    def device_spec(self, bundle: Bundle) -> DeviceSpec | None:
        """The device named here, else the bundle's where it is described."""
        if self.device is not None:
            return load_device(self.device)
        try:
            return load_device(bundle.hardware)
        except ConfigError:
            return None

    def _link(self, device: DeviceSpec | None) -> Link | None:
        bandwidth = None if device is None else device.attainable_link_bandwidth
        latency = None if device is None else device.link_latency_s
        if self.link_bandwidth_gb_s is not None:
            bandwidth = 1e9 * self.link_bandwidth_gb_s
        if self.link_latency_us is not None:
            latency = 1e-6 * self.link_latency_us
        return None if bandwidth is None or latency is None else Link(bandwidth, latency)

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

    def _routing(self) -> Routing:
        ranks = self.data_parallel * self.tensor_parallel if self.expert_parallel else 1
        return Routing(self.expert_routing, ranks, self.expert_imbalance)

    def _fallback(self, model: ModelSpec, device: DeviceSpec | None) -> RooflineModel | None:
        if self.fallback is None:
            return None
        known = device or load_device(self.device or "")
        return RooflineModel(model, known, Parallelism(tensor=self.tensor_parallel))
