"""Arguments of one attention call that all Triton attention kernels share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vajra_kernels.cache import cache_strides
from vajra_kernels.launch import dot_mode, next_power_of_2
from vajra_kernels.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Operands of one paged-attention call, already checked (see ``attention.paged_attention`` for shapes).

    Its launches write ``out`` [T, Hq, V_DIM] and ``lse`` (float32 [T, Hq]; None: not computed).
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    metadata: AttentionMetadata
    scale: float
    window: int | None
    softcap: float | None
    out: torch.Tensor
    lse: torch.Tensor | None

    @property
    def head_pad(self) -> int:
        """Larger of the head dimensions of K and V, rounded up to a power of two and to at least 16."""
        return max(16, next_power_of_2(max(self.q.shape[2], self.v_cache.shape[3])))

    def arguments(self) -> dict[str, Any]:
        """Return the run-time arguments common to the decode and the ragged kernel."""
        k, v = self.k_cache, self.v_cache
        return {
            "q_ptr": self.q,
            "k_ptr": k,
            "v_ptr": v,
            "table_ptr": self.metadata.block_table,
            "kv_lens_ptr": self.metadata.kv_lens,
            "scale": self.scale,
            "softcap": self.softcap or 0.0,
            "window": self.window or 0,
            "stride_q_row": self.q.stride(0),
            "stride_q_head": self.q.stride(1),
            "stride_table": self.metadata.block_table.stride(0),
        } | cache_strides(k, v)

    def constants(self) -> dict[str, Any]:
        """Return the compile-time arguments common to the decode and the ragged kernel."""
        k_dim, v_dim = self.q.shape[2], self.v_cache.shape[3]
        upcast, precision = dot_mode(self.q.dtype)
        return {
            "K_DIM": k_dim,
            "V_DIM": v_dim,
            "K_PAD": max(16, next_power_of_2(k_dim)),
            "V_PAD": max(16, next_power_of_2(v_dim)),
            "KV_BLOCK": self.k_cache.shape[1],
            "HAS_WINDOW": self.window is not None,
            "HAS_SOFTCAP": self.softcap is not None,
            "UPCAST": upcast,
            "PRECISION": precision,
        }
