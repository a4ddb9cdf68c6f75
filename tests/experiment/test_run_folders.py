"""The folder of a run: what is kept, what is replaced, and who may write there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import vajra_py as vajra
from tests.experiment.small import SMALL
from vajra_py.config import ExperimentConfig, config_from_mapping
from vajra_py.errors import ConfigError, RunError
from vajra_py.experiment.runs.folder import RunFolder, config_digest, find_all_runs, find_runs
from vajra_py.experiment.runs.pool import Processes, RunTask
from vajra_py.plugins import load_registry

FILES = {
    "config.yaml", "decisions.parquet", "environment.json", "manifest.json", "requests.parquet", "steps.parquet", "summary.json",
    "tbt.parquet",
}  # fmt: skip


def small(**changes: Any) -> ExperimentConfig:
    return vajra.load({**SMALL, **changes})


def contents(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in sorted(folder.rglob("*")) if one.is_file()}


def status(folder: Path) -> str:
    return str(json.loads((folder / "manifest.json").read_text())["status"])


# Existing files


def test_a_run_writes_these_files_and_no_other(tmp_path: Path) -> None:
    vajra.run(small(), folder=tmp_path / "run")
    assert {one.name for one in (tmp_path / "run").iterdir()} == FILES


def test_equal_settings_give_equal_bytes_wherever_they_are_written(tmp_path: Path) -> None:
    for name in ("one", "deep/down/two"):
        vajra.run(small(), folder=tmp_path / name)
    one, two = (contents(tmp_path / name) for name in ("one", "deep/down/two"))
    assert {name for name in one if one[name] != two[name]} <= {"environment.json"}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "files",
    [
        {"thesis.tex": "years of work"},
        {"manifest.json": '{"name": "of a web page"}'},
        {"manifest.json": "not JSON at all", "requests.parquet": ""},
        {"src/main.py": "print()", ".git/HEAD": "ref"},
    ],
    ids=lambda files: ", ".join(files),
)
def test_a_folder_of_something_else_is_never_emptied(files: dict[str, str], overwrite: bool, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match="contains something other than a run, and is left as it is"):
        vajra.run(small(), folder=tmp_path, overwrite=overwrite)
    assert contents(tmp_path) == before


def test_a_run_does_not_take_the_place_of_a_sweep(tmp_path: Path) -> None:
    swept = small(output={"dir": str(tmp_path)}, sweep={"seed": [1, 2]})
    vajra.sweep(swept)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match="contains something other than a run"):
        vajra.run(small(output={"dir": str(tmp_path)}), overwrite=True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kept", ["rate-1-seed-1/manifest.json", "capacity.json"])
def test_a_run_that_is_written_again_leaves_further_runs_in_its_folder(kept: str, tmp_path: Path) -> None:
    vajra.run(small(), folder=tmp_path)
    (tmp_path / kept).parent.mkdir(exist_ok=True)
    (tmp_path / kept).write_text("{}")
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match="contains something other than a run, and is left as it is"):
        vajra.run(small(), folder=tmp_path, overwrite=True)
    assert contents(tmp_path) == before


def test_the_simulation_of_a_measured_run_is_replaced_with_it(tmp_path: Path) -> None:
    vajra.run(small(), folder=tmp_path)
    vajra.run(small(), folder=tmp_path / "simulated")
    vajra.run(small(), folder=tmp_path, overwrite=True)
    assert {one.name for one in tmp_path.iterdir()} == FILES


def test_other_settings_replace_results_only_when_asked_to(tmp_path: Path) -> None:
    place = tmp_path / "run"
    vajra.run(small(seed=1), folder=place)
    before = contents(place)
    with pytest.raises(ConfigError, match="holds the results of other settings"):
        vajra.run(small(seed=2), folder=place)
    assert contents(place) == before
    assert vajra.run(small(seed=2), folder=place, overwrite=True).manifest["config"]["seed"] == 2
    assert status(place) == "finished"


def test_no_file_of_the_run_before_stays(tmp_path: Path) -> None:
    place = tmp_path / "run"
    vajra.run(small(), folder=place)
    (place / "timeline.json.gz").write_bytes(b"of the run before")
    (place / "validation").mkdir()
    (place / "validation" / "summary.json").write_text("{}")
    vajra.run(small(seed=5, output={"decision_log": False}), folder=place, overwrite=True)
    assert {one.name for one in place.iterdir()} == FILES - {"decisions.parquet"}


def test_what_a_link_points_to_is_not_emptied(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data.csv").write_text("1,2,3")
    place = tmp_path / "run"
    vajra.run(small(), folder=place)
    (place / "linked").symlink_to(precious)
    vajra.run(small(seed=9), folder=place, overwrite=True)
    assert not (place / "linked").exists()
    assert (precious / "data.csv").read_text() == "1,2,3"


@pytest.mark.parametrize("left", [(), ("environment.json",), ("environment.json", "config.yaml", "manifest.partial")])
def test_a_run_that_was_killed_at_its_start_is_run_again(left: tuple[str, ...], tmp_path: Path) -> None:
    place = tmp_path / "run"
    place.mkdir()
    for name in left:
        (place / name).write_text("{")
    assert vajra.run(small(), folder=place).is_finished
    assert {one.name for one in place.iterdir()} == FILES


def test_a_failed_run_is_run_again_without_being_asked_to(tmp_path: Path) -> None:
    def fail(done: int, total: int, now: float) -> None:
        if done >= 4:
            raise OSError("the disk is gone")

    place = tmp_path / "run"
    with pytest.raises(OSError, match="the disk is gone"):
        vajra.run(small(), folder=place, progress=fail)
    assert status(place) == "failed"
    left = vajra.open_runs(place)[0]
    assert not left.is_finished
    assert len(left.requests_frame("request_id")) >= 4
    assert vajra.run(small(), folder=place).is_finished


def test_a_place_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises((ConfigError, NotADirectoryError)):
        vajra.run(small(), folder=tmp_path / "run")
    assert (tmp_path / "run").read_text() == "a file"


# Equality of settings


@pytest.mark.parametrize(
    "same",
    [
        {"name": "another"},
        {"description": "said differently"},
        {"num_replicas": 1},
        {"seed": 0},
        {"capacity": {"slo": "p99(ttft) <= 1"}},
        {"output": {"dir": "elsewhere"}},
    ],
    ids=str,
)
def test_what_does_not_change_results_does_not_count(same: dict[str, Any]) -> None:
    assert config_digest(small(**same)) == config_digest(small())


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"num_replicas": 2},
        {"view_interval_s": 0.5},
        {"replica": {"max_model_len": 4096, "memory": {"num_blocks": 401}}},
        {"scheduling": {**SMALL["scheduling"], "request_prioritizer": "lrs"}},
        {"backend": {"simulator": {"latency": {"type": "constant", "step_time_s": 0.02}}}},
    ],
    ids=str,
)
def test_what_changes_results_counts(other: dict[str, Any]) -> None:
    assert config_digest(small(**other)) != config_digest(small())


# Finding runs


def test_a_null_in_place_of_a_default_reaches_other_processes(tmp_path: Path) -> None:
    config = small(policy_timeout_s=None, programs={"idle_s": None})
    sent = config_from_mapping(RunTask(config, tmp_path).settings)
    assert (sent.policy_timeout_s, sent.programs.idle_s) == (None, None)
    assert config_digest(sent) == config_digest(config)


def test_runs_are_found_in_order_and_once(tmp_path: Path) -> None:
    for name in ("b", "a/inner", ".hidden", "a/.x.parts/0-of-2"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "manifest.json").write_text("{}")
    found = find_runs(tmp_path)
    assert [str(one.relative_to(tmp_path)) for one in found] == ["a/inner", "b"]
    assert find_runs(tmp_path / "b") == [tmp_path / "b"]
    assert find_runs(tmp_path / "nowhere") == [tmp_path / "nowhere"]
    (tmp_path / "link").symlink_to(tmp_path / "b")
    named = [tmp_path, tmp_path / "b", tmp_path / "a" / ".." / "b", tmp_path / "link"]
    assert len(find_all_runs(named)) == 2


def test_a_run_named_twice_is_compared_once(tmp_path: Path) -> None:
    for seed in (1, 2):
        vajra.run(small(seed=seed), folder=tmp_path / str(seed))
    runs = vajra.open_runs([tmp_path, tmp_path / "1", tmp_path / "2"])
    assert [one.path.name for one in runs] == ["1", "2"]


def test_one_path_is_as_good_as_a_list_of_one(tmp_path: Path) -> None:
    vajra.run(small(), folder=tmp_path / "run")
    assert [one.path for one in vajra.open_runs(str(tmp_path))] == [tmp_path / "run"]
    assert [one.path for one in vajra.open_runs(tmp_path)] == [tmp_path / "run"]
    with pytest.raises(RunError, match="not a run folder"):
        vajra.open_runs(str(tmp_path / "nowhere"))


# Two writers


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    """A folder that a run is being written to."""
    place = RunFolder(tmp_path / "run")
    place.start(small(), load_registry(), overwrite=False)
    yield place.path
    place.close()


def test_nobody_else_writes_while_a_run_is_written(held: Path) -> None:
    before = contents(held)
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"another run is being written to it\. Wait for it"):
            vajra.run(small(), folder=held, overwrite=overwrite)
    assert contents(held) == before


def test_a_folder_is_free_once_its_run_has_ended(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        vajra.run(small(seed=seed), folder=tmp_path / "run", overwrite=True)


def test_a_folder_is_free_after_a_failure(tmp_path: Path) -> None:
    def fail(done: int, total: int, now: float) -> None:
        raise RuntimeError("no")

    for _ in range(2):
        with pytest.raises(RuntimeError):
            vajra.run(small(), folder=tmp_path / "run", progress=fail)
    assert vajra.run(small(), folder=tmp_path / "run").is_finished


def test_of_threads_that_run_one_experiment_into_one_folder_each_ends_well_or_is_told(tmp_path: Path) -> None:
    gate = threading.Barrier(4)
    said: list[str] = []

    def run() -> None:
        gate.wait()
        try:
            said.append("finished" if vajra.run(small(), folder=tmp_path / "run").is_finished else "not finished")
        except ConfigError as error:
            said.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(said) == 4
    assert "finished" in said
    assert all(one == "finished" or "another run is being written to it" in one for one in said)
    alone = vajra.run(small(), folder=tmp_path / "alone")
    (together,) = vajra.open_runs(tmp_path / "run")
    assert together.requests_frame().equals(alone.requests_frame())


def test_threads_with_folders_of_their_own_do_not_disturb_each_other(tmp_path: Path) -> None:
    def run(seed: int) -> None:
        vajra.run(small(seed=seed), folder=tmp_path / f"beside-{seed}")

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for seed in range(3):
        vajra.run(small(seed=seed), folder=tmp_path / f"alone-{seed}")
        beside, alone = (contents(tmp_path / f"{how}-{seed}") for how in ("beside", "alone"))
        assert {name for name in alone if alone[name] != beside[name]} <= {"environment.json"}


ENDLESS = """
import signal, sys
import vajra_py as vajra

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts tests in the background has it ignored

