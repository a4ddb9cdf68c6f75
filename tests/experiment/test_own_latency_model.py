"""A latency model from a plug-in package: its description sizes memory, names origin and error, and counts devices."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from vajra_py.config import config_from_mapping
from vajra_py.errors import ConfigError
from vajra_py.experiment.runs.backend import Run
from vajra_py.experiment.runs.run import load_workload, run_experiment
from vajra_py.experiment.runs.simulated import SimulatedRun
from vajra_py.metrics.report.report import render_report
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.plugins import Registry, build_registry
from vajra_py.runtime.support.seeds import SeedTree

PACKAGE = """
    from pydantic import BaseModel, ConfigDict

    from vajra_py.contract.hookspecs import LatencyModelSpec, hookimpl
    from vajra_py.contract.latency import ModelDescription

    class Plain:
        num_stages = 2
        def stage_time_s(self, shape): return 0.005
        def batch_time_s(self, shape): return 0.01

    class Described(Plain):
        asked = 0
        def stage_time_s(self, shape):
            self.asked += 1
            return 0.005
        def describe(self):
            return ModelDescription(
                "calibrated", "bench of lab-7b", {"ttft_s": 0.05, "tpot_s": 0.02}, num_fallback=self.asked,
                device="h100", num_devices=4, max_kv_groups=1,
                kv_blocks=lambda block_size, fraction: int(20_000 * fraction) // block_size,
                kv_bytes_per_token=1000, max_model_len=3000,
            )

    class Config(BaseModel):
        model_config = ConfigDict(extra="forbid")

    @hookimpl
    def vajra_latency_models():
        return [
            LatencyModelSpec("lab_plain", Config, lambda config: Plain(), "Without a description."),
            LatencyModelSpec("lab_described", Config, lambda config: Described(), "With one."),
        ]
"""

EXPERIMENT: dict[str, Any] = {
    "version": 1,
    "preset": "vllm-v1",
    "workload": {
        "type": "synthetic",
        "num_requests": 20,
        "arrivals": {"type": "poisson", "rate": 20.0},
        "prompt_tokens": {"type": "constant", "value": 200},
        "output_tokens": {"type": "constant", "value": 10},
    },
    "output": {"decision_log": False},
}


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """Installed plug-ins, and the package of this test."""
    site = tmp_path / "site"
    info = site / "lab_latency-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "lab_latency.py").write_text(textwrap.dedent(PACKAGE))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-latency\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vajra]\nlab_latency = lab_latency\n")
    monkeypatch.syspath_prepend(str(site))
    yield build_registry(metadata.entry_points(group="vajra"))
    sys.modules.pop("lab_latency", None)


def experiment(kind: str, **replica: Any) -> dict[str, Any]:
    backend = {"simulator": {"latency": {"type": kind}}}
    return {**EXPERIMENT, "backend": backend, **({"replica": replica} if replica else {})}


def ran(mapping: dict[str, Any], registry: Registry, folder: Path) -> RunData:
    return run_experiment(config_from_mapping(mapping, registry=registry), folder=folder, registry=registry)


def test_a_described_model_sizes_memory_and_pipeline(registry: Registry) -> None:
    mapping = experiment("lab_described", memory={"memory_fraction": 0.8, "block_size": 16})
    config = config_from_mapping(mapping, registry=registry)
    run = SimulatedRun(Run(config, registry, load_workload(config), SeedTree(0)))
    limits = run.controller.replicasets["default"].replicas[0].limits
    assert (limits.num_blocks, limits.max_model_len, limits.bytes_per_block) == (1000, 3000, 16_000)
    assert limits.pipeline_stages == 2


def test_its_origin_error_and_devices_are_in_summary_and_report(registry: Registry, tmp_path: Path) -> None:
    run = ran(experiment("lab_described"), registry, tmp_path / "run")
    sentence = str(run.summary.value("step_times.sentence"))
    assert sentence.startswith(
        "calibrated: bench of lab-7b; error of means where it was checked: TTFT 5.0%, TPOT 2.0%; "
    )
    assert run.summary.value("step_times.num_fallback") > 0  # as it was at the end of the run
    assert run.summary.value("cost.per_hour") == pytest.approx(4 * 2.69)
    assert "bench of lab-7b" in render_report([run])


def test_parallelism_that_a_described_model_does_not_cover_is_refused(registry: Registry, tmp_path: Path) -> None:
    memory = {"prefix_cache": {"enabled": False}}
    asked = experiment("lab_described", memory=memory, kv_parallel={"groups": 2, "group_tokens": 1600})
    with pytest.raises(ConfigError, match=r"replica.kv_parallel.groups: .* over 2 KV-parallel groups.*Allowed: 1"):
        ran(asked, registry, tmp_path / "run")
    own = {"role": "mixed", "replica": asked.pop("replica")}
    in_a_pool = {**asked, "replica": {"memory": memory}, "pools": {"mixed": {}, "spread": own}}
    with pytest.raises(ConfigError, match=r"the latency model of default/spread has no times .* over 2 KV-parallel"):
        ran(in_a_pool, registry, tmp_path / "pools")


def test_a_model_without_a_description_works_with_memory_that_is_given(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not know the memory size of a device"):
        ran(experiment("lab_plain"), registry, tmp_path / "unsized")
    run = ran(experiment("lab_plain", memory={"num_blocks": 500}), registry, tmp_path / "run")
    assert run.summary.value("step_times.sentence") == "given: Plain, figures of the experiment's author"
    assert run.summary.value("cost.per_hour") is None
