"""Model how FlashAttention 2 spreads a batch of decodes over a GPU, and what unequal contexts cost there.

One thread block computes one sequence of one KV head, and a multiprocessor holds one of them. FlashAttention 2 splits contexts over several
blocks only while sequences times KV heads fill less than 0.8 of two blocks a multiprocessor (`num_splits_heuristic` of its
flash_api.cpp): splits are small and spread evenly, so that only the sum of the contexts counts. Without splits, blocks start in order,
all sequences of the first KV head, then those of the next; they share the memory's bandwidth, and a block that outlasts the others draws no
more than its own peak, so that the GPU waits for the longest context.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import exp, log, sqrt
from statistics import NormalDist

import numpy as np

from vajra_py.latency.bundle_files import Array, SkewSample

FILL_WITHOUT_SPLITS = 0.8
"""Contexts are split below this part of all block slots, which `num_splits_heuristic` counts as two a multiprocessor."""
SLOTS_PER_SM = 2
PEAK_SHARE = 0.02
"""Part of the GPU's bandwidth that one block draws at most, unless a bundle's own measurements say it: 32 KiB on their way, 1 us a trip, of 1.6 TB/s."""
PEAK_SHARES = (0.008, 0.05)
"""Between which it is looked for."""
NUM_ORDERS = 4
"""Orders of the sequences in the batch, which is known to the engine alone, over which times are averaged."""
GOLDEN = 0.6180339887498949
MOST_FITTED = 2
"""Numbers of decodes whose measured batches the peak share is fitted to: the smallest without splits, where a long context tells most."""


@dataclass(frozen=True, slots=True)
class DecodeKernel:
    """FlashAttention 2 on one GPU."""

    kv_heads: int
    """Of one GPU."""
    num_sms: int
    peak_share: float = PEAK_SHARE

    def splits(self, num_sequences: int) -> bool:
        """Whether contexts are split over several blocks in a batch of this (padded) size."""
        return num_sequences * self.kv_heads < FILL_WITHOUT_SPLITS * SLOTS_PER_SM * self.num_sms

    def time(self, contexts: Sequence[float]) -> float:
        """Time of a batch in which contexts are not split, in units of what its bytes of one KV head take at the full bandwidth."""
        total = float(sum(contexts))
        blocks = [context / total for context in contexts] * self.kv_heads
        # All running blocks have received as much since the last one started: `served` is the sum of those shares.
        running = blocks[: self.num_sms]
        heapq.heapify(running)
        # While blocks wait, as many run as there are multiprocessors.
        for block in islice(blocks, self.num_sms, None):
            heapq.heapreplace(running, running[0] + block)
        served = running[0] if len(blocks) > self.num_sms else 0.0
        clock = served / min(self.peak_share, 1.0 / self.num_sms)
        left = len(running)
        for end in sorted(running):
            clock += (end - served) / min(self.peak_share, 1.0 / left)
            served = end
            left -= 1
        return clock

    def ratio(self, sample: SkewSample) -> float:
        """How much longer a measured batch takes than one of equal contexts, its long ones being first."""
        count, long = int(sample.num_decodes), int(sample.num_long)
        contexts = [sample.long_over_short] * long + [1.0] * (count - long)
        return self.time(contexts) / self.time([1.0] * count)


class UnequalContexts:
    """Factors on measured attention times of equal contexts, by the number of decodes.

    Contexts are log-normal with the given variation (standard deviation over mean). `measured_counts` are the numbers of decodes whose
    times were measured, ascending: between them measured times are lines, and a factor holds the difference from those, too.
    """

    def __init__(self, kernel: DecodeKernel, variation: float, measured_counts: Sequence[float]) -> None:
        self._kernel = kernel
        self._sigma = sqrt(log(1.0 + variation * variation))
        self._knots = [int(count) for count in measured_counts]
        self._at_knots: dict[int, float] = {}
        self._factors: dict[int, float] = {}

    def factor(self, num_sequences: int) -> float:
        """The factor for a batch of this size, which is that of the CUDA graph where there is one."""
        if self._kernel.splits(num_sequences) or not self._sigma:
            return 1.0
        # In a larger batch than any that was measured other blocks hide the longest context at least as well.
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
        """What the line through the measured numbers gives for equal contexts, in the units of `time` times the number of decodes."""
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
    """So many values that stand for a log-normal distribution, ascending."""
    normal = NormalDist()
    return [exp(sigma * normal.inv_cdf((index + 0.5) / count)) for index in range(count)]


def spread_orders(values: Sequence[float]) -> list[list[float]]:
    """Some orders of the values, each of which spreads small and large ones evenly; the largest takes another place in each."""
    places = [index * GOLDEN for index in range(len(values))]
    found = []
    for turn in range(NUM_ORDERS):
        keys = [(place + turn / NUM_ORDERS) % 1.0 for place in places]
        found.append([values[index] for index in sorted(range(len(values)), key=keys.__getitem__)])
    return found


def fitted_peak_share(samples: Array, kv_heads: int, num_sms: int) -> float:
    """The share at which the model meets a bundle's own measurements of decodes with few long contexts; `PEAK_SHARE` without any.

    The measured batches have their long contexts first.
    """
    from scipy.optimize import minimize_scalar

    chosen = _few_long(samples, DecodeKernel(kv_heads, num_sms))
    if not chosen:
        return PEAK_SHARE

    def cost(share: float) -> float:
        kernel = DecodeKernel(kv_heads, num_sms, share)
        return sum((kernel.ratio(one) - one.ratio) ** 2 for one in chosen)

    return float(minimize_scalar(cost, bounds=PEAK_SHARES, method="bounded", options={"xatol": 5e-4}).x)


def _few_long(samples: Array, kernel: DecodeKernel) -> list[SkewSample]:
    """For each number of decodes that is not split, the batches with the fewest long contexts: one that has their median ratio."""
    chosen = []
    alone = samples[(samples[:, 1] == 0) & (samples[:, 4] < samples[:, 0])]
    unsplit = [count for count in np.unique(alone[:, 0]) if not kernel.splits(int(count))]
    for count in unsplit[:MOST_FITTED]:
        batches = alone[alone[:, 0] == count]
        alike = batches[batches[:, 4] == batches[:, 4].min()]
        chosen.append(SkewSample(*alike[0].tolist())._replace(ratio=float(np.median(alike[:, 3]))))
    return chosen
