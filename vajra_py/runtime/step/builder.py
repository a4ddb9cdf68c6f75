"""Batch builder: the only writer of a step's plan; grants operations that fit and refuses the others with a reason.

If a step runs every decode of the pool, the plan has a single bulk entry for these decodes. The builder's work for this
entry depends only on the number of decodes that need a block now.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from math import isfinite
from numbers import Integral
from typing import Any, Protocol, cast

from vajra_py.contract import BatchFeatures, DecodeStop, PreemptionMode, Refusal, RequestView
from vajra_py.contract.facts import is_number
from vajra_py.contract.latency import LatencyModel
from vajra_py.contract.observer import EndReason
from vajra_py.runtime.requests.adapters import Adapters
from vajra_py.runtime.requests.connector import ConnectedKv
from vajra_py.runtime.requests.decode_pool import by_admission
from vajra_py.runtime.requests.lifecycle import Lifecycle
from vajra_py.runtime.requests.pinning import checked_seconds
from vajra_py.runtime.requests.request import Request, RequestState, num_computed_of
from vajra_py.runtime.requests.running_set import RunningSet
from vajra_py.runtime.step.builder_options import BuilderOptions, IllegalPlan
from vajra_py.runtime.step.plan import DraftedDecodes, Executor, PlannedDrafts, StepPlan, new_chunk
from vajra_py.runtime.step.plan_draft import PlanDraft

# Module constants, because in Python 3.11 the lookup of an enum member costs more than a function call; these members
# are needed for every chunk.
_RUNNING, _SWAPPED, _ENDED = RequestState.RUNNING, RequestState.SWAPPED, RequestState.ENDED
_REMOTE = RequestState.REMOTE
_LOADING = RequestState.LOADING
_WITH_KV = frozenset({_SWAPPED, _REMOTE, RequestState.ARRIVED, RequestState.LOADED})
"""States of waiting requests some of whose tokens are computed."""


_NO_DRAFTS = PlannedDrafts(-1, -1)


class FindsInTiers(Protocol):
    """Prefix lookup in the memory tiers of one replica, for its waiting requests."""

    def num_to_load(self, request: Request, num_on_device: int) -> int | None:
        """Return the number of tokens, in whole blocks, to load after those that the device holds; None if the request
        waits for a prefetch.
        """

    def load(self, request: Request, num_on_device: int, num_tokens: int) -> None:
        """Begin to load the KV of `num_tokens` tokens, after those on the device, into the blocks that are about to be
        allocated to the request.
        """


class SwapsBesideSteps(Protocol):
    """Copies the KV of swapped requests while steps run."""

    def is_leaving(self, request: Request) -> bool:
        """Return True if a request's KV is still being copied to the host."""

    def leave(self, request: Request, num_blocks: int) -> None:
        """Begin to copy a request's KV to the request's blocks in host memory."""

    def come_back(self, request: Request, num_blocks: int) -> None:
        """Begin to copy a request's KV to the request's blocks on the device."""


