"""Workloads: requests with arrival times, lengths and content.

Read a trace, draw a synthetic workload, or take a built-in profile; stretch, cut, merge and label it; pass it to a
simulation or a benchmark. Import from here: the submodules are private.
"""

from __future__ import annotations

from vajra_py.workload.arrivals import (
    ArrivalProcess,
    AtOnce,
    CoxGamma,
    FixedInterval,
    Gamma,
    OnOff,
    Piece,
    PiecewiseConstant,
    Poisson,
    QuantileGaps,
    Weibull,
    arrival_times,
)
from vajra_py.workload.build import build_workload
from vajra_py.workload.config import (
    AgenticConfig,
    AzureConfig,
    BurstGptConfig,
    CsvConfig,
    JsonlConfig,
    LengthsConfig,
    MergeConfig,
    MooncakeConfig,
    PriorityShare,
    ProfileConfig,
    ProgramFileConfig,
    ProgramsConfig,
    SessionsConfig,
    SloClassConfig,
    SyntheticConfig,
    TenantShares,
    WorkloadConfig,
    WorkloadOptions,
)
from vajra_py.workload.distributions import (
    Constant,
    Distribution,
    Geometric,
    Lognormal,
    LognormalMixture,
    LognormalPart,
    QuantileTable,
    Uniform,
)
from vajra_py.workload.profiles import ProfileInfo, profile, profile_info, profile_names
from vajra_py.workload.programs import Chain, Dag, ForkJoin, ProgramCalls, Tree, programs_workload
from vajra_py.workload.read_agentic import read_agentic
from vajra_py.workload.read_csv import CsvLayout, read_azure, read_burstgpt, read_csv, read_lengths
from vajra_py.workload.read_jsonl import read_jsonl, write_jsonl
from vajra_py.workload.read_mooncake import MooncakeOptions, read_mooncake
from vajra_py.workload.read_programs import read_programs
from vajra_py.workload.request import PromptContent, RequestSpec, SegmentId
from vajra_py.workload.sessions import Sessions, SystemPrompts, sessions_workload
from vajra_py.workload.statistics import LengthStatistics, WorkloadStatistics
from vajra_py.workload.synthetic import (
    ClosedLoop,
    Lengths,
    RngFor,
    closed_loop_workload,
    named_streams,
    synthetic_workload,
)
from vajra_py.workload.workload import SloClass, Workload

__all__ = [
    "AgenticConfig",
    "ArrivalProcess",
    "AtOnce",
    "AzureConfig",
    "BurstGptConfig",
    "Chain",
    "ClosedLoop",
    "Constant",
    "CoxGamma",
    "CsvConfig",
    "CsvLayout",
    "Dag",
    "Distribution",
    "FixedInterval",
    "ForkJoin",
    "Gamma",
    "Geometric",
    "JsonlConfig",
    "LengthStatistics",
    "Lengths",
    "LengthsConfig",
    "Lognormal",
    "LognormalMixture",
    "LognormalPart",
    "MergeConfig",
    "MooncakeConfig",
    "MooncakeOptions",
    "OnOff",
    "Piece",
    "PiecewiseConstant",
    "Poisson",
    "PriorityShare",
    "ProfileConfig",
    "ProfileInfo",
    "ProgramCalls",
    "ProgramFileConfig",
    "ProgramsConfig",
    "PromptContent",
    "QuantileGaps",
    "QuantileTable",
    "RequestSpec",
    "RngFor",
    "SegmentId",
    "Sessions",
    "SessionsConfig",
    "SloClass",
    "SloClassConfig",
    "SyntheticConfig",
    "SystemPrompts",
    "TenantShares",
    "Tree",
    "Uniform",
    "Weibull",
    "Workload",
    "WorkloadConfig",
    "WorkloadOptions",
    "WorkloadStatistics",
    "arrival_times",
    "build_workload",
    "closed_loop_workload",
    "named_streams",
    "profile",
    "profile_info",
    "profile_names",
    "programs_workload",
    "read_agentic",
    "read_azure",
    "read_burstgpt",
    "read_csv",
    "read_jsonl",
    "read_lengths",
    "read_mooncake",
    "read_programs",
    "sessions_workload",
    "synthetic_workload",
    "write_jsonl",
]
