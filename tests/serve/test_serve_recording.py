"""A recording ends with a state that says what it is, and never takes the server with it."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.processes import STARTUP_S, start_server, wait_until
from vajra_py.experiment.runs.recording import _Log


def manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return found


def modes(folder: Path) -> set[int]:
    return {one.stat().st_mode & 0o777 for one in folder.iterdir()}


def test_a_recording_is_for_its_owner_only(puppet_server: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "session"
    server = puppet_server(save_run=folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert server.post().status_code == 200
    server.stop()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert modes(folder) == {0o600}
    assert manifest(folder)["status"] == "finished"
    assert not list(folder.glob("*.partial"))


def test_a_full_disk_ends_the_recording_and_not_the_server(
    puppet_server: Callable[..., Any],
    until: Callable[..., None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "session"
    server = puppet_server(save_run=folder)
    assert server.post().status_code == 200
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))  # from now on no file of this process grows larger
    try:
        for number in range(60):  # more than the logs hold back
            prompt = [token * (number + token) % 997 for token in range(240)]
            assert server.post(prompt=prompt, max_tokens=1).status_code == 200
        assert "the recording stopped" in caplog.text
        server.stop()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert server.service.session.error is None
    assert "the recording stopped" in caplog.text
    assert len([one for one in caplog.messages if "the recording stopped" in one]) == 1


def test_a_disk_that_is_full_in_the_end_leaves_a_clear_state(
    puppet_server: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "session"
    server = puppet_server(save_run=folder)

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vajra_py.experiment.runs.recording.write_parquet", full)
    assert server.post().status_code == 200
    server.stop()
    assert server.service.session.error is None
    found = manifest(folder)
    assert found["status"] == "failed"
    assert "No space left on device" in found["error"]
    assert found["num_submitted"] == 1
    assert modes(folder) == {0o600}


def test_a_log_takes_everything_when_the_device_is_full(tmp_path: Path) -> None:
    told: list[OSError] = []
    log = _Log(Path("/dev/full"), told.append)
    for _ in range(3):
        assert log.write(b"x" * 100) == 100
    log.close()
    assert [error.strerror for error in told] == ["No space left on device"]


def test_an_engine_that_does_not_load_leaves_no_running_recording(
    puppet_server: Callable[..., Any], tmp_path: Path
) -> None:
    def load(options: Any) -> Any:
        raise RuntimeError("the weights are gone")

    folder = tmp_path / "session"
    server = puppet_server(ready=False, load=load, save_run=folder)
    server.thread.join(60)
    found = manifest(folder)
    assert found["status"] == "failed"
    assert "the weights are gone" in found["error"]


def test_nothing_of_a_recording_that_has_stopped_grows(puppet_server: Callable[..., Any], tmp_path: Path) -> None:
    server = puppet_server(save_run=tmp_path / "session")
    kept = server.service.session._parts.recording
    assert server.post().status_code == 200
    recorder, decisions = kept._recorder, kept._decisions
    assert len(recorder.requests.to_table()) == 1
    kept._stop(OSError(28, "No space left on device"))
    for number in range(5):
        assert server.post(seed=number).status_code == 200
    assert len(recorder.requests.to_table()) == 1
    assert len(decisions._arrived) <= 2  # the arrival at which it detects that it was stopped
    assert kept._recorder is None
    server.stop()
    assert manifest(tmp_path / "session")["status"] == "failed"


def test_what_a_recording_imports_is_there_before_the_first_request(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    server = start_server("--model", str(tiny_model), "--save-run", str(tmp_path / "run"))
    try:
        wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 200, "it is ready", STARTUP_S)
        assert "/pandas/" in Path(f"/proc/{server.process.pid}/maps").read_text()
    finally:
        server.terminate()


def test_health_goes_on_while_nothing_is_recorded(puppet_server: Callable[..., Any], tmp_path: Path) -> None:
    server = puppet_server(save_run=tmp_path / "session")
    server.service.session._parts.recording._stop(OSError(28, "No space left on device"))
    assert server.post().status_code == 200
    assert httpx.get(f"{server.url}/health").status_code == 200
