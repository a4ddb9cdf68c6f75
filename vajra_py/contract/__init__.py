"""What a plug-in author imports: the contract between policies and the mechanism that runs them."""

from __future__ import annotations

from vajra_py.contract.batch import BatchBuilder, DecodeStop, PreemptionMode, Refusal
from vajra_py.contract.context import PolicyConfig, PolicyContext, RandomStream, SharedState
from vajra_py.contract.fill import ChunkRule, add_all_decodes, fill
from vajra_py.contract.hookspecs import (
    LatencyModelSpec,
    ObserverSpec,
    OutputLengthSpec,
    PolicySpec,
    Preset,
    hookimpl,
)
from vajra_py.contract.latency import (
    BatchFeatures,
    LatencyModel,
    LengthEstimate,
    OutputLengthPredictor,
    PrefillTime,
)
from vajra_py.contract.observer import EndReason, Observer, PolicySwap, ScheduledChunk, StepEnd, StepRecord, StepRun
from vajra_py.contract.policies import (
    ChunksLonePrompts,
    EndedStep,
    Key,
    KeyMotion,
    Layer,
    ListensToRequests,
    ReadsNoLoad,
    RefusesRequests,
    RepeatsDecodes,
    ReplicaScheduler,
    ReplicasetScheduler,
    RequestPrioritizer,
    SchedulingPolicy,
    SteadyState,
    TimeLinearPrioritizer,
    WorkConserving,
)
from vajra_py.contract.requests import ReplicaId, RequestId, RequestView
from vajra_py.contract.views import LocalReplicaView, PriorityKey, QueueView, ReplicaLimits, ReplicaLoadView

__all__ = [
    "BatchBuilder",
    "BatchFeatures",
    "ChunkRule",
    "ChunksLonePrompts",
    "DecodeStop",
    "EndReason",
    "EndedStep",
    "Key",
    "KeyMotion",
    "LatencyModel",
    "LatencyModelSpec",
    "Layer",
    "LengthEstimate",
    "ListensToRequests",
    "LocalReplicaView",
    "Observer",
    "ObserverSpec",
    "OutputLengthPredictor",
    "OutputLengthSpec",
    "PolicyConfig",
    "PolicyContext",
    "PolicySpec",
    "PolicySwap",
    "PreemptionMode",
    "PrefillTime",
    "Preset",
    "PriorityKey",
    "QueueView",
    "RandomStream",
    "ReadsNoLoad",
    "Refusal",
    "RefusesRequests",
    "RepeatsDecodes",
    "ReplicaId",
    "ReplicaLimits",
    "ReplicaLoadView",
    "ReplicaScheduler",
    "ReplicasetScheduler",
    "RequestId",
    "RequestPrioritizer",
    "RequestView",
    "ScheduledChunk",
    "SchedulingPolicy",
    "SharedState",
    "SteadyState",
    "StepEnd",
    "StepRecord",
    "StepRun",
    "TimeLinearPrioritizer",
    "WorkConserving",
    "add_all_decodes",
    "fill",
    "hookimpl",
]


_RENAMED = {
    "BatchShape": "BatchFeatures",
    "ReplicaState": "LocalReplicaView",
    "ReplicaView": "ReplicaLoadView",
}


def __getattr__(name: str) -> object:
    """Answer an old name with the present one."""
    if name in _RENAMED:
        raise ImportError(f"vajra_py.contract.{name} was renamed. Use {_RENAMED[name]}.", name=name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
