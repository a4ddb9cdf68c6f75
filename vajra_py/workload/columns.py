"""Columnar storage of a workload's requests.

Invariants: all columns are as long as `arrived_at`; the row of a request comes after the rows of its parents (the
requests that it follows); an absent column stands for the default of `RequestSpec` in every row. The one exception is
`parent_calls`: if it is absent, each call of a program states its parents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
from msgspec import Struct, field, structs

from vajra_py.contract.facts import FACTS, Fact
from vajra_py.workload.arrays import F64, I64, ObjectArray, StringColumn, int64s, objects
from vajra_py.workload.content import NO_NODE, ContentColumn, concat_content, content_from_prompts
from vajra_py.workload.generated import maker
from vajra_py.workload.request import NO_METADATA, MetadataValue, PromptContent, RequestSpec, follows_of
from vajra_py.workload.stated import FactColumn, FactFormat, format_of

__all__ = ["Columns", "columns_from_requests", "concat_columns", "follow_columns", "in_order"]

BLOCK_ROWS = 4096
_FORMATS: Mapping[str, tuple[Fact, FactFormat]] = {fact.name: (fact, format_of(fact)) for fact in FACTS}
_make_request = maker(
    RequestSpec,
    (
        *("request_id", "arrived_at", "num_prompt_tokens", "num_output_tokens", "max_tokens", *_FORMATS),
        *("content", "prompt_token_ids", "follows", "think_time_s", "metadata"),
    ),
)


class Columns(Struct, frozen=True):
    """Columns of a workload.

    None is stored as -1 in `max_tokens` and in `follows` (which holds row numbers); for stated facts, see `FactColumn`.
    """

    arrived_at: F64
    num_prompt_tokens: I64
    num_output_tokens: I64
    request_id: StringColumn
    max_tokens: I64 | None = None
    stated: Mapping[str, FactColumn] = field(default_factory=dict)
    """Columns of facts stated by clients, by name, in the order of `FACTS`; `stating` preserves this order."""
    content: ContentColumn | None = None
    prompt_token_ids: ObjectArray | None = None
    follows: I64 | None = None
    """Row of each request's first parent; -1 if it has none."""
    joins: ObjectArray | None = None
    """Rows of each request's parents after the first, as a tuple; None if no request has several parents."""
    think_time_s: F64 | None = None
    metadata: ObjectArray | None = None

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.arrived_at)

    def stating(self, changes: Mapping[str, FactColumn]) -> Columns:
        """Return a copy in which the columns in `changes` replace the present columns of the same facts."""
        return structs.replace(self, stated=in_order({**self.stated, **changes}))

    def values(self, name: str) -> list[Any]:
        """Return the value of a fact for each request."""
        return self._stated(name, 0, len(self))

    @property
    def session_id(self) -> StringColumn | None:
        """Session of each request; None if no request has one."""
        return self._texts("session_id")

    @property
    def program_id(self) -> StringColumn | None:
        """Program of each request; None if no request has one."""
        return self._texts("program_id")

    @property
    def unit_id(self) -> StringColumn | None:
        """Program of each request, or its session if it has no program; None if no request has either."""
        programs, sessions = self.program_id, self.session_id
        if programs is None or sessions is None:
            return sessions if programs is None else programs
        pairs = zip(programs.tolist(), sessions.tolist(), strict=True)
        return StringColumn.of(program or session for program, session in pairs)

    def _texts(self, name: str) -> StringColumn | None:
        column = self.stated.get(name)
        return column if isinstance(column, StringColumn) else None

    def take(self, rows: I64) -> Columns:
        """Return the given rows, in that order.

        A parent that is not among these rows is replaced by its nearest ancestors that are.
        """
        changed: dict[str, Any] = {}
        for column, value in structs.asdict(self).items():
            if value is None or column in ("follows", "joins"):
                continue
            if column == "stated":
                changed["stated"] = {name: _taken(one, rows) for name, one in self.stated.items()}
            else:
                changed[column] = _taken(value, rows)
        if self.joins is not None:
            changed |= follow_columns(_kept_parents(self.parents, len(self), rows))
        elif self.follows is not None:
            changed["follows"] = _kept_ancestors(self.follows, rows)
        return structs.replace(self, **changed)

    def sorted_by_arrival(self) -> Columns:
        """Return the requests in order of arrival; ties keep their order."""
        if len(self) < 2 or bool(np.all(self.arrived_at[1:] >= self.arrived_at[:-1])):
            return self
        return self.take(np.argsort(self.arrived_at, kind="stable"))

    def renamed(self, prefix: str, *, share_content: bool) -> Columns:
        """Return the requests with `prefix` before the ids of requests, sessions and programs.

        Without `share_content`, segment ids are renamed too, so that the prompts share nothing with other workloads.
        """
        named = {"session_id": self.session_id, "program_id": self.program_id}
        changes: dict[str, FactColumn] = {
            name: column.renamed(prefix) for name, column in named.items() if column is not None
        }
        if "parent_calls" in self.stated:
            changes["parent_calls"] = objects(
                [tuple(prefix + parent for parent in parents) for parents in self.values("parent_calls")]
            )
        return structs.replace(
            self.stating(changes),
            request_id=self.request_id.renamed(prefix),
            content=None if self.content is None else self.content.renamed(prefix, share=share_content),
        )

    def parents(self, row: int) -> tuple[int, ...]:
        """Return the rows of a request's parents."""
        first = -1 if self.follows is None else int(self.follows[row])
        if first < 0:
            return ()
        return (first,) if self.joins is None else (first, *self.joins[row])

    def row(self, row: int) -> RequestSpec:
        """Return the request in this row (from 0)."""
        return next(self.rows(row, row + 1))

    def rows(self, start: int, stop: int) -> Iterator[RequestSpec]:
        """Yield the requests of rows [start, stop)."""
        for begin in range(start, stop, BLOCK_ROWS):
            yield from self._block(begin, min(begin + BLOCK_ROWS, stop))

    def _block(self, start: int, stop: int) -> Iterator[RequestSpec]:
        size = stop - start
        prompts = self.num_prompt_tokens[start:stop].tolist()
        columns: tuple[Sequence[Any], ...] = (
            self.request_id.slice(start, stop).tolist(),
            self.arrived_at[start:stop].tolist(),
            prompts,
            self.num_output_tokens[start:stop].tolist(),
            _optional_ints(self.max_tokens, start, stop),
            *(self._stated(name, start, stop) for name in _FORMATS),
            self._contents(start, prompts),
            self._token_ids(start, prompts),
            self._followed(start, stop),
            [0.0] * size if self.think_time_s is None else self.think_time_s[start:stop].tolist(),
            [NO_METADATA] * size if self.metadata is None else self.metadata[start:stop].tolist(),
        )
        return map(_make_request, *columns)

    def _stated(self, name: str, start: int, stop: int) -> list[Any]:
        fact, format = _FORMATS[name]
        column = self.stated.get(name)
        if column is None:
            if name == "parent_calls" and self.program_id is not None and self.follows is not None:
                return self._parent_calls(self.program_id, start, stop)
            return [fact.default] * (stop - start)
        return format.values(column.slice(start, stop) if isinstance(column, StringColumn) else column[start:stop])

    def _parent_calls(self, programs: StringColumn, start: int, stop: int) -> list[tuple[str, ...]]:
        """Return the ids of the parents of each program call, for workloads without the column `parent_calls`."""
        ids = self.request_id
        return [
            tuple(ids[parent] for parent in self.parents(row)) if program else ()
            for row, program in enumerate(programs.slice(start, stop).tolist(), start)
        ]

    def _contents(self, start: int, prompts: Sequence[int]) -> list[PromptContent | None]:
        column = self.content
        if column is None:
            return [None] * len(prompts)
        return [column.get(row, length) for row, length in enumerate(prompts, start)]

    def _token_ids(self, start: int, prompts: Sequence[int]) -> list[tuple[int, ...] | None]:
        column = self.prompt_token_ids
        if column is None:
            return [None] * len(prompts)
        return [None if ids is None else ids[:length] for ids, length in zip(column[start:], prompts, strict=False)]

    def _followed(self, start: int, stop: int) -> list[str | tuple[str, ...] | None]:
        if self.follows is None:
            return [None] * (stop - start)
        if self.joins is not None:
            return [follows_of([self.request_id[row] for row in self.parents(child)]) for child in range(start, stop)]
        return [None if row < 0 else self.request_id[row] for row in self.follows[start:stop].tolist()]


