"""`vajra capacity` from a file to an answer."""

from __future__ import annotations

import csv
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from vajra_py.cli.main import vajra
from vajra_py.config import ExperimentConfig, config_from_mapping, load_config
from vajra_py.config.slo import parse_slo
from vajra_py.errors import ConfigError, RunError
from vajra_py.experiment.capacity.study import find_capacity, metric_value
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.metrics.summary.summary import Summary

FILE = """
version: 1
name: cap
seed: 3
scheduling: {{request_prioritizer: fcfs, replicaset_scheduler: round_robin, replica_scheduler: fixed_chunk}}
replica: {{max_batch_size: 8, memory: {{num_blocks: 4000}}}}
workload:
  type: synthetic
  arrivals: {{type: poisson, rate: 4}}
  num_requests: 150
  prompt_tokens: {{type: constant, value: 100}}
  output_tokens: {{type: constant, value: 4}}
  slo_classes: [{{name: chat, ttft_slo_s: 0.5}}]
backend: {{simulator: {{latency: {{type: constant, step_time_s: 0.02}}}}}}
output: {{dir: {folder}, decision_log: false}}
capacity:
  slo: {slo}
  replications: 3
  max_replications: 3
  curve: [0.5]
{more}
"""


def write(folder: Path, slo: str = "mean(e2e) <= 0.2", more: str = "") -> Path:
    path = folder / "cap.yaml"
    path.write_text(FILE.format(folder=folder / "runs", slo=slo, more=more))
    return path


def answer(folder: Path, *overrides: str, slo: str = "mean(e2e) <= 0.2", more: str = "") -> tuple[int, str]:
    arguments = [part for one in overrides for part in ("--set", one)]
    result = CliRunner().invoke(
        vajra, ["capacity", str(write(folder, slo, more)), "--workers", "1", *arguments], standalone_mode=False
    )
    if result.exception is not None:
        raise result.exception
    return result.return_value, result.output


def test_the_answer_comes_last_with_its_interval_and_a_second_search_runs_nothing(tmp_path: Path) -> None:
    seeds = ["capacity.replications=5", "capacity.max_replications=5"]
    code, output = answer(tmp_path, *seeds)
    assert code == 0
    assert "requests/s (95 % interval " in output.splitlines()[-1]
    assert "the 2 % of precision_fraction" in output.splitlines()[-1]
    folder = tmp_path / "runs" / "cap"
    first = json.loads((folder / "capacity.json").read_text())["answers"][0]
    low, high = first["interval"]
    assert first["outcome"] == "found"
    assert low <= first["setting"][0] <= high
    assert (folder / "capacity.csv").exists()
    assert "<svg" in (folder / "capacity.svg").read_text()
    again = find_capacity(load_config(tmp_path / "cap.yaml", seeds), workers=1)
    assert (again[0].num_new, again[0].num_runs) == (0, first["num_runs"])
    assert json.loads((folder / "capacity.json").read_text())["answers"][0]["interval"] == [low, high]


def test_a_grid_of_policies_gets_an_answer_each(tmp_path: Path) -> None:
    more = "sweep: {replica.max_batch_size: [2, 8]}"
    code, output = answer(tmp_path, more=more)
    assert code == 0
    assert "Highest, told apart from all others: 8" in output.splitlines()
    (pair,) = json.loads((tmp_path / "runs" / "cap" / "capacity.json").read_text())["differences"]
    assert (pair["first"], pair["second"], pair["is_paired"], pair["num_seeds"]) == ("8", "2", True, 3)
    assert pair["interval"][0] < pair["fraction"] < pair["interval"][1]
    assert pair["p_value"] == pair["corrected_p"] < 0.05
    small, large = (float(line.split()[1]) for line in output.splitlines()[-2:])
    assert [line.partition(":")[0] for line in output.splitlines()[-2:]] == ["2", "8"]  # the best one last
    assert large > 1.5 * small


def test_answers_are_printed_in_every_form_of_a_table(tmp_path: Path) -> None:
    file = str(write(tmp_path, more="sweep: {replica.max_batch_size: [2, 8]}"))

    def printed(form: str) -> str:
        arguments = ["capacity", file, "--workers", "1", "--quiet", "--format", form, "--figure-format", "png"]
        result = CliRunner().invoke(vajra, arguments, standalone_mode=False)
        assert (result.exception, result.return_value) == (None, 0)
        return result.stdout

    folder = tmp_path / "runs" / "cap"
    rows = list(csv.DictReader(printed("csv").splitlines()))
    values = json.loads(printed("json"))
    assert values == json.loads((folder / "capacity.json").read_text())
    assert [(row["setting"], float(row["rate"])) for row in rows] == [
        (one["label"], one["setting"][0]) for one in values["answers"]
    ]
    assert (folder / "capacity.png").exists()
    assert not (folder / "capacity.svg").exists()
    for text in (printed("markdown"), printed("latex")):
        assert text.count("8 ") >= 2  # in the table of answers, and in that of differences
        assert "requests/s" in text
        assert "takes more than" in text.replace("\\\\", " ")