def wait(done, total, now):
    print("running", flush=True)
    sys.stdin.read()

vajra.run(sys.argv[1], folder="run", progress=wait)
"""


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts a run in another process, and returns it once it is under way, where it stays."""
    started: list[subprocess.Popen[str]] = []
    (tmp_path / "file.yaml").write_text(json.dumps(SMALL))

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", ENDLESS, "file.yaml"],
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        return process

    yield start
    for one in started:
        one.kill()
        one.communicate()


def test_a_killed_process_leaves_no_lock_and_what_it_had(
    running: Callable[[], subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = running()
    with pytest.raises(ConfigError, match="another run is being written to it"):
        vajra.run(small(), folder=tmp_path / "run")
    process.kill()
    process.wait()
    assert status(tmp_path / "run") == "running"
    assert not vajra.open_runs(tmp_path / "run")[0].is_finished
    assert vajra.run(small(), folder=tmp_path / "run").is_finished


def test_an_interrupted_process_says_so_and_keeps_its_tables(
    running: Callable[[], subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = running()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0
    deadline = time.monotonic() + 10
    while status(tmp_path / "run") == "running":
        assert time.monotonic() < deadline
    assert status(tmp_path / "run") == "interrupted"
    left = vajra.open_runs(tmp_path / "run")[0]
    manifest = left.manifest
    assert len(left.requests_frame("request_id")) == manifest["num_submitted"]
    assert manifest["num_unfinished"] == manifest["num_submitted"] - sum(manifest["num_ended"].values())


def test_workers_leave_an_interrupt_to_who_started_them(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a process of the background
    workers = Processes(1)
    try:
        workers.submit(0, RunTask(small(), tmp_path / "run"))
        (worker,) = workers._pool._processes
        os.kill(worker, signal.SIGINT)  # as a terminal does to all processes of a command
        assert list(workers.ends()) == [(0, None)]
    finally:
        workers.close()
        signal.signal(signal.SIGINT, before)
    assert status(tmp_path / "run") == "finished"


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_folder_without_permission_is_told(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(0o500)
    with pytest.raises(PermissionError):
        vajra.run(small(), folder=locked / "run")


def test_a_private_folder_is_its_owners_alone(tmp_path: Path) -> None:
    place = RunFolder(tmp_path / "run")
    place.start(small(), load_registry(), overwrite=False, is_private=True)
    place.close()
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700


LATE = """
import os, sys, time
from pathlib import Path
import vajra_py as vajra

if __name__ == "__main__":
    print(len(vajra.sweep(vajra.load("file.yaml", {"sweep": {"seed": [1, 2]}}), workers=2).runs))
    Path("swept").touch()
else:  # in a worker; the second to come here does so when the first has done everything
    try:
        os.close(os.open("first", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        until = time.monotonic() + 3
        while not Path("swept").exists() and time.monotonic() < until:
            pass
"""


def test_a_worker_that_comes_when_all_is_done_ends_in_silence(tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text(json.dumps(SMALL))
    (tmp_path / "late.py").write_text(LATE)
    done = subprocess.run([sys.executable, "late.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
