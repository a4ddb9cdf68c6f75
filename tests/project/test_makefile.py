"""The Makefile keeps its word: every target it lists runs something that exists, and the documents name no other."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = dict(re.findall(r"^([a-z][a-z-]*):[^\n]*?## ([^\n]+)$", MAKEFILE, flags=re.MULTILINE))


def recipe(target: str) -> list[str]:
    """The command lines below a target."""
    match = re.search(rf"^{target}:[^\n]*\n((?:\t[^\n]*\n)*)", MAKEFILE, flags=re.MULTILINE)
    assert match is not None
    return [line.strip() for line in match.group(1).splitlines()]


def test_help_lists_every_target() -> None:
    phony = re.search(r"^\.PHONY: (.+)$", MAKEFILE, flags=re.MULTILINE)
    assert phony is not None
    assert set(phony.group(1).split()) == set(TARGETS)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_alone_prints_the_help() -> None:
    done = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for name, text in TARGETS.items():
        assert re.search(rf"^  make {name} +{re.escape(text)}$", done.stdout, flags=re.MULTILINE), name


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_what_a_target_runs_exists(target: str) -> None:
    for line in recipe(target):
        script = re.match(r"\$\(PY\) (?:-P )?(?:-m (?P<module>[\w.]+)|(?P<file>[\w/]+\.py))", line)
        if script is None:
            continue
        if script["module"]:
            assert importlib.util.find_spec(script["module"]) is not None, line
        else:
            assert (ROOT / script["file"]).is_file(), line


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_documents_name_existing_targets(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    # At the start of a line of a code block, or between backticks: "make" in running text is a verb.
    named = set(re.findall(r"(?:^\s*(?:\$ )?|`|&& )make ([a-z][a-z-]*)", text, flags=re.MULTILINE))
    assert named, f"{document} tells no one how to begin"
    assert named <= set(TARGETS)


def test_continuous_integration_runs_the_same_target() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111, ".ci/run is not executable"
    for target in ("test", "test-vllm"):
        assert re.search(rf"^make (?:--no-print-directory )?{target}$", script.read_text(), flags=re.MULTILINE)


def test_no_variable_is_given_twice() -> None:
    given = re.findall(r"^([A-Z_]+) *[?:]?=", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(given) == len(set(given))


def test_without_the_wheel_of_vllm_its_targets_say_so_and_do_nothing(tmp_path: Path) -> None:
    for name in ("Makefile", "constraints.txt", "constraints-vllm.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "empty").mkdir()
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "empty"), "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(
        [
            "make",
            "--no-print-directory",
            "vllm",
            "test-vllm",
            f"PYTHON={sys.executable}",
            "VLLM_PYTHON=.venv-vllm/bin/python",
        ],
        cwd=tmp_path,
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "skipped" in done.stdout
    assert "No matching distribution" in done.stdout
