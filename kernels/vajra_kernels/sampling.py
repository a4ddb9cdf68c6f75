"""Sampling of tokens from logits, in one launch and without waiting for the device.

Triton alone (``backend.uses_triton``): on a CPU torch's own sorting is faster.
"""

from __future__ import annotations

from enum import IntEnum

import torch


class Column(IntEnum):
    """Columns of a row's parameters, float64 [R, len(Column)].

    A temperature of 0 takes the largest logit; a history of -1 is none; the number, in [0, 1), is what the draw is made with.
    """

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    TOP_K = 3
    REPETITION = 4
    FREQUENCY = 5
    PRESENCE = 6
    HISTORY = 7
    NUMBER = 8


def sample_tokens(logits: torch.Tensor, parameters: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Int64 tokens [R] of logits [R, V]; -1 where a logit is not a number or the largest one is infinite.

    Args:
        logits: any float dtype, rows dense; not written.
        parameters: float64 [R, len(Column)].
        seen: int32 [H, V], for each history twice how often a token was put out, and 1 more where the prompt has it.
    """
    from vajra_kernels.draw import sample_launch

    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    sample_launch(tokens, logits, parameters, seen).run()
    return tokens
