"""Tile shapes, warps and pipeline stages of a launch, chosen by its shapes and device.

Choices are plain functions of shapes and nothing is timed at run time, so the first call with a shape costs one
compilation and equal calls always run the same code. docs/evidence/kernels.md has the measurements behind the choices.

Invariants:
    - The K/V tiles of a configuration fit the device's shared memory (``DeviceFacts.shared_limit_bytes``). Tiles of
      16-bit types fit twice, as two buffers.
    - Triton's pipeliner needs 5 stages for two K/V buffers, since the KV loop also reads the block table.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_SPLIT_TOKENS = 128
"""Shortest decode split in tokens; shorter ones cost more in start-up and merging than their parallelism gains."""
SPLITS_PER_SM = 8
"""Target number of decode programs per multiprocessor, large enough that the last, partial wave takes little time."""
MAX_PIECES = 2048
"""Largest value of (number of pieces - number of sequences) of a batch, on GPUs of up to 256 multiprocessors."""
MIN_CHUNK_SPLIT_TOKENS = 512
"""Shortest part of a chunk's KV in tokens; shorter ones cost more in start-up and merging than their parallelism
gains."""
MAX_CHUNK_SPLITS = 32


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Facts of a GPU that kernel configurations depend on.

    Attributes:
        capability: (major, minor) compute capability, (9, 0) for Hopper.
        num_sms: number of multiprocessors.
        shared_limit_bytes: largest shared memory of one program, in bytes.
    """

    capability: tuple[int, int]
    num_sms: int
    shared_limit_bytes: int


A100 = DeviceFacts((8, 0), 108, 163 * 1024)
A10 = DeviceFacts((8, 6), 72, 99 * 1024)
L4 = DeviceFacts((8, 9), 58, 99 * 1024)
H200 = DeviceFacts((9, 0), 132, 227 * 1024)


@dataclass(frozen=True, slots=True)
class TileConfig:
    """A tile of ``tile_m`` rows by ``tile_n`` KV positions.

    It is computed by ``num_warps`` warps with ``num_stages`` pipeline stages.
    """

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int


def decode_config(group: int, head_pad: int, element_bytes: int, device: DeviceFacts) -> TileConfig:
    """Return the tile of a decode.

    The tile's rows are query heads that share one KV head: 16 (the minimum of a tensor-core instruction) to 64. A
    ``group`` of more query heads is divided among several tiles.
    """
    if element_bytes == 4:
        return _float32_config(group, head_pad)
    if head_pad > 256:
        return _widest_config(group, device)
    if group <= 16:
        return TileConfig(16, 64 if head_pad <= 128 else 32, 4, 5)
    if group <= 32:
        return TileConfig(32, 64, 4, 5) if head_pad <= 128 else TileConfig(32, 32, 8, 5)
    return _rows64_config(head_pad, device)


def ragged_config(group: int, max_query_len: int, head_pad: int, element_bytes: int, device: DeviceFacts) -> TileConfig:
    """Return the tile of a ragged launch whose longest chunk has ``max_query_len`` tokens.

    The largest tile has 128 rows and 8 warps, which suit ``wgmma``. It has 64 KV positions (32 for head dimensions
    above 128), so that the accumulators leave room for two loads in flight. For head dimensions above 64, GPUs that are
    not ``_is_large`` use smaller tiles, since the largest tile would spill registers there.
    """
    rows = group * max_query_len
    if element_bytes == 4:
        return _float32_config(rows, head_pad)
    if head_pad > 256:
        return _widest_config(rows, device)
    if rows <= 16:
        return decode_config(1, head_pad, element_bytes, device)
    if rows <= 64:
        return _rows64_config(head_pad, device)
    if head_pad <= 64:
        return TileConfig(128, 64, 8, 5)
    if head_pad <= 128:
        return TileConfig(128, 64 if _is_large(device) else 32, 8, 5)
    return TileConfig(128, 32, 8, 5) if _is_large(device) else _rows64_config(head_pad, device)


def _is_large(device: DeviceFacts) -> bool:
    """Return True if the GPU is of Hopper's generation or later, with at least 200 KiB of shared memory per program."""
    return device.capability[0] >= 9 and device.shared_limit_bytes >= 200 * 1024


def _rows64_config(head_pad: int, device: DeviceFacts) -> TileConfig:
    """Return the tile with 64 rows, for short chunks and for groups of many query heads.

    On GPUs that are not ``_is_large``, it also serves long chunks with head dimensions above 128, where 128 rows would
    spill registers.
    """
    if head_pad <= 128:
        return TileConfig(64, 64 if _is_large(device) or head_pad <= 64 else 32, 4, 5)
    return TileConfig(64, 32 if device.shared_limit_bytes > 110 * 1024 else 16, 8, 5)


def _widest_config(rows: int, device: DeviceFacts) -> TileConfig:
    """Return the tile for head dimension 512, for which two buffers of K and V leave shared memory for only a few query
    rows.
    """
    if rows > 16 and device.shared_limit_bytes > 150 * 1024:
        return TileConfig(64, 16, 8, 5)
    return TileConfig(16, 16, 4, 5)


def _float32_config(rows: int, head_pad: int) -> TileConfig:
    """Return the tile for float32.

    Without tf32, products run on the scalar units and take their operands from registers, so the tile is small.
    """
    if rows <= 16 and head_pad <= 128:
        return TileConfig(16, 32, 4, 3)
    if head_pad > 256:
        return TileConfig(16, 16, 8, 2)
    return TileConfig(32, 16, 8, 3)


def merge_config(num_parts: int) -> TileConfig:
    """Return the tile of a merge: a program reads ``tile_n`` parts at a time, for ``tile_m`` (token, head) pairs."""
    parts = min(16, 1 << (max(num_parts, 1) - 1).bit_length())
    return TileConfig(max(1, 16 // parts), parts, 4, 1)


def chunk_splits(num_programs: int, longest: int, tile_n: int, device: DeviceFacts) -> tuple[int, int]:
    """Return (KV positions per split, number of splits) for chunks that take ``num_programs`` programs without splits.

    Chunks of few tokens take few programs, however long their context is (at most ``longest`` KV positions). Splits of
    the KV increase the number of programs to up to two per multiprocessor.
    """
    wanted = 2 * device.num_sms // max(num_programs, 1) if num_programs < device.num_sms else 1
    num_splits = max(1, min(wanted, longest // MIN_CHUNK_SPLIT_TOKENS, MAX_CHUNK_SPLITS))
    split_tokens = -(-longest // (num_splits * tile_n)) * tile_n
    return split_tokens, max(1, -(-longest // max(split_tokens, 1)))
