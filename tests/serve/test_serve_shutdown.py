"""Nothing is lost when a server ends, and its session reads like any run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.processes import SOON_S
from vajra_py.errors import ConfigError
from vajra_py.experiment.runs.replay import replay
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.serve.session.output_streams import OutputStream


def in_background(calls: list[Callable[[], Any]]) -> tuple[list[threading.Thread], list[Any]]:
    results: list[Any] = [None] * len(calls)

    def call(number: int) -> None:
        results[number] = calls[number]()

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    return threads, results


def test_shutdown_finishes_what_runs_and_refuses_what_comes(
    puppet_server: Callable[..., Any], until: Callable[..., None]
) -> None:
    server = puppet_server(grace_s=60)
    server.strings.hold()
    threads, results = in_background([server.post, lambda: server.post(stream=True)])
    until(lambda: server.service.num_generating == 2, "both are let in")
    server.drain()
    until(lambda: not server.service.session.is_ready, "it drains")
    refused = server.post()
    assert refused.status_code == 503
    assert "shutting down" in refused.json()["error"]["message"]
    assert httpx.get(f"{server.url}/ready").status_code == 503
    assert httpx.get(f"{server.url}/health").status_code == 200
    server.strings.let_go()
    for thread in threads:
        thread.join(60)
    assert [result.status_code for result in results] == [200, 200]
    assert results[1].text.endswith("data: [DONE]\n\n")
    server.thread.join(60)
    assert not server.thread.is_alive()


def test_what_outlives_the_grace_time_is_answered_503(
    puppet_server: Callable[..., Any], until: Callable[..., None]
) -> None:
    server = puppet_server({"replica": {"max_batch_size": 1, "memory": {"num_blocks": 64}}}, grace_s=0)
    server.strings.hold()
    threads, results = in_background([server.post] * 3)
    until(lambda: server.service.num_generating == 3, "all are let in")
    server.drain()
    for thread in threads:  # no client waits for the step that is still being computed
        thread.join(60)
    assert [result.status_code for result in results] == [503] * 3
    assert all("shutting down" in result.json()["error"]["message"] for result in results)
    server.strings.let_go()
    server.thread.join(60)
    assert not server.thread.is_alive()


def test_a_server_that_is_still_loading_says_so(puppet_server: Callable[..., Any]) -> None:
    may_load = threading.Event()

    def load(options: Any) -> Any:
        may_load.wait(60)
        raise RuntimeError("the weights are gone")

    server = puppet_server(ready=False, load=load)
    assert httpx.get(f"{server.url}/health").json()["status"] == "loading"
    assert httpx.get(f"{server.url}/ready").status_code == 503
    answer = server.post()
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    may_load.set()
    server.thread.join(60)  # a server whose engine failed exits
    assert not server.thread.is_alive()
    assert "the weights are gone" in str(server.service.session.error)


@pytest.mark.parametrize("outcome", ["loads", "fails"])
def test_a_server_stopped_while_loading_ends_at_once(
    puppet_server: Callable[..., Any], until: Callable[..., None], tmp_path: Path, outcome: str
) -> None:
    loads, may_load = threading.Event(), threading.Event()
    plain: list[Any] = []

    def load(options: Any) -> Any:
        loads.set()
        may_load.wait(60)
        if outcome == "fails":
            raise RuntimeError("the weights are gone")
        return plain[0].puppet(options)

    server = puppet_server(ready=False, load=load, save_run=tmp_path / "session")
    plain.append(server)
    assert loads.wait(60)
    server.drain()
    server.thread.join(60)  # the model is not loaded yet
    assert not server.thread.is_alive()
    session = server.service.session
    assert session.error is None
    assert session.has_ended
    found = json.loads((tmp_path / "session" / "manifest.json").read_text())
    assert found["status"] == "failed"
    assert "stopped while the model was being loaded" in found["error"]
    may_load.set()
    until(lambda: not session._thread.is_alive(), "the engine's thread ends when it has loaded")
    assert session.state.value == "closed"
    assert session.engine is None


def test_every_stream_ends_when_the_engine_does(
    puppet_server: Callable[..., Any], until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = puppet_server()
    server.strings.hold()
    session, streams = server.service.session, list[OutputStream]()
    submit = session.submit

    def watched(outputs: Sequence[OutputStream]) -> None:
        streams.extend(outputs)
        submit(outputs)

    monkeypatch.setattr(session, "submit", watched)
    threads, results = in_background([server.post] * 6)
    until(lambda: server.service.num_generating == 6 == session.num_open, "all are let in")

    def broken(*_: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(type(session.controller.replicas()[0]), "complete_step", broken)
    server.strings.let_go()
    for thread in threads:
        thread.join(60)
    assert [result.status_code for result in results] == [503] * 6
    assert all(stream.end is not None for stream in streams)
    server.thread.join(60)
    assert not server.thread.is_alive()


def test_a_session_reads_like_a_run_and_replays(
    puppet_server: Callable[..., Any], until: Callable[..., None], tmp_path: Path
) -> None:
    folder = tmp_path / "session"
    settings = {"preset": "vllm-v1-priority", "replica": {"max_batch_size": 3, "memory": {"num_blocks": 12}}}
    server = puppet_server(settings, save_run=folder)
    calls = [
        lambda number=number: server.post(
            prompt=[1 + number % 3] * (5 + 7 * number),
            max_tokens=20 + number,
            priority=number % 2,
            user=f"tenant-{number % 2}",
            stream=bool(number % 2),
        )
        for number in range(12)
    ]
    server.strings.hold()
    threads, results = in_background(calls)
    with pytest.raises(httpx.ReadTimeout):
        server.post(prompt=[9] * 20, max_tokens=100, timeout=0.2)
    until(lambda: server.service.num_generating == 12, "the others are let in, and this one is gone")
    server.strings.let_go()
    for thread in threads:
        thread.join(60)
    assert [result.status_code for result in results] == [200] * 12
    server.stop()
    run = RunData.load(folder)
    table = run.requests().to_pylist()
    finished = [row for row in table if row["reason"] == "length"]
    assert len(finished) == 12
    assert [row["reason"] for row in table if row not in finished] == ["aborted"]
    assert {row["tenant"] for row in finished} >= {"tenant-0", "tenant-1"}
    report = replay(folder)
    assert report.num_steps > 0
    assert report.difference is None
    with pytest.raises(ConfigError, match="is there already"):
        puppet_server(settings, save_run=folder)


@pytest.mark.slow
def test_a_storm_of_signals_ends_a_server_well(
    tiny_model: Path, start_server_process: Callable[..., Any], until: Callable[..., None]
) -> None:
    server = start_server_process("--model", str(tiny_model), "--num-gpu-blocks-override", "64")
    until(lambda: httpx.get(f"{server.url}/ready").status_code == 200, "it is ready", 240.0)
    number = 0
    while server.process.poll() is None:
        number += 1
        server.process.send_signal(signal.SIGTERM if number % 2 else signal.SIGINT)
    assert server.terminate() == 0


@pytest.mark.slow
def test_a_signal_while_the_model_loads_ends_the_process_well(
    tiny_model: Path, start_server_process: Callable[..., Any]
) -> None:
    server = start_server_process("--model", str(tiny_model), "--num-gpu-blocks-override", "64")
    assert server.terminate() == 0, "".join(server.log)  # it listens before the model is loaded


@pytest.mark.slow
def test_a_log_that_nobody_reads_any_more_harms_no_request(
    tiny_model: Path, start_server_process: Callable[..., Any], until: Callable[..., None]
) -> None:
    server = start_server_process("--model", str(tiny_model), "--num-gpu-blocks-override", "64", reads_log=False)
    server.process.stderr.close()  # every line of the log is an error from here on
    until(lambda: httpx.get(f"{server.url}/ready").status_code == 200, "it is ready", 240.0)
    for _ in range(3):
        answer = httpx.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": [1, 2], "max_tokens": 2})
        assert answer.status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0


def test_a_process_that_goes_on_after_its_server_is_not_ended() -> None:
    code = """
from vajra_py.serve.server import Guard
with Guard(lambda: False) as guard:
    guard.end_within(60.0)  # a signal came
guard.end_within(0.0)
guard.join()
print("went on")
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=SOON_S)
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr
