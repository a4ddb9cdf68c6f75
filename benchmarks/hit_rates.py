"""Hit rates of the prefix cache against its size, by retention policy: Mooncake's conversations and coding agents.

    python benchmarks/hit_rates.py MOONCAKE_FILE AGENTIC_FILE [FOLDER]

Each prompt is served at once and alone, by the KV memory of simulator and engine: its cached prefix is found, the rest is entered, and all is
given back. So hit rates depend on the order of prompts and on what is given up, and on nothing else. A prompt that is longer than the
memory is left out. Beside the policies: LRU by stack distances, computed without any cache, and a bound that no policy can exceed.
"""

from __future__ import annotations

import json
import sys
import time
from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np

from vajra_py.contract import CachedBlock, Key, KeyMotion, PolicyContext, ReplicaLimits, RetentionPolicy
from vajra_py.plugins import load_registry
from vajra_py.runtime.kv import PagedKvMemory, PrefixCacheOptions, Retention, SegmentBlockHashes
from vajra_py.workload import Workload
from vajra_py.workload.readers.agentic import read_agentic
from vajra_py.workload.readers.mooncake import read_mooncake

POLICIES = ("lru", "lfu", "fifo", "mru", "filo", "slru", "arc")
"""Policies that need no facts of requests."""
AGENTIC_SESSIONS = 60
SECONDS_BETWEEN_SESSIONS = 60.0
"""Mean; the trace has no clock across sessions."""
AGENTIC_BLOCK_TOKENS = 2048
MOONCAKE_BLOCK_TOKENS = 512
SIZES = (500, 1000, 2000, 4000, 8000, 16000, 32000, 64000)
"""Blocks of the cache."""


@dataclass(frozen=True)
class Trace:
    """Prompts in order of arrival, as chains of blocks."""

    arrived_at: Sequence[float]
    chains: Sequence[Sequence[Hashable]]

    @cached_property
    def num_blocks(self) -> int:
        """Number of full blocks of all prompts."""
        return sum(map(len, self.chains))

    @cached_property
    def uses(self) -> dict[Hashable, list[int]]:
        """Positions of the prompts that contain a block."""
        uses: dict[Hashable, list[int]] = {}
        for position, chain in enumerate(self.chains):
            for block in chain:
                uses.setdefault(block, []).append(position)
        return uses


class _Chain:
    """Hashes of one prompt whose blocks are named already."""

    is_private_after_prompt = False

    def __init__(self, blocks: Sequence[Hashable]) -> None:
        self._blocks = blocks
        self.num_hashed_tokens = self.num_public_tokens = len(blocks)

    def block_hash(self, block_index: int) -> Hashable:
        return self._blocks[block_index]

    def block_hashes(self, start: int, stop: int) -> Sequence[Hashable]:
        return self._blocks[start:stop]

    def shared_prompt_hashes(self, num_prompt_tokens: int) -> Sequence[Hashable]:
        return self._blocks[:num_prompt_tokens]


class _Prompt:
    """A request of blocks of one token, and one token more, which is computed in any case."""

    priority = 0

    def __init__(self, position: int, num_blocks: int) -> None:
        self.request_id = str(position)
        self.num_known_tokens = num_blocks + 1


class Belady:
    """Key = minus the next use: what is needed again last goes first. It reads the future."""

    key_motion = KeyMotion.PROGRESS

    def __init__(self, trace: Trace) -> None:
        self._uses = trace.uses
        self.position = -1
        """Position of the present prompt."""

    def key(self, block: CachedBlock, now: float) -> Key:
        """Return minus the position of the next prompt that contains it."""
        uses = self._uses[block.block_hash]
        following = bisect_right(uses, self.position)
        return -float(uses[following]) if following < len(uses) else -sys.float_info.max


