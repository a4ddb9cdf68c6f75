"""Random factors on step times, drawn from the seed and independent of whether steps are computed singly or in runs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vajra_py.latency import Variation
from vajra_py.runtime.support.seeds import SeedTree

_BLOCK = 1024


class StepFactors:
    """Factors of one replica's steps, by step index; they are computed in blocks, and the last used block is cached.

    Each factor is the value of a distribution at a random quantile. The quantile depends only on the seed and the
    step's index; the distribution depends on whether the step computes prompt tokens.
    """

    def __init__(self, variation: Variation, seeds: SeedTree) -> None:
        self._variation = variation
        self._seeds = seeds
        self._index = -1
        self._blocks: dict[bool, npt.NDArray[np.float64]] = {}

    def of(self, first: int, count: int, *, has_prompts: bool) -> npt.NDArray[np.float64]:
        """Return the factors of `count` steps from index `first` on.

        `has_prompts`: True if all of these steps compute prompt tokens, False if none does.
        """
        index, at = divmod(first, _BLOCK)
        if at + count <= _BLOCK:
            return self._drawn(index)[has_prompts][at : at + count]
        blocks = [self._drawn(one)[has_prompts] for one in range(index, (first + count - 1) // _BLOCK + 1)]
        return np.concatenate(blocks)[at : at + count]

    def _drawn(self, index: int) -> dict[bool, npt.NDArray[np.float64]]:
        if index != self._index:
            quantile = self._seeds.stream(str(index)).random(_BLOCK)
            self._index = index
            self._blocks = {kind: self._variation.at(quantile, has_prompts=kind) for kind in (False, True)}
        return self._blocks
