"""Statistics of a workload: rate, burstiness, lengths, prefix sharing."""

from __future__ import annotations

import math

import numpy as np
from msgspec import Struct, structs

from vajra_py.workload.arrays import F64, I64
from vajra_py.workload.columns import Columns
from vajra_py.workload.content import NO_NODE, ContentColumn, ContentStore
from vajra_py.workload.request import SegmentId

__all__ = ["LengthStatistics", "WorkloadStatistics", "mean_rate", "shared_prompt_tokens", "workload_statistics"]


class LengthStatistics(Struct, frozen=True):
    """Mean, percentiles (linear interpolation) and extremes of lengths in tokens; all 0 for an empty workload."""

    mean: float
    p5: float
    p50: float
    p90: float
    p95: float
    p99: float
    min: int
    max: int

    @classmethod
    def of(cls, lengths: I64) -> LengthStatistics:
        """Compute the statistics of these lengths."""
        if not len(lengths):
            return cls(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0)
        p5, p50, p90, p95, p99 = np.percentile(lengths, [5, 50, 90, 95, 99]).tolist()
        return cls(float(lengths.mean()), p5, p50, p90, p95, p99, int(lengths.min()), int(lengths.max()))


class WorkloadStatistics(Struct, frozen=True):
    """Statistics of one workload.

    Attributes:
        num_requests: Number of requests.
        num_sessions: Number of distinct sessions; 0 if requests name none.
        num_tenants: Number of distinct tenants; 0 if requests name none.
        num_followers: Number of requests that follow others.
        duration_s: Seconds between the first and the last arrival.
        rate: Requests per second: 1 / mean inter-arrival time; 0 if undefined. Nominal if requests follow one another.
        iat_cv: Standard deviation of the inter-arrival times over their mean (1: Poisson); 0 if undefined.
        prompt: Prompt lengths in tokens.
        output: True output lengths in tokens.
        total_prompt_tokens: Tokens of all prompts.
        total_output_tokens: Tokens of all outputs.
        prefix_share_fraction: Fraction of prompt tokens that would be prefix hits in an unlimited cache with blocks of
            one token, if each request ended before the next one arrived; None if no content is known.
    """

    num_requests: int
    num_sessions: int
    num_tenants: int
    num_followers: int
    duration_s: float
    rate: float
    iat_cv: float
    prompt: LengthStatistics
    output: LengthStatistics
    total_prompt_tokens: int
    total_output_tokens: int
    prefix_share_fraction: float | None

    def to_dict(self) -> dict[str, object]:
        """Return the statistics as JSON values, by name."""
        return {**structs.asdict(self), "prompt": structs.asdict(self.prompt), "output": structs.asdict(self.output)}


def mean_rate(arrived_at: F64) -> float:
    """Return requests per second as 1 / mean inter-arrival time.

    Return 0 if the rate is undefined: for fewer than two requests, or practically simultaneous arrivals.
    """
    duration_s = float(arrived_at[-1] - arrived_at[0]) if len(arrived_at) else 0.0
    rate = (len(arrived_at) - 1) / duration_s if duration_s > 0 else 0.0
    return rate if math.isfinite(rate) else 0.0


def workload_statistics(columns: Columns) -> WorkloadStatistics:
    """Compute the statistics of these requests."""
    gaps = np.diff(columns.arrived_at)
    mean_gap = float(gaps.mean()) if len(gaps) else 0.0
    prompts, outputs = columns.num_prompt_tokens, columns.num_output_tokens
    total = int(prompts.sum())
    shared = None if columns.content is None else int(shared_prompt_tokens(columns, columns.content).sum())
    return WorkloadStatistics(
        num_requests=len(columns),
        num_sessions=0 if columns.session_id is None else columns.session_id.num_distinct(),
        num_tenants=len({*columns.values("tenant")} - {""}) if "tenant" in columns.stated else 0,
        num_followers=0 if columns.follows is None else int((columns.follows >= 0).sum()),
        duration_s=float(columns.arrived_at[-1] - columns.arrived_at[0]) if len(columns) else 0.0,
        rate=mean_rate(columns.arrived_at),
        iat_cv=float(gaps.std()) / mean_gap if mean_gap > 0 else 0.0,
        prompt=LengthStatistics.of(prompts),
        output=LengthStatistics.of(outputs),
        total_prompt_tokens=total,
        total_output_tokens=int(outputs.sum()),
        prefix_share_fraction=None if shared is None or not total else shared / total,
    )


