"""Are policies swapped while the server serves, without anybody's answer changing, and is a bad request harmless?"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from vajra_py.experiment.runs.replay import replay
from vajra_py.metrics.report.timeline import timeline_events
from vajra_py.metrics.runs.run_data import RunData

TWO = {"num_replicas": 2, "replica": {"max_batch_size": 2, "max_model_len": 256, "memory": {"num_blocks": 40}}}
SWAPS: list[tuple[str, str, dict[str, Any]]] = [
    ("request_prioritizer", "priority", {}),
    ("replicaset_scheduler", "pull", {}),
    ("replica_scheduler", "fixed_chunk", {"chunk_size": 24}),
    ("replicaset_scheduler", "least_loaded", {"by": "tokens"}),
    ("replica_scheduler", "orca", {}),
    ("request_prioritizer", "fcfs", {}),
]


def swap(server: Any, layer: str, policy: Any, **more: Any) -> httpx.Response:
    body = {"layer": layer, "policy": policy, **more}
    return httpx.post(f"{server.url}/admin/policy", json=body, timeout=60)


def tokens_of(response: httpx.Response) -> list[int]:
    tokens: list[int] = response.json()["choices"][0]["token_ids"]
    return tokens


def asked(server: Any, count: int) -> tuple[list[threading.Thread], list[httpx.Response]]:
    results: list[Any] = [None] * count

    def ask(number: int) -> None:
        results[number] = server.post(
            prompt=[1 + number] * (5 + 6 * number),
            max_tokens=30,
            priority=number % 3,
            return_token_ids=True,
            ignore_eos=True,
        )

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    return threads, results


def test_policies_are_swapped_under_load_and_the_session_replays(
    puppet_server: Callable[..., Any], until: Callable[..., None], tmp_path: Path
) -> None:
    folder = tmp_path / "session"
    server = puppet_server(TWO, admin=True, save_run=folder)
    alone = [
        tokens_of(server.post(prompt=[1 + n] * (5 + 6 * n), max_tokens=30, return_token_ids=True)) for n in range(12)
    ]
    server.strings.hold()
    threads, results = asked(server, 12)
    until(lambda: server.service.session.controller.num_alive == 12, "all are taken in")
    before = httpx.get(f"{server.url}/admin/policy").json()["replicasets"]["default"]
    for layer, policy, params in SWAPS:
        answer = swap(server, layer, policy, params=params)
        assert answer.status_code == 200, answer.text
        said = answer.json()
        assert said["was"] == before[layer]
        assert said["now"]["policy"] == policy
        assert said["now"]["params"].items() >= params.items()
        before = httpx.get(f"{server.url}/admin/policy").json()["replicasets"]["default"]
        assert before[layer] == said["now"]
        server.strings.step(6)
    assert any(thread.is_alive() for thread in threads)
    server.strings.let_go()
    for thread in threads:
        thread.join(60)
    assert [tokens_of(result) for result in results] == alone
    text = httpx.get(f"{server.url}/metrics").text
    assert 'vajra:policy_swaps_total{layer="replica_scheduler",model_name="puppet",replicaset="default"} 2.0' in text
    assert 'policy="orca"' in text
    server.stop()
    run = RunData.load(folder)
    swapped = [row for row in run.manifest["changes"] if row["what"] == "policy"]
    assert [row["now"]["policy"] for row in swapped] == [policy for _, policy, _ in SWAPS]
    marks = [event["name"] for event in timeline_events(run) if event["ph"] == "i"]
    assert "replica_scheduler: fixed_chunk → orca" in marks
    report = replay(folder)
    assert report.difference is None
    assert report.num_requests == 24


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("no such policy", {"layer": "request_prioritizer", "policy": "fcsf"}, "policy", "Did you mean 'fcfs'?"),
    ("of another layer", {"layer": "request_prioritizer", "policy": "pull"}, "policy", "it is one for replicaset_scheduler"),
    ("no such layer", {"layer": "prioritizer", "policy": "fcfs"}, "layer", "request_prioritizer"),
    ("no such parameter", {"layer": "replica_scheduler", "policy": "fixed_chunk", "params": {"chunksize": 3}}, "params.chunksize", "Did you mean 'chunk_size'?"),
    ("a parameter out of range", {"layer": "replica_scheduler", "policy": "fixed_chunk", "params": {"chunk_size": 0}}, "params.chunk_size", "at least 1"),
    ("no such replicaset", {"layer": "request_prioritizer", "policy": "fcfs", "replicaset": "defalt"}, "replicaset", "Did you mean 'default'?"),
    ("what needs a latency model", {"layer": "request_prioritizer", "policy": "edf"}, "backend.engine.latency", "is missing"),
    ("an unknown field", {"layer": "request_prioritizer", "policy": "fcfs", "param": {}}, "param", "not permitted"),
    ("no policy", {"layer": "request_prioritizer"}, "policy", "required"),
]  # fmt: skip


def test_bad_requests_touch_nothing(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server(TWO, admin=True)
    before = httpx.get(f"{server.url}/admin/policy").json()
    for what, body, param, text in BAD:
        answer = httpx.post(f"{server.url}/admin/policy", json=body)
        assert answer.status_code == 400, what
        error = answer.json()["error"]
        assert error["param"] == param, what
        assert text in error["message"], what
        assert "\n" not in error["message"]
    assert httpx.get(f"{server.url}/admin/policy").json() == before
    assert server.post().status_code == 200


def test_a_policy_that_would_not_run_what_is_served_is_a_conflict(
    puppet_server: Callable[..., Any], until: Callable[..., None]
) -> None:
    small = {
        "replica": {"max_batch_size": 2, "max_batch_tokens": 64, "max_model_len": 256, "memory": {"num_blocks": 40}}
    }
    server = puppet_server(small, admin=True)
    server.strings.hold()
    thread = threading.Thread(target=lambda: server.post(prompt=[1] * 100, max_tokens=4))
    thread.start()
    until(lambda: server.service.session.controller.num_alive == 1, "it is taken in")
    answer = swap(server, "replica_scheduler", "minivllm")
    assert answer.status_code == 409
    assert "would never run request" in answer.json()["error"]["message"]
    server.strings.let_go()
    thread.join(60)
    assert swap(server, "replica_scheduler", "minivllm").status_code == 200


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_without_the_option_there_is_no_such_path(puppet_server: Callable[..., Any], method: str) -> None:
    server = puppet_server()
    body = {"layer": "request_prioritizer", "policy": "priority"}
    answer = httpx.request(method, f"{server.url}/admin/policy", json=body)
    assert answer.status_code == 404
    assert "/admin/policy" not in httpx.get(f"{server.url}/openapi.json").json()["paths"]


def test_the_key_guards_it(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server(admin=True, api_key="sesame")
    assert httpx.get(f"{server.url}/admin/policy").status_code == 401
    assert swap(server, "request_prioritizer", "priority").status_code == 401
    key = {"authorization": "Bearer sesame"}
    body = {"layer": "request_prioritizer", "policy": "priority"}
    assert httpx.post(f"{server.url}/admin/policy", json=body, headers=key).status_code == 200


def test_several_replicasets_are_told_apart(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server({"replicasets": {"chat": {"select": {"slo_classes": ["chat"]}}, "rest": {}}}, admin=True)
    unsaid = swap(server, "request_prioritizer", "priority")
    assert unsaid.status_code == 400
    assert json.loads(unsaid.text)["error"]["param"] == "replicaset"
    assert swap(server, "request_prioritizer", "priority", replicaset="chat").status_code == 200
    shown = httpx.get(f"{server.url}/admin/policy").json()["replicasets"]
    assert shown["chat"]["request_prioritizer"]["policy"] == "priority"
    assert shown["rest"]["request_prioritizer"]["policy"] == "fcfs"
