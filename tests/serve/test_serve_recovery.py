"""Does a client notice that the process which computed its answer was killed, or that a policy went wrong?"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.fake_runner import expected_output, runner_that_takes_its_time
from vajra_py.experiment.runs.replay import replay
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.plugins import build_registry
from vajra_py.serve.session.session import SessionState

PROCESSES = {"workers": "process", "recovery": {"backoff_s": 0.0}}
REPLICA = {"max_batch_size": 8, "max_model_len": 512, "memory": {"num_blocks": 300}}


def kill(server: Any, replica_id: int) -> int:
    """Kill a replica's process as the system would; its id."""
    unit = server.service.session.engine.replicas["default", replica_id]
    pid: int = unit.worker._processes[0].pid
    os.kill(pid, signal.SIGKILL)
    return pid


def num_lost(server: Any, replica_id: int) -> int:
    count: int = server.service.stats.sets["default"].lost[replica_id]
    return count


def ask(server: Any, number: int, results: dict[int, Any], **more: Any) -> threading.Thread:
    prompt = [number, 2, 3]
    body = {"model": "puppet", "prompt": prompt, "max_tokens": 120, "ignore_eos": True, "return_token_ids": True}

    def work() -> None:
        results[number] = httpx.post(f"{server.url}/v1/completions", json={**body, **more}, timeout=120)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def streamed_tokens(response: httpx.Response) -> list[int]:
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    return [token for event in events[:-1] for token in json.loads(event)["choices"][0]["token_ids"]]


def test_streams_go_on_when_their_process_is_killed_and_it_comes_back(
    puppet_server: Callable[..., Any], until: Callable[..., None], tmp_path: Path
) -> None:
    folder = tmp_path / "session"
    settings = {"num_replicas": 2, "replica": REPLICA}
    load = runner_that_takes_its_time
    server = puppet_server(settings, load=load, engine=PROCESSES, save_run=folder)
    session = server.service.session
    results: dict[int, Any] = {}
    threads = [ask(server, number, results, stream=bool(number % 2)) for number in range(6)]
    replicas = session.controller.replicas()
    until(lambda: all(replica.running_set.num_running == 3 for replica in replicas), "they run")
    until(lambda: replicas[0].num_steps > 20, "they are under way")
    first = kill(server, 0)
    until(lambda: num_lost(server, 0) == 1, "it is noticed")
    for thread in threads:
        thread.join(120)
    assert [result.status_code for result in results.values()] == [200] * 6
    for number, result in results.items():
        tokens = streamed_tokens(result) if number % 2 else result.json()["choices"][0]["token_ids"]
        assert tokens == expected_output([number, 2, 3], 120)
    until(lambda: session.num_replicas_up == 2, "it came back")
    assert session.engine.replicas["default", 0].worker._processes[0].pid != first
    assert httpx.get(f"{server.url}/ready").json()["replicas_up"] == 2
    again: dict[int, Any] = {}
    for thread in [ask(server, number, again) for number in range(4)]:
        thread.join(120)
    assert all(result.status_code == 200 for result in again.values())
    text = httpx.get(f"{server.url}/metrics").text
    assert 'vajra:replica_failures_total{model_name="puppet",replica="0",replicaset="default"} 1.0' in text
    assert 'vajra:replica_restarts_total{model_name="puppet",replica="0",replicaset="default"} 1.0' in text
    assert 'vajra:requests_rerun_total{model_name="puppet",replicaset="default"} 3.0' in text
    server.stop()
    changes = RunData.load(folder).manifest["changes"]
    assert [row["what"] for row in changes] == ["lost", "restored"]
    assert "was killed by signal 9" in changes[0]["detail"]
    report = replay(folder)
    assert report.difference is None


