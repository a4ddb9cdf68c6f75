"""By how much does each step of a replica differ from what is predicted? Drawn by seed, the same however steps are asked for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vajra_py.latency import Variation
from vajra_py.runtime.seeds import SeedTree

_BLOCK = 1024


class StepFactors:
    """The factors of one replica's steps, by step index. Drawn in blocks, of which the last one asked for is kept."""

    def __init__(self, variation: Variation, seeds: SeedTree) -> None:
        self._variation = variation
        self._seeds = seeds
        self._index = -1
        self._block: npt.NDArray[np.float64] = np.ones(0)

    def of(self, first: int, count: int) -> npt.NDArray[np.float64]:
        """Those of `count` steps from the `first` on."""
        index, at = divmod(first, _BLOCK)
        if at + count <= _BLOCK:
            return self._drawn(index)[at : at + count]
        blocks = [self._drawn(one) for one in range(index, (first + count - 1) // _BLOCK + 1)]
        return np.concatenate(blocks)[at : at + count]

    def _drawn(self, index: int) -> npt.NDArray[np.float64]:
        if index != self._index:
            self._index, self._block = index, self._variation.draw(self._seeds.stream(str(index)), _BLOCK)
        return self._block