def test_an_slo_of_two_conditions_is_as_high_as_the_lower_of_both(tmp_path: Path) -> None:
    found = {}
    for slo in ("mean(e2e) <= 0.2", "attainment >= 0.9", "mean(e2e) <= 0.2 and attainment >= 0.9"):
        config = load_config(write(tmp_path, slo), ["capacity.curve=[]"])
        (one,) = find_capacity(config, workers=1)
        assert one.answer is not None
        found[slo] = one.answer
    first, second, both = found.values()
    assert both.setting[0] == pytest.approx(min(first.setting[0], second.setting[0]), rel=0.015)
    assert both.deciding is not None
    assert both.deciding.text == min(found, key=lambda slo: found[slo].setting[0] if " and " not in slo else math.inf)


@pytest.mark.long
def test_the_search_finds_what_a_grid_of_rates_finds(tmp_path: Path) -> None:
    """Of the mean latency of a replica under 6 seeds, at rates 2 % apart around the answer."""
    config = load_config(
        write(tmp_path), ["capacity.replications=6", "capacity.max_replications=6", "capacity.curve=[]"]
    )
    (found,) = find_capacity(config, workers=1)
    assert found.by_seed is not None
    rates = [found.answer.setting[0] * 1.02**k for k in range(-17, 18)] if found.answer is not None else []
    capacities = []
    for seed in range(3, 9):
        held = [rate for rate in rates if e2e_s(config, rate, seed) <= 0.2]
        capacities.append(held[-1] * 1.01)
    assert found.answer is not None
    assert found.answer.setting[0] == pytest.approx(statistics.geometric_mean(capacities), rel=0.01)
    assert list(found.by_seed.values()) == pytest.approx(capacities, rel=0.03)


def e2e_s(config: ExperimentConfig, rate: float, seed: int) -> float:
    """The mean latency of one run."""
    one = config.model_copy(update={"capacity": None, "name": f"grid-{rate}-{seed}"})
    mapping = one.model_dump(mode="json", by_alias=True, exclude_none=True)
    run = run_experiment(config_from_mapping(mapping, [f"workload.rate={rate}", f"seed={seed}"]))
    return float(run.summary.value("overall.e2e_s.mean"))


def test_the_fewest_replicas(tmp_path: Path) -> None:
    more = "  replicas: {num_replicas: {max: 8}}"
    text = FILE.format(folder=tmp_path / "runs", slo="mean(e2e) <= 0.12", more="").rstrip()
    (tmp_path / "cap.yaml").write_text(text + "\n" + more + "\n")
    config = load_config(tmp_path / "cap.yaml", ["workload.arrivals.rate=150"])
    (found,) = find_capacity(config, workers=1)
    assert found.error is None
    assert found.answer is not None
    assert found.answer.outcome == "found"
    best = int(found.answer.setting[0])
    assert found.unit == "replicas"
    slacks = {point.setting[0]: sum(point.slack) for point in found.curve}
    assert slacks[best] >= 0
    assert slacks.get(best - 1, -1) < 0


MIX = """
version: 1
name: mix
scheduling: {{request_prioritizer: fcfs, replicaset_scheduler: least_loaded, replica_scheduler: fixed_chunk}}
replicasets:
  short: {{select: {{max_prompt_tokens: 1400}}}}
  rest: {{}}
workload:
  type: synthetic
  arrivals: {{type: poisson, rate: 60}}
  num_requests: 200
  prompt_tokens: {{type: uniform, min: 50, max: 2000}}
  output_tokens: {{type: constant, value: 10}}
backend:
  simulator:
    latency: {{type: roofline, model: llama-3.1-8b, device: h100-sxm}}
    replicasets:
      short: {{latency: {{type: roofline, model: llama-3.1-8b, device: l40s}}}}
output: {{dir: {folder}, decision_log: false}}
costs: {{devices: {{h100-sxm: {{price_per_hour: {price}}}}}}}
capacity:
  slo: p99(ttft) <= 0.6
  replications: 2
  max_replications: 2
  replicas: {{replicasets.short.num_replicas: {{min: 0, max: 3}}, replicasets.rest.num_replicas: {{max: 4}}}}
"""


