"""Do the examples work, and do they show what their texts say?"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from filecmp import cmpfiles
from pathlib import Path
from typing import Any

import pytest

import vajra_py as vajra
from vajra_py.cli.main import main
from vajra_py.config import ExperimentConfig, expand_sweep, load_config
from vajra_py.contract.observer import Observer, StepRecord, StepRun
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.plugins import Registry

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TRACE_HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def checked(path: Path, *arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(["check", str(path), *arguments])
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def trace(folder: Path, num_rows: int = 20) -> Path:
    path = folder / "trace.csv"
    rows = [f"2023-11-16 18:15:{second:02d}.25,{80 + 61 * second},{4 + 3 * second}\n" for second in range(num_rows)]
    path.write_text(TRACE_HEAD + "".join(rows))
    return path


def load_example(name: str, tmp_path: Path, **overrides: Any) -> ExperimentConfig:
    settings = {key.replace("__", "."): value for key, value in overrides.items()}
    return vajra.load(EXAMPLES / name, {"output.dir": str(tmp_path / "runs"), **settings})


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_right(path: Path, tmp_path: Path) -> None:
    needs_trace = "vajra run" in path.read_text() and "--set workload.path=" in path.read_text()
    arguments = ["--set", f"workload.path={trace(tmp_path)}"] if needs_trace else []
    assert checked(path, *arguments) == 0


def test_the_azure_example_says_what_it_needs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert checked(EXAMPLES / "azure.yaml") == 2
    assert "AzureLLMInferenceTrace_conv.csv: cannot be read" in capsys.readouterr().err


def test_the_demo_compares_policies_over_rates_with_replications() -> None:
    points = expand_sweep(load_config(EXAMPLES / "demo.yaml"))
    policies = {one.scheduling.request_prioritizer.policy for _, one in points if one.scheduling}
    assert len(policies) >= 3
    assert len({one.seed for _, one in points}) >= 5
    assert len(points) >= 3 * 4 * 5


def test_the_demo_needs_no_file_of_anyone() -> None:
    _, point = expand_sweep(load_config(EXAMPLES / "demo.yaml"))[0]
    assert "path" not in json.dumps(point.model_dump(mode="json")["workload"])


def test_what_the_demo_shows_is_there_at_a_small_size(tmp_path: Path) -> None:
    """Chats wait behind documents under first come, first served, and hardly under the last policy."""
    config = load_example("demo.yaml", tmp_path, workload__end_s=240, replications=1)
    waits = {}
    for _, one in expand_sweep(config):
        if one.scheduling is None or one.workload.rate != 2:
            continue
        policy = one.scheduling.request_prioritizer.policy
        waits[policy] = vajra.run(one, folder=tmp_path / policy).summary.value("by_slo_class.chat.ttft_s.p99")
    assert waits["fcfs"] > 10 * waits["lrs"]


def test_pools_in_the_right_ratio_keep_slos_longer_than_one_pool(tmp_path: Path) -> None:
    """Repeat what `examples/disaggregation.py` shows, at the load at which the ways part, for fewer requests."""
    config = load_example("disaggregation.yaml", tmp_path, workload__num_requests=150)
    points = [one for _, one in expand_sweep(config)]
    assert len({one.workload.arrivals.rate for one in points}) >= 4
    assert all(sum(pool.num_replicas for pool in one.pools.values()) == 8 for one in points)
    chosen = [one for one in points if one.workload.arrivals.rate == 36]
    runs = [vajra.run(one, folder=tmp_path / str(number)) for number, one in enumerate(chosen)]
    example = runpy.run_path(str(EXAMPLES / "disaggregation.py"))
    met = {example["way_of"](run): example["attainment"](run) for run in runs}
    assert (
        met["6 prefill + 2 decode"] > 0.9 > max(met["8 chunks_512"], met["8 chunks_2048"], met["7 prefill + 1 decode"])
    )
    assert met["5 prefill + 3 decode"] > met["4 prefill + 4 decode"]
    text = "\n".join(example["what_to_see"](runs))
    assert "6 prefill + 2 decode   36 requests/s (prefill" in text
    assert "7 prefill + 1 decode   none" in text
    example["draw"](runs, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_demo_script_writes_runs_and_report(tmp_path: Path) -> None:
    """As `make demo` runs it, with a tenth of the requests, two rates and two seeds."""
    shutil.copy(EXAMPLES / "demo.py", tmp_path)
    text = (EXAMPLES / "demo.yaml").read_text(encoding="utf-8")
    for whole, part in (
        ("duration_s: 900", "duration_s: 90"),
        ("replications: 5", "replications: 2"),
        ("rate: [0.5, 1, 1.5, 2]", "rate: [0.5, 2]"),
    ):
        assert whole in text
        text = text.replace(whole, part)
    (tmp_path / "demo.yaml").write_text(text, encoding="utf-8")
    command = [sys.executable, "demo.py", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "report: out/demo.html" in done.stdout
    assert "P99 time to first token of chats under the highest load" in done.stdout
    assert (tmp_path / "out" / "demo.png").stat().st_size > 10_000
    runs = vajra.open_runs([tmp_path / "out" / "demo"])
    assert len(runs) == 3 * 2 * 2
    assert all(run.is_finished for run in runs)
    assert "<svg" in (tmp_path / "out" / "demo.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_azure_example_serves_the_whole_trace(shared_dir: Path, tmp_path: Path) -> None:
    """All 19,366 requests on four replicas, as the README has it (without the log of decisions, to be quicker)."""
    path = shared_dir / "data" / "azure2023" / "AzureLLMInferenceTrace_conv.csv"
    if not path.is_file():
        pytest.skip("the Azure trace is not among the reference data")
    config = load_example("azure.yaml", tmp_path, workload__path=str(path), output__decision_log=False)
    summary = vajra.run(config).summary
    counts: Mapping[str, int] = summary.value("overall.counts")
    assert counts["arrived"] == counts["completed"] == counts["stop"] + counts["length"] == 19_366
    assert summary.value("stability.label") == "stable"


def test_the_azure_example_on_a_piece_of_a_trace(tmp_path: Path) -> None:
    run = vajra.run(load_example("azure.yaml", tmp_path, workload__path=str(trace(tmp_path))))
    frame = run.requests_frame("num_prompt_tokens", "reason", "replica_id")
    assert list(frame.num_prompt_tokens) == [80 + 61 * row for row in range(20)]
    assert set(frame.replica_id) == {0, 1, 2, 3}
    assert set(frame.reason) <= {"stop", "length"}


def test_the_notebook_runs(tmp_path: Path) -> None:
    source = (EXAMPLES / "notebook.py").read_text(encoding="utf-8")
    assert source.count("# %%") >= 10
    environment = {
        **os.environ,
        "VAJRA_EXAMPLE_REQUESTS": "12",
        "VAJRA_EXAMPLE_FOLDER": str(tmp_path / "out"),
        "MPLBACKEND": "Agg",
    }
    command = [sys.executable, str(EXAMPLES / "notebook.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "['question', 'mail', 'essay']" in done.stdout
    assert (tmp_path / "out" / "notebook.html").is_file()
    assert (tmp_path / "out" / "latency-by-rate.png").read_bytes().startswith(b"\x89PNG")
    assert len(vajra.open_runs([tmp_path / "out" / "notebook-sweep"])) == 12


TABLES = ["requests.parquet", "steps.parquet", "tbt.parquet", "summary.json"]


class FormsEachStep(Observer):
    """Without decode fast-forward, since it looks at every step."""

    wants_steps = True
    num_steps = num_in_runs = 0

    def on_step_begin(self, step: StepRecord) -> None:
        self.num_steps += 1

    def on_step_run(self, run: StepRun) -> None:
        self.num_in_runs += len(run.ended_at)


def test_equal_runs_give_equal_bytes(tmp_path: Path, with_observer: Callable[[str, Observer], Registry]) -> None:
    """Every file but environment.json, as docs/experiments.md says; with or without the decision log and decode
    fast-forward, the same tables."""
    config = load_example(
        "demo.yaml", tmp_path, sweep=None, replications=1, output__decision_log=True, workload__first=40
    )
    first, again = (vajra.run(config, folder=tmp_path / name).path for name in ("first", "again"))
    files = [*TABLES, "manifest.json", "config.yaml", "decisions.parquet"]
    assert cmpfiles(first, again, files, shallow=False) == (files, [], [])
    quiet = load_example(
        "demo.yaml", tmp_path, sweep=None, replications=1, workload__first=40, output__decision_log=False
    )
    unlogged = vajra.run(quiet, folder=tmp_path / "unlogged").path
    assert cmpfiles(first, unlogged, TABLES, shallow=False) == (TABLES, [], [])
    assert not (unlogged / "decisions.parquet").exists()
    observer = FormsEachStep()
    stepped = quiet.model_copy(update={"observers": (type(quiet.backend.settings.latency)(type="forms_each_step"),)})
    run = run_experiment(stepped, folder=tmp_path / "stepped", registry=with_observer("forms_each_step", observer))
    assert observer.num_steps > 0 == observer.num_in_runs
    same = ["requests.parquet", "tbt.parquet"]
    assert cmpfiles(first, run.path, same, shallow=False) == (same, [], [])
    order = [("replicaset", "ascending"), ("replica_id", "ascending"), ("step_index", "ascending")]
    assert run.steps().sort_by(order).equals(vajra.RunData.load(first).steps().sort_by(order))


@pytest.mark.long
@pytest.mark.slow
def test_the_long_context_example_runs_on_the_engine(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, str(EXAMPLES / "long_context_engine.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines()[2:]]
    assert [row[2].strip() for row in rows] == ["engine", "simulator"] * 3
    assert all(float(value) > 0 for row in rows for value in row[3:-1])


def test_the_admission_example_protects_the_urgent_and_limits_the_greedy(tmp_path: Path) -> None:
    runs = vajra.sweep(load_example("admission.yaml", tmp_path), workers=1).runs
    chosen = [(run.config["scheduling"].get("admission") or {}).get("policy") for run in runs]
    assert chosen == [None, "token_bucket", "priority_holdback"]
    plain, limited, held = (run.summary for run in runs)
    attained = [one.value("overall.slo.overall.attainment_fraction") for one in (plain, limited, held)]
    assert attained[0] < 0.3 < attained[1] < 0.9 < attained[2]
    assert limited.value("fairness.jain_index") > 0.95 > plain.value("fairness.jain_index")
    assert limited.value("admission.rejected.shed") == limited.value("overall.counts.rejected") > 50
    assert held.value("overall.counts.completed") == plain.value("overall.counts.completed") == 400


def test_the_example_of_agents_compares_programs_and_chats(tmp_path: Path) -> None:
    points = expand_sweep(load_example("agents.yaml", tmp_path, workload__end_s=12))
    assert len(points) == 6
    runs = [vajra.run(one, folder=tmp_path / str(number)) for number, (_, one) in enumerate(points[::5])]
    for run in runs:
        assert run.summary.value("programs.completed") == run.summary.value("programs.arrived") > 0
        assert run.summary.value("by_slo_class.chat.ttft_s.p99") > 0
        assert run.summary.value("programs.slo.attainment_fraction") is not None
    assert vajra.plots.program_makespans(runs).axes
