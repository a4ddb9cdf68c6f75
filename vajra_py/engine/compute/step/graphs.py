"""Decode batches captured as CUDA graphs and replayed.

The forward pass of a decode batch is captured once for each size of a ladder, on tensors with fixed addresses. A batch
of decodes is padded to the next size; its inputs are written into those tensors and the graph is replayed. Any other
step (chunks, more rows than the largest size) runs without a graph.

Invariants:
    - A captured pass reads and writes only tensors of this module, `last_tokens`, weights and KV memory; their
      addresses never change.
    - A padding row has KV length 0 and write slot -1, so it touches no KV; it reads and writes its token in the extra
      entry of `last_tokens`.
    - Launch sizes depend on bounds that are the same for all batches with the same captured size; attention divides
      its work on the device, according to the actual lengths.
    - If capturing fails, steps run without graphs, and the reason is logged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from vajra_kernels import AttentionMetadata
from vajra_py.engine.compute.batch import BatchState, HostBatch
from vajra_py.engine.compute.model.forward import Caches, Forward
from vajra_py.engine.compute.sampling.sampler import likeliest_tokens
from vajra_py.engine.compute.transfer import to_device

_log = logging.getLogger(__name__)

WARM_UPS = 2
"""Number of passes before a capture; they compile kernels and let libraries allocate workspaces, neither of which may
happen in a capture."""


def ladder(largest: int) -> tuple[int, ...]:
    """Return the batch sizes to capture, up to `largest`, in ascending order.

    A batch is padded to the next size. At most 7 rows are padding for sizes up to 64, and at most a fifth of the rows
    for larger sizes.
    """
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, largest + 1, 32)]
    return tuple(sorted({min(step, largest) for step in steps if step < largest} | {largest}))


class Capture(Protocol):
    """Capture of a function's device work."""

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run the function at least once, and return a function that repeats its device work.

        The returned function works on the tensors' current content.
        """


class CudaCapture:
    """Capture as `torch.cuda.CUDAGraph`, with one memory pool for all graphs.

    The graphs may share the pool although they are replayed in any order: inputs and results are kept outside the pool,
    so nothing that a replay leaves in the pool is read later.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """See `Capture`. Raises `RuntimeError` if an operation cannot be captured."""
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may use their own devices during the capture. In mode "thread_local", their CUDA
        # calls do not make the capture fail.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            run()
        return graph.replay


@dataclass(slots=True)
class DecodeGraph:
    """The captured pass of one batch size.

    Attributes:
        longs: positions, write slots and indices in `last_tokens`, int64 [3, size].
        kv_lens: KV length of each row, int32 [size].
        metadata: attention inputs of the pass: `kv_lens`, the shared block table, and bounds.
        replay: function that replays the pass; None before the capture.
    """

    longs: torch.Tensor
    kv_lens: torch.Tensor
    metadata: AttentionMetadata
    replay: Callable[[], None] | None = None


