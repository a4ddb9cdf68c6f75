"""Summarise a run in numbers: overall, per SLO class, tenant and replicaset.

A summary is a nested dictionary of plain values, the same in memory and in `summary.json`; None means "no value" (no
request had one). All requests are accounted for: `counts` adds up to the requests that arrived in the window, including
unfinished ones, and each distribution states its number of values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from vajra_py.contract.observer import EndReason
from vajra_py.metrics.definitions import (
    COMPLETED_REASONS,
    QUANTILES,
    REASONS,
    Floats,
    Ints,
    Outcomes,
    ServiceWeights,
    SloDefaults,
    SloStatus,
    SloTargets,
    Window,
    judge_slos,
    weighted_quantiles,
)
from vajra_py.metrics.summary.admission import admission_section
from vajra_py.metrics.summary.censoring import censored_section
from vajra_py.metrics.summary.distributions import distribution
from vajra_py.metrics.summary.fairness import Service, fairness_section, worst_p99
from vajra_py.metrics.summary.rates import RateTime, arrival_rate, rate_time, steady_window
from vajra_py.metrics.summary.resources import resources_of
from vajra_py.metrics.summary.stability import Lifetimes, Stability, StabilityLabel, assess
from vajra_py.metrics.summary.warnings import warnings_of
from vajra_py.metrics.tables.columns import floats_of, group_codes, ints_of
from vajra_py.metrics.tables.requests import reason_masks
from vajra_py.runtime.records.arrow_arrays import rows_with

if TYPE_CHECKING:
    import pyarrow as pa

    ArrowTable: TypeAlias = pa.Table
else:
    ArrowTable = "pyarrow.Table"

SUMMARY_VERSION = 1
NO_NAME = "(none)"
"""Group name of requests without a tenant or SLO class, if other requests have one."""
OTHERS = "(others)"
"""Name of the group that merges all groups beyond `MAX_GROUPS`."""
MAX_GROUPS = 100
"""Maximum number of listed groups (tenants, classes, replicasets); the groups with the most requests are kept."""

STEPS_READ = (
    *("replicaset", "replica_id", "formed_at", "duration_s", "num_decodes", "num_prefills", "decode_tokens"),
    *("prefill_tokens", "num_running", "num_waiting", "used_fraction", "num_preempted"),
)
"""Columns of the steps table needed for a summary and its costs."""

Section: TypeAlias = dict[str, Any]


class Summary(Struct, frozen=True):
    """Nested summary of one run, as in `summary.json`.

    Keys of `data`: `version`, `window`, `stability`, `overall`, `by_slo_class`, `by_tenant`, `by_replicaset`, `rates`
    (the time over which rates are computed), `fairness`, `resources`, `warnings`; `admission` if there is an admission
    policy, `step_times` if the run states the origin of its step times, `cost` and `energy` if its devices are known.
    Runs with scalers, pools, moves between replicas, memory tiers, drafts, programs, emitted values or omitted seeds
    have a further section for each of these.
    """

    data: Mapping[str, Any]

    def value(self, path: str) -> Any:
        """Return the value at a dotted path, such as `overall.ttft_s.p99`; None if there is none."""
        here: Any = self.data
        for key in path.split("."):
            if not isinstance(here, Mapping) or key not in here:
                return None
            here = here[key]
        return here

    def with_warnings(self, sentences: Sequence[str]) -> Summary:
        """Return a copy with these warnings appended."""
        return Summary({**self.data, "warnings": [*self.data["warnings"], *sentences]})

    def with_step_times(self, origin: Mapping[str, Any]) -> Summary:
        """Return a copy with the origin of its step times, as `step_times`."""
        return Summary({**self.data, "step_times": dict(origin)})

    def with_sections(self, sections: Mapping[str, Any]) -> Summary:
        """Return a copy with further sections, such as `cost` and `energy`."""
        return Summary({**self.data, **_plain(dict(sections))})

    def to_json(self) -> str:
        """Return indented JSON with a final line break; equal summaries give equal text."""
        return json.dumps(self.data, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Summary:
        """Parse the result of `to_json`. Raises `ValueError` for any other text."""
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("version") != SUMMARY_VERSION:
            found = data.get("version") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"not a summary of version {SUMMARY_VERSION} ({found})")
        return cls(data)


class _Columns(Struct, frozen=True):
    """The requests table as arrays with derived values, one entry per request of the whole run."""

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
    age_s: Floats
    """Time from arrival to the request's end, or to the end of the run."""
    rates: RateTime


