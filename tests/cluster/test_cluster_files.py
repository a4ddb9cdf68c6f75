"""Files on their way to nodes and back; no cluster is needed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.nodes import SWEEP
from vajra_py.cluster import files
from vajra_py.cluster.files import Shipment, Workspace, packed, unpack
from vajra_py.cluster.node import ProgressCollector
from vajra_py.config import ExperimentConfig, config_from_mapping
from vajra_py.errors import ConfigError, RunError


def reads(path: str) -> ExperimentConfig:
    return config_from_mapping(SWEEP | {"workload": {"type": "jsonl", "path": path}})


@pytest.fixture(autouse=True)
def _stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "asker/work").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "asker/work")
    monkeypatch.setattr(files.tempfile, "gettempdir", lambda: str(tmp_path / "node"))


def test_a_file_travels_once() -> None:
    put: list[bytes] = []

    def keep(content: bytes) -> int:
        put.append(content)
        return len(put) - 1

    shipment = Shipment(keep)
    Path("a.jsonl").write_text("one")
    Path("copy.jsonl").write_text("one")
    found = [shipment.files_of(reads(name)) for name in ("a.jsonl", "a.jsonl", "copy.jsonl")]
    assert [[one.path for one in each] for each in found] == [["a.jsonl"], ["a.jsonl"], ["copy.jsonl"]]
    assert put == [b"one"]
    Path("a.jsonl").write_text("other")
    assert shipment.files_of(reads("a.jsonl"))[0].content == 1
    assert put == [b"one", b"other"]


def test_a_folder_travels_with_all_that_it_holds() -> None:
    Path("bundle/inner").mkdir(parents=True)
    Path("bundle/a.json").write_text("{}")
    Path("bundle/inner/b.csv").write_text("x")
    found = Shipment(bytes).files_of(reads("./bundle"))
    assert [one.path for one in found] == ["bundle/a.json", "bundle/inner/b.csv"]


def test_words_are_no_files() -> None:
    Path("a.jsonl").write_text("one")
    config = config_from_mapping(
        SWEEP | {"workload": {"type": "jsonl", "path": "a.jsonl"}, "description": ".", "replica": {"max_model_len": 64}}
    )
    assert [one.path for one in Shipment(bytes).files_of(config)] == ["a.jsonl"]
    assert Shipment(bytes).files_of(reads(f"{'long' * 100}.jsonl")) == []


def test_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_BYTES", 10)
    Path("a.jsonl").write_bytes(b"x" * 11)
    with pytest.raises(
        ConfigError, match=r"^--on: the files that the experiments name are too large .* \(a\.jsonl, and"
    ):
        Shipment(bytes).files_of(reads("a.jsonl"))


@pytest.mark.parametrize("name", ["trace.jsonl", "../shared/trace.jsonl", "deep/trace.jsonl"])
def test_relative_paths_mean_the_same_on_a_node(name: str, tmp_path: Path) -> None:
    asker = Path.cwd()
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text("rows")
    shipped = Shipment(bytes).files_of(reads(name))
    workspace = Workspace("vajra-test", str(asker))
    fetched: list[bytes] = []

    def fetch(content: Any) -> bytes:
        fetched.append(content)
        return bytes(content)

    for _ in range(2):  # as for two runs of one node
        workspace.enter(shipped, fetch)
        assert Path(name).read_text() == "rows"
    assert fetched == [b"rows"]
    assert Path.cwd() == tmp_path / "node/vajra-test" / str(asker).lstrip("/")
    os.chdir(asker)
    workspace.remove()
    assert not list((tmp_path / "node").iterdir())


def test_texts_name_files_as_the_asker_does(tmp_path: Path) -> None:
    workspace = Workspace("vajra-test", "/home/asker")
    inside = f"{tmp_path}/node/vajra-test/home/asker/trace.jsonl"
    assert workspace.text_as_asked(f"{inside}:1: is wrong") == "/home/asker/trace.jsonl:1: is wrong"
    assert workspace.text_as_asked(None) is None
    given = {"manifest.json": inside.encode(), "steps.parquet": inside.encode()}
    assert workspace.as_asked(given) == given | {"manifest.json": b"/home/asker/trace.jsonl"}


def test_absolute_paths_stay_what_they_are(tmp_path: Path) -> None:
    asker, path = os.getcwd(), tmp_path / "traces/trace.jsonl"
    path.parent.mkdir()
    path.write_text("rows")
    shipped = Shipment(bytes).files_of(reads(str(path)))
    workspace = Workspace("vajra-test", asker)
    path.unlink()
    workspace.enter(shipped, bytes)
    assert path.read_text() == "rows"
    path.write_text("others")
    with pytest.raises(RunError, match=r"another file under this name\. Name it by a relative path"):
        workspace.enter(shipped, bytes)
    assert path.read_text() == "others"


def test_a_folder_of_results_appears_whole(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "runs/point"
    (source / "inner").mkdir(parents=True)
    (source / "manifest.json").write_text("{}")
    (source / "inner/table").write_bytes(b"\0\1")
    target.mkdir(parents=True)
    (target / "old").touch()
    unpack(packed(source), target)
    assert packed(target) == {"inner/table": b"\0\1", "manifest.json": b"{}"}
    assert [one.name for one in target.parent.iterdir()] == ["point"]


def test_news_are_the_latest_of_each_run() -> None:
    collector = ProgressCollector()
    for done in (1, 2):
        collector.report(7, done, 10, 0.5)
    collector.report(3, 1, 10, 0.1)
    assert sorted(collector.take()) == [(3, 1, 10, 0.1), (7, 2, 10, 0.5)]
    assert collector.take() == []