def test_the_only_replica_is_killed_and_its_requests_wait_for_it(
    puppet_server: Callable[..., Any], until: Callable[..., None]
) -> None:
    server = puppet_server({"replica": REPLICA}, load=runner_that_takes_its_time, engine=PROCESSES)
    session, results = server.service.session, {}
    threads = [ask(server, number, results) for number in range(3)]
    replica = session.controller.replicas()[0]
    until(lambda: replica.num_steps > 20, "they are under way")
    kill(server, 0)
    until(lambda: num_lost(server, 0) == 1, "it is noticed")
    unready = httpx.get(f"{server.url}/ready")
    if unready.status_code == 503:  # it may be back already
        assert "was killed by signal 9" in unready.json()["error"]["message"]
    for thread in threads:
        thread.join(120)
    for number, result in results.items():
        assert result.json()["choices"][0]["token_ids"] == expected_output([number, 2, 3], 120)
    assert httpx.get(f"{server.url}/ready").status_code == 200


def test_a_server_whose_last_replica_does_not_come_back_ends(
    puppet_server: Callable[..., Any], until: Callable[..., None]
) -> None:
    recovery = {"max_restarts": 0}
    server = puppet_server(load=runner_that_takes_its_time, engine={"workers": "process", "recovery": recovery})
    results: dict[int, Any] = {}
    states: list[int] = []
    session = server.service.session
    threads = [ask(server, number, results) for number in range(3)]
    replica = session.controller.replicas()[0]
    until(lambda: replica.num_steps > 20, "it is under way")
    kill(server, 0)
    for thread in threads:
        thread.join(120)
    for result in results.values():
        assert result.status_code == 503
        assert "was killed by signal 9" in result.json()["error"]["message"]
    with suppress(httpx.TransportError):  # it may have ended already
        while True:
            states.append(httpx.get(f"{server.url}/health").status_code)
    assert states == sorted(states)  # 200 until the session has noticed, 503 from then on
    server.thread.join(60)
    assert not server.thread.is_alive()
    assert session.state is SessionState.FAILED
    assert "no replica is left" in str(session.error)  # which the command ends with


def test_a_server_whose_policy_broke_and_cannot_be_swapped_ends(
    registry: Any, puppet_server: Callable[..., Any], until: Callable[..., None]
) -> None:
    server = puppet_server({"scheduling": {"request_prioritizer": "brittle"}}, registry=registry)
    assert server.post(priority=1).status_code == 200
    broken = server.post(priority=13)
    assert broken.status_code == 503
    assert "thirteen" in broken.json()["error"]["message"]
    server.thread.join(60)
    assert not server.thread.is_alive()
    assert "policy brittle" in str(server.service.session.error)


def test_a_thread_that_fails_is_replaced_too(puppet_server: Callable[..., Any], until: Callable[..., None]) -> None:
    server = puppet_server({"num_replicas": 2}, engine={"recovery": {"backoff_s": 0.0}})
    units = server.service.session.engine.replicas
    server.strings.hold()
    results: dict[int, Any] = {}
    threads = [ask(server, number, results, max_tokens=40) for number in range(4)]
    until(lambda: server.service.session.controller.num_alive == 4, "they are taken in")
    units["default", 1].worker._runner.run = None  # the next call raises, as for a broken device
    server.strings.let_go()
    until(lambda: num_lost(server, 1) == 1, "it is noticed")
    for thread in threads:
        thread.join(60)
    assert [result.status_code for result in results.values()] == [200] * 4
    until(lambda: server.service.session.num_replicas_up == 2, "it came back")


# Policies that break the contract


