"""Facts that nobody has: run by tests/project/test_facts.py on a copy of the package that declares them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest

from vajra_py.contract import KeyMotion, RequestView
from vajra_py.contract.facts import FACTS
from vajra_py.experiment.runs.replay import replay
from vajra_py.metrics import RunData
from vajra_py.runtime.records.input_log import Arrival, read_inputs
from vajra_py.testing.harness import Harness, HarnessOptions
from vajra_py.testing.strict import StrictViews
from vajra_py.workload import RequestSpec, SloClass, Workload, read_csv, read_jsonl, write_jsonl

STATED = {
    "pool": "blue",
    "ancestors": ("a", "b"),
    "level": 3,
    "turn": 2,
    "urgent": True,
    "weight": -0.5,
    "patience_s": 1.5,
}
NOTHING = {"pool": "", "ancestors": (), "level": None, "turn": 0, "urgent": False, "weight": None, "patience_s": None}


class Reader:
    """A prioritizer that reads the facts of every request that it is shown, and nothing that is not in the view."""

    key_motion = KeyMotion.STATIC

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, Any]] = {}
        self._views = StrictViews()

    def key(self, request: RequestView, now: float) -> float:
        view = self._views.request(request)
        self.seen[view.request_id] = {name: getattr(view, name) for name in STATED}
        return 0.0


def facts(request: Any) -> dict[str, Any]:
    return {name: getattr(request, name) for name in STATED}


def seen_in_a_run(requests: list[RequestSpec]) -> dict[str, dict[str, Any]]:
    reader = Reader()
    Harness(reader, "round_robin", "fixed_chunk", HarnessOptions()).run(requests)
    return reader.seen


@pytest.fixture
def two(tmp_path: Path) -> Workload:
    file = tmp_path / "t.csv"
    file.write_text(
        "arrived_at,num_prompt_tokens,num_output_tokens,pool,ancestors,level,turn,urgent,weight,patience_s\n"
        "0,5,6,blue,a; b,3,2,true,-0.5,1.5\n1,5,6,,,,0,,,\n"
    )
    return read_csv(file)


def test_workload_files_have_them(two: Workload, tmp_path: Path) -> None:
    assert list(map(facts, two)) == [STATED, NOTHING]
    file = tmp_path / "w.jsonl"
    write_jsonl(two, file)
    assert list(read_jsonl(file)) == list(two)
    assert "pool" not in file.read_text().splitlines()[1]
    merged = two.merge(Workload.from_requests([RequestSpec("x", 0.5, 1, 1)], "plain"))
    assert list(map(facts, merged)) == [STATED, NOTHING, NOTHING]


def test_a_class_of_service_may_state_them(two: Workload) -> None:
    import numpy as np

    labelled = two.with_slo_classes([SloClass("c", 1.0, {"pool": "red", "turn": 7})], np.random.default_rng(0))
    assert [(one.pool, one.turn, one.level) for one in labelled] == [("red", 7, 3), ("red", 7, None)]  # type: ignore[attr-defined]


def test_policies_see_them_in_a_simulated_run(two: Workload) -> None:
    assert list(seen_in_a_run(list(two)).values()) == [STATED, NOTHING]


def test_extra_args_of_vllm_state_them() -> None:
    from vajra_py.vllm.extra_args import stated_in

    given = {f"vajra_{name}": list(value) if isinstance(value, tuple) else value for name, value in STATED.items()}
    assert stated_in(given) == STATED


BODY = {
    "pool": "blue",
    "ancestors": ["a", "b"],
    "level": 3,
    "turn": 2,
    "urgent": True,
    "weight": -0.5,
    "patience_ms": 1500,
}
HEADERS = {
    "x-pool": "blue", "x-ancestors": "a, b", "x-level": "3", "x-turn": "2", "x-urgent": "true", "x-weight": "-0.5", "x-patience-ms": "1500",
}  # fmt: skip


def test_http_recording_replay_and_table_have_them(puppet_server: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "session"
    server = puppet_server(save_run=folder)
    for body, headers in ((BODY, {}), ({}, HEADERS), ({}, {})):
        body = {"model": "puppet", "prompt": [1, 2, 3], "max_tokens": 2, **body}
        assert httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code == 200
    assert server.post(level="three").status_code == 400
    document = httpx.get(f"{server.url}/openapi.json").json()
    assert {*BODY} <= {*document["components"]["schemas"]["CompletionBody"]["properties"]}
    assert {*HEADERS} <= {one["name"] for one in document["paths"]["/v1/completions"]["post"]["parameters"]}
    server.stop()
    requests = [one.spec() for one in read_inputs(folder / "inputs.jsonl.gz") if isinstance(one, Arrival)]
    assert list(map(facts, requests)) == [STATED, STATED, NOTHING]
    assert replay(folder).difference is None
    assert list(seen_in_a_run(requests).values()) == [STATED, STATED, NOTHING]

    as_kept = {**STATED, "ancestors": ["a", "b"]}
    table = pq.read_table(folder / "requests.parquet")
    assert table.select(list(STATED)).to_pylist()[:2] == [as_kept, as_kept]
    assert table.column("pool").to_pylist()[2] == ""
    frame = RunData.load(folder).requests_frame("pool", "level")
    assert frame.pool.tolist() == ["blue", "blue", ""]


def test_a_run_of_before_has_nothing_in_their_place(puppet_server: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "session"
    server = puppet_server(save_run=folder)
    server.post()
    server.stop()
    file = folder / "requests.parquet"
    file.chmod(0o600)
    pq.write_table(pq.read_table(file).drop_columns(list(STATED)), file)
    kept = RunData.load(folder).requests().select(list(STATED)).to_pylist()[0]
    assert (kept["pool"], kept["ancestors"], kept["turn"]) == ("", [], 0)
    assert [kept[name] == kept[name] for name in ("level", "weight", "patience_s")] == [False] * 3  # NaN


def test_the_documentation_lists_them() -> None:
    spec = importlib.util.spec_from_file_location("generate", "docs/tools/configuration.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.facts()
    for fact in FACTS:
        assert f"| `{fact.name}` |" in page