def _optional_ints(column: I64 | None, start: int, stop: int) -> list[int | None]:
    if column is None:
        return [None] * (stop - start)
    return [None if value < 0 else value for value in column[start:stop].tolist()]


def in_order(stated: Mapping[str, FactColumn]) -> dict[str, FactColumn]:
    """Return the columns of facts in the order of `FACTS`."""
    return {name: stated[name] for name in _FORMATS if name in stated}


def _taken(column: Any, rows: I64) -> Any:
    return column.take(rows) if isinstance(column, StringColumn | ContentColumn) else column[rows]


def _kept_ancestors(follows: I64, rows: I64) -> I64:
    """Return for each of `rows` the new row of its nearest kept ancestor, -1 if there is none.

    `follows` holds the row of each request's only parent.
    """
    new_row = int64s(len(follows), -1)
    new_row[rows] = np.arange(len(rows))
    ancestor = follows[rows]
    while True:
        lost = (ancestor >= 0) & (new_row[ancestor] < 0)
        if not bool(lost.any()):
            return np.where(ancestor >= 0, new_row[ancestor], -1)
        ancestor = np.where(lost, follows[ancestor], ancestor)


def _kept_parents(parents: Callable[[int], Sequence[int]], size: int, rows: I64) -> list[tuple[int, ...]]:
    """Return for each of `rows` the new rows of its parents; nearest kept ancestors replace parents that are dropped.

    No row occurs twice among the parents of a request.
    """
    new_row = int64s(size, -1)
    new_row[rows] = np.arange(len(rows))
    place = new_row.tolist()
    nearest: dict[int, tuple[int, ...]] = {}

    def resolve(row: int) -> tuple[int, ...]:
        pending = [row]
        while pending:  # no recursion: chains may be long
            at = pending[-1]
            unknown = [parent for parent in parents(at) if place[parent] < 0 and parent not in nearest]
            if unknown:
                pending += unknown
                continue
            pending.pop()
            found = [(place[parent],) if place[parent] >= 0 else nearest[parent] for parent in parents(at)]
            nearest[at] = tuple(dict.fromkeys(each for group in found for each in group))
        return nearest[row]

    return [resolve(row) for row in rows.tolist()]


