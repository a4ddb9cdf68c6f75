"""Retention by the last use: the least recently used content is evicted first (`lru`), or the most recently used
(`mru`).
"""

from __future__ import annotations

from vajra_py.contract import CachedBlock, Key, KeyMotion, PolicyConfig, PolicyContext, RetentionSpec


class LruConfig(PolicyConfig):
    """`lru` has no parameters."""


class LeastRecentlyUsed:
    """Key = the last use: the content unused for longest is evicted first."""

    key_motion = KeyMotion.PROGRESS

    def key(self, block: CachedBlock, now: float) -> Key:
        """Return the time of the last use."""
        return block.last_used_at


class MruConfig(PolicyConfig):
    """`mru` has no parameters."""


class MostRecentlyUsed:
    """Key = minus the last use: the content used last is evicted first.

    Optimal if content is used cyclically, and is more than the cache can hold.
    """

    key_motion = KeyMotion.PROGRESS

    def key(self, block: CachedBlock, now: float) -> Key:
        """Return minus the time of the last use."""
        return -block.last_used_at


def _build_lru(config: LruConfig, context: PolicyContext) -> LeastRecentlyUsed:
    return LeastRecentlyUsed()


def _build_mru(config: MruConfig, context: PolicyContext) -> MostRecentlyUsed:
    return MostRecentlyUsed()


LRU = RetentionSpec(
    name="lru",
    config=LruConfig,
    build=_build_lru,
    summary="The content that has been unused for longest is evicted first; the default.",
    source="vLLM's free block queue, SGLang's lru",
    follows_release=True,
    advice=(
        "Use it as the default and the baseline. Not where prompts that are never repeated evict shared ones "
        "(`slru`), or where more content than fits is used in a cycle (`mru`)."
    ),
)
MRU = RetentionSpec(
    name="mru",
    config=MruConfig,
    build=_build_mru,
    summary="The content that was used last is evicted first.",
    source="SGLang's mru",
    advice=(
        "Use it where more content than fits is used in a cycle: a part of it then hits in every round, while `lru` "
        "never hits. Not for conversations, whose next turn needs the content that was used last."
    ),
)
