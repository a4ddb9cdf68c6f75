"""Every command answers a file that it cannot use with a few words that name it, and never with a stack trace."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

Vajra = Callable[..., Any]
MOST_WORDS = 3000
"""Characters that an answer to one mistake may have."""

LAUGHS = "\n".join(
    ["version: 1", "a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    + ["workload: *a11"]
)


def is_plain(said: Any, *names: str) -> None:
    """A mistake of the user: said in few words that name the file."""
    assert said.code in (1, 2), said
    assert "Traceback" not in said.err, said.err
    assert said.err.strip()
    assert len(said.err) < MOST_WORDS, said.err
    assert any(name in said.err for name in names), said.err


def directory(path: Path) -> None:
    path.mkdir()


def loop(path: Path) -> None:
    path.symlink_to(path)


def written(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


FILES: dict[str, Callable[[Path], object]] = {
    "a directory": directory,
    "a loop of links": loop,
    "nothing": written(b""),
    "zeros": written(bytes(4096)),
    "noise": written(bytes(range(256)) * 16),
    "UTF-16": written("version: 1\n".encode("utf-16")),
    "Latin-1": written("name: Größe\n".encode("latin-1")),
    "a tab": written(b"version: 1\n\tname: x\n"),
    "a list": written(b"[1, 2, 3]\n"),
    "a number": written(b"42\n"),
    "a text": written(b"hello\n"),
    "two documents": written(b"version: 1\n---\nversion: 1\n"),
    "a tag": written(b"version: !!python/object/apply:os.system ['true']\n"),
    "an alias to itself": written(b"version: 1\nworkload: &a\n  type: *a\n"),
    "aliases of aliases": written(LAUGHS.encode()),
    "deep nesting": written(b"version: 1\nworkload: " + b"[" * 1500 + b"]" * 1500),
    "a key that is a list": written(b"version: 1\n[a, b]: 1\n"),
    "a key that is a number": written(b"version: 1\n7: 1\n"),
    "a number without end": written(b"version: 1\nseed: " + b"9" * 6000 + b"\n"),
    "infinity": written(b"version: 1\nseed: .inf\n"),
    "a date": written(b"version: 2026-11-22\n"),
    "a merge key": written(b"version: 1\n<<: {name: x}\n<<: [1]\n"),
    "JSON of another kind": written(b'{"choices": []}'),
}


@pytest.mark.parametrize("command", ["run", "check", "capacity", "workloads describe", "serve", "profile --config"])
@pytest.mark.parametrize("kind", list(FILES))
def test_what_is_no_experiment(command: str, kind: str, vajra: Vajra, tmp_path: Path) -> None:
    path = tmp_path / "odd.yaml"
    FILES[kind](path)
    said = vajra(*command.split(), path)
    is_plain(said, "odd.yaml")
    assert said.code == 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("extension", ["csv", "jsonl", "json", "parquet"])
@pytest.mark.parametrize("kind", ["a directory", "a loop of links", "nothing", "zeros", "noise", "UTF-16", "a number"])
def test_what_is_no_workload(kind: str, extension: str, vajra: Vajra, small: Path, tmp_path: Path) -> None:
    path = tmp_path / f"odd.{extension}"
    FILES[kind](path)
    types = {"csv": "csv", "jsonl": "jsonl", "json": "jsonl", "parquet": "csv"}
    text = small.read_text()
    before, after = text.split("workload:\n")
    rest = after[after.index("backend:") :]
    small.write_text(f"{before}workload: {{type: {types[extension]}, path: {path.name}}}\n{rest}")
    is_plain(vajra("run", small, "-q"), path.name)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a run, to be broken."""
    import vajra_py as vajra
    from tests.cli.conftest import SMALL

    folder = tmp_path_factory.mktemp("finished")
    (folder / "small.yaml").write_text(SMALL)
    return vajra.run(vajra.load(folder / "small.yaml", {"output.dir": str(folder / "runs")})).path


