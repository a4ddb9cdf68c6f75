"""Retention by the time of entry: the oldest content is evicted first (`fifo`), or the newest (`filo`)."""

from __future__ import annotations

from vajra_py.contract import CachedBlock, Key, KeyMotion, PolicyConfig, PolicyContext, RetentionSpec


class FifoConfig(PolicyConfig):
    """`fifo` has no parameters."""


class OldestFirst:
    """Key = the time of entry: the oldest content is evicted first, however often it is used."""

    key_motion = KeyMotion.STATIC

    def key(self, block: CachedBlock, now: float) -> Key:
        """Return the time of entry."""
        return block.stored_at


class FiloConfig(PolicyConfig):
    """`filo` has no parameters."""


class NewestFirst:
    """Key = minus the time of entry: the oldest content stays longest."""

    key_motion = KeyMotion.STATIC

    def key(self, block: CachedBlock, now: float) -> Key:
        """Return minus the time of entry."""
        return -block.stored_at


def _build_fifo(config: FifoConfig, context: PolicyContext) -> OldestFirst:
    return OldestFirst()


def _build_filo(config: FiloConfig, context: PolicyContext) -> NewestFirst:
    return NewestFirst()


FIFO = RetentionSpec(
    name="fifo",
    config=FifoConfig,
    build=_build_fifo,
    summary="The content that was entered first is evicted first.",
    source="SGLang's fifo",
    advice=(
        "Use it as a control that shows the effect of recency. Not in production: an old prefix is evicted even if it "
        "is in constant use."
    ),
)
FILO = RetentionSpec(
    name="filo",
    config=FiloConfig,
    build=_build_filo,
    summary="The content that was entered last is evicted first.",
    source="SGLang's filo",
    advice=(
        "Use it as a control, or where the first content (a common system prompt) has to stay. Not for conversations: "
        "each one evicts the one before it."
    ),
)
