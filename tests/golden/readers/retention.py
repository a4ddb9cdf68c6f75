"""Build the built-in retention policies that recorded evictions are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from vajra_policies import vajra_retention_policies
from vajra_py.contract import PolicyContext, ReplicaLimits, RetentionPolicy

_UNUSED: Any = None
_CONTEXT = PolicyContext(
    limits=ReplicaLimits(block_size=1, num_blocks=1, max_batch_size=1, max_batch_tokens=None, max_model_len=1),
    num_replicas=1,
    latency=_UNUSED,
    prefill_time=_UNUSED,
    output_lengths=_UNUSED,
    random_stream=_UNUSED,
)


def built(name: str, params: Mapping[str, Any], num_blocks: int) -> RetentionPolicy:
    """A retention policy for a cache of so many blocks."""
    spec = next(one for one in vajra_retention_policies() if one.name == name)
    context = replace(_CONTEXT, limits=replace(_CONTEXT.limits, num_blocks=num_blocks))
    return cast(RetentionPolicy, spec.build(spec.config(**params), context))
