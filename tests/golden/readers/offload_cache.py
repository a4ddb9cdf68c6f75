"""Compare retention policies with recorded evictions of vLLM's CPU offloading manager.

Places, references and ranks are kept here by the manager's rules; which chunk goes is the retention policy's choice, in the mechanism's
own order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.golden.readers.retention import built
from tests.golden.readers.trace import Difference, Result
from vajra_policies.retention.arc import AdaptiveReplacement
from vajra_py.runtime.kv.retention_order import CachedEntry, RetentionOrder

SCHEMA = "offload-golden/1"


class _Chunk(CachedEntry):
    __slots__ = ("is_ready", "num_loads")

    def __init__(self, key: int) -> None:
        super().__init__(-1, key, None)
        self.is_ready = False
        self.num_loads = 0


@dataclass(eq=False)
class _Request:
    keys: Sequence[int]
    has_positions: bool
    rank: float | None = None
    """Drawn at its first access."""
    reused: dict[int, None] = field(default_factory=dict)
    """Chunks that it loaded or was offered when they were there."""
    inserted: dict[int, None] = field(default_factory=dict)
    """Chunks that were not there when it offered them, those of refused stores too."""
    learnt: set[int] = field(default_factory=set)
    """Offers that have moved the target already."""


class _Manager:
    """vLLM's manager of one run."""

    def __init__(self, policy: str, num_chunks: int, store_threshold: int) -> None:
        self._policy = built(policy, {}, num_chunks)
        self.arc = self._policy if isinstance(self._policy, AdaptiveReplacement) else None
        self._order: RetentionOrder[_Chunk] = RetentionOrder(self._policy, policy)
        self._threshold = store_threshold
        self._chunks: dict[int, _Chunk] = {}
        self._offers: Counter[int] = Counter()
        self._requests: dict[int, _Request] = {}
        self._rank = 0.0
        self._num_chunks = num_chunks

    @property
    def num_free(self) -> int:
        return self._num_chunks - len(self._chunks)

    def new(self, op: Mapping[str, Any]) -> dict[str, Any]:
        self._requests[op["req"]] = _Request(op["keys"], op["positions"])
        return {}

    def lookup(self, op: Mapping[str, Any]) -> dict[str, Any]:
        results: list[str] = []
        for key in self._requests[op["req"]].keys:
            chunk = self._chunks.get(key)
            results.append("MISS" if chunk is None else "HIT" if chunk.is_ready else "HIT_PENDING")
            if results[-1] != "HIT":
                break
        return {"results": results}

    def touch(self, op: Mapping[str, Any]) -> dict[str, Any]:
        keys = op["keys"]
        if self.arc is not None:
            self.arc.learn(keys)
            ready = [self._chunks[key] for key in reversed(keys) if key in self._chunks and self._chunks[key].is_ready]
            self._use_again(ready)
        else:
            self._rank_anew(reversed(keys))
        return {}

    def prepare_load(self, op: Mapping[str, Any]) -> dict[str, Any]:
        request = self._requests[op["req"]]
        for key in op["keys"]:
            self._chunks[key].num_loads += 1
            self._refresh(self._chunks[key])
        self._access(request, op["keys"])
        request.reused.update(dict.fromkeys(op["keys"]))
        return {}

    def complete_load(self, op: Mapping[str, Any]) -> dict[str, Any]:
        for key in op["keys"]:
            self._chunks[key].num_loads -= 1
            self._refresh(self._chunks[key])
        return {}

    def prepare_store(self, op: Mapping[str, Any]) -> dict[str, Any]:
        request, offered = self._requests[op["req"]], op["keys"]
        self._offers.update(offered)
        keys = [key for key in offered if self._offers[key] >= self._threshold]
        if self.arc is not None:
            fresh = [key for key in keys if key not in request.learnt]
            request.learnt.update(fresh)
            self.arc.learn(fresh)
        new = [key for key in keys if key not in self._chunks]
        known = [key for key in keys if key in self._chunks and self._chunks[key].is_ready]
        protected = [self._chunks[key] for key in keys if key in self._chunks]
        for chunk in protected:
            self._order.discard(chunk)
        request.inserted.update(dict.fromkeys(new))
        num_needed = len(new) - self.num_free
        stored: list[int] | None = None
        evicted: list[int] | None = None
        if num_needed <= len(self._order):
            evicted = []
            for _ in range(num_needed):
                chunk = self._order.pop(self._rank)
                evicted.append(self._key(chunk))
                del self._chunks[self._key(chunk)]
                if self.arc is not None:
                    self.arc.on_evicted(chunk, self._rank)
            chunks = [_Chunk(key) for key in new]
            self._chunks.update(zip(new, chunks, strict=True))
            if self.arc is not None:
                self.arc.enter(chunks)
            stored = new
        request.reused.update(dict.fromkeys(known))
        self._access(request, [*known, *new])
        for chunk in protected:
            self._refresh(chunk)
        return {"stored": stored, "evicted": evicted}

    def complete_store(self, op: Mapping[str, Any]) -> dict[str, Any]:
        for key in op["keys"]:
            chunk = self._chunks[key]
            if op["success"]:
                chunk.is_ready = True
                self._refresh(chunk)
            else:
                del self._chunks[key]
                if self.arc is not None:
                    self.arc.on_withdrawn(chunk, self._rank)
        return {}

    def finished(self, op: Mapping[str, Any]) -> dict[str, Any]:
        request = self._requests.pop(op["req"])
        used = {**request.reused, **request.inserted}
        for key in reversed(request.keys):
            if key not in used or key not in self._chunks:
                continue
            if self.arc is not None and key not in request.inserted:
                self._use_again([self._chunks[key]])
            else:
                self._rank_one(self._chunks[key])
        return {}

    def _use_again(self, chunks: Iterable[_Chunk]) -> None:
        """Move these chunks to the recent end of the second list, in this order."""
        assert self.arc is not None
        for chunk in chunks:
            self._order.discard(chunk)
            self.arc.on_used([chunk], self._rank)
            self._rank_one(chunk)

    def _rank_anew(self, keys: Iterable[int]) -> None:
        for key in keys:
            if key in self._chunks:
                self._rank_one(self._chunks[key])

    def _rank_one(self, chunk: _Chunk) -> None:
        self._rank += 1.0
        chunk.last_used_at, chunk.index = self._rank, 0
        self._refresh(chunk)

    def _access(self, request: _Request, keys: Sequence[int]) -> None:
        """Rank what a request has accessed: by the request, and then the end of its chain first."""
        if self.arc is not None or not request.has_positions:
            for key in keys:
                if key in self._chunks and not self._chunks[key].last_used_at:
                    self._rank_one(self._chunks[key])
            return
        if request.rank is None and keys:
            self._rank += 1.0
            request.rank = self._rank
        for key in keys:
            chunk, position = self._chunks.get(key), request.keys.index(key)
            if chunk is not None and (request.rank, -position) > (chunk.last_used_at, chunk.index):
                chunk.last_used_at, chunk.index = float(request.rank or 0.0), -position
                self._refresh(chunk)

    def _refresh(self, chunk: _Chunk) -> None:
        """Let the order read the chunk's key again, if it is a candidate."""
        self._order.discard(chunk)
        if chunk.is_ready and not chunk.num_loads:
            self._order.add(chunk, self._rank)

    @staticmethod
    def _key(chunk: _Chunk) -> int:
        key = chunk.block_hash
        assert isinstance(key, int)
        return key


def compare(system: str, name: str, trace: Mapping[str, Any]) -> Result:
    """Carry out a recorded run, and compare each answer."""
    manager = _Manager(trace["policy"], trace["num_chunks"], trace["store_threshold"])
    for number, op in enumerate(trace["ops"]):
        answers = getattr(manager, op["op"])(op) | {"free": manager.num_free}
        if manager.arc is not None:
            arc = manager.arc
            answers["arc"] = [len(arc.once), len(arc.again), *map(len, arc.gone), round(arc.target, 6)]
        for told, value in answers.items():
            if told in op and op[told] != value:
                difference = Difference(f"{number} ({op['op']})", told, op[told], value)
                return Result(system, name, number + 1, difference, "operations")
    return Result(system, name, len(trace["ops"]), unit="operations")
