"""Workloads: requests with arrival times, lengths and content.

Read a trace, draw a synthetic workload, or take a built-in profile; stretch, cut, merge and label it; pass it to a
simulation or a benchmark. Import names from this package: its submodules are private.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vajra_py.lazy import lazy_names

if TYPE_CHECKING:
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
    from vajra_py.workload.config import MergeConfig, WorkloadConfig
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
    from vajra_py.workload.kinds.agentic import AgenticConfig
    from vajra_py.workload.kinds.azure import AzureConfig
    from vajra_py.workload.kinds.burstgpt import BurstGptConfig
    from vajra_py.workload.kinds.csv import CsvConfig
    from vajra_py.workload.kinds.jsonl import JsonlConfig
    from vajra_py.workload.kinds.lengths import LengthsConfig
    from vajra_py.workload.kinds.mooncake import MooncakeConfig
    from vajra_py.workload.kinds.profile import ProfileConfig
    from vajra_py.workload.kinds.program_file import ProgramFileConfig
    from vajra_py.workload.kinds.programs import ProgramsConfig
    from vajra_py.workload.kinds.sessions import SessionsConfig
    from vajra_py.workload.kinds.synthetic import SyntheticConfig
    from vajra_py.workload.options import PriorityShare, SloClassConfig, TenantShares, WorkloadOptions
    from vajra_py.workload.profiles import ProfileInfo, profile, profile_info, profile_names
    from vajra_py.workload.programs import Chain, Dag, ForkJoin, ProgramCalls, Tree, programs_workload
    from vajra_py.workload.readers.agentic import read_agentic
    from vajra_py.workload.readers.csv import CsvLayout, read_azure, read_burstgpt, read_csv, read_lengths
    from vajra_py.workload.readers.jsonl import read_jsonl, write_jsonl
    from vajra_py.workload.readers.mooncake import MooncakeOptions, read_mooncake
    from vajra_py.workload.readers.programs import read_programs
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

_HOMES = {
    "AgenticConfig": "kinds.agentic",
    "ArrivalProcess": "arrivals",
    "AtOnce": "arrivals",
    "AzureConfig": "kinds.azure",
    "BurstGptConfig": "kinds.burstgpt",
    "Chain": "programs",
    "ClosedLoop": "synthetic",
    "Constant": "distributions",
    "CoxGamma": "arrivals",
    "CsvConfig": "kinds.csv",
    "CsvLayout": "readers.csv",
    "Dag": "programs",
    "Distribution": "distributions",
    "FixedInterval": "arrivals",
    "ForkJoin": "programs",
    "Gamma": "arrivals",
    "Geometric": "distributions",
    "JsonlConfig": "kinds.jsonl",
    "LengthStatistics": "statistics",
    "Lengths": "synthetic",
    "LengthsConfig": "kinds.lengths",
    "Lognormal": "distributions",
    "LognormalMixture": "distributions",
    "LognormalPart": "distributions",
    "MergeConfig": "config",
    "MooncakeConfig": "kinds.mooncake",
    "MooncakeOptions": "readers.mooncake",
    "OnOff": "arrivals",
    "Piece": "arrivals",
    "PiecewiseConstant": "arrivals",
    "Poisson": "arrivals",
    "PriorityShare": "options",
    "ProfileConfig": "kinds.profile",
    "ProfileInfo": "profiles",
    "ProgramCalls": "programs",
    "ProgramFileConfig": "kinds.program_file",
    "ProgramsConfig": "kinds.programs",
    "PromptContent": "request",
    "QuantileGaps": "arrivals",
    "QuantileTable": "distributions",
    "RequestSpec": "request",
    "RngFor": "synthetic",
    "SegmentId": "request",
    "Sessions": "sessions",
    "SessionsConfig": "kinds.sessions",
    "SloClass": "workload",
    "SloClassConfig": "options",
    "SyntheticConfig": "kinds.synthetic",
    "SystemPrompts": "sessions",
    "TenantShares": "options",
    "Tree": "programs",
    "Uniform": "distributions",
    "Weibull": "arrivals",
    "Workload": "workload",
    "WorkloadConfig": "config",
    "WorkloadOptions": "options",
    "WorkloadStatistics": "statistics",
    "arrival_times": "arrivals",
    "build_workload": "build",
    "closed_loop_workload": "synthetic",
    "named_streams": "synthetic",
    "profile": "profiles",
    "profile_info": "profiles",
    "profile_names": "profiles",
    "programs_workload": "programs",
    "read_agentic": "readers.agentic",
    "read_azure": "readers.csv",
    "read_burstgpt": "readers.csv",
    "read_csv": "readers.csv",
    "read_jsonl": "readers.jsonl",
    "read_lengths": "readers.csv",
    "read_mooncake": "readers.mooncake",
    "read_programs": "readers.programs",
    "sessions_workload": "sessions",
    "synthetic_workload": "synthetic",
    "write_jsonl": "readers.jsonl",
}

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


__getattr__, __dir__ = lazy_names(__name__, _HOMES)
