"""Results are reused only while the files that the settings name hold what they were made from."""

from __future__ import annotations

from pathlib import Path

import pytest

from vajra_py.config import config_from_mapping
from vajra_py.errors import ConfigError
from vajra_py.experiment.runs.run import run_experiment

HEADER = "arrived_at,num_prompt_tokens,num_output_tokens\n"


def test_a_run_is_not_reused_once_a_file_that_it_read_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trace = tmp_path / "trace.csv"
    trace.write_text(HEADER + "0.0,10,5\n0.5,20,5\n")
    config = config_from_mapping(
        {
            "version": 1,
            "name": "changing",
            "scheduling": {
                "request_prioritizer": "fcfs",
                "replicaset_scheduler": "round_robin",
                "replica_scheduler": "fixed_chunk",
            },
            "replica": {"max_model_len": 256, "memory": {"num_blocks": 100}},
            "workload": {"type": "csv", "path": str(trace)},
            "backend": {"simulator": {"latency": {"type": "constant", "step_time_s": 0.01}}},
        }
    )
    first = run_experiment(config)
    assert run_experiment(config).path == first.path
    assert first.requests().num_rows == 2
    trace.write_text(HEADER + "0.0,10,5\n0.5,20,5\n0.6,20,5\n")
    with pytest.raises(ConfigError, match=r"contains results computed before these files changed \(.*trace\.csv\)"):
        run_experiment(config)
    assert run_experiment(config, overwrite=True).requests().num_rows == 3
