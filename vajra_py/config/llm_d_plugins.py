"""Names of llm-d's configuration that have no counterpart here, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping

_FIGURES = "figures are those of the replicas themselves"
_PARSERS = "requests come parsed and with their tokens"
_FLOW = "flow control is a matter of admission, not of routing"
_STAGES = "prompts are computed and decoded, and there is no encode stage"
_MEDIA = "requests have no multimodal input"
_DISCOVERY = "replicas are those of the replicaset"
_TRANSFER = "KV is handed on by the mechanism, without headers"
_TOPOLOGY = "replicas have no place in a topology"
_CLUSTERS = "there is one cluster"

_RANKS = "data-parallel ranks are not separate replicas here"
MEANINGLESS: Mapping[str, str] = {
    "metrics-data-source": _FIGURES,
    "core-metrics-extractor": _FIGURES,
    "models-data-source": _FIGURES,
    "models-data-extractor": _FIGURES,
    "dcgm-data-source": _FIGURES,
    "dcgm-extractor": _FIGURES,
    "endpoint-notification-source": _FIGURES,
    "k8s-notification-source": _FIGURES,
    "local-syncer": "there is one router",
    "token-producer": _PARSERS,
    "tokenizer": _PARSERS,
    "openai-parser": _PARSERS,
    "anthropic-parser": _PARSERS,
    "passthrough-parser": _PARSERS,
    "vllmgrpc-parser": _PARSERS,
    "vllmhttp-parser": _PARSERS,
    "sglanghttp-parser": _PARSERS,
    "vertexai-parser": _PARSERS,
    "session-id-producer": "requests name their sessions",
    "agent-identity": "requests name their senders and sessions",
    "request-attribute-reporter": "nothing is reported to a proxy",
    "global-strict-fairness-policy": _FLOW,
    "round-robin-fairness-policy": _FLOW,
    "program-aware-fairness": _FLOW,
    "fcfs-ordering-policy": _FLOW,
    "edf-ordering-policy": _FLOW,
    "slo-deadline-ordering-policy": _FLOW,
    "static-usage-limit-policy": _FLOW,
    "priority-holdback-policy": _FLOW,
    "soft-reflective-ceiling-policy": _FLOW,
    "sheddable-eviction-filter": _FLOW,
    "priority-then-time-eviction-order-policy": _FLOW,
    "probabilistic-admitter": _FLOW,
    "latency-slo-admitter": _FLOW,
    "topology-affinity-scorer": _TOPOLOGY,
    "topology-affinity-filter": _TOPOLOGY,
    "topology-extractor": _TOPOLOGY,
    "mm-embeddings-cache-scorer": _MEDIA,
    "mm-embeddings-cache-producer": _MEDIA,
    "always-disagg-multimodal-decider": _MEDIA,
    "encode-filter": _STAGES,
    "header-label-affinity-scorer": "requests have no headers",
    "header-based-testing-filter": "requests have no headers",
    "header-profile-handler": "requests have no headers",
    "burst-prefix-cache-producer": "each request is placed when it arrives",
    "p2p-source-producer": "no replica fetches KV from another one that the router names",
    "disagg-headers-handler": _TRANSFER,
    "prefill-header-handler": _TRANSFER,
    "data-parallel-profile-handler": _RANKS,
    "file-discovery": _DISCOVERY,
    "disaggregatedset-rollout-pod-extractor": _DISCOVERY,
    "disaggregatedset-rollout-screener": _DISCOVERY,
    "destination-endpoint-served-verifier": "it is for llm-d's own tests",
    "multicluster-approx-prefix-cache-producer": _CLUSTERS,
    "multicluster-file-discovery": _CLUSTERS,
    "multicluster-kv-cache-utilization-scorer": _CLUSTERS,
    "multicluster-metrics-data-source": _CLUSTERS,
    "multicluster-metrics-extractor": _CLUSTERS,
    "multicluster-prefix-cache-scorer": _CLUSTERS,
    "multicluster-queue-scorer": _CLUSTERS,
    "multicluster-session-affinity-filter": _CLUSTERS,
}
"""Types of plug-ins without a counterpart, each with the reason."""

ALIASES: Mapping[str, str] = {"by-label-selector": "label-selector-filter"}
"""Alternative names of plug-in types, with the name of the routing part."""

UNUSED_SECTIONS: Mapping[str, str] = {
    "featureGates": "there are no features to switch",
    "dataLayer": _FIGURES,
    "flowControl": _FLOW,
    "requestHandler": _PARSERS,
    "saturationDetector": _FLOW,
    "parser": _PARSERS,
}
"""Top-level keys, other than plug-ins and profiles, that have no counterpart, each with the reason."""

_ONE_ROUTER = "there is one router"
UNUSED_PARAMETERS: Mapping[str, Mapping[str, str]] = {
    "active-request-scorer": {"requestTimeout": "it is deprecated in llm-d too"},
    "approx-prefix-cache-producer": {"blockSize": "it counts characters; blockSizeTokens counts tokens"},
    "precise-prefix-cache-producer": {"*": "blocks are those of the replicas, whose caches are asked themselves"},
    "disagg-profile-handler": {
        "threshold": "a decider states it: nonCachedTokens of prefix-based-pd-decider",
        "hashBlockSize": "blocks are those of the replicas",
        "prefixPluginType": "a decider states it: prefixMatchInfoProducerName",
        "prefixPluginName": "a decider states it: prefixMatchInfoProducerName",
        "primaryPort": _RANKS,
    },
    "inflight-load-producer": {"syncCrossReplicaState": _ONE_ROUTER},
    "predicted-latency-producer": {
        "samplingMean": "predictions come from the latency model of the run",
        "maxDecodeTokenSamplesForPrediction": "predictions come from the latency model of the run",
        "maxSampledTokens": "predictions come from the latency model of the run",
        "streamingMode": "every request streams",
        "endpointRoleLabel": "replicas have a role",
        "predictInProduce": "predictions are made when they are read",
        "contextTTL": "predictions are made when they are read",
    },
    "no-hit-lru-scorer": {
        "prefixPluginType": "prefixMatchInfoProducerName says it",
        "prefixPluginName": "prefixMatchInfoProducerName says it",
    },
    "context-length-aware": {"label": "replicas have no labels of their own; set ranges by replica or pool"},
    "session-affinity-scorer": {"encodedEndpointHeaderConfig": "requests have no headers"},
    "session-affinity-filter": {"encodedEndpointHeaderConfig": "requests have no headers"},
    "utilization-detector": {"metricsStalenessThreshold": "the age of figures is a setting, view_interval_s"},
    "endpoint-attribute-scorer": {"producer": _FIGURES},
    "endpoint-attribute-filter": {"producer": _FIGURES, "onMissing": "no replica lacks a figure"},
}
"""Parameters without a counterpart, by type of plug-in, each with the reason; `*` is every parameter of a type."""
