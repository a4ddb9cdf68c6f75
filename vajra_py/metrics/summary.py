"""Summarises a run in numbers: overall, per SLO class, tenant and replicaset.

A summary is a nested dictionary of plain values, the same in memory and in `summary.json`; None stands for "no such value" (no request had one).
Nothing is dropped silently: `counts` adds up to the requests that arrived in the window, unfinished ones included, and each distribution carries
the number of values in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vajra_py.metrics.definitions import (
    QUANTILES,
    REASONS,
    Floats,
    Ints,
    Outcomes,
    Promises,
    ServiceWeights,
    SloDefaults,
    SloStatus,
    Window,
    attained_service,
    covered_s,
    jain_index,
    judge_slos,
    quantiles,
    weighted_quantiles,
)
from vajra_py.metrics.run_warnings import warnings_of
from vajra_py.metrics.stability import Lifetimes, Stability, assess
from vajra_py.metrics.tables import reason_masks

if TYPE_CHECKING:
    import pyarrow as pa

    ArrowTable: TypeAlias = pa.Table
else:
    ArrowTable = "pyarrow.Table"

SUMMARY_VERSION = 1
NO_NAME = "(none)"
"""How requests without a tenant or SLO class are called, next to others that have one."""
OTHERS = "(others)"
"""The groups beyond `MAX_GROUPS`, taken together."""
MAX_GROUPS = 100
"""Groups (tenants, classes, replicasets) that are listed, those with most requests first taken."""

STEPS_READ = (
    *("replicaset", "replica_id", "formed_at", "duration_s", "num_decodes", "num_prefills", "decode_tokens"),
    *("prefill_tokens", "num_running", "num_waiting", "used_fraction", "num_preempted"),
)
"""Columns of the steps table that a summary, its costs too, is made of."""

Section: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of one run.

    Keys of `data`: `version`, `window`, `stability`, `overall`, `by_slo_class`, `by_tenant`, `by_replicaset`, `fairness`, `resources`, `warnings`;
    `step_times` where the run says where its step times come from, `cost` and `energy` where its devices are known.
    """

    data: Mapping[str, Any]

    def value(self, path: str) -> Any:
        """What stands at a dotted path, such as `overall.ttft_s.p99`; None where nothing does."""
        here: Any = self.data
        for key in path.split("."):
            if not isinstance(here, Mapping) or key not in here:
                return None
            here = here[key]
        return here

    def with_warnings(self, sentences: Sequence[str]) -> Summary:
        """The same summary with these warnings after its own."""
        return Summary({**self.data, "warnings": [*self.data["warnings"], *sentences]})

    def with_step_times(self, origin: Mapping[str, Any]) -> Summary:
        """The same summary with where its step times come from, as `step_times`."""
        return Summary({**self.data, "step_times": dict(origin)})

    def with_sections(self, sections: Mapping[str, Any]) -> Summary:
        """The same summary with further sections, such as `cost` and `energy`."""
        return Summary({**self.data, **_plain(dict(sections))})

    def to_json(self) -> str:
        """JSON, indented, ending in a line break; equal summaries give equal text."""
        return json.dumps(self.data, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Summary:
        """Read back what `to_json` wrote; ValueError when it is something else."""
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("version") != SUMMARY_VERSION:
            found = data.get("version") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"not a summary of version {SUMMARY_VERSION} ({found})")
        return cls(data)


@dataclass(frozen=True, slots=True)
class _Columns:
    """The requests table as arrays, one entry per request of the whole run, with what was derived from it."""

    outcomes: Outcomes
    admitted_at: Floats
    prompt_tokens: Ints
    cached_tokens: Ints
    preemptions: Ints
    reason: NDArray[np.int64]
    """Position in `REASONS`."""
    latencies: Mapping[str, Floats]
    slo: Mapping[str, NDArray[np.int8]]
    arrived_inside: NDArray[np.bool_]
    ended_inside: NDArray[np.bool_]


_LATENCIES = ("ttft_s", "tpot_s", "e2e_s", "queue_s")
_REQUEST_GAPS = {"tbt_p50_s": "request_tbt_p50_s", "tbt_p99_s": "request_tbt_p99_s", "tbt_max_s": "request_tbt_max_s"}


