"""Tile shapes, warps and pipeline stages of a launch, chosen by its shapes and device.

Plain functions of shapes: nothing is timed at run time, so the first call of a shape costs one compilation and equal
calls always run the same code. The figures behind the choices are in docs/evidence/kernels.md.

Invariants:
    - The K/V tiles of a configuration fit the device's shared memory (``DeviceFacts.shared_limit_bytes``) with two
      buffers for 16-bit types.
    - The block table is read inside the KV loop, so Triton's pipeliner needs 5 stages for two K/V buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_SPLIT_TOKENS = 128
"""A decode split shorter than this costs more in start-up and merging than its parallelism gains."""
SPLITS_PER_SM = 8
"""Aimed-at number of decode programs per multiprocessor: enough that the last, partial wave is a small part."""
MAX_PIECES = 2048
"""Most pieces of a batch in addition to one for each sequence; enough for chips of up to 256 multiprocessors."""
MIN_CHUNK_SPLIT_TOKENS = 512
"""A part of a chunk's KV shorter than this costs more in start-up and merging than its parallelism gains."""
MAX_CHUNK_SPLITS = 32


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Facts of a GPU that kernel configurations depend on.

    Attributes:
        capability: (major, minor) compute capability; major >= 9 has ``wgmma`` or better.
        num_sms: number of multiprocessors.
        shared_limit_bytes: the most shared memory one program may use.
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
    """A tile of ``tile_m`` rows by ``tile_n`` KV positions, computed by ``num_warps`` warps in ``num_stages`` stages."""

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int


def decode_config(group: int, head_pad: int, element_bytes: int, device: DeviceFacts) -> TileConfig:
    """The tile of a decode: ``group`` query heads per KV head are its rows, at least 16 (a product's minimum)."""
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
    """The tile of a ragged launch whose longest chunk has ``max_query_len`` tokens.

    128 rows by 8 warps suit ``wgmma``; with 64 positions the accumulators leave room for two loads in flight.
    On Ampere the same rows take 32 positions: with 64 the registers spill.
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
    """Return whether the device has Hopper's shared memory (and warp-group products)."""
    return device.capability[0] >= 9 and device.shared_limit_bytes >= 200 * 1024


def _rows64_config(head_pad: int, device: DeviceFacts) -> TileConfig:
    """Tile of 64 rows: short chunks, wide groups, and head dimension 256 where 128 rows would spill."""
    if head_pad <= 128:
        return TileConfig(64, 64 if _is_large(device) or head_pad <= 64 else 32, 4, 5)
    return TileConfig(64, 32 if device.shared_limit_bytes > 110 * 1024 else 16, 8, 5)


def _widest_config(rows: int, device: DeviceFacts) -> TileConfig:
    """Tile for head dimension 512: two buffers of K and V leave shared memory for few query rows."""
    if rows > 16 and device.shared_limit_bytes > 150 * 1024:
        return TileConfig(64, 16, 8, 5)
    return TileConfig(16, 16, 4, 5)


def _float32_config(rows: int, head_pad: int) -> TileConfig:
    """Tile for float32, which is multiplied exactly on the scalar units: small, so that it fits the registers."""
    if rows <= 16 and head_pad <= 128:
        return TileConfig(16, 32, 4, 3)
    if head_pad > 256:
        return TileConfig(16, 16, 8, 2)
    return TileConfig(32, 16, 8, 3)


def merge_config(num_parts: int) -> TileConfig:
    """Parts read at a time (``tile_n``) and (token, head) pairs per program (``tile_m``) of a merge."""
    parts = min(16, 1 << (max(num_parts, 1) - 1).bit_length())
    return TileConfig(max(1, 16 // parts), parts, 4, 1)


def chunk_splits(num_programs: int, longest: int, tile_n: int, device: DeviceFacts) -> tuple[int, int]:
    """(KV positions per split, number of splits) of chunks that start ``num_programs`` programs without splits.

    A few tokens behind a long context are a few programs; splits make them two for each multiprocessor.
    """
    wanted = 2 * device.num_sms // max(num_programs, 1) if num_programs < device.num_sms else 1
    num_splits = max(1, min(wanted, longest // MIN_CHUNK_SPLIT_TOKENS, MAX_CHUNK_SPLITS))
    split_tokens = -(-longest // (num_splits * tile_n)) * tile_n
    return split_tokens, max(1, -(-longest // max(split_tokens, 1)))
