"""The two GPU commands: what they say without a GPU, and that the check passes where there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["gpu_check", "gpu_bench"])
def test_without_a_gpu_one_line_and_code_2(name: str, repository_root: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(repository_root / "benchmarks" / f"{name}.py"),
        "--output",
        str(tmp_path / "out.json"),
    ]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith(f"{name}: torch ")
    assert "sees no CUDA device" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


@pytest.mark.gpu
@pytest.mark.slow
def test_kernels_are_right_on_this_gpu(repository_root: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    command = [sys.executable, str(repository_root / "benchmarks" / "gpu_check.py"), "--output", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert all(record["passed"] for record in json.loads(path.read_text())["checks"])