def summarise(
    requests: ArrowTable,
    steps: ArrowTable,
    tbt: ArrowTable,
    window: Window | None = None,
    slo: SloDefaults | None = None,
    service: ServiceWeights | None = None,
) -> Summary:
    """Summarise a run's three tables over a measurement window (by default everything from the first arrival on).

    `slo` promises something to requests that carry no promise; `service` says what fairness counts. The table of gaps carries no times: its
    distribution is that of the whole run; the `request_tbt_*` distributions are those of the window's requests. A million requests take
    seconds.
    """
    window = window or covering_window(requests, steps)
    classes = _group_codes(requests, "slo_class")
    columns = _columns(requests, window, slo or SloDefaults(), classes)
    every = np.arange(requests.num_rows)
    tenants = _group_codes(requests, "tenant")
    stability = _stability(columns, window)
    data: Section = {
        "version": SUMMARY_VERSION,
        "window": {"start_s": window.start_at, "end_s": window.end_at, "duration_s": window.duration_s},
        "stability": _stability_section(stability),
        "overall": _group(columns, every, window, _gap_distribution(tbt, None)),
        "by_slo_class": _groups(columns, classes, window, lambda name: _gap_distribution(tbt, ("slo_class", name))),
        "by_tenant": _groups(columns, tenants, window, lambda name: None),
        "by_replicaset": _groups(
            columns,
            _group_codes(requests, "replicaset"),
            window,
            lambda name: _gap_distribution(tbt, ("replicaset", name)),
        ),
        "fairness": _fairness(columns, tenants, service or ServiceWeights()),
        "resources": _resources(steps, window),
    }
    data["warnings"] = warnings_of(data)
    return Summary(_plain(data))


def covering_window(requests: ArrowTable, steps: ArrowTable) -> Window:
    """The window from the first arrival to the last thing that happened."""
    moments = [_floats(requests, name) for name in ("arrived_at", "first_token_at", "ended_at")]
    moments.append(_floats(steps, "formed_at") + _floats(steps, "duration_s"))
    known = [float(np.nanmax(column)) for column in moments if column.size and not np.isnan(column).all()]
    start_at = float(moments[0].min()) if moments[0].size else 0.0
    return Window(start_at, max([start_at, *known]))


def _columns(requests: ArrowTable, window: Window, slo: SloDefaults, classes: tuple[Ints, list[str]]) -> _Columns:
    completed, dropped = reason_masks(requests.column("reason"))
    arrived_at, ended_at = _floats(requests, "arrived_at"), _floats(requests, "ended_at")
    outcomes = Outcomes(
        arrived_at,
        _floats(requests, "first_token_at"),
        ended_at,
        _ints(requests, "num_output_tokens"),
        completed,
        dropped,
        _floats(requests, "tbt_max_s"),
    )
    judgement = judge_slos(outcomes, _promises(requests, outcomes, slo, classes))
    codes, names = _group_codes(requests, "reason")
    positions = np.array([REASONS.index(name) for name in names], dtype=np.int64)
    return _Columns(
        outcomes=outcomes,
        admitted_at=_floats(requests, "admitted_at"),
        prompt_tokens=_ints(requests, "num_prompt_tokens"),
        cached_tokens=_ints(requests, "num_cached_tokens"),
        preemptions=_ints(requests, "num_preemptions"),
        reason=positions[codes] if positions.size else codes,
        latencies={name: _floats(requests, name) for name in (*_LATENCIES, *_REQUEST_GAPS)},
        slo={
            "overall": judgement.overall,
            "ttft": judgement.ttft,
            "tpot": judgement.tpot,
            "tbt": judgement.tbt,
            "deadline": judgement.deadline,
        },
        arrived_inside=window.holds(arrived_at),
        ended_inside=window.holds(ended_at),
    )