_LATENCIES = ("ttft_s", "tpot_s", "e2e_s", "queue_s")
_REQUEST_GAPS = {"tbt_p50_s": "request_tbt_p50_s", "tbt_p99_s": "request_tbt_p99_s", "tbt_max_s": "request_tbt_max_s"}


def summarise(  # noqa: PLR0913 - three tables, and settings that may be left out
    requests: ArrowTable,
    steps: ArrowTable,
    tbt: ArrowTable,
    window: Window | None = None,
    slo: SloDefaults | None = None,
    service: ServiceWeights | None = None,
    ended_at: float | None = None,
) -> Summary:
    """Summarise a run's three tables over a measurement window (by default everything from the first arrival on).

    `ended_at` is the end of the run, until which unfinished requests were observed; by default the end of the window or
    the last event of a request, whichever is later.
    `slo` has the default SLOs of requests without their own; `service` has the weights of service for fairness. The
    table of gaps has no times, so the `tbt_s` distribution covers the whole run; the `request_tbt_*` distributions
    cover the requests of the window. A million requests take seconds.
    """
    window = window or covering_window(requests, steps)
    classes = group_codes(requests, "slo_class")
    tenants = group_codes(requests, "tenant")
    observed_until = window.end_at if ended_at is None else max(window.end_at, ended_at)
    columns, stability = _columns(requests, window, slo or SloDefaults(), classes, observed_until)
    every = np.arange(requests.num_rows)
    rates = columns.rates.to_dict()
    data: Section = {
        "version": SUMMARY_VERSION,
        "window": {"start_s": window.start_at, "end_s": window.end_at, "duration_s": window.duration_s},
        "stability": _stability_section(stability),
        "rates": rates,
        "overall": _group(columns, every, _gap_distribution(tbt, None)),
        "by_slo_class": _groups(columns, classes, lambda name: _gap_distribution(tbt, ("slo_class", name))),
        "by_tenant": _groups(columns, tenants, lambda name: None),
        "by_replicaset": _groups(
            columns,
            group_codes(requests, "replicaset"),
            lambda name: _gap_distribution(tbt, ("replicaset", name)),
        ),
        "fairness": _fairness(columns, tenants, service or ServiceWeights(), window),
        "resources": resources_of(steps, window, steady_window(window, rates)),
    }
    data |= admission_section(requests, columns.arrived_inside)
    data["warnings"] = warnings_of(data)
    return Summary(_plain(data))


def covering_window(requests: ArrowTable, steps: ArrowTable) -> Window:
    """Return the window from the first arrival to the last event."""
    moments = [floats_of(requests, name) for name in ("arrived_at", "first_token_at", "ended_at")]
    moments.append(floats_of(steps, "formed_at") + floats_of(steps, "duration_s"))
    known = [float(np.nanmax(column)) for column in moments if column.size and not np.isnan(column).all()]
    start_at = float(moments[0].min()) if moments[0].size else 0.0
    return Window(start_at, max([start_at, *known]))


def _columns(
    requests: ArrowTable,
    window: Window,
    slo: SloDefaults,
    classes: tuple[Ints, list[str]],
    observed_until: float,
) -> tuple[_Columns, Stability]:
    completed, dropped = reason_masks(requests.column("reason"))
    arrived_at, ended_at = floats_of(requests, "arrived_at"), floats_of(requests, "ended_at")
    outcomes = Outcomes(
        arrived_at,
        floats_of(requests, "first_token_at"),
        ended_at,
        ints_of(requests, "num_output_tokens"),
        completed,
        dropped,
        floats_of(requests, "tbt_max_s"),
    )
    end_at = max(observed_until, outcomes.observed_until())
    judgement = judge_slos(outcomes, _slo_targets(requests, outcomes, slo, classes), end_at)
    codes, names = group_codes(requests, "reason")
    positions = np.array([REASONS.index(name) for name in names], dtype=np.int64)
    reason = positions[codes] if positions.size else codes
    facts = {name: ints_of(requests, name) for name in ("num_prompt_tokens", "num_cached_tokens", "num_preemptions")}
    admitted_at = floats_of(requests, "admitted_at")
    inside = window.holds(arrived_at)
    stability = _stability(outcomes, admitted_at, facts["num_prompt_tokens"], reason, window)
    columns = _Columns(
        outcomes=outcomes,
        admitted_at=admitted_at,
        prompt_tokens=facts["num_prompt_tokens"],
        cached_tokens=facts["num_cached_tokens"],
        preemptions=facts["num_preemptions"],
        reason=reason,
        latencies={name: floats_of(requests, name) for name in (*_LATENCIES, *_REQUEST_GAPS)},
        slo={
            "overall": judgement.overall,
            "ttft": judgement.ttft,
            "tpot": judgement.tpot,
            "tbt": judgement.tbt,
            "deadline": judgement.deadline,
        },
        arrived_inside=inside,
        age_s=np.where(np.isnan(ended_at), end_at, ended_at) - arrived_at,
        rates=rate_time(
            arrived_at[inside],
            admitted_at[inside],
            np.where(completed, ended_at, np.nan)[inside],
            window,
            is_stable=stability.label is StabilityLabel.STABLE,
        ),
    )
    return columns, stability


