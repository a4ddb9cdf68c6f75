"""Prometheus metrics.

Metrics that vLLM has too use vLLM's names, with the prefixes `vajra:` and `vllm:`, so that dashboards made for vLLM
work unchanged; some also appear under names of older versions of vLLM. Other metrics have the prefix `vajra:` only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from vajra_py.runtime.serving.admission import AdmissionGate
from vajra_py.runtime.serving.controller import Controller
from vajra_py.serve.http.options import MetricNames
from vajra_py.serve.observe.movement import MovementCounts, movement_metrics, replica_metrics
from vajra_py.serve.observe.stats import Histogram, ServerStats, SetStats
from vajra_py.serve.session.catalogue import Catalogue

_HISTOGRAMS = (
    ("time_to_first_token_seconds", "From arrival to the first token, seconds.", "ttft"),
    ("inter_token_latency_seconds", "Between tokens of a request, seconds.", "gaps"),
    ("e2e_request_latency_seconds", "From arrival to the end, seconds.", "e2e"),
    ("request_queue_time_seconds", "From arrival to the first admission, seconds.", "queue"),
    ("request_prefill_time_seconds", "From the first admission to the first token, seconds.", "prefill"),
    ("request_inference_time_seconds", "From the first admission to the end, seconds.", "inference"),
    ("request_time_per_output_token_seconds", "Mean time of a request's tokens after the first, seconds.", "tpot"),
    ("request_decode_time_seconds", "From the first token to the end, seconds.", "decode"),
    ("iteration_tokens_total", "Tokens of a step.", "step_tokens"),
    ("request_prompt_tokens", "Tokens of a prompt.", "prompt"),
    ("request_generation_tokens", "Tokens of an output.", "output"),
)
_COUNTERS: tuple[tuple[str, str, Callable[[SetStats], float]], ...] = (
    ("prompt_tokens", "Prompt tokens of requests with a first output token.", lambda one: one.num_prompt_tokens),
    ("generation_tokens", "Output tokens generated.", lambda one: one.num_output_tokens),
    ("num_preemptions", "Requests that were preempted.", lambda one: one.num_preemptions),
    ("prefix_cache_queries", "Prompt tokens looked up.", lambda one: one.num_looked_up_tokens),
    ("prefix_cache_hits", "Prompt tokens found.", lambda one: one.num_cached_tokens),
)
_VLLM_HISTOGRAMS = (("time_per_output_token_seconds", "inter_token_latency_seconds by its older name.", "gaps"),)
_VLLM_COUNTERS: tuple[tuple[str, str, Callable[[SetStats], float]], ...] = (
    ("gpu_prefix_cache_queries", "prefix_cache_queries by its older name.", lambda one: one.num_looked_up_tokens),
    ("gpu_prefix_cache_hits", "prefix_cache_hits by its older name.", lambda one: one.num_cached_tokens),
)
_VLLM_REASONS = {"aborted": "abort", "failed": "error", "rejected": "error", "expired": "error"}
"""vLLM's names of end reasons, where they differ from this project's."""
_OWN_HISTOGRAMS = (
    ("step_time_seconds", "From forming a step to its end, seconds.", "step"),
    ("step_forming_seconds", "Forming a step: policies and bookkeeping, seconds.", "forming"),
)

_ALL_CLASSES = "all"
"""Label of sums over all service classes, for readers who may not see the classes' names."""


class Source(Protocol):
    """Source of the metrics' values."""

    @property
    def catalogue(self) -> Catalogue:
        """Mapping of replicasets to models."""

    @property
    def controller(self) -> Controller | None:
        """Controller of the engine; None until the engine is loaded."""

    @property
    def stats(self) -> ServerStats | None:
        """Statistics of the server; None until the engine is loaded."""

    @property
    def movement(self) -> MovementCounts | None:
        """Counts of moved requests; None until the engine is loaded, or if requests never move."""

    @property
    def num_replicas_up(self) -> int:
        """Number of replicas that are up."""

    @property
    def statuses(self) -> Mapping[int, int]:
        """Number of answers by status."""

    @property
    def num_broken_streams(self) -> int:
        """Number of streams that ended with an error."""

    @property
    def num_generating(self) -> int:
        """Number of HTTP generation requests in progress."""


