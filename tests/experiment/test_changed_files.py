"""Results are reused only while input files and plug-ins are those that they were made with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from vajra_py.config import ExperimentConfig, config_from_mapping
from vajra_py.errors import ConfigError
from vajra_py.experiment.runs import folder
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.plugins import PluginSource, load_registry

HEADER = "arrived_at,num_prompt_tokens,num_output_tokens\n"


def experiment(trace: Path) -> ExperimentConfig:
    trace.write_text(HEADER + "0.0,10,5\n0.5,20,5\n")
    return config_from_mapping(
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


def test_a_run_is_not_reused_once_a_file_that_it_read_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trace = tmp_path / "trace.csv"
    config = experiment(trace)
    first = run_experiment(config)
    assert run_experiment(config).path == first.path
    assert first.requests().num_rows == 2
    trace.write_text(HEADER + "0.0,10,5\n0.5,20,5\n0.6,20,5\n")
    with pytest.raises(ConfigError, match=r"contains results computed before a change of .*trace\.csv"):
        run_experiment(config)
    assert run_experiment(config, overwrite=True).requests().num_rows == 3


def test_a_run_is_not_reused_once_a_plug_in_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = experiment(tmp_path / "trace.csv")

    def run_with(*plugins: PluginSource, **options: Any) -> RunData:
        registry = load_registry()
        registry = structs.replace(registry, plugins=(*registry.plugins, *plugins))
        monkeypatch.setattr(folder, "load_registry", lambda: registry)
        return run_experiment(config, registry=registry, **options)

    before, after, other = (
        PluginSource(name, "1", name, code) for name, code in (("lab", "a"), ("lab", "b"), ("x", "c"))
    )
    run_with(before)
    assert [one["code"] for one in run_with(before, other).manifest["plugins"] if one["package"] == "lab"] == ["a"]
    with pytest.raises(ConfigError, match="contains results computed before a change of the code of lab"):
        run_with(after)
    run_with(after, overwrite=True)
    run_with(after)
    monkeypatch.setattr(folder, "__version__", "99.0")
    with pytest.raises(ConfigError, match="contains results computed before a change of vajra-py"):
        run_with(after)
