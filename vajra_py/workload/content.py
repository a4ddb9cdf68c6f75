"""Prompt contents stored without repeating shared prefixes.

Prompts are nodes of a forest: a node adds one segment to the segments of its parent. Invariants: a parent's index is
below those of its children; nodes never change, so workloads cut or merged from one another may share a store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from msgspec import Struct

from vajra_py.workload.arrays import I64, int64s
from vajra_py.workload.request import PromptContent, SegmentId

__all__ = ["ContentBuilder", "ContentColumn", "ContentStore", "SegmentSpace"]

NO_NODE = -1

_RECENT_PROMPTS = 1024
_Segments: TypeAlias = tuple[tuple[SegmentId, int], ...]


class SegmentSpace(Struct, frozen=True):
    """Rule that maps numbers to segment ids.

    By kind, the id of a number is:
        `number`: the number itself, or (label, number) with a label.
        `output`: ("out", label + number), the output of the request whose id is label + number.
        `explicit`: an entry of a table, as read from a file.
    """

    kind: Literal["number", "output", "explicit"]
    label: str = ""
    table: tuple[SegmentId, ...] = ()

    def segment_id(self, number: int) -> SegmentId:
        """Return the id of the segment with this number."""
        if self.kind == "output":
            return ("out", f"{self.label}{number}")
        if self.kind == "explicit":
            return self.table[number]
        return (self.label, number) if self.label else number

    def renamed(self, prefix: str, *, share: bool) -> SegmentSpace:
        """Return the rule for a workload whose request ids are prefixed with `prefix`. With `share`, only the segment
        ids of outputs change; otherwise all segment ids do.
        """
        if self.kind == "output":
            return SegmentSpace("output", prefix + self.label)
        if self.kind == "explicit":
            return SegmentSpace(
                "explicit", table=tuple(_renamed_id(entry, prefix, share=share) for entry in self.table)
            )
        return self if share else SegmentSpace("number", prefix + self.label)


def _renamed_id(entry: SegmentId, prefix: str, *, share: bool) -> SegmentId:
    if isinstance(entry, tuple) and len(entry) == 2 and entry[0] == "out":
        return ("out", f"{prefix}{entry[1]}")
    if share:
        return entry
    return (prefix, *entry) if isinstance(entry, tuple) else (prefix, entry)


@dataclass(frozen=True, slots=True)
class ContentStore:
    """Forest of segments. Arrays have one entry per node; `tokens` holds the length of the node's own segment."""

    spaces: tuple[SegmentSpace, ...]
    parent: I64
    space: I64
    number: I64
    tokens: I64
    _recent: dict[int, _Segments] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Segments of recent prompts by node, so that prompts that continue them reuse the same objects."""

    def segment_id(self, node: int) -> SegmentId:
        """Return the id of the node's own segment."""
        return self.spaces[int(self.space[node])].segment_id(int(self.number[node]))

    def prompt(self, node: int, num_prompt_tokens: int) -> PromptContent:
        """Return the content from the root to `node`, cut to the prompt's length in tokens."""
        segments: list[tuple[SegmentId, int]] = []
        # Indexing a memoryview returns a Python integer, and is faster than indexing an array.
        spaces, parent, space = self.spaces, self.parent.data, self.space.data
        number, tokens = self.number.data, self.tokens.data
        recent, last = self._recent, node
        known: _Segments | None = ()
        while node != NO_NODE and (known := recent.get(node)) is None:
            segments.append((spaces[space[node]].segment_id(number[node]), tokens[node]))
            node = parent[node]
        whole = (*(known or ()), *reversed(segments))
        if len(recent) >= _RECENT_PROMPTS:
            recent.clear()
        recent[last] = whole
        content = PromptContent(whole)
        return content if content.num_tokens == num_prompt_tokens else content.first_tokens(num_prompt_tokens)

    @property
    def has_outputs(self) -> bool:
        """True if prompts may contain outputs of other requests."""
        return any(
            space.kind == "output" or any(isinstance(entry, tuple) and entry[0] == "out" for entry in space.table)
            for space in self.spaces
        )


