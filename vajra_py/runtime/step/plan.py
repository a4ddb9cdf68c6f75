"""Types exchanged between the mechanism and its backends: plans of steps, and results of steps."""

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
    """Number of drafts; 0: none were proposed, or none fit."""
    num_kept_blocks: int
    """Number of blocks that the request keeps after the step in any case; further blocks may be freed."""
    is_padding: bool = False
    """True if the request is admitted with one token left to compute, and the draft positions are only padding."""
    num_unverified: int = 0
    """Number of drafts of the request's previous step whose acceptance is not known yet; those that are accepted
    precede the tokens of the chunk.
    """


class PlannedChunk(NamedTuple):
    """One entry of a plan."""

    request: Request
    num_tokens: int
    num_computed_before: int
    kind: str
    """"running", "admitted", "resumed" or "moved" (it arrived with its KV)."""


new_chunk = partial(tuple.__new__, PlannedChunk)
"""Function that creates a chunk from a tuple of its fields, in less than half the time of the constructor."""


class DraftedDecodes(Sequence[PlannedChunk]):
    """Entries of a step that consists of running decodes with drafts, as columns; chunks are created when they are
    first read.

    Each column has one value per decode. `num_computed`: computed tokens before the step; `num_held_blocks`: number of
    blocks held during the step (empty: not counted); the other columns are fields of `PlannedDrafts`.
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
    """Drafts of `DraftedDecodes` by request, created when they are first read."""

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

    A plan is not changed while its step is in flight; afterwards, a plan of decodes may be reused for its repetition.
    """

    step_index: int
    replica_id: int
    formed_at: int
    """Tick at which the step was formed."""
    features: BatchFeatures
    """Features of the batch; with KV parallelism, those of its slowest group."""
    chunks: Sequence[PlannedChunk]
    """Prefill chunks, and decodes that are not counted in `num_pool_decodes`."""
    pool: DecodePool | None
    """Decode pool, if all of its members decode in this step; else None."""
    num_pool_decodes: int
    """Number of members of `pool` that decode in this step and are not among `chunks`."""
    free_blocks: int = 0
    """Number of free KV blocks right after the step was formed."""
    num_waiting: int = 0
    """Number of waiting requests right after the step was formed."""
    num_running: int = 0
    """Number of running requests right after the step was formed."""
    pool_position: int = 0
    """Number of `chunks` added before the pool's decodes."""
    running_in_order: bool = False
    """True if running entries are listed in order of admission rather than as they were added."""
    preempted: Sequence[tuple[Request, str]] = ()
    num_preempted_before: int = 0
    """Number of requests that were preempted in earlier, unsuccessful attempts to form this step."""
    admissions: Mapping[Request, int] | None = None
    """Admission index of each entry, by which obsolete results are recognised; None unless several steps may be in
    flight.
    """
    copies: Sequence[BlockCopy] = ()
    """KV blocks to copy between device and host before the step runs."""
    notes: Mapping[str, Mapping[str, float | int | str]] = field(default_factory=dict)
    drafts: Mapping[Request, PlannedDrafts] = field(default_factory=dict)
    """Drafts of each decode, if decodes have drafts; the decodes are then among `chunks`, and `pool` is None."""
    num_apart: int = 0
    """Number of `chunks` whose tokens the pool's counters do not include; the other chunks belong to requests that
    arrived with their KV and have joined the pool.
    """

    @property
    def num_requests(self) -> int:
        """Number of entries of the step."""
        return len(self.chunks) + self.num_pool_decodes

    @property
    def drafted(self) -> DraftedDecodes | None:
        """The entries as columns, if they were planned as columns; else None."""
        return self.chunks if isinstance(self.chunks, DraftedDecodes) else None

    def as_drafted(self) -> DraftedDecodes | None:
        """Return the entries as columns, if all are running decodes with drafts; else None."""
        chunks, drafts = self.chunks, self.drafts
        if isinstance(chunks, DraftedDecodes):
            return chunks
        requests, _, num_computed, kinds = zip(*chunks, strict=True)
        if kinds.count("running") < len(kinds) or len(drafts) < len(kinds):
            return None
        num_drafts, num_kept_blocks, _, num_unverified = zip(*(drafts[one] for one in requests), strict=True)
        return DraftedDecodes(requests, num_computed, num_drafts, num_kept_blocks, num_unverified)

    def decodes(self) -> Sequence[Request]:
        """Return the pool's members that are not among `chunks`, in order of admission. Members that have just joined
        are among `chunks` and were admitted last.
        """
        order = () if self.pool is None else self.pool.in_admission_order()
        return order[: self.num_pool_decodes] if self.num_apart < len(self.chunks) else order

    def entries(self) -> Iterator[PlannedChunk]:
        """Iterate over all entries in batch order. Valid from the plan's creation until its result is applied."""
        return in_batch_order(self.chunks, self._pool_entries(), self.pool_position, self.running_in_order)

    def computes(self, request: Request) -> bool:
        """Return True if a running request is part of the step; valid until the next step is formed."""
        in_pool = self.pool is not None and request in self.pool
        return in_pool or any(chunk.request is request for chunk in self.chunks)

    def work(self) -> tuple[list[Request], list[int]]:
        """Return the requests and the numbers of query tokens of `entries`, in batch order. Valid as long as `entries`
        is.
        """
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
    """Yield the chunks, with the decodes inserted after the first `position` chunks; with `running_in_order`, yield all
    running entries in order of admission, then the entries admitted in this step.
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
    (simulation): then each entry whose computed tokens have caught up with its known tokens yields one token. `stopped`
    names requests whose token ended them (end of sequence or a stop string), for executors that do not know lengths in
    advance. `failed` names requests whose part of the step failed, with reasons; only they end. `accepted` holds the
    number of drafts that became output, for requests with accepted drafts. With `is_ahead`, the next step is formed
    before tokens and accepted drafts are known: each entry that samples yields one token, however many drafts are
    accepted, and accepted drafts are reported later, through `Replica.verify`.
    """

    tokens: Sequence[tuple[Request, int]] | None = None
    stopped: frozenset[Request] = frozenset()
    failed: Mapping[Request, str] = field(default_factory=dict)
    accepted: Mapping[Request, int] = field(default_factory=dict)
    report: KvReport | None = None
    """Report of a connector's workers; None if there is no report."""
    is_ahead: bool = False


class Executor(Protocol):
    """Source of output lengths, drafts and withheld tokens for one replica, provided by the side that executes its
    plans.
    """

    def known_output_tokens(self, request: Request) -> int | None:
        """Return the number of output tokens after which the request stops, if it is known (simulation, replay); else
        None.
        """

    def num_drafts(self, requests: Sequence[Request], at_most: int) -> Sequence[int]:
        """Return, for each of these decodes, the number of drafts proposed for its next tokens, at most `at_most`;
        called only if `replica.draft` allows drafts.
        """

    def withheld_token(self, request: Request) -> StepResult:
        """Return the token that the last step of a request's prompt sampled and that the step's result left out; needed
        if the request then stays on this replica.

        The result left it out because another replica was to sample it again; see `Replica.withholds_token`.
        """

    def release(self, request: Request) -> None:
        """Drop all data about a request that has ended."""
