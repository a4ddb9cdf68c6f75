"""The plan of the step being formed: its entries, the remaining limits, and the finished plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter

from vajra_py.contract import BatchFeatures
from vajra_py.contract.latency import LatencyModel
from vajra_py.runtime.requests.lifecycle import MOVED
from vajra_py.runtime.requests.request import Request, count_planned
from vajra_py.runtime.requests.running_set import RunningSet
from vajra_py.runtime.step.builder_options import BuilderOptions
from vajra_py.runtime.step.features import GroupFeatures, features_of
from vajra_py.runtime.step.plan import DraftedDecodes, PlannedChunk, PlannedDrafts, StepPlan, in_batch_order

_num_tokens = attrgetter("num_tokens")
_computed_before = attrgetter("num_computed_before")

UNLIMITED = 2**62


class PlanDraft:
    """Work that the builder has granted so far in the step being formed; the object is reused for every step.

    Decodes without drafts are stored as one entry (`bulk`: the whole pool) or one by one (`selected`); all other
    entries are chunks.
    """

    __slots__ = (  # CPython reads the attributes of an object slowly if its `__dict__` has more than 30 entries
        "_drafted",
        "_drafted_before",
        "_features",
        "_group_features",
        "_group_tokens",
        "_longest",
        "_max_slots",
        "_max_tokens",
        "_members",
        "_memory",
        "_num_kv_tokens",
        "_one_group",
        "_options",
        "_pipelined",
        "_replica_id",
        "_reserves_growth",
        "_running_set",
        "_slots_at_start",
        "_swap_bytes",
        "bulk",
        "bulk_position",
        "chunks",
        "drafts",
        "hands_off",
        "notes",
        "now",
        "num_moved",
        "num_preempted_before",
        "num_tokens",
        "preempted",
        "running_in_order",
        "selected",
        "slots_held",
        "slots_left",
        "swap_bytes_due",
        "tokens_left",
    )

    def __init__(
        self, running_set: RunningSet, latency: LatencyModel, replica_id: int, options: BuilderOptions
    ) -> None:
        self._running_set = running_set
        self._memory = running_set.memory
        self._replica_id = replica_id
        self._options = options
        self._group_features = GroupFeatures(running_set.memory, latency)
        limits = running_set.limits
        self._pipelined = limits.pipeline_stages > 1
        self._one_group = running_set.memory.num_groups == 1
        self._reserves_growth = options.reserves_growth and running_set.memory.can_reserve and not self._pipelined
        self._longest = limits.max_model_len
        memory = running_set.memory
        # With sliding windows (`recycles`), the number of blocks does not limit a request's length.
        self._num_kv_tokens = self._longest if memory.recycles else memory.num_blocks * memory.block_size
        self._max_slots = limits.max_batch_size
        self._max_tokens = limits.max_batch_tokens if limits.max_batch_tokens is not None else UNLIMITED
        self.now = 0.0
        self.slots_held = 0
        """Number of slots of requests that ended with the previous step and whose ends an asynchronous scheduler has
        not processed yet.
        """
        self.swap_bytes_due = 0
        """Bytes of blocks swapped during unsuccessful attempts to form a step; they count in the next step."""
        self.num_preempted_before = 0
        """Number of requests that were preempted in earlier, unsuccessful attempts to form this step."""
        self.chunks: dict[Request, PlannedChunk] = {}
        self.drafts: dict[Request, PlannedDrafts] = {}
        """Drafts of the decodes in the batch, if decodes have drafts; these decodes are among `chunks`."""
        self._drafted: DraftedDecodes | None = None
        """The whole batch as columns; None: the batch is in the other fields."""
        self._drafted_before: DraftedDecodes | None = None
        """The whole batch of the previous step, if it was stored as columns."""
        self.selected: dict[Request, None] = {}
        """Decodes added one by one, in order."""
        # Contents and remaining limits of the batch: attributes rather than properties, since policies read them for
        # every chunk.
        self.slots_left = 0
        """Number of further requests that the batch may hold."""
        self.tokens_left = 0
        """Remaining token budget of the step."""
        self.num_tokens = 0
        """Number of query tokens in the batch so far."""
        self.preempted: list[tuple[Request, str]] = []
        self.num_moved = 0
        """Number of chunks of requests that arrived with their KV and begin to run in this step."""
        self.hands_off = False
        """True if a request was handed off while this step was formed."""
        self.notes: dict[str, dict[str, float | int | str]] = {}
        self._group_tokens: dict[int, int] = {}
        self._empty(0.0)

    def keep_notes(self, *, on: bool) -> None:
        """Start or stop keeping policies' notes."""
        self._options.keep_notes = on

    def begin_attempts(self) -> None:
        """Begin the attempts to form the next step; no request was preempted in them yet."""
        self.num_preempted_before = 0

    def count_preempted(self, num_requests: int) -> None:
        """Count requests that were preempted in an unsuccessful attempt to form this step."""
        self.num_preempted_before += num_requests

    def hold_slots(self, num_requests: int) -> None:
        """Withhold the slots of `num_requests` ended requests from the next step, because an asynchronous scheduler
        processes their ends later.
        """
        self.slots_held = num_requests

    def _drop_dues(self) -> None:
        self.swap_bytes_due = 0
        self.slots_held = 0

    def _empty(self, now: float) -> None:
        """Begin a new plan."""
        self.now = now
        self.bulk = False
        self.bulk_position = 0
        self.running_in_order = False
        self._members = self._running_set.pool.members
        self.slots_left = self._slots_at_start = self._max_slots - self.slots_held
        self.tokens_left = self._max_tokens
        self.num_tokens = 0
        self._swap_bytes = self.swap_bytes_due
        self.num_moved = 0
        self._features: list[BatchFeatures] | None = None
        self._drafted_before, self._drafted = self._drafted, None
        if self.chunks:
            self.chunks.clear()
        if self.drafts:
            self.drafts = {}
        if self._group_tokens:
            self._group_tokens.clear()
        if self.selected:
            self.selected.clear()
        if self.preempted:
            self.preempted.clear()
        self.hands_off = False
        if self.notes:
            self.notes = {}

    # Contents of the batch

    def _spread(self) -> None:
        """Move the batch from columns to `chunks` and `drafts`, because an entry is added, removed or looked up."""
        drafted, self._drafted = self._drafted, None
        if drafted is not None:
            self.chunks.update(zip(drafted.requests, drafted, strict=True))
            self.drafts = dict(drafted.drafts)

    @property
    def num_decodes(self) -> int:
        """Number of decodes in the batch."""
        num_drafted = len(self.drafts) if self._drafted is None else len(self._drafted)
        return len(self._members if self.bulk else self.selected) + num_drafted

    @property
    def num_requests(self) -> int:
        """Number of requests in the batch so far."""
        return self._slots_at_start - self.slots_left

    @property
    def free_blocks(self) -> int:
        """Number of free KV blocks now."""
        return self._memory.free_blocks

    @property
    def num_preempted(self) -> int:
        """Number of requests preempted in this step so far."""
        return len(self.preempted)

    def __contains__(self, request: object) -> bool:
        if self._drafted is not None:
            self._spread()
        return request in self.chunks or request in (self._members if self.bulk else self.selected)

    def features(self) -> BatchFeatures:
        """Return the features of the batch so far; with KV parallelism, those of its slowest group."""
        features = self._features or self._sum_features()
        return features[0] if self._one_group else self._group_features.slowest(features)

    def _sum_features(self) -> list[BatchFeatures]:
        """Return the features of the batch by KV-parallel group; from now on, each further chunk updates them."""
        self._spread()
        pool = self._running_set.pool
        is_pool = self.bulk or (bool(self.selected) and self._has_selected_the_pool())
        decodes = pool.members if is_pool else self.selected
        if self._one_group:
            context = 0
            if decodes:
                context = pool.context_tokens if is_pool else sum(one.num_computed_tokens for one in decodes)
            if self.chunks or self._swap_bytes:
                chunks: Collection[PlannedChunk] = self.chunks.values()
                num_decodes = len(decodes)
                if self.num_moved:  # the first token of a request that arrived with its KV counts as a decode
                    others = []
                    for one in chunks:
                        if one.kind == MOVED and one.num_tokens == 1:
                            num_decodes += 1
                            context += one.num_computed_before
                        else:
                            others.append(one)
                    chunks = others
                num_drafts = 0
                if self.drafts:
                    decoding, others = list(chunks), []
                    if len(decoding) > len(self.drafts):
                        decoding = [one for one in chunks if one.request in self.drafts]
                        others = [one for one in chunks if one.request not in self.drafts]
                    num_decodes += len(decoding)
                    context += sum(map(_computed_before, decoding))
                    num_drafts = sum(map(_num_tokens, decoding)) - len(decoding)
                    chunks = others
                features = [features_of(chunks, num_decodes, context, self._swap_bytes)]
                if num_drafts:
                    features = [features[0].with_drafts(num_drafts)]
            else:
                features = [BatchFeatures(len(decodes), context)]
        else:
            features = self._group_features.of(self.chunks.values(), decodes, self._swap_bytes)
        self._features = features
        return features

    def _has_selected_the_pool(self) -> bool:
        """Return True if the decodes added one by one are the whole pool."""
        running_set = self._running_set
        return not running_set.skipped and len(self.selected) == len(running_set.pool.members)

    # Adding and removing entries

    def _put_chunk(self, request: Request, num_tokens: int, computed: int, kind: str) -> None:
        self.chunks[request] = PlannedChunk(request, num_tokens, computed, kind)
        self.slots_left -= 1
        self.tokens_left -= num_tokens
        self.num_tokens += num_tokens
        if kind == MOVED:
            self.num_moved += 1
            self._features = None
        elif self._features is not None:
            self._features = self._group_features.with_chunk(self._features, request, num_tokens, computed)
        if not self._one_group:
            self._count_in_groups(request, num_tokens, computed)
        if request.hashes is not None and self._options.cache_at_schedule:
            self._memory.cache_blocks(request, computed + num_tokens)

    def _put_padded(self, request: Request, drafts: PlannedDrafts, computed: int, kind: str) -> None:
        """Add an admitted request that is padded with draft positions."""
        num_tokens = 1 + drafts.num_tokens
        self.chunks[request] = PlannedChunk(request, num_tokens, computed, kind)
        self.drafts[request] = drafts
        self.slots_left -= 1
        self.tokens_left -= num_tokens
        self.num_tokens += num_tokens
        if self._features is not None:
            self._features = [self._features[0].with_decodes(1, computed).with_drafts(drafts.num_tokens)]
        if request.hashes is not None and self._options.cache_at_schedule:
            self._memory.cache_blocks(request, computed + 1)

    def _put_decode(self, request: Request) -> None:
        if self.bulk:
            self._running_set.unskip(request)
        else:
            if not self.selected:
                self.bulk_position = len(self.chunks)
            self.selected[request] = None
        self.slots_left -= 1
        self.tokens_left -= 1
        self.num_tokens += 1
        self._features = None

    def _take_out(self, request: Request) -> None:
        num_tokens = 1
        if request in self.chunks:
            if list(self.chunks).index(request) < self.bulk_position:
                self.bulk_position -= 1
            num_tokens = self.chunks.pop(request).num_tokens
            self.drafts.pop(request, None)
            if not self._one_group:
                self._group_tokens.clear()
                for kept in self.chunks.values():
                    self._count_in_groups(kept.request, kept.num_tokens, kept.num_computed_before)
        elif not self.bulk:
            del self.selected[request]
        self.slots_left += 1
        self.tokens_left += num_tokens
        self.num_tokens -= num_tokens
        self._features = None

    def _add_swap(self, num_blocks: int) -> None:
        """Count blocks that are swapped between device and host before the step."""
        self._swap_bytes += num_blocks * self._running_set.limits.bytes_per_block
        self._features = None

    def _count_in_groups(self, request: Request, num_tokens: int, computed: int) -> None:
        for group in self._memory.active_groups(request, computed):
            self._group_tokens[group] = self._group_tokens.get(group, 0) + num_tokens

    # The finished plan

    def plan(self, step_index: int, formed_at: int) -> StepPlan | None:
        """Return the plan, None if the policy did nothing; the plan's tokens count as computed from now on."""
        runs_something = self.slots_left < self._slots_at_start
        if not runs_something and not self.preempted and not self.hands_off:
            return None
        running_set, memory = self._running_set, self._memory
        pool = running_set.pool
        features = self.features()
        chunks, drafts = self._take_chunks()
        if self.selected and not self.bulk and not self._has_selected_the_pool():
            self._park_all_but_selected()
        num_pool_decodes = len(pool.members) if self.bulk or self.selected else 0
        admissions = None
        if self._pipelined:
            chunks, num_pool_decodes = self._detached(num_pool_decodes), 0
            admissions = {chunk.request: chunk.request.admitted_index for chunk in chunks}
        elif num_pool_decodes:
            pool.commit()
        # If a step only preempts, blocks that it swaps are copied by the next step that runs something.
        self.swap_bytes_due = 0 if runs_something else self._swap_bytes
        return StepPlan(
            step_index,
            self._replica_id,
            formed_at,
            features,
            chunks,
            pool if num_pool_decodes else None,
            num_pool_decodes,
            memory.free_blocks,
            running_set.num_waiting,
            running_set.num_running,
            self.bulk_position,
            self.running_in_order and not self._pipelined,
            tuple(self.preempted),
            self.num_preempted_before,
            admissions,
            memory.take_copies() if runs_something else (),
            self.notes or {},
            drafts,
            len(chunks),
        )

    def _take_chunks(self) -> tuple[Sequence[PlannedChunk], Mapping[Request, PlannedDrafts]]:
        """Return the chunks and their drafts. The chunks' tokens count as computed from now on, except for drafts,
        which count when they are accepted.
        """
        drafted = self._drafted
        if drafted is not None:
            count_planned(drafted.requests)
            return drafted, drafted.drafts
        chunks, drafts = tuple(self.chunks.values()), self.drafts
        is_all_drafted = len(drafts) == len(chunks)
        for request, num_tokens, computed, _ in chunks:
            request.set_computed(computed + (1 if is_all_drafted or request in drafts else num_tokens))
        return chunks, drafts

    def repeat(self, plan: StepPlan, num_steps: int, formed_at: int, num_waiting: int) -> None:
        """Turn a plan of pool decodes, whose step has ended, into the plan of the step `num_steps` later, and allocate
        the blocks of these steps. The caller must be certain that the policy would have formed the same steps.
        """
        if plan.chunks:
            plan.num_pool_decodes += len(plan.chunks)
            plan.chunks, plan.pool_position = (), 0
        pool, num_decodes = plan.pool, plan.num_pool_decodes
        assert pool is not None
        num_blocks = pool.growth(num_steps)
        if num_blocks:
            self._memory.reserve_blocks(num_blocks)
        plan.step_index += num_steps
        plan.formed_at = formed_at
        plan.features = BatchFeatures(num_decodes, plan.features.decode_context_tokens + num_steps * num_decodes)
        plan.free_blocks = self._memory.free_blocks
        plan.num_waiting = num_waiting
        plan.copies = ()

    def _park_all_but_selected(self) -> None:
        running_set, selected = self._running_set, self.selected
        for request in [one for one in running_set.pool if one not in selected]:
            running_set.skip(request)
        for request in [one for one in running_set.skipped if one in selected]:
            running_set.unskip(request)

    def _detached(self, num_pool_decodes: int) -> tuple[PlannedChunk, ...]:
        """Give every entry its own counters until the step completes, because several steps may be in flight; return
        the entries.
        """
        running_set = self._running_set
        decodes = []
        if num_pool_decodes:
            for request in list(running_set.pool.in_admission_order()):
                computed = request.num_computed_tokens
                request.end_epoch = running_set.pool.leave(request)
                request.set_computed(computed + 1)
                running_set.partial[request] = None
                decodes.append(PlannedChunk(request, 1, computed, "running"))
        entries = tuple(in_batch_order(tuple(self.chunks.values()), decodes, self.bulk_position, self.running_in_order))
        for entry in entries:
            del running_set.partial[entry.request]
            running_set.in_flight[entry.request] = None
            entry.request.in_flight = True
        return entries
