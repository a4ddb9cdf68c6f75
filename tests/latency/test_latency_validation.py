"""A measured run is simulated with its own settings, compared request by request, and refused where its files cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tests.latency.conftest import head_us
from tests.latency.measured import ENGINE, MIXTURE, NUM_REQUESTS, as_measured, as_mixture, write_run
from vajra_py.cli.validate import validate
from vajra_py.errors import ConfigError
from vajra_py.experiment.measured.accuracy import compare_with_measured, requests_of
from vajra_py.experiment.measured.calibration import calibrate, figures_of
from vajra_py.experiment.measured.calibration_steps import StepCosts
from vajra_py.experiment.measured.files import read_measured
from vajra_py.experiment.measured.report import write_accuracy_report
from vajra_py.experiment.measured.run import read_measured_run
from vajra_py.experiment.measured.simulation import (
    bundle_latency,
    measured_config,
    simulate_measured,
    simulation_of,
)
from vajra_py.latency import Calibration


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "measured")


def test_a_run_is_read_on_one_clock(run_folder: Path) -> None:
    run = read_measured_run(run_folder)
    assert run.requests.arrived_at[:2] == pytest.approx([0.0, 0.1])
    assert run.requests.ttft_s == pytest.approx(np.full(NUM_REQUESTS, 0.2))
    assert run.requests.tpot_s == pytest.approx(np.full(NUM_REQUESTS, 0.01))
    assert run.workload[2].prompt_token_ids is not None
    assert run.workload[2].max_tokens == run.workload[2].num_output_tokens
    assert run.settings.asynchronous  # vLLM 0.19's default
    contexts = run.requests.num_prompt_tokens + run.requests.num_output_tokens / 2
    assert 0.1 < run.context_variation < 2 * contexts.std() / contexts.mean()


def test_tokens_take_no_time_to_a_client_where_the_engine_noted_when_they_came(run_folder: Path, bundle: Path) -> None:
    run = read_measured_run(run_folder)
    assert measured_config(bundle_latency(run, bundle)).build().host.first_token_s == 0.0
    lines = [json.loads(line) for line in (run_folder / "requests.jsonl").read_text().splitlines()]
    kept = [{name: value for name, value in row.items() if name != "scheduled_ts"} for row in lines]
    (run_folder / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    assert measured_config(bundle_latency(read_measured_run(run_folder), bundle)).build().host.first_token_s > 0.0


def test_settings_come_from_the_arguments_and_from_what_the_engine_made_of_them(tmp_path: Path) -> None:
    resolved = {
        "scheduler_config": {"async_scheduling": False},
        "compilation_config": {"max_cudagraph_capture_size": 64},
    }
    kv_cache = {"num_gpu_blocks": 2588, "block_size": 32, "enable_prefix_caching": False}
    run = read_measured_run(write_run(tmp_path / "run", resolved_config=resolved, kv_cache=kv_cache))
    settings = run.settings
    assert (settings.num_blocks, settings.block_size, settings.prefix_caching) == (2588, 32, False)
    assert (settings.asynchronous, settings.capture_limit, settings.max_num_seqs) == (False, 64, 8)
    replica = simulation_of(run, {"type": "constant"}, tmp_path / "w").replica
    assert replica.memory.num_blocks == 2587  # one block of vLLM's is the null block
    assert (replica.max_batch_size, replica.max_batch_tokens, replica.max_model_len) == (8, 512, 4096)


def test_what_the_simulator_did_itself_is_validated_without_an_error(
    run_folder: Path, bundle: Path, tmp_path: Path
) -> None:
    run = read_measured_run(run_folder)
    latency = bundle_latency(run, bundle)
    assert latency["capture_limit"] == 16
    simulated = simulate_measured(run, latency, tmp_path / "first")
    assert simulated.summary.value("step_times.kind") == "measured"
    cached = simulated.requests("num_cached_tokens").column(0).to_numpy()
    assert cached[1::2].sum() > 0  # the second of two equal prompts finds blocks of the first
    as_measured(run_folder, simulated)
    accuracy = compare_with_measured(read_measured_run(run_folder), simulated)
    assert accuracy.passes
    assert [one.relative for one in accuracy.errors] == pytest.approx([0.0] * len(accuracy.errors), abs=1e-6)
    assert all(one.relative < 0.02 for one in accuracy.series)


def test_the_command_fails_when_a_mean_is_off_by_more_than_its_bound(
    run_folder: Path, bundle: Path, tmp_path: Path
) -> None:
    run = read_measured_run(run_folder)
    simulated = simulate_measured(run, bundle_latency(run, bundle), tmp_path / "first")
    as_measured(run_folder, simulated)
    given = [str(run_folder), "--profile", str(bundle), "-o", str(tmp_path / "again")]
    report = tmp_path / "report.html"
    fine = CliRunner().invoke(validate, [*given, "--report", str(report)], standalone_mode=False)
    assert (fine.return_value, fine.exception) == (0, None)
    assert "tpot_mean_ms" in fine.output
    assert "step times: measured: operators measured on NVIDIA RTX PRO 6000" in fine.output
    page = report.read_text()
    assert page.count("<svg") == 3
    assert "http" not in page.replace("http://www.w3.org", "")
    as_measured(run_folder, simulated, slower=1.25)
    slow = CliRunner().invoke(validate, given, standalone_mode=False)
    assert slow.return_value == 1
    assert "beyond 8%" in slow.output
    beside = CliRunner().invoke(
        validate, [str(run_folder), str(tmp_path / "first" / "simulated")], standalone_mode=False
    )
    assert beside.return_value == 1


def test_a_report_has_the_errors_and_where_step_times_come_from(run_folder: Path, bundle: Path, tmp_path: Path) -> None:
    run = read_measured_run(run_folder)
    simulated = simulate_measured(run, bundle_latency(run, bundle), tmp_path / "sim")
    accuracy = compare_with_measured(run, simulated)
    write_accuracy_report(accuracy, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert all(one.name in page for one in accuracy.errors)
    assert "never compared with a run of this engine" in page


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("requests.jsonl", '"output_toks": ', '"output_toks": -', r"requests.jsonl:1: output_toks is not a count from 1"),
        ("requests.jsonl", '"first_token_ts": 500.2', '"first_token_ts": 400.2', r"requests.jsonl:1: its times do not ascend"),
        ("requests.jsonl", '"last_token_ts": 50', '"last_token_ts": 5000', r"requests.jsonl:1: .* tokens took .* more than 10 s each"),
        ("requests.jsonl", '"first_token_ts"', '"first_token"', r"requests.jsonl:1: first_token_ts is not a number \(None\). Found: request_id"),
        ("requests.jsonl", '"first_token_ts": 500.2', '"first_token_ts": 5' + 400 * "0", r"requests.jsonl:1: first_token_ts is not a number"),
        ("requests.jsonl", '"input_toks": ', '"input_toks": 1', r"workload.jsonl.gz:1: has .* were measured"),
        ("meta.json", '"engine_kwargs"', '"kwargs"', r"meta.json: has no engine_kwargs"),
        ("requests.jsonl", '"scheduled_ts": ', '"scheduled_ts": "soon", "then": ', r"requests.jsonl:1: scheduled_ts is not a number"),
        ("meta.json", "{", '{"resolved_config": [1], ', r"meta.json resolved_config: is not a mapping"),
        ("meta.json", '"max_num_seqs": 8', '"max_num_seqs": 0', r"meta.json max_num_seqs: is not a count \(0\)"),
        ("meta.json", "{", "{{", r"meta.json:1: is not JSON"),
    ],
)  # fmt: skip
def test_broken_runs_are_refused_with_file_and_line(
    run_folder: Path, edit: Callable[[Path, str, str], None], file: str, old: str, new: str, said: str
) -> None:
    edit(run_folder / file, old, new)
    with pytest.raises(ConfigError, match=said):
        read_measured_run(run_folder)


def test_a_bundle_of_another_model_and_a_folder_without_files_are_refused(
    run_folder: Path, bundle: Path, edit: Callable[[Path, str, str], None]
) -> None:
    run = read_measured_run(run_folder)
    edit(bundle / "meta.yaml", "Llama-3.1-8B", "Llama-3-8B")
    with pytest.raises(ConfigError, match=r"is of meta-llama/Llama-3-8B, and the run of meta-llama/Llama-3.1-8B"):
        bundle_latency(run, bundle)
    (run_folder / "requests.jsonl").unlink()
    with pytest.raises(
        ConfigError, match=r"is not a measured run: it needs meta.json, requests.jsonl.* Found: meta.json"
    ):
        read_measured_run(run_folder)


def test_data_parallel_ranks_with_shared_experts_are_one_replica_of_all_of_them(tmp_path: Path) -> None:
    kwargs = {**ENGINE, "data_parallel_size": 2, "enable_expert_parallel": True}
    run = read_measured_run(write_run(tmp_path / "run", engine_kwargs=kwargs, kv_cache={"num_gpu_blocks": 101}))
    together = simulation_of(run, {"type": "profile_bundle", "path": "p", "data_parallel": 2}, tmp_path / "w")
    assert (together.num_replicas, together.replica.max_batch_size, together.replica.max_batch_tokens) == (1, 16, 1024)
    assert together.replica.memory.num_blocks == 200
    apart = simulation_of(run, {"type": "constant"}, tmp_path / "w")
    assert (apart.num_replicas, apart.replica.max_batch_size, apart.replica.memory.num_blocks) == (2, 8, 100)


def test_a_run_whose_memory_is_full_is_simulated_with_its_blocks_and_preempts(bundle: Path, tmp_path: Path) -> None:
    """40 blocks of 16 tokens hold one to three of these requests, which come faster than they leave."""
    folder = write_run(tmp_path / "measured", kv_cache={"num_gpu_blocks": 41, "block_size": 16})
    run = read_measured_run(folder)
    latency = bundle_latency(run, bundle)
    simulated = simulate_measured(run, latency, tmp_path / "first")
    table = simulated.requests("num_preemptions", "ended_at").to_pandas()
    assert table.num_preemptions.sum() > 0
    assert table.ended_at.notna().all()
    used = simulated.steps("used_fraction").column(0).to_numpy()
    assert used.max() == 1.0
    as_measured(folder, simulated)
    assert compare_with_measured(read_measured_run(folder), simulated).passes
    roomy = replace(run, settings=replace(run.settings, num_blocks=None))
    without = simulate_measured(roomy, latency, tmp_path / "roomy")
    errors = {one.name: one.relative for one in compare_with_measured(read_measured_run(folder), without).errors}
    assert errors["e2e_mean_ms"] < -0.2  # without the run's own number of blocks nothing waits for memory


def test_a_mixture_of_experts_on_data_parallel_ranks_is_validated_and_fitted(bundle: Path, tmp_path: Path) -> None:
    as_mixture(bundle)
    kwargs = {**ENGINE, "model": MIXTURE, "data_parallel_size": 2, "enable_expert_parallel": True}
    described = {"model": MIXTURE, "engine_kwargs": kwargs, "kv_cache": {"num_gpu_blocks": 400}}
    folder = write_run(tmp_path / "measured", count=44, **described)
    run = read_measured_run(folder)
    latency = bundle_latency(run, bundle, context_variation=0.0)
    assert (latency["data_parallel"], latency["expert_parallel"]) == (2, True)
    truth = {"experts": 1.2, "all_reduce": 1.0, "dense": 1.0}
    Calibration(MIXTURE, "RTXPRO6000", 1, {}, truth, "made up").write(tmp_path / "truth.json")
    as_measured(
        folder, simulate_measured(run, {**latency, "calibration": str(tmp_path / "truth.json")}, tmp_path / "t")
    )
    fit = calibrate(read_measured_run(folder), latency, fit_fraction=0.5)
    assert {"experts", "all_reduce"} <= set(fit.calibration.scales)
    assert abs(fit.before["tpot"]) > 0.02
    assert abs(fit.held_out["tpot"]) < 0.01


def test_gaps_between_tokens_and_the_engines_log_are_compared_where_they_are_known(
    run_folder: Path, bundle: Path, tmp_path: Path
) -> None:
    run = read_measured_run(run_folder)
    simulated = simulate_measured(run, bundle_latency(run, bundle, host_exposed_us=500.0), tmp_path / "sim")
    as_measured(run_folder, simulated)
    served = requests_of(simulated)
    assert served.scheduled_at is not None
    ends = np.arange(1.0, served.last_token_at.max() + 2)
    running = [int(((served.scheduled_at <= end) & (served.last_token_at > end)).sum()) for end in ends]
    spans = zip(served.first_token_at, served.last_token_at, served.num_output_tokens, strict=True)
    tokens_at = np.concatenate([np.linspace(first, last, count) for first, last, count in spans])
    rates, _ = np.histogram(tokens_at, np.concatenate([[0.0], ends]))
    columns = zip(ends, rates, running, strict=True)
    rows = [
        f"{end + 0.5},100,{rate},{count},0,12.5" for end, rate, count in columns
    ]  # a log that began half a second before
    header = "t,prompt_throughput,gen_throughput,running,waiting,kv_cache_pct"
    (run_folder / "timeseries.csv").write_text("\n".join([header, *rows, ""]))
    measured = read_measured_run(run_folder)
    gaps = np.repeat(served.tpot_s, served.num_output_tokens - 1)
    accuracy = compare_with_measured(replace(measured, requests=replace(measured.requests, tbt_s=gaps)), simulated)
    errors = {one.name: one.relative for one in accuracy.errors}
    assert errors["tbt_mean_ms"] == pytest.approx(0.0, abs=0.01)
    assert {"tbt_p50_ms", "tbt_p99_ms"} <= set(errors)
    series = {one.name: one for one in accuracy.series}
    assert series["running"].relative < 0.02
    assert series["gen_throughput"].measured.sum() == pytest.approx(served.num_output_tokens.sum(), rel=0.02)
    assert series["gen_throughput"].simulated.sum() == pytest.approx(served.num_output_tokens.sum(), rel=0.02)
    assert series["gen_throughput"].relative < 0.15
    assert series["kv_use_pct"].measured[0] == pytest.approx(12.5)
    assert 0 < series["kv_use_pct"].simulated.max() <= 100


# Calibration


def test_a_calibration_finds_what_the_tables_do_not_know(bundle: Path, tmp_path: Path) -> None:
    """The run was made with other figures than the tables': the fit on its first half tells the rest within 1 %."""
    folder = write_run(tmp_path / "measured", count=44)
    run = read_measured_run(folder)
    latency = bundle_latency(run, bundle, context_variation=0.0)
    truth = {"dense": 1.15, "decode_attention": 1.0, "mixed_attention": 1.0}
    Calibration(ENGINE["model"], "RTXPRO6000", 1, {"exposed_s": 0.002}, truth, "made up").write(tmp_path / "truth.json")
    slower = {**latency, "calibration": str(tmp_path / "truth.json")}
    as_measured(folder, simulate_measured(run, slower, tmp_path / "truth"))
    fit = calibrate(read_measured_run(folder), latency, fit_fraction=0.5)
    assert abs(fit.before["tpot"]) > 0.08
    assert max(abs(fit.held_out["tpot"]), abs(fit.held_out["e2e"])) < 0.01
    assert "tpot" in "\n".join(fit.lines())
    assert fit.num_simulations <= 5
    fit.calibration.write(tmp_path / "calibration.json")
    again = bundle_latency(run, bundle, tmp_path / "calibration.json", context_variation=0.0)
    simulated = simulate_measured(run, again, tmp_path / "again")
    assert simulated.summary.value("step_times.kind") == "calibrated"
    assert simulated.summary.value("step_times.sentence").startswith("calibrated: operators measured on")
    assert (
        "fitted on 22 of 44 requests of measured; error of means where it was checked: TTFT"
        in simulated.summary.value("step_times.sentence")
    )


