"""Retention for a time: idle content is dropped when its time to live is over."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vajra_py.contract import CachedBlock, Key, KeyMotion, PolicyConfig, PolicyContext, RetentionSpec

Seconds = Annotated[float, Field(ge=0)]


class TtlConfig(PolicyConfig):
    """Parameters of `ttl`."""

    ttl_s: Seconds = Field(300.0, description="Time that idle content lives after its last use, seconds.")
    ttl_by_slo_class_s: dict[str, Seconds] = Field(
        default_factory=dict,
        description="Time that content lives after its last use, by the class of service of the request that used it, seconds.",
    )


class TimeToLive:
    """Key = the end of the time to live: if memory is short, the content that expires first is evicted first; expired
    content is dropped in any case.
    """

    key_motion = KeyMotion.PROGRESS

    def __init__(self, config: TtlConfig) -> None:
        self._ttl_s = config.ttl_s
        self._by_class = dict(config.ttl_by_slo_class_s)

    def key(self, block: CachedBlock, now: float) -> Key:
        """Return the end of the block's time to live, seconds on the run's clock."""
        return self.expires_at(block)

    def expires_at(self, block: CachedBlock) -> float:
        """Return the last use plus the time to live for the SLO class of the request that used the content last."""
        return block.last_used_at + self._by_class.get(block.request.slo_class, self._ttl_s)


def _build(config: TtlConfig, context: PolicyContext) -> TimeToLive:
    return TimeToLive(config)


SPEC = RetentionSpec(
    name="ttl",
    config=TtlConfig,
    build=_build,
    summary="Idle content expires some time after its last use; the content that expires first is evicted first.",
    source="prompt caches with a time to live; vLLM PR 38514",
    advice=(
        "Use it where content must stay for a fixed time, or must be gone after it. Not to raise hit rates: expired "
        "content is lost even while memory is free."
    ),
)
