"""Running, comparing and looking at runs from the command line, and how each ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vajra_py.cli.progress import RunsDisplay
from vajra_py.experiment.runs.point_status import PointStatus

Vajra = Callable[..., Any]

STUBBORN = """
from vajra_py.contract import Layer, PolicyConfig, PolicySpec, hookimpl

class Stubborn:
    def schedule(self, replica, batch, now):
        for request in replica.waiting():
            batch.add(request, request.num_remaining_tokens + 1)

@hookimpl
def vajra_policies():
    return [PolicySpec("stubborn", Layer.REPLICA_SCHEDULER, PolicyConfig, lambda c, x: Stubborn(), "Asks for too much.")]
"""


def status(folder: Path) -> str:
    return str(json.loads((folder / "manifest.json").read_text())["status"])


def test_a_run_says_where_it_wrote_and_what_came_of_it(vajra: Vajra, small: Path) -> None:
    said = vajra("run", small)
    assert said.code == 0
    assert "results: runs/small" in said.out
    assert "TTFT P99 (s)" in said.out
    assert status(Path("runs/small")) == "finished"


def test_what_limits_the_numbers_is_said(vajra: Vajra, small: Path) -> None:
    said = vajra("run", small, "--set", "replica.memory.num_blocks=15")
    assert said.code == 0
    assert "requests were rejected." in said.err
    assert "requests were rejected." in vajra("compare", "runs/small").err
    assert not vajra("compare", "runs/small", "--format", "csv").err


def test_quiet_says_where_only(vajra: Vajra, small: Path) -> None:
    assert vajra("run", small, "-q").out == "results: runs/small\n"


@pytest.mark.parametrize("written", ["true", "false"])
def test_a_run_loads_no_pandas(small: Path, written: str) -> None:
    settings = [f"output.{name}={written}" for name in ("decision_log", "steps")]
    arguments = ["run", str(small), "-q", *(part for one in settings for part in ("--set", one))]
    code = (
        "import sys; from vajra_py.cli.main import vajra;"
        f"vajra.main({arguments!r}, standalone_mode=False); assert 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_run_imports_the_kind_of_workload_that_it_names(small: Path) -> None:
    code = (
        "import sys; from vajra_py.cli.main import vajra;"
        f"vajra.main(['run', {str(small)!r}], standalone_mode=False);"
        "print(*(name for name in sys.modules if name.startswith('vajra_py.workload.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    loaded = {name.removeprefix("vajra_py.workload.") for name in done.stdout.splitlines()[-1].split()}
    assert {name for name in loaded if name.startswith(("kinds.", "readers"))} == {"kinds.synthetic"}
    assert not loaded & {"config", "profiles", "programs", "sessions"}


def test_frozen_records_of_a_run_are_structs(small: Path) -> None:
    code = (
        "import sys; from vajra_py.cli.main import vajra;"
        f"vajra.main(['run', {str(small)!r}], standalone_mode=False);"
        "kinds = {one for module in [*sys.modules.values()] for one in vars(module).values() if isinstance(one, type)};"
        "params = {one: vars(one).get('__dataclass_params__') for one in kinds};"
        "print(*(f'{one.__module__}.{one.__name__}' for one in kinds if params[one] and params[one].frozen))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    dataclasses = {name for name in done.stdout.splitlines()[-1].split() if name.startswith("vajra_py.")}
    assert {name for name in dataclasses if not name.startswith("vajra_py.contract.")} == {
        "vajra_py.config.sweeps.SweepPoint",  # a mapping
        "vajra_py.errors.Problem",  # `import vajra_py` imports the standard library alone
        "vajra_py.runtime.requests.request.RequestFacts",  # has the contract's facts
        "vajra_py.workload.content.ContentStore",  # has a field that is not compared
        "vajra_py.workload.request.RequestSpec",  # has the contract's facts
        "vajra_py.workload.workload.SloClass",  # has a field that is not hashed
    }


def test_what_is_finished_is_not_run_again(vajra: Vajra, small: Path) -> None:
    vajra("run", small, "-q")
    before = Path("runs/small/environment.json").stat().st_mtime_ns
    assert vajra("run", small, "-q").code == 0
    assert Path("runs/small/environment.json").stat().st_mtime_ns == before
    other = vajra("run", small, "-q", "--set", "seed=4")
    assert other.code == 2
    assert "holds the results of other settings" in other.err
    assert vajra("run", small, "-q", "--set", "seed=4", "--overwrite").code == 0


def test_a_preset_takes_the_place_of_the_files_policies(vajra: Vajra, small: Path) -> None:
    vajra("run", small, "-q", "--preset", "vllm-v1", "--set", "scheduling.request_prioritizer=priority")
    scheduling = json.loads(Path("runs/small/manifest.json").read_text())["config"]["scheduling"]
    assert scheduling["replica_scheduler"]["policy"] == "vllm_v1"
    assert scheduling["request_prioritizer"]["policy"] == "priority"
    assert "nope" in vajra("run", small, "--preset", "nope").err


def test_a_preset_takes_the_place_of_the_policies_of_replicasets_and_pools(vajra: Vajra, small: Path) -> None:
    own = "{replica_scheduler: {policy: fixed_chunk, params: {chunk_size: 64}}, retention: lru}"
    pool = "{role: mixed, replica_scheduler: {policy: fixed_chunk, params: {chunk_size: 64}}, retention: lru}"
    small.write_text(
        f"{small.read_text()}replicasets:\n  short: {{select: {{max_prompt_tokens: 100}}, scheduling: {own}}}\n"
        f"  long: {{scheduling: {{preset: orca}}, pools: {{one: {pool}}}}}\n"
    )
    changed = "replicasets.long.scheduling.request_prioritizer=priority"
    assert vajra("run", small, "-q", "--preset", "vllm-v1", "--set", changed).code == 0
    config = json.loads(Path("runs/small/manifest.json").read_text())["config"]
    found = [config["replicasets"][name]["scheduling"] for name in ("short", "long")]
    assert [one["replica_scheduler"]["policy"] for one in found] == ["vllm_v1", "vllm_v1"]
    assert [one["request_prioritizer"]["policy"] for one in found] == ["fcfs", "priority"]
    pool = config["replicasets"]["long"]["pools"]["one"]
    assert (pool["replica_scheduler"]["policy"], pool["retention"]) == ("vllm_v1", None)


def test_durations_at_the_end_of_doubles_are_beyond_the_clock(vajra: Vajra, small: Path) -> None:
    first = {
        "request_id": "a",
        "arrived_at": 0,
        "num_prompt_tokens": 9,
        "num_output_tokens": 3,
        "expires_after_s": 1e308,
    }
    second = {**first, "request_id": "b", "follows": "a", "think_time_s": 1e300}
    for lines, code in (([first], 0), ([first, second], 4)):
        Path("trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
        said = vajra("run", small, "-q", "--overwrite", "--set", "workload={type: jsonl, path: trace.jsonl}")
        assert said.code == code
        assert ("the clock ends after 9,000,000 s, and requests are left" in said.err) == bool(code)


def test_a_report_goes_where_it_is_asked_for(vajra: Vajra, small: Path) -> None:
    said = vajra("run", small, "-q", "--report", "new/folder/report.html")
    assert said.code == 0
    assert "<svg" in Path("new/folder/report.html").read_text()


def test_a_sweep_keeps_going_and_says_what_failed(vajra: Vajra, small: Path) -> None:
    small.write_text(small.read_text() + "sweep: {scheduling.replica_scheduler.params.preemption: [recompute, swap]}\n")
    said = vajra("run", small, "-q", "--workers", "1")
    assert said.code == 1
    assert "failed: preemption=swap: " in said.err
    assert "results: runs/small/" in said.out


def test_a_class_is_a_scope_by_its_name_alone_in_every_format(vajra: Vajra, small: Path) -> None:
    vajra("run", small, "-q", "--set", "workload.slo_classes=[{name: strict, share: 1}, {name: loose, share: 1}]")
    for scope in ("strict", "slo_class strict"):
        assert "SLO class strict" in vajra("compare", "runs", "--scope", scope).out
        rows = vajra("compare", "runs", "--scope", scope, "--format", "csv").out.splitlines()
        assert [row.split(",")[0] for row in rows] == ["scope", "slo_class strict"]
    scopes = {row.split(",")[0] for row in vajra("compare", "runs", "--format", "csv").out.splitlines()[1:]}
    assert {"overall", "slo_class loose", "slo_class strict"} <= scopes
    assert "mean 'strict'" in vajra("compare", "runs", "--scope", "stricd").err


def test_a_workload_that_comes_at_another_rate_than_asked_for_says_so(vajra: Vajra, small: Path) -> None:
    sessions = "workload={type: profile, profile: mooncake_conversation_sessions, num_requests: 200, rate: 6}"
    said = vajra("run", small, "--set", sessions, "--set", "replica.max_model_len=131072")
    assert "The workload was asked for 6 requests/s and arrived at " in said.err
    assert "was asked for" not in vajra("run", small, "--set", "name=steady").err


def test_compare_in_every_format(vajra: Vajra, small: Path) -> None:
    small.write_text(small.read_text() + "sweep: {scheduling.request_prioritizer: [fcfs, lrs]}\n")
    vajra("run", small, "-q", "--workers", "1")
    assert "fcfs" in vajra("compare", "runs").out
    assert vajra("compare", "runs", "--format", "markdown").out.startswith("|")
    assert r"\begin{tabular}{lrr}" in vajra("compare", "runs", "--format", "latex").out
    csv = vajra("compare", "runs", "--format", "csv").out
    assert "lrs" in csv
    assert "," in csv.splitlines()[0]
    assert vajra("compare", "runs", "--report", "deep/er/report.html").code == 0
    assert Path("deep/er/report.html").exists()
    unknown = vajra("compare", "runs", "--scope", "nobody")
    assert (unknown.code, "'nobody'" in unknown.err) == (1, True)


def test_what_is_no_run(vajra: Vajra, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for command in ("compare", "trace"):
        for folder in ("nowhere", "empty"):
            said = vajra(command, folder)
            assert said.code == 1
            assert said.err.startswith(folder)
            assert len(said.err.splitlines()) == 1


def test_a_timeline(vajra: Vajra, small: Path) -> None:
    vajra("run", small, "-q")
    assert vajra("trace", "runs/small").out == "timeline: runs/small/timeline.json.gz\n"
    assert Path("runs/small/timeline.json.gz").read_bytes()[:2] == b"\x1f\x8b"
    assert vajra("trace", "runs/small", "-o", "t/timeline.json").code == 0
    assert json.loads(Path("t/timeline.json").read_text())["traceEvents"]


def test_a_folder_that_cannot_be_written(vajra: Vajra, small: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = vajra("run", small, "-q", "--set", "output.dir=file/below")
    assert said.code == 1
    assert "file" in said.err
    assert len(said.err.splitlines()) == 1


def test_a_policy_that_breaks_the_contract_is_named(vajra: Vajra, small: Path, tmp_path: Path) -> None:
    (tmp_path / "stubborn_policies.py").write_text(STUBBORN)
    info = tmp_path / "stubborn_policies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stubborn-policies\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vajra]\nstubborn = stubborn_policies\n")
    command = [
        sys.executable,
        "-c",
        "import sys; sys.path.insert(0, sys.argv.pop(1)); from vajra_py.cli.main import main; main()",
    ]
    command += [str(tmp_path), "run", str(small), "-q", "--set", "scheduling.replica_scheduler={policy: stubborn}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("policy stubborn, replica 0, request 0, step 0: ")
    assert "(stubborn_policies.py:7 in schedule)" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    manifest = json.loads((tmp_path / "runs" / "small" / "manifest.json").read_text())
    assert manifest["status"] == "failed"
    assert "stubborn" in manifest["error"]
    assert (tmp_path / "runs" / "small" / "requests.parquet").exists()


def test_requests_that_can_never_be_served_are_told_also_quietly(vajra: Vajra, small: Path) -> None:
    said = vajra("run", small, "-q", "--set", "replica.memory.num_blocks=4")
    assert said.code == 5
    assert "warning: small: " in said.err
    assert "of 12 requests were rejected, for instance " in said.err
    assert "a request may hold at most 65 tokens here" in said.err
    few = vajra("run", small, "-q", "--overwrite", "--set", "replica.memory.num_blocks=17")
    assert few.code == 0
    assert "requests were rejected, for instance" in few.err


def test_the_same_rejections_of_several_runs_are_told_once(vajra: Vajra, small: Path) -> None:
    points = "sweep={scheduling.request_prioritizer: [fcfs, edf, lrs]}"
    all_alike = vajra("run", small, "-q", "--set", "replica.memory.num_blocks=17", "--set", points)
    assert all_alike.code == 0
    (line,) = all_alike.err.splitlines()
    assert line.startswith("warning: all 3 runs: ")
    blocks = "sweep={replica.memory.num_blocks: [4, 17, 400]}"
    each = vajra("run", small, "-q", "--overwrite", "--set", blocks)
    assert each.code == 5
    assert [line.partition(": ")[2].partition(": ")[0] for line in each.err.splitlines()] == [
        "num_blocks=4",
        "num_blocks=17",
    ]


def test_a_full_queue_is_no_mistake_of_the_experiment(vajra: Vajra, small: Path) -> None:
    bounds = ("admission.max_queued_requests=1", "replica.max_batch_size=1", "workload.arrivals.rate=2000")
    said = vajra("run", small, "-q", *(part for one in bounds for part in ("--set", one)))
    assert said.code == 0
    assert not said.err


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C does what it does in a terminal, also where a shell started the tests in the background and switched it off."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("sweep", ["", "sweep: {seed: [1, 2]}\n"], ids=["one run", "a sweep"])
def test_an_interrupted_run_keeps_its_tables(
    sweep: str, vajra: Vajra, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.write_text(small.read_text() + sweep)

    def interrupt(self: RunsDisplay, index: int, state: PointStatus) -> None:
        if state.num_done and not state.is_finished:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(RunsDisplay, "point", interrupt)
    said = vajra("run", small, "-q", "--workers", "1", "--set", "workload.num_requests=200")
    assert said.code == 130
    assert said.err.startswith("interrupted; partial results are in ")
    (folder,) = (path.parent for path in Path("runs").rglob("manifest.json"))
    assert status(folder) == "interrupted"
    assert (folder / "requests.parquet").exists()
    assert vajra("compare", folder).code == 0


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_run_is_run_again(vajra: Vajra, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(RunsDisplay, "point", lambda *_: signal.raise_signal(signal.SIGINT))
        assert vajra("run", small, "-q").code == 130
    assert vajra("run", small, "-q").code == 0
    assert status(Path("runs/small")) == "finished"


def test_a_single_run_is_divided_among_workers_or_says_why_not(vajra: Vajra, small: Path) -> None:
    shared = ("--set", "scheduling.replicaset_scheduler=pull")
    whole = vajra("run", small, "--workers", "2", "--set", "num_replicas=2", "--set", "output.dir=whole", *shared)
    assert whole.code == 0
    assert "not divided among 2 workers: default: pull leaves requests in a queue that the replicas share" in whole.err
    settings = ("--set", "num_replicas=2")
    for name, more in (("one", ()), ("two", ("--workers", "2"))):
        (small.parent / name).mkdir()
        os.chdir(small.parent / name)
        said = vajra("run", small, *settings, *more)
        assert said.code == 0
        assert "not divided" not in said.err
    one, two = (
        {path.name: path.read_bytes() for path in Path(small.parent, name, "runs/small").iterdir()}
        for name in ("one", "two")
    )
    del one["environment.json"], two["environment.json"]
    assert one == two
