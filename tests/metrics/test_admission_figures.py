"""What tables, summary, report and timeline of a run say of its admission policy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from vajra_py.config import config_from_mapping
from vajra_py.contract import (
    ACCEPT,
    Accept,
    AdmissionDecision,
    AdmissionSpec,
    Defer,
    PolicyConfig,
    Refuse,
    ReplicasetView,
    RequestView,
)
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.metrics.comparison.comparison import compare
from vajra_py.metrics.report.report import render_report
from vajra_py.metrics.report.timeline import timeline_events
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.metrics.summary.summary import summarise
from vajra_py.plugins import load_registry
from vajra_py.runtime.requests.rejections import rejection_kind


class TurnsConfig(PolicyConfig):
    """No parameters."""


class Turns:
    """Accepts, degrades, refuses for two reasons, defers to a time, and defers until something ends, in turn."""

    def admit(self, request: RequestView, replicasets: Sequence[ReplicasetView], now: float) -> AdmissionDecision:
        kind = request.index % 6
        if kind == 1:
            return Accept(max_tokens=2, slo_class="batch")
        if kind in (2, 3):
            return Refuse("even" if kind == 2 else "odd", 1.0)
        if kind == 4 and now < request.arrived_at + 0.25:
            return Defer(request.arrived_at + 0.25, "not yet")
        if kind == 5 and sum(one.num_running for one in replicasets[0].replicas):
            return Defer()
        return ACCEPT


SPEC = AdmissionSpec("turns", TurnsConfig, lambda config, context: Turns(), "In turn.")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    registry = load_registry().with_policies([SPEC])
    lengths = {name: {"type": "constant", "value": v} for name, v in (("prompt_tokens", 50), ("output_tokens", 9))}
    mapping = {
        "version": 1,
        "preset": "vllm-v1",
        "scheduling": {"admission": "turns"},
        "replica": {"memory": {"num_blocks": 200}, "max_batch_size": 2},
        "admission": {"max_queued_requests": 4},
        "backend": {"simulator": {"latency": {"type": "constant", "step_time_s": 0.01}}},
        "workload": {
            "type": "synthetic",
            "num_requests": 120,
            "arrivals": {"type": "poisson", "rate": 60},
            **lengths,
        },
    }
    config = config_from_mapping(mapping, registry=registry)
    return run_experiment(config, folder=tmp_path_factory.mktemp("turns") / "run", registry=registry)


def test_the_requests_table_has_a_row_of_decisions(run: RunData) -> None:
    for row in run.requests().to_pylist():
        kind, what = row["index"] % 6, row["admission"]
        assert what == ("accepted", "degraded", "refused", "refused", "accepted", "accepted")[kind]
        assert row["degraded"] == ("max_tokens=2, slo_class=batch" if kind == 1 else "")
        if row["num_deferrals"]:
            assert row["deferral_reason"] == ("not yet" if kind == 4 else "")
        assert row["shed_reason"] == {2: "even", 3: "odd"}.get(kind, "")
        if kind == 4:
            assert (row["num_deferrals"], row["deferred_at"]) == (1, row["arrived_at"])
            assert row["deferred_s"] == pytest.approx(0.25)
        elif kind < 4:
            assert (row["num_deferrals"], row["deferred_s"]) == (0, 0.0)
            assert math.isnan(row["deferred_at"])
        if row["admitted_at"] > 0 and row["num_deferrals"]:
            assert row["queue_s"] >= row["deferred_s"] - 1e-9


def test_the_summary_counts_what_the_table_says(run: RunData) -> None:
    rows = run.requests().to_pylist()
    section = run.summary.data["admission"]
    outcomes = Counter(row["admission"] for row in rows)
    assert {name: section[name] for name in ("accepted", "degraded", "refused", "deferred")} == {
        "accepted": outcomes["accepted"],
        "degraded": 20,
        "refused": 40,
        "deferred": 0,
    }
    assert section["refused_by_reason"] == {"even": 20, "odd": 20}
    assert section["deferred_by_reason"] == {"not yet": 20}
    rejected = Counter(rejection_kind(row["detail"]) for row in rows if row["reason"] == "rejected")
    assert section["rejected"] == {"shed": 40, "queue_full": rejected["queue_full"], "no_replica": 0, "cannot_run": 0}
    assert rejected["queue_full"] > 0
    assert run.summary.value("overall.counts.rejected") == sum(rejected.values())
    assert section["num_deferred"] == sum(row["num_deferrals"] > 0 for row in rows)
    assert section["deferred_s"]["max"] == max(row["deferred_s"] for row in rows)
    assert summarise(run.requests(), run.steps(), run.tbt()).data["admission"] == section
    (sentence,) = [one for one in run.summary.data["warnings"] if one.startswith("Of the rejected")]
    assert "40 were shed by the admission policy" in sentence
    assert "Its reasons: even (20); odd (20)." in sentence


def test_rejected_requests_miss_their_slos_whoever_rejected_them(run: RunData) -> None:
    from vajra_py.metrics.definitions import Slo, SloDefaults

    slo = SloDefaults(Slo(ttft_s=1e6))
    data = summarise(run.requests(), run.steps(), run.tbt(), slo=slo).data
    counts = data["overall"]["counts"]
    assert data["overall"]["slo"]["overall"]["num_missed"] == counts["rejected"]
    assert data["overall"]["slo"]["overall"]["num_met"] == counts["completed"]


def test_a_report_and_a_comparison_show_it(run: RunData) -> None:
    page = render_report([run])
    assert compare([run]).reasons == {"deferred: not yet": (20,), "refused: even": (20,), "refused: odd": (20,)}
    words = ("Shed by admission", "Found a full queue", "Degraded by admission", "Deferral mean", "deferred: not yet")
    for label in words:
        assert label in page


def test_a_timeline_has_a_span_for_each_deferral(run: RunData) -> None:
    rows = {str(row["request_id"]): row for row in run.requests().to_pylist() if row["num_deferrals"]}
    events = list(timeline_events(run))
    spans = [one for one in events if one["name"] == "deferred"]
    assert len(spans) == len(rows)
    assert sum(one["dur"] for one in spans) / 1e6 == pytest.approx(sum(row["deferred_s"] for row in rows.values()))
    for span in spans:
        queues = [
            one for one in events if one["name"] == "queue" and (one["pid"], one["tid"]) == (span["pid"], span["tid"])
        ]
        assert all(one["ts"] >= span["ts"] + span["dur"] - 0.01 for one in queues)


def test_the_decisions_are_kept_in_order(run: RunData) -> None:
    decisions = list(run.admissions())
    assert [one["at"] for one in decisions] == sorted(one["at"] for one in decisions)
    by_kind = Counter(one["decision"] for one in decisions)
    assert by_kind["refuse"] == 40
    first: dict[str, Any] = next(one for one in decisions if one["decision"] == "refuse")
    deferred = {one["index"] % 6: one.get("reason") for one in decisions if one["decision"] == "defer"}
    assert deferred == {4: "not yet", 5: None}  # a missing reason is null, not an empty text
    assert {key: first[key] for key in ("policy", "reason", "retry_after_s")} == {
        "policy": "turns",
        "reason": "even",
        "retry_after_s": 1.0,
    }


def test_equal_runs_write_equal_bytes(run: RunData, tmp_path: Path) -> None:
    registry = load_registry().with_policies([SPEC])
    config = config_from_mapping(dict(run.config), registry=registry)
    again = run_experiment(config, folder=tmp_path / "again", registry=registry)
    for name in ("requests.parquet", "admissions.jsonl.gz", "decisions.parquet", "summary.json"):
        assert (run.path / name).read_bytes() == (again.path / name).read_bytes()
