"""Do the pages tell the truth? Every YAML, Python and `vajra` block is executed, page by page, in an empty folder.

Blocks of a page build on each other: Python blocks share their names, files that one block writes are there for the next. Workloads are cut to a few
requests. Comments right above a block change what is done with it:

    <!-- not run: REASON -->              nothing ("not executed" says the same)
    <!-- file: NAME -->                   it is written to a file of the page's folder
    <!-- part of an experiment -->        YAML that completes a small experiment
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

import vajra_py.api as api
from vajra_py.cli.main import main
from vajra_py.config import expand_sweep
from vajra_py.plugins import discovery

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w-]*)\s*$")
COMMENT = re.compile(r"^\s*<!--\s*(?P<text>.*?)\s*-->\s*$")
PASSIVE = {"", "csv", "diff", "html", "http", "json", "mermaid", "text", "toml"}
"""Languages of blocks that only show something."""
MAX_REQUESTS = 12
PART = """
version: 1
name: part
scheduling: {request_prioritizer: fcfs, replicaset_scheduler: round_robin, replica_scheduler: {policy: fixed_chunk, params: {chunk_size: 512}}}
workload: {type: profile, profile: azure2023_conv, num_requests: 10, rate: 4}
backend: {simulator: {latency: {type: roofline, model: llama-3.1-8b, device: a100-80gb-sxm}}}
"""


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    comments: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_skipped(self) -> bool:
        return any("not run" in one or "not executed" in one for one in self.comments)

    @property
    def file(self) -> str | None:
        names = [one.partition(":")[2].strip() for one in self.comments if one.startswith("file:")]
        return names[0] if names else None


def blocks_of(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        opened = FENCE.match(lines[at])
        if opened is None:
            at += 1
            continue
        first = at
        indent = len(opened["indent"])
        at += 1
        body: list[str] = []
        while not lines[at].strip().startswith("```"):
            body.append(lines[at][indent:])
            at += 1
        at += 1
        yield Block(page, first + 1, opened["language"], "\n".join(body) + "\n", tuple(_comments(lines, first)))


def _comments(lines: list[str], fence: int) -> Iterator[str]:
    at = fence - 1
    while at >= 0 and (not lines[at].strip() or COMMENT.match(lines[at])):
        found = COMMENT.match(lines[at])
        if found:
            yield found["text"]
        at -= 1


def small(text: str) -> str:
    """Experiments with a few requests each."""
    return re.sub(
        r"(num_requests: |num_requests\": )(\d+)", lambda found: f"{found[1]}{min(int(found[2]), MAX_REQUESTS)}", text
    )


def plain(text: str) -> Mapping[str, Any]:
    loaded = YAML(typ="safe", pure=True).load(text)
    assert isinstance(loaded, dict), "a YAML block is a mapping"
    return loaded


class Folder:
    """Where a page's blocks are executed."""

    def __init__(self, path: Path, install: Callable[[Path], None]) -> None:
        self.path = path
        self.install = install
        self.names: dict[str, Any] = {"__name__": "__page__"}
        shutil.copytree(
            ROOT / "examples", path / "examples", ignore=shutil.ignore_patterns(".*", "__pycache__", "plugin_template")
        )
        for file in (path / "examples").glob("*.yaml"):
            file.write_text(small(file.read_text(encoding="utf-8")), encoding="utf-8")
        rows = [f"2023-11-16 18:15:{second:02d}.5000000,{100 + 37 * second},{5 + second}" for second in range(12)]
        header = "TIMESTAMP,ContextTokens,GeneratedTokens"
        (path / "AzureLLMInferenceTrace_conv.csv").write_text("\n".join([header, *rows, ""]))
        (path / "first.yaml").write_text(small(first_experiment()))

    def execute(self, block: Block) -> None:
        if block.is_skipped:
            return
        if block.file is not None:
            (self.path / block.file).write_text(small(block.text), encoding="utf-8")
        if block.language == "yaml":
            self._yaml(block)
        elif block.language == "python":
            code = compile("\n" * block.line + small(block.text), str(block.page), "exec")
            exec(code, self.names)
        elif block.language == "console":
            for command in commands_of(block.text):
                self._command(command)
        else:
            allowed = f"Allowed: yaml, python, console, {', '.join(sorted(PASSIVE))}"
            assert block.language in PASSIVE, f"blocks are not written in {block.language!r}. {allowed}"

    def _yaml(self, block: Block) -> None:
        given = plain(small(block.text))
        if "part of an experiment" in block.comments:
            config = api.load({**plain(PART), **given})
            for _, point in expand_sweep(config):
                assert len(api.load_workload(point)) > 0
            return
        assert "version" in given, "YAML that is not a whole experiment needs <!-- part of an experiment --> above it"
        config = api.load(given)
        if block.file is None and config.backend.kind == "simulator":
            result = api.sweep(config, workers=1, overwrite=True)
            assert not result.failures
            assert all(run.is_finished for run in result.runs)

    def _command(self, command: str) -> None:
        words = [word for part in shlex.split(command, comments=True) for word in self._expanded(part)]
        if not words:
            return
        program, *arguments = words
        if program == "vajra":
            with pytest.raises(SystemExit) as exit_:
                main(arguments)
            assert exit_.value.code == 0, f"exit code {exit_.value.code}: {command}"
        elif program == "pip":
            for package in (word for word in arguments if (self.path / word / "pyproject.toml").is_file()):
                self.install(self.path / package)
        elif program == "make":
            assert f"\n{arguments[0]}:" in (ROOT / "Makefile").read_text(encoding="utf-8"), command
        elif program == "python":
            assert (ROOT / arguments[0]).is_file(), command
        else:
            assert program == "source", f"nothing here executes {command!r}"

    def _expanded(self, word: str) -> list[str]:
        """Shell patterns become the files that they match."""
        if "*" not in word:
            return [word]
        found = sorted(str(path.relative_to(self.path)) for path in self.path.glob(word))
        assert found, f"nothing matches {word}"
        return found


