"""Preble's E2: exploit a cached prefix if it is longer than the rest of the prompt, else explore by cost.

Left out: the cost of evicting prefixes, which is off in Preble's code by default.

Source: Preble (arXiv:2407.00023), section 4; code WukLab/preble.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from vajra_policies.routers import figures
from vajra_policies.routers.block_index import RecentBlocks
from vajra_policies.routers.figures import Floats, Integers
from vajra_policies.routing import BindsOnArrival
from vajra_py.contract import (
    BatchFeatures,
    Layer,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    ReplicaId,
    ReplicaLoadView,
    RequestView,
)


class E2Config(PolicyConfig):
    """Parameters of `preble_e2`."""

    window_s: float = Field(
        180.0, gt=0, description="Length of the window whose requests are a replica's load, seconds."
    )
    default_output_tokens: float = Field(45.0, ge=0, description="Output length where none is predicted, tokens.")
    imbalance_ratio: float = Field(
        1.5, ge=1, description="Load of the heaviest replica over that of the lightest from which prefixes are moved."
    )
    min_requests_per_replica: int = Field(50, ge=0, description="Requests in the window before prefixes are moved.")


@dataclass(slots=True)
class _Placed:
    at: float
    replica_id: ReplicaId
    cost_s: float


class E2(BindsOnArrival):
    """Binds on arrival by one of three rules.

    - Exploit: if the longest cached prefix is longer than the rest of the prompt, choose the least loaded replica that
      holds it.
    - Explore: otherwise choose the replica with the least sum of its load and the work of this request.
    - Rebalance: if the replica chosen by the first rule has the highest load of all, and this load is at least
      `imbalance_ratio` times the lowest load, choose the replica with the lowest load instead.

    Load is the work, in seconds, that was sent to a replica within the window. The work of a request is the predicted
    prefill time of the uncached part of its prompt, plus its share of the decode steps in which its output is
    generated.

    Cached prefixes are estimated from the prompts sent to each replica before, up to its number of blocks. The cost of
    evicting prefixes, off by default in Preble's code, is not counted.
    """

    def __init__(self, config: E2Config, context: PolicyContext) -> None:
        self._config = config
        self._context = context
        self._block_size = context.limits.block_size
        self._sent = RecentBlocks(context.num_replicas, context.limits.num_blocks)
        self._window: deque[_Placed] = deque()
        self._load: Floats = np.zeros(context.num_replicas)
        self._count: Integers = np.zeros(context.num_replicas, dtype=np.int64)

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Return the replica by the rules in the class docstring; None if no replica is up."""
        up = figures.those_up(replicas)
        if not up:
            return None
        self._slide(now)
        ids = figures.ids(up)
        cached = self._sent.counts(request.block_hashes())[ids] * self._block_size
        costs = self._costs(request, up, cached)
        position = self._choice(request.num_prompt_tokens, ids, cached, costs)
        chosen = int(ids[position])
        placed = _Placed(now, chosen, float(costs[position]))
        self._window.append(placed)
        self._load[chosen] += placed.cost_s
        self._count[chosen] += 1
        self._sent.add(request.block_hashes(), chosen)
        return chosen

    def _choice(self, prompt: int, ids: Integers, cached: Integers, costs: Floats) -> int:
        load = self._load[ids]
        longest = cached.max()
        if longest <= prompt - longest:
            return int(np.argmin(load + costs))
        holder = int(np.argmin(np.where(cached == longest, load, np.inf)))
        lightest = int(np.argmin(load))
        is_heaviest = load[holder] == load.max() and load[holder] >= self._config.imbalance_ratio * load[lightest]
        has_seen_enough = self._count[ids].min() >= self._config.min_requests_per_replica
        return lightest if is_heaviest and has_seen_enough and load[holder] > load[lightest] else holder

    def _costs(self, request: RequestView, replicas: Sequence[ReplicaLoadView], cached: Integers) -> Floats:
        """Return the seconds of work that the request would add to each replica."""
        prefill_time, latency = self._context.prefill_time, self._context.latency
        prompt = request.num_prompt_tokens
        hits = np.minimum(cached, prompt - 1).tolist()
        times = {hit: prefill_time.remaining_s(prompt, hit) for hit in set(hits)}
        estimate = self._context.output_lengths.predict(request)
        output = self._config.default_output_tokens if estimate is None else estimate.mean_tokens
        output = min(output, request.max_tokens)
        running, context = figures.running(replicas).tolist(), figures.context_tokens(replicas).tolist()
        found = []
        for hit, num, tokens in zip(hits, running, context, strict=True):
            features = BatchFeatures().with_decodes(int(num) + 1, int(tokens) + prompt)
            found.append(times[hit] + output * latency.batch_time_s(features) / (num + 1))
        return np.array(found)

    def _slide(self, now: float) -> None:
        while self._window and now - self._window[0].at > self._config.window_s:
            gone = self._window.popleft()
            self._count[gone.replica_id] -= 1
            # Without requests in the window, set the load to exactly 0: rounding may have left a remainder.
            left = self._load[gone.replica_id] - gone.cost_s
            self._load[gone.replica_id] = max(left, 0.0) if self._count[gone.replica_id] else 0.0


SPEC = PolicySpec(
    name="preble_e2",
    layer=Layer.REPLICASET_SCHEDULER,
    config=E2Config,
    build=E2,
    summary=(
        "A replica that has cached more than half of the prompt (exploit), else the one that was sent the least "
        "work recently (explore)."
    ),
    source="Preble E2 (arXiv:2407.00023)",
    advice=(
        "Use it where some requests share long prefixes and loads are uneven. Not for prompts without common prefixes."
    ),
)