def test_what_a_figure_adds_is_counted_over_the_steps_between_two_tokens(
    run_folder: Path, bundle: Path, tmp_path: Path
) -> None:
    run = read_measured_run(run_folder)
    latency = bundle_latency(run, bundle, context_variation=0.0)
    figures, data = figures_of(run, latency), simulate_measured(run, latency, tmp_path / "simulated")
    values, served = np.array([one.prior for one in figures]), requests_of(data)
    steps = StepCosts(data, measured_config(latency).build(), figures, values)
    some = np.array([0, 3, 20])
    parts, rest = steps.between(served.first_token_at, served.last_token_at, some)
    by_name = dict(zip((one.name for one in figures), parts.T, strict=True))
    # A request that is not preempted has one token a step, so the exposed time counts its steps.
    assert by_name["exposed_s"].tolist() == (served.num_output_tokens[some] - 1).tolist()
    # The mixed attention of a stretch is that of its steps with prompts alone, and all parts leave what is the head's.
    spent = (served.last_token_at - served.first_token_at)[some]
    assert parts @ values + rest == pytest.approx(spent)
    heads = (served.num_output_tokens[some] - 1) * 2 * head_us(8) * 1e-6
    assert (rest > 0).all()
    assert (rest < heads * 1.05 + 1e-3).all()
    last = served.num_output_tokens.argmax()
    alone = steps.between(served.last_token_at, served.last_token_at, np.array([last]))
    assert not alone[0].any()


