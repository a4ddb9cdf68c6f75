"""Chunk sizes with which a step still meets its target time.

Chunks are multiples of 32 tokens, so that kernels run full tiles. Exceptions are the last chunk of a prompt, and a
chunk that fills the prompt's present KV-parallel group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from pydantic import Field, model_validator

from vajra_policies.preemption import PreemptionConfig
from vajra_py.contract import BatchBuilder, BatchFeatures, PolicyContext, RequestView

GRAIN_TOKENS = 32
FIRST_CHUNK_TOKENS = 256
"""Initial value of the last chunk found: the first search starts from twice this size, 512 tokens."""


class TargetTimeConfig(PreemptionConfig):
    """Parameters of chunks that fit a target time."""

    target_batch_time_s: float = Field(0.05, gt=0, description="Predicted time that a step may take, seconds.")
    min_chunk: int = Field(
        32,
        ge=GRAIN_TOKENS,
        multiple_of=GRAIN_TOKENS,
        description="Minimum number of tokens of a chunk that is not a prompt's last, a multiple of 32.",
        json_schema_extra={"unit": "tokens"},
    )
    max_chunk: int = Field(
        8192,
        ge=GRAIN_TOKENS,
        multiple_of=GRAIN_TOKENS,
        description="Maximum number of tokens of a chunk, a multiple of 32.",
        json_schema_extra={"unit": "tokens"},
    )
    tolerance_fraction: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="Fraction of the target within which a step counts as full, so that no further prompt gets a chunk.",
    )

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.min_chunk > self.max_chunk:
            raise ValueError(f"min_chunk ({self.min_chunk}) is above max_chunk ({self.max_chunk})")
        return self


class TargetTime:
    """Finds the largest chunks with which the predicted step time does not exceed a target.

    The search starts from twice the last chunk found; this affects only the number of predictions, as long as larger
    chunks are not predicted to be faster.

    Source: Vajra's scheduling architecture and public code (binary search, bounds, tolerance, starting point); Medha
    (arXiv:2409.17264), adaptive chunking.
    """

    __slots__ = ("_config", "_context", "_last_chunk", "_last_solo_chunk")

    def __init__(self, config: TargetTimeConfig, context: PolicyContext) -> None:
        self._config = config
        self._context = context
        self._last_chunk = FIRST_CHUNK_TOKENS
        self._last_solo_chunk = FIRST_CHUNK_TOKENS

    def is_full(self, batch: BatchBuilder, target_s: float) -> bool:
        """Return True if the step already takes its target time, within the tolerance. An empty step is never full."""
        limit_s = (1.0 - self._config.tolerance_fraction) * target_s
        return batch.num_requests > 0 and batch.predicted_time() > limit_s

    def chunk(self, request: RequestView, batch: BatchBuilder, target_s: float) -> int:
        """Return the largest chunk of the request with which the step is predicted to take at most `target_s` seconds.

        The chunk has at least `min_chunk` tokens (or the rest of the prompt, if shorter), even if the step then takes
        longer, so that a step that is not full always makes progress. If the token budget leaves fewer tokens than
        that, the chunk is 0 or, in an empty step, the whole budget.
        """
        cap = min(self._config.max_chunk, batch.tokens_left)
        num_remaining = batch.max_chunk(request)
        sizes = ChunkSizes(self._config.min_chunk, num_remaining, cap)
        if not sizes.count:
            return 0 if batch.num_requests else cap

        def fits(num_tokens: int) -> bool:
            return batch.predicted_time_with(request, num_tokens) <= target_s

        chunk = largest_that_fits(sizes, fits, 2 * self._last_chunk)
        if chunk < num_remaining:  # a prompt's last chunk does not show how many tokens fit
            self._last_chunk = chunk
        return chunk

    def solo_chunk_size(self, num_done_tokens: int, num_remaining_tokens: int, target_s: float) -> int:
        """Return the chunk, at least 1 token, for a prompt that is alone on the replica, by the rule of `chunk`."""
        limits = self._context.limits
        cap = self._config.max_chunk
        if limits.max_batch_tokens is not None:
            cap = min(cap, limits.max_batch_tokens)
        if limits.kv_group_tokens is not None:
            to_boundary = limits.kv_group_tokens - num_done_tokens % limits.kv_group_tokens
            num_remaining_tokens = min(num_remaining_tokens, to_boundary)
        sizes = ChunkSizes(self._config.min_chunk, num_remaining_tokens, cap)
        if not sizes.count:
            return cap
        latency = self._context.latency

        def fits(num_tokens: int) -> bool:
            return latency.stage_time_s(BatchFeatures().with_chunk(num_tokens, num_done_tokens)) <= target_s

        chunk = largest_that_fits(sizes, fits, 2 * self._last_solo_chunk)
        if chunk < num_remaining_tokens:
            self._last_solo_chunk = chunk
        return chunk


class ChunkSizes:
    """Possible sizes of a chunk, ascending: multiples of 32 from `min_chunk` that are at most `cap` and below
    `num_remaining`, then `num_remaining` itself if it is at most `cap`.
    """

    __slots__ = ("_first", "_largest", "count")

    def __init__(self, min_chunk: int, num_remaining: int, cap: int) -> None:
        self._first = min_chunk
        self._largest = min(num_remaining, cap)
        if num_remaining <= cap:
            self.count = 1 + max(0, -(-(num_remaining - min_chunk) // GRAIN_TOKENS))
        else:
            self.count = max(0, (cap - min_chunk) // GRAIN_TOKENS + 1)

    def __getitem__(self, position: int) -> int:
        return min(self._first + GRAIN_TOKENS * position, self._largest)

    def position_of(self, num_tokens: int) -> int:
        """Return the position of the largest multiple of 32 that is at most `num_tokens`, clamped to positions from 1
        to the last; 0 if there is only one size.
        """
        return min(max(1, (num_tokens - self._first) // GRAIN_TOKENS), self.count - 1)


def largest_that_fits(sizes: ChunkSizes, fits: Callable[[int], bool], guess: int) -> int:
    """Return the largest size that fits, or the smallest if none does, by doubling from `guess` and then bisecting."""
    # The size at `low` fits, or is the smallest; the size at `high` does not fit, or does not exist.
    low, high = 0, sizes.count
    position = sizes.position_of(guess)
    while low < position and fits(sizes[position]):
        low, position = position, min(2 * position, sizes.count - 1)
    if low < position:
        high = position
    while high - low > 1:
        middle = (low + high) // 2
        if fits(sizes[middle]):
            low = middle
        else:
            high = middle
    return sizes[low]
