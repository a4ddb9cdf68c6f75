"""Policies side by side on one page: who wins, what is kept, and what is refused."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from vajra_py.cli.main import main
from vajra_py.config import expand_sweep
from vajra_py.contract import KeyMotion, Layer, PolicyConfig, PolicyContext, PolicySpec, RequestView
from vajra_py.errors import RunInterrupted
from vajra_py.experiment.atlas.cards import cards_of
from vajra_py.experiment.atlas.entries import DEFAULT_BASELINE, DEFAULT_POLICIES, entries_of
from vajra_py.experiment.atlas.study import WORKLOADS, Execution, Request, plans_of, run_atlas
from vajra_py.experiment.runs.point_status import PointStatus
from vajra_py.metrics.comparison.policy_map import BASELINE, map_records
from vajra_py.plugins import Registry, load_registry

WORKLOAD = """\
version: 1
name: queue
description: Requests of very different lengths wait for one replica.
replica: {max_model_len: 4096, max_batch_size: 4, memory: {num_blocks: 400}}
workload:
  type: synthetic
  arrivals: {type: poisson, rate: 4}
  num_requests: 60
  prompt_tokens: {type: uniform, min: 20, max: 300}
  output_tokens: {type: lognormal, mu: 3.5, sigma: 1.0, min: 2, max: 400}
  tenants: {count: 2}
backend:
  simulator:
    latency: {type: constant, step_time_s: 0.02}
    output_length: {type: oracle}
sweep: {workload.arrivals.rate: [2, 2.8]}
"""
POLICIES = ("sjf", "priority", "srpt+preemptive")
METRICS = ("ttft_mean_s", "e2e_mean_s")
SEEDS = 4


def arguments(file: Path, out: Path, *more: object, replications: int = SEEDS) -> list[str]:
    given = ("--workload", file, "--out", out, "--replications", replications, "--workers", 1, *more)
    return [str(one) for one in given]


@pytest.fixture
def queue(tmp_path: Path) -> Path:
    file = tmp_path / "queue.yaml"
    file.write_text(WORKLOAD)
    return file


@pytest.fixture(scope="module")
def atlas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an atlas of three policies on one workload at two loads."""
    folder = tmp_path_factory.mktemp("atlas")
    file = folder / "queue.yaml"
    file.write_text(WORKLOAD)
    with pytest.raises(SystemExit) as end:
        main(
            [
                "atlas",
                *POLICIES,
                *arguments(file, folder / "out", "--metrics", ",".join(METRICS), "-q", "--figure-format", "svg"),
            ]
        )
    assert end.value.code == 0
    return folder / "out"


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text())))


def by_hand(atlas: Path) -> dict[tuple[str, str], dict[str, dict[int, float]]]:
    """Mean TTFT and E2E by seed, of each load and prioritizer, read from the files of the runs."""
    found: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for path in (atlas / "queue").iterdir():
        settings = json.loads((path / "manifest.json").read_text())["config"]
        summary = json.loads((path / "summary.json").read_text())["overall"]
        load = f"{settings['workload']['arrivals']['rate']:g}"
        policy = settings["scheduling"]["request_prioritizer"]["policy"]
        own = found.setdefault((load, policy), {key: {} for key in METRICS})
        own["ttft_mean_s"][settings["seed"]] = summary["ttft_s"]["mean"]
        own["e2e_mean_s"][settings["seed"]] = summary["e2e_s"]["mean"]
    return found


