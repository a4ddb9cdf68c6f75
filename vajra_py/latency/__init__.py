"""Latency models: the duration of a step on a given model and device."""

from __future__ import annotations

from vajra_py.latency.config import (
    AffineConfig,
    ConstantConfig,
    ProfiledConfig,
    RecordedConfig,
    RooflineConfig,
)
from vajra_py.latency.hardware.catalog import device_names, load_model, model_names
from vajra_py.latency.hardware.deployment import Deployment, Parallelism, kv_blocks_that_fit
from vajra_py.latency.hardware.devices import DeviceConfig, DeviceSpec, device_sources, load_device
from vajra_py.latency.hardware.host_overhead import HOST_OVERHEADS, HostOverhead, host_overhead
from vajra_py.latency.hardware.model_spec import ModelSpec
from vajra_py.latency.models.constant import AffineModel, ConstantModel
from vajra_py.latency.models.overlapped import Overlap, OverlappedRooflineModel, Work
from vajra_py.latency.models.profiled import Profile, ProfiledModel, read_profile
from vajra_py.latency.models.recorded import RecordedDurations, RecordedModel
from vajra_py.latency.models.roofline import RooflineModel
from vajra_py.latency.models.variation import Variation, factors_among
from vajra_py.latency.operators.bundle_config import ProfileBundleConfig
from vajra_py.latency.operators.bundle_files import Bundle, read_bundle
from vajra_py.latency.operators.calibration_file import Calibration, read_calibration
from vajra_py.latency.operators.collectives import Link
from vajra_py.latency.operators.operator_config import AiconfiguratorConfig
from vajra_py.latency.operators.operator_model import OperatorTablesModel
from vajra_py.latency.operators.profile_bundle import BundleOptions, ProfileBundleModel
from vajra_py.latency.runs import CountsSteps, HasHostOverhead, PredictsDecodeRuns, ReplaysDurations, VariesSteps
from vajra_py.latency.services.prefill_time import PrefillTimeTable
from vajra_py.latency.specs import BUILTIN_LATENCY_MODELS, BUILTIN_OUTPUT_LENGTHS
from vajra_py.latency.step_times import REAL, StepTimes, combined_step_times, description_of, step_times_of

__all__ = [
    "BUILTIN_LATENCY_MODELS",
    "BUILTIN_OUTPUT_LENGTHS",
    "HOST_OVERHEADS",
    "REAL",
    "AffineConfig",
    "AffineModel",
    "AiconfiguratorConfig",
    "Bundle",
    "BundleOptions",
    "Calibration",
    "ConstantConfig",
    "ConstantModel",
    "CountsSteps",
    "Deployment",
    "DeviceConfig",
    "DeviceSpec",
    "HasHostOverhead",
    "HostOverhead",
    "Link",
    "ModelSpec",
    "OperatorTablesModel",
    "Overlap",
    "OverlappedRooflineModel",
    "Parallelism",
    "PredictsDecodeRuns",
    "PrefillTimeTable",
    "Profile",
    "ProfileBundleConfig",
    "ProfileBundleModel",
    "ProfiledConfig",
    "ProfiledModel",
    "RecordedConfig",
    "RecordedDurations",
    "RecordedModel",
    "ReplaysDurations",
    "RooflineConfig",
    "RooflineModel",
    "StepTimes",
    "Variation",
    "VariesSteps",
    "Work",
    "combined_step_times",
    "description_of",
    "device_names",
    "device_sources",
    "factors_among",
    "host_overhead",
    "kv_blocks_that_fit",
    "load_device",
    "load_model",
    "model_names",
    "read_bundle",
    "read_calibration",
    "read_profile",
    "step_times_of",
]
