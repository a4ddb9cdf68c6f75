"""Triton's interpreter decides at import, so the interpreted checks run in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import triton

FOLDER = Path(__file__).parent / "interpreted"


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "check_attention.py",
        "check_memory.py",
        "check_public.py",
        "check_large.py",
        "check_layer.py",
        "check_sampling.py",
        pytest.param("check_gpu_programs.py", marks=pytest.mark.long),
    ],
)
def test_interpreted_kernels_equal_their_references(name: str) -> None:
    if version(triton.__version__) < (3, 9) and version(np.__version__) >= (2, 4):
        pytest.skip(f"the interpreter of Triton {triton.__version__} cannot loop with numpy {np.__version__}")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(FOLDER / name)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout
