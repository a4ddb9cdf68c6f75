"""One request of a workload as its client sends it.

A request is a fact: nothing here changes while it is served. What only a simulation may know (the true number of output tokens) stands
beside what a client states, and never reaches a policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from vajra_py.contract.facts import StatedFacts

__all__ = ["MetadataValue", "PromptContent", "RequestSpec", "SegmentId"]

MetadataValue: TypeAlias = str | int | float

SegmentId: TypeAlias = str | int | tuple[str | int, ...]
"""Name of the content of a stretch of a prompt. `("out", request_id)` is the output of that request."""


class _NoMetadata(Mapping[str, MetadataValue]):
    """The empty mapping that every request without metadata shares."""

    __slots__ = ()

    def __getitem__(self, key: str) -> MetadataValue:
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "{}"

    def __reduce__(self) -> str:
        return "NO_METADATA"


NO_METADATA: Mapping[str, MetadataValue] = _NoMetadata()


@dataclass(frozen=True, slots=True)
class PromptContent:
    """Stretches of a prompt that it shares with other prompts.

    `segments` are (segment id, number of tokens >= 1) in prompt order. A token is identified by its segment's id and its offset in the
    segment, so the same id means the same tokens, and a segment may be longer in one prompt than in another.
    """

    segments: tuple[tuple[SegmentId, int], ...]

    @property
    def num_tokens(self) -> int:
        """Tokens described: the prompt's length."""
        return sum(length for _, length in self.segments)

    def shared_prefix_tokens(self, other: PromptContent) -> int:
        """Number of leading tokens that both prompts share."""
        shared = 0
        for (mine, my_length), (theirs, their_length) in zip(self.segments, other.segments, strict=False):
            if mine != theirs:
                break
            shared += min(my_length, their_length)
            if my_length != their_length:
                break
        return shared

    def span(self, start: int, stop: int) -> tuple[tuple[SegmentId, int, int], ...]:
        """Identity of the tokens [start, stop): pieces of (segment id, offset in the segment, number of tokens).

        Two prompts hold the same tokens there exactly when their pieces are equal; what a KV block's chained hash is made from.
        """
        pieces: list[tuple[SegmentId, int, int]] = []
        begin = 0
        for segment_id, length in self.segments:
            if begin >= stop:
                break
            low, high = max(start, begin), min(stop, begin + length)
            if low < high:
                pieces.append((segment_id, low - begin, high - low))
            begin += length
        return tuple(pieces)

    def first_tokens(self, num_tokens: int) -> PromptContent:
        """The content of the prompt cut after `num_tokens` tokens."""
        kept: list[tuple[SegmentId, int]] = []
        left = num_tokens
        for segment_id, length in self.segments:
            if left <= 0:
                break
            kept.append((segment_id, min(length, left)))
            left -= length
        return PromptContent(tuple(kept))


@dataclass(frozen=True, slots=True)
class RequestSpec(StatedFacts):
    """One request of a workload, as its client would send it, plus the truth only a simulation knows. What clients state is in `StatedFacts`.

    Attributes:
        request_id: Unique in its workload.
        arrived_at: Seconds from the workload's start. For a request that `follows` others, only a nominal time (it orders and cuts the
            workload): the request arrives `think_time_s` after the last of them ends.
        num_prompt_tokens: Tokens of the prompt, at least 1.
        num_output_tokens: Tokens that the model would answer when nothing stops it, at least 1. The truth; never shown to a policy.
        max_tokens: Most output tokens the client asked for; None: up to the model's length.
        content: What prefix caching can reuse; None: shares nothing.
        prompt_token_ids: The prompt itself, where known; `num_prompt_tokens` long.
        follows: Id of the request whose end it waits for (closed-loop sessions), or the ids of several, of which it waits for the last
            to end (a join in a graph of calls); None: arrives by the clock.
        think_time_s: Seconds between the (last) end of what it follows and its own arrival.
        metadata: Facts of the source that nothing here interprets.
    """

    request_id: str
    arrived_at: float
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int | None = None
    content: PromptContent | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    follows: str | tuple[str, ...] | None = None
    think_time_s: float = 0.0
    metadata: Mapping[str, MetadataValue] = field(default_factory=lambda: NO_METADATA, hash=False)

    @property
    def parents(self) -> tuple[str, ...]:
        """Ids of the requests that it follows; none: it arrives by the clock."""
        if self.follows is None:
            return ()
        return (self.follows,) if isinstance(self.follows, str) else self.follows


def follows_of(parents: Sequence[str]) -> str | tuple[str, ...] | None:
    """Parents as `RequestSpec.follows` holds them: one as its id alone, none as None."""
    if len(parents) > 1:
        return tuple(parents)
    return parents[0] if parents else None