def hits_of(trace: Trace, policy: str | None, num_blocks: int) -> int:
    """Blocks found in a cache of this size, over all prompts; None: the memory's own order, `belady`: with knowledge of the future."""
    built = None if policy is None else _built(policy, trace, num_blocks)
    retention = None if built is None else Retention(built, str(policy))
    memory = PagedKvMemory(num_blocks, 1, prefix_cache=PrefixCacheOptions(), retention=retention)
    now, hits = 0.0, 0
    memory.use_clock(lambda: now)
    for position, (arrived_at, blocks) in enumerate(zip(trace.arrived_at, trace.chains, strict=True)):
        if not 0 < len(blocks) <= num_blocks:
            continue
        # Times that grow with each prompt, as arrivals at one time would make an order by time arbitrary.
        now = max(arrived_at, now + 1e-6)
        if isinstance(built, Belady):
            built.position = position
        request = _Prompt(position, len(blocks))
        memory.register(request, _Chain(blocks))
        found = memory.allocate(request, len(blocks))
        assert found is not None
        hits += found
        memory.cache_blocks(request, len(blocks))
        memory.free(request, for_good=True)
        memory.forget(request)
    return hits


def _built(policy: str, trace: Trace, num_blocks: int) -> RetentionPolicy:
    if policy == "belady":
        return Belady(trace)
    nothing: Any = None
    limits = ReplicaLimits(1, num_blocks, 1, None, num_blocks)
    context = PolicyContext(limits, 1, nothing, nothing, nothing, nothing)
    spec = load_registry().retention_policy(policy).spec
    return spec.build(spec.config(), context)


def lru_hits_by_distance(trace: Trace, sizes: Sequence[int]) -> list[int]:
    """Hits of LRU in caches of these sizes, from stack distances alone.

    A block is found if fewer than `size` others were used after it. Of the blocks of one prompt the first counts as used last.
    """
    times = np.zeros(2 * trace.num_blocks + 2, dtype=np.int64)
    """Binary indexed tree over times of use; 1 at the latest use of each block."""
    used_at: dict[Hashable, int] = {}
    hits = [0] * len(sizes)
    clock = 0
    for blocks in trace.chains:
        total = len(used_at)
        open_sizes = [index for index, size in enumerate(sizes) if len(blocks) <= size]
        for block in blocks:
            at = used_at.get(block)
            if at is None:
                break
            distance = total - _sum(times, at)
            open_sizes = [index for index in open_sizes if distance < sizes[index]]
            for index in open_sizes:
                hits[index] += 1
        for block in reversed(blocks):
            at = used_at.get(block)
            if at is not None:
                _add(times, at, -1)
            clock += 1
            used_at[block] = clock
            _add(times, clock, 1)
    return hits


def _add(tree: np.ndarray[Any, Any], at: int, change: int) -> None:
    while at < len(tree):
        tree[at] += change
        at += at & -at


def _sum(tree: np.ndarray[Any, Any], at: int) -> int:
    total = 0
    while at:
        total += int(tree[at])
        at -= at & -at
    return total


def belady_hits(trace: Trace, size: int) -> int:
    """Most hits that any policy can have in a cache of this size: each block is kept that is needed again soonest.

    Belady's algorithm over single blocks, which may be passed by, so that it is a bound also for caches that must take whole prompts.
    """
    cached: dict[Hashable, int] = {}
    """Next use of each block that is kept."""
    heap: list[tuple[int, int, Hashable]] = []
    never, hits, number = len(trace.chains), 0, 0
    taken = dict.fromkeys(trace.uses, 0)
    for blocks in trace.chains:
        if len(blocks) > size:
            for block in blocks:
                taken[block] += 1
            continue
        for block in blocks:
            hits += block in cached
            taken[block] += 1
            uses = trace.uses[block]
            following = uses[taken[block]] if taken[block] < len(uses) else never
            if following == never:
                cached.pop(block, None)
                continue
            cached[block] = following
            number += 1
            heappush(heap, (-following, number, block))
            while len(cached) > size:
                latest, _, candidate = heappop(heap)
                if cached.get(candidate) == -latest:
                    del cached[candidate]
    return hits


