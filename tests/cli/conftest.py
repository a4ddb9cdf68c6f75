"""Fixtures to run commands, and an experiment that takes a fraction of a second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from vajra_py.cli.main import main

SMALL = """\
version: 1
name: small
seed: 3
scheduling:
  request_prioritizer: fcfs
  replicaset_scheduler: round_robin
  replica_scheduler: {policy: fixed_chunk, params: {chunk_size: 128}}
workload:
  type: synthetic
  arrivals: {type: poisson, rate: 20}
  num_requests: 12
  prompt_tokens: {type: uniform, min: 20, max: 300}
  output_tokens: {type: uniform, min: 2, max: 20}
backend:
  simulator:
    latency: {type: constant, step_time_s: 0.01}
replica: {max_model_len: 4096, memory: {num_blocks: 400}}
"""


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


@pytest.fixture
def vajra(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Said]:
    """`vajra` in an empty folder of its own, which becomes the current one; sweeps stay in this process without `--workers`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> Said:
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main([str(one) for one in arguments])
        out, err = capfd.readouterr()
        code = exit_.value.code
        assert isinstance(code, int)
        return Said(code, out, err)

    return run


@pytest.fixture(scope="session")
def small_text() -> str:
    """Text of a small experiment's file."""
    return SMALL


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The file of a small experiment."""
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path
