"""The workload type: scale, cut, merge and label requests.

Invariants: requests are sorted by arrival (ties keep the order of their source), their ids are unique, a request comes
after its parents. An operation returns a new workload and adds its description to `source["operations"]`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import numpy as np
from msgspec import structs

from vajra_py.contract.facts import FACTS, FactKind
from vajra_py.errors import WorkloadError, did_you_mean
from vajra_py.workload.arrays import F64, I64, StringColumn
from vajra_py.workload.columns import Columns, columns_from_requests, concat_columns
from vajra_py.workload.files import is_encodable
from vajra_py.workload.followers import problem_with_parents
from vajra_py.workload.request import RequestSpec
from vajra_py.workload.stated import FactColumn, format_of
from vajra_py.workload.statistics import WorkloadStatistics, mean_rate, shared_prompt_tokens, workload_statistics
from vajra_py.workload.truth import TrueLengths

__all__ = ["SloClass", "Workload"]

TooLong = Literal["drop", "clip", "error"]
_DURATIONS = tuple(fact.name for fact in FACTS if fact.kind is FactKind.DURATION)
_TEXTS = tuple(fact.name for fact in FACTS if fact.kind in {FactKind.TEXT, FactKind.TEXTS})


@dataclass(frozen=True, slots=True)
class SloClass:
    """A service class and the facts that its requests state.

    `share` is a weight relative to the other classes'. `facts` holds facts of `StatedFacts` by name. If a fact is None
    or absent there, requests of this class keep their own value of it. Durations (such as SLOs) are an exception: if
    another class states a duration that this class does not, requests of this class lose their own value of it.
    """

    name: str
    share: float = 1.0
    facts: Mapping[str, Any] = field(default_factory=dict, hash=False)


class Workload(Sequence[RequestSpec]):
    """Requests in order of arrival, stored in columns (about 100 bytes each); `RequestSpec`s are built on access.

    Attributes:
        name: Name for display, and the prefix of the requests' ids in a merged workload.
        columns: Columns of the requests; read-only.
        source: Origin, for the manifest of a run: kind, file and its SHA-256, rows dropped, random streams, operations.
            JSON values only.
    """

    __slots__ = ("columns", "name", "source")

    def __init__(self, columns: Columns, name: str, source: Mapping[str, Any] | None = None) -> None:
        self.columns = columns.sorted_by_arrival()
        self.name = name
        self.source: Mapping[str, Any] = {} if source is None else source

    @classmethod
    def from_requests(cls, requests: Iterable[RequestSpec], name: str = "workload", *, sort: bool = False) -> Workload:
        """Return a workload of the given requests.

        Raises:
            WorkloadError: a value is out of range, an id occurs twice, a parent is missing or comes later, or the
                requests are not in order of arrival (and `sort` is false).
        """
        listed = list(requests)
        if sort:
            listed.sort(key=lambda request: request.arrived_at)
        check_requests(listed, name)
        return cls(columns_from_requests(listed), name, {"kind": "requests"})

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.columns)

    def __iter__(self) -> Iterator[RequestSpec]:
        """Return an iterator over the requests in order of arrival."""
        return self.columns.rows(0, len(self))

    @overload
    def __getitem__(self, index: int) -> RequestSpec: ...

    @overload
    def __getitem__(self, index: slice) -> list[RequestSpec]: ...

    def __getitem__(self, index: int | slice) -> RequestSpec | list[RequestSpec]:
        """Return one request, or a list for a slice (the method `slice` returns a workload)."""
        if isinstance(index, slice):
            return [self.columns.row(row) for row in range(*index.indices(len(self)))]
        row = index + len(self) if index < 0 else index
        if not 0 <= row < len(self):
            raise IndexError(f"request {index} of a workload of {len(self)}")
        return self.columns.row(row)

    def __repr__(self) -> str:
        """Return a text with the name and the size."""
        return f"<Workload {self.name!r}: {len(self)} requests>"

    @property
    def has_followers(self) -> bool:
        """True if some request waits for the end of another one."""
        return self.columns.follows is not None and bool(np.any(self.columns.follows >= 0))

    def leaders(self) -> Workload:
        """Return a workload of the requests without parents."""
        if self.columns.follows is None:
            return self
        rows = np.nonzero(self.columns.follows < 0)[0].astype(np.int64)
        alone = structs.replace(self.columns, follows=None, joins=None, think_time_s=None)
        return Workload(alone.take(rows), self.name, self.source)

    @property
    def rate(self) -> float:
        """Requests per second: 1 / mean inter-arrival time; 0 if undefined."""
        return mean_rate(self.columns.arrived_at)

    def true_lengths(self) -> Mapping[str, int]:
        """Return the true output length of every request in tokens, by id; never shown to policies."""
        return TrueLengths(self.columns)

    def statistics(self) -> WorkloadStatistics:
        """Compute rate, burstiness, lengths and prefix sharing."""
        return workload_statistics(self.columns)

    def shared_prefix_tokens(self) -> I64 | None:
        """Return each request's number of prompt tokens that would hit an unlimited prefix cache with one-token blocks.

        Return None if no content is known.
        """
        return None if self.columns.content is None else shared_prompt_tokens(self.columns, self.columns.content)

    def renamed(self, name: str) -> Workload:
        """Return the workload under another name."""
        return Workload(self.columns, name, self.source)

    def _derived(self, columns: Columns, **operation: Any) -> Workload:
        operations = [*self.source.get("operations", []), operation]
        return Workload(columns, self.name, {**self.source, "operations": operations})

    def scale_time(self, factor: float) -> Workload:
        """Multiply all arrivals and think times by `factor` (> 0; 2 halves the rate). SLOs and deadlines stay
        unchanged.
        """
        return self._derived(
            self._stretched("scale_time", self._checked_factor("scale_time", factor)), op="scale_time", factor=factor
        )

    def at_rate(self, requests_per_s: float) -> Workload:
        """Return the workload stretched to the mean rate `requests_per_s` (> 0): arrivals are multiplied by a factor.

        Raises:
            WorkloadError: the workload has no rate (fewer than two requests, or all at once), or requests follow one
                another, so that the rate depends on the system that serves them.
        """
        if self.has_followers:
            message = "requests follow one another: their rate depends on the system and cannot be set"
            raise WorkloadError(self.name, None, message, "The rate at which sessions start; or time_scale")
        wanted = self._checked_factor("at_rate", requests_per_s)
        if not self.rate:
            raise WorkloadError(
                self.name,
                None,
                f"has no rate to change ({len(self)} requests, all at once)",
                "At least two arrival times",
            )
        return self._derived(
            self._stretched("at_rate", self.rate / wanted), op="at_rate", requests_per_s=requests_per_s
        )

    def _stretched(self, operation: str, factor: float) -> Columns:
        columns = self.columns
        with np.errstate(over="ignore", invalid="ignore"):
            arrived_at = columns.arrived_at * factor
            think_time_s: F64 | None = None if columns.think_time_s is None else columns.think_time_s * factor
        if not factor or not all(np.isfinite(times).all() for times in (arrived_at, think_time_s) if times is not None):
            message = f"{operation}: {factor:g} times as long, so that times would be infinite or all 0"
            raise WorkloadError(self.name, None, message, "A factor that keeps times finite and above 0")
        return structs.replace(columns, arrived_at=arrived_at, think_time_s=think_time_s)

    def _checked_factor(self, operation: str, factor: float) -> float:
        if not (math.isfinite(factor) and factor > 0):
            raise WorkloadError(
                self.name, None, f"{operation} cannot use this number ({factor!r})", "A finite number > 0"
            )
        return factor

    def slice(
        self, *, start_s: float | None = None, end_s: float | None = None, skip: int = 0, first: int | None = None
    ) -> Workload:
        """Select requests with start_s <= arrival < end_s, drop the first `skip` of them, and keep the next `first`.

        The clock of the result starts at `start_s`, or with `skip` at the first request kept. A request whose parents
        are all cut off arrives at its nominal time.
        """
        arrived_at = self.columns.arrived_at
        low = 0 if start_s is None else int(np.searchsorted(arrived_at, start_s, side="left"))
        high = len(self) if end_s is None else int(np.searchsorted(arrived_at, end_s, side="left"))
        low = min(low + skip, max(low, high))
        high = high if first is None else min(high, low + first)
        columns = self.columns.take(np.arange(low, max(low, high), dtype=np.int64))
        origin = (start_s or 0.0) if not skip or not len(columns) else float(columns.arrived_at[0])
        if origin:
            columns = structs.replace(columns, arrived_at=columns.arrived_at - origin)
        return self._derived(columns, op="slice", start_s=start_s, end_s=end_s, skip=skip, first=first)

    def merge(self, *others: Workload, name: str | None = None, share_content: bool = False) -> Workload:
        """Return this workload and others on one clock, sorted by arrival.

        Ids of requests, sessions and programs are prefixed with the name of their workload (`conv/17`; equal names are
        numbered, as in `conv#2/17`), so that they stay unique. Prompts of different workloads share prefixes only with
        `share_content`.
        """
        parts = [self, *others]
        names = distinct_names([part.name for part in parts])
        columns = concat_columns(
            [part.columns.renamed(f"{n}/", share_content=share_content) for part, n in zip(parts, names, strict=True)]
        )
        sources = [{"name": n, **part.source} for part, n in zip(parts, names, strict=True)]
        return Workload(
            columns, name or "+".join(names), {"kind": "merge", "share_content": share_content, "parts": sources}
        )

    def with_max_tokens(self, max_tokens: int) -> Workload:
        """Set `max_tokens` (>= 1) of every request; the true output lengths stay unchanged."""
        if max_tokens < 1:
            raise WorkloadError(self.name, None, f"max_tokens is too small ({max_tokens})", "A whole number >= 1")
        column = np.full(len(self), max_tokens, dtype=np.int64)
        return self._derived(
            structs.replace(self.columns, max_tokens=column), op="with_max_tokens", max_tokens=max_tokens
        )

    def with_priorities(self, shares: Mapping[int, float], rng: np.random.Generator) -> Workload:
        """Draw a priority, by relative shares, for each program or session, and for each request that has neither."""
        codes = self._drawn(list(shares.values()), rng, "priorities")
        values = np.array(list(shares), dtype=np.int64)
        facts = {str(priority): share for priority, share in shares.items()}
        return self._derived(self.columns.stating({"priority": values[codes]}), op="with_priorities", shares=facts)

    def with_tenants(self, shares: Mapping[str, float], rng: np.random.Generator) -> Workload:
        """Draw a tenant, by relative shares, for each program or session, and for each request that has neither."""
        codes = self._drawn(list(shares.values()), rng, "tenants")
        column = StringColumn(tuple(shares), codes.astype(np.int32))
        return self._derived(self.columns.stating({"tenant": column}), op="with_tenants", shares=dict(shares))

    def with_slo_classes(self, classes: Sequence[SloClass], rng: np.random.Generator) -> Workload:
        """Draw an SLO class, by relative shares, for each program or session, and for each request that has neither."""
        codes = self._drawn([entry.share for entry in classes], rng, "SLO classes")
        changes: dict[str, FactColumn] = {
            "slo_class": StringColumn(tuple(c.name for c in classes), codes.astype(np.int32))
        }
        changes |= _stated_by_class(self.columns, codes, classes)
        return self._derived(
            self.columns.stating(changes),
            op="with_slo_classes",
            shares={entry.name: entry.share for entry in classes},
        )

    def _drawn(self, shares: Sequence[float], rng: np.random.Generator, what: str) -> I64:
        """Draw an index into `shares` for each request, equal for all requests of a program or session."""
        weights = np.array(shares, dtype=np.float64)
        if not len(weights) or not bool(np.all(np.isfinite(weights) & (weights >= 0))) or not weights.sum() > 0:
            raise WorkloadError(
                self.name, None, f"shares of {what} are invalid ({list(shares)})", "Numbers >= 0, not all 0"
            )
        bounds = np.cumsum(weights) / weights.sum()
        groups = _groups(self.columns)
        uniform = rng.random(int(groups.max()) + 1 if len(groups) else 0)
        last = int(np.nonzero(weights)[0][-1])
        choice = np.minimum(np.searchsorted(bounds, uniform, side="right"), last)
        return choice.astype(np.int64)[groups]

    def limit_lengths(
        self, max_prompt_tokens: int | None = None, max_total_tokens: int | None = None, too_long: TooLong = "drop"
    ) -> Workload:
        """Limit prompts to `max_prompt_tokens`, and the sum of prompt and output to `max_total_tokens`.

        `drop` removes longer requests (their children follow the nearest ancestors kept). `clip` first shortens prompts
        to `max_prompt_tokens` and to `max_total_tokens` - 1. It then shortens outputs until prompt and output together
        have at most `max_total_tokens`. `source["operations"]` records the number of changed requests.

        Raises:
            WorkloadError: a request is too long and `too_long` is "error", or a limit leaves no room for one token each
                of prompt and output.
        """
        if (max_prompt_tokens is not None and max_prompt_tokens < 1) or (
            max_total_tokens is not None and max_total_tokens < 2
        ):
            given = f"max_prompt_tokens={max_prompt_tokens}, max_total_tokens={max_total_tokens}"
            raise WorkloadError(
                self.name, None, f"limits leave no room ({given})", "max_prompt_tokens >= 1, max_total_tokens >= 2"
            )
        prompts, outputs = self.columns.num_prompt_tokens, self.columns.num_output_tokens
        over = np.zeros(len(self), dtype=np.bool_)
        if max_prompt_tokens is not None:
            over |= prompts > max_prompt_tokens
        if max_total_tokens is not None:
            over |= prompts + outputs > max_total_tokens
        num_over = int(over.sum())
        facts = {
            "op": "limit_lengths",
            "max_prompt_tokens": max_prompt_tokens,
            "max_total_tokens": max_total_tokens,
            "too_long": too_long,
        }
        if too_long == "error" and num_over:
            worst = self[int(np.argmax(over))]
            lengths = f"{worst.num_prompt_tokens} prompt + {worst.num_output_tokens} output tokens"
            message = f"{num_over} requests are too long, the first of them {worst.request_id!r} ({lengths})"
            allowed = (
                f"max_prompt_tokens={max_prompt_tokens}, max_total_tokens={max_total_tokens}; or too_long: drop, clip"
            )
            raise WorkloadError(self.name, None, message, allowed)
        if too_long == "clip" and num_over:
            ceiling = np.iinfo(np.int64).max if max_total_tokens is None else max_total_tokens
            shortest = min(ceiling - 1, ceiling if max_prompt_tokens is None else max_prompt_tokens)
            prompts = np.minimum(prompts, shortest)
            columns = structs.replace(
                self.columns, num_prompt_tokens=prompts, num_output_tokens=np.minimum(outputs, ceiling - prompts)
            )
            return self._derived(columns, **facts, num_clipped=num_over)
        columns = self.columns.take(np.nonzero(~over)[0].astype(np.int64)) if num_over else self.columns
        return self._derived(columns, **facts, num_dropped=num_over)


def _stated_by_class(columns: Columns, codes: I64, classes: Sequence[SloClass]) -> dict[str, FactColumn]:
    """Return the columns of the facts that classes state; `codes` holds the index of each request's class."""
    unknown = sorted({name for entry in classes for name in entry.facts} - {fact.name for fact in FACTS})
    if unknown:
        allowed = did_you_mean(unknown[0], [fact.name for fact in FACTS])
        raise WorkloadError("SLO classes", None, f"no such fact ({unknown[0]!r})", allowed)
    changed: dict[str, FactColumn] = {}
    for fact in FACTS:
        by_class = [entry.facts.get(fact.name) for entry in classes]
        if all(value is None for value in by_class):
            continue
        values = [by_class[code] for code in codes.tolist()]
        if fact.kind is not FactKind.DURATION:
            own = columns.values(fact.name)
            values = [before if value is None else value for value, before in zip(values, own, strict=True)]
        changed[fact.name] = format_of(fact).column(values)
    return changed


