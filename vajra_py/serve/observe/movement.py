"""Prometheus metrics of movement: requests that moved between replicas, KV transfers, and numbers of replicas by pool
and state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from vajra_py.contract import ReplicaState
from vajra_py.metrics.tables.movement_log import STAGES, MovementRows, Paths
from vajra_py.metrics.tables.transfers import DONE, ENDED, MOVE
from vajra_py.runtime.serving.controller import Controller
from vajra_py.serve.session.catalogue import Catalogue

Way: TypeAlias = tuple[str, str, str, str]
"""(Replicaset, kind of movement, pool of the source, pool of the target)."""


class MovementCounts(MovementRows):
    """Counts over the rows of a transfers table, without storing the rows."""

    def __init__(self, paths: Mapping[str, Paths]) -> None:
        super().__init__(paths)
        self.moved: Counter[Way] = Counter()
        """Number of movements after which the request continued at its target."""
        self.transferred_tokens: Counter[Way] = Counter()
        """Number of tokens whose KV has arrived, including KV that was copied while its request ran."""
        self.transferred_bytes: Counter[Way] = Counter()
        self.not_moved: Counter[tuple[str, str, str, str]] = Counter()
        """Number of movements that were not completed, by replicaset, kind, outcome and reason."""

    def on_row(self, request_id: str, row: Mapping[str, Any]) -> None:
        """Count the row."""
        kind, outcome, replicaset = row["kind"], row["outcome"], row["replicaset"]
        way = replicaset, kind, row["source_pool"], row["target_pool"]
        if outcome != DONE:
            reason = row["reason"].partition(":")[0] if outcome == ENDED else row["reason"]
            self.not_moved[replicaset, kind, outcome, reason] += 1
        elif not row["is_live"]:
            self.moved[way] += 1
        if kind != MOVE and row["end_at"] == row["end_at"]:
            self.transferred_tokens[way] += row["num_tokens"]
            self.transferred_bytes[way] += row["num_bytes"]


def movement_metrics(counts: MovementCounts, controller: Controller, catalogue: Catalogue) -> Iterator[Metric]:
    """Yield the metrics of the requests that moved or are moving, and of their KV transfers."""
    labels = ("model_name", "replicaset")
    on_the_way = ("kind", "source_pool", "target_pool")
    for name, text, numbers in (
        ("moves", "Requests that ran on at another replica.", counts.moved),
        ("kv_transfer_tokens", "Tokens whose KV arrived at another replica.", counts.transferred_tokens),
        ("kv_transfer_bytes", "KV that arrived at another replica, bytes.", counts.transferred_bytes),
    ):
        family = CounterMetricFamily(f"vajra:{name}", text, labels=(*labels, *on_the_way))
        for (replicaset, *way), count in dict(numbers).items():
            family.add_metric((catalogue.label(replicaset), replicaset, *way), count)
        yield family
    failed = CounterMetricFamily(
        "vajra:moves_not_made",
        "Ways to another replica that ended before.",
        labels=(*labels, "kind", "outcome", "reason"),
    )
    for (replicaset, *why), count in dict(counts.not_moved).items():
        failed.add_metric((catalogue.label(replicaset), replicaset, *why), count)
    yield failed
    moving = GaugeMetricFamily("vajra:num_requests_moving", "Requests on their way.", labels=(*labels, "stage"))
    for replicaset in controller.replicasets:
        now = counts.num_on_their_way(replicaset)
        for stage in STAGES:
            moving.add_metric((catalogue.label(replicaset), replicaset, stage), now[stage])
    yield moving


def replica_metrics(controller: Controller, catalogue: Catalogue) -> Iterator[Metric]:
    """Yield the number of replicas by pool and state."""
    labels = ("model_name", "replicaset", "pool", "state")
    family = GaugeMetricFamily("vajra:replicas", "Replicas by pool and state.", labels=labels)
    for name, replicaset in controller.replicasets.items():
        found = Counter((one.parts.pool, replicaset.state_of(one.replica_id)) for one in replicaset.replicas)
        for pool in dict.fromkeys(one.parts.pool for one in replicaset.replicas):
            for state in ReplicaState:
                family.add_metric((catalogue.label(name), name, pool, state.value), found[pool, state])
    yield family
