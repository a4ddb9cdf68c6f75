"""The mutation script finds the change that a test notices, the one that none does, and leaves the source as it is."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

TINY = '''"""Docstring 1."""
__all__ = ["over", "limit"]
def over(value: int) -> bool:
    """Return 2."""
    return value > 3
def limit() -> int:
    return 7
'''


@pytest.fixture
def mutants(repository_root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", repository_root / "benchmarks" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutants", module)
    spec.loader.exec_module(module)
    return module


def changes(mutants: ModuleType, source: str) -> set[tuple[str, str]]:
    return {(mutant.before, mutant.after) for mutant in mutants.mutants_of("a.py", source.encode())}


def test_caught_and_survivor_are_told_apart(
    mutants: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "project" / "tiny_mutated"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(TINY)
    tests = tmp_path / "project" / "tests"
    tests.mkdir()
    (tests / "test_tiny.py").write_text(
        "from tiny_mutated import limit, over\n"
        "def test_over():\n    assert over(4) and not over(3)\n"
        "def test_limit():\n    assert limit() > 0\n"
    )
    plan = mutants.Plan(tmp_path / "project", {"tiny_mutated": "tiny_mutated"}, {"tiny_mutated": ("tests",)})
    results = tmp_path / "results.jsonl"

    mutants.main(["--results", str(results)], plan)

    found = {(r["before"], r["after"]): r["result"] for r in map(json.loads, results.read_text().splitlines())}
    assert found == {
        ("value > 3", "(value >= 3)"): "failed",
        ("value > 3", "(value < 3)"): "failed",
        ("3", "4"): "failed",
        ("7", "8"): "passed",
    }
    shown = capsys.readouterr().out
    assert "caught 3 of 4 (75.0%)" in shown
    assert "tiny_mutated/__init__.py:7 limit\n  - 7\n  + 8" in shown
    assert (package / "__init__.py").read_text() == TINY

    # Nothing is tried again, until the tests of a survivor change.
    before = results.read_text()
    mutants.main(["--results", str(results)], plan)
    assert results.read_text() == before
    (tests / "test_more.py").write_text("from tiny_mutated import limit\ndef test_limit():\n    assert limit() == 7\n")
    capsys.readouterr()
    mutants.main(["--results", str(results)], plan)
    assert "caught 4 of 4" in capsys.readouterr().out
    assert len(results.read_text().splitlines()) == 5


def test_a_failing_suite_is_no_catch(mutants: ModuleType, tmp_path: Path) -> None:
    for folder, text in (("tiny_failing", TINY), ("tests", "def test_fails():\n    assert False\n")):
        (tmp_path / "project" / folder).mkdir(parents=True)
        name = "__init__.py" if folder == "tiny_failing" else "test_tiny.py"
        (tmp_path / "project" / folder / name).write_text(text)
    plan = mutants.Plan(tmp_path / "project", {"tiny_failing": "tiny_failing"}, {"tiny_failing": ("tests",)})
    with pytest.raises(SystemExit, match="the tests fail without a mutant"):
        mutants.main(["--results", str(tmp_path / "results.jsonl")], plan)


def test_each_kind_of_change(mutants: ModuleType) -> None:
    source = """
def f(a: int, b: bool = True) -> int | None:
    if a and not b:
        g(a)
    a += 1
    return a - 2
"""
    assert changes(mutants, source) == {
        ("True", "False"),
        ("a and not b", "(a or not b)"),
        ("not b", "(b)"),
        ("g(a)", "pass"),
        ("a += 1", "a -= 1"),
        ("1", "2"),
        ("return a - 2", "return None"),
        ("a - 2", "(a + 2)"),
        ("2", "3"),
    }


def test_texts_types_and_assertions_stay(mutants: ModuleType) -> None:
    source = """
__all__ = [1]
x: Literal[1]
def f(a: Literal[1]) -> Literal[2]:
    "1 + 1"
    logger.info("a", 1)
    assert a == 1
    if b:
        raise ValueError("a" + str(1))
"""
    assert changes(mutants, source) == set()
