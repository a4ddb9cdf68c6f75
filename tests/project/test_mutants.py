"""The mutation script tells changes that a test notices from those that none does, and leaves the source as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mutant_copies import Copy, Plan, side_by_side
from mutants import Recording, report, sample
from mutations import EQUIVALENT, Mutant, mutants_of

TINY = '''"""Docstring 1."""
__all__ = ["over", "limit"]
START = 5
def over(value: int) -> bool:
    """Return 2."""
    return value > 3
def limit() -> int:
    return 7 - 1
def start() -> int:
    return START
def unused() -> int:
    return -9
'''
TESTS = """from tiny_mutated import limit, over, start
def test_over():
    assert over(4) and not over(3)
def test_limit():
    assert limit() > 0
def test_start():
    assert start() == 5
"""


def project(folder: Path, tests: str) -> Path:
    for name, text in (("tiny_mutated/__init__.py", TINY), ("tests/test_tiny.py", tests)):
        path = folder / "project" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    (folder / "project" / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: .\n    slow: .\n")
    return folder / "project"


def mutate(root: Path, results: Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Run the script on a project with a plan of its own."""
    plan = f"Plan(Path({str(root)!r}), {{'tiny_mutated': 'tiny_mutated'}}, ('tiny_mutated',), ('tests',))"
    arguments = ["--results", str(results), *(f"--{name}={value}" for name, value in options.items())]
    code = f"from pathlib import Path; from mutants import Plan, main; main({arguments!r}, {plan})"
    scripts = Path(__file__).resolve().parents[2] / "benchmarks"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(scripts), *sys.path])}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


def records(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()]


def test_caught_and_survivors_are_told_apart(tmp_path: Path) -> None:
    root, results = project(tmp_path, TESTS), tmp_path / "results.jsonl"

    first = mutate(root, results, workers=2)

    assert first.returncode == 0, first.stderr
    assert {(r["before"], r["after"]): (r["result"], r["by"]) for r in records(results)} == {
        ("value > 3", "(value >= 3)"): ("failed", "tests/test_tiny.py::test_over"),
        ("value > 3", "(value < 3)"): ("failed", "tests/test_tiny.py::test_over"),
        ("3", "4"): ("failed", "tests/test_tiny.py::test_over"),
        ("5", "6"): ("failed", "tests/test_tiny.py::test_start"),
        ("7 - 1", "(7 + 1)"): ("passed", ""),
        ("7", "8"): ("passed", ""),
        ("1", "2"): ("passed", ""),
        ("9", "10"): ("passed", ""),
    }
    assert "caught 4 of 8 (50.0%), 0 of them by time" in first.stdout
    assert "tiny_mutated/__init__.py:8 limit (1 test)\n  - 7\n  + 8" in first.stdout
    assert "tiny_mutated/__init__.py:12 unused (no test)\n  - 9\n  + 10" in first.stdout
    assert (root / "tiny_mutated" / "__init__.py").read_text() == TINY

    # Nothing is tried again, until the tests of a survivor change.
    tried = len(records(results))
    mutate(root, results)
    assert len(records(results)) == tried
    (root / "tests" / "test_more.py").write_text(
        "from tiny_mutated import limit\ndef test_limit():\n    assert limit() == 6\n"
    )
    again = mutate(root, results)
    assert "caught 7 of 8" in again.stdout
    assert [r["by"] for r in records(results)[tried:]] == 3 * ["tests/test_more.py::test_limit"]


def test_a_failing_suite_is_no_catch(tmp_path: Path) -> None:
    done = mutate(project(tmp_path, "def test_fails():\n    assert False\n"), tmp_path / "results.jsonl")
    assert done.returncode != 0
    assert "the tests fail without a mutant" in done.stderr
    assert "test_fails" in done.stderr


