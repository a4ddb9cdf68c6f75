"""A simulation needs no tensor library: in a fresh process none is loaded, whatever is simulated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import json, sys
from vajra_py.api import load, run, compare
settings = json.loads(sys.argv[1])
result = run(load(settings))
assert result.requests().num_rows == 12
compare([result]).to_markdown()
heavy = ("torch", "triton", "transformers", "vajra_kernels", "vajra_py.engine")
print(json.dumps(sorted(name for name in sys.modules if name in heavy)))
"""


@pytest.mark.parametrize(
    ("latency", "replica"),
    [
        ({"type": "constant", "step_time_s": 0.01}, {"memory": {"num_blocks": 60}, "max_model_len": 900}),
        ({"type": "roofline", "model": "llama-3.1-8b", "device": "a100-80gb-sxm"}, {}),
    ],
)
def test_simulating_leaves_tensor_libraries_alone(tmp_path: Path, latency: dict[str, object], replica: object) -> None:
    settings = {
        "version": 1,
        "scheduling": {
            "request_prioritizer": "lrs",
            "replicaset_scheduler": "pull",
            "replica_scheduler": "dynamic_chunk",
        },
        "replica": replica,
        "num_replicas": 2,
        "workload": {
            "type": "profile",
            "profile": "azure2023_conv",
            "num_requests": 12,
            "max_total_tokens": 800,
            "too_long": "clip",
        },
        "backend": {"simulator": {"latency": latency}},
        "output": {"dir": str(tmp_path)},
    }
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(settings)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
