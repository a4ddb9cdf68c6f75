"""Features of a batch for the latency model, for each KV-parallel group."""

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
    """Return the features of a batch of these chunks and decodes, all in one group."""
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
    """Features of batches by KV-parallel group (possibly a single one); a step lasts as long as its slowest group."""

    __slots__ = ("_latency", "_memory", "_one_group")

    def __init__(self, memory: KvMemory, latency: LatencyModel) -> None:
        self._memory = memory
        self._latency = latency
        self._one_group = memory.num_groups == 1

    def of(self, chunks: Collection[PlannedChunk], decodes: Iterable[Request], swap_bytes: int) -> list[BatchFeatures]:
        """Return the features of each group for these chunks and decodes; swapped bytes count for every group."""
        by_group = [BatchFeatures(swap_bytes=swap_bytes)] * self._memory.num_groups
        for request, num_tokens, context_tokens, _ in chunks:
            by_group = self.with_chunk(by_group, request, num_tokens, context_tokens)
        for request in decodes:
            by_group = self.with_decode(by_group, request)
        return by_group

    def with_decode(self, by_group: list[BatchFeatures], request: Request) -> list[BatchFeatures]:
        """Return `by_group` with one more decode, added to every group that takes part in computing it."""
        context_tokens = request.num_computed_tokens
        if self._one_group:
            return [by_group[0].with_decodes(1, context_tokens)]
        groups = self._memory.active_groups(request, context_tokens)
        contexts = self._memory.group_context(request, context_tokens)
        result = list(by_group)
        for group, context in zip(groups, contexts, strict=True):
            features = result[group].with_decodes(1, context)
            result[group] = _merging(features, 1) if len(groups) > 1 else features
        return result

    def with_chunk(
        self, by_group: list[BatchFeatures], request: Request, num_tokens: int, context_tokens: int
    ) -> list[BatchFeatures]:
        """Return `by_group` with one more chunk, added to every group that takes part in computing it."""
        if self._one_group:
            return [by_group[0].with_chunk(num_tokens, context_tokens)]
        groups = self._memory.active_groups(request, context_tokens)
        contexts: Sequence[int] = self._memory.group_context(request, context_tokens)
        if not groups:  # the request has no groups yet and would get the one with the least pending prefill work
            pending = self._memory.pending_prefill_work
            groups, contexts = (min(range(len(pending)), key=pending.__getitem__),), (context_tokens,)
        result = list(by_group)
        for group, context in zip(groups, contexts, strict=True):
            features = result[group].with_chunk(num_tokens, context)
            result[group] = _merging(features, num_tokens) if len(groups) > 1 else features
        return result

    def slowest(self, by_group: list[BatchFeatures]) -> BatchFeatures:
        """Return the features of the slowest group."""
        if self._one_group:
            return by_group[0]
        if isinstance(self._latency, NoPredictions):
            return max(by_group, key=_work)
        return max(by_group, key=self._latency.stage_time_s)


def _work(features: BatchFeatures) -> tuple[int, int]:
    """Return a group's work for comparisons without a latency model: (query tokens, decodes' context tokens plus
    attention pairs).
    """
    return features.num_tokens, features.decode_context_tokens + features.prefill_attention_pairs


def _merging(features: BatchFeatures, num_tokens: int) -> BatchFeatures:
    return features._replace(num_merged_tokens=features.num_merged_tokens + num_tokens)