def _groups(columns: Columns) -> I64:
    """Return a group number per request: equal within a program or session, unique for a request that has neither."""
    rows = np.arange(len(columns), dtype=np.int64)
    units = columns.unit_id
    if units is None:
        return rows
    groups = units.groups()
    _, first = np.unique(groups, return_index=True)
    alone = [group for group, row in enumerate(first.tolist()) if not units[row]]
    if not alone:
        return groups
    return np.unique(np.where(groups == alone[0], rows + len(rows), groups), return_inverse=True)[1].reshape(-1)


def distinct_names(names: Sequence[str]) -> list[str]:
    """Return the names, with `#2`, `#3`, … appended to repeated ones."""
    taken: set[str] = set()
    result: list[str] = []
    for name in names:
        candidate, count = name, 1
        while candidate in taken:
            count += 1
            candidate = f"{name}#{count}"
        taken.add(candidate)
        result.append(candidate)
    return result


def check_requests(requests: Sequence[RequestSpec], where: str, lines: Sequence[int] | None = None) -> None:
    """Check that requests form a workload: in order of arrival, with unique ids and valid values, each after its
    parents.

    Raises:
        WorkloadError: for the first invalid request; the error gives its line, or its id if `lines` is None.
    """
    seen: dict[str, float] = {}
    before = 0.0
    parents_of = {request.request_id: request.parents for request in requests}
    for index, request in enumerate(requests):
        problem = _problem(request, before, seen, parents_of)
        if problem is not None:
            line = None if lines is None else lines[index]
            place = where if lines is not None else f"{where} request {request.request_id!r}"
            raise WorkloadError(place, line, *problem)
        seen[request.request_id] = request.arrived_at
        before = request.arrived_at