def _promises(requests: ArrowTable, outcomes: Outcomes, slo: SloDefaults, classes: tuple[Ints, list[str]]) -> Promises:
    """Each request's own promises, and the defaults of its class where it has none."""
    codes, names = classes
    defaults = [slo.of(name) for name in names]

    def filled(own: Floats, kind: Callable[[int], float | None]) -> Floats:
        by_class = np.array([_nan(kind(code)) for code in range(len(names))], dtype=np.float64)
        return np.where(np.isnan(own), by_class[codes], own) if len(names) else own

    e2e_deadline_at = outcomes.arrived_at + filled(
        np.full(len(outcomes.arrived_at), np.nan), lambda c: defaults[c].e2e_s
    )
    own_deadline_at = _floats(requests, "deadline_at")
    has_tbt = "tbt_slo_s" in requests.column_names  # a run of an earlier version has none
    own_tbt_s = _floats(requests, "tbt_slo_s") if has_tbt else np.full(len(own_deadline_at), np.nan)
    return Promises(
        ttft_s=filled(_floats(requests, "ttft_slo_s"), lambda c: defaults[c].ttft_s),
        tpot_s=filled(_floats(requests, "tpot_slo_s"), lambda c: defaults[c].tpot_s),
        deadline_at=np.where(np.isnan(own_deadline_at), e2e_deadline_at, own_deadline_at),
        tbt_s=filled(own_tbt_s, lambda c: defaults[c].tbt_s),
    )


def _groups(
    columns: _Columns, groups: tuple[Ints, list[str]], window: Window, tbt: Callable[[str], Section | None]
) -> Section:
    """One section per name; nothing when no request carries a name."""
    codes, names = groups
    if names in ([], [""]):
        return {}
    order = np.argsort(codes, kind="stable")
    starts = np.searchsorted(codes[order], np.arange(len(names) + 1))
    sizes = np.bincount(codes[columns.arrived_inside], minlength=len(names))
    listed = sorted(sorted(range(len(names)), key=lambda c: (-sizes[c], names[c]))[:MAX_GROUPS])
    sections = {
        names[code] or NO_NAME: _group(columns, order[starts[code] : starts[code + 1]], window, tbt(names[code]))
        for code in listed
    }
    if len(listed) < len(names):
        rest = np.flatnonzero(~np.isin(codes, listed))
        sections[OTHERS] = _group(columns, rest, window, None)
    return sections


def _group(columns: _Columns, rows: Ints, window: Window, tbt: Section | None) -> Section:
    """The section of the requests in these rows."""
    arrived = rows[columns.arrived_inside[rows]]
    ended = rows[columns.ended_inside[rows] & columns.outcomes.completed[rows]]
    counts = np.bincount(columns.reason[arrived], minlength=len(REASONS))
    admitted = arrived[~np.isnan(columns.admitted_at[arrived])]
    prompt, cached = int(columns.prompt_tokens[admitted].sum()), int(columns.cached_tokens[admitted].sum())
    preemptions = columns.preemptions[arrived]
    section: Section = {
        "counts": {"arrived": len(arrived), "completed": int(columns.outcomes.completed[arrived].sum())}
        | {reason: int(count) for reason, count in zip(REASONS, counts, strict=True)},
        "offered_requests_per_s": _offered_rate(columns.outcomes.arrived_at[arrived]),
    }
    section["ttft_s"] = _distribution(columns.latencies["ttft_s"][arrived])
    section["tbt_s"] = tbt
    section |= {name: _distribution(columns.latencies[name][arrived]) for name in _LATENCIES[1:]}
    section |= {key: _distribution(columns.latencies[name][arrived]) for name, key in _REQUEST_GAPS.items()}
    section["slo"] = {kind: _slo_section(status[arrived]) for kind, status in columns.slo.items()}
    section["throughput"] = _rates(columns, ended, window)
    met = ended[columns.slo["overall"][ended] == SloStatus.MET]
    promised = bool((columns.slo["overall"][rows] != SloStatus.NONE).any())
    section["goodput"] = _rates(columns, met, window) if promised else dict.fromkeys(_RATES)
    section["tokens"] = {
        "prompt": int(columns.prompt_tokens[arrived].sum()),
        "output": int(columns.outcomes.num_output_tokens[arrived].sum()),
        "cached": cached,
        "prefix_hit_fraction": _ratio(cached, prompt),
    }
    section["preemptions"] = {
        "count": int(preemptions.sum()),
        "requests": int((preemptions > 0).sum()),
        "per_request": _ratio(int(preemptions.sum()), len(arrived)),
    }
    return section


