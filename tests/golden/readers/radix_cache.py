"""Compare retention policies with recorded evictions of SGLang's radix cache.

The tree is built here by SGLang's rules of matching, splitting and counting; which leaf goes is the retention policy's choice, in the
mechanism's own order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from tests.golden.readers.retention import built
from tests.golden.readers.trace import Difference, Result
from vajra_py.runtime.kv.retention_order import CachedEntry, RetentionOrder

SCHEMA = "radix-golden/1"


class _Node(CachedEntry):
    """A run of tokens; an entry of the order, whose uses are SGLang's hits and whose priority is minus SGLang's."""

    __slots__ = ("children", "num_locks", "tokens")

    def __init__(self, tokens: Sequence[int], parent: _Node | None, now: float) -> None:
        super().__init__(-1, tuple(tokens), parent, None, now)
        self.tokens = list(tokens)
        self.children: dict[tuple[int, ...], _Node] = {}
        self.num_locks = 0
        self.num_uses = 0

    def path(self) -> list[int]:
        """Tokens from the root to its end."""
        above = self.parent
        return (above.path() if isinstance(above, _Node) else []) + self.tokens


class _RadixCache:
    """SGLang's tree of one run."""

    def __init__(self, policy: str, params: Mapping[str, Any], page_size: int) -> None:
        self._page = page_size
        self._time = 0.0
        self._order: RetentionOrder[_Node] = RetentionOrder(built(policy, params, 1), policy)
        self._root = _Node((), None, 0.0)
        self._root.num_locks = 1
        self._last = self._root
        """Node that the match just before ended at."""
        self._locked: dict[int, _Node] = {}
        self.evictable = 0
        self.protected = 0

    def insert(self, tokens: Sequence[int], priority: int) -> int:
        """Insert a sequence; returns the tokens found before."""
        rest, node, now = self._cut(tokens), self._root, self._tick()
        length = len(rest)
        while rest and (child := node.children.get(self._page_of(rest))) is not None:
            child.last_used_at = now
            found = self._common(child.tokens, rest)
            node = child if found == len(child.tokens) else self._split(child, found)
            self._touch(node, -priority)
            rest = rest[found:]
        matched = length - len(rest)
        if rest:
            leaf = _Node(rest, node, self._tick())
            node.children[self._page_of(rest)] = leaf
            self.evictable += len(rest)
            self._refresh(node)
            leaf.priority = -priority
            self._touch(leaf, -priority)
        return matched

    def match(self, tokens: Sequence[int]) -> int:
        """Look a sequence up, which splits what matches in part; returns the tokens found."""
        rest, node, now = self._cut(tokens), self._root, self._tick()
        length = len(rest)
        while rest and (child := node.children.get(self._page_of(rest))) is not None:
            child.last_used_at = now
            found = self._common(child.tokens, rest)
            is_whole = found == len(child.tokens)
            node = child if is_whole else self._split(child, found)
            self._refresh(node)
            self._refresh(child)
            rest = rest[found:]
            if not is_whole:
                break
        self._last = node
        return length - len(rest)

    def lock(self, number: int) -> None:
        """Lock the path of the node that the last match ended at."""
        self._locked[number] = self._last
        self._add_locks(self._last, 1)

    def unlock(self, number: int) -> None:
        """Take a lock back."""
        self._add_locks(self._locked.pop(number), -1)

    def evict(self, num_tokens: int) -> tuple[list[Any], int]:
        """Remove leaves until so many tokens are free; returns them with what is told of them, and the tokens freed."""
        victims: list[Any] = []
        freed = 0
        self._order.begin()
        while freed < num_tokens and len(self._order):
            node = self._order.pop(self._time)
            victims.append([node.path(), len(node.tokens), node.num_uses, -node.priority])
            freed += len(node.tokens)
            parent = node.parent
            assert isinstance(parent, _Node)
            del parent.children[self._page_of(node.tokens)]
            self._refresh(parent)
        self.evictable -= freed
        return victims, freed

    def _touch(self, node: _Node, priority: int) -> None:
        node.num_uses += 1
        node.priority = min(node.priority, priority)
        self._refresh(node)

    def _split(self, lower: _Node, length: int) -> _Node:
        above = lower.parent
        assert isinstance(above, _Node)
        upper = _Node(lower.tokens[:length], above, self._tick())
        upper.num_uses, upper.priority, upper.num_locks = lower.num_uses, lower.priority, lower.num_locks
        above.children[self._page_of(upper.tokens)] = upper
        lower.tokens = lower.tokens[length:]
        lower.parent = upper
        upper.children[self._page_of(lower.tokens)] = lower
        self._refresh(lower)
        return upper

    def _add_locks(self, node: CachedEntry | None, step: int) -> None:
        while isinstance(node, _Node) and node is not self._root:
            was_locked = node.num_locks > 0
            node.num_locks += step
            change = len(node.tokens) * ((node.num_locks > 0) - was_locked)
            self.protected += change
            self.evictable -= change
            self._refresh(node)
            node = node.parent

    def _refresh(self, node: _Node) -> None:
        """Let the order read the node's key again, if it is a candidate."""
        self._order.discard(node)
        if not node.children and not node.num_locks:
            self._order.add(node, self._time)

    def _tick(self) -> float:
        self._time += 1.0
        return self._time

    def _cut(self, tokens: Sequence[int]) -> list[int]:
        return list(tokens[: len(tokens) // self._page * self._page])

    def _page_of(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(tokens[: self._page])

    def _common(self, one: Sequence[int], other: Sequence[int]) -> int:
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
        return same // self._page * self._page


def _answers(cache: _RadixCache, op: Mapping[str, Any]) -> dict[str, Any]:
    """Carry out an operation; returns what the record tells of it."""
    match op["op"]:
        case "insert":
            answers: dict[str, Any] = {"prefix_len": cache.insert(op["tokens"], op["priority"])}
        case "match":
            answers = {"matched": cache.match(op["tokens"])}
        case "lock":
            cache.lock(op["lock"])
            answers = {}
        case "unlock":
            cache.unlock(op["lock"])
            answers = {}
        case _:
            victims, freed = cache.evict(op["tokens"])
            answers = {"victims": victims, "freed": freed}
    return {**answers, "evictable": cache.evictable, "protected": cache.protected}


def compare(system: str, name: str, trace: Mapping[str, Any]) -> Result:
    """Carry out a recorded run, and compare each answer."""
    cache = _RadixCache(trace["policy"], trace["policy_config"] or {}, trace["page_size"])
    for number, op in enumerate(trace["ops"]):
        for field, value in _answers(cache, op).items():
            if field in op and op[field] != value:
                difference = Difference(f"{number} ({op['op']})", field, op[field], value)
                return Result(system, name, number + 1, difference, "operations")
    return Result(system, name, len(trace["ops"]), unit="operations")
