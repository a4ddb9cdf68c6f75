"""Latency models: the duration of a step on a given model and device."""

from __future__ import annotations

from vajra_py.latency.bundle_config import ProfileBundleConfig
from vajra_py.latency.bundle_files import Bundle, read_bundle
from vajra_py.latency.calibration_file import Calibration, read_calibration
from vajra_py.latency.catalog import device_names, load_model, model_names
from vajra_py.latency.collectives import Link
from vajra_py.latency.config import (
    AffineConfig,
    ConstantConfig,
    ProfiledConfig,
    RecordedConfig,
    RooflineConfig,
    TableConfig,
)
from vajra_py.latency.constant import AffineModel, ConstantModel
from vajra_py.latency.deployment import Deployment, Parallelism, kv_blocks_that_fit
from vajra_py.latency.devices import DeviceConfig, DeviceSpec, device_sources, load_device
from vajra_py.latency.grid_table import GridTableModel
from vajra_py.latency.host_overhead import HOST_OVERHEADS, HostOverhead, host_overhead
from vajra_py.latency.model_spec import ModelSpec
from vajra_py.latency.operator_config import AiconfiguratorConfig
from vajra_py.latency.operator_model import OperatorTablesModel
from vajra_py.latency.prefill_time import PrefillTimeTable
from vajra_py.latency.profile_bundle import BundleOptions, ProfileBundleModel
from vajra_py.latency.profiled import Profile, ProfiledModel, read_profile
from vajra_py.latency.recorded import RecordedDurations, RecordedModel
from vajra_py.latency.roofline import RooflineModel
from vajra_py.latency.runs import CountsSteps, HasHostOverhead, PredictsDecodeRuns, ReplaysDurations, VariesSteps
from vajra_py.latency.specs import BUILTIN_LATENCY_MODELS, BUILTIN_OUTPUT_LENGTHS
from vajra_py.latency.step_times import REAL, StepTimes, combined_step_times, step_times_of
from vajra_py.latency.table import OperatorTableModel, TableOptions
from vajra_py.latency.variation import Variation, factors_among

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
    "GridTableModel",
    "HasHostOverhead",
    "HostOverhead",
    "Link",
    "ModelSpec",
    "OperatorTableModel",
    "OperatorTablesModel",
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
    "TableConfig",
    "TableOptions",
    "Variation",
    "VariesSteps",
    "combined_step_times",
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
