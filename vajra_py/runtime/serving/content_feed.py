"""Delivery of events about the content of a replicaset's caches to its policies, possibly with a lag.

With a lag, `ReplicaLoadView.prefix_hit_tokens` reads an index that is built from the same events that policies get
(`ListensToCaches`). Without a lag, it reads the caches themselves, which gives the same result and needs no index.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

from vajra_py.runtime.kv.block_hashes import BlockHashes
from vajra_py.runtime.kv.content_events import ContentChange, ContentEvent, ContentEvents, known_prefix_tokens
from vajra_py.runtime.requests.listeners import Listeners
from vajra_py.runtime.serving.replica import Replica


class ContentFeed:
    """Events about the cache content of all replicas of a replicaset, in order of time. Before each call of the
    replicaset scheduler, to place a request or to let a replica pull requests, the policies get the events that are at
    least `lag_s` old.
    """

    def __init__(self, replicas: Sequence[Replica], lag_s: float) -> None:
        self.lag_s = lag_s
        """Minimum age in seconds at which an event is delivered."""
        self._replicas = replicas
        self._record: deque[ContentEvent] = deque()
        self._known: list[set[Hashable]] = [set() for _ in replicas] if lag_s > 0 else []
        """Content of each replica according to the delivered events; empty without a lag."""
        self._listeners = Listeners()
        self._is_bound = False
        self._expiring = [one.memory for one in replicas if one.memory.expires_content]
        """Memories whose content may expire; expiry is checked before events are delivered."""
        self._events = [ContentEvents(one.replica_id, one.memory.now, self._record) for one in replicas]

    def bind(self, listeners: Listeners) -> None:
        """Deliver events to these callbacks from now on, beginning with events for the present content."""
        self._listeners = listeners
        for replica, events in zip(self._replicas, self._events, strict=True):
            if self._is_bound:
                events.cleared()
            replica.memory.report_content(events)
            tiers = replica.memory.tiers
            if tiers is not None and listeners.listen_to_tiers:
                clock, record = replica.memory.now, self._record
                below = [ContentEvents(replica.replica_id, clock, record, name) for name in tiers.names]
                for one in below if self._is_bound else ():
                    one.cleared()
                tiers.report(below)
        self._is_bound = True

    def deliver(self, now: float) -> None:
        """Deliver the events that are at least `lag_s` old. Raises `PolicyError` if a policy breaks the contract."""
        for memory in self._expiring:
            memory.expire()
        record, until = self._record, now - self.lag_s
        while record and record[0].at <= until:
            self._give(record.popleft())

    def hit_tokens(self, replica_id: int, hashes: BlockHashes, num_known_tokens: int) -> int:
        """Return the number of leading tokens of a sequence with these block hashes whose KV the replica holds,
        according to the events delivered so far.
        """
        memory = self._replicas[replica_id].memory
        self.deliver(memory.now())
        return known_prefix_tokens(self._known[replica_id], hashes, num_known_tokens, memory.block_size)

    def _give(self, event: ContentEvent) -> None:
        at, replica_id, change, hashes, tier = event
        listeners = self._listeners
        if tier:
            self._give_of_tier(event)
            return
        if change is ContentChange.CLEARED:
            if self._known:
                self._known[replica_id].clear()
            for notify in listeners.caches_cleared:
                notify(replica_id, at)
            return
        is_stored = change is ContentChange.STORED
        if self._known:
            known = self._known[replica_id]
            (known.update if is_stored else known.difference_update)(hashes)
        for notify in listeners.blocks_stored if is_stored else listeners.blocks_removed:
            notify(replica_id, hashes, at)

    def _give_of_tier(self, event: ContentEvent) -> None:
        at, replica_id, change, hashes, tier = event
        listeners = self._listeners
        if change is ContentChange.CLEARED:
            for notify in listeners.tiers_cleared:
                notify(replica_id, tier, at)
            return
        is_stored = change is ContentChange.STORED
        for notify in listeners.tier_blocks_stored if is_stored else listeners.tier_blocks_removed:
            notify(replica_id, tier, hashes, at)