def test_too_few_requests_are_not_fitted(run_folder: Path, bundle: Path) -> None:
    run = read_measured_run(run_folder)
    with pytest.raises(
        ConfigError, match=r"8 of 24 requests are fitted, which leaves 16 for validation. Allowed: at least 20"
    ):
        calibrate(run, bundle_latency(run, bundle))


# Files of load generators


def vllm_result() -> dict[str, Any]:
    """Three requests as vllm bench serve writes them with --save-detailed, one of them failed."""
    return {
        "model_id": "meta-llama/Llama-3.1-8B",
        "input_lens": [100, 200, 50],
        "output_lens": [3, 2, 1],
        "start_times": [10.0, 10.5, 11.0],
        "ttfts": [0.1, 0.2, 0.0],
        "itls": [[0.01, 0.02], [0.03], []],
        "errors": ["", "", "timeout"],
    }


def test_a_result_of_vllm_bench_serve_is_read(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps(vllm_result()))
    run = read_measured(file, {"max_num_seqs": 64})
    assert run.requests.arrived_at.tolist() == [0.0, 0.5]
    assert run.requests.ttft_s == pytest.approx([0.1, 0.2])
    assert run.requests.tpot_s == pytest.approx([0.015, 0.03])
    assert run.requests.tbt_s == pytest.approx([0.01, 0.02, 0.03])
    assert (run.settings.max_num_seqs, run.settings.model) == (64, "meta-llama/Llama-3.1-8B")
    assert [spec.num_output_tokens for spec in run.workload] == [3, 2]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"itls": None}, r"has no itls. Run vllm bench serve with --save-result --save-detailed"),
        ({"start_times": None, "request_rate": 5.0}, r"does not say when requests were sent"),
        ({"ttfts": [-1.0, 0.2, 0.0]}, r"request 0 ttfts: is not a number of 0 or more \(-1.0\)"),
        ({"ttfts": [10**400, 0.2, 0.0]}, r"request 0 ttfts: is not a number of 0 or more \(1000"),
        ({"ttfts": 5}, r"ttfts: is not a list"),
        ({"itls": [[0.01], None, []]}, r"request 1 itls: is not a list \(None\)"),
        ({"itls": [[0.01]]}, r"itls: is not one value for each request. As in ttfts: 3"),
        ({"input_lens": [10**300, 5, 5]}, r"request 0 input_lens: is not a count from 1 to"),
        ({"errors": ["x", "x", "x"]}, r"has no request that was served"),
        ({"model_id": None}, r"does not name the model. Give it: --engine model=NAME"),
    ],
)
def test_broken_results_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    contents = {name: value for name, value in {**vllm_result(), **changes}.items() if value is not None}
    (tmp_path / "result.json").write_text(json.dumps(contents))
    with pytest.raises(ConfigError, match=said):
        read_measured(tmp_path / "result.json")


