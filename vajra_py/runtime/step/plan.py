"""Protocol between the mechanism and its backends: plans go in, tokens and durations come out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import repeat
from typing import NamedTuple, Protocol, overload

from msgspec import Struct, field

from vajra_py.contract import BatchFeatures
from vajra_py.runtime.kv import BlockCopy
from vajra_py.runtime.requests.connector import KvReport
from vajra_py.runtime.requests.decode_pool import DecodePool, by_admission
from vajra_py.runtime.requests.request import Request


class PlannedDrafts(NamedTuple):
    """Drafts of a decode that a step verifies: they are the last tokens of its chunk."""

    num_tokens: int
    """0: none were proposed, or none fit."""
    num_kept_blocks: int
    """Number of blocks that the request holds after the step in any case; further ones may be freed."""
    is_padding: bool = False
    """True if the request is admitted with its last known token, and the draft positions are only padding."""
    num_unverified: int = 0
    """Number of drafts of its previous step that may precede the chunk: it is not known yet which of them are accepted.
    """


class PlannedChunk(NamedTuple):
    """One entry of a plan."""

    request: Request
    num_tokens: int
    num_computed_before: int
    kind: str
    """"running", "admitted", "resumed" or "moved" (it arrived with its KV)."""


new_chunk = partial(tuple.__new__, PlannedChunk)
"""Function that makes a chunk from a tuple of its fields, in less than half the time of the constructor."""


class DraftedDecodes(Sequence[PlannedChunk]):
    """Entries of a step that consists of running decodes with drafts, as columns; chunks are made when they are read.

    `num_computed` are the computed tokens of each before the step, and `num_held_blocks` the blocks that it holds during
    the step (empty: not counted); the others are fields of `PlannedDrafts`.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        num_computed: Sequence[int],
        num_drafts: Sequence[int],
        num_kept_blocks: Sequence[int],
        num_unverified: Sequence[int],
        num_held_blocks: Sequence[int] = (),
    ) -> None:
        self.requests = requests
        self.num_computed = num_computed
        self.num_drafts = num_drafts
        self.num_kept_blocks = num_kept_blocks
        self.num_unverified = num_unverified
        self.num_held_blocks = num_held_blocks
        self.drafts = _DraftsOf(self)

    def __len__(self) -> int:
        return len(self.requests)

    @overload
    def __getitem__(self, index: int) -> PlannedChunk: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PlannedChunk]: ...
    def __getitem__(self, index: int | slice) -> PlannedChunk | Sequence[PlannedChunk]:
        return self._made[index]

    def __iter__(self) -> Iterator[PlannedChunk]:
        return iter(self._made)

    @cached_property
    def _made(self) -> Sequence[PlannedChunk]:
        num_tokens = [1 + count for count in self.num_drafts]
        return list(map(new_chunk, zip(self.requests, num_tokens, self.num_computed, repeat("running"))))


class _DraftsOf(Mapping[Request, PlannedDrafts]):
    """Drafts of such decodes by request, made when they are read."""

    def __init__(self, decodes: DraftedDecodes) -> None:
        self._decodes = decodes

    def __len__(self) -> int:
        return len(self._decodes)

    def __getitem__(self, request: Request) -> PlannedDrafts:
        return self._made[request]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._decodes.requests)

    @cached_property
    def _made(self) -> Mapping[Request, PlannedDrafts]:
        all_of = self._decodes
        made = map(PlannedDrafts, all_of.num_drafts, all_of.num_kept_blocks, repeat(False), all_of.num_unverified)
        return dict(zip(all_of.requests, made, strict=True))


