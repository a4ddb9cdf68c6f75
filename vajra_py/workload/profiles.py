"""Built-in workload profiles fitted to public traces.

A profile holds figures fitted to a trace (quantiles, rates, session shapes), never its rows; `profiles.json` stores
them with source and licence. Requests drawn from a profile follow its distributions of lengths and arrivals, but do not
repeat the exact bursts of the trace: replay the trace if these matter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, structs
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from vajra_py.errors import WorkloadError, did_you_mean
from vajra_py.workload.arrays import StringColumn
from vajra_py.workload.arrivals import ArrivalProcess, Poisson, arrival_times
from vajra_py.workload.columns import Columns
from vajra_py.workload.content import NO_NODE, ContentColumn, ContentStore, SegmentSpace
from vajra_py.workload.distributions import Distribution, correlated_normals, to_tokens
from vajra_py.workload.sessions import Sessions, sessions_workload
from vajra_py.workload.synthetic import Lengths, RngFor, synthetic_workload
from vajra_py.workload.workload import Workload

__all__ = ["ProfileInfo", "RequestClass", "own_rate", "profile", "profile_info", "profile_names"]

FILE = Path(__file__).with_name("profiles.json")


class RequestClass(BaseModel):
    """A class of requests in a mix: prompts are a prefix that the whole class shares, followed by text of their own."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    name: str
    share: float = Field(gt=0)
    shared_prefix: str
    shared_tokens: int = Field(ge=1)
    own_tokens: Distribution
    output_tokens: Distribution


class ProfileInfo(Struct, frozen=True):
    """Description of a built-in profile.

    `source` has repository, commit, licence and citation of the trace. `figures` are statistics of the trace (tokens,
    requests per second), which a drawn workload approximates. `has_arrivals` is false if the trace has no arrivals, so
    that a rate must be given.
    """

    name: str
    title: str
    note: str
    source: Mapping[str, str]
    figures: Mapping[str, Any]
    has_arrivals: bool


@cache
def _profiles() -> Mapping[str, Mapping[str, Any]]:
    document = json.loads(FILE.read_text(encoding="utf-8"))
    filled = _with_probabilities(document["profiles"], document["probabilities"])
    assert isinstance(filled, dict)
    return filled


def _with_probabilities(value: Any, probabilities: Sequence[float]) -> Any:
    """Return the value with the common probabilities added to every quantile table that has none of its own."""
    if isinstance(value, list):
        return [_with_probabilities(entry, probabilities) for entry in value]
    if not isinstance(value, dict):
        return value
    filled = {key: _with_probabilities(entry, probabilities) for key, entry in value.items()}
    if filled.get("type") in ("quantiles", "quantile_gaps"):
        filled.setdefault("probabilities", probabilities)
    return filled


def profile_names() -> tuple[str, ...]:
    """Return the names of the built-in profiles, sorted."""
    return tuple(sorted(_profiles()))


def _entry(name: str) -> Mapping[str, Any]:
    known = _profiles()
    if name not in known:
        raise WorkloadError("profile", None, f"there is no profile of that name ({name!r})", did_you_mean(name, known))
    return known[name]


def profile_info(name: str) -> ProfileInfo:
    """Return the description of a built-in profile and the source of its figures.

    Raises:
        WorkloadError: there is no profile of that name.
    """
    entry = _entry(name)
    return ProfileInfo(
        name, entry["title"], entry["note"], entry["source"], entry["figures"], entry["arrivals"] is not None
    )


def own_rate(name: str) -> float | None:
    """Return a profile's mean rate in requests per second; None for a profile of sessions or without arrivals.

    Raises like `profile_info`.
    """
    entry = _entry(name)
    return None if entry["arrivals"] is None or "sessions" in entry else float(_arrivals(entry).rate)


def _arrivals(entry: Mapping[str, Any]) -> Any:
    """Return the arrival process of a profile; a Poisson process of rate 1 if the trace has no arrivals."""
    if entry["arrivals"] is None:
        return Poisson(rate=1.0)
    return TypeAdapter[Any](ArrivalProcess).validate_python(entry["arrivals"])


