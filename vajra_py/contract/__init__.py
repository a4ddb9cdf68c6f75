"""Contract between policies and the mechanism that runs them: the imports of a policy author.

Others import from the submodules: `hookspecs` has what a package registers, `observer` what an observer is told, `latency` the services
(latency models and predictors of output lengths) that a package may bring.
"""

from __future__ import annotations

from vajra_py.contract.batch import BatchBuilder, DecodeStop, PreemptionMode, Refusal
from vajra_py.contract.context import EmitFigure, PolicyConfig, PolicyContext, RandomStream, SharedState
from vajra_py.contract.fill import ChunkRule, add_all_decodes, fill
from vajra_py.contract.hookspecs import PolicySpec, hookimpl
from vajra_py.contract.latency import BatchFeatures, LengthEstimate, PrefillTime
from vajra_py.contract.policies import (
    ChunksSoloPrompts,
    EndedStep,
    KeyMotion,
    Layer,
    ListensToRequests,
    PredictsSlack,
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
from vajra_py.contract.views import Key, LocalReplicaView, PriorityKey, QueueView, ReplicaLimits, ReplicaLoadView

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
    "PredictsSlack",
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
