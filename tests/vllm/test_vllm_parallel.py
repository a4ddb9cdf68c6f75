"""Tensor parallelism: two processes of vLLM's share every layer, and one scheduler tells both what runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.vllm.test_vllm_serve import DEADLINE_S, OFFLINE, environment


def test_two_ranks_give_the_tokens_of_one(tiny_model: str, tmp_path: Path) -> None:
    script = tmp_path / "offline.py"
    script.write_text(OFFLINE)
    known = environment(tmp_path, VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1")
    runs = []
    for size in (2, 1):
        options = {"scheduler_cls": "vajra_py.vllm.Scheduler", "tensor_parallel_size": size}
        done = subprocess.run(
            [sys.executable, str(script), tiny_model, json.dumps(options)],
            env=known,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        runs.append(json.loads(next(line for line in done.stdout.splitlines() if line.startswith("OUT "))[4:]))
    assert runs[0] == runs[1]
    assert [reason for reason, _ in runs[0]] == ["length"] * 12
