"""Step times from the operator tables of the Vidur simulator (MLSys 2024, arXiv:2405.05465), which its recorded runs are compared on.

`per_token_ops_ms.csv.gz` has one row for every number of tokens and one column for every operator, `attention_ms.npz` has decode
attention by number of requests and mean context, and prefill attention by chunk and context. Times are milliseconds of one layer; nothing
outside the layers is counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt

import numpy as np
import numpy.typing as npt

from vajra_py.errors import ExecutorError
from vajra_py.latency.models.tabular import Columns
from vajra_py.runtime.step.plan import StepPlan
from vajra_py.runtime.support.clock import to_ticks

OPERATORS = (
    "attn_pre_proj",
    "attn_post_proj",
    "mlp_up_proj",
    "mlp_down_proj",
    "mlp_act",
    "attn_rope",
    "input_layernorm",
    "post_attention_layernorm",
    "add",
)
"""Operators that are looked up at the number of tokens rounded up."""
CACHE_WRITE = "attn_kv_cache_save"
"""Looked up at the exact number of tokens."""
OPERATORS_FILE = "per_token_ops_ms.csv.gz"
ATTENTION_FILE = "attention_ms.npz"
CONTEXT_GRAIN_TOKENS = 64
"""Step of the context axis of the attention tables; each prefill's context is rounded up to it before contexts are added."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class VidurTables:
    """Operator times of one layer, and how Vidur adds them up; the defaults are its own for a model of 32 layers."""

    operators_ms: Floats
    """Sum of `OPERATORS` at 1, 2, 3 … tokens."""
    cache_write_ms: Floats
    attention_ms: Columns
    num_layers: int = 32
    token_grain: int = 8
    attention_overhead: float = 1.1
    """Factor on the attention of several requests over that of one with the same totals."""

    def step_s(self, num_decodes: int, decode_context_tokens: int, chunks: Iterable[tuple[int, int]]) -> float:
        """Return the seconds of a step of these decodes and (tokens, context) of prefill chunks.

        A decode's context counts the token that it computes. Raises `ExecutorError` beyond the tables.
        """
        chunks = list(chunks)
        num_tokens = num_decodes + sum(tokens for tokens, _ in chunks)
        grain = self.token_grain
        rounded = -(-num_tokens // grain) * grain
        layer = self._at(self.operators_ms, rounded - 1) + self._at(self.cache_write_ms, num_tokens - 1)
        if num_decodes:
            mean = (decode_context_tokens + num_decodes) // num_decodes
            column = -(-mean // CONTEXT_GRAIN_TOKENS)
            layer += self._at(self.attention_ms["decode"], num_decodes - 1, column) * self._overhead(num_decodes)
        if chunks:
            row = round(sqrt(sum(tokens * tokens for tokens, _ in chunks)))
            column = sum(-(-context // CONTEXT_GRAIN_TOKENS) for _, context in chunks)
            layer += self._at(self.attention_ms["prefill"], row - 1, column) * self._overhead(len(chunks))
        return 1e-3 * self.num_layers * layer

    def stage_ticks(self, plan: StepPlan) -> int:
        """See `StepTimer`."""
        features = plan.features
        chunks = [(chunk.num_tokens, chunk.num_computed_before) for chunk in plan.chunks]
        assert len(chunks) == features.num_prefills  # decodes are the pool's
        return to_ticks(self.step_s(features.num_decodes, features.decode_context_tokens, chunks))

    def _overhead(self, num_requests: int) -> float:
        return self.attention_overhead if num_requests > 1 else 1.0

    @staticmethod
    def _at(table: Floats, *index: int) -> float:
        if any(place >= size for place, size in zip(index, table.shape, strict=True)):
            raise ExecutorError(f"vidur: {index} lies outside of the tables ({table.shape}).")
        return float(table[index])