class Builder(PlanDraft):
    """The `BatchBuilder` of one replica, and the only writer of its plans."""

    __slots__ = (
        "_asked_drafts",
        "_cached_tokens",
        "_caches_decodes",
        "_connected",
        "_draft_rules",
        "_executor",
        "_growing",
        "_keeps",
        "_latency",
        "_lifecycle",
        "_looked_at",
        "_most_advance",
        "_most_held",
        "_order",
        "_order_of_decodes",
        "_order_position",
        "_recycles",
        "_returned",
        "_swaps",
        "_tiers",
        "_to_cache",
        "dropped",
        "handed_off",
        "idle_at",
        "loads",
        "policy_name",
        "refusals",
    )

    def __init__(
        self, running_set: RunningSet, latency: LatencyModel, lifecycle: Lifecycle, options: BuilderOptions
    ) -> None:
        super().__init__(running_set, latency, lifecycle.replica_id, options)
        self._latency = latency
        self._lifecycle = lifecycle
        self.policy_name = ""
        """Name of the policy, with which the reasons of dropped requests begin."""
        self.dropped: list[tuple[Request, EndReason]] = []
        """Requests that the policy has dropped and `take_dropped` has not returned yet."""
        self.idle_at: float | None = None
        """Time in seconds until which the policy leaves the replica idle on purpose; None if it does not."""
        self.loads: list[tuple[Request, int]] = []
        """Requests that got blocks for KV from another replica, each with its number of tokens in the cache here."""
        self.handed_off: list[Request] = []
        """Requests that the policy hands off and whose hand-off has not begun yet."""
        self._keeps: Callable[[Request], Refusal | None] | None = None
        """Function that returns why a request may not be handed off (None: it may); None: no request may."""
        self._cached_tokens: Callable[[Request], int] = self._memory.cached_tokens
        """Function that returns the number of leading tokens that a waiting request without KV need not compute."""
        self._connected: ConnectedKv | None = None
        """KV that a connector can load for waiting requests; None without a connector."""
        self._tiers: FindsInTiers | None = None
        """Lookup in lower memory tiers for waiting requests; None without tiers."""
        self._swaps: SwapsBesideSteps | None = None
        """Copies the KV of swapped requests while steps run; None: their KV is copied before the step."""
        self._returned: set[Request] = set()
        """Requests that this step admitted after they were swapped in; this step cannot preempt them, so that requests
        do not swap each other out forever.
        """
        self.refusals: dict[Request, Refusal] = {}
        """Reason of the last refusal of each request in this step; reported if the step stays empty."""
        self._order: list[Request] | None = None
        """Requests in the order in which `add_decodes` or `add_running` adds them; None if neither is in progress."""
        self._order_of_decodes = False
        self._order_position = 0
        self._to_cache: list[Request] = []
        """Decodes of the pool whose filled blocks are to be cached, latest admitted first."""
        self._looked_at: list[Request] = []
        self._growing: Collection[Request] = ()
        """Pool members that need a block in this step; with recycled blocks, those that take, fill or free a block in
        this step. Set when the first member is added individually.
        """
        self._caches_decodes = False
        """True if blocks that pool members fill are cached when these members are added individually."""
        self._recycles = running_set.memory.recycles
        """See `KvMemory.recycles`."""

        self._most_held = min(self._longest - 1, self._num_kv_tokens)
        """Maximum length of a request with its drafts, in tokens: one less than the maximum model length, so that the
        step can add a token, and at most what the memory holds for a single request.
        """
        self._draft_rules = rules = options.drafts
        self._most_advance = running_set.memory.block_size if self._recycles or rules is None else rules.max_tokens + 2
        """Upper bound on the tokens by which a decode with drafts advances from one of its steps to the next. A decode
        with at least this many tokens in its last block has all earlier blocks cached already. If blocks are recycled,
        the bound is the block size, so every decode is treated as if it had filled a block.
        """
        self._executor: Executor | None = None
        """Source of drafts; None: decodes have none."""
        self._asked_drafts: dict[Request, int] = {}
        """Number of drafts that the policy set for each decode in this step."""

    def use_drafts(self, executor: Executor) -> None:
        """From now on, add drafts to decodes; the executor proposes the drafts, and the options hold the rules for
        them.
        """
        self._executor = executor

    def bind_policy(self, name: str) -> None:
        """Name this policy in the reasons of dropped requests from now on."""
        self.policy_name = name

    def reset(self) -> None:
        """Drop the state left by earlier steps (swapped bytes, held slots, dropped, loading, handed-off and looked-up
        requests), because the replica is empty.
        """
        self._drop_dues()
        self._looked_at.clear()
        self.dropped, self.loads, self.handed_off = [], [], []

    def take_dropped(self) -> list[tuple[Request, EndReason]]:
        """Return the requests that the policy has dropped since the last call."""
        dropped, self.dropped = self.dropped, []
        return dropped

    def let_hand_off(self, keeps: Callable[[Request], Refusal | None]) -> None:
        """Allow policies to hand off requests for which `keeps` returns None; else it returns the refusal."""
        self._keeps = keeps

    def use_tiers(self, tiers: FindsInTiers) -> None:
        """From now on, look up prefixes of waiting requests in lower memory tiers as well."""
        self._tiers = tiers

    def use_connector(self, connected: ConnectedKv) -> None:
        """From now on, load KV for waiting requests through a connector."""
        self._connected = connected
        self._cached_tokens = connected.cached_tokens

    def swap_beside_steps(self, swaps: SwapsBesideSteps) -> None:
        """From now on, copy swapped requests while steps run."""
        self._swaps = swaps

    def take_handed_off(self) -> list[Request]:
        """Return the requests that the policy has handed off since the last call."""
        handed_off, self.handed_off = self.handed_off, []
        return handed_off

    def take_loads(self) -> list[tuple[Request, int]]:
        """Return the requests that got blocks for KV from another replica since the last call; see `loads`."""
        loads, self.loads = self.loads, []
        return loads

    def start(self, now: float) -> None:
        """Begin the plan of a new step."""
        memory = self._memory
        if memory.may_expire and memory.next_due <= now:
            self._lifecycle.pinning.settle(now)
        self._empty(now)
        if self._connected is not None:
            self._connected.start_step()
        self._order = None
        self.idle_at = None
        if self.refusals:
            self.refusals.clear()
        if self._to_cache:
            self._to_cache = []
        if self._asked_drafts:
            self._asked_drafts.clear()
        if self._returned:
            self._returned.clear()

    def finish(self, step_index: int, formed_at: int) -> StepPlan | None:
        """Return the plan; None if the policy did nothing at all."""
        plan = self.plan(step_index, formed_at)
        if self._looked_at:
            self._forget_looked_at()
        return plan

    # Adding

    def add(self, request: RequestView, num_tokens: int, *, reserve_tokens: int | None = None) -> Refusal | None:
        """Compute the next `num_tokens` of the request in this step; see `BatchBuilder.add`."""
        own: Request = request  # type: ignore[assignment]  # `cast` would cost as much as the rest
        if self._drafted is not None:
            self._spread()
        if num_tokens == 1 and not self.bulk and own in self._members:
            return self._add_decode(own, reserve_tokens)
        if own.state is _ENDED or own.replica_id != self._replica_id:
            self._own(request)
        if type(num_tokens) is not int:
            num_tokens = _whole(own, num_tokens, "add {!r} tokens")
        if num_tokens < 1:
            raise IllegalPlan(own, f"cannot add {num_tokens} tokens. A chunk has at least 1")
        if own in self.chunks or own in (self._members if self.bulk else self.selected):
            return self._refuse(own, Refusal.ALREADY_SCHEDULED)
        if own.in_flight:
            return self._refuse(own, Refusal.IN_FLIGHT)
        if self.slots_left <= 0:
            return self._refuse(own, Refusal.BATCH_FULL)
        if num_tokens > self.tokens_left:
            return self._refuse(own, Refusal.TOKEN_BUDGET)
        if own.state is not _RUNNING:
            return self._admit(own, num_tokens, reserve_tokens)
        computed, num_left = own.num_computed_tokens, own.num_remaining_tokens
        if num_tokens > num_left or not self._one_group:
            self._check_chunk(own, num_tokens, computed, computed + num_left)
        if num_tokens == 1 and own.is_decode:
            if self._executor is not None:
                refusal = self._add_drafted((own,), 0, reserve_tokens)[1]
                is_passed_over = refusal is None and own not in self
                return self._refuse(own, Refusal.IN_FLIGHT) if is_passed_over else refusal
            if not self._grow_decode(own, reserve_tokens):
                return self._refuse(own, Refusal.KV_BLOCKS)
            self._put_decode(own)
            return None
        to_hold = self._with_lookahead(computed + num_tokens)
        if reserve_tokens is not None and reserve_tokens > to_hold:
            to_hold = reserve_tokens
        if not self._memory.grow(own, to_hold):
            return self._refuse(own, Refusal.KV_BLOCKS)
        if to_hold > computed + num_left:
            self._running_set.has_spare_blocks = True
        self._put_chunk(own, num_tokens, computed, "running")
        return None

    def _add_decode(self, request: Request, reserve_tokens: int | None) -> Refusal | None:
        """Add a pool member with its one token, as `add` does; for policies that add members one by one."""
        selected = self.selected
        if request in selected:
            return self._refuse(request, Refusal.ALREADY_SCHEDULED)
        if self.slots_left <= 0:
            return self._refuse(request, Refusal.BATCH_FULL)
        if self.tokens_left < 1:
            return self._refuse(request, Refusal.TOKEN_BUDGET)
        if not selected:
            pool = self._running_set.pool
            self._growing = self._changing() if self._recycles else pool.needing_blocks()
            # `num_public` does not count requests with private output (`is_private_after_prompt`): `KvMemory.free`
            # caches their blocks, which need not be cached in each step.
            self._caches_decodes = pool.num_public > 0 and self._options.cache_at_schedule and not self._recycles
        needs_room = request in self._growing or self._caches_decodes
        if (needs_room or reserve_tokens is not None) and not self._grow_decode(request, reserve_tokens):
            return self._refuse(request, Refusal.KV_BLOCKS)
        if not selected:
            self.bulk_position = len(self.chunks)
        selected[request] = None
        self.slots_left -= 1
        self.tokens_left -= 1
        self.num_tokens += 1
        self._features = None
        return None

    def _add_drafted(
        self, order: Sequence[Request], position: int = 0, reserve_tokens: int | None = None
    ) -> tuple[int, Refusal | None]:
        """Add the decodes of `order` from `position` on, with their drafts, up to the first request that does not fit
        or is not a decode.

        Returns the position of that request and, if the request lacks blocks, the refusal. A decode whose last drafts
        are not verified yet is passed over if it would reach the model's maximum length with all of them accepted.
        """
        self._spread()
        if not position and reserve_tokens is None and not self.chunks and self._add_all_drafted(order):
            return len(order), None
        memory, chunks, planned, asked = self._memory, self.chunks, self.drafts, self._asked_drafts
        num_held, size, recycles = memory.num_held_blocks, memory.block_size, self._recycles
        caches, looks_ahead = self._options.cache_at_schedule, self._with_lookahead(1) > 1
        find_drafts, tokens_left, refusal = self._num_drafts, self.tokens_left, None
        unverified, num_open, num_known = self._running_set.unverified, 0, 1
        end = min(len(order), position + self.slots_left)
        start, others, drafts = position, chunks.copy(), _NO_DRAFTS
        while position < end:
            request = order[position]
            if not request.is_skipped or tokens_left <= 0 or (others and request in others):
                break
            computed = request.num_computed_tokens
            if unverified:
                before = unverified.get(request)
                num_open, num_known = (0, 1) if before is None else (before.num_drafts, 0)
                if before is not None and computed + num_open + 1 >= self._longest:
                    position, start, end = position + 1, start + 1, min(len(order), end + 1)
                    continue
            num_drafts = find_drafts(request, computed + num_open + 1, tokens_left)
            to_keep = computed + num_open + 1
            to_hold = to_keep + num_drafts
            if looks_ahead:
                to_hold = self._with_lookahead(to_hold)
            if reserve_tokens is not None and reserve_tokens > to_keep:
                to_keep, to_hold = reserve_tokens, max(to_hold, reserve_tokens)
            kept = num_held(request)
            if to_hold > kept * size or recycles:
                if not memory.grow(request, to_hold):
                    # The next attempt uses the same number of drafts, even if a preemption has returned tokens to the
                    # step's budget by then.
                    asked[request] = num_drafts
                    refusal = self._refuse(request, Refusal.KV_BLOCKS)
                    break
                kept = max(kept, memory.blocks_for(to_keep))
            chunks[request] = new_chunk((request, 1 + num_drafts, computed, "running"))
            if drafts.num_tokens != num_drafts or drafts.num_kept_blocks != kept or drafts.num_unverified != num_open:
                drafts = PlannedDrafts(num_drafts, kept, num_unverified=num_open)
            planned[request] = drafts
            tokens_left -= 1 + num_drafts
            if self._features is not None:
                self._features = [self._features[0].with_decodes(1, computed).with_drafts(num_drafts)]
            # `num_known` is 0 if the newest token is not known yet: a block that this token fills has no hash yet.
            if caches and (computed + num_known) % size < self._most_advance and request.hashes is not None:
                memory.cache_blocks(request, computed + num_known)
            position += 1
        self.num_tokens += self.tokens_left - tokens_left
        self.tokens_left = tokens_left
        self.slots_left -= position - start
        return position, refusal

    @property
    def _takes_columns(self) -> bool:
        """True if it is possible to add all decodes with drafts at once."""
        rules = self._draft_rules
        may_be_any = rules is not None and rules.num_tokens > 0 and rules.past_max_tokens
        return may_be_any and self._memory.can_reserve and not self._pipelined

    def _add_all_drafted(self, order: Sequence[Request]) -> bool:
        """Add every decode with its drafts, as `_add_drafted` would, if nothing else runs and all decodes fit.

        Otherwise returns False and changes nothing. The method works on columns, because it dominates the cost of such
        a step.
        """
        running_set, rules, executor = self._running_set, self._draft_rules, self._executor
        skipped, unverified = running_set.skipped, running_set.unverified
        if not self._takes_columns or len(order) != len(skipped) or running_set.partial or running_set.pool.members:
            return False
        assert rules is not None
        assert executor is not None
        most, lookahead = rules.num_tokens, rules.lookahead_tokens
        if self._asked_drafts or self._swap_bytes or self.slots_left < len(order):
            return False
        if self.tokens_left < len(order) * (1 + most) or (unverified and unverified.keys() != skipped.keys()):
            return False
        computed = num_computed_of(order)
        num_open = [unverified[one].num_drafts for one in order] if unverified else [0] * len(order)
        num_drafts = executor.num_drafts(order, most)
        to_keep = [done + count + 1 for done, count in zip(computed, num_open, strict=True)]
        to_hold = [kept + count + lookahead for kept, count in zip(to_keep, num_drafts, strict=True)]
        if max(to_keep) + most + lookahead > self._most_held:
            return False
        # With unverified drafts, cache only the first `computed` tokens: the newest token is not known yet either.
        found = self._hold_all(order, to_keep, to_hold, computed if unverified else to_keep)
        if found is None:
            return False
        kept, held = found
        self._drafted = DraftedDecodes(order, computed, num_drafts, kept, num_open, held)
        num_tokens = len(order) + sum(num_drafts)
        self.num_tokens += num_tokens
        self.tokens_left -= num_tokens
        self.slots_left -= len(order)
        self._features = [BatchFeatures(len(order), sum(computed)).with_drafts(sum(num_drafts))]
        return True

    def _hold_all(
        self, order: Sequence[Request], to_keep: Sequence[int], to_hold: Sequence[int], known: Sequence[int]
    ) -> tuple[list[int], list[int]] | None:
        """Allocate blocks for these decodes, and cache the blocks that they fill; return None and change nothing if
        they need more blocks than may be taken in bulk (`KvMemory.repeat_headroom`).

        Returns, for each decode, the number of blocks kept if every draft is rejected, and the number held during the
        step.
        """
        memory, size, last, rules = self._memory, self._memory.block_size, self._drafted_before, self._draft_rules
        if last is not None and last.requests != order:
            last = None
        if last is not None and rules is not None and rules.keeps_blocks:
            held = last.num_held_blocks
        else:
            held = list(map(memory.num_held_blocks, order))
        growing = [place for place, (end, before) in enumerate(zip(to_hold, held, strict=True)) if end > before * size]
        ends = [-(-to_hold[place] // size) for place in growing]
        num_new = sum(ends) - sum(held[place] for place in growing)
        # Too few blocks are free, or cached blocks must be evicted. The decodes are then added one by one, so that the
        # evictions for each decode are reported before its newly cached blocks.
        if num_new > memory.repeat_headroom:
            return None
        if num_new == len(growing):
            memory.grow_each([order[place] for place in growing])
        else:
            for place in growing:
                memory.grow(order[place], to_hold[place])
        kept, held = list(held), list(held)
        for place, end in zip(growing, ends, strict=True):
            kept[place] = max(held[place], -(-to_keep[place] // size))
            held[place] = end
        if self._options.cache_at_schedule:
            if self._running_set.unverified:  # `Replica.verify` cached all blocks except those that newest tokens fill
                filled = [place for place, count in enumerate(known) if not count % size]
            elif last is not None:  # the last step has cached all full blocks up to its own first token
                before = last.num_computed
                filled = [
                    p for p, (new, old) in enumerate(zip(known, before, strict=True)) if new // size > (old + 1) // size
                ]
            else:
                filled = [place for place, count in enumerate(known) if count % size < self._most_advance]
            memory.cache_each([order[place] for place in filled], [known[place] for place in filled])
        return kept, held

    def _num_drafts(self, request: Request, known: int, tokens_left: int) -> int:
        """Return the number of drafts that a decode gets after its first `known` tokens, within its limits. The drafts
        and the decode's own token together take at most `tokens_left` tokens.
        """
        rules, executor, asked = self._draft_rules, self._executor, self._asked_drafts
        assert rules is not None
        assert executor is not None
        most = asked.get(request, rules.num_tokens) if asked else rules.num_tokens
        if most >= tokens_left:
            most = tokens_left - 1
        if most > self._most_held - known:
            most = self._most_held - known
        if not rules.past_max_tokens:
            most = min(most, request.max_tokens - request.num_output_tokens - 1)
        return executor.num_drafts((request,), most)[0] if most > 0 else 0

    def _with_lookahead(self, num_tokens: int) -> int:
        """Return the number of tokens for which a request needs blocks, lookahead of drafts included, to compute its
        first `num_tokens` tokens.
        """
        rules = self._draft_rules
        if rules is None or not rules.lookahead_tokens:
            return num_tokens
        return max(num_tokens, min(num_tokens + rules.lookahead_tokens, self._longest, self._num_kv_tokens))

    def _num_padding(self, request: Request, num_tokens: int, done: int) -> int:
        """Return the number of draft positions with which a request that is admitted now is padded."""
        rules, known = self._draft_rules, request.num_known_tokens
        if rules is None or not rules.pads_admitted or num_tokens != 1 or known - done != 1:
            return 0
        if self._connected is not None and self._connected.loads_beside_steps(request):
            return 0
        running = [chunk.request for chunk in self.chunks.values() if chunk.kind == "running"]
        has_room = known + rules.num_tokens < self._longest
        # With more padding than a step's token budget allows, the request would wait forever.
        has_room = has_room and rules.num_tokens < self._max_tokens
        is_uniform = bool(running or done) and all(request in self.drafts for request in running)
        return rules.num_tokens if has_room and is_uniform else 0

    def draft(self, request: RequestView, num_tokens: int) -> Refusal | None:
        """Set the drafts of a decode in this step; see `BatchBuilder.draft`."""
        own, rules = self._own(request), self._draft_rules
        if rules is None or self._executor is None:
            return self._refuse(own, Refusal.NO_DRAFTS)
        num_tokens = _whole(own, num_tokens, "verify {!r} drafts")
        if not 0 <= num_tokens <= rules.max_tokens:
            raise IllegalPlan(own, f"cannot verify {num_tokens} drafts. Allowed: 0 to {rules.max_tokens}")
        if own in self:
            return self._refuse(own, Refusal.ALREADY_SCHEDULED)
        self._asked_drafts[own] = num_tokens
        return None

    def _refuse(self, request: Request, refusal: Refusal) -> Refusal:
        self.refusals[request] = refusal
        return refusal

    def _check_chunk(self, request: Request, num_tokens: int, done: int, known: int) -> None:
        limit = known - done
        if not self._one_group:
            limit = self._memory.max_chunk(request, done, limit)
        if num_tokens > limit:
            raise IllegalPlan(request, f"cannot add {num_tokens} tokens. Its next chunk may have at most {limit}")

    def _admit(self, request: Request, num_tokens: int, reserve_tokens: int | None) -> Refusal | None:
        running_set, memory, num_loaded = self._running_set, self._memory, 0
        if self.preempted and any(request is victim for victim, _ in self.preempted):
            return self._refuse(request, Refusal.JUST_PREEMPTED)
        if (running_set.barred or not running_set.admits) and not running_set.lets_in(request):
            return self._refuse(request, Refusal.NOT_ADMITTED)
        if running_set.adapters is not None and (refusal := self._adapter_refusal(running_set.adapters, request)):
            return self._refuse(request, refusal)
        state = request.state
        if state is _LOADING:
            return self._refuse(request, Refusal.LOADING)
        done = request.num_computed_tokens if state in _WITH_KV else self._cached_tokens(request)
        known = request.num_known_tokens
        if num_tokens > known - done or not self._one_group:
            self._check_chunk(request, num_tokens, done, known)
        num_padding = self._num_padding(request, num_tokens, done)
        if num_tokens + num_padding > self.tokens_left:
            return self._refuse(request, Refusal.TOKEN_BUDGET)
        to_hold = self._to_hold(done + num_tokens + num_padding, known, reserve_tokens)
        watermark = self._options.watermark_blocks if running_set.num_running else 0
        if watermark and memory.blocks_needed(request, to_hold) + watermark > memory.free_blocks:
            return self._refuse(request, Refusal.WATERMARK)
        busy = self._busy_groups() if self._group_tokens else frozenset()
        if state not in _WITH_KV:
            if (
                self._tiers is not None
                and (refusal := self._from_tiers(self._tiers, request, done, to_hold)) is not None
            ):
                return self._refuse(request, refusal)
            if self._connected is not None and (began := self._connected.begin_load(request, self.now)) is not None:
                return self._refuse(request, Refusal.LOADING if began else Refusal.KV_BLOCKS)
            hit = memory.allocate(request, to_hold, busy)
            if hit is None:
                return self._refuse(request, Refusal.GROUP_BUSY if busy else Refusal.KV_BLOCKS)
            num_loaded = 0 if self._connected is None else done - hit
            done = hit + num_loaded
            request.set_computed(done)
        elif state is _SWAPPED:
            if self._swaps is not None:
                return self._refuse(request, self._swap_in(self._swaps, request, to_hold))
            copies = memory.swap_in(request, to_hold)
            if copies is None:
                return self._refuse(request, Refusal.KV_BLOCKS)
            self._add_swap(copies)
        elif state is _REMOTE:
            return self.load(request, done, to_hold)
        elif not memory.grow(request, to_hold):
            return self._refuse(request, Refusal.KV_BLOCKS)
        running_set.has_spare_blocks |= to_hold > known
        if self._swaps is not None and state is RequestState.LOADED:
            self._returned.add(request)
        kind = self._lifecycle.admitted(request, done, self.now)
        if self._connected is not None:
            self._connected.admitted(request, num_loaded, is_whole=done + num_tokens >= known)
        if num_padding:
            self._put_padded(request, PlannedDrafts(num_padding, memory.blocks_for(known), is_padding=True), done, kind)
        else:
            self._put_chunk(request, num_tokens, done, kind)
        return None

    def _to_hold(self, end: int, known: int, reserve_tokens: int | None) -> int:
        """Return the number of tokens for which a request gets blocks if it is admitted and computes its tokens up to
        `end`.
        """
        if reserve_tokens is None:
            reserve_tokens = known if self._options.reserve_prompt else end
        return max(reserve_tokens, self._with_lookahead(end))

    def _adapter_refusal(self, adapters: Adapters, request: Request) -> Refusal | None:
        """Return the refusal of a request whose adapter is not loaded, after beginning the load if possible; None if
        the request has no adapter or its adapter is loaded.
        """
        if not request.adapter:
            return None
        refusal = adapters.admit(request, self.now)
        if refusal is Refusal.LOADING:
            self._lifecycle.bind(request, self.now)
        return refusal

    def _from_tiers(self, tiers: FindsInTiers, request: Request, done: int, to_hold: int) -> Refusal | None:
        """Begin to load the prefix of a request from a lower tier; return the refusal for this step, None if there is
        nothing to load.
        """
        num_tokens = tiers.num_to_load(request, done)
        if num_tokens is None:
            self._lifecycle.bind(request, self.now)
            return Refusal.LOADING
        if not num_tokens:
            return None
        if to_hold < done + num_tokens:
            to_hold = done + num_tokens
        if not self._memory.can_allocate(request, to_hold):
            return Refusal.KV_BLOCKS
        # Load before allocating: an exclusive tier then drops the loaded blocks, and so has room for blocks that the
        # allocation evicts from the device.
        tiers.load(request, done, num_tokens)
        if self._memory.allocate(request, to_hold) is None:
            raise RuntimeError(f"request {request.request_id}: memory was checked and is full")
        self._lifecycle.load(request, self.now)
        return Refusal.LOADING

    def _swap_in(self, swaps: SwapsBesideSteps, request: Request, to_hold: int) -> Refusal:
        """Allocate blocks for a swapped request and begin to swap it in, unless it is still being swapped out."""
        if swaps.is_leaving(request):
            return Refusal.LOADING
        num_blocks = self._memory.swap_in(request, to_hold)
        if num_blocks is None:
            return Refusal.KV_BLOCKS
        if to_hold > request.num_known_tokens:
            self._running_set.has_spare_blocks = True
        swaps.come_back(request, num_blocks)
        self._lifecycle.load(request, self.now)
        return Refusal.LOADING

    def load(self, request: Request, num_tokens: int, to_hold: int) -> Refusal:
        """Allocate blocks for a request whose KV is on another replica, so that the KV is transferred; return the
        refusal for this step.
        """
        running_set = self._running_set
        if request not in running_set.loading:
            hit = self._memory.allocate(request, to_hold)
            if hit is None:
                return self._refuse(request, Refusal.KV_BLOCKS)
            running_set.loading[request] = None
            self.loads.append((request, min(hit, num_tokens)))
        return self._refuse(request, Refusal.LOADING)

    def add_decodes(self) -> DecodeStop | None:
        """Add every decode that is not in the batch yet; see `BatchBuilder.add_decodes`."""
        running_set = self._running_set
        if self._order is None or not self._order_of_decodes:
            self._order = None
            if not self.bulk and not self.selected:
                self._add_pool()
                if self._to_cache:
                    self._cache_decodes()
            if self.bulk:
                if not running_set.skipped:
                    return None
                self._go_through(sorted(running_set.skipped, key=by_admission), of_decodes=True)
            elif running_set.pool.members or running_set.skipped:
                self._go_through(running_set.decodes(), of_decodes=True)
            else:
                return None
        return self._add_in_order(None)

    def add_running(self, max_chunk_tokens: int | None = None) -> DecodeStop | None:
        """Add every running request in order of admission; see `BatchBuilder.add_running`."""
        running_set = self._running_set
        self.running_in_order = True
        if self._order is None or self._order_of_decodes:
            self._order = None
            if not self.bulk and not self.selected and self._everything_fits(max_chunk_tokens):
                self._add_pool()
            if self.bulk:
                rest = [*running_set.skipped, *running_set.partial]
                if not rest:
                    self._cache_decodes()
                    return None
                self._go_through(sorted(rest, key=by_admission), of_decodes=False)
            else:
                self._go_through(running_set.running(), of_decodes=False)
        stop = self._add_in_order(max_chunk_tokens)
        self._cache_decodes()
        return stop

    def _everything_fits(self, max_chunk_tokens: int | None) -> bool:
        running_set, memory = self._running_set, self._memory
        if self._recycles and (running_set.partial or running_set.skipped):
            return False  # requests must grow in order: one may need blocks that the request before it frees
        num_tokens = len(running_set.pool) + len(running_set.skipped)
        num_blocks = len(running_set.pool.needing_blocks()) + len(running_set.skipped)
        for request in running_set.partial:
            chunk = _capped(self.max_chunk(request), max_chunk_tokens)
            num_tokens += chunk
            num_blocks += memory.blocks_needed(request, request.num_computed_tokens + chunk)
        return num_tokens <= self.tokens_left and num_blocks <= memory.free_blocks and memory.num_groups == 1

    def _go_through(self, requests: Iterable[Request], *, of_decodes: bool) -> None:
        self._order = list(requests)
        self._order_position = 0
        self._order_of_decodes = of_decodes

    def _add_in_order(self, max_chunk_tokens: int | None) -> DecodeStop | None:
        order = self._order or []
        while self._order_position < len(order):
            if self._executor is not None:
                self._order_position, lacks = self._add_drafted(order, self._order_position)
                if lacks is not None:
                    return DecodeStop(order[self._order_position], lacks)
                if self._order_position == len(order):
                    break
            request = order[self._order_position]
            if request.state is _RUNNING and not request.in_flight and request not in self:
                if self.tokens_left <= 0:
                    return DecodeStop(request, self._refuse(request, Refusal.TOKEN_BUDGET))
                chunk = min(_capped(self.max_chunk(request), max_chunk_tokens), self.tokens_left)
                # Before the request is added, blocks of bulk decodes that were admitted earlier must be cached: of
                # several equal blocks, a lookup finds the one that was cached first.
                if self._to_cache:
                    self._cache_decodes(before=request.admitted_index)
                refusal = self.add(request, chunk)
                if refusal is not None:
                    return DecodeStop(request, refusal)
            self._order_position += 1
        self._order = None
        self._order_position = 0
        return None

    # Decodes

    def _add_pool(self) -> None:
        """Add the whole pool as one entry, if it fits and every skipped decode was admitted after all members."""
        running_set = self._running_set
        pool = running_set.pool
        count = len(pool.members)
        if not 0 < count <= self.slots_left or count > self.tokens_left:
            return
        if running_set.skipped:
            last = pool.in_admission_order()[-1].admitted_index
            if any(request.admitted_index < last for request in running_set.skipped):
                return
        if self._grow_pool():
            self.bulk = True
            self.bulk_position = len(self.chunks)
            self.slots_left -= count
            self.tokens_left -= count
            self.num_tokens += count
            self._features = None

    def _grow_pool(self) -> bool:
        """Allocate the next block for every pool member that needs one; return False and change nothing if too few
        blocks are free.
        """
        running_set, memory = self._running_set, self._memory
        pool = running_set.pool
        if self._recycles:
            return self._grow_in_order()
        due = pool.needing_blocks()
        if due:
            if running_set.has_spare_blocks:
                running_set.materialize()
                size = memory.block_size
                due = [one for one in due if memory.num_held_blocks(one) * size <= one.num_computed_tokens]
            if len(due) > memory.growth_headroom:
                return False
            if self._reserves_growth and not pool.num_public:
                memory.reserve_blocks(len(due))
            else:
                running_set.materialize()
                memory.grow_each(due)
        if pool.num_public and self._options.cache_at_schedule:
            self._to_cache = sorted(pool.filling_blocks(), key=by_admission, reverse=True)
        return True

    def _grow_in_order(self) -> bool:
        """Allocate blocks for the pool members, in order of admission, and free blocks that they no longer need; return
        False if a member lacks a block (members before it keep their new blocks).
        """
        return all(self._grow_decode(request, None) for request in sorted(self._changing(), key=by_admission))

    def _changing(self) -> set[Request]:
        """Return the pool members that take, fill or free a block with their next token, in memory that recycles
        blocks.
        """
        pool, memory = self._running_set.pool, self._memory
        due = {request for place in memory.due_places for request in pool.at_place(place)}
        due.update(cast(Request, one) for one in memory.lagging if one in pool)
        return due

    def _cache_decodes(self, before: int | None = None) -> None:
        """Cache the blocks that decodes of the pool fill, in order of admission; with `before`, only blocks of decodes
        whose admission index is lower than `before`.
        """
        waiting, memory, due = self._to_cache, self._memory, list[Request]()
        while waiting and (before is None or waiting[-1].admitted_index < before):
            due.append(waiting.pop())
        if memory.has_reserved:
            for request in due:
                self._materialize(request)
        if due:
            memory.cache_each(due, [request.num_computed_tokens + 1 for request in due])

    def _grow_decode(self, request: Request, reserve_tokens: int | None) -> bool:
        """Allocate blocks for one more token of the request, or for `reserve_tokens` tokens if these are more; return
        False if too few blocks are free.
        """
        needed = request.num_computed_tokens + 1
        to_hold = needed if reserve_tokens is None or reserve_tokens < needed else reserve_tokens
        self._materialize(request)
        if not self._memory.grow(request, to_hold):
            return False
        if to_hold > needed:
            self._running_set.has_spare_blocks = True
        if self._options.cache_at_schedule:
            self._memory.cache_blocks(request, needed)
        return True

    def _materialize(self, request: Request) -> None:
        """Move the blocks reserved for the request, including those of this step's bulk entry, into its table."""
        if self._memory.has_reserved and request in self._members:
            self._memory.materialize(request, request.num_computed_tokens + self.bulk)

    # Preempting and dropping

    def preempt(self, request: RequestView, mode: PreemptionMode = PreemptionMode.RECOMPUTE) -> Refusal | None:
        """Free the request's device memory; see `BatchBuilder.preempt`."""
        own = self._own(request)
        if own.state is not _RUNNING:
            raise IllegalPlan(own, f"cannot preempt what is {own.state.value}. Running requests can be preempted")
        if own.in_flight or own in self._returned:
            return Refusal.IN_FLIGHT
        if self._connected is not None and self._connected.is_written(own):
            return Refusal.IN_FLIGHT
        if mode is PreemptionMode.SWAP:
            num_to_keep = max(1, self._memory.blocks_for(own.num_computed_tokens))
            if num_to_keep > self._memory.free_host_blocks:
                return Refusal.HOST_BLOCKS
        if own in self and not self._unschedule(own):
            return Refusal.IN_FLIGHT
        self._materialize(own)
        num_moved = self._lifecycle.preempt(own, mode, self.now)
        if num_moved and self._swaps is not None:
            self._swaps.leave(own, num_moved)
        elif num_moved:
            self._add_swap(num_moved)
        self.preempted.append((own, mode.value))
        self._features = None
        return None

    def hand_off(self, request: RequestView) -> Refusal | None:
        """Hand off a running request with its KV; see `BatchBuilder.hand_off`."""
        own = self._own(request)
        if own.state is not _RUNNING:
            raise IllegalPlan(own, f"cannot hand off what is {own.state.value}. Running requests can be handed off")
        if own.in_flight:
            return self._refuse(own, Refusal.IN_FLIGHT)
        if own in self:
            return self._refuse(own, Refusal.ALREADY_SCHEDULED)
        refusal = Refusal.NO_TARGET if self._keeps is None else self._keeps(own)
        if refusal is not None:
            return self._refuse(own, refusal)
        self._materialize(own)
        self.note(own, handed_off=own.num_computed_tokens)
        self._lifecycle.hold(own)
        self.handed_off.append(own)
        self.hands_off = True
        self._features = None
        return None

    def _unschedule(self, request: Request) -> bool:
        """Remove a request from the batch; return False and change nothing if another entry depends on its tokens."""
        chunk = self.chunks.get(request)
        done = request.num_computed_tokens if chunk is None else chunk.num_computed_before
        if not self._memory.uncache_blocks(request, done):
            return False
        self._take_out(request)
        return True

    def drop(self, request: RequestView, reason: str) -> None:
        """End a waiting request; see `BatchBuilder.drop`."""
        own = self._own(request)
        if own.state is _RUNNING:
            raise IllegalPlan(own, "cannot drop what runs. Waiting requests can be dropped; preempt it first")
        given: object = reason  # a plug-in may pass anything
        if not isinstance(given, str) or not given:
            raise IllegalPlan(own, f"cannot drop it without a reason (got {reason!r}). A sentence for its client")
        self._lifecycle.drop(own, f"{self.policy_name}: {reason}", self.now)
        self.dropped.append((own, EndReason.REJECTED))

    # Pins

    def pin(self, request: RequestView, seconds: float) -> Refusal | None:
        """Keep a request's cached content; see `BatchBuilder.pin`."""
        own, seconds = self._own(request), checked_seconds(seconds)
        self._materialize(own)
        return None if self._lifecycle.pinning.pin(own, seconds, self.now) else Refusal.PINS

    def unpin(self, request: RequestView) -> None:
        """End a pin; see `BatchBuilder.unpin`."""
        self._lifecycle.pinning.unpin(request, self.now)

    # Queries

    def cached_tokens(self, request: RequestView) -> int:
        """Return the number of leading tokens that a waiting request need not compute if it is admitted now; 0 if the
        request is running or swapped.
        """
        own = self._own(request)
        if own.state is _RUNNING or own.state is _SWAPPED:
            return 0
        return own.num_computed_tokens if own.state in _WITH_KV else self._cached_tokens(own)

    def blocks_needed(self, request: RequestView, num_tokens: int, *, in_steps: bool = False) -> int:
        """Return the number of free blocks needed for the request to hold its first `num_tokens` tokens; see
        `BatchBuilder.blocks_needed`.
        """
        own = self._own(request)
        if own.state is _SWAPPED:
            return self._memory.blocks_for(max(num_tokens, own.num_computed_tokens))
        self._materialize(own)
        if self._connected is not None:
            return self._connected.blocks_needed(own, num_tokens, in_steps=in_steps and self._recycles)
        if in_steps and self._recycles:
            return self._memory.blocks_needed_in_steps(own, num_tokens)
        return self._memory.blocks_needed(own, num_tokens)

    def max_chunk(self, request: RequestView) -> int:
        """Return the maximum number of tokens that the next chunk of the request may have."""
        own: Request = request  # type: ignore[assignment]
        if own.state is _ENDED or own.replica_id != self._replica_id:
            self._own(request)
        if own.state is _RUNNING or own.state in _WITH_KV:
            num_left = own.num_remaining_tokens
        else:
            num_left = own.num_known_tokens - self._cached_tokens(own)
        return num_left if self._one_group else self._memory.max_chunk(own, own.num_known_tokens - num_left, num_left)

    def predicted_time(self) -> float:
        """Return the predicted duration of the step as planned so far, in seconds."""
        return self._time_s(self.features())

    def predicted_time_with(self, request: RequestView, num_tokens: int) -> float:
        """Return the predicted duration of the step, in seconds, with `num_tokens` tokens of the request added."""
        own = self._own(request)
        groups, features = self._group_features, self._features or self._sum_features()
        if own.is_decode and num_tokens == 1:
            features = groups.with_decode(features, own)
            if self._executor is not None:
                features = [features[0].with_drafts(self._num_drafts(own, own.num_known_tokens, self.tokens_left))]
        else:
            done = own.num_computed_tokens or self.cached_tokens(own)
            features = groups.with_chunk(features, own, num_tokens, done)
        return self._time_s(groups.slowest(features))

    def _time_s(self, features: BatchFeatures) -> float:
        seconds = self._latency.stage_time_s(features)
        return seconds if self._draft_rules is None else seconds + self._draft_rules.time_s(features)

    def idle_until(self, time_s: float) -> None:
        """Run nothing until a time; see `BatchBuilder.idle_until`."""
        if not time_s > self.now or not isfinite(time_s):
            raise ValueError(f"idle_until({time_s!r}) is not a finite time after now ({self.now!r})")
        self.idle_at = time_s

    def note(self, request: RequestView, **scores: float | int | str) -> None:
        """Add scores that explain a decision about a request to the step's notes, if notes are kept. Raises
        `ValueError` unless each score is a finite number, a text or a truth value.
        """
        plain = {name: _plain_score(name, score) for name, score in scores.items()}
        if self._options.keep_notes:
            self.notes.setdefault(request.request_id, {}).update(plain)

    # Helpers

    def _busy_groups(self) -> frozenset[int]:
        busy = self._options.busy_group_tokens
        return frozenset(group for group, tokens in self._group_tokens.items() if tokens >= busy)

    def _own(self, request: RequestView) -> Request:
        own: Request = request  # type: ignore[assignment]  # `cast` would cost as much as the rest
        replica_id = own.replica_id
        if own.state is _ENDED or (replica_id != self._replica_id and replica_id != -1):
            raise IllegalPlan(own, "it is not one of this replica's requests")
        if replica_id == -1 and (own in self._lifecycle.held or not self._memory.is_registered(own)):
            self._lifecycle.register(own, self.now)
            self._looked_at.append(own)
        return own

    def _forget_looked_at(self) -> None:
        """Unregister the requests that were looked up for this step, which is decided now, but not admitted."""
        for request in self._looked_at:
            if request.replica_id == -1:
                self._memory.forget(request)
        self._looked_at.clear()


def _whole(request: Request, number: object, action: str) -> int:
    """Return a whole number as an `int`. Raises `IllegalPlan` for other values; `action` is a part of its message."""
    if not isinstance(number, Integral):
        raise IllegalPlan(request, f"cannot {action.format(number)}. Allowed: whole numbers")
    return int(number)


def _plain_score(name: str, score: Any) -> float | int | str:
    """Return a score of a note, with a scalar of NumPy or another library as a Python value. Raises `ValueError` for
    any other object.
    """
    plain = score.item() if getattr(score, "ndim", None) == 0 else score
    if isinstance(plain, str | bool) or is_number(plain):
        return plain
    raise ValueError(f"note({name}): got {score!r}. Allowed: a finite number, a text, True or False")


def _capped(num_tokens: int, cap: int | None) -> int:
    return num_tokens if cap is None else min(num_tokens, cap)
