"""Attention of requests whose KV is spread over KV-parallel groups.

Every group that holds some of a request's KV computes the request's new tokens and attends over its own part of the KV.
In each layer these groups exchange their results and the log-sum-exps of the scores, and each group merges all results
(Medha, arXiv 2409.17264, section 4). Attention of requests within one group is unchanged, and groups without a common
request exchange nothing.

Invariants:
    - K and V of new tokens are written only by the group that holds the request's newest tokens.
    - All groups merge a request's parts in the same order, by group number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import distributed

from vajra_kernels import AttentionMetadata, merge_partials, paged_attention, write_kv


class GroupLinks:
    """A rank's KV-parallel group, and the ranks of other groups with the same stage and tensor-parallel rank."""

    __slots__ = ("_parallel", "group_tokens", "own", "ranks")

    def __init__(
        self, own: int, group_tokens: int, ranks: Sequence[int], parallel: distributed.ProcessGroup | None = None
    ) -> None:
        """Create the links.

        `ranks`: the corresponding rank of each group, with this rank among them; `parallel`: process group of all these
        ranks.
        """
        self.own = own
        self.group_tokens = group_tokens
        self.ranks = ranks
        self._parallel = parallel

    def wait_for_all(self) -> None:
        """Block until the corresponding rank of every group has called this."""
        distributed.barrier(self._parallel)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Rows that this group and one other group both compute.

    Attributes:
        group: number of the other group.
        rank: rank in the other group to exchange results with.
        rows: indices of the rows in the flattened batch, int64 [E], in the same order on both sides.
        places: indices of these rows among all rows that this group shares with others, int64 [E].
    """

    group: int
    rank: int
    rows: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True, slots=True)
class SplitMetadata:
    """A step's batch with requests whose KV is spread over groups.

    Rows of requests whose newest KV this group holds come first, then rows of requests of which it holds only an
    earlier part.

    Attributes:
        newest: metadata of the first kind of rows, with the KV lengths of the part in this group; None if there are no
            such rows.
        earlier: metadata of the second kind of rows, whose queries attend over the whole part in this group; None if
            there are no such rows.
        shared: indices of the rows that other groups compute too, int64 [S].
        exchanges: one exchange with each other group that computes shared rows, sorted by group number.
        own_place: number of groups in `exchanges` whose group number is smaller than this group's.
        max_kv_len: KV length of the longest sequence, over all its parts.
    """

    newest: AttentionMetadata | None
    earlier: AttentionMetadata | None
    shared: torch.Tensor
    exchanges: Sequence[Exchange]
    own_place: int
    max_kv_len: int

    def merged(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Replace the shared rows of out [T, Hq, D] and lse [T, Hq] with results of attention over all parts."""
        width = out.shape[2]
        packed = torch.cat((out.float(), lse.unsqueeze(-1)), -1)
        count = len(self.exchanges) + 1
        parts = packed.new_zeros((count, self.shared.shape[0], *packed.shape[1:]))
        parts[..., width] = float("-inf")
        parts[self.own_place] = packed[self.shared]
        sent = [packed[one.rows] for one in self.exchanges]
        received = [torch.empty_like(one) for one in sent]
        operations = []
        for one, mine, theirs in zip(self.exchanges, sent, received, strict=True):
            operations.append(distributed.P2POp(distributed.isend, mine, one.rank))
            operations.append(distributed.P2POp(distributed.irecv, theirs, one.rank))
        for work in distributed.batch_isend_irecv(operations):
            work.wait()
        places = [place for place in range(count) if place != self.own_place]
        for place, one, theirs in zip(places, self.exchanges, received, strict=True):
            parts[place, one.places] = theirs
        whole, whole_lse = merge_partials(parts[..., :width].contiguous(), parts[..., width].contiguous())
        out[self.shared] = whole.to(out.dtype)
        lse[self.shared] = whole_lse


Metadata = AttentionMetadata | SplitMetadata


@dataclass(frozen=True, slots=True)
class Scores:
    """Scale, window and soft cap of a layer's attention scores."""

    scale: float
    window: int | None
    softcap: float | None


def write_and_attend(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cache: tuple[torch.Tensor, torch.Tensor],
    metadata: Metadata,
    scores: Scores,
) -> torch.Tensor:
    """Write a step's K and V, then return attention [T, Hq, Dv].

    `rows`: query [T, Hq, D], key and value [T, Hkv, D].
    """
    if isinstance(metadata, SplitMetadata):
        return write_and_attend_with_lse(rows, cache, metadata, scores)[0]
    query, key, value = rows
    write_kv(key, value, *cache, metadata.slot_mapping)
    return attend(query, cache, metadata, scores)


def attend(
    query: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], metadata: AttentionMetadata, scores: Scores
) -> torch.Tensor:
    """Return attention [T, Hq, Dv] of query [T, Hq, D]; the step's K and V must be written already."""
    return paged_attention(query, *cache, metadata, scale=scores.scale, window=scores.window, softcap=scores.softcap)


def write_and_attend_with_lse(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cache: tuple[torch.Tensor, torch.Tensor],
    metadata: Metadata,
    scores: Scores,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the same as `write_and_attend`; also return the log-sum-exps of the scores, float32 [T, Hq]."""
    query, key, value = rows
    split = metadata if isinstance(metadata, SplitMetadata) else None
    newest = metadata if isinstance(metadata, AttentionMetadata) else metadata.newest
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    num_newest = 0
    if newest is not None:
        num_newest = newest.num_query_tokens
        write_kv(key[:num_newest], value[:num_newest], *cache, newest.slot_mapping)
        parts.append(_attended(query[:num_newest], cache, newest, scores))
    if split is None:
        return parts[0]
    if split.earlier is not None:
        parts.append(_attended(query[num_newest:], cache, split.earlier, scores))
    out = torch.cat([one for one, _ in parts])
    lse = torch.cat([one for _, one in parts])
    split.merged(out, lse)
    return out, lse


def _attended(
    query: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], metadata: AttentionMetadata, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    # Without `causal`, rows attend over an earlier part of their sequences. That part lies within every window, since
    # sequences are spread over groups only if no window is shorter than the longest sequence.
    window = scores.window if metadata.causal else None
    return paged_attention(
        query, *cache, metadata, scale=scores.scale, window=window, softcap=scores.softcap, return_lse=True
    )