class DecodeGraphs:
    """The captured passes of all batch sizes."""

    def __init__(self, forward: Forward, caches: Caches, state: BatchState, vocab_size: int, largest: int) -> None:
        self._forward = forward
        self._caches = caches
        self._state = state
        device = state.last_tokens.device
        # These buffers have the largest batch size; smaller batches use the first rows.
        self._table = torch.zeros((largest, state.tables.shape[1]), dtype=torch.int32, device=device)
        self._rows = torch.arange(largest, device=device)
        self._tokens = torch.zeros(largest, dtype=torch.int64, device=device)
        self._logits: torch.Tensor | None = None
        self._shape = (largest, vocab_size)
        self._graphs = {size: self._graph(size) for size in ladder(largest)}
        self.num_replays = 0

    @classmethod
    def captured(
        cls, forward: Forward, caches: Caches, state: BatchState, vocab_size: int, largest: int, capture: Capture
    ) -> DecodeGraphs | None:
        """Capture the passes of all sizes up to `largest`; return None if a capture fails."""
        graphs = cls(forward, caches, state, vocab_size, largest)
        started = time.perf_counter()
        try:
            # The largest size is captured first, so that its memory in the pool suffices for the other sizes.
            for size in sorted(graphs._graphs, reverse=True):
                graph = graphs._graphs[size]
                graph.replay = capture(lambda graph=graph: graphs._run(graph))  # type: ignore[misc]
        except Exception as error:  # a library or a model may do something that cannot be captured
            _log.warning("decodes run without CUDA graphs: capturing failed (%s: %s)", type(error).__name__, error)
            return None
        seconds = time.perf_counter() - started
        _log.info(
            "decodes of up to %d rows captured as graphs of %d sizes in %.1f s", largest, len(graphs.sizes), seconds
        )
        return graphs

    @property
    def sizes(self) -> tuple[int, ...]:
        """Captured batch sizes."""
        return tuple(sorted(self._graphs))

    def metadata(self, size: int) -> AttentionMetadata:
        """Return the attention metadata that this size's graph was captured with."""
        return self._graphs[size].metadata

    def takes(self, batch: HostBatch) -> bool:
        """Return True if this batch has only decodes and fits a captured size."""
        return batch.num_decodes == len(batch.slots) <= self._shape[0]

    def run(self, batch: HostBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Replay a batch that `takes` accepts; return logits [n, vocab] and their likeliest tokens int64 [n].

        The batch's tokens must be in `last_tokens` already. Logits are valid until the next call.
        """
        num_rows = len(batch.slots)
        size = next(size for size in self.sizes if size >= num_rows)
        graph = self._graphs[size]
        longs = np.zeros((3, size), np.int64)
        longs[1], longs[2] = -1, self._state.last_tokens.shape[0] - 1
        longs[:, :num_rows] = batch.positions, batch.write_slots, batch.slots
        width = batch.table.shape[1]
        ints = np.zeros(size + num_rows * width, np.int32)
        ints[:num_rows] = batch.kv_lens
        ints[size:] = batch.table.reshape(-1)
        device = self._table.device
        graph.longs.copy_(to_device(longs, device))
        moved = to_device(ints, device)
        graph.kv_lens.copy_(moved[:size])
        self._table[:num_rows, :width].copy_(moved[size:].view(num_rows, width))
        assert graph.replay is not None
        assert self._logits is not None
        graph.replay()
        self.num_replays += 1
        return self._logits[:num_rows], self._tokens[:num_rows].clone()

    def _graph(self, size: int) -> DecodeGraph:
        state, device = self._state, self._table.device
        longs = torch.zeros((3, size), dtype=torch.int64, device=device)
        longs[1], longs[2] = -1, state.last_tokens.shape[0] - 1
        kv_lens = torch.zeros(size, dtype=torch.int32, device=device)
        longest = state.max_model_len
        metadata = AttentionMetadata(
            query_start=torch.arange(size + 1, dtype=torch.int32, device=device),
            kv_lens=kv_lens,
            block_table=self._table[:size],
            slot_mapping=longs[1],
            block_size=state.block_size,
            num_decodes=size,
            num_query_tokens=size,
            max_query_len=1,
            max_kv_len=longest,
            num_kv_tokens=size * longest,
        )
        return DecodeGraph(longs, kv_lens, metadata)

    def _run(self, graph: DecodeGraph) -> None:
        # How decode attention splits the KV depends on the lengths, so each replay must compute the split again.
        # Clearing the memo makes the capture include this computation.
        graph.metadata.memo.decode_plans.clear()
        positions, _, places = graph.longs
        size, last_tokens = graph.kv_lens.shape[0], self._state.last_tokens
        token_ids = last_tokens.index_select(0, places)
        logits = self._forward(token_ids, positions, self._rows[:size], graph.metadata, self._caches)
        # The first warm-up allocates the buffer, before any capture, so the buffer lies in no graph's memory pool.
        if self._logits is None:
            self._logits = torch.zeros(self._shape, dtype=logits.dtype, device=logits.device)
        self._logits[:size].copy_(logits)
        tokens = likeliest_tokens(logits)
        self._tokens[:size].copy_(tokens)
        last_tokens.index_copy_(0, places, tokens.clamp_min(0))
