"""Compare `dynamo_kv_router` with recorded selections of Dynamo's router.

A run is driven operation by operation through the policy itself. Its ties are broken at random without a seed in Dynamo, so the
policy's draw is made to fall on the recorded choice wherever that is one of its own candidates; where it is not, the choice differs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from tests.golden.readers.trace import Difference, Result
from vajra_policies.routers.dynamo_kv_router import CostRouter, CostRouterConfig
from vajra_py.contract import PolicyContext, ReplicaLimits, ReplicaLoadView, RequestView
from vajra_py.testing.harness import Harness, HarnessOptions

SCHEMA = "router-golden/1"
_MOST = 1e-9
"""Largest difference of a cost; the record has them in decimals."""
_UNUSED = ("host_cache_hit_weight", "disk_cache_hit_weight")
"""Settings of tiers that the recorded runs have nothing in."""


@dataclass(eq=False)
class _Request:
    """Facts that the router reads of a request."""

    request_id: str
    hashes: Sequence[Hashable]
    num_prompt_tokens: int
    num_output_tokens: int = 0

    def block_hashes(self) -> Sequence[Hashable]:
        """Return the ids of the blocks: in the record they depend on their position, as hashes do."""
        return self.hashes


@dataclass(eq=False)
class _Worker:
    """A worker with the blocks that its events have told of."""

    replica_id: int
    block_size: int
    stored: set[tuple[Hashable, ...]] = field(default_factory=set)
    """Prefixes by their whole chain; each stands for its last block."""
    is_up: bool = True

    def prefix_hit_tokens(self, request: _Request) -> int:
        """Tokens of the longest prefix whose every block is stored."""
        length = 0
        while length < len(request.hashes) and tuple(request.hashes[: length + 1]) in self.stored:
            length += 1
        return length * self.block_size

    def store(self, prefix: Sequence[Hashable], blocks: Sequence[Hashable]) -> None:
        """Blocks have been stored behind a prefix."""
        for end in range(1, len(blocks) + 1):
            self.stored.add((*prefix, *blocks[:end]))


class _Forced:
    """A random stream that draws the candidate that was recorded."""

    def __init__(self) -> None:
        self.position = 0

    def integers(self, low: int, high: int) -> int:
        """The position, where there are so many."""
        return min(self.position, high - 1)

    def random(self) -> float:
        """Never drawn: the recorded temperature is 0."""
        raise AssertionError("drew a number")


class _Run:
    """One recorded run, and the policy in it."""

    def __init__(self, trace: Mapping[str, Any]) -> None:
        size, count = trace["block_size"], trace["workers"]
        self.stream = _Forced()
        harness = Harness("fcfs", "round_robin", "fixed_chunk", HarnessOptions(num_replicas=count, block_size=size))
        context: PolicyContext = replace(harness.context, random_stream=lambda name: self.stream)
        limits: ReplicaLimits = context.limits
        assert limits.block_size == size
        settings = {key: value for key, value in trace["config"].items() if key not in _UNUSED}
        self.policy = CostRouter(CostRouterConfig(**settings), context)
        self.workers = [_Worker(number, size) for number in range(count)]
        self.requests: dict[str, _Request] = {}

    def select(self, operation: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
        """Let the policy choose; the first difference as (field, recorded, ours)."""
        request = _Request(operation["id"], operation["blocks"], operation["isl"])
        self.requests[request.request_id] = request
        policy, views = self.policy, cast(Sequence[ReplicaLoadView], self.workers)
        view = cast(RequestView, request)
        sequences = policy.sequences
        overlaps = policy.overlaps(view, views, 0.0)
        load = np.stack([sequences.prefill_tokens, sequences.blocks, sequences.requests], axis=1).tolist()
        costs = policy.costs(view, views, overlaps)
        best = np.flatnonzero(costs == costs.min()).tolist()
        for name, recorded, ours in (
            ("overlap", [device for device, _, _ in operation["overlap"]], overlaps.tolist()),
            ("load", operation["load"], load),
            ("argmin", operation["argmin"], best),
        ):
            if recorded != ours:
                return name, recorded, ours
        if np.abs(costs - np.array(operation["costs"])).max() > _MOST:
            return "costs", operation["costs"], costs.tolist()
        if abs(costs[operation["chosen"]] - operation["cost_of_chosen"]) > _MOST:
            return "cost_of_chosen", operation["cost_of_chosen"], float(costs[operation["chosen"]])
        drawn = {worker for worker, _ in operation["draws"]}
        if not drawn <= set(best):
            return "draws", sorted(drawn), best
        self.stream.position = best.index(operation["chosen"]) if operation["chosen"] in best else 0
        chosen = policy.assign(view, views, 0.0)
        return None if chosen == operation["chosen"] else ("chosen", operation["chosen"], chosen)

    def apply(self, operation: Mapping[str, Any]) -> None:
        """Let anything else happen that was recorded."""
        kind = operation["op"]
        if kind == "stored":
            self.workers[operation["worker"]].store(operation["prefix"], operation["blocks"])
        elif kind == "removed":
            self.workers[operation["worker"]].stored -= {tuple(chain) for chain in operation["prefixes"]}
        else:
            request = cast(RequestView, self.requests[operation["id"]])
            if kind == "free":
                self.policy.on_departures([request], 0.0)
            elif kind == "prefill_complete":
                self.policy.sequences.prefill_complete(request)
            elif kind == "add_output_block":
                self.policy.sequences.add_output_block(request)
            else:
                raise ValueError(f"unknown operation {kind!r}")


def compare(system: str, name: str, trace: Mapping[str, Any]) -> Result:
    """Drive one run; the unit of comparison is a selection."""
    run, num_compared = _Run(trace), 0
    for position, operation in enumerate(trace["ops"]):
        if operation["op"] != "select":
            run.apply(operation)
            continue
        num_compared += 1
        different = run.select(operation)
        if different is not None:
            what, recorded, ours = different
            state = (f"setting: {trace['setting']}", f"config: {trace['config']}", f"request: {operation['id']}")
            difference = Difference(f"operation {position}", what, recorded, ours, state)
            return Result(system, name, num_compared, difference, unit="selections")
    return Result(system, name, num_compared, unit="selections")
