"""How lucky is each step of a replica, beside what is predicted? Drawn by seed, the same however steps are asked for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vajra_py.runtime.seeds import SeedTree

_BLOCK = 1024


class StepLuck:
    """Numbers from 0 to 1, independent and evenly spread, by step index. Drawn in blocks, of which the last one is kept."""

    def __init__(self, seeds: SeedTree) -> None:
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
            self._index, self._block = index, self._seeds.stream(str(index)).random(_BLOCK)
        return self._block