def _slo_targets(
    requests: ArrowTable, outcomes: Outcomes, slo: SloDefaults, classes: tuple[Ints, list[str]]
) -> SloTargets:
    """Return the SLOs of each request: for each kind of SLO, the request's own value or, if it has none, the default of
    its class.
    """
    codes, names = classes
    defaults = [slo.of(name) for name in names]

    def filled(own: Floats, kind: Callable[[int], float | None]) -> Floats:
        by_class = np.array([_nan(kind(code)) for code in range(len(names))], dtype=np.float64)
        return np.where(np.isnan(own), by_class[codes], own) if len(names) else own

    e2e_deadline_at = outcomes.arrived_at + filled(
        np.full(len(outcomes.arrived_at), np.nan), lambda c: defaults[c].e2e_s
    )
    own_deadline_at = floats_of(requests, "deadline_at")
    has_tbt = "tbt_slo_s" in requests.column_names  # missing in runs of earlier versions
    own_tbt_s = floats_of(requests, "tbt_slo_s") if has_tbt else np.full(len(own_deadline_at), np.nan)
    return SloTargets(
        ttft_s=filled(floats_of(requests, "ttft_slo_s"), lambda c: defaults[c].ttft_s),
        tpot_s=filled(floats_of(requests, "tpot_slo_s"), lambda c: defaults[c].tpot_s),
        deadline_at=np.where(np.isnan(own_deadline_at), e2e_deadline_at, own_deadline_at),
        tbt_s=filled(own_tbt_s, lambda c: defaults[c].tbt_s),
    )


def _groups(columns: _Columns, groups: tuple[Ints, list[str]], tbt: Callable[[str], Section | None]) -> Section:
    """Return one section per group name; empty if no request has a name."""
    codes, names = groups
    if names in ([], [""]):
        return {}
    order = np.argsort(codes, kind="stable")
    starts = np.searchsorted(codes[order], np.arange(len(names) + 1))
    sizes = np.bincount(codes[columns.arrived_inside], minlength=len(names))
    listed = sorted(sorted(range(len(names)), key=lambda c: (-sizes[c], names[c]))[:MAX_GROUPS])
    sections = {
        names[code] or _unused(NO_NAME, names): _group(
            columns, order[starts[code] : starts[code + 1]], tbt(names[code])
        )
        for code in listed
    }
    if len(listed) < len(names):
        rest = np.flatnonzero(~np.isin(codes, listed))
        sections[_unused(OTHERS, names)] = _group(columns, rest, None)
    return sections


def _unused(label: str, names: Sequence[str]) -> str:
    """Return a label that is not one of the names: `label`, followed by as many apostrophes as needed."""
    while label in names:
        label += "'"
    return label


def _group(columns: _Columns, rows: Ints, tbt: Section | None) -> Section:
    """Return the section of the requests in these rows."""
    arrived = rows[columns.arrived_inside[rows]]
    completed = arrived[columns.outcomes.completed[arrived]]
    counts = np.bincount(columns.reason[arrived], minlength=len(REASONS))
    admitted = arrived[~np.isnan(columns.admitted_at[arrived])]
    prompt, cached = int(columns.prompt_tokens[admitted].sum()), int(columns.cached_tokens[admitted].sum())
    preemptions = columns.preemptions[arrived]
    section: Section = {
        "counts": {"arrived": len(arrived), "completed": len(completed)}
        | {reason: int(count) for reason, count in zip(REASONS, counts, strict=True)},
        "delivered_fraction": _ratio(len(completed), len(arrived)),
        "offered_requests_per_s": arrival_rate(columns.outcomes.arrived_at[arrived]),
    }
    section["ttft_s"] = distribution(columns.latencies["ttft_s"][arrived])
    section["tbt_s"] = tbt
    section |= {name: distribution(columns.latencies[name][arrived]) for name in _LATENCIES[1:]}
    section |= {key: distribution(columns.latencies[name][arrived]) for name, key in _REQUEST_GAPS.items()}
    section["slo"] = {kind: _slo_section(status[arrived]) for kind, status in columns.slo.items()}
    section["censored"] = _censored(columns, arrived)
    section["throughput"] = _rates(columns, completed)
    met = completed[columns.slo["overall"][completed] == SloStatus.MET]
    has_slo = bool((columns.slo["overall"][rows] != SloStatus.NONE).any())
    section["goodput"] = _rates(columns, met) if has_slo else dict.fromkeys(_RATES)
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