class ContentColumn(Struct, frozen=True):
    """Content of each request: a node of the store, or NO_NODE if it is unknown."""

    store: ContentStore
    nodes: I64

    def get(self, row: int, num_prompt_tokens: int) -> PromptContent | None:
        """Return the content of the prompt in this row."""
        node = int(self.nodes[row])
        return None if node == NO_NODE else self.store.prompt(node, num_prompt_tokens)

    def take(self, rows: I64) -> ContentColumn:
        """Return the content of a selection of rows."""
        return ContentColumn(self.store, self.nodes[rows])

    def renamed(self, prefix: str, *, share: bool) -> ContentColumn:
        """Return the column for a workload whose request ids are prefixed with `prefix`. With `share`, only the segment
        ids of outputs change; otherwise all segment ids do.
        """
        store = self.store
        spaces = tuple(space.renamed(prefix, share=share) for space in store.spaces)
        return ContentColumn(ContentStore(spaces, store.parent, store.space, store.number, store.tokens), self.nodes)


def concat_content(parts: list[tuple[ContentColumn | None, int]]) -> ContentColumn | None:
    """Concatenate columns, each given with its number of rows; None if no part has content."""
    if all(column is None for column, _ in parts):
        return None
    empty = int64s(0)
    spaces: list[SegmentSpace] = []
    arrays: list[tuple[I64, I64, I64, I64]] = [(empty, empty, empty, empty)]
    nodes: list[I64] = []
    offset = 0
    for column, num_rows in parts:
        if column is None:
            nodes.append(np.full(num_rows, NO_NODE, dtype=np.int64))
            continue
        store = column.store
        parent = np.where(store.parent == NO_NODE, NO_NODE, store.parent + offset)
        arrays.append((parent, store.space + len(spaces), store.number, store.tokens))
        nodes.append(np.where(column.nodes == NO_NODE, NO_NODE, column.nodes + offset))
        spaces.extend(store.spaces)
        offset += len(store.parent)
    joined = [np.concatenate(column) for column in zip(*arrays, strict=True)]
    return ContentColumn(ContentStore(tuple(spaces), *joined), np.concatenate(nodes))


class ContentBuilder:
    """Builds a store prompt by prompt; equal prefixes are stored once."""

    def __init__(self, spaces: tuple[SegmentSpace, ...]) -> None:
        self._spaces = spaces
        self._parent: list[int] = []
        self._space: list[int] = []
        self._number: list[int] = []
        self._tokens: list[int] = []
        self._known: dict[tuple[int, int, int, int], int] = {}

    def add(self, parent: int, space: int, number: int, num_tokens: int) -> int:
        """Return the node of a segment after `parent` (NO_NODE at the start of a prompt); add the node if it is new."""
        key = (parent, space, number, num_tokens)
        node = self._known.get(key)
        if node is None:
            node = self._known[key] = len(self._parent)
            self._parent.append(parent)
            self._space.append(space)
            self._number.append(number)
            self._tokens.append(num_tokens)
        return node

    def store(self, spaces: tuple[SegmentSpace, ...] | None = None) -> ContentStore:
        """Return the store of everything added so far.

        `spaces`: replacement for the spaces passed to the constructor; needed if their tables of ids have grown since.
        """
        arrays = (np.array(a, dtype=np.int64) for a in (self._parent, self._space, self._number, self._tokens))
        return ContentStore(spaces if spaces is not None else self._spaces, *arrays)


def content_from_prompts(prompts: Sequence[PromptContent | None]) -> ContentColumn | None:
    """Return the column of the prompts' contents; None if all contents are None."""
    if all(prompt is None for prompt in prompts):
        return None
    builder = ContentBuilder(())
    numbers: dict[SegmentId, int] = {}
    nodes = int64s(len(prompts), NO_NODE)
    for row, prompt in enumerate(prompts):
        node = NO_NODE
        for segment_id, num_tokens in prompt.segments if prompt is not None else ():
            node = builder.add(node, 0, numbers.setdefault(segment_id, len(numbers)), num_tokens)
        nodes[row] = node
    return ContentColumn(builder.store((SegmentSpace("explicit", table=tuple(numbers)),)), nodes)
