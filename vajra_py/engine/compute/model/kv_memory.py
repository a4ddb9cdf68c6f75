"""KV tensors on the device, and host memory for swapped-out blocks.

Invariants:
    - All layers use the same block ids, and a copy of a block copies the blocks with this id of all layers.
    - A copy takes effect before all work that is submitted after it, except for copies by `copy_beside`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vajra_kernels import SwapSpace, allocate_kv_cache, copy_blocks
from vajra_kernels.cache import WORD_BYTES, block_words
from vajra_py.engine.compute.model.attention import LayerFacts
from vajra_py.errors import ExecutorError
from vajra_py.runtime.kv import BlockCopy, CopyDirection


class KvMemory:
    """KV tensors of all layers, and their host counterparts."""

    __slots__ = ("_beside", "_device", "_swap", "caches", "num_blocks", "num_host_blocks", "num_spare_blocks")

    def __init__(
        self,
        layers: Sequence[LayerFacts],
        sizes: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        shared_file: str | None = None,
        num_spare_blocks: int = 0,
    ) -> None:
        """Allocate memory; `sizes` is (num_blocks, num_host_blocks, block_size).

        `shared_file`: file that backs host memory shared with other processes.
        `num_spare_blocks`: additional blocks at the end that no request holds.
        """
        self.num_spare_blocks = num_spare_blocks
        self.num_blocks, self.num_host_blocks, block_size = sizes
        self._device: list[torch.Tensor] = []
        self.caches: list[tuple[torch.Tensor, torch.Tensor]] = [()] * len(layers)  # type: ignore[list-item]
        """Each layer's (K, V), [num_blocks + num_spare_blocks, block_size, Hkv, D]."""
        for shape, members in _by_shape(layers).items():
            num_kv_heads, key_dim, value_dim = shape
            keys, values = self._stacked(len(members), (block_size, num_kv_heads, key_dim), dtype, device)
            if value_dim != key_dim:
                _, values = self._stacked(len(members), (block_size, num_kv_heads, value_dim), dtype, device)
            for place, index in enumerate(members):
                self.caches[index] = (keys[place], values[place])
            self._device += [keys, values]
        self._swap = SwapSpace(self._device, self.num_host_blocks, shared_file) if self.num_host_blocks else None
        self._beside: dict[CopyDirection, SwapSpace] = {}

    def _stacked(
        self, num_layers: int, block_shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return allocate_kv_cache(num_layers, self.num_blocks + self.num_spare_blocks, block_shape, dtype, device)

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy spare blocks into blocks of requests on the device; `pairs`: (spare block, block of the request)."""
        if not pairs:
            return
        for source, target in pairs:
            if not 0 <= target < self.num_blocks <= source < self.num_blocks + self.num_spare_blocks:
                raise ExecutorError(f"step: a row started in advance has no block of its own ({source} -> {target}).")
        moved = torch.tensor(pairs, dtype=torch.int64)
        for cache in self._device:
            copy_blocks(cache, cache, moved)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V."""
        stacks = map(block_words, self._device)
        return sum(words.shape[0] * words.shape[2] for words in stacks) * WORD_BYTES

    def export_blocks(self, block_ids: Sequence[int], buffer: npt.NDArray[np.uint8]) -> None:
        """Copy blocks into a buffer of `block_bytes` per block.

        Layers with equal shapes of K and V are stored together: first K of these layers, then V.
        """
        for words, part, ids in self._parts(block_ids, buffer):
            if words.device.type == "cpu":
                torch.index_select(words, 1, ids, out=part)
            else:
                part.copy_(torch.index_select(words, 1, ids))

    def import_blocks(self, block_ids: Sequence[int], buffer: npt.NDArray[np.uint8]) -> None:
        """Copy a buffer, filled by `export_blocks`, into these blocks."""
        for words, part, ids in self._parts(block_ids, buffer):
            words.index_copy_(1, ids, part.to(words.device))

    def _parts(
        self, block_ids: Sequence[int], buffer: npt.NDArray[np.uint8]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield one tuple for K and one for V of each set of layers with equal KV shapes.

        The tuple is (32-bit words [layers, all blocks, words] on the device, the corresponding part of the buffer
        [layers, len(block_ids), words], `block_ids` as a tensor).
        """
        if buffer.size != len(block_ids) * self.block_bytes:
            message = f"KV copy: got {buffer.size} bytes for {len(block_ids)} blocks of {self.block_bytes} bytes"
            raise ExecutorError(f"{message}. Both ends have the same model, dtype and block size.")
        if not all(0 <= block < self.num_blocks for block in block_ids):
            wrong = next(block for block in block_ids if not 0 <= block < self.num_blocks)
            raise ExecutorError(f"KV copy: there is no such block ({wrong}). The device has {self.num_blocks}.")
        flat = torch.from_numpy(buffer.view(np.int32))
        start = 0
        for words in map(block_words, self._device):
            num_layers, _, num_words = words.shape
            end = start + num_layers * len(block_ids) * num_words
            part = flat[start:end].view(num_layers, len(block_ids), num_words)
            yield words, part, torch.tensor(block_ids, dtype=torch.int64, device=words.device)
            start = end

    def warm_up(self) -> None:
        """Copy block 0 each way before any block is used, so that the kernels of copies are compiled."""
        if self._swap is not None:
            self._swap.to_host([(0, 0)])
            self._swap.to_device([(0, 0)])
        if self.num_spare_blocks:
            self.move([(self.num_blocks, 0)])

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks between device and host, in order."""
        for direction, group in groupby(copies, key=lambda one: one.direction):
            assert self._swap is not None
            self._cross(self._swap, direction, [(one.source, one.target) for one in group])

    def copy_beside(self, copies: Sequence[BlockCopy], after: Any) -> None:
        """Copy blocks between device and host, in order, concurrently with work submitted after the event `after`.

        Returns when the copies are complete.

        Only one thread at a time may copy in each direction.
        """
        for direction, group in groupby(copies, key=lambda one: one.direction):
            assert self._swap is not None
            swap = self._beside.get(direction) or self._beside.setdefault(direction, self._swap.beside())
            swap.follow(after)
            self._cross(swap, direction, [(one.source, one.target) for one in group])
            swap.synchronize()

    def _cross(self, swap: SwapSpace, direction: CopyDirection, pairs: list[tuple[int, int]]) -> None:
        to_host = direction is CopyDirection.TO_HOST
        self._check(pairs, to_host)
        if to_host:
            swap.to_host(pairs)
        else:
            swap.to_device([(target, source) for source, target in pairs])

    def _check(self, pairs: list[tuple[int, int]], to_host: bool) -> None:
        limits = (self.num_blocks, self.num_host_blocks) if to_host else (self.num_host_blocks, self.num_blocks)
        for pair in pairs:
            if not all(0 <= block < limit for block, limit in zip(pair, limits, strict=True)):
                way = "device to host" if to_host else "host to device"
                raise ExecutorError(
                    f"swap: there is no such block (copy {pair[0]} -> {pair[1]}, {way}). "
                    f"The device has {self.num_blocks} and the host {self.num_host_blocks}."
                )


def _by_shape(layers: Sequence[LayerFacts]) -> dict[tuple[int, int, int], list[int]]:
    groups: dict[tuple[int, int, int], list[int]] = {}
    for facts in layers:
        groups.setdefault((facts.num_kv_heads, facts.key_dim, facts.value_dim), []).append(facts.layer_index)
    return groups
