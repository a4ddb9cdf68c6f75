"""Replicas, requests and producers as routing parts see them, with the figures that a test gives."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vajra_py.contract import (
    PolicyConfig,
    PolicyContext,
    PredictedLatency,
    ProducerChoice,
    ReplicaLimits,
    ReplicaState,
    RoutingContext,
    RoutingPartKind,
)
from vajra_py.plugins import load_registry, routing_part_builder
from vajra_py.testing.harness import Harness, HarnessOptions


@dataclass(eq=False)
class Replica:
    """A replica's figures."""

    replica_id: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_pending_tokens: int = 0
    num_context_tokens: int = 0
    free_blocks: int = 100
    num_blocks: int = 100
    max_batch_size: int = 64
    hit_tokens: int = 0
    pool: str = "default"
    role: str = "mixed"
    is_up: bool = True
    loaded_adapters: Sequence[str] = ()
    waiting_adapters: Sequence[str] = ()
    max_loras: int = 0
    age_s: float = 0.0

    @property
    def state(self) -> ReplicaState:
        return ReplicaState.UP if self.is_up else ReplicaState.DOWN

    @property
    def limits(self) -> ReplicaLimits:
        return ReplicaLimits(16, self.num_blocks, self.max_batch_size, None, 1000)

    def prefix_hit_tokens(self, request: Any) -> int:
        return self.hit_tokens


@dataclass(eq=False)
class Request:
    """The facts of a request that routing reads."""

    num_prompt_tokens: int = 160
    request_id: str = "r"
    hashes: Sequence[Hashable] = ()
    num_output_tokens: int = 0
    is_prefill_complete: bool = False
    max_tokens: int = 1000
    session_id: str = ""
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    tbt_slo_s: float | None = None
    tenant: str = ""
    adapter: str = ""
    arrived_at: float = 0.0
    num_computed_tokens: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def block_hashes(self) -> Sequence[Hashable]:
        return self.hashes


def prompt(*names: str, blocks: int = 4, request_id: str = "r", rest: int = 0) -> Request:
    """A prompt of several stretches, each `blocks` blocks of 16 tokens; equal names in front are a common prefix."""
    hashes = [(*names[: index + 1], block) for index in range(len(names)) for block in range(blocks)]
    return Request(16 * len(hashes) + rest, request_id, hashes)


def replicas(**columns: Sequence[Any]) -> list[Any]:
    """Replicas with these figures, by name; ids in order."""
    length = len(next(iter(columns.values())))
    return [Replica(index, **{name: values[index] for name, values in columns.items()}) for index in range(length)]


@dataclass
class Matches:
    """A producer of prefix matches: blocks by replica id, of prompts of `total` blocks."""

    by_replica: Mapping[int, int]
    total: int | None = None
    block_size: int = 16

    def num_blocks(self, request: Any) -> int:
        return request.num_prompt_tokens // self.block_size if self.total is None else self.total

    def matched_blocks(self, request: Any, replicas: Sequence[Any]) -> list[int]:
        return [self.by_replica.get(one.replica_id, 0) for one in replicas]


@dataclass
class Load:
    """A producer of loads in flight, by replica id."""

    requests: Mapping[int, int] = field(default_factory=dict)
    tokens: Mapping[int, int] = field(default_factory=dict)
    uncached: int = 0

    def num_requests(self, replicas: Sequence[Any]) -> list[int]:
        return [self.requests.get(one.replica_id, 0) for one in replicas]

    def num_tokens(self, replicas: Sequence[Any]) -> list[int]:
        return [self.tokens.get(one.replica_id, 0) for one in replicas]

    def request_tokens(self, request: Any, replicas: Sequence[Any]) -> list[int]:
        return [self.uncached for _ in replicas]


@dataclass
class Latencies:
    """A producer of predictions: (TTFT headroom, TPOT headroom, TTFT, requests there) in milliseconds by replica id; none where absent."""

    by_replica: Mapping[int, tuple[float, float, float, int]]

    def latencies(self, request: Any, replicas: Sequence[Any], now: float) -> list[PredictedLatency | None]:
        found: list[PredictedLatency | None] = []
        for one in replicas:
            given = self.by_replica.get(one.replica_id)
            ttft, tpot, time, num = given or (0.0, 0.0, 0.0, 0)
            found.append(None if given is None else PredictedLatency(time / 1000, 0.01, ttft / 1000, tpot / 1000, num))
        return found


def context(num_replicas: int = 8, stream: Any = None, **options: Any) -> PolicyContext:
    """Services as in a run; blocks of 16 tokens. `stream`: what every part draws from."""
    made = Harness("fcfs", "round_robin", "fixed_chunk", HarnessOptions(num_replicas=num_replicas, **options)).context
    return made if stream is None else replace(made, random_stream=lambda name: stream)


def part(kind: RoutingPartKind, name: str, producers: Mapping[str, Any] | None = None, **params: Any) -> Any:
    """Build an installed part; `producers` take the place of those of these names."""
    return build(kind, name, context(), producers, params)


def build(
    kind: RoutingPartKind, name: str, services: PolicyContext, producers: Mapping[str, Any] | None, params: Any
) -> Any:
    """Build an installed part with these services."""
    made = dict(producers or {})

    def producer(wanted: str) -> Any:
        if wanted not in made:
            made[wanted] = routing_part_builder()(ProducerChoice(producer=wanted), RoutingContext(services, producer))
        return made[wanted]

    spec = load_registry().routing_part(kind, name).spec
    config: PolicyConfig = spec.config(**params)
    return spec.build(config, RoutingContext(services, producer))


def scores(name: str, views: Sequence[Any], request: Any = None, producers: Any = None, **params: Any) -> list[float]:
    """What an installed scorer says."""
    scorer = part(RoutingPartKind.SCORER, name, producers, **params)
    return [float(one) for one in scorer.scores(request or Request(), views, 0.0)]


def kept(name: str, views: Sequence[Any], request: Any = None, producers: Any = None, **params: Any) -> list[int]:
    """Ids that an installed filter keeps."""
    made = part(RoutingPartKind.FILTER, name, producers, **params)
    return [one.replica_id for one in made.keeps(request or Request(), views, 0.0)]


def seeded(seed: int = 0) -> Any:
    """A random stream."""
    return np.random.default_rng(seed)
