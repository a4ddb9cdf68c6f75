"""Requests that move, and pools, in the tables, summary, comparison, report and timeline of a run."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.metrics.test_timeline_trace import request_spans, tracks
from tests.sim.split_pools import AFFINE, POLICIES
from vajra_py import api as vajra
from vajra_py.cli.main import main
from vajra_py.contract import PolicyConfig, PolicyContext, PoolView, ScalerSpec
from vajra_py.metrics import plots
from vajra_py.metrics.comparison.comparison import compare
from vajra_py.metrics.comparison.reason_table import further_tables
from vajra_py.metrics.report.report import render_report
from vajra_py.metrics.report.timeline import timeline_events
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.metrics.tables.transfers import MOVEMENT_COLUMNS, TRANSFERS_FILE

TIMES = ("held_s", "transfer_s", "target_wait_s")
PRICE = 3.6
"""Price of an hour of a device: a thousandth of a dollar a second."""


def mapping(**keys: Any) -> dict[str, Any]:
    """Two replicas compute prompts; the memory of the one that decodes is short, so that requests are held."""
    return {
        "version": 1,
        "scheduling": POLICIES,
        "replica": {"memory": {"num_blocks": 400}, "max_batch_tokens": 1024},
        "pools": {"prefill": {"num_replicas": 2}, "decode": {"replica": {"memory": {"num_blocks": 60}}}},
        "hand_off": {"kv_bytes_per_token": 1_000_000, "takes_effect": "at_step_boundary"},
        "links": {"bandwidth_gb_s": 10.0, "latency_s": 0.001},
        "workload": {
            "type": "synthetic",
            "num_requests": 120,
            "arrivals": {"type": "poisson", "rate": 12},
            "prompt_tokens": {"type": "uniform", "min": 20, "max": 400},
            "output_tokens": {"type": "uniform", "min": 1, "max": 40},
        },
        "backend": {"simulator": {"latency": AFFINE}},
        "costs": {"device": "mine", "devices": {"mine": {"price_per_hour": PRICE}}},
        **keys,
    }


def made(folder: Path, **keys: Any) -> RunData:
    return vajra.run(mapping(**keys, output={"dir": str(folder)}))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    return made(tmp_path_factory.mktemp("split"))


@pytest.fixture(scope="module")
def dropping(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    """As `run`, but requests end whose target is full."""
    hand_off = {"kv_bytes_per_token": 1_000_000, "when_full": "drop"}
    return made(tmp_path_factory.mktemp("dropping"), hand_off=hand_off)


FULL = "rejected: the replica that was to go on with it is full"


def sums(run: RunData) -> Mapping[str, dict[int, float]]:
    """The three times of each request, added up from the transfers table by hand."""
    found: dict[str, dict[int, float]] = {name: defaultdict(float) for name in TIMES}
    for row in run.transfers().to_pylist():
        end = row["over_at"]
        sent = row["start_at"] if row["start_at"] == row["start_at"] else end
        there = row["arrived_at"] if row["arrived_at"] == row["arrived_at"] else end
        found["held_s"][row["index"]] += sent - row["held_at"]
        if row["start_at"] == row["start_at"]:
            found["transfer_s"][row["index"]] += there - sent
        if row["arrived_at"] == row["arrived_at"]:
            found["target_wait_s"][row["index"]] += end - there
    return found


@pytest.mark.parametrize("which", ["run", "dropping"])
def test_the_table_has_a_row_for_each_hand_off(which: str, request: pytest.FixtureRequest) -> None:
    run: RunData = request.getfixturevalue(which)
    outcomes = Counter((row["outcome"], row["reason"]) for row in run.transfers().to_pylist())
    assert outcomes["done", ""] > 50
    assert (outcomes["ended", FULL] > 5) is (which == "dropping")
    assert len(outcomes) == (2 if which == "dropping" else 1)
    requests = {row["request_id"]: row for row in run.requests().to_pylist()}
    for row in run.transfers().to_pylist():
        own = requests[row["request_id"]]
        assert row["index"] == own["index"]
        if row["outcome"] == "ended":
            assert (own["reason"], own["ended_at"]) == ("rejected", row["over_at"])
        if row["start_at"] == row["start_at"]:
            assert row["link"] == f"out {row['source_replica_id']}, in {row['target_replica_id']}"
            assert row["num_tokens"] == own["num_prompt_tokens"]
            alone_s = row["num_tokens"] * 1_000_000 / 10e9 + 0.001
            assert row["end_at"] - row["start_at"] >= alone_s - 1e-9
        if row["outcome"] == "done":
            assert (own["source_replica_id"], own["target_replica_id"]) == (row["source_replica_id"], 2)
            assert (own["source_pool"], own["target_pool"]) == ("prefill", "decode")


def test_the_summarys_times_are_those_of_the_transfers_table(run: RunData) -> None:
    section, expected = run.summary.data["movement"], sums(run)
    for name in TIMES:
        values = np.sort(list(expected[name].values()))
        assert section[name]["count"] == len(values)
        assert section[name]["mean"] == pytest.approx(values.mean())
        for key, fraction in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            assert section[name][key] == pytest.approx(values[int(np.ceil(fraction * len(values))) - 1])
        assert section[name]["max"] == pytest.approx(values[-1])
    assert section["held_s"]["p99"] > 0.05  # the target is short of memory
    rows = run.transfers().to_pylist()
    whole = [row for row in rows if row["end_at"] == row["end_at"]]
    assert section["moved_bytes"] == sum(row["num_bytes"] for row in whole) == 10**6 * section["moved_tokens"]
    assert section["num_hand_offs"] == sum(row["arrived_at"] == row["arrived_at"] for row in rows)
    (route,) = section["routes"]
    assert (route["source_pool"], route["target_pool"], route["num_transfers"]) == ("prefill", "decode", len(whole))
    assert section["by_reason"] == {}


def test_what_did_not_arrive_is_counted_by_reason(dropping: RunData) -> None:
    num_ended = sum(row["outcome"] == "ended" for row in dropping.transfers().to_pylist())
    assert dropping.summary.value("movement.by_reason") == {f"hand-off ended on its way: {FULL}": num_ended}
    assert num_ended == dropping.summary.value("overall.counts.rejected")


def test_the_window_leaves_out_requests_that_arrived_before_it(run: RunData, tmp_path: Path) -> None:
    backend = {"simulator": {"latency": AFFINE, "warmup_s": 4.0}}
    later = made(tmp_path, backend=backend)
    arrived_at = later.requests("arrived_at").column("arrived_at").to_numpy()
    inside = {int(i) for i in np.flatnonzero(later.window.holds(arrived_at))}
    assert len(inside) < 100
    held = [value for index, value in sums(later)["held_s"].items() if index in inside]
    assert later.summary.value("movement.held_s.count") == len(held)
    assert later.summary.value("movement.held_s.max") == pytest.approx(max(held))


def test_pools_are_as_busy_as_their_steps_and_cost_what_their_replicas_do(run: RunData) -> None:
    pools = run.summary.data["pools"]
    assert list(pools) == ["prefill", "decode"]
    steps, window = run.steps_frame(), run.window
    last_arrival = run.summary.value("rates.last_arrival_at")
    for name, ids in (("prefill", (0, 1)), ("decode", (2,))):
        own = steps[steps.replica_id.isin(ids)]
        busy_s = (np.minimum(own.formed_at + own.duration_s, last_arrival) - own.formed_at).clip(lower=0).sum()
        whole_s = len(ids) * (last_arrival - window.start_at)
        assert pools[name]["busy_fraction"] == pytest.approx(busy_s / whole_s)
        assert pools[name]["replicas"]["active_s"] == pytest.approx(len(ids) * window.duration_s)
        assert pools[name]["cost"]["run"] == pytest.approx(len(ids) * window.duration_s * PRICE / 3600)
        formed = own[own.formed_at <= last_arrival]
        span_s = last_arrival - window.start_at
        assert pools[name]["prefill_tokens_per_s"] == pytest.approx(formed.prefill_tokens.sum() / span_s)
    assert run.summary.value("cost.run") == pytest.approx(sum(one["cost"]["run"] for one in pools.values()))
    assert [one["role"] for one in pools.values()] == ["prefill", "decode"]


def test_each_pool_is_paid_for_by_its_own_device(tmp_path: Path) -> None:
    pools = {"prefill": {"num_replicas": 3}, "decode": {"num_replicas": 2}}
    roofline = {"type": "roofline", "model": "llama-3.1-8b", "device": "h100-sxm"}
    cheap = {"latency": {**roofline, "device": "a100-80gb-sxm"}}
    backend = {"simulator": {"latency": roofline, "replicasets": {"default": {"pools": {"decode": cheap}}}}}
    run = made(tmp_path, pools=pools, backend=backend, costs={}, replica={"max_batch_tokens": 1024})
    devices = run.summary.value("cost.devices")
    assert {name: (one["device"], one["count"]) for name, one in devices.items()} == {
        "default/prefill": ("h100-sxm", 3),
        "default/decode": ("a100-80gb-sxm", 2),
    }
    prices = [one["count"] * one["price_per_hour"] for one in devices.values()]
    assert run.summary.value("cost.per_hour") == pytest.approx(sum(prices))
    assert [one["cost"]["per_hour"] for one in run.summary.data["pools"].values()] == pytest.approx(prices)


def test_comparison_and_report_show_movement_pools_and_reasons(dropping: RunData, tmp_path: Path) -> None:
    run = dropping.renamed("short")
    other = made(tmp_path, pools={"prefill": {"num_replicas": 2}, "decode": {"num_replicas": 2}}).renamed("roomy")
    comparison = compare([run, other])
    overall = comparison.values["overall"]
    assert overall["num_hand_offs"][0] == run.summary.value("movement.num_hand_offs")
    assert overall["held_p99_s"] == tuple(one.summary.value("movement.held_s.p99") for one in (run, other))
    assert comparison.scope("decode") == "pool decode"
    assert comparison.values["pool decode"]["pool_replicas"] == (1, 2)
    pools, reasons = further_tables(comparison)
    assert [row.head for row in pools.rows] == ["short: prefill", "short: decode", "roomy: prefill", "roomy: decode"]
    assert reasons.heads == ("short", "roomy")
    (full,) = reasons.rows
    assert [cell.value for cell in full.cells] == [run.summary.value("overall.counts.rejected"), 0]
    data = json.loads(comparison.to_json())
    assert data["reasons"] == {full.head: [full.cells[0].value, 0]}
    busy = [
        one["value"] for one in data["values"] if (one["scope"], one["metric"]) == ("pool decode", "pool_busy_fraction")
    ]
    assert busy == [one.summary.value("pools.decode.busy_fraction") for one in (run, other)]
    assert "pool decode,short" in comparison.to_csv()
    page = render_report([run, other])
    for text in (
        "Held at the source P99 (ms)",
        "In transfer P50",
        "Waiting at the target",
        ">Pools<",
        "roomy: decode",
        full.head,
    ):
        assert text in page


def test_runs_that_differ_in_pools_are_told_apart_by_them(run: RunData, tmp_path: Path) -> None:
    other = made(tmp_path, pools={"prefill": {"num_replicas": 2}, "decode": {"num_replicas": 2}})
    names = [one.name for one in vajra.open_runs([run.path, other.path])]
    assert names == ["2 prefill + 1 decode", "2 prefill + 2 decode"]


def test_figures_draw_what_the_tables_say(run: RunData) -> None:
    assert plots.has_movement([run])
    assert plots.has_pools([run])
    panels = {axes.get_label(): axes for axes in plots.movement_times([run]).axes}
    (dot,) = [line for line in panels["held"].lines if str(line.get_label()).endswith("P50")]
    assert dot.get_xdata()[0] == pytest.approx(1000 * run.summary.value("movement.held_s.p50"))  # type: ignore[index]
    busy = [axes for axes in plots.pools_over_time([run]).axes if axes.get_label() == "busy"]
    steps, window = run.steps_frame(), run.window
    for axes, ids in zip(busy, ((0, 1), (2,)), strict=True):
        (line,) = axes.lines
        mean = float(np.mean(line.get_ydata()))
        expected = steps[steps.replica_id.isin(ids)].duration_s.sum() / window.duration_s
        assert mean == pytest.approx(expected, rel=1e-3)


def test_flows_pair_up_and_join_the_replicas_of_each_transfer(run: RunData) -> None:
    events = list(timeline_events(run))
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    spans = tracks(events)
    flows: dict[int, dict[str, Any]] = defaultdict(dict)
    for event in events:
        if event["ph"] in ("s", "f"):
            assert event["ph"] not in flows[event["id"]]
            flows[event["id"]][event["ph"]] = event
    sent = sorted(
        (row for row in run.transfers().to_pylist() if row["start_at"] == row["start_at"]),
        key=lambda row: float(row["start_at"]),
    )
    assert len(flows) == len(sent) > 50
    for number, row in enumerate(sent):
        for phase, end, pool in (("s", "source", "prefill"), ("f", "target", "decode")):
            event = flows[number][phase]
            assert names[event["pid"]] == f"default/{pool} replica {row[f'{end}_replica_id']}: steps"
            (around,) = [
                one for one in spans[event["pid"], event["tid"]] if one["ts"] <= event["ts"] < one["ts"] + one["dur"]
            ]
            assert around["name"].startswith(f"{row['request_id']} ")
            assert around["args"]["num_bytes"] == row["num_bytes"]
        assert flows[number]["s"]["ts"] <= flows[number]["f"]["ts"]


def test_a_requests_line_has_the_times_in_which_it_stood_still(run: RunData) -> None:
    found, expected = request_spans(run), sums(run)
    by_kind: dict[str, float] = defaultdict(float)
    for spans in found.values():
        for span in spans:
            for words, name in (("held", "held_s"), ("in transfer", "transfer_s"), ("waiting at", "target_wait_s")):
                if span["name"].startswith(words):
                    by_kind[name] += span["dur"] / 1e6
    for name in TIMES:
        assert by_kind[name] == pytest.approx(sum(expected[name].values()), abs=1e-5)
    for spans in found.values():
        still = [
            (one["ts"], one["ts"] + one["dur"])
            for one in spans
            if one["name"] == "held" or " at replica " in one["name"] or "transfer to" in one["name"]
        ]
        for one in spans:
            if one["name"] == "decode" or one["name"].startswith("prefill"):
                start, end = one["ts"], one["ts"] + one["dur"]
                assert all(end <= begin + 1e-3 or start >= stop - 1e-3 for begin, stop in still)


def test_replicas_of_a_pool_stand_together(run: RunData) -> None:
    events = list(timeline_events(run))
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    shown = [names[pid].split(" ")[0] for pid in sorted(order, key=order.__getitem__) if "replica" in names[pid]]
    pools = [name for name in shown if name.startswith("default/")]
    assert pools == ["default/prefill"] * 4 + ["default/decode"] * 2


def test_equal_runs_write_equal_bytes(run: RunData, tmp_path: Path) -> None:
    again = made(tmp_path)
    for name in (TRANSFERS_FILE, "requests.parquet", "summary.json"):
        assert (run.path / name).read_bytes() == (again.path / name).read_bytes()


def test_a_run_whose_requests_cannot_move_has_nothing_of_it(tmp_path: Path) -> None:
    plain = mapping(output={"dir": str(tmp_path)})
    for key in ("pools", "hand_off", "links"):
        del plain[key]
    run = vajra.run(plain)
    assert not (run.path / TRANSFERS_FILE).exists()
    assert run.transfers().num_rows == 0
    assert not set(MOVEMENT_COLUMNS) & set(run.requests().column_names)
    assert not {"movement", "pools"} & set(run.summary.data)
    assert not {e["ph"] for e in timeline_events(run)} & {"s", "f"}
    page = render_report([run])
    assert "Held at the source" not in page
    assert further_tables(compare([run])) == []


class Turns:
    """One more prefill replica from 1 s on, and one decode replica less from 2 s on."""

    def __init__(self, context: PolicyContext) -> None:
        for at in (1.0, 2.0):
            context.wake.at(at, str(at))

    def targets(self, pools: Sequence[PoolView], now: float) -> Mapping[str, int]:
        return {"prefill": 1 if now < 1.0 else 2, "decode": 2 if now < 2.0 else 1}


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    """A run whose scaler changes both pools."""
    spec = ScalerSpec("turns", PolicyConfig, lambda config, context: Turns(context), "In turn.")
    elastic = {"min_replicas": 1, "max_replicas": 2}
    pools = {
        "prefill": {"elastic": elastic},
        "decode": {"num_replicas": 2, "elastic": elastic, "replica": {"memory": {"num_blocks": 200}}},
    }
    folder = str(tmp_path_factory.mktemp("scaled"))
    given = mapping(pools=pools, scheduling={**POLICIES, "scaling": "turns"}, output={"dir": folder})
    return vajra.run(given, policies=[spec])


def test_replica_seconds_and_cost_of_scaled_pools_are_those_of_their_states(scaled: RunData) -> None:
    pools, window = scaled.summary.data["pools"], scaled.window
    rows = scaled.replicas().to_pylist()
    for name, ids in (("prefill", (0, 1)), ("decode", (2, 3))):
        own = [row for row in rows if row["replica_id"] in ids and row["state"] != "down"]
        seconds = sum(min(row["end_at"], window.end_at) - max(row["start_at"], window.start_at) for row in own)
        assert pools[name]["replicas"]["active_s"] == pytest.approx(seconds)
        assert pools[name]["cost"]["run"] == pytest.approx(seconds * PRICE / 3600)
    assert (pools["prefill"]["replicas"]["num_starts"], pools["decode"]["replicas"]["num_stops"]) == (1, 1)
    total = scaled.summary.value("replicas.active_s")
    assert total == pytest.approx(sum(one["replicas"]["active_s"] for one in pools.values()))
    assert scaled.summary.value("cost.run") == pytest.approx(total * PRICE / 3600)


def test_replicas_over_time_are_shown_by_pool(scaled: RunData) -> None:
    figure = plots.replicas_over_time([scaled])
    assert [axes.get_title("left") for axes in figure.axes] == ["prefill", "decode"]
    (line,) = figure.axes[0].lines
    times, counts = (np.asarray(one, dtype=float) for one in (line.get_xdata(), line.get_ydata()))
    assert dict(zip(times.tolist(), counts.tolist(), strict=True))[1.0] == 2
    counters = [event for event in timeline_events(scaled) if event["name"].startswith("replicas of ")]
    assert {event["name"] for event in counters} == {"replicas of default/prefill", "replicas of default/decode"}
    assert max(event["args"]["up"] for event in counters if "prefill" in event["name"]) == 2


def test_the_command_line_shows_pools_and_reasons(dropping: RunData, capsys: pytest.CaptureFixture[str]) -> None:
    for form in ("table", "markdown"):
        with pytest.raises(SystemExit):
            main(["compare", str(dropping.path), "--format", form])
        shown = capsys.readouterr().out
        for text in ("Held at the source P99", "prefill", "decode", "Busy (%)", f"hand-off ended on its way: {FULL}"):
            assert text in shown
    with pytest.raises(SystemExit):
        main(["compare", str(dropping.path), "--scope", "decode"])
    shown = capsys.readouterr().out
    assert "Replica-seconds" in shown
    assert "TTFT" not in shown
