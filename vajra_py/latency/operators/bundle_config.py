"""Settings of `type: profile_bundle`: the bundle, the number of GPUs, the host overhead and the calibration."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import structs
from pydantic import Field

from vajra_py.errors import ConfigError
from vajra_py.latency.hardware.catalog import load_model, model_names
from vajra_py.latency.hardware.devices import DeviceSpec, load_device
from vajra_py.latency.hardware.model_spec import ModelSpec
from vajra_py.latency.operators.operator_settings import MeasuredOperatorsConfig, Micros

if TYPE_CHECKING:
    from vajra_py.latency.operators.bundle_files import Bundle
    from vajra_py.latency.operators.collectives import Link
    from vajra_py.latency.operators.expert_times import Routing
    from vajra_py.latency.operators.profile_bundle import ProfileBundleModel

_TUNED = re.compile(r"(?i)-(instruct|chat|base|thinking|it|hf)(-.*)?$")


class ProfileBundleConfig(MeasuredOperatorsConfig):
    """`type: profile_bundle`: operator times measured on the same GPU and model, inside an engine."""

    type: Literal["profile_bundle"] = "profile_bundle"
    path: str = Field(description="Folder with the bundle's meta.yaml: PROFILES/HARDWARE/MODEL/VARIANT.")
    expert_routing: Literal["uniform", "balanced"] = Field(
        "uniform", description="Distribution of tokens over experts: at random (uniform), or equal (balanced)."
    )
    expert_imbalance: Annotated[float, Field(ge=1)] = Field(
        1.0, description="Tokens of the most loaded rank over the mean of the ranks (expert_parallel)."
    )
    model: str | None = Field(
        None, description="Name of a described model, or path of a config.json; null: the bundle's own."
    )
    device: str | None = Field(
        None, description="Described device, for the link and the memory; null: the bundle's, if it is described."
    )
    link_bandwidth_gb_s: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Bandwidth that collectives reach, GB/s one way; null: the device's."
    )
    link_latency_us: Micros | None = Field(
        None, description="Latency of a collective without data, microseconds; null: the device's."
    )
    context_variation: Annotated[float, Field(ge=0, le=5)] = Field(
        0.4, description="Coefficient of variation of the decodes' context lengths in a step; 0: equal lengths."
    )
    reach: Annotated[float, Field(ge=1)] = Field(
        4.0, description="Multiple of the largest measured size up to which times are extrapolated linearly."
    )

    def build(self) -> ProfileBundleModel:
        """Return the latency model.

        Raises:
            ConfigError: the bundle is missing or broken or does not match this model or parallelism, or the link is not
                described.
        """
        from vajra_py.latency.operators.bundle_files import read_bundle
        from vajra_py.latency.operators.profile_bundle import ProfileBundleModel

        bundle = read_bundle(self.path, self.tensor_parallel, whole_experts=self.expert_parallel)
        model = self.model_spec(bundle)
        device = self.device_spec(bundle)
        options = self.options(bundle, model, device, self._link(device), self._routing(bundle))
        return ProfileBundleModel(bundle, model, options, device)

    @property
    def device_name(self) -> str | None:
        """Name of the configured device, else of the bundle's device."""
        from vajra_py.latency.operators.bundle_files import bundle_hardware

        return self.device or bundle_hardware(self.path)

    def model_spec(self, bundle: Bundle | None = None) -> ModelSpec:
        """Return the configured model, else the bundle's model, in the bundle's precision.

        Tuned variants have their base model's dimensions.
        """
        from vajra_py.latency.operators.bundle_files import read_bundle

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
        return structs.replace(
            model, dtype=dtype, kv_dtype="fp8" if cache == "fp8" else "bfloat16" if dtype == "fp8" else dtype
        )

    def device_spec(self, bundle: Bundle) -> DeviceSpec | None:
        """Return the configured device, else the bundle's device; None if the bundle's device is not described."""
        if self.device is not None:
            return load_device(self.device)
        try:
            return load_device(bundle.hardware)
        except ConfigError:
            return None

    def _link(self, device: DeviceSpec | None) -> Link | None:
        from vajra_py.latency.operators.collectives import Link

        bandwidth = None if device is None else device.attainable_link_bandwidth
        latency = None if device is None else device.link_latency_s
        if self.link_bandwidth_gb_s is not None:
            bandwidth = 1e9 * self.link_bandwidth_gb_s
        if self.link_latency_us is not None:
            latency = 1e-6 * self.link_latency_us
        return None if bandwidth is None or latency is None else Link(bandwidth, latency)

    def _routing(self, bundle: Bundle) -> Routing:
        from vajra_py.latency.operators.expert_times import Routing

        gpus = self.data_parallel * self.tensor_parallel
        ranks, cut = (gpus, 1) if self.expert_parallel else (1, gpus // bundle.experts_cut)
        return Routing(self.expert_routing, ranks, self.expert_imbalance, cut)
