"""Server statistics, collected in the engine's thread and read from the event loop.

All data is bounded: histograms have fixed buckets, tenants and classes beyond a limit count as "other", and percentiles
are over the most recent requests. A reader may see a request counted in one number and not yet in another.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, cast

import numpy as np

from vajra_py.contract import AdmissionDecision, Defer, Layer, Refuse, ReplicaId, RequestView
from vajra_py.contract.latency import LatencyModel
from vajra_py.contract.observer import EndReason, Observer, PolicySwap, StepEnd
from vajra_py.errors import VajraError
from vajra_py.metrics.tables.recorder import token_times
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.serving.controller import Controller

OTHER = "other"
NUM_EVENTS = 200
MAX_REASON = 200
"""Maximum number of characters of a reason in labels, which should be short."""
RECENT = 512
"""Number of most recent requests per class that the percentiles are computed over."""
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
SHORT_SECONDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2, 0.1, 1.0)
TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 65536.0)


class Histogram:
    """Counts by bucket, as in Prometheus.

    `prometheus_client.Histogram` takes a lock and 0.7 µs per value: with 256 values in a step, it would take 0.19 ms of
    the engine thread's time. `add_all` takes 0.01 ms for them.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self._edges = np.asarray(bounds)

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add_all(self, values: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        """Count several values."""
        places = np.bincount(np.searchsorted(self._edges, values), minlength=len(self.counts))
        for place in np.flatnonzero(places):
            self.counts[place] += int(places[place])
        self.total += float(values.sum())

    def cumulative(self) -> list[tuple[str, float]]:
        """Return (upper bound, number of values up to it) for each bucket, as expositions list them."""
        sums = list(accumulate(self.counts))
        return [
            *((str(bound), float(count)) for bound, count in zip(self.bounds, sums, strict=False)),
            ("+Inf", sums[-1]),
        ]


@dataclass(slots=True)
class Recent:
    """Latencies of the most recent requests of one class, in seconds."""

    ttft_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    tpot_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    e2e_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))


class SetStats:
    """Statistics of one replicaset."""

    def __init__(self) -> None:
        self.ttft = Histogram(SECONDS)
        self.gaps = Histogram(SECONDS)
        self.e2e = Histogram(SECONDS)
        self.tpot = Histogram(SECONDS)
        self.inference = Histogram(SECONDS)
        self.queue = Histogram(SECONDS)
        self.prefill = Histogram(SECONDS)
        self.decode = Histogram(SECONDS)
        self.step = Histogram(SECONDS)
        self.forming = Histogram(SHORT_SECONDS)
        self.step_tokens = Histogram(TOKENS)
        self.prompt = Histogram(TOKENS)
        self.output = Histogram(TOKENS)
        self.ended: Counter[str] = Counter()
        self.violations: Counter[tuple[str, str]] = Counter()
        self.num_preemptions = 0
        self.num_rerun = 0
        self.num_out_of_service = 0
        self.lost: Counter[ReplicaId] = Counter()
        self.restored: Counter[ReplicaId] = Counter()
        self.swaps: Counter[str] = Counter()
        self.admission: Counter[str] = Counter()
        """Number of decisions of the admission policy by outcome, except decisions to accept a request unchanged."""
        self.admission_reasons: Counter[tuple[str, str]] = Counter()
        """Number of refusals and deferrals of the admission policy, by outcome and reason."""
        self.num_cached_tokens = 0
        self.num_looked_up_tokens = 0
        self.predicted_s = 0.0
        self.measured_s = 0.0
        self.num_decodes = 0
        self.prefill_tokens = 0
        self.num_prompt_tokens = 0
        """Number of prompt tokens of requests that have their first token."""
        self.num_output_tokens = 0
        """Number of output tokens as of the last `count_output_tokens`."""
        self.last_steps: dict[ReplicaId, tuple[int, int, int]] = {}
        """(Number of decodes, number of prefills, number of prefill tokens) of each replica's last step, by replica."""