def _canonical(store: ContentStore) -> tuple[list[int], list[SegmentId]]:
    """Return two lists with an entry per node: the first node with the same tokens from the root, and the node's
    segment id.
    """
    known: dict[tuple[int, SegmentId, int], int] = {}
    canon: list[int] = []
    segment_ids = [store.segment_id(node) for node in range(len(store.parent))]
    for node, (parent, tokens) in enumerate(zip(store.parent.tolist(), store.tokens.tolist(), strict=True)):
        key = (canon[parent] if parent != NO_NODE else NO_NODE, segment_ids[node], tokens)
        canon.append(known.setdefault(key, node))
    return canon, segment_ids


class _Seen:
    """Prefixes of the requests so far.

    The segments of all nodes in `whole`, and of their ancestors, occurred in full. `longest` holds, for each pair of a
    prefix and a segment, the largest number of the segment's tokens that occurred after that prefix.
    """

    def __init__(self, store: ContentStore) -> None:
        self.parent, self.tokens = store.parent.tolist(), store.tokens.tolist()
        self.canon, self.segment_ids = _canonical(store)
        self.whole: set[int] = set()
        self.longest: dict[tuple[int, SegmentId], int] = {}
        self.depth: list[int] = []  # tokens up to the end of the node's segment
        for parent, tokens in zip(self.parent, self.tokens, strict=True):
            self.depth.append(tokens + (self.depth[parent] if parent != NO_NODE else 0))

    def canonical(self, node: int) -> int:
        """Return the first node with the same tokens from the root as this one; NO_NODE for NO_NODE."""
        return self.canon[node] if node != NO_NODE else NO_NODE

    def add(self, leaf: int, num_prompt_tokens: int) -> int:
        """Record a prompt; return the number of its leading tokens that were seen before."""
        unseen: list[int] = []
        node = leaf
        while node != NO_NODE and (self.canon[node] not in self.whole or self.depth[node] > num_prompt_tokens):
            unseen.append(node)
            node = self.parent[node]
        shared = self.depth[node] if node != NO_NODE else 0
        sharing = True
        for node in reversed(unseen):
            length = self.tokens[node] - max(0, self.depth[node] - num_prompt_tokens)
            if length <= 0:
                break
            key = (self.canonical(self.parent[node]), self.segment_ids[node])
            longest = self.longest.get(key, 0)
            if sharing:
                shared += min(longest, length)
                sharing = longest >= length
            self.longest[key] = max(longest, length)
            if length == self.tokens[node]:
                self.whole.add(self.canon[node])
        return shared


def shared_prompt_tokens(columns: Columns, content: ContentColumn) -> I64:
    """Return for each request how many of its leading prompt tokens are also the leading tokens of an earlier request.

    The tokens of an earlier request are its prompt followed by its output.
    """
    seen = _Seen(content.store)
    with_outputs = content.store.has_outputs
    outputs = columns.num_output_tokens.tolist()
    shared = np.zeros(len(columns), dtype=np.int64)
    for row, (leaf, length) in enumerate(zip(content.nodes.tolist(), columns.num_prompt_tokens.tolist(), strict=True)):
        if leaf == NO_NODE:
            continue
        shared[row] = seen.add(leaf, length)
        if with_outputs:
            key = (seen.canonical(leaf), ("out", columns.request_id[row]))
            seen.longest[key] = max(seen.longest.get(key, 0), outputs[row])
    return shared
