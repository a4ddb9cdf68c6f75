"""One request of a workload as its client sends it.

A request is immutable: it has no state that changes while it is served. Facts that only a simulation may use (the true
number of output tokens) are stored beside those that the client states, and are never shown to a policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec import Struct

from vajra_py.contract.facts import StatedFacts

__all__ = ["MetadataValue", "PromptContent", "RequestSpec", "SegmentId"]

MetadataValue: TypeAlias = str | int | float

SegmentId: TypeAlias = str | int | tuple[str | int, ...]
"""Identifier of the content of a segment of a prompt. `("out", request_id)` is the output of that request."""


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


class PromptContent(Struct, frozen=True):
    """Content of a prompt as segments, which other prompts may share.

    `segments` are pairs (segment id, number of tokens >= 1) in prompt order. A token is identified by its segment's id
    and its offset in the segment: equal ids mean equal tokens, up to the shorter length if the lengths differ.
    """

    segments: tuple[tuple[SegmentId, int], ...]

    @property
    def num_tokens(self) -> int:
        """Total number of tokens of the segments, which is the prompt's length."""
        return sum(length for _, length in self.segments)

    def shared_prefix_tokens(self, other: PromptContent) -> int:
        """Return the number of leading tokens that both prompts share."""
        shared = 0
        for (mine, my_length), (theirs, their_length) in zip(self.segments, other.segments, strict=False):
            if mine != theirs:
                break
            shared += min(my_length, their_length)
            if my_length != their_length:
                break
        return shared

    def span(self, start: int, stop: int) -> tuple[tuple[SegmentId, int, int], ...]:
        """Return the identity of the tokens [start, stop): tuples (segment id, offset in segment, number of tokens).

        Two prompts have the same tokens in this range if and only if the tuples are equal; the chained hashes of KV
        blocks are computed from them.
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
        """Return the content of the prompt cut after `num_tokens` tokens."""
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
    """One request of a workload: the facts that its client states (`StatedFacts`), and facts that only a simulation may
    use.

    Attributes:
        request_id: Unique in its workload.
        arrived_at: Seconds from the workload's start. For a request with parents (`follows`), this is only a nominal
            time, by which the workload is ordered and cut: the request arrives `think_time_s` after its last parent
            ends.
        num_prompt_tokens: Tokens of the prompt, at least 1.
        num_output_tokens: True output length in tokens, at least 1; a limit may end the output earlier. Never shown to
            a policy.
        max_tokens: Largest number of output tokens that the client accepts; None: up to the model's length.
        content: Content of the prompt for prefix caching; None: the prompt shares nothing.
        prompt_token_ids: Token ids of the prompt if they are known, `num_prompt_tokens` in number.
        follows: Id of the parent (closed-loop sessions), or ids of several parents (a join in a graph of calls): the
            request arrives only after all of them have ended. None: it arrives at `arrived_at`.
        think_time_s: Seconds between the end of the last parent and the arrival of this request.
        metadata: Facts of the source that are kept but never interpreted.
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
        """Ids of the requests that this request follows; empty if it arrives at `arrived_at`."""
        if self.follows is None:
            return ()
        return (self.follows,) if isinstance(self.follows, str) else self.follows


def follows_of(parents: Sequence[str]) -> str | tuple[str, ...] | None:
    """Return ids of parents in the form of `RequestSpec.follows`: one id as text, several as a tuple, else None."""
    if len(parents) > 1:
        return tuple(parents)
    return parents[0] if parents else None