@pytest.mark.parametrize(("price", "uses_both"), [(0.5, False), (9.0, True)])
def test_the_cheapest_mix_of_devices_follows_their_prices(tmp_path: Path, price: float, uses_both: bool) -> None:
    (tmp_path / "mix.yaml").write_text(MIX.format(folder=tmp_path / "runs", price=price))
    config = load_config(tmp_path / "mix.yaml")
    (found,) = find_capacity(config, workers=1)
    assert found.error is None
    assert found.answer is not None
    assert found.unit == "$ an hour"
    assert found.costs == (0.79, price)
    short, rest = found.answer.setting
    assert (short > 0) == uses_both  # an H100 for less than an L40S takes all requests
    assert rest >= 1
    held = {point.setting: sum(point.slack) >= 0 for point in found.curve}
    assert held[found.answer.setting]
    assert not any(holds and found.cost(one) < found.cost(found.answer.setting) for one, holds in held.items())
    line = found.sentence
    assert "$ an hour" in line
    assert ("short" in line) == uses_both


def test_the_prices_of_pools_are_those_of_their_devices(tmp_path: Path) -> None:
    fast, cheap = (f"{{type: roofline, model: llama-3-8b, device: {device}}}" for device in ("h100-sxm", "l40s"))
    overrides = [
        *("pools={prefill: {}, decode: {}}", "links={bandwidth_gb_s: 50}", f"backend.simulator.latency={fast}"),
        f"backend.simulator.replicasets={{default: {{pools: {{decode: {{latency: {cheap}}}}}}}}}",
        "capacity.replicas={pools.prefill.num_replicas: {max: 1}, pools.decode.num_replicas: {max: 1}}",
    ]
    (found,) = find_capacity(load_config(write(tmp_path, "mean(e2e) <= 9"), overrides), workers=1)
    assert (found.error, found.costs, found.unit) == (None, (2.69, 0.79), "$ an hour")


def test_nulls_of_the_file_apply_to_the_runs_of_a_search(tmp_path: Path) -> None:
    config = load_config(write(tmp_path), ["policy_timeout_s=null", "capacity.rate={min: 4, max: 4.1}"])
    find_capacity(config, workers=1)
    manifests = [json.loads(file.read_text()) for file in (tmp_path / "runs").rglob("manifest.json")]
    assert {one["config"]["policy_timeout_s"] for one in manifests} == {None}


def test_a_group_whose_name_has_two_meanings_is_refused() -> None:
    def group(ttft_s: float) -> dict[str, Any]:
        return {"counts": {"completed": 9}, "ttft_s": {"p99": ttft_s}}

    metric = parse_slo("p99(ttft, chat) <= 1").conditions[0].metric
    same = Summary({"by_slo_class": {"chat": group(2.0)}, "by_replicaset": {"chat": group(2.0)}})
    assert metric_value(same, metric) == 2.0
    with pytest.raises(RunError, match=r"p99\(ttft, chat\): is the name of several, with different values \(chat\)"):
        metric_value(Summary({"by_slo_class": {"chat": group(9.0)}, "by_tenant": {"chat": group(0.1)}}), metric)


def test_an_slo_that_never_or_always_holds_is_said_in_a_line(tmp_path: Path) -> None:
    _, never = answer(tmp_path, slo="mean(e2e) <= 0.01")
    assert never.splitlines()[-1].startswith("cap: the SLO never holds")
    _, always = answer(tmp_path, "capacity.rate.max=8", slo="mean(e2e) <= 100")
    assert always.splitlines()[-1].startswith("cap: the SLO always holds")


def test_an_attainment_of_requests_without_an_slo_is_said(tmp_path: Path) -> None:
    code, output = answer(tmp_path, slo="tpot_attainment >= 0.9")
    assert code == 1
    assert "no request of the run has a value" in output.splitlines()[-1]
    code, output = answer(tmp_path, slo="p99(ttft, chatt) <= 1")
    assert code == 1
    assert "no SLO class, tenant or replicaset has that name (chatt). Did you mean 'chat'?" in output.splitlines()[-1]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("capacity.slo=p99(tfft) <= 1", "Did you mean 'ttft'?"),
        ("capacity=null", "capacity: is missing"),
        ("replications=3", "cannot be combined with `capacity`"),
        ("sweep={workload.rate: [1, 2]}", "is what the search varies"),
        ("capacity.rate.path=workload.rat", "workload.rat"),
        ("capacity.replicas={num_replicas: {max: 4}}", "two different searches"),
        ("capacity.replicas={num_replicas: {max: 4, cost: 1}, other.num_replicas: {max: 4}}", "cost is given for some"),
        ("capacity.replicas={num_replicas: {min: 0, max: 4}}", "min: 0 applies only to one of several replicasets"),
        ("capacity.replicas={replicasets.a.pools.p.num_replicas: {min: 0, max: 4}}", "(got replicasets.a.pools.p.num"),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused_before_anything_runs(
    tmp_path: Path, override: str, said: str
) -> None:
    overrides = [override, "capacity.rate.min=1"] if said == "two different searches" else [override]
    with pytest.raises(ConfigError) as error:
        find_capacity(load_config(write(tmp_path), overrides), workers=1)
    assert said in str(error.value)
    assert not (tmp_path / "runs").exists()
