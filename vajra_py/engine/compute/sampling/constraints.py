"""Tokens that requests forbid or favour: `allowed_token_ids`, `logit_bias`, `bad_words_token_ids`.

Invariants:
    - A forbidden token has a logit of minus infinity in its row; other logits are unchanged except for the bias.
    - Constraints that depend only on the request are summed once, when it takes its slot. Bad words of several tokens
      are matched against the row's output on the device, without synchronizing with the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vajra_py.engine.compute.batch import Ints
from vajra_py.engine.compute.interface import SamplingParams
from vajra_py.engine.compute.transfer import to_device

_NEG_INF = float("-inf")
_ANY = -2
"""Wildcard that pads the beginnings of bad words on the left to equal length, so that they form one tensor."""
_NONE = -3
"""Padding before the recent tokens of a short output; no beginning of a bad word contains it."""


@dataclass(slots=True)
class _Sequences:
    """Multi-token bad words of one row.

    Attributes:
        beginnings: all tokens but the last, int64 [W, P], padded with `_ANY` on the left.
        lasts: last token of each bad word, int64 [W].
        recent: last output tokens of the row, int64 [P].
    """

    beginnings: torch.Tensor
    lasts: torch.Tensor
    recent: torch.Tensor


class Constraints:
    """Constraints of all slots.

    Values added to logits are kept in one tensor that grows without waiting for the device.
    """

    __slots__ = ("_added", "_device", "_free", "_places", "_sequences")

    def __init__(self, max_requests: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._added = torch.zeros((0, vocab_size), dtype=torch.float32, device=device)
        self._free: list[int] = []
        self._places: Ints = np.full(max_requests, -1, np.int64)
        """Row of `_added` by slot; -1 if the slot has no constraints."""
        self._sequences: dict[int, _Sequences] = {}

    def add(self, slot: int, sampling: SamplingParams, output_token_ids: Sequence[int]) -> bool:
        """Add a request to a slot; return True if it has constraints. Raises `IndexError` for an unknown token."""
        words = sampling.bad_words_token_ids
        if sampling.allowed_token_ids is None and not sampling.logit_bias and not words:
            return False
        added = self._sum(sampling)
        several = [word for word in words if len(word) > 1]
        sequences = self._made(several, output_token_ids) if several else None
        if not self._free:
            num_rows = len(self._added)
            self._added = torch.cat((self._added, self._added.new_zeros((max(1, num_rows), self._added.shape[1]))))
            self._free.extend(range(num_rows, len(self._added)))
        place = self._free.pop()
        self._added[place] = to_device(added, self._device)
        self._places[slot] = place
        if sequences is not None:
            self._sequences[slot] = sequences
        return True

    def remove(self, slot: int) -> None:
        """Remove the request in this slot."""
        place = int(self._places[slot])
        if place >= 0:
            self._free.append(place)
            self._places[slot] = -1
            self._sequences.pop(slot, None)

    def apply(self, logits: torch.Tensor, slots: Ints) -> torch.Tensor:
        """Return float32 logits [R, vocab] under the constraints of these slots; `logits` itself if there are none."""
        rows = np.flatnonzero(self._places[slots] >= 0)
        if not rows.size:
            return logits
        possible = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        added = self._added[to_device(self._places[slots[rows]], self._device)]
        possible.index_add_(0, to_device(rows, self._device), added)
        for row in rows.tolist():
            found = self._sequences.get(int(slots[row]))
            if found is not None:
                is_there = ((found.beginnings == found.recent) | (found.beginnings == _ANY)).all(-1)
                forbidden = torch.zeros_like(found.lasts, dtype=torch.float32).masked_fill_(is_there, _NEG_INF)
                possible[row].index_add_(0, found.lasts, forbidden)
        return possible

    def count(self, tokens: torch.Tensor, slots: Ints) -> None:
        """Append one output token to each of these slots; `tokens`: int64 [R]."""
        if not self._sequences:
            return
        for row, slot in enumerate(slots.tolist()):
            found = self._sequences.get(slot)
            if found is not None:
                found.recent = torch.cat((found.recent[1:], tokens[row : row + 1]))

    def _sum(self, sampling: SamplingParams) -> np.ndarray:
        size = self._added.shape[1]
        added = np.zeros(size, np.float32)
        if sampling.allowed_token_ids is not None:
            added[:] = _NEG_INF
            added[_checked(sampling.allowed_token_ids, size)] = 0.0
        biased = _checked([token for token, _ in sampling.logit_bias], size)
        added[biased] += np.array([bias for _, bias in sampling.logit_bias], np.float32)
        added[_checked([word[0] for word in sampling.bad_words_token_ids if len(word) == 1], size)] = _NEG_INF
        return added

    def _made(self, words: Sequence[Sequence[int]], output_token_ids: Sequence[int]) -> _Sequences:
        _checked([token for word in words for token in word], self._added.shape[1])
        width = max(map(len, words)) - 1
        beginnings = np.full((len(words), width), _ANY, np.int64)
        for row, word in zip(beginnings, words, strict=True):
            row[width + 1 - len(word) :] = word[:-1]
        recent = np.full(width, _NONE, np.int64)
        last = list(output_token_ids[-width:])
        recent[width - len(last) :] = last
        lasts = np.array([word[-1] for word in words], np.int64)
        return _Sequences(*(to_device(one, self._device) for one in (beginnings, lasts, recent)))


def _checked(token_ids: Sequence[int], vocab_size: int) -> Ints:
    ids = np.array(token_ids, np.int64)
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise IndexError(f"a token that it allows, favours or forbids is not among the model's {vocab_size}")
    return ids
