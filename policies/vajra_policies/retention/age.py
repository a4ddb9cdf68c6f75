"""Retention by the time of entry: the oldest content is evicted first (`fifo`), or the newest (`filo`)."""

from __future__ import annotations

from vajra_py.contract import CachedBlock, Key, KeyMotion, PolicyConfig, PolicyContext, RetentionSpec


class FifoConfig(PolicyConfig):
    """`fifo` has no parameters."""


class OldestFirst:
    """Key = the time of entry: the oldest content is evicted first, however often it is used."""

    key_motion = KeyMotion.STATIC

    def key(self, block: CachedBlock, now: float) -> Key:
        """Time of entry."""
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
    summary="What was entered first goes first.",
    source="SGLang's fifo",
    advice=(
        "Use it as a control for what recency is worth. Not to serve: a prefix in constant use goes like any other "
        "when it is old."
    ),
)
FILO = RetentionSpec(
    name="filo",
    config=FiloConfig,
    build=_build_filo,
    summary="What was entered last goes first.",
    source="SGLang's filo",
    advice=(
        "Use it as a control, or where the first content (a common system prompt) is what has to stay. Not for "
        "conversations: each one drives out the one before it."
    ),
)
