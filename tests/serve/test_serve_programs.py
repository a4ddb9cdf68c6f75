"""Programs over HTTP: who a call belongs to, how programs end, and that a served session is replayed equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest

from tests.serve.processes import wait_until
from vajra_py.experiment.runs.replay import replay
from vajra_py.runtime.records.input_log import Arrival, ProgramIdle, read_inputs

PLAS = {
    "scheduling": {
        "request_prioritizer": "atlas",
        "replicaset_scheduler": "thunderagent",
        "replica_scheduler": "fixed_chunk",
    }
}


def post(url: str, headers: Mapping[str, str] | None = None, **body: Any) -> httpx.Response:
    body = {"model": "puppet", "prompt": [1, 2, 3], "max_tokens": 2, **body}
    return httpx.post(f"{url}/v1/completions", json=body, headers=dict(headers or {}))


NAMES = ("x-program-id", "x-dynamo-session-id", "x-claude-code-session-id", "x-session-affinity", "session-id")


def test_a_program_is_known_by_the_headers_of_clients_and_gateways(
    puppet_server: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "session"
    server = puppet_server(save_run=folder)
    for name in NAMES:
        assert post(server.url, {name: f"by {name}"}).status_code == 200
    assert post(server.url, {"session_id": "by session_id"}).status_code == 200
    assert post(server.url, program_id="by body", program_stage="plan").status_code == 200
    both = {"x-claude-code-session-id": "stronger", "session-id": "weaker"}
    assert post(server.url, both, program_id="weakest").status_code == 200
    assert post(server.url, {"x-session-id": "a session alone"}).status_code == 200
    final = {"x-dynamo-session-id": "p", "x-dynamo-session-final": "true"}
    assert post(server.url, final, num_program_calls=1, parent_calls=["a"], next_call_after_ms=1500).status_code == 200
    assert post(server.url, {"x-last-call": "perhaps"}).status_code == 400
    assert post(server.url, is_last_call="yes").status_code == 400
    assert post(server.url, next_call_after_ms=-1).status_code == 400
    assert post(server.url, num_program_calls=0).status_code == 400
    assert post(server.url, {"x-num-program-calls": "-1"}).status_code == 400
    server.stop()
    facts = [one.facts for one in read_inputs(folder / "inputs.jsonl.gz") if isinstance(one, Arrival)]
    assert [one.program_id for one in facts] == [
        *(f"by {name}" for name in NAMES),
        *("by session_id", "by body", "stronger", "", "p"),
    ]
    assert facts[6].stage == "plan"
    assert facts[8].session_id == "a session alone"
    assert (facts[9].is_last_call, facts[9].num_program_calls, facts[9].parent_calls) == (True, 1, ("a",))
    assert facts[9].next_call_after_s == 1.5
    table = pq.read_table(folder / "programs.parquet").to_pylist()
    assert [row["num_calls"] for row in table] == [1] * 9
    assert replay(folder).difference is None


def test_a_call_is_not_kept_waiting_for_parents_that_nobody_knows(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server()
    assert post(server.url, program_id="p", parent_calls=["unknown"]).status_code == 200


@pytest.mark.parametrize("settings", [{}, PLAS], ids=["plain", "of programs"])
def test_programs_that_idle_end_and_are_replayed_equal(
    settings: dict[str, Any], puppet_server: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "session"
    server = puppet_server({**settings, "programs": {"idle_s": 0.05}}, save_run=folder)
    for number in range(6):
        assert post(server.url, program_id=f"p{number % 3}").status_code == 200
    programs = server.service.session.controller.programs
    wait_until(lambda: not len(programs), "programs have idled")
    server.stop()
    inputs = read_inputs(folder / "inputs.jsonl.gz")
    ended = [one.program_id for one in inputs if isinstance(one, ProgramIdle)]
    assert set(ended) == {"p0", "p1", "p2"}
    report = replay(folder)
    assert report.difference is None
    assert report.num_requests == 6
