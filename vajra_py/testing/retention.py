"""Conformance checks of retention policies, in simulated conversations that share prefixes and exceed memory.

In a package's own tests:

    @pytest.mark.parametrize("spec", vajra_retention_policies(), ids=lambda spec: spec.name)
    def test_keeps_the_contract(spec):
        check_retention(spec)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import isclose
from typing import Any

from vajra_py.contract import CachedBlock, EndReason, KeyMotion, PolicyContext, RequestView, RetentionSpec
from vajra_py.contract.observer import Observer
from vajra_py.plugins import check_retention_shape
from vajra_py.plugins.shapes import RETENTION_OPTIONS
from vajra_py.runtime.kv.retention_order import CachedEntry
from vajra_py.testing.arguments import require_spec
from vajra_py.testing.checking import POLICY_TIMEOUT_S, check_situations, require
from vajra_py.testing.simulated import serve, simulated_system
from vajra_py.workload import PromptContent, RequestSpec

SITUATIONS: Mapping[str, Mapping[str, Any]] = {
    "short memory": {"replica": {"max_batch_size": 4, "max_model_len": 400, "memory": {"num_blocks": 40}}},
    "two replicas": {
        "num_replicas": 2,
        "replica": {"max_batch_size": 4, "max_model_len": 400, "memory": {"num_blocks": 60}},
    },
    "one request fills it": {"replica": {"max_batch_size": 4, "max_model_len": 400, "memory": {"num_blocks": 26}}},
}
"""Settings of the replicaset in each situation, by name."""

_MOVES = (KeyMotion.ARBITRARY, KeyMotion.VOLATILE)

Gone = tuple[str, int]
"""An evicted block: (id of the request that used it last, number of blocks before it in the sequence)."""


def check_retention(
    spec: RetentionSpec, params: Mapping[str, Any] | None = None, *, policy_timeout_s: float = POLICY_TIMEOUT_S
) -> None:
    """Run a retention policy with its default parameters, or `params`, in every situation.

    The policy must have the methods of the Protocol. Its keys must move as declared and agree with its lines. Its pins
    must not keep a request from ending. It must not change its views, or read a clock or global random numbers. It must
    evict the same blocks in equal runs, and in order of release if it declares that. Raises `AssertionError` with the
    name of the policy and the finding.
    """
    require_spec(spec, RetentionSpec)
    what, otherwise = f"retention policy {spec.name!r}", "two equal runs kept different content"
    check_situations(what, spec, partial(_run, spec, params or {}), SITUATIONS, otherwise, policy_timeout_s)


@dataclass
class Kept:
    """Evictions and prefix hits of a run."""

    gone: list[Gone] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    """Number of cached tokens of each request, in order of submission."""


class _Watched:
    """Wrapper of a retention policy that compares its keys with its declarations."""

    def __init__(self, inner: Any, *, follows_release: bool) -> None:
        self._inner = inner
        self._follows_release = follows_release
        self._read: dict[CachedBlock, tuple[Any, Any]] = {}
        """Facts and key (or line) of each block, as of the last time that its key (or line) was read."""
        self.key_motion = inner.key_motion
        for name in RETENTION_OPTIONS:
            if getattr(inner, name, None) is not None and name not in vars(type(self)):
                setattr(self, name, getattr(inner, name))
        self._notify_evicted = getattr(inner, "on_evicted", None)
        if self.key_motion is KeyMotion.TIME_LINEAR:
            self.line = self._line

    def key(self, block: CachedBlock, now: float) -> Any:
        facts = _facts(block)
        key = self._inner.key(block, now)
        require(_facts(block) == facts, "key changed what it was shown")
        before = self._read.get(block)
        if before is not None and self.key_motion is KeyMotion.STATIC:
            require(before[1] == key, f"key_motion is STATIC, and a key moved from {before[1]} to {key}")
        self._read[block] = facts, key
        return key

    def _line(self, block: CachedBlock) -> Any:
        line = self._inner.line(block)
        self._read[block] = _facts(block), line
        return line

    def on_evicted(self, block: CachedBlock, now: float) -> None:
        facts, read = self._read.pop(block, (None, None))
        if self._follows_release and isinstance(block, CachedEntry):
            others = (
                one for one in self._read if isinstance(one, CachedEntry) and one.is_idle and not one.num_children
            )
            is_first = all(one.index > block.index for one in others)
            require(is_first, "follows_release is declared, and a block goes before one that became idle earlier")
        if facts == _facts(block) and self.key_motion not in _MOVES:
            key = self._inner.key(block, now)
            if self.key_motion is KeyMotion.TIME_LINEAR:
                line = read[0] + read[1] * now
                require(
                    isclose(line, key, rel_tol=1e-9, abs_tol=1e-9), f"line() says {line} at {now} s, and key() {key}"
                )
            else:
                require(
                    key == read, f"key_motion is {self.key_motion.name}, and a key moved by itself from {read} to {key}"
                )
        if self._notify_evicted is not None:
            self._notify_evicted(block, now)


def _facts(block: CachedBlock) -> Any:
    return (block.block_hash, block.depth, block.stored_at, block.last_used_at, block.num_uses, block.priority)


class _Seen(Observer):
    def __init__(self) -> None:
        self.gone: list[Gone] = []
        self.hits: dict[int, int] = {}
        """Number of cached tokens of each request, by its index in order of submission."""

    def on_evicted(self, replicaset: str, replica_id: int, block: CachedBlock, now: float) -> None:
        self.gone.append((block.request.request_id, block.depth))

    def on_ended(self, request: RequestView, reason: EndReason, detail: str, now: float) -> None:
        self.hits[request.index] = request.num_cached_tokens


def _run(spec: RetentionSpec, params: Mapping[str, Any], settings: Mapping[str, Any]) -> Kept:
    """Simulate conversations; return evictions and prefix hits. Raises if the policy breaks the contract."""

    def build(config: Any, context: PolicyContext) -> Any:
        policy = spec.build(config, context)
        check_retention_shape(policy, f"retention policy {spec.name!r}", spec.name)
        return _Watched(policy, follows_release=spec.follows_release)

    own = replace(spec, name="under_test", build=build, follows_release=False)
    scheduling = {"retention": {"policy": own.name, "params": dict(params)}}
    controller, simulator = simulated_system(own, scheduling, settings)
    seen = _Seen()
    controller.watch((seen,))
    serve(controller, simulator, _conversations())
    return Kept(seen.gone, [seen.hits[index] for index in sorted(seen.hits)])


def _conversations() -> list[RequestSpec]:
    """Return six conversations of up to eight turns with a common prefix, three priorities and two SLO classes."""
    specs: list[RequestSpec] = []
    for session in range(6):
        segments: tuple[tuple[Any, int], ...] = (("system", 48),)
        for turn in range(3 + session % 6):
            request_id = f"s{session}t{turn}"
            segments = (*segments, ((f"user{session}", turn), 16 + 5 * ((session + turn) % 4)))
            content = PromptContent(segments)
            if content.num_tokens > 340:
                break
            specs.append(
                RequestSpec(
                    request_id,
                    0.3 * turn + 0.11 * session,
                    content.num_tokens,
                    12,
                    content=content,
                    priority=session % 3,
                    slo_class="batch" if session % 2 else "chat",
                    session_id=f"s{session}",
                )
            )
            segments = (*segments, (("out", request_id), 12))
    return sorted(specs, key=lambda one: one.arrived_at)