def follow_columns(parents: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the columns `follows` and `joins`, given the rows of each request's parents."""
    more = [tuple(rows[1:]) for rows in parents]
    return {
        "follows": np.array([rows[0] if rows else -1 for rows in parents], dtype=np.int64) if any(parents) else None,
        "joins": objects(more) if any(more) else None,
    }


def _joined(parts: Sequence[Columns], name: str, default: Callable[[int], Any]) -> Any:
    """Concatenate one optional column of all parts, with defaults for parts without it; None if no part has it."""
    return _concatenated([getattr(part, name) for part in parts], parts, default)


def _concatenated(values: Sequence[Any], parts: Sequence[Columns], default: Callable[[int], Any]) -> Any:
    if all(value is None for value in values):
        return None
    filled = [default(len(part)) if value is None else value for part, value in zip(parts, values, strict=True)]
    return StringColumn.concat(filled) if isinstance(filled[0], StringColumn) else np.concatenate(filled)


def _default_column(format: FactFormat, value: Any, size: int) -> FactColumn:
    return format.column([value] * size)


def _joined_facts(parts: Sequence[Columns]) -> dict[str, FactColumn]:
    joined = {}
    for name, (fact, format) in _FORMATS.items():
        default = partial(_default_column, format, fact.default)
        columns = [part.stated.get(name) for part in parts]
        if name == "parent_calls" and any(column is not None for column in columns):
            columns = [format.column(part.values(name)) for part in parts]
        joined[name] = _concatenated(columns, parts, default)
    return {name: column for name, column in joined.items() if column is not None}


def _shifted(part: Columns, offset: int) -> Columns:
    """Return the requests with `offset` added to the row numbers of their parents."""
    if part.follows is None:
        return part
    joins = part.joins
    if joins is not None:
        joins = objects([tuple(row + offset for row in rows) for rows in joins])
    return structs.replace(part, follows=np.where(part.follows < 0, -1, part.follows + offset), joins=joins)


def concat_columns(parts: Sequence[Columns]) -> Columns:
    """Concatenate the requests of all parts, without sorting them."""
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
    shifted = [_shifted(part, offset) for part, offset in zip(parts, offsets[:-1].tolist(), strict=True)]

    def absent(size: int) -> I64:
        return int64s(size, NO_NODE)

    return Columns(
        arrived_at=np.concatenate([part.arrived_at for part in parts]),
        num_prompt_tokens=np.concatenate([part.num_prompt_tokens for part in parts]),
        num_output_tokens=np.concatenate([part.num_output_tokens for part in parts]),
        request_id=StringColumn.concat([part.request_id for part in parts]),
        max_tokens=_joined(parts, "max_tokens", absent),
        stated=_joined_facts(parts),
        content=concat_content([(part.content, len(part)) for part in parts]),
        prompt_token_ids=_joined(parts, "prompt_token_ids", lambda size: objects([None] * size)),
        follows=_joined(shifted, "follows", absent),
        joins=_joined(shifted, "joins", lambda size: objects([()] * size)),
        think_time_s=_joined(parts, "think_time_s", np.zeros),
        metadata=_joined(parts, "metadata", lambda size: objects([NO_METADATA] * size)),
    )


def columns_from_requests(requests: Sequence[RequestSpec]) -> Columns:
    """Return the columns of requests, which must be in arrival order with unique ids and parents before children."""
    row_of = {request.request_id: row for row, request in enumerate(requests)}

    def ints(values: list[int], default: int) -> I64 | None:
        return None if all(value == default for value in values) else np.array(values, dtype=np.int64)

    has_ids = any(r.prompt_token_ids is not None for r in requests)
    has_metadata = any(r.metadata for r in requests)
    thinks = [r.think_time_s for r in requests]
    metadata: list[Mapping[str, MetadataValue]] = [r.metadata if r.metadata else NO_METADATA for r in requests]
    return Columns(
        arrived_at=np.array([r.arrived_at for r in requests], dtype=np.float64),
        num_prompt_tokens=np.array([r.num_prompt_tokens for r in requests], dtype=np.int64),
        num_output_tokens=np.array([r.num_output_tokens for r in requests], dtype=np.int64),
        request_id=StringColumn.of(row_of),
        max_tokens=ints([-1 if r.max_tokens is None else r.max_tokens for r in requests], -1),
        stated=_stated_columns(requests),
        content=content_from_prompts([r.content for r in requests]),
        prompt_token_ids=objects([r.prompt_token_ids for r in requests]) if has_ids else None,
        **follow_columns([[row_of[parent] for parent in r.parents] for r in requests]),
        think_time_s=np.array(thinks, dtype=np.float64) if any(thinks) else None,
        metadata=objects(metadata) if has_metadata else None,
    )


def _stated_columns(requests: Sequence[RequestSpec]) -> dict[str, FactColumn]:
    """Return a column for each fact that any of the requests states."""
    stated = {name: list(map(attrgetter(name), requests)) for name in _FORMATS}
    return {
        name: _FORMATS[name][1].column(values)
        for name, values in stated.items()
        if any(value != _FORMATS[name][0].default for value in values)
    }
