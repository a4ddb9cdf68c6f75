"""Can one find one's way from `vajra --help`, at once?"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vajra_py.cli.main import _COMMANDS

HEAVY = ("numpy", "pandas", "pyarrow", "matplotlib", "pydantic", "rich", "ruamel", "torch", "triton", "transformers")
PROGRAM = """
import json, sys
from vajra_py.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    code = end.code
print(json.dumps([code, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def modules_after(*arguments: str, folder: Path) -> set[str]:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    code, names = json.loads(done.stdout.splitlines()[-1])
    assert code == 0, done.stderr
    return set(names)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["run", "--help"], ["atlas", "--help"], ["check", "-h"]]
)
def test_help_loads_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    assert not modules_after(*arguments, folder=tmp_path).intersection(HEAVY)


def test_a_simulation_from_the_command_line_leaves_torch_alone(small: Path, tmp_path: Path) -> None:
    loaded = modules_after("run", str(small), "--quiet", folder=tmp_path)
    assert not loaded.intersection({"torch", "triton", "transformers", "vajra_kernels"})
    assert "numpy" in loaded


def test_help_lists_every_command(vajra: Callable[..., Any]) -> None:
    said = vajra("--help")
    assert said.code == 0
    for name in _COMMANDS:
        assert f"  {name} " in said.out


@pytest.mark.parametrize("command", sorted(_COMMANDS))
def test_every_command_explains_itself(command: str, vajra: Callable[..., Any]) -> None:
    said = vajra(command, "--help")
    assert said.code == 0
    assert said.out.startswith(f"Usage: vajra {command}")
    assert len(said.out.splitlines()) > 4


def test_an_unknown_command_is_guessed(vajra: Callable[..., Any]) -> None:
    said = vajra("comparre", "x")
    assert said.code == 2
    assert "no such command ('comparre'). Did you mean 'compare'?" in said.err


def test_an_unknown_option_is_a_mistake_of_the_user(vajra: Callable[..., Any], small: Path) -> None:
    said = vajra("run", small, "--workerz", "2")
    assert said.code == 2
    assert "--workerz" in said.err
