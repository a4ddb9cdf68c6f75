"""Transfers of content between the memory tiers of a replicaset's replicas, while steps run.

The prefix of a waiting request may be moved in two stages. Blocks of tiers beyond the first are prefetched into the
first one, when the request arrives or when it is first considered for admission. Blocks of the first tier are loaded to
the device when the request is admitted: the request gets its device blocks, waits for the transfer, and computes the
tokens after the loaded ones. Content that leaves a tier, or is written through, is copied down. Each tier has its own
links for each replica, one down and one up, and a shared tier may have a bandwidth limit for all replicas together.

If the backend executes the copies (links are not modelled), a copy ends when the backend reports it. Device content
that the step being formed will overwrite is read before that step; other device content is read once it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Generic, cast

from msgspec import Struct, field

from vajra_py.contract.observer import TierTransfer
from vajra_py.runtime.kv.block_hashes import reads_cache
from vajra_py.runtime.kv.paged import PagedKvMemory
from vajra_py.runtime.kv.tier_store import TierBlock
from vajra_py.runtime.kv.tiers import DEVICE, KvTiers, TierFetch, TierLoad
from vajra_py.runtime.movement.links import Network
from vajra_py.runtime.movement.reported import ReportedCopies
from vajra_py.runtime.movement.tier_rules import TierMovesRules
from vajra_py.runtime.requests.connector import ConnectorRules, KvReport, Match
from vajra_py.runtime.requests.request import Request, RequestState
from vajra_py.runtime.serving.backend import R, TierCopy
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.serving.replicaset import Replicaset
from vajra_py.runtime.serving.services import DriverServices
from vajra_py.runtime.support.clock import to_seconds, to_ticks


class _Transfer(Struct, Generic[R], eq=False):
    """Transfer of blocks over the link of one tier."""

    one: R
    level: int
    is_upward: bool
    num_blocks: int
    started_at: int
    arrived: Callable[[], None]
    lost: Callable[[], None]
    """Called in place of `arrived` if the replica has lost its memory."""
    pairs: Sequence[tuple[int, int]] = ()
    """(device block, slot in the tier) of each block, if the backend executes the copy."""
    copy: TierCopy[R] | None = None
    """Copy that the backend executes; None if the links are modelled."""


class _Prefetch(Struct, Generic[R], eq=False):
    """Prefetch of one request's prefix into the first tier."""

    request: Request
    one: R
    under_way: dict[int, TierFetch] = field(default_factory=dict)
    """Fetches that have not ended, by the number of their transfer."""
    level_of: dict[Hashable, int] = field(default_factory=dict)
    """Level of the tier from which each block is fetched, by hash."""
    cut_at: int | None = None
    """Tick at which the request stops waiting; None: no limit is set."""
    is_awaited: bool = False
    """True if the request was considered for admission during the prefetch."""


class _Load(Struct, Generic[R], eq=False):
    """Load of one request's prefix to its device blocks."""

    request: Request
    one: R
    content: TierLoad
    num_tokens: int
    """Number of tokens whose KV the request's blocks hold after the load."""
    by_tier: Mapping[str, int]
    """Number of loaded tokens by the tier in which they were found."""
    began_at: int
    """Tick at which the load began."""


