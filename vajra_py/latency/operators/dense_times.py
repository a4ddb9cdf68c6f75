"""Times of a step's dense layers by number of tokens, summed over the operators of a bundle.

Matrix products are computed in tiles of 16 to 256 rows, so their times are a staircase with steps at multiples of 16
tokens. Where samples of matrix products are at most 16 tokens apart, a size between two of them takes the time of the
larger one. All other times are linear between samples.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from vajra_py.latency.operators.bundle_files import MLP_LAYERS, ONCE_A_STEP, TWICE_A_LAYER, Samples

MATRIX_PRODUCTS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
TILE = 16
"""Smallest tile height of a matrix product, in tokens; larger tiles are multiples of it."""


class DenseTimes:
    """Times of the dense layers of one step; `num_mlp_layers` of the layers have no experts (None: all layers)."""

    def __init__(self, operators: Mapping[str, Samples], num_layers: int, num_mlp_layers: int | None = None) -> None:
        products = {name: one for name, one in operators.items() if name in MATRIX_PRODUCTS}
        others = {name: one for name, one in operators.items() if name not in products}
        self._products = summed(products, num_layers, num_mlp_layers)
        self._others = summed(others, num_layers, num_mlp_layers)

    def at(self, tokens: int) -> float:
        """Return the seconds for this number of tokens."""
        sizes, times = self._products.sizes, self._products.times_us
        index = int(np.searchsorted(sizes, tokens))
        if 0 < index < len(sizes) and sizes[index] - sizes[index - 1] <= TILE:
            products = float(times[index])
        else:
            products = interpolated(sizes, times, tokens)
        return products + interpolated(self._others.sizes, self._others.times_us, tokens)


def interpolated(sizes: npt.NDArray[np.float64], times: npt.NDArray[np.float64], size: float) -> float:
    """Return the time at `size`, linear between samples.

    Above the largest sample, the time lies on the line through this sample and the one at about half its size; without
    such a sample, the time grows in proportion to the size.
    """
    if size <= sizes[-1]:
        return float(np.interp(size, sizes, times))
    middle = int(np.searchsorted(sizes, sizes[-1] / 2.0))
    if middle == len(sizes) - 1:
        return float(times[-1] * size / sizes[-1])
    slope = max(0.0, (times[-1] - times[middle]) / (sizes[-1] - sizes[middle]))
    return float(times[-1] + slope * (size - sizes[-1]))


def summed(operators: Mapping[str, Samples], num_layers: int, num_mlp_layers: int | None = None) -> Samples:
    """Return the total time of all operators of a step by size; each operator is counted as often as it runs."""
    sizes = np.unique(np.concatenate([one.sizes for one in operators.values()]))
    total = np.zeros(len(sizes))
    for name, samples in operators.items():
        often = 1 if name in ONCE_A_STEP else 2 * num_layers if name in TWICE_A_LAYER else num_layers
        if name in MLP_LAYERS and num_mlp_layers is not None:
            often = num_mlp_layers
        total += often * np.array([interpolated(samples.sizes, samples.times_us, size) for size in sizes])
    return Samples(sizes, total)