def first_experiment() -> str:
    """The experiment of the quickstart, which other pages refer to."""
    blocks = blocks_of(ROOT / "docs" / "quickstart.md")
    return next(block.text for block in blocks if block.file == "first.yaml")


def commands_of(text: str) -> list[str]:
    """The commands of a console block: what follows `$ `, or every line where none does."""
    lines = text.replace("\\\n", " ").splitlines()
    marked = [line[2:] for line in lines if line.startswith("$ ")]
    return marked or [line for line in lines if line.strip()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # sweeps in this process

    def install(package: Path) -> None:
        """As `pip install -e` would: the sources on the path, the entry points beside them."""
        project = (package / "pyproject.toml").read_text(encoding="utf-8")
        name = re.search(r'^name = "(.*)"$', project, re.MULTILINE)
        entry = re.search(r"^\[project.entry-points.vajra\]\n(.*)$", project, re.MULTILINE)
        assert name is not None
        assert entry is not None
        info = package / "src" / f"{name[1].replace('-', '_')}-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name[1]}\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(f"[vajra]\n{entry[1].replace(chr(34), '')}\n")
        monkeypatch.syspath_prepend(str(package / "src"))
        discovery._cached_registry.cache_clear()  # a process that is started after the installation finds it by itself

    yield Folder(tmp_path, install)
    discovery._cached_registry.cache_clear()
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "") or ""):
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_of_the_page_runs(page: Path, folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks_of(page):
        try:
            folder.execute(block)
        except BaseException as error:
            out, err = capsys.readouterr()
            raise AssertionError(f"{block}: {type(error).__name__}: {error}\n{out[-2000:]}{err[-2000:]}") from error


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_not_run_says_why(page: Path) -> None:
    for block in blocks_of(page):
        if block.is_skipped:
            reason = " ".join(block.comments).replace("not run:", "").replace("not executed", "")
            assert len(reason.split()) >= 3, f"{block}: say why"
