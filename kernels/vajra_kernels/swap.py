"""Host memory for swapped-out KV blocks, and the copies between it and the device.

A host block holds a KV block of all layers, K and V, in consecutive words. On a GPU, the blocks of a swap to the host
are gathered into a device buffer by one launch per cache, and consecutive host blocks are transferred in one copy; a
swap to the device does the reverse. Only gather and scatter run on the compute stream; transfers run on a separate
stream, ordered by events.

Invariants:
    - Copies of one direction in one call have distinct destinations.
    - A copy to the host contains the KV of everything submitted before it, and is not affected by later work. Work
      submitted after a copy to the device sees the copied blocks.
    - ``to_host`` and ``to_device`` do not block the caller. The host memory may be read only after both streams have
      completed (``synchronize``).
    - ``beside`` returns a second ``SwapSpace`` for the same memory, with separate streams and buffers. Its copies are
      ordered with other work by ``follow`` and ``synchronize`` only. Its ``to_host`` and ``to_device`` block until a
      buffer is free, so that few copies are pending. Otherwise, the copy of a step's tokens could have to wait for many
      copies, since a device makes copies of one direction one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from enum import Enum
from typing import Any, Protocol

import torch

from vajra_kernels.cache import block_words
from vajra_kernels.ops import copy_words

NUM_BUFFERS = 2
BUFFER_BYTES = 32 * 2**20
"""Largest size of a device buffer in bytes, unless a single block is larger. Transferring this many bytes takes about
one millisecond.
"""

Pairs = Sequence[tuple[int, int]]
"""Pairs of (device block, host block)."""


class StreamKind(Enum):
    """Kind of stream. Work in one stream runs in order; work in different streams is ordered only by events."""

    COMPUTE = "compute"
    TRANSFER = "transfer"


class Streams(Protocol):
    """Compute and transfer stream of one device."""

    def run(self, kind: StreamKind, work: Callable[[], None]) -> None:
        """Submit work to a stream."""

    def mark(self, kind: StreamKind) -> Any:
        """Record an event at the current end of a stream."""

    def wait(self, kind: StreamKind, event: Any) -> None:
        """Make later work of a stream wait for an event."""

    def reach(self, event: Any) -> None:
        """Block until an event has happened."""

    def synchronize(self) -> None:
        """Block until all work in both streams is complete."""

    def beside(self) -> Streams:
        """Return new streams of the same device."""


class CudaStreams:
    """A separate stream for transfers; computing uses ``compute`` or, if None, the stream current at each call."""

    def __init__(self, device: torch.device, compute: torch.cuda.Stream | None = None) -> None:
        self._device = device
        self._compute = compute
        self._transfers = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, kind: StreamKind, work: Callable[[], None]) -> None:
        """See ``Streams``."""
        with torch.cuda.stream(self._stream(kind)):
            work()

    def mark(self, kind: StreamKind) -> torch.cuda.Event:
        """See ``Streams``."""
        return self._stream(kind).record_event()  # type: ignore[no-any-return]

    def wait(self, kind: StreamKind, event: torch.cuda.Event) -> None:
        """See ``Streams``."""
        self._stream(kind).wait_event(event)

    def reach(self, event: torch.cuda.Event) -> None:
        """See ``Streams``."""
        event.synchronize()

    def synchronize(self) -> None:
        """See ``Streams``."""
        for kind in StreamKind:
            self._stream(kind).synchronize()

    def beside(self) -> CudaStreams:
        """See ``Streams``."""
        return CudaStreams(self._device, torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]

    def _stream(self, kind: StreamKind) -> torch.cuda.Stream:
        if kind is StreamKind.TRANSFER:
            return self._transfers
        return self._compute or torch.cuda.current_stream(self._device)


class SwapSpace:
    """Host blocks for swapped-out KV blocks of some caches."""

    def __init__(
        self,
        caches: Sequence[torch.Tensor],
        num_blocks: int,
        shared_file: str | None = None,
        streams: Streams | None = None,
    ) -> None:
        """Allocate host blocks and device buffers.

        Args:
            caches: caches of all layers, each [num_layers, num_blocks, block_size, Hkv, D]; their blocks move together.
            num_blocks: number of host blocks.
            shared_file: file that backs the host memory, shared by all processes that name it; None for pinned memory.
            streams: substitute for the device's streams, for tests of the order of copies.
        """
        device = caches[0].device
        self._caches = [block_words(cache) for cache in caches]
        widths = [words.shape[0] * words.shape[2] for words in self._caches]
        self._host = _host_words((num_blocks, sum(widths)), device, shared_file)
        self._widths = widths
        self._streams = CudaStreams(device) if streams is None and device.type == "cuda" else streams
        self._buffers = self._new_buffers()
        self._waits = False

    def beside(self) -> SwapSpace:
        """Return a second object for the same host blocks and caches, with its own streams and buffers.

        Its copies run concurrently with those of this object. One thread at a time may use it.
        """
        other = copy(self)
        if self._streams is not None:
            other._streams = self._streams.beside()
            other._buffers = other._new_buffers()
            other._waits = True
        return other

    def follow(self, event: Any) -> None:
        """Make later copies wait for an event of another stream."""
        if self._streams is not None:
            for kind in StreamKind:
                self._streams.wait(kind, event)

    def synchronize(self) -> None:
        """Block until all copies are complete."""
        if self._streams is not None:
            self._streams.synchronize()

    def _new_buffers(self) -> list[_Buffer]:
        if self._streams is None:
            return []
        num_blocks, width = self._host.shape
        shape = (max(1, min(num_blocks, BUFFER_BYTES // (4 * width))), width)
        device, event = self._caches[0].device, self._streams.mark(StreamKind.COMPUTE)
        return [_Buffer(torch.empty(shape, dtype=torch.int32, device=device), event) for _ in range(NUM_BUFFERS)]

    def to_host(self, pairs: Pairs) -> None:
        """Copy device blocks to host blocks."""
        if self._streams is None:
            self._gather(self._host, pairs)
            return
        for buffer, piece, rows in self._pieces(pairs):
            self._streams.wait(StreamKind.COMPUTE, buffer.free)
            self._streams.run(StreamKind.COMPUTE, lambda buffer=buffer, rows=rows: self._gather(buffer.words, rows))  # type: ignore[misc]
            self._streams.wait(StreamKind.TRANSFER, self._streams.mark(StreamKind.COMPUTE))
            self._streams.run(
                StreamKind.TRANSFER,
                lambda buffer=buffer, piece=piece: self._cross(piece, buffer.words, True),  # type: ignore[misc]
            )
            buffer.free = self._streams.mark(StreamKind.TRANSFER)

    def to_device(self, pairs: Pairs) -> None:
        """Copy host blocks to device blocks."""
        if self._streams is None:
            self._scatter(self._host, pairs)
            return
        for buffer, piece, rows in self._pieces(pairs):
            self._streams.wait(StreamKind.TRANSFER, buffer.free)
            self._streams.run(
                StreamKind.TRANSFER,
                lambda buffer=buffer, piece=piece: self._cross(piece, buffer.words, False),  # type: ignore[misc]
            )
            self._streams.wait(StreamKind.COMPUTE, self._streams.mark(StreamKind.TRANSFER))
            self._streams.run(StreamKind.COMPUTE, lambda buffer=buffer, rows=rows: self._scatter(buffer.words, rows))  # type: ignore[misc]
            buffer.free = self._streams.mark(StreamKind.COMPUTE)

    def _pieces(self, pairs: Pairs) -> Iterator[tuple[_Buffer, Pairs, Pairs]]:
        """Yield (buffer, (device block, host block) pairs copied through it, (device block, row of the buffer) pairs)."""
        held = self._buffers[0].words.shape[0]
        ordered = sorted(pairs, key=lambda pair: pair[1])
        for begin in range(0, len(ordered), held):
            piece = ordered[begin : begin + held]
            self._buffers.append(self._buffers.pop(0))
            if self._waits and self._streams is not None:
                self._streams.reach(self._buffers[-1].free)
            yield self._buffers[-1], piece, [(block, row) for row, (block, _) in enumerate(piece)]

    def _cross(self, piece: Pairs, rows: torch.Tensor, to_host: bool) -> None:
        """Copy between host blocks and a buffer's first rows.

        ``piece`` is sorted by host block, and each run of consecutive blocks is one copy.
        """
        begin = 0
        for end in range(1, len(piece) + 1):
            if end < len(piece) and piece[end][1] == piece[end - 1][1] + 1:
                continue
            host = self._host[piece[begin][1] : piece[begin][1] + end - begin]
            source, target = (rows[begin:end], host) if to_host else (host, rows[begin:end])
            target.copy_(source, non_blocking=True)
            begin = end

    def _gather(self, rows: torch.Tensor, pairs: Pairs) -> None:
        moved = _on(rows.device, pairs)
        for words, part in zip(self._caches, self._parts(rows), strict=True):
            copy_words(words, part, moved)

    def _scatter(self, rows: torch.Tensor, pairs: Pairs) -> None:
        moved = _on(rows.device, pairs).flip(1)
        for words, part in zip(self._caches, self._parts(rows), strict=True):
            copy_words(part, words, moved)

    def _parts(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return the part of ``rows`` that belongs to each cache, as words [num_layers, num_rows, words per block]."""
        parts = torch.split(rows, self._widths, 1)
        return [
            part.view(-1, words.shape[0], words.shape[2]).transpose(0, 1)
            for part, words in zip(parts, self._caches, strict=True)
        ]


class _Buffer:
    """Rows on the device, and the event after which they may be overwritten."""

    __slots__ = ("free", "words")

    def __init__(self, words: torch.Tensor, free: Any) -> None:
        self.words = words
        self.free = free


def _on(device: torch.device, pairs: Pairs) -> torch.Tensor:
    made = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


def _host_words(shape: tuple[int, int], device: torch.device, shared_file: str | None) -> torch.Tensor:
    if shared_file is None:
        return torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
    return torch.from_file(shared_file, shared=True, size=shape[0] * shape[1], dtype=torch.int32).view(shape)
