"""SGLang's cache-aware router: to the replica that got the longest common prefix, unless load is too uneven.

Left out: characters, by which SGLang compares prompts; here whole KV blocks count.

Source: sglang-router 0.3.2, `sgl-model-gateway/src/policies/cache_aware.rs`.
"""

from __future__ import annotations

from pydantic import Field

from vajra_py.contract import Layer, PolicyConfig, PolicyContext, PolicySpec, ReplicasetScheduler


class CacheAwareConfig(PolicyConfig):
    """Parameters of `sglang_cache_aware`."""

    cache_threshold: float = Field(
        0.3, ge=0, le=1, description="Common part of the prompt above which it is followed, fraction."
    )
    balance_abs_threshold: int = Field(
        64, ge=0, description="Requests by which the most loaded replica must exceed the least loaded one to be uneven."
    )
    balance_rel_threshold: float = Field(1.5, ge=1, description="Factor by which it must exceed it as well.")
    max_tree_size: int = Field(
        2**26, ge=1, description="Tokens of prompts that are remembered for each replica (SGLang counts characters)."
    )


def _build(config: CacheAwareConfig, context: PolicyContext) -> ReplicasetScheduler:
    from vajra_policies.routers.cache_aware import CacheAware

    return CacheAware(config, context)


SPEC = PolicySpec(
    name="sglang_cache_aware",
    layer=Layer.REPLICASET_SCHEDULER,
    config=CacheAwareConfig,
    build=_build,
    summary="Each arriving request to the replica that got the longest common prefix, unless load is too uneven.",
    source="SGLang router 0.3.2, cache_aware",
    advice=(
        "Use it to compare with SGLang's router, or where replicas publish no KV events. Not where caches "
        "are reset or small: it believes what it has sent."
    ),
)
