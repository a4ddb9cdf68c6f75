"""Claims on offline batches: BlendServe."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import fmean

import numpy as np
from claims_parts import Cell, Cells, Claim, Knows, Verdict, lengths_of, options_of, ordered, served

from vajra_py.contract import BatchFeatures
from vajra_py.testing.harness import PolicySource
from vajra_py.workload.request import RequestSpec


@dataclass(frozen=True, slots=True)
class Overlapped:
    """Steps in which computing (10,000 tokens a second) and reading (5 million tokens of context a second) overlap, or follow one another."""

    overlaps: bool
    num_stages: int = 1

    def stage_time_s(self, features: BatchFeatures) -> float:
        """5 ms, and the larger of both or their sum."""
        computing, reading = features.num_tokens / 10_000.0, features.decode_context_tokens / 5e6
        return 0.005 + (max(computing, reading) if self.overlaps else computing + reading)

    def batch_time_s(self, features: BatchFeatures) -> float:
        """The same."""
        return self.stage_time_s(features)


def pools(seed: int) -> list[RequestSpec]:
    """A pool of 120 long prompts with short outputs, then one of 360 short prompts with long outputs, all there at once."""
    stream = np.random.default_rng([351, seed])
    shapes = [(int(stream.integers(2000, 6000)), int(stream.integers(10, 60))) for _ in range(120)]
    shapes += [(int(stream.integers(50, 300)), int(stream.integers(600, 1500))) for _ in range(360)]
    return [RequestSpec(f"r{index}", 0.0, *shape) for index, shape in enumerate(shapes)]


def makespan(batcher: PolicySource, seed: int, *, overlaps: bool, knows: Knows = lengths_of) -> Cell:
    """Seconds until the last request has ended."""
    specs = pools(seed)
    options = options_of(num_blocks=8000, max_batch_size=256, latency=Overlapped(overlaps), output_lengths=knows(specs))
    return {"s": max(one.ended_at or 0.0 for one in served("fcfs", batcher, specs, options))}


CHUNK = {"chunk_size": 512}
ORDERS: dict[str, PolicySource] = {"blendserve": ("blendserve", CHUNK), "depth first": ("fixed_chunk", CHUNK)}


def _columns(cells: Cells, *, overlaps: bool) -> dict[str, list[float]]:
    return {
        name: cells.column(f"makespan {one} {overlaps}", "s", partial(makespan, one, overlaps=overlaps))
        for name, one in ORDERS.items()
    }


def _overlapped(cells: Cells) -> Verdict:
    return ordered(_columns(cells, overlaps=True), " s")


def _gain(cells: Cells) -> Verdict:
    gains = {}
    for overlaps in (True, False):
        columns = _columns(cells, overlaps=overlaps)
        gains[overlaps] = fmean(columns["depth first"]) / fmean(columns["blendserve"]) - 1.0
    reason = "" if gains[True] >= 0.1 else "less than half of it"
    text = f"{100 * gains[True]:+.0f} % with overlap, {100 * gains[False]:+.0f} % without"
    return Verdict(0.1 <= gains[True] <= 0.9 and gains[False] < gains[True] / 2, text, reason)


CLAIMS = [
    Claim(
        "blendserve",
        "memory of the two scan ends: 19.3 and 40.7 of 60 GB in the paper's example",
        "19.3 / 40.7 GB",
        1,
        test="tests/policies/test_blendserve.py",
    ),
    Claim(
        "blendserve",
        "compute-bound and memory-bound requests finish sooner than in depth-first order if compute and memory access overlap",
        "+19.3 to +22.7 % (over NanoFlow-DFS)",
        2,
        _overlapped,
    ),
    Claim(
        "blendserve",
        "throughput rises, and at most half as much without overlap",
        "+19.3 to +22.7 %",
        3,
        _gain,
        why="less than half of it: reading takes 58 s here and computing 92 s, and memory and the floor of steps bound how far they mix. With "
        "slower reading (3 million tokens a second, 96 s in all), no floor and twice the memory it holds: +13 %, +0 % without overlap",
    ),
]
