"""Repetition, frequency and presence penalties.

Invariants:
    - The prompt counts for the repetition penalty alone; the output for all three.
    - Counts live on the device and grow without waiting for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vajra_py.engine.compute.interface import SamplingParams
from vajra_py.engine.compute.transfer import to_device


class History:
    """How often a request put out each token, and which ones its prompt has."""

    __slots__ = ("in_prompt", "output_counts")

    def __init__(
        self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int], vocab_size: int, device: torch.device
    ) -> None:
        self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.output_counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        if prompt_token_ids:
            self.in_prompt.index_fill_(0, to_device(np.array(prompt_token_ids, np.int64), device), True)
        if output_token_ids:
            outputs = to_device(np.array(output_token_ids, np.int64), device)
            self.output_counts.index_add_(0, outputs, torch.ones(len(output_token_ids), device=device))

    def add(self, token: torch.Tensor) -> None:
        """One more output token, a scalar on the device."""
        self.output_counts.index_add_(0, token.view(1), self.output_counts.new_ones(1))


def apply_penalties(logits: torch.Tensor, rows: Sequence[tuple[int, SamplingParams, History]]) -> torch.Tensor:
    """Changes logits [R, vocab] in place for each (row, its parameters, its history); returns them.

    Repetition penalty as in CTRL (Keskar et al. 2019): positive logits are divided by it, others multiplied.
    """
    places = to_device(np.array([place for place, _, _ in rows], np.int64), logits.device)
    factors = [(one.repetition_penalty, one.frequency_penalty, one.presence_penalty) for _, one, _ in rows]
    is_extreme = any(not 1e-30 < one.repetition_penalty < 1e30 for _, one, _ in rows)
    repetition, frequency, presence = to_device(np.array(factors, np.float32), logits.device).unsqueeze(-1).unbind(1)
    counts = torch.stack([history.output_counts for _, _, history in rows])
    put_out = counts > 0
    seen = put_out | torch.stack([history.in_prompt for _, _, history in rows])
    part = logits[places]
    part = torch.where(seen, torch.where(part > 0, part / repetition, part * repetition), part)
    if is_extreme:  # it may overflow, and infinite logits have no differences
        part.nan_to_num_(nan=float("nan"))
    part -= frequency * counts + presence * put_out
    logits[places] = part
    return logits