@pytest.mark.parametrize(
    ("code", "expected"),
    [("while True: pass", "timeout"), ("raise SystemExit(3)", "failed"), ("1 / 0", "failed"), ("pass", "passed")],
)
def test_how_a_fork_ends(code: str, expected: str, tmp_path: Path) -> None:
    place = Copy(Plan(project(tmp_path, TESTS), {}, (), ()), tmp_path / "copy")

    def work() -> int:
        exec(code)
        return 0

    limit_s = 0.0 if expected == "timeout" else 60.0
    [(_, (result, _))] = side_by_side([place], [("job", lambda copy: copy.run(work, limit_s))])
    assert result == expected


def test_only_tests_that_execute_a_mutant_are_its_tests(tmp_path: Path) -> None:
    source = b"""LIMIT = 3
def f(a):
    if a > 1:
        return min(
            a, 7
        )
    return -4
"""
    found = {mutant.before: mutant for mutant in mutants_of("a.py", source)}
    recording = Recording(
        {"quick": 0.1, "slow": 9.0, "elsewhere": 0.0},
        {"a.py": {3: {"slow", "quick"}, 4: {"slow"}, 7: {"quick"}}, "b.py": {1: {"elsewhere"}}},
        {"a.py": {1, 2}},
    )
    assert recording.tests_of(found["a > 1"]) == ["quick", "slow"]
    assert recording.tests_of(found["7"]) == ["slow"], "the statement's, for a line that is none of its own"
    assert recording.tests_of(found["4"]) == ["quick"]
    assert recording.tests_of(found["3"]) == ["quick", "slow", "elsewhere"], (
        "evaluated at import: the file's come first"
    )
    assert Recording({"a": 1.0}, {}).tests_of(found["4"]) == []
    assert [recording.is_imported(found[text]) for text in ("3", "4")] == [True, False]


def test_an_edit_leaves_the_rest_of_the_sample(tmp_path: Path) -> None:
    source = tmp_path / "source" / "a.py"
    source.parent.mkdir()
    plan = Plan(tmp_path, {}, ("source",), ())
    lines = [f"def f{number}(a):\n    return a > {number}\n" for number in range(40)]

    def drawn(text: str, seed: int = 0) -> set[str]:
        source.write_text(text)
        return {mutant.key for mutant in sample(plan, seed, 60)}

    before, after = drawn("".join(lines)), drawn("# A comment.\n" + "".join(lines[1:]))
    assert len(before) == 60
    assert len(before - after) <= 3
    assert drawn("".join(lines), seed=1) != before


def test_equivalents_are_reported_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def survivor(key: str) -> dict[str, Any]:
        facts = {"file": "a.py", "line": 3, "function": "f", "before": "1", "after": "2", "num_tests": 2}
        return {"key": key, "result": "passed", **facts}

    monkeypatch.setitem(EQUIVALENT, "judged", "The one reader rounds it.")
    shown = report([survivor("judged"), survivor("other"), {**survivor("late"), "result": "timeout"}])
    assert "caught 1 of 2 (50.0%), 1 of them by time; 1 more judged equivalent" in shown
    assert shown.count("  + 2\n  equivalent: The one reader rounds it.") == 1


def test_equivalents_are_mutants_of_the_source(repository_root: Path) -> None:
    files = {key.partition("::")[0] for key in EQUIVALENT}
    possible = {mutant.key for file in files for mutant in mutants_of(file, (repository_root / file).read_bytes())}
    assert EQUIVALENT.keys() <= possible


def changes(source: str) -> set[tuple[str, str]]:
    return {(mutant.before, mutant.after) for mutant in mutants_of("a.py", source.encode())}


def test_each_kind_of_change() -> None:
    source = """
def f(a: int, b: bool = True) -> int | None:
    if a and not b:
        g(a)
    a += 1
    return a - 2
"""
    assert changes(source) == {
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


def test_texts_types_and_assertions_stay() -> None:
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
    assert changes(source) == set()


def test_equal_changes_of_a_function_have_names_of_their_own() -> None:
    found: list[Mutant] = mutants_of("a.py", b"def f(a):\n    return a + 1, a + 1\n")
    assert len({mutant.key for mutant in found}) == len(found) == 4