def profile(name: str, rng_for: RngFor, n: int, rate: float | None = None) -> Workload:
    """Draw `n` requests from the named profile.

    `rate` in requests per second (by default the trace's own) is the mean over seeds: time is stretched by the same
    factor for every seed, and a single draw varies about the mean as the trace does. A profile of sessions yields whole
    sessions except for the last one, which may be cut. Its sessions start at `rate` divided by their mean number of
    turns; times within sessions are not stretched. Streams: `arrivals`, `arrival_rates`, `lengths`, and if the profile
    uses them `classes`, `tenants`, `turns`, `think_times`, `system_prompts`, `resets`.

    Raises:
        WorkloadError: there is no such profile, `n` is below 1, the rate is not a number > 0, or the trace has no
            arrivals and no rate is given.
    """
    entry = _entry(name)
    place = f"profile {name}"
    if n < 1:
        raise WorkloadError(place, None, f"cannot draw this many requests ({n})", "A number >= 1")
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        raise WorkloadError(
            place, None, f"cannot have this rate ({rate!r})", "A finite number of requests per second > 0"
        )
    if entry["arrivals"] is None and rate is None:
        raise WorkloadError(place, None, "the trace has no arrivals of its own", "Give a rate in requests per second")
    arrivals = _arrivals(entry)
    if "sessions" in entry:
        workload = _session_requests(Sessions.model_validate(entry["sessions"]), (arrivals, rate), rng_for, n)
    elif "classes" in entry:
        classes = [RequestClass.model_validate(kind) for kind in entry["classes"]]
        workload = _mixed_requests(classes, arrivals, rng_for, n)
    else:
        workload = synthetic_workload(arrivals, Lengths.model_validate(entry["lengths"]), rng_for, num_requests=n)
    if "tenants" in entry:
        workload = workload.with_tenants(entry["tenants"], rng_for("tenants"))
    if rate is not None and "sessions" not in entry:
        workload = workload.scale_time(arrivals.rate / rate)
    operations = workload.source.get("operations", [])
    facts = {"kind": "profile", "profile": name, "figures_from": dict(entry["source"]), "operations": operations}
    return Workload(workload.columns, name, facts)


def _session_requests(
    sessions: Sessions, arrivals: tuple[ArrivalProcess, float | None], rng_for: RngFor, n: int
) -> Workload:
    """Return the first `n` requests, session by session.

    The number of sessions is doubled until they have `n` requests. `arrivals` is a pair (arrival process of sessions,
    rate of requests per second or None). If the rate is given, the process is replaced by a Poisson process of sessions
    with this rate divided by the mean number of turns.
    """
    process, rate = arrivals
    streams = _Replayed(rng_for)
    num_sessions = 16
    while len(workload := sessions_workload(sessions, process, streams, num_sessions=num_sessions)) < n:
        num_sessions *= 2
    if rate is not None:
        process = Poisson(rate=rate * num_sessions / len(workload))
        workload = sessions_workload(sessions, process, streams, num_sessions=num_sessions)
    ids = workload.columns.session_id
    assert ids is not None
    assert ids.numbers is not None
    kept = np.sort(np.argsort(ids.numbers, kind="stable")[:n])
    return Workload(workload.columns.take(kept), "sessions", {})


class _Replayed:
    """Random streams that restart from their initial state on each call."""

    def __init__(self, rng_for: RngFor) -> None:
        self._rng_for = rng_for
        self._rngs: dict[str, np.random.Generator] = {}
        self._states: dict[str, Mapping[str, Any]] = {}

    def __call__(self, name: str) -> np.random.Generator:
        if name not in self._rngs:
            self._rngs[name] = self._rng_for(name)
            self._states[name] = self._rngs[name].bit_generator.state
        self._rngs[name].bit_generator.state = self._states[name]
        return self._rngs[name]


def _mixed_requests(classes: Sequence[RequestClass], arrivals: ArrivalProcess, rng_for: RngFor, n: int) -> Workload:
    """Draw a class for each request by the classes' shares, and the request from its class.

    A prompt starts with the shared prefix of its class.
    """
    times = arrival_times(arrivals, rng_for("arrivals"), rng_for("arrival_rates"), num_requests=n)
    bounds = np.cumsum([kind.share for kind in classes])
    kinds = np.searchsorted(bounds / bounds[-1], rng_for("classes").random(n), side="right")
    kinds = np.minimum(kinds, len(classes) - 1)
    z_own, z_output = correlated_normals(rng_for("lengths"), n, 0.0)
    own, output = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    for index, kind in enumerate(classes):
        mine = kinds == index
        own[mine], output[mine] = to_tokens(kind.own_tokens, z_own[mine]), to_tokens(kind.output_tokens, z_output[mine])
    prefixes = list(dict.fromkeys(kind.shared_prefix for kind in classes))
    prefix_tokens = {kind.shared_prefix: kind.shared_tokens for kind in classes}
    shared = np.array([prefix_tokens[name] for name in prefixes], dtype=np.int64)
    prefix_of = np.array([prefixes.index(kind.shared_prefix) for kind in classes], dtype=np.int64)[kinds]
    rows = np.arange(n, dtype=np.int64)
    store = ContentStore(
        (SegmentSpace("explicit", table=tuple(prefixes)), SegmentSpace("number", "text")),
        parent=np.concatenate([np.full(len(prefixes), NO_NODE, dtype=np.int64), prefix_of]),
        space=np.repeat(np.array([0, 1], dtype=np.int64), [len(prefixes), n]),
        number=np.concatenate([np.arange(len(prefixes), dtype=np.int64), rows]),
        tokens=np.concatenate([shared, own]),
    )
    columns = Columns(times, shared[prefix_of] + own, output, StringColumn.numbered("", rows))
    columns = structs.replace(columns, content=ContentColumn(store, rows + len(prefixes)))
    return Workload(columns, "classes", {})