def test_a_report_of_guidellm_is_read(tmp_path: Path) -> None:
    older = {
        "start_time": 5.0,
        "end_time": 5.9,
        "first_token_time": 5.2,
        "last_token_time": 5.8,
        "prompt_tokens": 64,
        "output_tokens": 4,
    }
    newer = {
        "request_start_time": 6.0,
        "request_end_time": 7.0,
        "time_to_first_token_ms": 250.0,
        "prompt_tokens": 32,
        "output_tokens": 6,
    }
    report = {"benchmarks": [{"requests": {"successful": [older, newer], "errored": []}}]}
    (tmp_path / "report.json").write_text(json.dumps(report))
    run = read_measured(tmp_path / "report.json", {"model": "Llama-3.1-8B"})
    assert run.requests.ttft_s == pytest.approx([0.2, 0.25])
    assert run.requests.e2e_s == pytest.approx([0.8, 1.0])
    (tmp_path / "report.json").write_text(json.dumps({"benchmarks": [report["benchmarks"][0]] * 2}))
    with pytest.raises(ConfigError, match="has 2 benchmarks, each with a different load"):
        read_measured(tmp_path / "report.json", {"model": "Llama-3.1-8B"})


def test_a_run_of_this_project_is_read_with_its_prompts(run_folder: Path, bundle: Path, tmp_path: Path) -> None:
    run = read_measured_run(run_folder)
    simulated = simulate_measured(run, bundle_latency(run, bundle), tmp_path / "sim")
    own = read_measured(simulated.path)
    assert own.requests.ttft_s == pytest.approx(requests_of(simulated).ttft_s)
    assert own.workload[0].prompt_token_ids == run.workload[0].prompt_token_ids
    assert (own.settings.max_num_seqs, own.settings.max_num_batched_tokens) == (8, 512)


def test_replicas_and_memory_of_a_run_of_this_project_are_simulated(bundle: Path, tmp_path: Path) -> None:
    run = read_measured_run(write_run(tmp_path / "run", kv_cache={"num_gpu_blocks": 201, "block_size": 16}))
    two = replace(run, settings=replace(run.settings, data_parallel=2))
    simulated = simulate_measured(two, bundle_latency(run, bundle), tmp_path / "sim")
    again = simulation_of(read_measured(simulated.path), bundle_latency(run, bundle), tmp_path / "w")
    assert (again.num_replicas, again.replica.memory.num_blocks) == (2, 200)


def test_what_is_said_about_the_engine_wins_and_unknown_words_are_refused(run_folder: Path, tmp_path: Path) -> None:
    assert read_measured(run_folder, {"max_num_seqs": 3}).settings.max_num_seqs == 3
    assert not read_measured(run_folder, {"async_scheduling": False}).settings.asynchronous
    with pytest.raises(ConfigError, match=r"--engine: is not known \('max_seqs'\). Did you mean 'max_num_seqs'"):
        read_measured(run_folder, {"max_seqs": 3})
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match="is of no known kind: it has neither ttfts nor benchmarks"):
        read_measured(tmp_path / "other.json")
