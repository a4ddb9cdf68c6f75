"""Facts that clients state about their requests; each fact is declared once, in this module.

A field of `StatedFacts` declares a fact. All of these are derived from it: fields of requests in workloads and in the
mechanism, columns of workload files and of the requests table, recordings, HTTP headers and body fields, `extra_args`
of vLLM, attributes of spans, and the table of facts in the documentation. Only `RequestView` repeats the facts that
policies can read, as documentation for policy authors.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from enum import Enum
from typing import Annotated, Any, TypeGuard, get_args, get_type_hints

from vajra_py.contract.latency import LAST_S

__all__ = ["DURATION_LIMITS_S", "FACTS", "INTEGER_LIMITS", "Fact", "FactInfo", "FactKind", "StatedFacts", "is_number"]

DURATION_LIMITS_S = 1e-6, LAST_S
"""Shortest and longest duration that a client of a server may state."""
INTEGER_LIMITS = -(2**31), 2**31 - 1
"""Smallest and largest whole number that a client of a server may state."""


def is_number(value: object) -> TypeGuard[int | float]:
    """Return True for an int or a float whose value as a float is finite; a bool does not count as a number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


class FactKind(Enum):
    """Kind of a fact's values, which determines how every format represents them."""

    TEXT = "text"
    """A string; empty if the client states nothing."""
    TEXTS = "list of texts"
    INTEGER = "whole number"
    NUMBER = "number"
    FLAG = "true or false"
    DURATION = "seconds"
    """A number >= 0, in seconds; the fact's name ends in `_s`. HTTP bodies and headers state it in milliseconds."""


