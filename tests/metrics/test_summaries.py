"""Summaries: every number of a small run by hand, windows, groups, defaults, and what may not be dropped silently."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vajra_py.metrics.definitions import Slo, SloDefaults, Window
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.metrics.summary.summary import MAX_GROUPS, OTHERS, Summary, summarise
from vajra_py.metrics.tables.request_row import RequestRow
from vajra_py.metrics.tables.requests import RequestsBuilder, TbtBuilder
from vajra_py.metrics.tables.steps import StepRow, StepsBuilder

NAN = float("nan")
BASE = RequestRow(
    request_id="", index=0, replicaset="chat", replica_id=0, tenant="a", slo_class="", session_id="", priority=0,
    num_prompt_tokens=10, num_output_tokens=5, num_cached_tokens=0, num_preemptions=0, arrived_at=0.0, admitted_at=0.0,
    first_token_at=1.0, ended_at=5.0, reason="stop", detail="", tbt_p50_s=1.0, tbt_p99_s=1.0, tbt_max_s=1.0,
    ttft_slo_s=None, tpot_slo_s=None, deadline_at=None,
)  # fmt: skip


def table(*changes: dict[str, Any]) -> pa.Table:
    builder = RequestsBuilder()
    for i, change in enumerate(changes):
        builder.append(dataclasses.replace(BASE, index=i, request_id=f"r{i}", **change))
    return builder.to_table()


def steps(*rows: tuple[float, float, float, int]) -> pa.Table:
    """Rows of (formed, duration, used fraction, replica)."""
    builder = StepsBuilder()
    for i, (formed_at, duration_s, used, replica) in enumerate(rows):
        builder.append(StepRow("chat", replica, i, formed_at, duration_s, 4, 1, 4, 16, 100, 5, 2, 10, used, 1, 0))
    return builder.to_table()


def gaps(*rows: tuple[str, float, int]) -> pa.Table:
    builder = TbtBuilder()
    for slo_class, gap_s, weight in rows:
        builder.add("chat", slo_class, gap_s, weight)
    return builder.to_table()


def test_counts_rates_and_tokens_by_hand() -> None:
    requests = table(
        {"arrived_at": 0.0, "ended_at": 5.0, "num_cached_tokens": 4},
        {"arrived_at": 2.0, "ended_at": 10.0, "first_token_at": 6.0, "num_preemptions": 2, "tenant": "b"},
        {"arrived_at": 4.0, "ended_at": NAN, "reason": "unfinished", "first_token_at": 7.0, "num_output_tokens": 2},
        {
            "arrived_at": 4.0,
            "ended_at": 4.0,
            "reason": "rejected",
            "admitted_at": NAN,
            "first_token_at": NAN,
            "num_output_tokens": 0,
        },
    )
    found = summarise(requests, steps((0.0, 1.0, 0.5, 0)), gaps(), Window(0.0, 10.0))
    overall = found.data["overall"]
    assert overall["counts"] == {
        "arrived": 4, "completed": 2, "stop": 2, "length": 0, "aborted": 0, "expired": 0, "rejected": 1, "failed": 0,
        "unfinished": 1,
    }  # fmt: skip
    assert overall["offered_requests_per_s"] == pytest.approx(3 / 4)
    assert overall["ttft_s"]["count"] == 3
    assert (overall["ttft_s"]["mean"], overall["ttft_s"]["p50"], overall["ttft_s"]["max"]) == pytest.approx(
        (8 / 3, 3, 4)
    )
    assert overall["e2e_s"] == {"count": 2, "mean": 6.5, "p50": 5.0, "p90": 8.0, "p95": 8.0, "p99": 8.0, "max": 8.0}
    assert overall["tpot_s"]["p50"] == 1.0
    assert overall["throughput"] == {"requests_per_s": 0.2, "output_tokens_per_s": 1.0, "prompt_tokens_per_s": 2.0}
    assert overall["goodput"] == dict.fromkeys(overall["throughput"])
    assert overall["tokens"] == {"prompt": 40, "output": 12, "cached": 4, "prefix_hit_fraction": pytest.approx(4 / 30)}
    assert overall["preemptions"] == {"count": 2, "requests": 1, "per_request": 0.5}
    assert any(text.startswith("1 of 4 requests had not ended") for text in found.value("warnings"))
    assert "1 of 4 requests were rejected." in found.value("warnings")


def test_latencies_counts_and_rates_are_those_of_the_requests_that_arrived_in_the_window() -> None:
    requests = table(
        {"arrived_at": 0.0, "ended_at": 12.0},
        {"arrived_at": 11.0, "ended_at": 15.0},
        {"arrived_at": 15.0, "ended_at": 40.0},
        {"arrived_at": 25.0, "ended_at": 26.0},
    )
    found = summarise(requests, steps(), gaps(), Window(10.0, 20.0)).data
    assert found["overall"]["counts"]["arrived"] == 2
    assert found["overall"]["e2e_s"]["max"] == 25.0
    # Two requests, four seconds apart: that they came, and were delivered, at one in four seconds does not depend on the answer that ended at 40 s.
    assert found["overall"]["throughput"]["requests_per_s"] == found["overall"]["offered_requests_per_s"] == 0.25
    assert (found["rates"]["drain_s"], found["rates"]["num_completed_in_drain"]) == (5.0, 1)


def test_attainment_and_goodput_use_own_slos_then_defaults() -> None:
    requests = table(
        {"ttft_slo_s": 1.0},
        {"ttft_slo_s": 0.5},
        {"slo_class": "gold"},
        {"slo_class": "gold", "first_token_at": 3.0, "ended_at": 7.0},
        {"slo_class": "free"},
    )
    slo = SloDefaults(by_class={"gold": Slo(ttft_s=2.0)})
    found = summarise(requests, steps(), gaps(), Window(0.0, 10.0), slo).data
    assert found["overall"]["slo"]["overall"] == {
        "num_met": 2, "num_missed": 2, "num_undecided": 0, "attainment_fraction": 0.5,
    }  # fmt: skip
    assert found["overall"]["goodput"]["requests_per_s"] == pytest.approx(
        2 / 7
    )  # all arrived at the same time, the last ended at 7 s
    assert found["by_slo_class"]["gold"]["slo"]["ttft"]["attainment_fraction"] == 0.5
    assert found["by_slo_class"]["free"]["goodput"]["requests_per_s"] is None
    everyone = summarise(requests, steps(), gaps(), Window(0.0, 10.0), SloDefaults(Slo(e2e_s=5.0))).data
    assert everyone["overall"]["slo"]["deadline"] == {
        "num_met": 4, "num_missed": 1, "num_undecided": 0, "attainment_fraction": 0.8,
    }  # fmt: skip


def test_the_longest_gap_is_judged_by_own_slos_then_defaults() -> None:
    requests = table(
        {"slo_class": "chat", "tbt_max_s": 0.3},
        {"slo_class": "chat", "tbt_max_s": 0.3, "tbt_slo_s": 0.5},
        {"slo_class": "chat", "tbt_max_s": 0.1},
        {"slo_class": "batch", "tbt_max_s": 9.0},
    )
    slo = SloDefaults(by_class={"chat": Slo(tbt_s=0.2)})
    found = summarise(requests, steps(), gaps(), Window(0.0, 10.0), slo).data
    assert found["overall"]["slo"]["tbt"] == {
        "num_met": 2, "num_missed": 1, "num_undecided": 0, "attainment_fraction": pytest.approx(2 / 3),
    }  # fmt: skip
    before = summarise(requests.drop_columns("tbt_slo_s"), steps(), gaps(), Window(0.0, 10.0), slo).data
    assert before["overall"]["slo"]["tbt"]["num_missed"] == 2, "tables of earlier versions have no SLOs on gaps"


def test_goodput_never_exceeds_throughput(make_run: Callable[..., RunData]) -> None:
    overall = make_run(rate_per_s=40.0).summary.value("overall")
    assert 0 < overall["goodput"]["requests_per_s"] <= overall["throughput"]["requests_per_s"]
    assert overall["goodput"]["output_tokens_per_s"] <= overall["throughput"]["output_tokens_per_s"]


def test_gaps_are_weighted_and_split_by_class() -> None:
    requests = table({"slo_class": "gold"}, {"slo_class": "free"})
    found = summarise(requests, steps(), gaps(("gold", 0.1, 98), ("gold", 0.5, 1), ("free", 0.9, 1))).data
    assert found["overall"]["tbt_s"]["count"] == 100
    assert (found["overall"]["tbt_s"]["p50"], found["overall"]["tbt_s"]["p99"]) == (0.1, 0.5)
    assert found["overall"]["tbt_s"]["mean"] == pytest.approx((9.8 + 0.5 + 0.9) / 100)
    assert found["by_slo_class"]["free"]["tbt_s"]["p50"] == 0.9
    assert found["by_tenant"]["a"]["tbt_s"] is None
    assert found["by_tenant"]["a"]["request_tbt_p99_s"]["p50"] == 1.0


def test_one_tenant_is_not_fair_or_unfair() -> None:
    fairness = summarise(table({}), steps(), gaps()).value("fairness")
    measures = ("jain_index", "max_service_difference", "worst_ttft_p99_s", "worst_e2e_p99_s", "worst_ttft_tenant")
    assert {fairness[name] for name in measures} == {None}


def test_requests_without_a_name_are_a_group_beside_named_ones() -> None:
    found = summarise(table({"slo_class": ""}, {"slo_class": "gold"}), steps(), gaps()).data
    assert sorted(found["by_slo_class"]) == ["(none)", "gold"]
    assert summarise(table({"slo_class": ""}), steps(), gaps()).data["by_slo_class"] == {}


def test_a_tenant_that_is_called_as_a_group_is_a_group_of_its_own() -> None:
    changes = [{"tenant": name} for name in ("", "", "(none)", "(none)'")]
    groups = summarise(table(*changes), steps(), gaps()).data["by_tenant"]
    assert {name: one["counts"]["arrived"] for name, one in groups.items()} == {
        "(none)": 1,
        "(none)'": 1,
        "(none)''": 2,
    }


def test_many_tenants_are_cut_to_the_largest_without_losing_a_request() -> None:
    changes = [{"tenant": f"t{i % (MAX_GROUPS + 20)}"} for i in range(2 * MAX_GROUPS + 10)]
    groups = summarise(table(*changes), steps(), gaps()).data["by_tenant"]
    assert len(groups) == MAX_GROUPS + 1
    assert OTHERS in groups
    assert sum(group["counts"]["arrived"] for group in groups.values()) == len(changes)


def test_use_of_memory_is_weighted_by_time_and_busy_time_is_a_union() -> None:
    own = steps((0.0, 1.0, 0.2, 0), (1.0, 3.0, 0.6, 0), (2.0, 1.0, 0.6, 0), (0.0, 10.0, 0.0, 1))
    resources = summarise(table({}), own, gaps(), Window(0.0, 10.0)).data["resources"]
    assert resources["mean_used_fraction"] == pytest.approx((0.2 + 1.8 + 0.6) / 15)
    assert resources["max_used_fraction"] == 0.6
    # Replica 0 was busy for 4 of 10 s although two of its steps overlap, replica 1 always.
    assert resources["busy_fraction"] == pytest.approx(0.7)
    assert resources["num_preempted"] == 4
    assert resources["mean_step_tokens"] == 20


def test_an_empty_run_is_summarised_and_said_to_be_empty() -> None:
    found = summarise(table(), steps(), gaps())
    assert found.value("overall.counts.arrived") == 0
    assert found.value("overall.ttft_s") == dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max")) | {"count": 0}
    assert found.value("warnings") == ["No request arrived in the measurement window."]


def test_json_holds_no_nan_and_comes_back_equal(make_run: Callable[..., RunData]) -> None:
    run = make_run(horizon_at=2.5, rate_per_s=20.0)
    again = summarise(run.requests(), run.steps(), run.tbt())
    assert again.to_json() == run.summary.to_json()
    assert "NaN" not in again.to_json()
    assert Summary.from_json(again.to_json()).data == json.loads(again.to_json())


@pytest.mark.parametrize("text", ["[]", "{}", '{"version": 99}', "{"])
def test_something_else_is_not_a_summary(text: str) -> None:
    with pytest.raises(ValueError, match=r"summary|Expecting"):
        Summary.from_json(text)


def test_counts_of_every_group_add_up(make_run: Callable[..., RunData]) -> None:
    data = make_run(horizon_at=2.5, rate_per_s=20.0).summary.data
    for section in ("by_tenant", "by_slo_class", "by_replicaset"):
        for key, total in data["overall"]["counts"].items():
            assert sum(group["counts"][key] for group in data[section].values()) == total
    counts = data["overall"]["counts"]
    assert counts["arrived"] == sum(value for key, value in counts.items() if key not in ("arrived", "completed"))


def test_the_drain_moves_no_rate_and_no_utilisation() -> None:
    """A system that keeps up, and the same one whose last answer is two hundred times as long."""
    own = [
        {"arrived_at": 1.0 * i, "first_token_at": i + 0.5, "ended_at": i + 2.0, "ttft_slo_s": 1.0} for i in range(60)
    ]
    busy = [(float(i), 0.5, 0.4, 0) for i in range(61)]
    short = summarise(table(*own), steps(*busy), gaps()).data
    own[-1]["ended_at"] = 400.0
    long = summarise(table(*own), steps(*busy, *((61.0 + i, 1.0, 0.01, 0) for i in range(339))), gaps()).data
    assert short["overall"]["throughput"] == long["overall"]["throughput"]
    assert (
        long["overall"]["throughput"]["requests_per_s"]
        == pytest.approx(1.0)
        == long["overall"]["goodput"]["requests_per_s"]
    )
    for name in ("busy_fraction", "mean_used_fraction", "mean_step_tokens", "decode_tokens_per_s", "mean_step_s"):
        assert short["resources"][name] == long["resources"][name], name
    assert (short["rates"]["drain_s"], long["rates"]["drain_s"]) == (2.0, 341.0)
    assert long["resources"]["num_steps"] == 400


def cut_run() -> dict[str, Any]:
    """Ten requests of which four were never admitted, two had no first token and one was not ended when the run was, at 10 s."""
    served = [
        {"arrived_at": 0.1 * i, "admitted_at": 0.1 * i, "first_token_at": 1.0 + i, "ended_at": 2.0 + i}
        for i in range(4)
    ]
    half = {"reason": "unfinished", "ended_at": NAN}
    begun = [{"arrived_at": 1.0, "admitted_at": 2.0, "first_token_at": 5.0} | half]
    begun.append({"arrived_at": 1.0, "admitted_at": 3.0, "first_token_at": NAN, "num_output_tokens": 0} | half)
    never = [
        {"arrived_at": 2.0, "admitted_at": NAN, "first_token_at": NAN, "num_output_tokens": 0} | half for _ in range(4)
    ]
    return dict(summarise(table(*served, *begun, *never), steps((9.0, 1.0, 0.5, 0)), gaps(), Window(0.0, 10.0)).data)


def test_what_the_end_of_a_run_cut_off_is_said_of_every_latency_with_bounds() -> None:
    found = cut_run()
    censored = found["overall"]["censored"]
    missing = {name: (section["num_known"], section["num_missing"]) for name, section in censored.items()}
    assert missing == {"ttft_s": (5, 5), "queue_s": (6, 4), "e2e_s": (4, 6), "tpot_s": (4, 6), "tbt_s": (4, 6)}
    assert found["overall"]["ttft_s"]["p90"] == 4.0
    # One request had waited 9 s and four 8 s for a first token when the run ended.
    assert censored["ttft_s"]["at_least"]["p90"] == 8.0
    assert censored["ttft_s"]["at_least"]["max"] == 9.0
    assert censored["ttft_s"]["at_least"]["mean"] == pytest.approx((1.0 + 1.9 + 2.8 + 3.7 + 4.0 + 9.0 + 4 * 8.0) / 10)
    assert censored["tpot_s"]["at_least"]["p50"] == 0.0
    assert censored["tbt_s"]["at_least"] is None
    told = "\n".join(found["warnings"])
    assert "TTFT is known of 5 of 10 requests and too low" in told
    assert "P90 8 s" in told
    for label in ("Queueing is known of 6", "E2E is known of 4", "TPOT and TBT: nothing is known of 6 of 10"):
        assert label in told


def test_a_whole_run_says_nothing_of_what_is_cut_off() -> None:
    found = summarise(
        table({}, {"arrived_at": 0.5}, {"reason": "rejected", "ended_at": 0.0, "first_token_at": NAN}), steps(), gaps()
    )
    assert found.value("overall.censored") == {}
    assert not [text for text in found.value("warnings") if "known" in text]


@given(st.floats(0.5, 60.0), st.integers(0, 1000))
def test_bounds_of_a_run_that_was_cut_off_hold_of_the_same_run_when_it_goes_on(end_at: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    facts, free = [], 0.0
    for at in np.cumsum(rng.exponential(0.5, 50)).tolist():
        begun = max(free, at)
        first = begun + float(rng.exponential(0.3))
        free = first + float(rng.exponential(0.3))
        facts.append({"arrived_at": at, "admitted_at": begun, "first_token_at": first, "ended_at": free})
    end_at = max(end_at, facts[0]["arrived_at"] + 0.1)
    whole = [fact for fact in facts if fact["arrived_at"] <= end_at]
    cut = [{key: at if at <= end_at else NAN for key, at in fact.items()} for fact in whole]
    unfinished = [fact | ({"reason": "unfinished"} if np.isnan(fact["ended_at"]) else {}) for fact in cut]
    window = Window(facts[0]["arrived_at"], end_at)
    told, all_of_it = (summarise(table(*own), steps(), gaps(), window).data["overall"] for own in (unfinished, whole))
    for name, section in told["censored"].items():
        for statistic, bound in (section["at_least"] or {}).items():
            assert bound <= all_of_it[name][statistic] + 1e-9, (name, statistic)


def test_one_request_has_no_rate_and_the_summary_says_so() -> None:
    found = summarise(table({}), steps(), gaps())
    assert found.value("overall.throughput.requests_per_s") is None
    assert any(text.startswith("No rates: 1 of 1 requests were completed") for text in found.value("warnings"))
