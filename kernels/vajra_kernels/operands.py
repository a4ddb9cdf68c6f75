"""Types of operands that consist of several tensors or numbers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import torch

Norm: TypeAlias = tuple[torch.Tensor, float]
"""(weight, epsilon) of a root-mean-square norm; the weight may have a wider dtype than its operand."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary embedding of a step: cos and sin [positions, rotary dim / 2] (dense), and positions int64 [T]."""

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor


class Column(IntEnum):
    """Columns of a row's sampling parameters, float64 [R, len(Column)].

    TEMPERATURE 0 selects the largest logit. TOP_K is at least 1. HISTORY is the row of ``seen``
    (``sampling.sample_tokens``), or -1 for no penalties. NUMBER, in [0, 1), is the random number of the draw.
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
