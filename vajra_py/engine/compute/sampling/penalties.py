"""Repetition, frequency and presence penalties.

Invariants:
    - Prompt tokens count for the repetition penalty only, output tokens for all three.
    - Counts of all requests are in one tensor on the device, which grows without waiting for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vajra_kernels.operands import Column
from vajra_py.engine.compute.batch import Ints
from vajra_py.engine.compute.transfer import to_device

_LARGEST = torch.finfo(torch.float32).max


class Histories:
    """Token counts of prompts and outputs of requests with penalties.

    Attributes:
        seen: int32 [H, vocab], one row per history, in which a token's entry is twice its count in the output, plus 1
            if it is in the prompt. There is always at least one row, so that kernels get a valid pointer.
    """

    __slots__ = ("_free", "seen")

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.seen = torch.zeros((1, vocab_size), dtype=torch.int32, device=device)
        self._free = [0]

    def add(self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> int:
        """Add a history and return its row. Raises `IndexError` for a token outside the vocabulary."""
        num_rows, vocab_size = self.seen.shape
        prompt, outputs = (np.array(ids, np.int64) for ids in (prompt_token_ids, output_token_ids))
        for ids in (prompt, outputs):
            if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
                raise IndexError(f"a token of its prompt or output is not among the model's {vocab_size}")
        if not self._free:
            self.seen = torch.cat((self.seen, torch.zeros_like(self.seen)))
            self._free.extend(range(num_rows, 2 * num_rows))
        seen = self.seen[self._free[-1]].zero_()
        if prompt.size:
            seen.index_fill_(0, to_device(prompt, seen.device), 1)
        if outputs.size:
            seen.index_add_(0, to_device(outputs, seen.device), seen.new_full((outputs.size,), 2))
        return self._free.pop()

    def remove(self, history: int) -> None:
        """Remove the history in this row."""
        self._free.append(history)

    def count(self, histories: Ints, tokens: torch.Tensor) -> None:
        """For each k, append `tokens[k]` (int64 [R]) to the history in row `histories[k]`, unless one of them is -1."""
        kept = np.flatnonzero(histories >= 0)
        if not kept.size:
            return
        places, rows = to_device(kept, tokens.device), to_device(histories[kept], tokens.device)
        chosen = tokens[places]
        flat = rows * self.seen.shape[1] + chosen.clamp_min(0)
        self.seen.view(-1).index_add_(0, flat, (chosen >= 0).to(torch.int32) * 2)


def apply_penalties(logits: torch.Tensor, parameters: np.ndarray, histories: Histories) -> torch.Tensor:
    """Return logits, float32 [R, vocab], to which the penalties of `parameters`, float64 [R, len(Column)], are applied.

    The repetition penalty is that of CTRL (Keskar et al. 2019): positive logits are divided by it, others multiplied.
    """
    kept = np.flatnonzero(parameters[:, Column.HISTORY] >= 0)
    if not kept.size:
        return logits
    penalties = parameters[kept, Column.REPETITION : Column.PRESENCE + 1].astype(np.float32)
    repetition, frequency, presence = to_device(penalties, logits.device).unsqueeze(-1).unbind(1)
    places = to_device(kept, logits.device)
    seen = histories.seen[to_device(parameters[kept, Column.HISTORY].astype(np.int64), logits.device)]
    counts = seen >> 1
    part = logits[places]
    scaled = torch.where(part > 0, part / repetition, part * repetition)
    # A finite logit may overflow when it is scaled, so it is clamped: the sampler subtracts logits, and infinity minus
    # infinity is NaN.
    scaled = torch.where(part.isfinite(), scaled.clamp_(-_LARGEST, _LARGEST), part)
    part = torch.where(seen > 0, scaled, part)
    part -= frequency * counts + presence * (counts > 0)
    return logits.index_copy(0, places, part)