class Exposition(Collector):
    """Collector of a server's `/metrics`."""

    def __init__(self, source: Source, names: MetricNames) -> None:
        self._source = source
        self._prefixes = ("vajra:", "vllm:") if names == "both" else (f"{names}:",)
        self._names_clients = True
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self, *, names_clients: bool = True) -> bytes:
        """Return the current values in Prometheus' text format.

        The text contains names chosen by clients (tenants, classes) only if `names_clients`.
        """
        self._names_clients = names_clients
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Return nothing, since the registry need not know the names in advance."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        source = self._source
        yield GaugeMetricFamily("vajra:replicas_up", "Replicas that compute.", source.num_replicas_up)
        answers = CounterMetricFamily("vajra:http_answers", "HTTP answers, but those of probes.", labels=("status",))
        for status, count in dict(source.statuses).items():
            answers.add_metric((str(status),), count)
        yield answers
        yield CounterMetricFamily(
            "vajra:broken_streams", "Streams that ended with an error.", source.num_broken_streams
        )
        yield GaugeMetricFamily("vajra:http_requests_open", "HTTP requests that generate.", source.num_generating)
        stats, controller = source.stats, source.controller
        if stats is None or controller is None:
            return
        stats.count_output_tokens()
        for prefix in self._prefixes:
            is_vllm = prefix == "vllm:"
            yield from self._gauges(controller, prefix)
            yield from self._counters(stats, prefix)
            yield from self._histograms(stats, prefix, _HISTOGRAMS + (_VLLM_HISTOGRAMS if is_vllm else ()))
        yield from self._histograms(stats, "vajra:", _OWN_HISTOGRAMS)
        yield from self._own(stats)
        yield from replica_metrics(controller, source.catalogue)
        if source.movement is not None:
            yield from movement_metrics(source.movement, controller, source.catalogue)
        if controller.gate is not None:
            yield from self._admission(stats, controller.gate)

    def _admission(self, stats: ServerStats, gate: AdmissionGate) -> Iterator[Metric]:
        """Yield the counts of the admission policy's decisions."""
        labels = ("model_name", "replicaset")
        decisions = CounterMetricFamily(
            "vajra:admission_decisions", "Requests not accepted as they were.", labels=(*labels, "decision")
        )
        reasons = CounterMetricFamily(
            "vajra:admission_reasons", "Refusals and deferrals by reason.", labels=(*labels, "decision", "reason")
        )
        deferred = GaugeMetricFamily("vajra:num_requests_deferred", "Requests that wait at the gate.", labels=labels)
        for name, one in stats.sets.items():
            for decision, count in dict(one.admission).items():
                decisions.add_metric((*self._at(name), decision), count)
            for (decision, reason), count in dict(one.admission_reasons).items() if self._names_clients else ():
                reasons.add_metric((*self._at(name), decision, reason), count)
            deferred.add_metric(self._at(name), gate.num_deferred(name))
        yield from (decisions, reasons, deferred)

    def _histograms(
        self, stats: ServerStats, prefix: str, names: Sequence[tuple[str, str, str]]
    ) -> Iterator[HistogramMetricFamily]:
        for name, text, attribute in names:
            family = HistogramMetricFamily(prefix + name, text, labels=("model_name", "replicaset"))
            for replicaset, one in stats.sets.items():
                _add(family, self._at(replicaset), getattr(one, attribute))
            yield family

    def _at(self, replicaset: str) -> tuple[str, str]:
        return self._source.catalogue.label(replicaset), replicaset

    def _gauges(self, controller: Controller, prefix: str) -> Iterator[Metric]:
        labels = ("model_name", "replicaset", "replica")
        running = GaugeMetricFamily(prefix + "num_requests_running", "Requests that hold KV blocks.", labels=labels)
        waiting = GaugeMetricFamily(prefix + "num_requests_waiting", "Requests that wait.", labels=labels)
        usage = GaugeMetricFamily(prefix + "kv_cache_usage_perc", "Used part of the KV blocks, 0 to 1.", labels=labels)
        older = GaugeMetricFamily("vllm:gpu_cache_usage_perc", "kv_cache_usage_perc by its older name.", labels=labels)
        for name, replicaset in controller.replicasets.items():
            for replica in replicaset.replicas:
                at = (*self._at(name), str(replica.replica_id))
                running.add_metric(at, replica.running_set.num_running)
                waiting.add_metric(at, len(replica.queue))
                used = 1.0 - replica.memory.free_blocks / replica.memory.num_blocks
                usage.add_metric(at, used)
                older.add_metric(at, used)
            waiting.add_metric((*self._at(name), "shared"), len(replicaset.shared))
        yield from (running, waiting, usage)
        if prefix == "vllm:":
            yield older

    def _counters(self, stats: ServerStats, prefix: str) -> Iterator[Metric]:
        labels = ("model_name", "replicaset")
        is_vllm = prefix == "vllm:"
        for name, text, read in _COUNTERS + (_VLLM_COUNTERS if is_vllm else ()):
            family = CounterMetricFamily(prefix + name, text, labels=labels)
            for replicaset, one in stats.sets.items():
                family.add_metric(self._at(replicaset), read(one))
            yield family
        ended = CounterMetricFamily(
            prefix + "request_success", "Requests by how they ended.", labels=(*labels, "finished_reason")
        )
        for replicaset, one in stats.sets.items():
            counts: Counter[str] = Counter()
            for reason, count in dict(one.ended).items():
                counts[_VLLM_REASONS.get(reason, reason) if is_vllm else reason] += count
            for reason, count in counts.items():
                ended.add_metric((*self._at(replicaset), reason), count)
        yield ended

    def _own(self, stats: ServerStats) -> Iterator[Metric]:
        """Yield the metrics that vLLM does not have."""
        labels = ("model_name", "replicaset")
        decisions = HistogramMetricFamily(
            "vajra:policy_decision_seconds", "A decision of a policy, seconds.", labels=(*labels, "layer", "policy")
        )
        for (replicaset, layer, policy), kept in dict(stats.decisions).items():
            _add(decisions, (*self._at(replicaset), layer, policy), kept)
        yield decisions
        violations = CounterMetricFamily("vajra:slo_violations", "SLOs violated.", labels=(*labels, "slo", "slo_class"))
        predicted = CounterMetricFamily("vajra:step_predicted_seconds", "Predicted step times.", labels=labels)
        measured = CounterMetricFamily(
            "vajra:step_measured_seconds", "Measured times of the steps that were predicted.", labels=labels
        )
        for name, one in stats.sets.items():
            counts: Counter[tuple[str, str]] = Counter()
            for (slo, slo_class), count in dict(one.violations).items():
                counts[slo, slo_class if self._names_clients else _ALL_CLASSES] += count
            for (slo, slo_class), count in counts.items():
                violations.add_metric((*self._at(name), slo, slo_class), count)
            predicted.add_metric(self._at(name), one.predicted_s)
            measured.add_metric(self._at(name), one.measured_s)
        yield from (violations, predicted, measured)
        yield from self._troubles(stats)
        if self._names_clients:
            service = CounterMetricFamily("vajra:tenant_service_tokens", "Tokens served.", labels=("tenant",))
            for tenant, count in dict(stats.service_tokens).items():
                service.add_metric((tenant,), count)
            yield service
        yield GaugeMetricFamily(
            "vajra:tenant_total_service_jain_index",
            "Jain's index of the tokens that tenants were served since the start, whatever each asked for.",
            stats.total_service_jain_index(),
        )

    def _troubles(self, stats: ServerStats) -> Iterator[Metric]:
        """Yield the counts of lost and restored replicas, and of policy failures and swaps."""
        labels = ("model_name", "replicaset")
        lost = CounterMetricFamily("vajra:replica_failures", "Replicas lost.", labels=(*labels, "replica"))
        restored = CounterMetricFamily("vajra:replica_restarts", "Replicas back.", labels=(*labels, "replica"))
        rerun = CounterMetricFamily(
            "vajra:requests_rerun", "Requests computed again since their replica failed.", labels=labels
        )
        swaps = CounterMetricFamily("vajra:policy_swaps", "Policies swapped.", labels=(*labels, "layer"))
        violations = CounterMetricFamily(
            "vajra:policy_errors", "Times that a policy took its replicaset out of service.", labels=labels
        )
        for name, one in stats.sets.items():
            at = self._at(name)
            for family, counts in ((lost, one.lost), (restored, one.restored)):
                for replica_id, count in dict(counts).items():
                    family.add_metric((*at, str(replica_id)), count)
            for layer, count in dict(one.swaps).items():
                swaps.add_metric((*at, layer), count)
            rerun.add_metric(at, one.num_rerun)
            violations.add_metric(at, one.num_out_of_service)
        yield from (lost, restored, rerun, swaps, violations)


def _add(family: HistogramMetricFamily, labels: Sequence[str], kept: Histogram) -> None:
    family.add_metric(labels, kept.cumulative(), kept.total)