POLICY = """
from vajra_py.contract import KeyMotion, Layer, PolicyConfig, PolicySpec, fill, hookimpl

class Brittle:
    key_motion = KeyMotion.STATIC
    def key(self, request, now):
        if request.priority == 13:
            raise RuntimeError("thirteen")
        return float(request.priority)

class Leaving:
    key_motion = KeyMotion.STATIC
    def key(self, request, now):
        if request.priority == 13:
            raise SystemExit("thirteen")
        return float(request.priority)

class Interrupting:
    def schedule(self, replica, batch, now):
        fill(replica, batch, lambda request, batch, replica: min(batch.max_chunk(request), batch.tokens_left))
        if any(request.priority == 13 for request in replica.running()):
            raise KeyboardInterrupt

class Endless:
    key_motion = KeyMotion.STATIC
    def key(self, request, now):
        while request.priority == 13:
            pass
        return float(request.priority)

class Sudden:
    def schedule(self, replica, batch, now):
        fill(replica, batch, lambda request, batch, replica: min(batch.max_chunk(request), batch.tokens_left))
        if any(request.priority == 13 for request in replica.running()):
            raise ValueError("half-way through a step")

class Patient:
    def schedule(self, replica, batch, now):
        if replica.num_running or replica.num_waiting > 1:
            fill(replica, batch, lambda request, batch, replica: min(batch.max_chunk(request), batch.tokens_left))

@hookimpl
def vajra_policies():
    return [
        PolicySpec("patient", Layer.REPLICA_SCHEDULER, PolicyConfig, lambda c, x: Patient(), "Waits for two."),
        PolicySpec("brittle", Layer.REQUEST_PRIORITIZER, PolicyConfig, lambda c, x: Brittle(), "Fears a number."),
        PolicySpec("leaving", Layer.REQUEST_PRIORITIZER, PolicyConfig, lambda c, x: Leaving(), "Leaves at a number."),
        PolicySpec("interrupting", Layer.REPLICA_SCHEDULER, PolicyConfig, lambda c, x: Interrupting(), "Leaves later."),
        PolicySpec("endless", Layer.REQUEST_PRIORITIZER, PolicyConfig, lambda c, x: Endless(), "Never returns."),
        PolicySpec("sudden", Layer.REPLICA_SCHEDULER, PolicyConfig, lambda c, x: Sudden(), "Fears it later."),
    ]
"""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    site = tmp_path / "site"
    (site / "brittle-1.0.dist-info").mkdir(parents=True)
    (site / "brittle.py").write_text(POLICY)
    (site / "brittle-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: brittle\nVersion: 1.0\n")
    (site / "brittle-1.0.dist-info" / "entry_points.txt").write_text("[vajra]\nbrittle = brittle\n")
    monkeypatch.syspath_prepend(str(site))
    theirs = [entry for one in metadata.distributions(path=[str(site)]) for entry in one.entry_points]
    return build_registry([*metadata.distribution("vajra-py").entry_points.select(group="vajra"), *theirs])


BREAKING = [
    ("request_prioritizer", "brittle"),
    ("replica_scheduler", "sudden"),
    ("request_prioritizer", "leaving"),
    ("replica_scheduler", "interrupting"),
]


