"""Retention by the number of uses: evict the least used content first (`lfu`), or content with few uses (`slru`)."""

from __future__ import annotations

from pydantic import Field

from vajra_py.contract import CachedBlock, Key, KeyMotion, PolicyConfig, PolicyContext, RetentionSpec


class LfuConfig(PolicyConfig):
    """`lfu` has no parameters."""


class LeastFrequentlyUsed:
    """Key = (uses, last use): the least used content is evicted first; ties go to the least recently used.

    Counts of uses are forgotten with the content, and do not age.
    """

    key_motion = KeyMotion.PROGRESS

    def key(self, block: CachedBlock, now: float) -> Key:
        """Return (number of uses, time of the last use)."""
        return (block.num_uses, block.last_used_at)


class SlruConfig(PolicyConfig):
    """Parameters of `slru`."""

    protected_threshold: int = Field(2, ge=1, description="Number of uses from which content is protected.")


class SegmentedLru:
    """Key = (protected, last use): content with fewer than `protected_threshold` uses is evicted before all other
    content; in both groups, the least recently used content first.
    """

    key_motion = KeyMotion.PROGRESS

    def __init__(self, config: SlruConfig) -> None:
        self._threshold = config.protected_threshold

    def key(self, block: CachedBlock, now: float) -> Key:
        """Return (1 if the content was used often enough, else 0; time of the last use)."""
        return (int(block.num_uses >= self._threshold), block.last_used_at)


def _build_lfu(config: LfuConfig, context: PolicyContext) -> LeastFrequentlyUsed:
    return LeastFrequentlyUsed()


def _build_slru(config: SlruConfig, context: PolicyContext) -> SegmentedLru:
    return SegmentedLru(config)


LFU = RetentionSpec(
    name="lfu",
    config=LfuConfig,
    build=_build_lfu,
    summary="The content with the fewest uses is evicted first; ties by least recent use.",
    source="SGLang's lfu",
    advice=(
        "Use it for a few prefixes that all requests share. Not where popularity changes: content that was used often "
        "long ago stays although it is no longer needed."
    ),
)
SLRU = RetentionSpec(
    name="slru",
    config=SlruConfig,
    build=_build_slru,
    summary="Content used once is evicted before content used again; within each group, the least recently used first.",
    source="SGLang's slru",
    advice=(
        "Use it where many prompts are never repeated: they cannot evict content that was used twice. Not where "
        "content is typically used just once more, after a long time."
    ),
)