def test_the_map_names_the_winner_that_the_runs_name(atlas: Path) -> None:
    rows = rows_of(atlas / "map.csv")
    assert {row["policy"] for row in rows} == {BASELINE, *POLICIES}
    runs = by_hand(atlas)
    assert len(runs) == 8
    assert all(len(one) == SEEDS for own in runs.values() for one in own.values())
    stated = json.loads((atlas / "atlas.json").read_text())["workloads"][0]["winners"]
    for load in ("2", "2.8"):
        for metric in METRICS:
            means = {
                name: sum(runs[load, name][metric].values()) / SEEDS for name in ("fcfs", "sjf", "priority", "srpt")
            }
            best = min(means, key=means.__getitem__)
            assert best in ("sjf", "srpt"), "shortest first is best where requests wait"
            (said,) = (one["policies"] for one in stated if (one["load"], one["metric"]) == (load, metric))
            assert said == [{"srpt": "srpt+preemptive"}.get(best, best)]
            marked = {
                row["policy"]
                for row in rows
                if (row["load"], row["metric"]) == (load, metric) and row["mark"] in "*↓↑" and row["mark"]
            }
            assert marked == set(said)


def test_p_values_are_those_of_paired_tests_over_all_pairs_of_a_load(atlas: Path) -> None:
    from scipy import stats

    runs = by_hand(atlas)
    names = {"fcfs": BASELINE, "sjf": "sjf", "priority": "priority", "srpt": "srpt+preemptive"}
    plain = {}
    for metric in METRICS:
        for one, other in combinations(names, 2):
            first, second = ([runs["2.8", name][metric][seed] for seed in range(SEEDS)] for name in (one, other))
            if first != second:  # without any priority, `priority` is `fcfs`
                plain[metric, one, other] = float(stats.ttest_rel(first, second).pvalue)
            else:
                plain[metric, one, other] = 1.0
    order = sorted(plain, key=plain.__getitem__)
    adjusted, largest = {}, 0.0
    for rank, key in enumerate(order):
        adjusted[key] = largest = max(largest, min(1.0, (len(order) - rank) * plain[key]))
    rows = {(row["metric"], row["policy"]): row for row in rows_of(atlas / "map.csv") if row["load"] == "2.8"}
    for metric in METRICS:
        for name in ("sjf", "srpt"):
            row = rows[metric, names[name]]
            assert float(row["p_value"]) == pytest.approx(plain[metric, "fcfs", name])
            assert float(row["p_adjusted"]) == pytest.approx(adjusted[metric, "fcfs", name])
            assert row["verdict"] == ("better" if adjusted[metric, "fcfs", name] < 0.05 else "no")


def test_the_page_stands_alone_and_has_a_card_for_each_policy(atlas: Path) -> None:
    page = (atlas / "atlas.html").read_text()
    for loaded in ("<script", "<link", "src=", "url(http", "@import"):
        assert loaded not in page
    for policy in (BASELINE, *POLICIES):
        assert f"<h3>{policy}</h3>" in page
    assert "Requests of very different lengths wait for one replica." in page
    for words in ("Statement", "Parameters", "lowest TTFT mean", "Use it", "Not "):
        assert words in page
    assert page.count("<svg") == 1 + 2 + 3 + 2 * len(POLICIES)
    for name in ("map", "latency_by_load", "fairness_by_throughput", "cost", "effect-sjf", "effect-srpt-preemptive"):
        for form in ("svg", "csv"):
            assert (atlas / "figures" / f"{name}.{form}").stat().st_size > 0
    assert {row["policy"] for row in rows_of(atlas / "differences.csv")} == set(POLICIES)
    assert len(rows_of(atlas / "values.csv")) == 2 * (1 + len(POLICIES))


def test_its_runs_are_runs_like_any_other(atlas: Path, vajra: Callable[..., Any]) -> None:
    said = vajra("compare", atlas / "queue", "--format", "csv", "--scope", "overall", "--metrics", ",".join(METRICS))
    assert said.code == 0
    assert len(said.out.splitlines()) == 1 + 8


def asked(registry: Registry, file: Path, out: Path, *policies: str, replications: int = 2) -> Request:
    base, entries = entries_of(policies, (), DEFAULT_BASELINE, registry)
    return Request(base, entries, [str(file)], replications, METRICS, (), out)


