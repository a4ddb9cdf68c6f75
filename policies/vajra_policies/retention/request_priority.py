"""Retention by the priority of requests: content that only less urgent requests use is evicted first."""

from __future__ import annotations

from vajra_py.contract import CachedBlock, Key, KeyMotion, PolicyConfig, PolicyContext, RetentionSpec


class PriorityConfig(PolicyConfig):
    """`priority` has no parameters."""


class PriorityRetention:
    """Key = (minus the most urgent priority of the requests that have used the content, last use).

    A priority is the number stated by a request; lower is more urgent.
    """

    key_motion = KeyMotion.PROGRESS

    def key(self, block: CachedBlock, now: float) -> Key:
        """Return (minus the most urgent priority of the block's users, time of the last use)."""
        return (-block.priority, block.last_used_at)


def _build(config: PriorityConfig, context: PolicyContext) -> PriorityRetention:
    return PriorityRetention()


SPEC = RetentionSpec(
    name="priority",
    config=PriorityConfig,
    build=_build,
    summary="Content that only less urgent requests have used is evicted first; ties by least recent use.",
    source="SGLang's priority",
    advice=(
        "Use it where some tenants pay for their cache: less urgent requests cannot evict their content. Not with a "
        "single priority, with which it is `lru`."
    ),
)
