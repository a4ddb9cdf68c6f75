"""Attention of a ragged batch over paged KV memory, by Triton kernels on CUDA and by torch on the CPU.

Imports only torch, numpy and, when a CUDA tensor is first used, triton, so that it can be tested without other
packages.
"""

from __future__ import annotations

from vajra_kernels.attention import paged_attention
from vajra_kernels.backend import uses_triton
from vajra_kernels.cache import allocate_kv_cache, kv_block_bytes
from vajra_kernels.metadata import AttentionMetadata, build_metadata, token_slots
from vajra_kernels.ops import copy_blocks, merge_partials, write_kv
from vajra_kernels.swap import SwapSpace

__all__ = [
    "AttentionMetadata",
    "SwapSpace",
    "allocate_kv_cache",
    "build_metadata",
    "copy_blocks",
    "kv_block_bytes",
    "merge_partials",
    "paged_attention",
    "token_slots",
    "uses_triton",
    "write_kv",
]
