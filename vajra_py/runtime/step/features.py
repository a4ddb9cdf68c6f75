"""Features of the batch under construction for the latency model, group by group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from vajra_py.contract import BatchFeatures
from vajra_py.contract.latency import CONTEXT_GRAIN_TOKENS, LatencyModel
from vajra_py.latency.unknown import NoPredictions
from vajra_py.runtime.kv import KvMemory
from vajra_py.runtime.requests.request import Request

EMPTY = BatchFeatures()


class ShapeTracker:
    """Sums the features of a batch: chunks as they are added, decodes when asked.

    Under KV parallelism there is one sum a group, and a step lasts as long as its slowest group.
    """

    __slots__ = (
        "_attention_pairs",
        "_context_rounded_tokens",
        "_context_tokens",
        "_decodes",
        "_groups",
        "_latency",
        "_memory",
        "_num_prefills",
        "_one_group",
        "_prefill_tokens",
        "_tokens_squared",
        "is_clear",
        "swap_bytes",
    )

    def __init__(self, memory: KvMemory, latency: LatencyModel, decodes: Callable[[], Iterable[Request]]) -> None:
        self._memory = memory
        self._latency = latency
        self._decodes = decodes
        self._one_group = memory.num_groups == 1
        self.clear()

    def clear(self, swap_bytes: int = 0) -> None:
        """Start anew, without chunks and with so many bytes to swap."""
        self.swap_bytes = swap_bytes
        self.is_clear = not swap_bytes
        """Whether there are neither chunks nor swaps."""
        self._prefill_tokens = self._num_prefills = self._tokens_squared = self._attention_pairs = 0
        self._context_tokens = self._context_rounded_tokens = 0
        self._groups: list[BatchFeatures] = [] if self._one_group else [EMPTY] * self._memory.num_groups

    def add_swap(self, num_bytes: int) -> None:
        """Bytes that this step moves between device and host."""
        self.swap_bytes += num_bytes
        self.is_clear = False

    def add_chunk(self, request: Request, num_tokens: int, context_tokens: int) -> None:
        """One more chunk is in the batch."""
        self.is_clear = False
        if not self._one_group:
            self._groups = self.with_chunk(self._groups, request, num_tokens, context_tokens)
            return
        self._prefill_tokens += num_tokens
        self._num_prefills += 1
        self._tokens_squared += num_tokens * num_tokens
        self._context_tokens += context_tokens
        self._context_rounded_tokens += -(-context_tokens // CONTEXT_GRAIN_TOKENS) * CONTEXT_GRAIN_TOKENS
        self._attention_pairs += num_tokens * context_tokens + num_tokens * (num_tokens + 1) // 2

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

    def complete(self, num_decodes: int, context_tokens: int, extra: Request | None = None) -> list[BatchFeatures]:
        """The batch by group: its chunks, swaps and decodes (`extra`: one more; with several groups)."""
        if self._one_group:
            return [
                BatchFeatures(
                    num_decodes,
                    context_tokens,
                    self._num_prefills,
                    self._prefill_tokens,
                    self._tokens_squared,
                    self._context_tokens,
                    self._context_rounded_tokens,
                    self._attention_pairs,
                    0,
                    self.swap_bytes,
                )
            ]
        shapes = self._groups
        result = [_swapping(shape, self.swap_bytes) for shape in shapes] if self.swap_bytes else list(shapes)
        for request in (*self._decodes(), extra) if extra is not None else self._decodes():
            groups = self._memory.active_groups(request, request.num_computed_tokens)
            contexts = self._memory.group_context(request, request.num_computed_tokens)
            for group, context in zip(groups, contexts, strict=True):
                shape = result[group].with_decodes(1, context)
                result[group] = _merging(shape, 1) if len(groups) > 1 else shape
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


def _swapping(shape: BatchFeatures, num_bytes: int) -> BatchFeatures:
    return shape._replace(swap_bytes=shape.swap_bytes + num_bytes)
