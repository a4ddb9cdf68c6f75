"""Cost and energy from an experiment's file to its summary and its table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vajra_py import api as vajra
from vajra_py.errors import ConfigError
from vajra_py.experiment.device_figures import devices_of, latency_models
from vajra_py.metrics.comparison.trust import warnings_of
from vajra_py.metrics.definitions import Window
from vajra_py.metrics.summary.costs import ReplicasetDevices
from vajra_py.plugins import load_registry

EXPERIMENT: dict[str, Any] = {
    "version": 1,
    "name": "cost",
    "scheduling": {"request_prioritizer": "fcfs", "replicaset_scheduler": "round_robin", "replica_scheduler": "fixed_chunk"},
    "workload": {
        "type": "synthetic",
        "arrivals": {"type": "poisson", "rate": 4.0},
        "num_requests": 40,
        "prompt_tokens": {"type": "constant", "value": 600},
        "output_tokens": {"type": "constant", "value": 20},
    },
    "backend": {"simulator": {"latency": {"type": "roofline", "model": "llama-3.1-8b", "device": "h100-sxm"}}},
    "output": {"decision_log": False},
}  # fmt: skip


def changed(folder: Path, **costs: Any) -> dict[str, Any]:
    return {**EXPERIMENT, "output": {"dir": str(folder), "decision_log": False}, "costs": costs}


def devices(mapping: dict[str, Any]) -> dict[str, ReplicasetDevices]:
    config = vajra.load(mapping)
    return devices_of(config, latency_models(config, load_registry()))


def test_a_run_says_what_it_cost_and_the_table_shows_it(tmp_path: Path) -> None:
    run = vajra.run(vajra.load(changed(tmp_path)))
    cost, energy = run.summary.value("cost"), run.summary.value("energy")
    hours = run.summary.value("window.duration_s") / 3600
    assert cost["run"] == pytest.approx(2.69 * hours)
    # The run is paid for to its end; what a token costs is the price over what is delivered while requests arrive.
    tokens_per_s = run.summary.value("overall.throughput.output_tokens_per_s")
    assert tokens_per_s == pytest.approx(run.summary.value("overall.offered_requests_per_s") * 20)
    assert cost["per_million_output_tokens"] == pytest.approx(2.69 / 3600 / tokens_per_s * 1e6, rel=1e-6)
    assert 75 < energy["mean_w"] < 700
    markdown = vajra.compare([run]).to_markdown()
    assert "Cost per million output tokens ($)" in markdown
    assert "Energy per output token (J)" in markdown


def test_figures_of_the_file_replace_the_described_ones(tmp_path: Path) -> None:
    mine = {"h100": {"price_per_hour": 10.0, "source": "our contract, 1 May 2026"}}
    config = vajra.load(changed(tmp_path, devices=mine))
    run = vajra.run(config)
    assert run.summary.value("cost.per_hour") == 10.0
    settings = vajra.compare([run])
    assert settings.values["overall"]["cost_per_hour"] == (10.0,)
    from vajra_py.metrics.runs.replications import group_replications

    said = [text for text, _ in warnings_of(group_replications([run]), settings)]
    assert any("our contract, 1 May 2026" in text and "Cost and energy of h100-sxm" in text for text in said)


def test_devices_are_counted_over_parallelism_and_replicas() -> None:
    latency = {
        "type": "roofline",
        "model": "llama-3.1-70b",
        "device": "h200",
        "tensor_parallel": 4,
        "pipeline_parallel": 2,
    }
    mapping = {**EXPERIMENT, "num_replicas": 3, "backend": {"simulator": {"latency": latency}}}  # fmt: skip
    (found,) = devices(mapping).values()
    assert (found.costs.device, found.num_devices, found.num_stages) == ("h200-sxm", 24, 2)


def test_a_model_of_step_times_without_a_device_has_the_one_that_is_named() -> None:
    constant = {
        **EXPERIMENT,
        "replica": {"memory": {"num_blocks": 500}},
        "backend": {"simulator": {"latency": {"type": "constant", "step_time_s": 0.02}}},
    }
    assert devices(constant) == {}
    (found,) = devices({**constant, "costs": {"device": "l4", "devices_per_replica": 2}}).values()
    assert (found.costs.device, found.num_devices, found.price_per_hour(Window(0.0, 1.0))) == (
        "l4",
        2,
        pytest.approx(0.88),
    )


@pytest.mark.parametrize(
    ("costs", "said"),
    [
        ({"devices": {"h1000": {"price_per_hour": 1.0}}}, "costs.devices.h1000: is not a device"),
        ({"devices": {"h100": {"price_per_hour": -1.0}}}, "costs.devices.h100.price_per_hour"),
        ({"devices": {"h100": {"idle_w": 500.0, "decode_w": 100.0}}}, "power must not decrease"),
        ({"pries": 1}, "costs.pries"),
    ],
)
def test_wrong_figures_are_refused_before_anything_runs(tmp_path: Path, costs: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        vajra.run(vajra.load(changed(tmp_path, **costs)))
    assert said in str(error.value)
    assert not list(tmp_path.iterdir())
