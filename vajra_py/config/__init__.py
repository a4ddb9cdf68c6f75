"""Experiment files: loading, validation, overrides, sweeps, manifest."""

from __future__ import annotations

from vajra_py.config.choices import register_backend
from vajra_py.config.editor_schema import json_schema
from vajra_py.config.links import LinksConfig
from vajra_py.config.load import (
    config_from_mapping,
    dump_effective,
    dump_yaml,
    expand_sweep,
    load_config,
    load_either,
    load_system,
    system_from_mapping,
)
from vajra_py.config.located import naming_lines
from vajra_py.config.manifest import run_manifest, versions
from vajra_py.config.replica import (
    DEFAULT_POOL,
    KvParallelConfig,
    MemoryConfig,
    PoolConfig,
    PrefixCacheConfig,
    ReplicaConfig,
)
from vajra_py.config.schema import (
    AdmissionConfig,
    BackendConfig,
    ExperimentConfig,
    OutputConfig,
    ReplicasetConfig,
    SelectConfig,
    SimulatorConfig,
    SystemConfig,
)
from vajra_py.config.sections import PolicyChoice, SchedulingConfig, TypedChoice
from vajra_py.config.sweeps import SweepPoint

__all__ = [
    "DEFAULT_POOL",
    "AdmissionConfig",
    "BackendConfig",
    "ExperimentConfig",
    "KvParallelConfig",
    "LinksConfig",
    "MemoryConfig",
    "OutputConfig",
    "PolicyChoice",
    "PoolConfig",
    "PrefixCacheConfig",
    "ReplicaConfig",
    "ReplicasetConfig",
    "SchedulingConfig",
    "SelectConfig",
    "SimulatorConfig",
    "SweepPoint",
    "SystemConfig",
    "TypedChoice",
    "config_from_mapping",
    "dump_effective",
    "dump_yaml",
    "expand_sweep",
    "json_schema",
    "load_config",
    "load_either",
    "load_system",
    "naming_lines",
    "register_backend",
    "run_manifest",
    "system_from_mapping",
    "versions",
]