def _problem(
    request: RequestSpec, before: float, seen: Mapping[str, float], parents_of: Mapping[str, Sequence[str]]
) -> tuple[str, str] | None:
    if not (math.isfinite(request.arrived_at) and request.arrived_at >= 0):
        return f"arrived_at is not a time ({request.arrived_at!r})", "A finite number of seconds >= 0"
    if request.arrived_at < before:
        return (
            f"arrives before the request above it ({request.arrived_at!r} after {before!r})",
            "Ascending times; or sort: true",
        )
    if request.request_id in seen or not request.request_id:
        return f"request_id is empty or used before ({request.request_id!r})", "A different id for each request"
    for name in ("request_id", *_TEXTS):
        if not is_encodable(getattr(request, name)):
            return f"{name} has half of a surrogate pair ({getattr(request, name)!r})", "Text of whole characters"
    for name in ("num_prompt_tokens", "num_output_tokens", "max_tokens"):
        value = getattr(request, name)
        if value is not None and value < 1:
            return f"{name} is too small ({value!r})", "A whole number >= 1"
    for name in (*_DURATIONS, "think_time_s"):
        value = getattr(request, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            return f"{name} is not a duration ({value!r})", "A finite number of seconds >= 0"
    if request.follows is not None and not request.parents:
        return "follows an empty list of requests", "None, the id of an earlier request, or several different ones"
    if (problem := problem_with_parents(request.request_id, request.parents, seen, parents_of)) is not None:
        return problem
    if request.content is not None and request.content.num_tokens != request.num_prompt_tokens:
        return (
            f"content describes {request.content.num_tokens} tokens of a prompt of {request.num_prompt_tokens}",
            "Segments that add up to num_prompt_tokens",
        )
    if request.content is not None and any(length < 1 for _, length in request.content.segments):
        return "content has a segment without tokens", "Segments of at least 1 token"
    if request.prompt_token_ids is not None and len(request.prompt_token_ids) != request.num_prompt_tokens:
        count = len(request.prompt_token_ids)
        return (
            f"prompt_token_ids holds {count} ids for a prompt of {request.num_prompt_tokens}",
            "One id per prompt token",
        )
    return None
