"""The suite in random order, and tests that leave a socket open."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

LEAKS = """
import socket

def test_leaks():
    loop = [socket.socket()]
    loop.append(loop)  # collected by the cyclic collector alone

def test_is_innocent():
    assert [object() for _ in range(5000)]
"""


def run(folder: Path, *arguments: str, **environment: str) -> str:
    """pytest over a folder with this suite's conftest and settings."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(folder)]
    command += ["-o", "filterwarnings=error", "-v", *arguments, str(folder / "tests")]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=600, env={**os.environ, **environment}
    )
    return done.stdout


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A folder of tests with the conftest of this one."""
    (tmp_path / "tests" / "serve").mkdir(parents=True)
    (tmp_path / "tests" / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"))
    return tmp_path


def test_a_leaked_socket_is_the_failure_of_the_test_that_leaked_it(suite: Path) -> None:
    (suite / "tests" / "serve" / "test_leaks.py").write_text(LEAKS)
    said = run(suite)
    assert "ResourceWarning: unclosed <socket" in said
    assert "test_leaks.py::test_leaks ERROR" in said or "test_leaks.py::test_leaks FAILED" in said
    assert "test_leaks.py::test_is_innocent PASSED" in said
    assert "1 error" in said or "1 failed" in said


def test_the_order_follows_from_the_seed(suite: Path) -> None:
    for name in "ab":
        tests = "".join(f"def test_{number}(): pass\n" for number in range(6))
        (suite / "tests" / f"test_{name}.py").write_text(tests)

    def order(**environment: str) -> list[str]:
        said = run(suite, **environment)
        return [line.split()[0] for line in said.splitlines() if "PASSED" in line]

    usual = order()
    first, again, other = (order(VAJRA_TEST_ORDER=seed) for seed in ("1", "1", "2"))
    assert first == again != other
    assert sorted(first) == sorted(other) == sorted(usual) != first
    modules = [name.partition("::")[0] for name in first]
    assert modules in (sorted(modules), sorted(modules, reverse=True)), "the tests of a module stay side by side"
