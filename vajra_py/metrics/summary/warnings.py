"""Warnings about the numbers of one run, as sentences for its summary."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vajra_py.metrics.definitions import UNFINISHED
from vajra_py.runtime.records.emitted import PolicyDiary
from vajra_py.runtime.requests.rejections import NO_REPLICA_KIND, OWN_KIND, QUEUE_FULL_KIND, SHED_KIND

MIN_COMPLETED = 100
"""Number of completed requests below which the 99th percentile equals the maximum."""


def warnings_of(data: Mapping[str, Any]) -> list[str]:
    """Return the warnings about a summary, one sentence each."""
    counts = data["overall"]["counts"]
    arrived = counts["arrived"]
    found = []
    if not arrived:
        return ["No request arrived in the measurement window."]
    if data["stability"]["label"] != "stable":
        found.append(f"The run is {data['stability']['label']}: {data['stability']['reason']}.")
    if counts[UNFINISHED]:
        found.append(f"{counts[UNFINISHED]} of {arrived} requests had not ended when the run did.")
    found += [
        f"{counts[reason]} of {arrived} requests {became}." for reason, became in _BECAME.items() if counts[reason]
    ]
    found += _shed(data)
    if any(counts[reason] for reason in _CUT_OFF):
        found += _cut_off(data["overall"], arrived)
    found += _without_rates(data)
    if data["overall"]["e2e_s"]["count"] < MIN_COMPLETED:
        found.append(
            f"Only {data['overall']['e2e_s']['count']} requests completed: the 99th percentile is their maximum."
        )
    undecided = data["overall"]["slo"]["overall"]["num_undecided"]
    if undecided:
        found.append(
            f"For {undecided} requests it is undecided whether they met their SLOs; attainment leaves them out."
        )
    return found


_BECAUSE = {
    SHED_KIND: "were shed by the admission policy",
    QUEUE_FULL_KIND: "found a full queue",
    NO_REPLICA_KIND: "found no replica",
    OWN_KIND: "could not be run",
}


_MAX_REASONS = 3
"""Maximum number of an admission policy's reasons listed in a sentence."""


def _shed(data: Mapping[str, Any]) -> list[str]:
    """Return a sentence on the causes of rejections, for a run that has an admission policy and rejected requests."""
    section = data.get("admission")
    if section is None or not any(section["rejected"].values()):
        return []
    found = [f"{count} {_BECAUSE[kind]}" for kind, count in section["rejected"].items() if count]
    reasons = list(section["refused_by_reason"].items())
    named = "; ".join(f"{reason} ({count})" for reason, count in reasons[:_MAX_REASONS])
    more = f"; and {len(reasons) - _MAX_REASONS} other reasons" if len(reasons) > _MAX_REASONS else ""
    why = f" Its reasons: {named}{more}." if reasons else ""
    return [f"Of the rejected requests {', '.join(found)}.{why}"]


_CUT_OFF = (UNFINISHED, "expired", "failed")
"""End reasons of requests whose latencies are missing. The missing latencies would be longer than most known ones."""
_LATENCIES = {"ttft_s": "TTFT", "queue_s": "Queueing", "e2e_s": "E2E"}


def _cut_off(overall: Mapping[str, Any], arrived: int) -> list[str]:
    """Return a sentence for each latency that some requests lack, with lower bounds of its statistics over all requests
    that were not rejected. Also return a sentence on TPOT and TBT, for which there are no such bounds.
    """
    found = []
    censored = overall["censored"]
    for name, label in _LATENCIES.items():
        section = censored.get(name)
        if section is not None:
            bounds = section["at_least"]
            listed = ", ".join(f"{stat if stat == 'mean' else stat.upper()} {bounds[stat]:.3g} s" for stat in _BOUNDED)
            found.append(
                f"{label} is known of {section['num_known']} of {arrived} requests and too low; over all that were not rejected it is at least: {listed}."
            )
    cut = censored["tbt_s"]["num_missing"]
    return [*found, f"TPOT and TBT: nothing is known of {cut} of {arrived} requests after their end, or the run's."]


_BOUNDED = ("mean", "p50", "p90", "p99")


def _without_rates(data: Mapping[str, Any]) -> list[str]:
    """Return a warning if rates are undefined, or if the rates of a stable run are not computed over the span of its
    arrivals.
    """
    rates, counts = data["rates"], data["overall"]["counts"]
    if rates["duration_s"] is None:
        return [
            f"No rates: {counts['completed']} of {counts['arrived']} requests were completed, and there is no span of arrivals or completions to take a rate over."
        ]
    if rates["over"] == "completions" and data["stability"]["label"] == "stable":
        return [
            f"Most requests were completed after the last arrival ({rates['num_completed_in_drain']} of {counts['completed']}): rates are those of the completions, "
            "in a system that filled and emptied. A longer run shows what it keeps up with."
        ]
    return []


_FAR_RATE = 0.2
"""Relative deviation of the measured rate from the configured one above which a warning is given, unless chance
explains it.
"""


def rate_warnings(data: Mapping[str, Any], asked: float | None) -> list[str]:
    """Return a warning if requests arrived at a different rate than the configured one (`asked`, requests per second;
    None if no rate was configured).
    """
    overall = data["overall"]
    offered, arrived = overall["offered_requests_per_s"], overall["counts"]["arrived"]
    if not asked or not offered or abs(offered / asked - 1) <= max(_FAR_RATE, 4 / math.sqrt(arrived)):
        return []
    return [
        f"The workload was asked for {asked:.3g} requests/s and arrived at {offered:.3g}: turns of a session wait for the turn before, and a process may be bursty; "
        "compare by the offered load, not by the rate asked for."
    ]


def policy_notes(diary: PolicyDiary) -> list[str]:
    """Return notes on predictions that policies requested although none are available, and on emitted values that were
    lost.
    """
    found = [
        f"Policy {name!r} asked for output lengths, and the predictor 'none' knows none: it decided without them. Set "
        "`output_length` of the backend (oracle, noisy_oracle, histogram, constant) to give it some."
        for name in sorted(diary.asked_for_lengths)
    ]
    if diary.emitted.num_lost:
        found.append(
            f"Policies emitted {diary.emitted.num_lost:,} figures beyond the first {len(diary.emitted):,}, which alone are kept."
        )
    return found


_BECAME = {
    "rejected": "were rejected",
    "expired": "expired while they waited",
    "aborted": "were taken back by their clients",
    "failed": "failed with their replica",
}