_RATES = ("requests_per_s", "output_tokens_per_s", "prompt_tokens_per_s")


def _rates(columns: _Columns, rows: Ints, window: Window) -> Section:
    amounts = (len(rows), int(columns.outcomes.num_output_tokens[rows].sum()), int(columns.prompt_tokens[rows].sum()))
    return {name: _ratio(amount, window.duration_s) for name, amount in zip(_RATES, amounts, strict=True)}


def _slo_section(status: NDArray[np.int8]) -> Section:
    met, missed, undecided = (
        int((status == value).sum()) for value in (SloStatus.MET, SloStatus.MISSED, SloStatus.UNDECIDED)
    )
    return {
        "num_met": met,
        "num_missed": missed,
        "num_undecided": undecided,
        "attainment_fraction": _ratio(met, met + missed),
    }


def _distribution(values: Floats) -> Section:
    known = values[~np.isnan(values)]
    section: Section = {"count": int(known.size), "mean": float(known.mean()) if known.size else None}
    section |= dict(zip(QUANTILES, quantiles(known, tuple(QUANTILES.values())), strict=True))
    section["max"] = float(known.max()) if known.size else None
    return section


def _gap_distribution(tbt: ArrowTable, only: tuple[str, str] | None) -> Section:
    """Distribution of the gaps between tokens; `only` is a column and the value that it must have."""
    import pyarrow.compute as pc

    chosen = tbt if only is None else tbt.filter(pc.equal(tbt.column(only[0]), only[1]))
    gaps, weights = _floats(chosen, "gap_s"), _ints(chosen, "weight")
    count = int(weights.sum())
    section: Section = {"count": count, "mean": float(np.dot(gaps, weights)) / count if count else None}
    section |= dict(zip(QUANTILES, weighted_quantiles(gaps, weights, tuple(QUANTILES.values())), strict=True))
    section["max"] = float(gaps[weights > 0].max()) if count else None
    return section


def _fairness(columns: _Columns, tenants: tuple[Ints, list[str]], weights: ServiceWeights) -> Section:
    """Service that the window's requests of each tenant got, per unit of the tenant's weight."""
    codes, names = tenants
    inside = columns.arrived_inside
    service = attained_service(
        columns.prompt_tokens,
        columns.outcomes.num_output_tokens,
        ~np.isnan(columns.outcomes.first_token_at),
        weights,
    )
    totals = np.bincount(codes[inside], weights=service[inside], minlength=len(names))
    present = np.flatnonzero(np.bincount(codes[inside], minlength=len(names)))
    shares = totals[present] / np.array([weights.tenants.get(names[code], 1.0) for code in present])
    return {
        "num_tenants": len(present),
        "jain_index": jain_index(shares) if len(present) > 1 else None,
        "max_service": float(shares.max()) if shares.size else None,
        "min_service": float(shares.min()) if shares.size else None,
        "prompt_token_weight": weights.prompt_token,
        "output_token_weight": weights.output_token,
    }


def _resources(steps: ArrowTable, window: Window) -> Section:
    """Means over the time of steps that were formed in the window."""
    formed_at, duration_s = _floats(steps, "formed_at"), _floats(steps, "duration_s")
    held = window.holds(formed_at)
    inside = slice(None) if held.all() else held  # all of them need no copy
    weight = duration_s[inside]
    section: Section = {
        "num_steps": int(held.sum()),
        "num_preempted": int(_ints(steps, "num_preempted")[inside].sum()),
        "mean_step_s": float(weight.mean()) if weight.size else None,
    }
    whole_s = weight.sum()
    weighted = np.empty_like(weight)
    for name in ("used_fraction", "num_running", "num_waiting", "num_decodes", "num_prefills"):
        # Counts are multiplied as they are: a copy as floats has the same values.
        values = steps.column(name).to_numpy()[inside]
        np.multiply(values, weight, out=weighted)
        section[f"mean_{name}"] = float(weighted.sum() / whole_s) if whole_s > 0 else None
        section[f"max_{name}"] = float(values.max()) if values.size else None
    tokens = {kind: int(_ints(steps, f"{kind}_tokens")[inside].sum()) for kind in ("prefill", "decode")}
    section |= {f"{kind}_tokens_per_s": _ratio(amount, window.duration_s) for kind, amount in tokens.items()}
    section["mean_step_tokens"] = _ratio(sum(tokens.values()), int(held.sum()))
    section["busy_fraction"] = _busy(steps, formed_at, duration_s, window)
    return section