class TierMoves(Generic[R]):
    """Transfers between the tiers of one replicaset."""

    def __init__(
        self, replicaset: Replicaset, rules: TierMovesRules, driver: DriverServices[R], *, is_timed: bool = True
    ) -> None:
        """`is_timed`: True if links are modelled; False if the backend copies between the device and one tier."""
        self.replicaset = replicaset.name
        self._replicaset = replicaset
        self._rules = rules
        self._driver = driver
        self._is_timed = is_timed
        self._networks = [Network(links) if is_timed else ReportedCopies() for links in rules.links]
        self._num_replicas = len(replicaset.replicas)
        self._num_started = 0
        self._names: Sequence[str] = ()
        """Names of the tiers, nearest first."""
        self._sent: dict[int, _Transfer[R]] = {}
        self._ended: dict[int, None] = {}
        """Transfers that have ended and were not handled yet."""
        self._scheduled_at: int | None = None
        self._prefetches: dict[Request, _Prefetch[R]] = {}
        self._loads: dict[Request, tuple[_Load[R], int]] = {}
        """Loads under way, each with the number of its transfer (-1: not begun)."""
        self._computes: set[Request] = set()
        """Requests that gave up loaded content and recompute it, so that requests do not block each other forever."""
        for one in driver.replicas_of(replicaset.name):
            tiers = one.replica.memory.tiers
            if tiers is not None:
                if not is_timed:
                    tiers.stores[0].number_slots()
                self._names = tiers.names
                finds = ReplicaTiers(self, one, tiers)
                if rules.loads == "reserved":
                    connector_rules = ConnectorRules(
                        holding_order=rules.load_order, calls_off=True, reports_with_steps=False
                    )
                    one.replica.use_connector(_TierConnector(self, one, tiers), connector_rules)
                else:
                    one.replica.builder.use_tiers(finds)
                tiers.on_forget = self.forget
                tiers.on_give_up = self._computes.add
                tiers.on_clear = finds.clear

    # Events

    def queued(self, request: Request, one: R) -> None:
        """Begin a prefetch for a request that was queued at a replica, if `prefetch_from` is `arrival`."""
        if self._rules.prefetch_from == "arrival" and len(self._networks) > 1:
            self._driver.sync(self._replicaset.name)
            self._prefetch(request, one)
            self._schedule()

    def before_step(self, one: R) -> None:
        """Start copies of the blocks that the last step computed, before the next step is formed."""
        tiers = one.replica.memory.tiers
        if tiers is None or not (computed := tiers.take_computed()):
            return
        if not self._is_timed:
            computed = self._on_device(one, tiers, computed)
        if computed:
            self._write(one, tiers, 0, list(computed))
            self._schedule()

    def after_step(self, one: R) -> None:
        """Begin the loads and copies that were decided while the step was formed."""
        replica = one.replica
        if replica.memory.tiers is None:
            return
        for request, (load, number) in list(self._loads.items()):
            if number < 0 and load.one is one:
                self._loads[request] = load, self._begin_load(load)
        self._flush(one)
        self._schedule()

    def due(self) -> None:
        """Make the content of ended transfers available, and end prefetches whose time limit has passed."""
        now = self._driver.now
        if self._scheduled_at is not None and self._scheduled_at <= now:
            self._scheduled_at = None
        for network in self._networks:
            self._ended.update(dict.fromkeys(cast("list[int]", network.ended(now))))
        while self._ended:
            number = next(iter(self._ended))
            del self._ended[number]
            transfer = self._sent.pop(number)
            self._notify(transfer)
            transfer.arrived()
        for prefetch in list(self._prefetches.values()):
            if prefetch.cut_at is not None and prefetch.cut_at <= now:
                self._cut(prefetch)
                self._resume(prefetch)
        self._schedule()

    def take_end(self, number: int) -> bool:
        """Record that the backend has ended a copy, for `due` to handle; return False if the copy was cancelled."""
        transfer = self._sent.get(number)
        network = None if transfer is None else self._networks[transfer.level]
        if not isinstance(network, ReportedCopies):
            return False
        network.report(number)
        return True

    # Copies downwards

    @staticmethod
    def _on_device(one: R, tiers: KvTiers, computed: Sequence[TierBlock]) -> Sequence[TierBlock]:
        """Return the copies with their device blocks set; cancel, and leave out, those whose content was evicted."""
        memory = cast(PagedKvMemory, one.replica.memory)  # only paged memory has tiers
        found = []
        for block in computed:
            source = memory.block_of(block.block_hash)
            if source is None:
                tiers.called_off(0, block)
            else:
                block.source = source
                found.append(block)
        return found

    def _flush(self, one: R) -> None:
        tiers = one.replica.memory.tiers
        assert tiers is not None
        writes = tiers.take_writes()
        if not writes:
            return
        for level in range(len(self._networks)):
            blocks = [block for at, block in writes if at == level]
            if blocks:
                self._write(one, tiers, level, blocks)

    def _write(self, one: R, tiers: KvTiers, level: int, blocks: list[TierBlock]) -> None:
        def arrived() -> None:
            for block in blocks:
                tiers.written(level, block)
            self._flush(one)

        def lost() -> None:
            for block in blocks:
                tiers.called_off(level, block)

        pairs = () if self._is_timed else [(block.source, block.slot) for block in blocks]
        self._start(_Transfer(one, level, False, len(blocks), self._driver.now, arrived, lost, pairs))

    # Prefetches

    def _prefetch(self, request: Request, one: R) -> _Prefetch[R] | None:
        """Begin to prefetch a request's prefix from tiers beyond the first; return None if no prefetch begins, for
        instance because these tiers hold too little of the prefix.
        """
        memory, hashes = one.replica.memory, request.hashes
        tiers = memory.tiers
        if tiers is None or hashes is None or not reads_cache(hashes) or request in self._prefetches:
            return None
        size = memory.block_size
        limit = min(request.num_known_tokens - 1, hashes.num_hashed_tokens) // size
        start = memory.lookup_prefix(hashes, request.num_known_tokens) // size
        levels = tiers.levels_of(hashes, start, limit)
        if sum(level > 0 for level in levels) * size < self._rules.min_prefetch_tokens:
            return None
        fetches = tiers.begin_fetch(hashes.block_hashes(start, start + len(levels)), levels, request)
        self._flush(one)
        if not fetches:
            return None
        prefetch = self._prefetches[request] = _Prefetch(request, one)
        for fetch in fetches:
            prefetch.level_of.update((source.block_hash, fetch.level) for source, _ in fetch.pairs)
            arrived = partial(self._fetched, prefetch, self._num_started)
            lost = partial(tiers.end_fetch, fetch, 0)
            transfer = _Transfer(one, fetch.level, True, len(fetch.pairs), self._driver.now, arrived, lost)
            prefetch.under_way[self._start(transfer)] = fetch
        return prefetch

    def _fetched(self, prefetch: _Prefetch[R], number: int) -> None:
        fetch = prefetch.under_way.pop(number)
        tiers = prefetch.one.replica.memory.tiers
        assert tiers is not None
        tiers.end_fetch(fetch, len(fetch.pairs))
        self._flush(prefetch.one)
        if not prefetch.under_way:
            self._resume(prefetch)

    def _cut(self, prefetch: _Prefetch[R]) -> None:
        """End a prefetch, keeping the blocks that have arrived."""
        tiers, now = prefetch.one.replica.memory.tiers, self._driver.now
        assert tiers is not None
        for number, fetch in prefetch.under_way.items():
            transfer = self._sent.pop(number)
            if number in self._ended:
                del self._ended[number]
            else:
                network = self._networks[fetch.level]
                transfer.num_blocks -= -(-network.remaining_bytes(number, now) // self._rules.bytes_per_block)
                network.cancel(number, now)
            self._notify(transfer)
            tiers.end_fetch(fetch, transfer.num_blocks)
        prefetch.under_way.clear()
        prefetch.cut_at = None
        self._flush(prefetch.one)

    def _resume(self, prefetch: _Prefetch[R]) -> None:
        """Wake the replica of a request that waited for its prefetch."""
        prefetch.cut_at = None
        if prefetch.is_awaited:
            self._driver.touch(prefetch.one)
            self._driver.wake(prefetch.one)

    def _waits(self, request: Request, one: R) -> bool:
        """Return True if a request that is considered for admission must wait for its prefetch."""
        rules = self._rules
        prefetch = self._prefetches.get(request)
        if prefetch is None and len(self._networks) > 1 and request not in self._computes:
            prefetch = self._prefetch(request, one)
            self._schedule()
        if prefetch is None or not prefetch.under_way:
            return False
        now = self._driver.now
        if rules.prefetch == "timeout" and prefetch.cut_at is None:
            num_tokens = len(prefetch.level_of) * one.replica.memory.block_size
            wait_s = rules.prefetch_timeout_s + rules.prefetch_timeout_s_per_token * num_tokens
            prefetch.cut_at = now + to_ticks(wait_s)
            self._push(prefetch.cut_at)
        if rules.prefetch == "best_effort" or (prefetch.cut_at is not None and prefetch.cut_at <= now):
            self._cut(prefetch)
            return False
        prefetch.is_awaited = True
        return True

    # Loads

    def num_to_load(self, request: Request, one: R, tiers: KvTiers, num_on_device: int) -> int | None:
        """See `FindsInTiers`."""
        hashes = request.hashes
        if hashes is None or not reads_cache(hashes) or request in self._computes:
            return 0
        if self._waits(request, one):
            return None
        size = tiers.block_size
        start, limit = num_on_device // size, min(request.num_known_tokens - 1, hashes.num_hashed_tokens) // size
        levels = tiers.levels_of(hashes, start, limit)
        num_blocks = next((position for position, level in enumerate(levels) if level), len(levels))
        return num_blocks * size if num_blocks * size >= self._rules.min_load_tokens else 0

    def load(self, request: Request, one: R, tiers: KvTiers, num_on_device: int, num_tokens: int) -> None:
        """See `FindsInTiers`."""
        hashes, size = request.hashes, tiers.block_size
        assert hashes is not None
        start, stop = num_on_device // size, (num_on_device + num_tokens) // size
        found = hashes.block_hashes(start, stop)
        prefetch = self._prefetches.pop(request, None)
        level_of = {} if prefetch is None else prefetch.level_of
        by_tier = dict.fromkeys(tiers.names, 0)
        for block_hash in found:
            by_tier[tiers.names[level_of.get(block_hash, 0)]] += size
        content = tiers.begin_load(found, request)
        self._loads[request] = _Load(request, one, content, num_on_device + num_tokens, by_tier, self._driver.now), -1

    def _begin_load(self, load: _Load[R]) -> int:
        tiers = load.one.replica.memory.tiers
        assert tiers is not None
        arrived, lost = partial(self._loaded, load), partial(tiers.end_load, load.content)
        num_blocks, now = len(load.content.blocks), self._driver.now
        pairs: Sequence[tuple[int, int]] = ()
        if not self._is_timed:
            memory = load.one.replica.memory
            end = load.num_tokens // memory.block_size
            table = memory.block_table(load.request)[end - num_blocks : end]
            pairs = [(block, source.slot) for block, source in zip(table, load.content.blocks, strict=True)]
        return self._start(_Transfer(load.one, 0, True, num_blocks, now, arrived, lost, pairs))

    def _loaded(self, load: _Load[R]) -> None:
        request, one = load.request, load.one
        del self._loads[request]
        tiers = one.replica.memory.tiers
        assert tiers is not None
        now = to_seconds(self._driver.now)
        self._driver.touch(one)
        has_ended = request.state is RequestState.ENDED
        if self._rules.loads == "reserved":
            one.replica.take_report(KvReport(received=[request]), self._driver.now)
        else:
            one.replica.lifecycle.loaded(request, load.num_tokens, now)
        tiers.end_load(load.content)
        for observer in () if has_ended else self._replicaset.observers:
            observer.on_tier_hit(request, one.replica.replica_id, load.by_tier, now - to_seconds(load.began_at), now)
        self._flush(one)
        self._driver.wake(one)

    # Early ends

    def forget(self, request: Request) -> None:
        """Cancel prefetch and load of a request that has left its replica or its queue."""
        self._computes.discard(request)
        prefetch = self._prefetches.pop(request, None)
        if prefetch is not None and prefetch.under_way:
            self._cut(prefetch)
        entry = self._loads.pop(request, None)
        if entry is not None:
            load, number = entry
            tiers = load.one.replica.memory.tiers
            assert tiers is not None
            if number >= 0:
                self._call_off(number)
            tiers.call_off_load(load.content)
        if prefetch is not None or entry is not None:
            self._schedule()

    def lose(self, one: R) -> None:
        """Cancel all transfers between the tiers of a replica that has lost all content."""
        for number in [number for number, transfer in self._sent.items() if transfer.one is one]:
            self._call_off(number).lost()
        for request in [request for request, prefetch in self._prefetches.items() if prefetch.one is one]:
            del self._prefetches[request]
        for request, (load, number) in list(self._loads.items()):
            if load.one is one:
                del self._loads[request]
                if number < 0 and one.replica.memory.tiers is not None:
                    one.replica.memory.tiers.end_load(load.content)
        self._schedule()

    def _call_off(self, number: int) -> _Transfer[R]:
        transfer = self._sent.pop(number)
        if number in self._ended:
            del self._ended[number]
        else:
            self._networks[transfer.level].cancel(number, self._driver.now)
            if transfer.copy is not None:
                self._driver.cancel_tier_copy(transfer.copy)
        transfer.num_blocks = 0
        self._notify(transfer)
        return transfer

    # Transfers

    def _start(self, transfer: _Transfer[R]) -> int:
        """Begin a transfer and return its number."""
        number, here = self._num_started, transfer.one.replica.replica_id
        self._num_started += 1
        there = self._num_replicas + here
        ends = (there, here) if transfer.is_upward else (here, there)
        self._sent[number] = transfer
        num_bytes = transfer.num_blocks * self._rules.bytes_per_block
        self._networks[transfer.level].start(number, *ends, num_bytes, transfer.started_at)
        if not self._is_timed:
            transfer.copy = TierCopy(number, transfer.one, transfer.is_upward, transfer.pairs)
            self._driver.copy_tier(transfer.copy)
        return number

    def _notify(self, transfer: _Transfer[R]) -> None:
        names = self._names
        below = names[transfer.level]
        above = DEVICE if not transfer.level else names[0 if transfer.is_upward else transfer.level - 1]
        ends = (below, above) if transfer.is_upward else (above, below)
        shown = TierTransfer(
            self._replicaset.name,
            transfer.one.replica.replica_id,
            *ends,
            transfer.num_blocks,
            transfer.num_blocks * self._rules.bytes_per_block,
            to_seconds(transfer.started_at),
        )
        for observer in self._replicaset.observers:
            observer.on_tier_transfer(shown, to_seconds(self._driver.now))

    def _schedule(self) -> None:
        ticks = [tick for network in self._networks if (tick := network.next_change()) is not None]
        if ticks and (self._scheduled_at is None or min(ticks) < self._scheduled_at):
            self._scheduled_at = max(min(ticks), self._driver.now)
            self._push(self._scheduled_at)

    def _push(self, tick: int) -> None:
        self._driver.events.push(max(tick, self._driver.now), Phase.TIER, self._replicaset.name)


class _TierConnector(Generic[R]):
    """The tiers of one replica as a `KvConnector`, whose loads leave enough blocks for prompts in progress."""

    def __init__(self, moves: TierMoves[R], one: R, tiers: KvTiers) -> None:
        self._moves = moves
        self._one = one
        self._tiers = tiers

    def matched(self, request: Request, num_local_tokens: int) -> Match | None:
        """See `KvConnector`."""
        num_tokens = self._moves.num_to_load(request, self._one, self._tiers, num_local_tokens)
        return None if num_tokens is None else Match(num_tokens, is_async=num_tokens > 0)

    def begins(self, request: Request, num_local_tokens: int, num_tokens: int) -> None:
        """See `KvConnector`."""
        self._moves.load(request, self._one, self._tiers, num_local_tokens, num_tokens)

    def allocated(self, request: Request, num_tokens: int) -> None:
        """Do nothing: the load has begun."""

    def ended(self, request: Request, num_blocks: int) -> bool:
        """Return False: the blocks may be freed at once, because content leaves the device through a buffer."""
        return False


class ReplicaTiers(Generic[R]):
    """The tiers of one replica, for its batch builder and its memory."""

    def __init__(self, moves: TierMoves[R], one: R, tiers: KvTiers) -> None:
        self._moves = moves
        self._one = one
        self._tiers = tiers

    def num_to_load(self, request: Request, num_on_device: int) -> int | None:
        """See `FindsInTiers`."""
        return self._moves.num_to_load(request, self._one, self._tiers, num_on_device)

    def load(self, request: Request, num_on_device: int, num_tokens: int) -> None:
        """See `FindsInTiers`."""
        self._moves.load(request, self._one, self._tiers, num_on_device, num_tokens)

    def clear(self) -> None:
        """Cancel all transfers, because the replica has lost its memory."""
        self._moves.lose(self._one)
