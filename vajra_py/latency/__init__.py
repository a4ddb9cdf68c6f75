"""Latency models: the duration of a step on a given model and device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vajra_py.lazy import lazy_names

if TYPE_CHECKING:
    from vajra_py.latency.config import AffineConfig, ConstantConfig, ProfiledConfig, RecordedConfig, RooflineConfig
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

_HOMES = {
    "AffineConfig": "config",
    "AffineModel": "models.constant",
    "AiconfiguratorConfig": "operators.operator_config",
    "BUILTIN_LATENCY_MODELS": "specs",
    "BUILTIN_OUTPUT_LENGTHS": "specs",
    "Bundle": "operators.bundle_files",
    "BundleOptions": "operators.profile_bundle",
    "Calibration": "operators.calibration_file",
    "ConstantConfig": "config",
    "ConstantModel": "models.constant",
    "CountsSteps": "runs",
    "Deployment": "hardware.deployment",
    "DeviceConfig": "hardware.devices",
    "DeviceSpec": "hardware.devices",
    "HOST_OVERHEADS": "hardware.host_overhead",
    "HasHostOverhead": "runs",
    "HostOverhead": "hardware.host_overhead",
    "Link": "operators.collectives",
    "ModelSpec": "hardware.model_spec",
    "OperatorTablesModel": "operators.operator_model",
    "Overlap": "models.overlapped",
    "OverlappedRooflineModel": "models.overlapped",
    "Parallelism": "hardware.deployment",
    "PredictsDecodeRuns": "runs",
    "PrefillTimeTable": "services.prefill_time",
    "Profile": "models.profiled",
    "ProfileBundleConfig": "operators.bundle_config",
    "ProfileBundleModel": "operators.profile_bundle",
    "ProfiledConfig": "config",
    "ProfiledModel": "models.profiled",
    "REAL": "step_times",
    "RecordedConfig": "config",
    "RecordedDurations": "models.recorded",
    "RecordedModel": "models.recorded",
    "ReplaysDurations": "runs",
    "RooflineConfig": "config",
    "RooflineModel": "models.roofline",
    "StepTimes": "step_times",
    "Variation": "models.variation",
    "VariesSteps": "runs",
    "Work": "models.overlapped",
    "combined_step_times": "step_times",
    "description_of": "step_times",
    "device_names": "hardware.catalog",
    "device_sources": "hardware.devices",
    "factors_among": "models.variation",
    "host_overhead": "hardware.host_overhead",
    "kv_blocks_that_fit": "hardware.deployment",
    "load_device": "hardware.devices",
    "load_model": "hardware.catalog",
    "model_names": "hardware.catalog",
    "read_bundle": "operators.bundle_files",
    "read_calibration": "operators.calibration_file",
    "read_profile": "models.profiled",
    "step_times_of": "step_times",
}

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


__getattr__, __dir__ = lazy_names(__name__, _HOMES)
