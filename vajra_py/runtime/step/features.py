"""Features of a batch for the latency model, group by group."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from vajra_py.contract import BatchFeatures
from vajra_py.contract.latency import LatencyModel
from vajra_py.latency.models.unknown import NoPredictions
from vajra_py.runtime.kv import KvMemory
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.step.plan import PlannedChunk


def features_of(
    chunks: Collection[PlannedChunk], num_decodes: int, decode_context_tokens: int, swap_bytes: int
) -> BatchFeatures:
    """A batch of these chunks and so many decodes, all in one group."""
    tokens = tokens_squared = context_tokens = pairs = 0
    for _, num_tokens, context, _ in chunks:
        squared = num_tokens * num_tokens
        tokens += num_tokens
        tokens_squared += squared
        context_tokens += context
        pairs += num_tokens * context + (squared + num_tokens) // 2
    return BatchFeatures(
        num_decodes,
        decode_context_tokens,
        len(chunks),
        tokens,
        tokens_squared,
        context_tokens,
        pairs,
        0,
        swap_bytes,
    )


class GroupFeatures:
    """Features of batches by KV-parallel group, of which there may be one; a step lasts as long as its slowest group."""

    __slots__ = ("_latency", "_memory", "_one_group")

    def __init__(self, memory: KvMemory, latency: LatencyModel) -> None:
        self._memory = memory
        self._latency = latency
        self._one_group = memory.num_groups == 1

    def of(self, chunks: Collection[PlannedChunk], decodes: Iterable[Request], swap_bytes: int) -> list[BatchFeatures]:
        """A batch of these chunks and decodes, with several groups; every group waits for what is swapped."""
        shapes = [BatchFeatures(swap_bytes=swap_bytes)] * self._memory.num_groups
        for request, num_tokens, context_tokens, _ in chunks:
            shapes = self.with_chunk(shapes, request, num_tokens, context_tokens)
        for request in decodes:
            shapes = self.with_decode(shapes, request)
        return shapes

    def with_decode(self, shapes: list[BatchFeatures], request: Request) -> list[BatchFeatures]:
        """`shapes` with one decode more, in every group that holds some of its tokens."""
        context_tokens = request.num_computed_tokens
        if self._one_group:
            return [shapes[0].with_decodes(1, context_tokens)]
        groups = self._memory.active_groups(request, context_tokens)
        contexts = self._memory.group_context(request, context_tokens)
        result = list(shapes)
        for group, context in zip(groups, contexts, strict=True):
            shape = result[group].with_decodes(1, context)
            result[group] = _merging(shape, 1) if len(groups) > 1 else shape
        return result

    def with_chunk(
        self, shapes: list[BatchFeatures], request: Request, num_tokens: int, context_tokens: int
    ) -> list[BatchFeatures]:
        """`shapes` with one chunk more, in every group that works on it."""
        if self._one_group:
            return [shapes[0].with_chunk(num_tokens, context_tokens)]
        groups = self._memory.active_groups(request, context_tokens)
        contexts: Sequence[int] = self._memory.group_context(request, context_tokens)
        if not groups:  # not placed yet: it would go where least prefill work is pending
            pending = self._memory.pending_prefill_work
            groups, contexts = (min(range(len(pending)), key=pending.__getitem__),), (context_tokens,)
        result = list(shapes)
        for group, context in zip(groups, contexts, strict=True):
            shape = result[group].with_chunk(num_tokens, context)
            result[group] = _merging(shape, num_tokens) if len(groups) > 1 else shape
        return result

    def slowest(self, shapes: list[BatchFeatures]) -> BatchFeatures:
        """The shape of the group that takes longest."""
        if self._one_group:
            return shapes[0]
        if isinstance(self._latency, NoPredictions):
            return max(shapes, key=_work)
        return max(shapes, key=self._latency.stage_time_s)


def _work(shape: BatchFeatures) -> tuple[int, int]:
    """What a group has to do, where nobody knows how long that takes: tokens, then the context that they read."""
    return shape.num_tokens, shape.decode_context_tokens + shape.prefill_attention_pairs


def _merging(shape: BatchFeatures, num_tokens: int) -> BatchFeatures:
    return shape._replace(num_merged_tokens=shape.num_merged_tokens + num_tokens)
