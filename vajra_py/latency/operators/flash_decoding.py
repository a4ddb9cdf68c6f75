"""Model how FlashAttention 2 distributes a batch of decodes over a GPU, and the cost of unequal contexts.

One thread block computes one sequence of one KV head, and a multiprocessor runs as many blocks as fit into its shared
memory. FlashAttention 2 splits contexts over several blocks only if there are fewer than 1.6 blocks (sequences times KV
heads) per multiprocessor (`num_splits_heuristic` in its flash_api.cpp). With splits, blocks are small and spread
evenly, so only the sum of the contexts matters. Without splits, blocks start in order: all sequences of the first KV
head, then those of the next. Running blocks share the memory bandwidth, but a block that outlasts the others cannot use
more than its own peak, so the GPU waits for the longest context.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import exp, log, sqrt
from statistics import NormalDist

import numpy as np

from vajra_py.latency.hardware.devices import DeviceSpec
from vajra_py.latency.operators.bundle_files import Array, SkewSample

FILL_WITHOUT_SPLITS = 0.8
"""Fraction of the slots (two per multiprocessor). If blocks fill at least this fraction, contexts are not split."""
SLOTS_PER_SM = 2
BLOCK_BYTES_PER_S = 32 * 1024 / 1e-6
"""Peak bandwidth of one block if a bundle has no measurement of it: 32 KiB in flight over a memory latency of 1 us."""
MOST_SHARE = 0.3
"""Upper bound for the share of the bandwidth that one block can use: the share on a small GPU with twenty
multiprocessors.
"""
BLOCK_ROWS = 64
"""Query rows per block of the split kernel (flash_fwd_launch_template.h)."""
SHARED_KIB = {80: 164, 86: 100, 87: 164, 89: 100, 120: 100, 121: 100}
"""Shared memory per multiprocessor in KiB, by ten times the compute capability (CUDA C++ programming guide, technical
specifications).
"""
NUM_ORDERS = 4
"""Number of orders of the sequences over which times are averaged, since only the engine knows the actual order."""
GOLDEN = 0.6180339887498949
MOST_FITTED = 2
"""Maximum number of batch sizes used to fit the peak share: the smallest ones without splits, where a long context has
the largest effect.
"""


@dataclass(frozen=True, slots=True)
class DecodeKernel:
    """Decode kernel of FlashAttention 2 on one GPU."""

    kv_heads: int
    """KV heads per GPU."""
    num_sms: int
    peak_share: float
    """Largest fraction of the GPU's bandwidth that one block can use."""
    blocks_per_sm: int = 1
    """Number of blocks that a multiprocessor runs at once."""

    @classmethod
    def of(cls, device: DeviceSpec, kv_heads: int, head_dim: int) -> DecodeKernel:
        """Return the kernel for a described device, in 16-bit precision."""
        share = min(1.0, BLOCK_BYTES_PER_S / device.attainable_bandwidth)
        # A thread block keeps its queries, one tile of keys and one tile of values in shared memory.
        held_kib = 2 * head_dim * (BLOCK_ROWS + 2 * key_block(head_dim)) / 1024
        resident = int(SHARED_KIB.get(device.sm_version, 100) // held_kib)
        return cls(kv_heads, device.num_sms, share, max(1, resident))

    @property
    def num_slots(self) -> int:
        """Number of blocks that run at once."""
        return self.num_sms * self.blocks_per_sm

    def splits(self, num_sequences: int) -> bool:
        """Return True if contexts are split over several blocks in a batch of this (padded) size."""
        return num_sequences * self.kv_heads < FILL_WITHOUT_SPLITS * SLOTS_PER_SM * self.num_sms

    def time(self, contexts: Sequence[float]) -> float:
        """Return the time of a batch without splits, in units of the time to read one KV head's bytes at full
        bandwidth.
        """
        total = float(sum(contexts))
        blocks = [context / total for context in contexts] * self.kv_heads
        # Running blocks share the bandwidth equally. `served` is the amount that a block running from the start would
        # have read by now. `running` is a heap of the values of `served` at which the running blocks will end.
        slots = self.num_slots
        running = blocks[:slots]
        heapq.heapify(running)
        # While blocks wait, every slot is in use: the next block begins when the first of the running ones ends.
        for block in islice(blocks, slots, None):
            heapq.heapreplace(running, running[0] + block)
        served = running[0] if len(blocks) > slots else 0.0
        clock = served / min(self.peak_share, 1.0 / slots)
        left = len(running)
        for end in sorted(running):
            clock += (end - served) / min(self.peak_share, 1.0 / left)
            served = end
            left -= 1
        return clock

    def ratio(self, sample: SkewSample) -> float:
        """Return the predicted ratio of a measured batch's time to the time of a batch with equal contexts of the same
        mean. In the measured batch, long contexts come first.
        """
        count, long = int(sample.num_decodes), int(sample.num_long)
        contexts = [sample.long_over_short] * long + [1.0] * (count - long)
        return self.time(contexts) / self.time([1.0] * count)


class UnequalContexts:
    """Factors by which attention times measured with equal contexts are multiplied if contexts are unequal, by number
    of decodes.

    Contexts are log-normal with the given variation (standard deviation over mean). `measured_counts` are the numbers
    of decodes with measured times, ascending. Between these numbers, times are interpolated, and a factor also corrects
    the error of the interpolation.
    """

    def __init__(self, kernel: DecodeKernel, variation: float, measured_counts: Sequence[float]) -> None:
        self._kernel = kernel
        self._sigma = sqrt(log(1.0 + variation * variation))
        self._knots = [int(count) for count in measured_counts]
        self._at_knots: dict[int, float] = {}
        self._factors: dict[int, float] = {}

    def factor(self, num_sequences: int) -> float:
        """Return the factor for a batch of this size (the padded size if a CUDA graph is used)."""
        if self._kernel.splits(num_sequences) or not self._sigma:
            return 1.0
        # A batch larger than all measured ones has the factor of the largest measured one, since the delay by the
        # longest context does not grow with the number of blocks.
        count = min(num_sequences, self._knots[-1])
        if self._kernel.splits(count):
            return 1.0
        found = self._factors.get(count)
        if found is None:
            contexts = lognormal_quantiles(count, self._sigma)
            times = [self._kernel.time(order) for order in spread_orders(contexts)]
            found = self._factors[count] = max(1.0, sum(times) / len(times) * count / self._line(count))
        return found

    def _line(self, count: int) -> float:
        """Return the time of a batch with equal contexts (see `time`), multiplied by its number of decodes. This
        product is interpolated between the measured numbers of decodes.
        """
        right = bisect_left(self._knots, count)
        high = self._knots[right]
        if high == count or right == 0:
            return self._equal(high) * count / high
        low = self._knots[right - 1]
        part = (count - low) / (high - low)
        return (1.0 - part) * self._equal(low) + part * self._equal(high)

    def _equal(self, count: int) -> float:
        found = self._at_knots.get(count)
        if found is None:
            one = float(self._kernel.kv_heads) if self._kernel.splits(count) else self._kernel.time([1.0] * count)
            found = self._at_knots[count] = one * count
        return found


def lognormal_quantiles(count: int, sigma: float) -> list[float]:
    """Return `count` ascending values that represent a log-normal distribution with median 1."""
    normal = NormalDist()
    return [exp(sigma * normal.inv_cdf((index + 0.5) / count)) for index in range(count)]


def spread_orders(values: Sequence[float]) -> list[list[float]]:
    """Return orders of the values that each spread small and large values evenly.

    The largest value has a different position in each order.
    """
    places = [index * GOLDEN for index in range(len(values))]
    found = []
    for turn in range(NUM_ORDERS):
        keys = [(place + turn / NUM_ORDERS) % 1.0 for place in places]
        found.append([values[index] for index in sorted(range(len(values)), key=keys.__getitem__)])
    return found


def key_block(head_dim: int) -> int:
    """Return the number of keys per tile of the split kernel (`set_params_splitkv` of flash_api.cpp)."""
    return 256 if head_dim <= 64 else 128 if head_dim <= 128 else 64


def fitted_peak_share(samples: Array, kernel: DecodeKernel) -> float:
    """Return the peak share that best fits a bundle's measurements of decodes with few long contexts; without such
    measurements, the peak share of `kernel`.

    The search ranges from the equal share of a block when all slots are in use (with less, the GPU could not reach its
    bandwidth) to `MOST_SHARE`. In the measured batches the long contexts come first.
    """
    from scipy.optimize import minimize_scalar

    chosen = _few_long(samples, kernel)
    if not chosen:
        return kernel.peak_share

    def cost(share: float) -> float:
        trial = replace(kernel, peak_share=share)
        return sum((trial.ratio(one) - one.ratio) ** 2 for one in chosen)

    bounds = (1.0 / kernel.num_slots, MOST_SHARE)
    return float(minimize_scalar(cost, bounds=bounds, method="bounded", options={"xatol": 5e-4}).x)


def _few_long(samples: Array, kernel: DecodeKernel) -> list[SkewSample]:
    """Return one measured batch for each of the `MOST_FITTED` smallest numbers of decodes without splits.

    Each returned batch has the fewest long contexts of all batches with its number of decodes. Its `ratio` is replaced
    by the median over all batches with the same numbers of decodes and of long contexts.
    """
    chosen = []
    alone = samples[(samples[:, 1] == 0) & (samples[:, 4] < samples[:, 0])]
    unsplit = [count for count in np.unique(alone[:, 0]) if not kernel.splits(int(count))]
    for count in unsplit[:MOST_FITTED]:
        batches = alone[alone[:, 0] == count]
        alike = batches[batches[:, 4] == batches[:, 4].min()]
        chosen.append(SkewSample(*alike[0].tolist())._replace(ratio=float(np.median(alike[:, 3]))))
    return chosen