_CUT = np.array([reason not in (*COMPLETED_REASONS, EndReason.REJECTED.value) for reason in REASONS])
"""Mask over `REASONS`: True for end reasons of requests that waited or ran without receiving a complete answer."""


def _censored(columns: _Columns, arrived: Ints) -> Section:
    """Return, for each latency, the number of these requests whose value is censored, and (except for TBT) lower bounds
    of the statistics over all of these requests; empty if no request was cut off.
    """
    cut = _CUT[columns.reason[arrived]]
    if not cut.any():
        return {}
    age_s = columns.age_s[arrived]
    # For the time per output token of an unfinished request, the only known lower bound is 0.
    least = {"ttft_s": age_s, "tpot_s": np.zeros(len(arrived)), "e2e_s": age_s, "queue_s": age_s}
    found = {}
    for name, bound in least.items():
        values = columns.latencies[name][arrived]
        section = censored_section(values, bound, cut & np.isnan(values))
        if section is not None:
            found[name] = section
    found["tbt_s"] = {"num_missing": int(cut.sum()), "num_known": int((~cut).sum()), "at_least": None}
    return found


def _rates(columns: _Columns, rows: Ints) -> Section:
    amounts = (len(rows), int(columns.outcomes.num_output_tokens[rows].sum()), int(columns.prompt_tokens[rows].sum()))
    return {name: _ratio(amount, columns.rates.duration_s or 0.0) for name, amount in zip(_RATES, amounts, strict=True)}


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


def _gap_distribution(tbt: ArrowTable, only: tuple[str, str] | None) -> Section:
    """Return the distribution of the gaps between tokens; `only` is a pair (column, value): only rows with this value
    count.
    """
    chosen = tbt if only is None else rows_with(tbt, *only)
    gaps, weights = floats_of(chosen, "gap_s"), ints_of(chosen, "weight")
    count = int(weights.sum())
    section: Section = {"count": count, "mean": float(np.dot(gaps, weights)) / count if count else None}
    section |= dict(zip(QUANTILES, weighted_quantiles(gaps, weights, tuple(QUANTILES.values())), strict=True))
    section["max"] = float(gaps[weights > 0].max()) if count else None
    return section


def _fairness(columns: _Columns, tenants: tuple[Ints, list[str]], weights: ServiceWeights, window: Window) -> Section:
    """Return the section `fairness`: service while tenants were backlogged, and the tenants with the largest P99 TTFT
    and the largest P99 E2E.
    """
    codes, names = tenants
    service = Service(
        codes,
        columns.outcomes.arrived_at,
        columns.admitted_at,
        columns.outcomes.first_token_at,
        columns.outcomes.ended_at,
        columns.prompt_tokens,
        columns.outcomes.num_output_tokens,
    )
    inside = columns.arrived_inside
    section = fairness_section(service, names, weights, (window.start_at, window.end_at), inside)
    for name in ("ttft", "e2e"):
        worst = worst_p99(codes[inside], columns.latencies[f"{name}_s"][inside], len(names))
        several = section["num_tenants"] > 1 and worst is not None
        section[f"worst_{name}_p99_s"] = worst[1] if several and worst else None
        section[f"worst_{name}_tenant"] = names[worst[0]] if several and worst else None
    return section


def _stability(outcomes: Outcomes, admitted_at: Floats, prompts: Ints, reason: Ints, window: Window) -> Stability:
    return assess(
        Lifetimes(
            outcomes.arrived_at,
            admitted_at,
            outcomes.ended_at,
            prompts,
            outcomes.num_output_tokens,
            outcomes.completed,
            expired=reason == REASONS.index("expired"),
            rejected=reason == REASONS.index("rejected"),
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


def _nan(value: float | None) -> float:
    return math.nan if value is None else value


def _ratio(amount: float, whole: float) -> float | None:
    return amount / whole if whole > 0 else None


def _plain(value: Any) -> Any:
    """Return the same structure with None for non-finite numbers."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