@pytest.mark.parametrize(("layer", "policy"), BREAKING)
def test_a_policy_that_breaks_the_contract_ends_its_own_requests_only(
    layer: str,
    policy: str,
    registry: Any,
    puppet_server: Callable[..., Any],
    until: Callable[..., None],
    tmp_path: Path,
) -> None:
    settings = {
        "replica": {"max_batch_size": 2, "max_model_len": 256, "memory": {"num_blocks": 40}},
        "replicasets": {"gold": {"select": {"tenants": ["gold"]}, "num_replicas": 2}, "rest": {}},
    }
    folder = tmp_path / "session"
    server = puppet_server(settings, admin=True, save_run=folder, registry=registry)
    session, results = server.service.session, {}
    swap = {"layer": layer, "policy": policy, "replicaset": "gold"}
    assert httpx.post(f"{server.url}/admin/policy", json=swap).status_code == 200
    server.strings.hold()
    threads = [ask(server, number, results, user="gold", max_tokens=9) for number in range(5)]
    threads += [ask(server, number, results, max_tokens=9) for number in range(5, 8)]
    until(lambda: session.controller.num_alive == 8, "all are taken in")
    threads.append(ask(server, 8, results, user="gold", priority=13, max_tokens=9))
    server.strings.let_go()
    for thread in threads:
        thread.join(60)
    gold = [results[number] for number in (*range(5), 8)]
    errors = [result.json()["error"] for result in gold if result.status_code != 200]
    assert errors
    for error in errors:
        assert error["code"] == "out_of_service"
        assert f"policy {policy}" in error["message"]
    assert results[8].status_code == 503
    assert [results[number].status_code for number in range(5, 8)] == [200] * 3
    ready = httpx.get(f"{server.url}/ready")
    assert ready.status_code == 200  # for the rest
    assert f"policy {policy}" in ready.json()["unavailable"]["gold"]
    assert server.post(user="gold").status_code == 503
    assert server.post().status_code == 200
    mended = {**swap, "policy": {"request_prioritizer": "fcfs", "replica_scheduler": "vllm_v1"}[layer]}
    assert httpx.post(f"{server.url}/admin/policy", json=mended).status_code == 200
    assert httpx.get(f"{server.url}/ready").json()["unavailable"] == {}
    assert server.post(user="gold", priority=13).status_code == 200
    session.controller.check_conservation()
    assert all(replica.memory.used_blocks == 0 for replica in session.controller.replicas())
    server.stop()
    assert [row["what"] for row in RunData.load(folder).manifest["changes"]] == ["policy", "out of service", "policy"]
    if policy != "interrupting":  # in this thread, the user interrupts
        assert replay(folder, registry).difference is None


def test_a_server_whose_only_policy_broke_says_that_it_is_not_ready(
    registry: Any, puppet_server: Callable[..., Any], until: Callable[..., None]
) -> None:
    server = puppet_server(admin=True, registry=registry)
    body = {"layer": "request_prioritizer", "policy": "brittle"}
    assert httpx.post(f"{server.url}/admin/policy", json=body).status_code == 200
    broken = server.post(priority=13)
    assert broken.status_code == 503
    assert "policy brittle" in broken.json()["error"]["message"]
    assert "thirteen" in broken.json()["error"]["message"]
    unready = httpx.get(f"{server.url}/ready")
    assert unready.status_code == 503
    assert "policy brittle" in unready.json()["error"]["message"]
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert server.post().status_code == 503
    assert httpx.post(f"{server.url}/admin/policy", json={**body, "policy": "priority"}).status_code == 200
    assert server.post(priority=13).status_code == 200


def test_a_policy_that_does_not_return_takes_its_replicaset_out_of_service(
    registry: Any, puppet_server: Callable[..., Any]
) -> None:
    server = puppet_server({"policy_timeout_s": 0.3}, admin=True, registry=registry)
    body = {"layer": "request_prioritizer", "policy": "endless"}
    assert httpx.post(f"{server.url}/admin/policy", json=body).status_code == 200
    broken = server.post(priority=13)
    assert broken.status_code == 503
    message = broken.json()["error"]["message"]
    assert "policy endless, request " in message
    assert "did not return within 0.3 s (" in message
    assert "brittle.py:" in message
    assert httpx.get(f"{server.url}/ready").status_code == 503
    assert httpx.post(f"{server.url}/admin/policy", json={**body, "policy": "priority"}).status_code == 200
    assert server.post(priority=13).status_code == 200


def test_a_server_says_that_a_policy_schedules_nothing_and_goes_on_when_it_does(
    registry: Any, puppet_server: Callable[..., Any], until: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    server = puppet_server({"scheduling": {"replica_scheduler": "patient"}}, registry=registry)

    def said() -> list[str]:
        return [message for message in caplog.messages if "schedule none of the requests" in message]

    results: dict[int, Any] = {}
    first = ask(server, 1, results, max_tokens=9)
    until(lambda: bool(said()), "it says so")
    assert first.is_alive()
    second = ask(server, 2, results, max_tokens=9)
    for thread in (first, second):
        thread.join(60)
    assert [results[number].status_code for number in (1, 2)] == [200, 200]
    assert len(said()) == 1
    assert said()[0].endswith("(default: 1)")
