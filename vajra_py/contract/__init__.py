"""What a policy author imports: the contract between policies and the mechanism that runs them.

Others import from the submodules: `hookspecs` has what a package registers, `observer` what an observer is told, `latency` the services
(latency models and predictors of output lengths) that a package may bring.
"""

from __future__ import annotations

import importlib
import warnings

from vajra_py.contract.batch import BatchBuilder, DecodeStop, PreemptionMode, Refusal
from vajra_py.contract.context import EmitFigure, PolicyConfig, PolicyContext, RandomStream, SharedState
from vajra_py.contract.fill import ChunkRule, add_all_decodes, fill
from vajra_py.contract.hookspecs import PolicySpec, hookimpl
from vajra_py.contract.latency import BatchFeatures, LengthEstimate, PrefillTime
from vajra_py.contract.policies import (
    ChunksSoloPrompts,
    EndedStep,
    Key,
    KeyMotion,
    Layer,
    ListensToRequests,
    RefusesRequests,
    ReplicaScheduler,
    ReplicasetScheduler,
    RequestPrioritizer,
    SchedulerTraits,
    SchedulingPolicy,
    SteadyState,
    TimeLinearPrioritizer,
)
from vajra_py.contract.requests import EndReason, ReplicaId, RequestId, RequestView
from vajra_py.contract.views import LocalReplicaView, PriorityKey, QueueView, ReplicaLimits, ReplicaLoadView

__all__ = [
    "BatchBuilder",
    "BatchFeatures",
    "ChunkRule",
    "ChunksSoloPrompts",
    "DecodeStop",
    "EmitFigure",
    "EndReason",
    "EndedStep",
    "Key",
    "KeyMotion",
    "Layer",
    "LengthEstimate",
    "ListensToRequests",
    "LocalReplicaView",
    "PolicyConfig",
    "PolicyContext",
    "PolicySpec",
    "PreemptionMode",
    "PrefillTime",
    "PriorityKey",
    "QueueView",
    "RandomStream",
    "Refusal",
    "RefusesRequests",
    "ReplicaId",
    "ReplicaLimits",
    "ReplicaLoadView",
    "ReplicaScheduler",
    "ReplicasetScheduler",
    "RequestId",
    "RequestPrioritizer",
    "RequestView",
    "SchedulerTraits",
    "SchedulingPolicy",
    "SharedState",
    "SteadyState",
    "TimeLinearPrioritizer",
    "add_all_decodes",
    "fill",
    "hookimpl",
]


_RENAMED = {
    "BatchShape": "BatchFeatures",
    "ReadsNoLoad": "SchedulerTraits(reads_load=False)",
    "RepeatsDecodes": "SchedulerTraits(repeats_decodes=...)",
    "ReplicaState": "LocalReplicaView",
    "ReplicaView": "ReplicaLoadView",
    "WorkConserving": "SchedulerTraits(is_work_conserving=True)",
}

_ALIASES = {"ChunksLonePrompts": "ChunksSoloPrompts"}
"""Deprecated names, by the present ones."""

_MOVED = {
    **dict.fromkeys(("LatencyModelSpec", "ObserverSpec", "OutputLengthSpec", "Preset"), "hookspecs"),
    **dict.fromkeys(("LatencyModel", "OutputLengthPredictor"), "latency"),
    **dict.fromkeys(("Observer", "PolicySwap", "ScheduledChunk", "StepEnd", "StepRecord", "StepRun"), "observer"),
}
"""Names that stood here once, by the submodule that has them."""


def __getattr__(name: str) -> object:
    """Answer an old name: an alias or one that moved with a warning, another one with an error that says the present one."""
    if name in _ALIASES:
        warnings.warn(f"{name} is now {_ALIASES[name]}", DeprecationWarning, stacklevel=2)
        return globals()[_ALIASES[name]]
    if name in _MOVED:
        home = f"{__name__}.{_MOVED[name]}"
        warnings.warn(f"import {name} from {home}: {__name__} is for policies", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(home), name)
    if name in _RENAMED:
        raise ImportError(f"vajra_py.contract.{name} is gone. Use {_RENAMED[name]}.", name=name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