def _busy(steps: ArrowTable, formed_at: Floats, duration_s: Floats, window: Window) -> float | None:
    """Fraction of the window in which a replica had a step in flight, mean over the replicas that ever had one."""
    if not len(formed_at) or not window.duration_s > 0:
        return None
    sets, _ = _group_codes(steps, "replicaset")
    ids = _ints(steps, "replica_id")
    replicas = sets * (int(ids.max()) + 1) + ids
    if replicas.max() < 1 << 16:  # such numbers are put in order many times faster
        replicas = replicas.astype(np.uint16)
    begins, ends = formed_at, formed_at + duration_s
    if begins.min() < window.start_at or ends.max() > window.end_at:
        begins, ends = (np.clip(at, window.start_at, window.end_at) for at in (begins, ends))
    in_time = bool((begins[1:] >= begins[:-1]).all())
    order = np.argsort(replicas, kind="stable") if in_time else np.lexsort((begins, replicas))
    ordered = replicas[order]
    borders = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    busy = [covered_s(begins[own], ends[own], window.start_at) for own in np.split(order, borders)]
    return float(np.mean(busy)) / window.duration_s


def _stability(columns: _Columns, window: Window) -> Stability:
    return assess(
        Lifetimes(
            columns.outcomes.arrived_at,
            columns.admitted_at,
            columns.outcomes.ended_at,
            columns.prompt_tokens,
            columns.outcomes.num_output_tokens,
            columns.outcomes.completed,
            expired=columns.reason == REASONS.index("expired"),
            rejected=columns.reason == REASONS.index("rejected"),
        ),
        window,
    )


def _stability_section(stability: Stability) -> Section:
    return {
        "label": stability.label.value,
        "reason": stability.reason,
        "growth_fraction": stability.growth_fraction,
        "token_growth_fraction": stability.token_growth_fraction,
        "waiting_growth_fraction": stability.waiting_growth_fraction,
        "in_system_by_quarter": list(stability.in_system_by_quarter),
        "waiting_by_quarter": list(stability.waiting_by_quarter),
        "shed_fraction": stability.shed_fraction,
        "mean_waiting": stability.mean_waiting,
        "mean_in_service": stability.mean_in_service,
    }


def _offered_rate(arrived_at: Floats) -> float | None:
    """Arrivals per second between the first and the last."""
    if len(arrived_at) < 2:
        return None
    return _ratio(len(arrived_at) - 1, float(arrived_at.max() - arrived_at.min()))


def _group_codes(table: ArrowTable, column: str) -> tuple[Ints, list[str]]:
    """For each row the position of its name in the sorted list of names."""
    import pyarrow as pa

    values = table.column(column).combine_chunks()
    if not pa.types.is_dictionary(values.type):
        values = values.dictionary_encode()
    names = [name or "" for name in values.dictionary.to_pylist()]
    order = sorted(range(len(names)), key=names.__getitem__)
    if order == sorted(order):
        return values.indices.to_numpy(zero_copy_only=False).astype(np.int64), names
    position = np.empty(len(names), dtype=np.int64)
    position[order] = np.arange(len(names))
    codes = values.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return (position[codes] if len(names) else codes), [names[i] for i in order]


def _floats(table: ArrowTable, column: str) -> Floats:
    values: Floats = table.column(column).to_numpy(zero_copy_only=False).astype(np.float64, copy=False)
    return values


def _ints(table: ArrowTable, column: str) -> Ints:
    values: Ints = table.column(column).to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    return values


def _nan(value: float | None) -> float:
    return math.nan if value is None else value


def _ratio(amount: float, whole: float) -> float | None:
    return amount / whole if whole > 0 else None


def _plain(value: Any) -> Any:
    """The same structure with None for what is not a finite number."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
