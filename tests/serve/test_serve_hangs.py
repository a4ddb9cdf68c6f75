"""What hangs (a worker's process, a driver, a policy) is lost as what dies is, and keeps no server from ending."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.fake_runner import expected_output, runner_that_takes_its_time
from tests.serve.conftest import Puppet, Strings
from tests.serve.processes import STARTUP_S, ServerProcess
from vajra_py.engine.compute import Chunk, RunnerOptions, StepInput, StepOutput
from vajra_py.engine.config import RecoveryConfig
from vajra_py.engine.kv_copy import KvMove
from vajra_py.engine.step_watch import LoadLimit, StepTimes, StepWatch
from vajra_py.engine.worker import Finished, KvMoved
from vajra_py.errors import ExecutorError
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.plugins import build_registry
from vajra_py.runtime.kv import BlockCopy, CopyDirection
from vajra_py.serve.server import END_S, EXIT_STUCK

REPLICA = {"max_batch_size": 8, "max_model_len": 512, "memory": {"num_blocks": 300}}


def ask(url: str, number: int, results: dict[int, Any], **more: Any) -> threading.Thread:
    body = {"model": "puppet", "prompt": [number, 2, 3], "max_tokens": 120, "ignore_eos": True, **more}

    def work() -> None:
        given = {**body, "return_token_ids": True}
        results[number] = httpx.post(f"{url}/v1/completions", json=given, timeout=STARTUP_S)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


# Workers


def test_a_process_that_hangs_is_lost_as_one_that_dies(
    puppet_server: Callable[..., Any], until: Callable[..., None], caplog: Any
) -> None:
    engine = {"workers": "process", "recovery": {"backoff_s": 0.0, "step_timeout_s": 2.0}}
    settings = {"num_replicas": 2, "replica": REPLICA}
    server = puppet_server(settings, load=runner_that_takes_its_time, engine=engine)
    session = server.service.session
    worker = session.engine.replicas["default", 0].worker
    results: dict[int, Any] = {}
    threads = [ask(server.url, number, results) for number in range(6)]
    replicas = session.controller.replicas()
    until(lambda: all(replica.running_set.num_running == 3 for replica in replicas), "they run")
    until(lambda: replicas[0].num_steps > 20, "they are under way")
    process = worker._processes[0]
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: session.num_replicas_up == 1, "it is noticed")
    assert httpx.get(f"{server.url}/health").json()["replicas_up"] == 1
    for thread in threads:
        thread.join(STARTUP_S)
    for number, result in results.items():
        assert result.status_code == 200
        assert result.json()["choices"][0]["token_ids"] == expected_output([number, 2, 3], 120)
    assert "replica 0 of default failed: it hangs: a step of" in caplog.text
    until(lambda: session.num_replicas_up == 2, "another one is there", STARTUP_S)
    until(lambda: not worker._processes, "nothing of the first is left")


def test_a_thread_that_hangs_is_lost_and_its_replica_comes_back_once_it_has_ended(
    puppet_server: Callable[..., Any], until: Callable[..., None]
) -> None:
    stuck, free = Strings(), Strings()
    made: list[Strings] = [stuck, free, free]

    def load(options: RunnerOptions) -> Puppet:
        return Puppet(options, made.pop(0))

    engine = {"recovery": {"backoff_s": 0.0, "step_timeout_s": 1.0}}
    server = puppet_server({"num_replicas": 2}, load=load, engine=engine)
    session = server.service.session
    stuck.hold()
    results: dict[int, Any] = {}
    try:
        threads = [ask(server.url, number, results, max_tokens=9) for number in range(4)]
        for thread in threads:
            thread.join(60)
        assert [result.status_code for result in results.values()] == [200] * 4
        assert session.num_replicas_up == 1
    finally:
        stuck.let_go()
    until(lambda: stuck.num_steps > 0, "it goes on, and nobody listens")
    until(lambda: session.num_replicas_up == 2, "another one is there")
    assert server.post().status_code == 200
    assert session.num_replicas_up == 2


def test_a_limit_follows_from_what_steps_took() -> None:
    times = StepTimes(None, floor_s=10.0)
    assert times.allowed_s(1, num_before=0) == 600  # libraries are loaded
    for _ in range(20):
        times.note(64, 0.02)
    assert times.allowed_s(64, num_before=20) == 10
    times.note(256, 3.0)
    assert times.allowed_s(1, num_before=21) == 30
    assert times.allowed_s(512, num_before=21) == 120  # twice as many tokens, each of which attends to more
    assert times.allowed_s(2**20, num_before=21) == 30 * 2**12
    assert times.allowed_s(1, num_before=0) == 60  # another worker of the same replica
    assert StepTimes(2.5, floor_s=10.0).allowed_s(10**6, num_before=0) == 2.5


def test_a_server_has_the_limit_and_a_run_has_none_unless_it_says_so() -> None:
    assert RecoveryConfig().when(serves=True).watches_steps
    assert not RecoveryConfig().when(serves=False).watches_steps
    given = RecoveryConfig(step_timeout_s=5.0).when(serves=False)
    assert given.watches_steps
    assert given.step_timeout_s == 5.0


class _Mute:
    """A worker that answers nothing until a test does it for it."""

    class facts:  # noqa: N801
        device = "cpu"

    def __init__(self) -> None:
        self.is_discarded = threading.Event()

    def discard(self) -> None:
        self.is_discarded.set()

    def wait_loaded(self) -> None:
        self.is_discarded.wait(60)
        raise ExecutorError("it was killed")


def test_a_step_has_the_time_from_when_its_worker_can_begin_it() -> None:
    news: list[Any] = []
    watch, worker = StepWatch(1.0), _Mute()
    try:
        deliver = watch.watched(("default", 0), worker, news.append)  # type: ignore[arg-type]
        step = StepInput([Chunk(0, [1, 2, 3], 0, True)], [4])
        watch.begin(("default", 0), step)
        deliver(Finished(("default", 0), StepOutput([], [], 0.1)))
        assert news.pop().error is None
        watch.begin(("default", 0), step)
        assert worker.is_discarded.wait(60)
        assert "a step of 4 tokens has taken" in news.pop().error
        deliver(Finished(("default", 0), StepOutput([], [], 0.1)))
        assert not news
    finally:
        watch.close()


def test_a_copy_beside_steps_has_a_time_of_its_own() -> None:
    news: list[Any] = []
    watch, worker, key = StepWatch(1.0), _Mute(), ("default", 0)
    try:
        deliver = watch.watched(key, worker, news.append)  # type: ignore[arg-type]
        for number, direction in enumerate((CopyDirection.TO_HOST, CopyDirection.TO_DEVICE)):
            watch.begin_move(key, KvMove(number, [BlockCopy(0, 0, direction)]))
        deliver(KvMoved(key, 1))
        while not worker.is_discarded.is_set():  # completed steps do not reset the time limit of a hanging copy
            watch.begin(key, StepInput(decodes=[4]))
            deliver(Finished(key, StepOutput([], [], 0.1)))
            worker.is_discarded.wait(0.01)
        assert "a copy has taken" in news.pop().error
    finally:
        watch.close()


def test_a_worker_that_hangs_while_it_loads_is_given_up() -> None:
    limit = LoadLimit(first_s=60.0)
    assert limit.allowed_s == 600
    limit.allowed_s = 0.1
    with pytest.raises(ExecutorError, match="not loaded within"):
        limit.wait_loaded(_Mute())  # type: ignore[arg-type]


# Policies


POLICY = """
import threading, time
from vajra_py.contract import KeyMotion, Layer, PolicyConfig, PolicySpec, hookimpl