def test_an_interrupted_atlas_goes_on_where_it_stopped(queue: Path, tmp_path: Path) -> None:
    registry, made, kept = load_registry(), [], []
    request = asked(registry, queue, tmp_path / "out", "sjf")
    plans = plans_of(request, registry)

    def interrupt(index: int, status: PointStatus) -> None:
        if status.is_finished:
            made.append(status.label)
        if len(made) == 3:
            raise RunInterrupted("stopped.")

    def count(index: int, status: PointStatus) -> None:
        if status.is_finished:
            (kept if status.was_there else made).append(status.label)

    with pytest.raises(RunInterrupted):
        run_atlas(request, plans, registry, Execution(workers=1, progress=interrupt))
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("environment.json")}
    first = list(made)
    result = run_atlas(request, plans, registry, Execution(workers=1, progress=count))
    assert kept == first
    assert len(set(made)) == len(made) == 8
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert result.num_runs == 8
    assert not result.failures

    made.clear()
    more = asked(registry, queue, tmp_path / "out", "sjf", "priority")
    run_atlas(more, plans_of(more, registry), registry, Execution(workers=1, progress=count))
    assert len(made) == 4, "a further policy adds its runs alone"
    assert all("priority" in label for label in made)


class LongestFirst:
    """Key = -prompt: the longest prompt first, as nobody would."""

    key_motion = KeyMotion.STATIC

    def key(self, request: RequestView, now: float) -> float:
        return -float(request.num_prompt_tokens)


def _longest(config: PolicyConfig, context: PolicyContext) -> LongestFirst:
    return LongestFirst()


LONGEST = PolicySpec(
    "longest_first", Layer.REQUEST_PRIORITIZER, PolicyConfig, _longest, "Longest prompt first.", "nobody"
)


def test_a_policy_of_ones_own_joins_by_name(queue: Path, tmp_path: Path) -> None:
    registry = load_registry().with_policies([LONGEST])
    request = asked(registry, queue, tmp_path / "out", "longest_first", "sjf")
    result = run_atlas(request, plans_of(request, registry), registry, Execution(workers=1))
    rows = {(row["load"], row["policy"]): row for row in map_records(result.workloads) if row["metric"] == "e2e_mean_s"}
    assert rows["2.8", "longest_first"]["value"] > rows["2.8", "sjf"]["value"]
    cards = {card.name: card for card in cards_of(request.rows, registry)}
    (part,) = cards["longest_first"].parts
    assert (part.place, part.summary, part.source) == ("request prioritizer", "Longest prompt first.", "nobody")
    assert part.statement == "Key = -prompt: the longest prompt first, as nobody would."


def test_a_row_takes_the_place_of_the_policies_of_replicasets(queue: Path, tmp_path: Path) -> None:
    replicasets = """
replicasets:
  short: {select: {max_prompt_tokens: 50}, scheduling: {preset: vllm-v1}}
  long: {scheduling: {preset: sarathi}}
"""
    queue.write_text(WORKLOAD + replicasets)
    registry = load_registry()
    (plan,) = plans_of(asked(registry, queue, tmp_path / "out", "sjf", replications=1), registry)
    found = [
        {name: one.scheduling.request_prioritizer.policy for name, one in config.effective_replicasets.items()}
        for _, config in expand_sweep(plan.config, registry)
    ]
    assert found == [dict.fromkeys(("short", "long"), policy) for policy in ("fcfs", "sjf") for _ in range(2)]


def test_a_preset_is_a_row(queue: Path, tmp_path: Path, vajra: Callable[..., Any]) -> None:
    said = vajra("atlas", "--preset", "vllm-v1", *arguments(queue, tmp_path / "out", "-q", replications=1))
    assert said.code == 0, said.err
    rows = rows_of(tmp_path / "out" / "map.csv")
    assert {row["policy"] for row in rows} == {BASELINE, "vllm-v1"}
    assert {row["verdict"] for row in rows if row["policy"] == "vllm-v1"} == {"not tested: fewer than two replications"}
    assert "One seed tests nothing" in (tmp_path / "out" / "atlas.html").read_text()