class ServerStats(Observer):
    """Counts requests, tokens, steps and failures."""

    def __init__(self, controller: Controller, max_labels: int) -> None:
        self._controller = controller
        self.sets = {name: SetStats() for name in controller.replicasets}
        self.decisions: dict[tuple[str, str, str], Histogram] = {}
        self.service_tokens: Counter[str] = Counter()
        self.recent: defaultdict[str, Recent] = defaultdict(Recent)
        self.events: deque[tuple[float, str, str]] = deque(maxlen=NUM_EVENTS)
        """Events that matter to operators (failures, restarts, swaps): (seconds since 1970, kind, text)."""
        self._max_labels = max_labels
        self._latency: dict[tuple[str, ReplicaId], LatencyModel | None] = {
            (one.replicaset, one.replica_id): one.parts.latency for one in controller.replicas()
        }

    # Events

    def on_admitted(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """At the first admission, count the queueing time, the prompt tokens looked up in the prefix cache, and those
        found there.
        """
        if cast(Request, request).admitted_at != now:
            return
        stats = self._of(request)
        stats.num_looked_up_tokens += request.num_prompt_tokens
        stats.num_cached_tokens += request.num_cached_tokens
        stats.queue.add(now - request.arrived_at)

    def on_first_token(self, request: RequestView, now: float) -> None:
        """Count the request's prompt tokens."""
        self._of(request).num_prompt_tokens += request.num_prompt_tokens

    def on_preempted(self, request: RequestView, mode: str, now: float) -> None:
        """Count the preemption."""
        self._of(request).num_preemptions += 1

    def on_requeued(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Count the requeued request."""
        self._of(request).num_rerun += 1

    def on_replica_lost(self, replicaset: str, replica_id: ReplicaId, detail: str, now: float) -> None:
        """Count the lost replica."""
        self.sets[replicaset].lost[replica_id] += 1
        self._note("failure", f"{replicaset} {replica_id}: {detail}")

    def on_replica_restored(self, replicaset: str, replica_id: ReplicaId, now: float) -> None:
        """Count the restored replica."""
        self.sets[replicaset].restored[replica_id] += 1
        self._note("restart", f"{replicaset} {replica_id} is up again")

    def on_policy_swapped(self, swap: PolicySwap, now: float) -> None:
        """Count the swap of a policy."""
        self.sets[swap.replicaset].swaps[swap.layer.value] += 1
        self._note("swap", f"{swap.replicaset} {swap.layer.value}: {swap.old_policy} → {swap.policy}")

    def on_admission_decision(self, request: RequestView, policy: str, decision: AdmissionDecision, now: float) -> None:
        """Count the decision."""
        admission = cast(Request, request).admission
        if admission is not None:
            stats = self._of(request)
            stats.admission[admission.outcome] += 1
            if isinstance(decision, Refuse | Defer):
                known = {reason for _, reason in stats.admission_reasons}
                reason = self._capped(decision.reason[:MAX_REASON], known)
                stats.admission_reasons[admission.outcome, reason] += 1

    def on_out_of_service(self, replicaset: str, detail: str, now: float) -> None:
        """Count a policy error that took the replicaset out of service."""
        self.sets[replicaset].num_out_of_service += 1
        self._note("failure", f"{replicaset} is out of service: {detail}")

    def on_ended(self, request: RequestView, reason: EndReason, detail: str, now: float) -> None:
        """Count the request's tokens, latencies and missed SLOs."""
        one, stats = cast(Request, request), self._of(request)
        stats.ended[reason.value] += 1
        if reason is EndReason.REJECTED:
            return
        stats.prompt.add(one.num_prompt_tokens)
        stats.output.add(one.num_output_tokens)
        tenant = self._capped(one.tenant, self.service_tokens)
        self.service_tokens[tenant] += one.num_computed_tokens + one.num_output_tokens
        if one.first_token_at is None:
            return
        gaps = np.diff(token_times(one))
        if len(gaps):
            stats.gaps.add_all(gaps)
        ttft, e2e = one.first_token_at - one.arrived_at, now - one.arrived_at
        stats.ttft.add(ttft)
        stats.e2e.add(e2e)
        stats.prefill.add(one.first_token_at - (one.admitted_at or one.arrived_at))
        stats.inference.add(now - (one.admitted_at or one.arrived_at))
        stats.decode.add(now - one.first_token_at)
        tpot = float(gaps.mean()) if len(gaps) else 0.0
        if len(gaps):
            stats.tpot.add(tpot)
        name = self._capped(one.slo_class, self.recent)
        recent = self.recent[name]
        for kept, value in ((recent.ttft_s, ttft), (recent.tpot_s, tpot), (recent.e2e_s, e2e)):
            kept.append(value)
        late = one.deadline_at is not None and now > one.deadline_at
        for slo, is_violated in (
            ("ttft", one.ttft_slo_s is not None and ttft > one.ttft_slo_s),
            ("tpot", one.tpot_slo_s is not None and tpot > one.tpot_slo_s),
            ("tbt", one.tbt_slo_s is not None and len(gaps) > 0 and float(gaps.max()) > one.tbt_slo_s),
            ("deadline", late),
        ):
            stats.violations[slo, name] += is_violated

    def on_step_end(self, step: StepEnd) -> None:
        """Count the step."""
        stats, features = self.sets[step.replicaset], step.features
        seconds = step.ended_at - step.formed_at
        stats.step.add(seconds)
        stats.step_tokens.add(features.num_tokens)
        stats.num_decodes += features.num_decodes
        stats.prefill_tokens += features.prefill_tokens
        stats.last_steps[step.replica_id] = (features.num_decodes, features.num_prefills, features.prefill_tokens)
        replica = step.replicaset, step.replica_id
        model = self._latency[replica]
        if model is not None:
            try:
                stats.predicted_s += model.batch_time_s(features)
                stats.measured_s += seconds
            except VajraError:  # the latency model cannot predict: do not call it again
                self._latency[replica] = None

    def on_formed(self, replicaset: str, seconds: float) -> None:
        """Count the time that forming a step took."""
        self.sets[replicaset].forming.add(seconds)

    def _note(self, kind: str, text: str) -> None:
        self.events.append((time.time(), kind, text[:500]))

    # Figures

    def count_output_tokens(self) -> None:
        """Update `num_output_tokens` of every replicaset, over ended and running requests.

        A request that ends concurrently may be in neither group for a moment, so counts are never lowered.
        """
        running: Counter[str] = Counter()
        for request in self._controller.alive():
            running[request.replicaset] += request.num_output_tokens
        for name, one in self.sets.items():
            one.num_output_tokens = max(one.num_output_tokens, int(one.output.total) + running[name])

    def total_service_jain_index(self) -> float:
        """Return Jain's index of the tokens served per tenant since the start.

        The index is 1 if all tenants got the same, and 1/n if one of n tenants got everything.

        It reflects the tenants' demand as well as the service; `vajra_py.metrics.summary.fairness` counts only the time
        in which tenants are backlogged.
        """
        shares = [float(count) for count in dict(self.service_tokens).values()]
        squares = sum(share * share for share in shares)
        return 1.0 if squares == 0 else sum(shares) ** 2 / (len(shares) * squares)

    def recent_latencies(self) -> dict[str, float]:
        """Return P50 and P99 of TTFT and TPOT over the most recent requests of all classes, in milliseconds."""
        recents, found = list(dict(self.recent).values()), {}
        for what in ("ttft", "tpot"):
            low, high = _quantiles(value for one in recents for value in getattr(one, f"{what}_s").copy())
            found[f"{what}_p50_ms"], found[f"{what}_p99_ms"] = round(1e3 * low, 3), round(1e3 * high, 3)
        return found

    def percentiles(self) -> dict[str, dict[str, float]]:
        """Return, by class, P50 and P99 of TTFT, TPOT and E2E in milliseconds over the most recent requests, and the
        number of these requests.

        The key `(none)` is for requests without a class.
        """
        found = {}
        for name, recent in dict(self.recent).items():
            row = {"requests": float(len(recent.ttft_s))}
            for what, kept in (("ttft", recent.ttft_s), ("tpot", recent.tpot_s), ("e2e", recent.e2e_s)):
                low, high = _quantiles(kept.copy())
                row[f"{what}_p50_ms"], row[f"{what}_p99_ms"] = 1e3 * low, 1e3 * high
            found[name or "(none)"] = row
        return found

    def _of(self, request: RequestView) -> SetStats:
        return self.sets[cast(Request, request).replicaset]

    def _capped(self, name: str, known: Collection[str]) -> str:
        return name if name in known or len(known) < self._max_labels else OTHER


def _quantiles(values: Iterable[float]) -> tuple[float, float]:
    found = np.fromiter(values, float)
    return (0.0, 0.0) if not len(found) else (float(np.quantile(found, 0.5)), float(np.quantile(found, 0.99)))


def time_policies(controller: Controller, stats: ServerStats) -> None:
    """Time the policies' decisions from now on, including those of policies swapped in later."""

    def timed(replicaset: str, layer: Layer, policy: str, method: Callable[..., Any]) -> Callable[..., Any]:
        kept = stats.decisions.setdefault((replicaset, layer.value, policy), Histogram(SHORT_SECONDS))

        def call(*arguments: Any) -> Any:
            started = time.perf_counter()
            answer = method(*arguments)
            kept.add(time.perf_counter() - started)
            return answer

        return call

    for replicaset in controller.replicasets.values():
        replicaset.call_through(timed)
