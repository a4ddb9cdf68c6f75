"""ARC: two lists, of content used once and of content used again, whose sizes adapt to the misses.

Source: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST 2003), with the rules of vLLM 0.33's offloading
manager: content that returns after its eviction enters the first list like new content, and there is one victim for
each new block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

from vajra_py.contract import CachedBlock, Key, KeyMotion, PolicyConfig, PolicyContext, RetentionSpec

ONCE, AGAIN = 0, 1


class ArcConfig(PolicyConfig):
    """`arc` has no parameters."""


class AdaptiveReplacement:
    """Evicts from the list of content used once while this list has at least its target length, else from the other
    list.

    The target grows when content returns that was evicted from the list of content used once. It shrinks when content
    returns that was evicted from the other list. Within a list, the least recently used content is evicted first.
    """

    key_motion = KeyMotion.PROGRESS

    def __init__(self, capacity: int) -> None:
        """Create the policy for a cache of `capacity` blocks."""
        self._capacity = capacity
        self.target = 0.0
        """Target length of the list of content used once, in blocks."""
        self.once: dict[CachedBlock, None] = {}
        """Blocks of content used once, idle or in use."""
        self.again: dict[CachedBlock, None] = {}
        """Blocks of content used more than once, idle or in use."""
        self.gone: tuple[OrderedDict[Hashable, None], OrderedDict[Hashable, None]] = (OrderedDict(), OrderedDict())
        """Hashes of the content evicted from each list, the latest last; at most `capacity` hashes each."""

    def key(self, block: CachedBlock, now: float) -> Key:
        """Return the time of the last use."""
        return block.last_used_at

    def segment(self, block: CachedBlock) -> int:
        """Return the number of the list that holds the block: `ONCE` or `AGAIN`."""
        return AGAIN if block in self.again else ONCE

    def next_segment(self, now: float) -> int:
        """Return the number of the list from which the next block is evicted."""
        return ONCE if len(self.once) >= int(self.target) else AGAIN

    def on_stored(self, blocks: Sequence[CachedBlock], now: float) -> None:
        """Adapt the target to content that returns after an eviction, and add all stored content to the first list."""
        self.learn([block.block_hash for block in blocks])
        self.enter(blocks)

    def on_used(self, blocks: Sequence[CachedBlock], now: float) -> None:
        """Move content that is used again to the second list."""
        for block in blocks:
            self.once.pop(block, None)
            self.again[block] = None

    def on_evicted(self, block: CachedBlock, now: float) -> None:
        """Record the hash of the block as evicted from its list."""
        is_again = block in self.again
        self.on_withdrawn(block, now)
        gone = self.gone[AGAIN if is_again else ONCE]
        gone[block.block_hash] = None
        if len(gone) > self._capacity:
            gone.popitem(last=False)

    def on_withdrawn(self, block: CachedBlock, now: float) -> None:
        """Forget content that was removed without eviction."""
        self.once.pop(block, None)
        self.again.pop(block, None)

    def on_cleared(self, now: float) -> None:
        """Forget all content and all evictions, and reset the target."""
        self.target = 0.0
        for one in (self.once, self.again, *self.gone):
            one.clear()

    def learn(self, hashes: Sequence[Hashable]) -> None:
        """Adapt the target for each of these hashes whose content was evicted earlier. `hashes` are those of a chain of
        blocks, from the first to the last; the last is handled first.
        """
        once, again = self.gone
        for one in reversed(hashes):
            if one in once:
                self.target = min(self.target + max(1.0, len(again) / len(once)), self._capacity)
                once.move_to_end(one)
            elif one in again:
                self.target = max(self.target - max(1.0, len(once) / len(again)), 0.0)
                again.move_to_end(one)

    def enter(self, blocks: Iterable[CachedBlock]) -> None:
        """Put new content into the first list, and forget its earlier evictions."""
        for block in blocks:
            for gone in self.gone:
                gone.pop(block.block_hash, None)
            self.once[block] = None


def _build(config: ArcConfig, context: PolicyContext) -> AdaptiveReplacement:
    return AdaptiveReplacement(context.limits.num_blocks)


SPEC = RetentionSpec(
    name="arc",
    config=ArcConfig,
    build=_build,
    summary="Two lists, of content used once and of content used again, whose sizes adapt to the misses.",
    source="Megiddo and Modha (FAST 2003), with the rules of vLLM's offloading manager",
    advice=(
        "Use it where the mix of new and returning prompts changes, so that no fixed threshold suits it for long. Not "
        "where results have to be explained: an eviction depends on all earlier ones."
    ),
)
