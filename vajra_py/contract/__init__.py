"""Contract between policies and the mechanism that runs them: the imports of a policy author.

Others import from the submodules: `hookspecs` has what a package registers, `observer` what an observer is told, `latency` the services
(latency models and predictors of output lengths) that a package may bring.
"""

from __future__ import annotations

from vajra_py.contract.admission import (
    ACCEPT,
    Accept,
    AdmissionDecision,
    AdmissionPolicy,
    Defer,
    Refuse,
    Scaler,
)
from vajra_py.contract.batch import BatchBuilder, DecodeStop, PreemptionMode, Refusal
from vajra_py.contract.context import EmitFigure, PolicyConfig, PolicyContext, RandomStream, SharedState, WakeUps
from vajra_py.contract.fill import ChunkRule, add_all_decodes, fill
from vajra_py.contract.hookspecs import AdmissionSpec, PolicySpec, hookimpl
from vajra_py.contract.latency import BatchFeatures, LengthEstimate, PrefillTime
from vajra_py.contract.policies import (
    ChunksSoloPrompts,
    EndedStep,
    HandlesWakes,
    KeyMotion,
    Layer,
    ListensToRequests,
    Move,
    MovesRequests,
    PlacesAfterPrompt,
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
from vajra_py.contract.views import (
    Key,
    LocalReplicaView,
    PoolRole,
    PoolView,
    PriorityKey,
    QueueView,
    ReplicaLimits,
    ReplicaLoadView,
    ReplicasetView,
    ReplicaState,
)

__all__ = [
    "ACCEPT",
    "Accept",
    "AdmissionDecision",
    "AdmissionPolicy",
    "AdmissionSpec",
    "BatchBuilder",
    "BatchFeatures",
    "ChunkRule",
    "ChunksSoloPrompts",
    "DecodeStop",
    "Defer",
    "EmitFigure",
    "EndReason",
    "EndedStep",
    "HandlesWakes",
    "Key",
    "KeyMotion",
    "Layer",
    "LengthEstimate",
    "ListensToRequests",
    "LocalReplicaView",
    "Move",
    "MovesRequests",
    "PlacesAfterPrompt",
    "PolicyConfig",
    "PolicyContext",
    "PolicySpec",
    "PoolRole",
    "PoolView",
    "PredictsSlack",
    "PreemptionMode",
    "PrefillTime",
    "PriorityKey",
    "QueueView",
    "RandomStream",
    "Refusal",
    "Refuse",
    "RefusesRequests",
    "ReplicaId",
    "ReplicaLimits",
    "ReplicaLoadView",
    "ReplicaScheduler",
    "ReplicaState",
    "ReplicasetScheduler",
    "ReplicasetView",
    "RequestId",
    "RequestPrioritizer",
    "RequestView",
    "Scaler",
    "SchedulerTraits",
    "SchedulingPolicy",
    "SharedState",
    "SteadyState",
    "TimeLinearPrioritizer",
    "WakeUps",
    "add_all_decodes",
    "fill",
    "hookimpl",
]