class StepPlan(Struct, eq=False):
    """Work of one step. Created only by the batch builder; read by executors and observers.

    It is not changed while its step is in flight; afterwards, a plan of decodes may be reused for its repetition.
    """

    step_index: int
    replica_id: int
    formed_at: int
    """Tick at which it was formed."""
    features: BatchFeatures
    """Features of the batch; of its slowest group under KV parallelism."""
    chunks: Sequence[PlannedChunk]
    """Prefill chunks, and decodes that are not part of the pool's step."""
    pool: DecodePool | None
    """Pool all of whose members decode in this step; None if there are none."""
    num_pool_decodes: int
    free_blocks: int = 0
    num_waiting: int = 0
    num_running: int = 0
    """Free blocks, waiting and running requests right after the step was formed."""
    pool_position: int = 0
    """Number of `chunks` added before the pool's decodes."""
    running_in_order: bool = False
    """True if running entries are listed in order of admission rather than as they were added."""
    preempted: Sequence[tuple[Request, str]] = ()
    num_preempted_before: int = 0
    """Number of requests that were preempted just before, in attempts at this step that ran nothing."""
    admissions: Mapping[Request, int] | None = None
    """Admission index of each entry with several steps in flight, by which an obsolete result is recognised."""
    copies: Sequence[BlockCopy] = ()
    """KV blocks to move between device and host before the step runs."""
    notes: Mapping[str, Mapping[str, float | int | str]] = field(default_factory=dict)
    drafts: Mapping[Request, PlannedDrafts] = field(default_factory=dict)
    """Drafts of each decode, if decodes have drafts; decodes are then among the chunks, and `pool` is None."""
    num_apart: int = 0
    """Number of `chunks` that the pool does not count; the others belong to requests that arrived with their KV and
    have joined the pool.
    """

    @property
    def num_requests(self) -> int:
        """Number of entries of the step."""
        return len(self.chunks) + self.num_pool_decodes

    @property
    def drafted(self) -> DraftedDecodes | None:
        """The entries as columns, if they were planned so; None otherwise."""
        return self.chunks if isinstance(self.chunks, DraftedDecodes) else None

    def as_drafted(self) -> DraftedDecodes | None:
        """The entries as columns, if all are running decodes with drafts; None otherwise."""
        chunks, drafts = self.chunks, self.drafts
        if isinstance(chunks, DraftedDecodes):
            return chunks
        requests, _, num_computed, kinds = zip(*chunks, strict=True)
        if kinds.count("running") < len(kinds) or len(drafts) < len(kinds):
            return None
        num_drafts, num_kept_blocks, _, num_unverified = zip(*(drafts[one] for one in requests), strict=True)
        return DraftedDecodes(requests, num_computed, num_drafts, num_kept_blocks, num_unverified)

    def decodes(self) -> Sequence[Request]:
        """Members of the pool that are not among `chunks`, by admission; those that have just joined were admitted last."""
        order = () if self.pool is None else self.pool.in_admission_order()
        return order[: self.num_pool_decodes] if self.num_apart < len(self.chunks) else order

    def entries(self) -> Iterator[PlannedChunk]:
        """Every entry in batch order. Valid from the plan's creation until its result is applied."""
        return in_batch_order(self.chunks, self._pool_entries(), self.pool_position, self.running_in_order)

    def computes(self, request: Request) -> bool:
        """Return True if a running request is part of the step; valid until the next step is formed."""
        in_pool = self.pool is not None and request in self.pool
        return in_pool or any(chunk.request is request for chunk in self.chunks)

    def work(self) -> tuple[list[Request], list[int]]:
        """Requests and query tokens of `entries`, in batch order, without making the entries; valid for as long."""
        if self.running_in_order or self.pool is None:
            entries = list(self.entries())
            return [one.request for one in entries], [one.num_tokens for one in entries]
        before, after = self.chunks[: self.pool_position], self.chunks[self.pool_position :]
        decodes = self.decodes()
        return (
            [*(one.request for one in before), *decodes, *(one.request for one in after)],
            [*(one.num_tokens for one in before), *[1] * len(decodes), *(one.num_tokens for one in after)],
        )

    def _pool_entries(self) -> Sequence[PlannedChunk]:
        return [PlannedChunk(request, 1, request.num_computed_tokens - 1, "running") for request in self.decodes()]


def in_batch_order(
    chunks: Sequence[PlannedChunk], decodes: Sequence[PlannedChunk], position: int, running_in_order: bool
) -> Iterator[PlannedChunk]:
    """Return the chunks with the decodes inserted after the first `position` chunks; or all running entries by
    admission, then the admitted ones.
    """
    if running_in_order:
        running = [chunk for chunk in chunks if chunk.kind == "running"]
        yield from sorted([*running, *decodes], key=lambda chunk: by_admission(chunk.request))
        yield from (chunk for chunk in chunks if chunk.kind != "running")
        return
    yield from chunks[:position]
    yield from decodes
    yield from chunks[position:]


class StepResult(Struct, frozen=True):
    """Result of a step.

    `tokens` holds (request, token id) for every entry that sampled one, in batch order; None if tokens have no ids
    (simulation): then every entry that caught up with its known tokens yields one. `stopped` names requests whose token
    ended them (end of sequence or a stop string), for executors that cannot know lengths in advance. `failed` names
    requests whose part of the step failed, with reasons; only they end. `accepted` holds the number of drafts that were
    accepted and became output, where there were any. With `is_ahead`, the next step is formed before tokens and
    accepted drafts are known: each entry that caught up yields the one token that it yields in any case, and the rest
    is reported through `Replica.verify`.
    """

    tokens: Sequence[tuple[Request, int]] | None = None
    stopped: frozenset[Request] = frozenset()
    failed: Mapping[Request, str] = field(default_factory=dict)
    accepted: Mapping[Request, int] = field(default_factory=dict)
    report: KvReport | None = None
    """Report of a connector's workers; None without a connector or a report."""
    is_ahead: bool = False


class Executor(Protocol):
    """Runs plans for one replica; the only part that differs between simulator and engine."""

    def known_output_tokens(self, request: Request) -> int | None:
        """Number of output tokens after which the request stops, if it is known (simulation, replay)."""

    def num_drafts(self, request: Request, at_most: int) -> int:
        """Return the number of drafts proposed for a decode's next tokens; called if `replica.draft` allows any."""

    def withheld_token(self, request: Request) -> StepResult:
        """Return the token that the last step of a request's prompt sampled and that its result left out; needed if the
        request stays after all.

        Another replica was to sample it again; see `Replica.withholds_token`.
        """

    def release(self, request: Request) -> None:
        """Drop everything kept for a request that has ended."""