def test_a_preset_is_named_as_policies_are_unless_one_has_its_name() -> None:
    registry = load_registry()
    _, (whole, admission) = entries_of(["distserve", "mooncake"], [], DEFAULT_BASELINE, registry)
    assert whole.settings == {"preset": "distserve"}
    assert admission.settings["scheduling.admission"] == "mooncake"
    (part,) = cards_of([whole], registry)[0].parts
    assert part.place == "preset"
    assert "pools.prefill.num_replicas" in repr(part.parameters)


REFUSED: Mapping[str, tuple[tuple[str, ...], str]] = {
    "a name that nobody has": (("srptt",), "no installed package offers that name ('srptt'). Did you mean 'srpt'"),
    "a preset with a policy": (
        ("vllm-v1+srpt",),
        "'vllm-v1': is a preset, and takes all places. A preset is a row of its own.",
    ),
    "an unknown preset": (("--preset", "vllm"), "preset: no installed package offers that name ('vllm')"),
    "two of one layer": (("sjf+fcfs",), "sjf and fcfs are both request prioritizers. One policy for each place."),
    "the baseline again": (("fcfs",), "policy 'fcfs': repeats the baseline."),
    "one twice": (("sjf", "sjf"), "policy 'sjf': repeats 'sjf'."),
    "one under two names": (("sjf", "shortest_job_first"), "policy 'shortest_job_first': repeats 'sjf'."),
    "a scaler": (("target_utilization",), "is a scaler, but all systems of an atlas have the same replicas."),
    "an unknown workload": (
        ("sjf", "--workload", "chat"),
        "neither a workload nor a file ('chat'). Did you mean 'chats'",
    ),
    "an unknown metric": (("sjf", "--metrics", "ttft_meann"), "no metric has that name ('ttft_meann')"),
    "policies that do not fit": (("space_sharing",), "policy 'space_sharing' on queue: "),
    "an override of nothing": (("sjf", "--set", "workload.nothing=1"), "--set workload.nothing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compared_is_refused_before_any_run(
    case: str, queue: Path, tmp_path: Path, vajra: Callable[..., Any]
) -> None:
    given, message = REFUSED[case]
    said = vajra("atlas", *given, *arguments(queue, tmp_path / "out"))
    assert said.code == (1 if "metric" in case else 2)
    assert message in said.err
    assert "Traceback" not in said.err
    assert not (tmp_path / "out").exists()


def test_a_workload_that_sweeps_policies_is_refused(queue: Path, tmp_path: Path, vajra: Callable[..., Any]) -> None:
    queue.write_text(WORKLOAD.replace("workload.arrivals.rate: [2, 2.8]", "num_replicas: [1, 2]"))
    said = vajra("atlas", "sjf", *arguments(queue, tmp_path / "out"))
    assert said.code == 2
    assert "sets 'num_replicas': the sweep of an atlas's workload gives its loads. Paths below `workload`." in said.err


def test_the_default_policies_fit_the_default_workloads() -> None:
    registry = load_registry()
    base, entries = entries_of(DEFAULT_POLICIES, (), DEFAULT_BASELINE, registry)
    plans = plans_of(Request(base, entries, replications=1), registry)
    assert [plan.name for plan in plans] == list(WORKLOADS)
    assert {len(plan.places) for plan in plans} == {(1 + len(DEFAULT_POLICIES)) * 3}
    assert all(part.statement and part.advice for card in cards_of(entries, registry) for part in card.parts)


def test_loads_ascend_whatever_their_order_in_the_file(queue: Path, tmp_path: Path) -> None:
    queue.write_text(WORKLOAD.replace("[2, 2.8]", "[2.8, 2]").replace("num_requests: 60", "num_requests: 20"))
    registry = load_registry()
    baseline, others = entries_of(["sjf"], [], DEFAULT_BASELINE, registry)
    asked = Request(baseline, others, [str(queue)], replications=1, out=tmp_path / "out")
    (found,) = run_atlas(asked, plans_of(asked, registry), registry, Execution(workers=1)).workloads
    assert list(found.loads) == ["2", "2.8"]