@dataclass(frozen=True, slots=True)
class FactInfo:
    """Description of a fact, in addition to its name, type and default.

    Attributes:
        meaning: One sentence for the documentation, without full stop; units follow from the kind.
        body: Field of an HTTP body; empty: the fact's name, for durations with `_ms` in place of `_s`.
        headers: HTTP headers in order of precedence; None: `x-` and the body's field with dashes.
        seen_as: Name in `RequestView` and in the requests table; empty: the fact's name; None: omitted there.
        span: Attribute of a request's span; empty: `vajra.request.` and the name; None: omitted there.
        has_extra_arg: True if vLLM's `extra_args` may state it.
        least: Smallest allowed integer; None: no limit.
        is_only_where_stated: True if tables and recordings omit it unless a request states it (facts of programs, and
            the adapter).
    """

    meaning: str
    body: str = ""
    headers: tuple[str, ...] | None = None
    seen_as: str | None = ""
    span: str | None = ""
    has_extra_arg: bool = True
    least: int | None = None
    is_only_where_stated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedFacts:
    """All facts, with the defaults that apply if a client does not state them.

    Allowed types are `str`, `tuple[str, ...]`, `bool`, `int`, `int | None` and `float | None`.
    """

    # Not stated in vLLM's `extra_args`: vLLM's requests have a field for the priority.
    priority: Annotated[int, FactInfo("Priority; lower is more urgent", headers=(), has_extra_arg=False)] = 0
    tenant: Annotated[
        str, FactInfo("Sender of the request", body="user", headers=("x-llm-d-inference-fairness-id",))
    ] = ""
    slo_class: Annotated[str, FactInfo("Name of the SLO class")] = ""
    ttft_slo_s: Annotated[
        float | None,
        FactInfo("SLO for the time to first token, from arrival", headers=("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms")),
    ] = None
    tpot_slo_s: Annotated[
        float | None,
        FactInfo(
            "SLO for the mean time per output token after the first", headers=("x-slo-tpot-ms", "x-llm-d-slo-tpot-ms")
        ),
    ] = None
    tbt_slo_s: Annotated[
        float | None, FactInfo("SLO for the longest time between two consecutive tokens", headers=("x-slo-tbt-ms",))
    ] = None
    deadline_s: Annotated[float | None, FactInfo("Deadline of its end, from arrival", seen_as="deadline_at")] = None
    expires_after_s: Annotated[
        float | None, FactInfo("Longest wait before its admission, from arrival", seen_as=None, span=None)
    ] = None
    session_id: Annotated[str, FactInfo("Conversation of the request", span="gen_ai.conversation.id")] = ""
    adapter: Annotated[
        str,
        FactInfo("LoRA adapter of the request", has_extra_arg=False, is_only_where_stated=True),
    ] = ""  # not stated in `extra_args`: vLLM's requests have a field for the adapter
    program_id: Annotated[
        str,
        FactInfo(
            "Program of which it is a call: the calls of one agent, workflow or task",
            headers=(
                *("x-program-id", "x-dynamo-session-id", "x-claude-code-session-id"),
                *("x-session-affinity", "session-id"),
            ),
            is_only_where_stated=True,
        ),
    ] = ""
    stage: Annotated[
        str,
        FactInfo(
            "Name of this kind of call in the program, such as `plan`",
            body="program_stage",
            headers=("x-program-stage",),
            is_only_where_stated=True,
        ),
    ] = ""
    parent_calls: Annotated[
        tuple[str, ...], FactInfo("Ids of the calls of its program whose results it uses", is_only_where_stated=True)
    ] = ()
    num_program_calls: Annotated[
        int | None,
        FactInfo("Total number of calls of its program, as far as known", least=1, is_only_where_stated=True),
    ] = None
    is_last_call: Annotated[
        bool,
        FactInfo(
            "True if it is the last call of its program",
            headers=("x-last-call", "x-dynamo-session-final"),
            is_only_where_stated=True,
        ),
    ] = False
    next_call_after_s: Annotated[
        float | None,
        FactInfo(
            "Expected time from its end to the next call of its program, while a tool runs", is_only_where_stated=True
        ),
    ] = None
    program_slo_s: Annotated[
        float | None,
        FactInfo("SLO for the time from the first call of its program to the program's end", is_only_where_stated=True),
    ] = None


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact: its name, type and default, and the fields of its `FactInfo` with defaults filled in."""

    name: str
    kind: FactKind
    is_optional: bool
    """True if the value may be None."""
    default: Any
    meaning: str
    body: str
    headers: tuple[str, ...]
    seen_as: str | None
    span: str | None
    has_extra_arg: bool
    least: int | None
    is_only_where_stated: bool


_KINDS: dict[Any, FactKind] = {
    str: FactKind.TEXT,
    tuple[str, ...]: FactKind.TEXTS,
    bool: FactKind.FLAG,
    int: FactKind.INTEGER,
    int | None: FactKind.INTEGER,
    float | None: FactKind.NUMBER,
}


def _fact(name: str, annotation: Any, default: Any) -> Fact:
    """Return the fact of a field of `StatedFacts`. Raises TypeError for an unsupported type."""
    value, info = get_args(annotation)
    kind = _KINDS.get(value)
    if kind is None:
        raise TypeError(f"fact {name}: no format holds this type ({value}). Allowed: {', '.join(map(str, _KINDS))}")
    if kind is FactKind.NUMBER and name.endswith("_s"):
        kind = FactKind.DURATION
    body = info.body or (f"{name.removesuffix('_s')}_ms" if kind is FactKind.DURATION else name)
    return Fact(
        name=name,
        kind=kind,
        is_optional=type(None) in get_args(value),
        default=default,
        meaning=info.meaning,
        body=body,
        headers=(f"x-{body.replace('_', '-')}",) if info.headers is None else info.headers,
        seen_as=info.seen_as if info.seen_as != "" else name,
        span=info.span if info.span != "" else f"vajra.request.{name}",
        has_extra_arg=info.has_extra_arg,
        least=info.least,
        is_only_where_stated=info.is_only_where_stated,
    )


def _facts() -> tuple[Fact, ...]:
    hints = get_type_hints(StatedFacts, include_extras=True)
    return tuple(_fact(entry.name, hints[entry.name], entry.default) for entry in fields(StatedFacts))


FACTS = _facts()
"""All facts, in order of declaration."""