def cut(name: str) -> Callable[[Path], object]:
    return lambda run: os.truncate(run / name, (run / name).stat().st_size // 2)


def replaced(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda run: (run / name).write_bytes(content)


def without_column(name: str) -> Callable[[Path], object]:
    def change(run: Path) -> None:
        table = pq.read_table(run / name)
        pq.write_table(table.drop_columns([table.column_names[1]]), run / name)

    return change


def of_another_type(name: str) -> Callable[[Path], object]:
    def change(run: Path) -> None:
        table = pq.read_table(run / name)
        columns = {one: pa.array(["x"] * table.num_rows) for one in table.column_names}
        pq.write_table(pa.table(columns), run / name)

    return change


BREAKS: dict[str, Callable[[Path], object]] = {
    "no manifest": lambda run: (run / "manifest.json").unlink(),
    "a cut manifest": cut("manifest.json"),
    "a manifest that is a list": replaced("manifest.json", b"[]"),
    "a manifest that is empty": replaced("manifest.json", b"{}"),
    "a manifest of zeros": replaced("manifest.json", bytes(100)),
    "no requests": lambda run: (run / "requests.parquet").unlink(),
    "cut requests": cut("requests.parquet"),
    "requests that are text": replaced("requests.parquet", b"hello"),
    "requests without a column": without_column("requests.parquet"),
    "requests of another type": of_another_type("requests.parquet"),
    "cut steps": cut("steps.parquet"),
    "steps without a column": without_column("steps.parquet"),
    "a cut summary": cut("summary.json"),
    "a summary that is a list": replaced("summary.json", b"[]"),
    "a cut experiment": lambda run: (run / "experiment.yaml").write_text("version: ["),
}
READERS = {
    "compare": ("compare", "RUN"),
    "a report": ("compare", "RUN", "--report", "report.html"),
    "figures": ("figures", "RUN", "--out", "figures", "--only", "latency_cdfs", "--only", "queue_and_kv"),
    "trace": ("trace", "RUN", "-o", "trace.json"),
    "replay": ("replay", "RUN"),
    "validate": ("validate", "RUN", "RUN"),
    "calibrate": ("calibrate", "RUN", "--profile", "RUN"),
}


@pytest.mark.parametrize("reader", list(READERS))
@pytest.mark.parametrize("broken", list(BREAKS))
def test_a_broken_run(reader: str, broken: str, vajra: Vajra, finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "the-run"
    shutil.copytree(finished, run)
    BREAKS[broken](run)
    said = vajra(*(str(run) if one == "RUN" else one for one in READERS[reader]))
    assert "Traceback" not in said.err
    if said.code:  # not every command reads everything
        is_plain(said, "the-run", "report.html")


@pytest.mark.parametrize("reader", list(READERS))
@pytest.mark.parametrize("kind", ["a directory", "a loop of links", "nothing", "noise", "missing"])
def test_what_is_no_run(reader: str, kind: str, vajra: Vajra, tmp_path: Path) -> None:
    path = tmp_path / "odd"
    if kind != "missing":
        FILES[kind](path)
    is_plain(vajra(*(str(path) if one == "RUN" else one for one in READERS[reader])), "odd")


@pytest.mark.parametrize(
    "override",
    [
        *("", "=", "a", "seed", "seed=", "=3", "seed=[", "seed=.nan", "seed=1e400", "a.b.c=1", "workload="),
        *("workload.x.y=1", "workload[0]=1", "..=1", "seed.x=1", "workload.num_requests=-1", "seed=\x00"),
    ],
)
@pytest.mark.parametrize("command", ["run", "check"])
def test_what_is_no_override(command: str, override: str, vajra: Vajra, small: Path) -> None:
    said = vajra(command, small, "--set", override)
    assert said.code == 2, said
    assert "Traceback" not in said.err
    assert len(said.err) < MOST_WORDS


def test_a_manifest_may_have_fields_of_a_later_version(vajra: Vajra, finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "the-run"
    shutil.copytree(finished, run)
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**manifest, "a_later_field": {"x": 1}}))
    assert vajra("compare", run).code == 0


def test_a_file_to_serve_needs_no_workload(small: Path) -> None:
    from vajra_py.config import load_system
    from vajra_py.plugins import load_registry

    text = small.read_text()
    model = "backend: {engine: {model: tiny, random_weights: true}}\n"
    with_workload = text[: text.index("backend:")] + model + text[text.index("replica:") :]
    without = with_workload[: with_workload.index("workload:")] + model + text[text.index("replica:") :]
    registry = load_registry()
    found = []
    for content in (with_workload, without):
        small.write_text(content)
        found.append(load_system(small, (), registry))
    assert found[0].replica == found[1].replica
    assert found[0].scheduling == found[1].scheduling