IS_IN, MAY_LEAVE = threading.Event(), threading.Lock()

class Blocking:
    key_motion = KeyMotion.STATIC
    def key(self, request, now):
        if request.priority == 13:
            IS_IN.set()
            MAY_LEAVE.acquire()
            MAY_LEAVE.release()
        if request.priority == 14:
            time.sleep(1000)
        return float(request.priority)

@hookimpl
def vajra_policies():
    return [PolicySpec("blocking", Layer.REQUEST_PRIORITIZER, PolicyConfig, lambda c, x: Blocking(), "Blocks in C.")]
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with an installed package whose policy blocks outside Python."""
    folder = tmp_path / "site"
    (folder / "blocking-1.0.dist-info").mkdir(parents=True)
    (folder / "blocking.py").write_text(POLICY)
    (folder / "blocking-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: blocking\nVersion: 1.0\n")
    (folder / "blocking-1.0.dist-info" / "entry_points.txt").write_text("[vajra]\nblocking = blocking\n")
    return folder


@pytest.fixture
def blocking(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """The registry with that policy, and its module; what blocks is let go in the end."""
    monkeypatch.syspath_prepend(str(site))
    sys.modules.pop("blocking", None)
    theirs = [entry for one in metadata.distributions(path=[str(site)]) for entry in one.entry_points]
    registry = build_registry([*metadata.distribution("vajra-py").entry_points.select(group="vajra"), *theirs])
    module = sys.modules["blocking"]
    module.MAY_LEAVE.acquire()
    yield registry, module
    if module.MAY_LEAVE.locked():
        module.MAY_LEAVE.release()


SCHEDULING = {"scheduling": {"request_prioritizer": "blocking"}, "policy_timeout_s": 0.3}


def test_a_server_whose_policy_is_blocked_is_not_ready_until_it_goes_on(
    blocking: tuple[Any, Any], puppet_server: Callable[..., Any], until: Callable[..., None]
) -> None:
    registry, module = blocking
    server = puppet_server(SCHEDULING, registry=registry)
    results: dict[int, Any] = {}
    asked = ask(server.url, 1, results, priority=13, max_tokens=4)
    until(module.IS_IN.is_set, "the policy is called")
    until(lambda: httpx.get(f"{server.url}/ready").status_code == 503, "it is not ready any more")
    message = httpx.get(f"{server.url}/ready").json()["error"]["message"]
    assert "a policy is blocked: " in message
    assert "blocking.py:" in message
    assert httpx.get(f"{server.url}/health").json()["unavailable"]["default"] in message
    assert server.post().status_code == 503
    module.MAY_LEAVE.release()
    asked.join(60)
    assert not asked.is_alive()


def test_a_server_ends_though_its_policy_is_blocked_and_its_recording_is_whole(
    blocking: tuple[Any, Any], puppet_server: Callable[..., Any], until: Callable[..., None], tmp_path: Path
) -> None:
    registry, module = blocking
    folder = tmp_path / "session"
    server = puppet_server(SCHEDULING, registry=registry, grace_s=0.0, save_run=folder)
    assert server.post().status_code == 200
    results: dict[int, Any] = {}
    asked = ask(server.url, 1, results, priority=13, max_tokens=4)
    until(module.IS_IN.is_set, "the policy is called")
    server.drain()
    asked.join(60)
    assert results[1].status_code == 503
    server.thread.join(60)
    assert not server.thread.is_alive()
    session = server.service.session
    assert session.is_left_behind
    assert session.is_stuck
    manifest = RunData.load(folder).manifest
    assert manifest["status"] == "failed"
    assert "it does not stop" in manifest["error"]
    assert manifest["num_submitted"] == 2
    module.MAY_LEAVE.release()
    session._thread.join(60)
    assert not session._thread.is_alive()
    assert RunData.load(folder).manifest == manifest


# Processes


@pytest.fixture
def started(tiny_model: Path, start_server_process: Callable[..., Any], until: Callable[..., None]) -> Iterator[Any]:
    """Start a server of the tiny model that is ready; it is killed in the end if it is still there."""
    servers: list[ServerProcess] = []

    def start(*flags: str, **variables: str) -> ServerProcess:
        sized = ("--num-gpu-blocks-override", "64", "--max-model-len", "512", "--grace", "1")
        server: ServerProcess = start_server_process("--model", str(tiny_model), *sized, *flags, **variables)
        servers.append(server)
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 200, "it is ready", STARTUP_S)
        return server

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait()
        server.reader.join(60)
        assert server.process.stderr is not None
        server.process.stderr.close()


def children(pid: int) -> list[int]:
    out = subprocess.run(["pgrep", "-P", str(pid), "-f", "spawn_main"], capture_output=True, text=True, check=False)
    return [int(one) for one in out.stdout.split()]


def end_of(server: ServerProcess) -> int:
    """The exit code after SIGTERM, in the time that a server may take."""
    server.process.send_signal(signal.SIGTERM)
    return server.process.wait(1.0 + END_S + 2.0)


@pytest.mark.slow
def test_a_stopped_worker_keeps_no_server_from_ending(started: Callable[..., ServerProcess]) -> None:
    server = started("-dp", "2")
    workers = children(server.process.pid)
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGSTOP)
    results: dict[int, Any] = {}
    asked = [ask(server.url, number, results, model="tiny") for number in range(2)]  # one of them waits for it
    assert end_of(server) == 0
    for thread in asked:
        thread.join(60)
    assert sorted(result.status_code for result in results.values())[-1] in (200, 503)
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
def test_a_blocked_policy_keeps_no_server_from_ending(
    started: Callable[..., ServerProcess], site: Path, until: Callable[..., None]
) -> None:
    flags = ["--set", "scheduling.request_prioritizer=blocking", "--set", "policy_timeout_s=0.3"]
    server = started(*flags, PYTHONPATH=str(site))
    results: dict[int, Any] = {}
    asked = ask(server.url, 1, results, model="tiny", priority=14)
    until(lambda: httpx.get(f"{server.url}/ready").status_code == 503, "it is blocked")
    assert end_of(server) == EXIT_STUCK
    asked.join(60)
    assert results[1].status_code == 503


@pytest.mark.slow
def test_a_log_that_nobody_reads_keeps_no_server_from_ending(
    tiny_model: Path, start_server_process: Callable[..., Any], until: Callable[..., None]
) -> None:
    server = start_server_process(
        *("--model", str(tiny_model), "--num-gpu-blocks-override", "64", "--grace", "1"), reads_log=False
    )
    until(lambda: httpx.get(f"{server.url}/ready").status_code == 200, "it is ready", STARTUP_S)
    with httpx.Client(base_url=server.url, timeout=1.0) as client:
        try:
            while True:  # until the pipe is full, and the server blocks while it writes a log line
                client.get("/v1/models/" + "x" * 2000)
        except httpx.TimeoutException:
            pass
    server.process.send_signal(signal.SIGTERM)
    try:
        assert server.process.wait(1.0 + END_S + 2.0) == EXIT_STUCK
    finally:
        server.process.kill()
        server.process.wait()
        server.process.stderr.close()