def trace_of(workload: Workload, block_tokens: int) -> Trace:
    """The prompts of a workload as chains of full blocks, in order of their nominal arrivals."""
    requests = sorted(workload, key=lambda one: one.arrived_at)
    chains = []
    for request in requests:
        assert request.content is not None
        hashes = SegmentBlockHashes(request.content.segments, request.request_id, block_tokens)
        chains.append(hashes.shared_prompt_hashes(request.num_prompt_tokens))
    return Trace([one.arrived_at for one in requests], chains)


def measure(trace: Trace) -> dict[str, list[float]]:
    """Hit rate by policy, for each of `SIZES`."""
    rates = {"bound": [belady_hits(trace, size) / trace.num_blocks for size in SIZES]}
    rates["lru by stack distances"] = [hits / trace.num_blocks for hits in lru_hits_by_distance(trace, SIZES)]
    for name in POLICIES:
        began = time.process_time()
        rates[name] = [hits_of(trace, name, size) / trace.num_blocks for size in SIZES]
        sys.stderr.write(f"{name}: {time.process_time() - began:.0f} s\n")
    return rates


def main() -> int:
    """Measure both traces, print a table for each, and write figures and picture."""
    if len(sys.argv) not in (3, 4):
        sys.stderr.write("usage: python benchmarks/hit_rates.py MOONCAKE_FILE AGENTIC_FILE [FOLDER]\n")
        return 2
    mooncake, agentic = map(Path, sys.argv[1:3])
    folder = Path(sys.argv[3] if len(sys.argv) > 3 else "runs/hit-rates")
    rng = np.random.default_rng(1)
    traces = {
        "Mooncake conversations": (read_mooncake(mooncake), MOONCAKE_BLOCK_TOKENS),
        "coding agents": (
            read_agentic(
                agentic,
                lambda count: np.cumsum(rng.exponential(SECONDS_BETWEEN_SESSIONS, count)),
                num_sessions=AGENTIC_SESSIONS,
                mode="open",
            ),
            AGENTIC_BLOCK_TOKENS,
        ),
    }
    rates = {name: measure(trace_of(workload, tokens)) for name, (workload, tokens) in traces.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hit_rates.json").write_text(json.dumps({"blocks": SIZES, "rates": rates}, indent=1) + "\n")
    for name, by_policy in rates.items():
        sys.stdout.write(
            f"\n| {name}: blocks | {' | '.join(f'{size:,}' for size in SIZES)} |\n|---|{'---:|' * len(SIZES)}\n"
        )
        for policy, values in by_policy.items():
            sys.stdout.write(f"| `{policy}` | {' | '.join(f'{100 * value:.1f}' for value in values)} |\n")
    _draw(rates, folder / "hit_rates.svg")
    return 0


def _draw(rates: dict[str, dict[str, list[float]]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "hit rates"
    from matplotlib import pyplot

    from vajra_py.metrics.plots.style import COLOURS, DASHES, INK

    figure, axes = pyplot.subplots(1, len(rates), figsize=(9.0, 3.6), sharey=True, layout="constrained")
    for axis, (name, by_policy) in zip(axes, rates.items(), strict=True):
        axis.plot(
            SIZES, [100 * one for one in by_policy["bound"]], color=INK, linewidth=1.0, linestyle=":", label="bound"
        )
        for index, policy in enumerate(POLICIES):
            values = [100 * one for one in by_policy[policy]]
            axis.plot(SIZES, values, color=COLOURS[index], linestyle=DASHES[index % len(DASHES)], label=policy)
        axis.set_xscale("log")
        axis.set_title(name)
        axis.set_xlabel("blocks of the cache")
        axis.grid(visible=True, linewidth=0.4)
    axes[0].set_ylabel("prompt blocks found (%)")
    axes[-1].legend(frameon=False, fontsize="small")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
