"""Building of the memory tiers below the devices of a replicaset's replicas from its settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vajra_py.config import ReplicaConfig
from vajra_py.config.tiers import TierConfig, TiersConfig
from vajra_py.contract import PolicyContext, ReplicaLimits
from vajra_py.contract.retention import ExpiresContent, PinsContent
from vajra_py.errors import ConfigError, Problem
from vajra_py.plugins import Registry, build_retention
from vajra_py.runtime.kv import Retention
from vajra_py.runtime.kv.tier_store import TierStore
from vajra_py.runtime.kv.tiers import KvTiers, TierRules
from vajra_py.runtime.movement.links import LinkOptions
from vajra_py.runtime.movement.tier_rules import TierMovesRules
from vajra_py.runtime.support.clock import to_ticks
from vajra_py.runtime.support.seeds import SeedTree

_WHERE = "replica.memory.tiers"
_GIGA = 10**9
_1K = 1024


def tier_rules(settings: Sequence[tuple[ReplicaConfig, ReplicaLimits]]) -> TierMovesRules | None:
    """Return the rules of a replicaset's tiers, given the settings and limits of its replicas; None if no replica has
    tiers.

    Raises `ConfigError` if the settings are inconsistent.
    """
    tiered = [(one.memory.tiers, limits, one) for one, limits in settings if one.memory.tiers is not None]
    if not tiered:
        return None
    config, limits, _ = tiered[0]
    assert config is not None
    for other, _, replica in tiered:
        if other != config:
            raise ConfigError(Problem(_WHERE, "differ between pools of one replicaset", "Allowed: the same, or none"))
        if not replica.memory.prefix_cache.enabled or not replica.memory.prefix_cache.retain_freed:
            message = "need a prefix cache that keeps freed blocks"
            raise ConfigError(
                Problem(_WHERE, message, "Allowed: null, or prefix_cache with enabled: true and retain_freed: true")
            )
    sizes = {(each.block_size, _bytes_per_block(config, each)) for _, each, _ in tiered}
    if len(sizes) > 1:
        raise ConfigError(Problem(_WHERE, "are of pools whose blocks differ in size", "Allowed: blocks of one size"))
    num_bytes = _bytes_per_block(config, limits)
    if not num_bytes:
        message = "is missing, and the latency model does not know the KV size of a token"
        raise ConfigError(Problem(f"{_WHERE}.kv_bytes_per_token", message, "A number of bytes"))
    return TierMovesRules(
        links=[_link(level) for level in config.levels],
        bytes_per_block=num_bytes,
        prefetch=config.prefetch,
        prefetch_from=config.prefetch_from,
        prefetch_timeout_s=config.prefetch_timeout_s,
        prefetch_timeout_s_per_token=config.prefetch_timeout_s_per_1k_tokens / _1K,
        min_prefetch_tokens=max(config.min_prefetch_tokens, 1),
        min_load_tokens=config.min_load_tokens,
        loads=config.loads,
        load_order=config.load_order,
    )


def _bytes_per_block(config: TiersConfig, limits: ReplicaLimits) -> int:
    if config.kv_bytes_per_token is not None:
        return config.kv_bytes_per_token * limits.block_size
    return limits.bytes_per_block


def _link(level: TierConfig) -> LinkOptions:
    shared = level.shared_bandwidth_gb_s
    return LinkOptions(
        bandwidth=level.bandwidth_gb_s * _GIGA,
        shared_bandwidth=None if shared is None else shared * _GIGA,
        latency_ticks=to_ticks(level.latency_s),
        contention=level.contention,
    )


class TiersOfReplicaset:
    """Builds the tiers of each replica of one replicaset; shared tiers are built once."""

    def __init__(self, context: PolicyContext, seeds: SeedTree, registry: Registry) -> None:
        self._context = context
        self._seeds = seeds
        self._registry = registry
        self._shared: dict[str, TierStore] = {}

    def of(self, replica_id: int, settings: ReplicaConfig, limits: ReplicaLimits) -> KvTiers | None:
        """Return the empty tiers of one replica; None if it has none. Raises `ConfigError`, and the errors of building
        a policy.
        """
        config = settings.memory.tiers
        if config is None:
            return None
        stores = []
        for index, level in enumerate(config.levels):
            store = self._shared.get(level.name) if level.shared else None
            if store is None:
                store = self._store(index, level, limits, str(replica_id))
                if level.shared:
                    self._shared[level.name] = store
            stores.append(store)
        rules = [TierRules(one.write, one.after_uses, one.exclusive, one.shared) for one in config.levels]
        return KvTiers(stores, rules, limits.block_size, replica_id, prompts_only=config.prompts_only)

    def _store(self, index: int, level: TierConfig, limits: ReplicaLimits, owner: str) -> TierStore:
        choice = level.retention
        context = replace(
            self._context,
            limits=replace(limits, num_blocks=level.num_blocks),
            random_stream=self._seeds.child("tiers", level.name, owner).stream,
        )
        policy = build_retention(choice.policy, choice.parameters, context, self._registry)
        refused: Sequence[tuple[type, str]] = ((ExpiresContent, "lets content expire"), (PinsContent, "pins content"))
        for kind, what in refused:
            if isinstance(policy, kind):
                message = f"{choice.policy!r} {what}, which a tier does not"
                raise ConfigError(
                    Problem(f"{_WHERE}.levels.{index}.retention", message, "Allowed: a policy that only orders content")
                )
        return TierStore(level.name, level.num_blocks, Retention(policy, choice.policy))
