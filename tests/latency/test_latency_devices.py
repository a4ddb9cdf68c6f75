from __future__ import annotations

import json
import pickle

import pytest

from vajra_py.errors import ConfigError
from vajra_py.latency import DeviceConfig, device_names, device_sources, load_device


def test_the_described_devices_have_the_figures_of_their_data_sheets() -> None:
    figures = {name: load_device(name) for name in device_names()}
    older = {"a100-80gb-sxm", "cpu-epyc-7763", "h100-sxm", "h200-sxm", "l4"}
    assert set(figures) == older | {"b200-sxm", "l40s", "rtx-4090", "rtx-pro-6000"}
    peaks = {
        name: (device.peak_flops["bfloat16"] / 1e12, device.memory_bandwidth / 1e12) for name, device in figures.items()
    }
    assert peaks["a100-80gb-sxm"] == (312.0, 2.039)
    assert peaks["h100-sxm"] == (989.0, 3.35)
    assert peaks["h200-sxm"] == (989.0, 4.8)
    assert peaks["l4"] == (121.0, 0.3)
    assert peaks["b200-sxm"] == (2250.0, 8.0)
    assert peaks["l40s"] == (362.05, 0.864)
    assert peaks["rtx-4090"] == (165.2, 1.008)
    assert peaks["rtx-pro-6000"] == (504.0, 1.597)
    assert "fp8" not in figures["a100-80gb-sxm"].peak_flops


@pytest.mark.parametrize("name", device_names())
def test_every_figure_has_a_source_and_every_share_is_one(name: str) -> None:
    device, sources = load_device(name), device_sources(name)
    assert set(sources) | {"name", "priced_as"} == set(device.__struct_fields__)
    assert all(len(source) >= len("assumption") for source in sources.values())
    shares = [
        *device.compute_fraction.values(),
        device.attention_fraction,
        device.bandwidth_fraction,
        device.link_fraction,
    ]
    assert all(0 < share <= 1 for share in shares)
    assert set(device.compute_fraction) == set(device.peak_flops)


def test_short_names_and_any_case_work() -> None:
    assert load_device("A100") == load_device("a100-80gb-sxm")
    assert load_device("H200").memory_bandwidth == 4.8e12
    assert load_device("cpu").name == "cpu-epyc-7763"
    with pytest.raises(ConfigError, match=r"no such device \('h10'\).*Did you mean 'h100'"):
        load_device("h10")


def test_a_shipped_device_can_be_changed() -> None:
    device = load_device({"base": "h100", "name": "capped", "memory_bandwidth": 2e12, "compute_fraction": 0.5})
    assert (device.name, device.memory_bandwidth) == ("capped", 2e12)
    assert set(device.compute_fraction.values()) == {0.5}
    with pytest.raises(ConfigError, match="compute_fraction: has no figure for"):
        load_device({"base": "h100", "compute_fraction": {}})
    assert device.peak_flops == load_device("h100").peak_flops


def test_a_device_from_nothing_needs_every_figure() -> None:
    whole = {
        "name": "mine",
        "peak_flops": {"bfloat16": 1e14},
        "compute_fraction": 0.7,
        "attention_fraction": 0.5,
        "memory_bandwidth": 1e12,
        "bandwidth_fraction": 0.8,
        "memory_bytes": 1 << 36,
        "link_bandwidth": 1e11,
        "link_fraction": 0.5,
        "link_latency_s": 1e-5,
        "host_link_bandwidth": 2e10,
        "kernel_latency_s": 3e-6,
        "step_overhead_s": 1e-3,
    }
    assert load_device(whole).attainable_bandwidth == pytest.approx(8e11)
    del whole["link_fraction"], whole["memory_bytes"]
    with pytest.raises(ConfigError) as caught:
        load_device(whole)
    assert [problem.where for problem in caught.value.problems] == ["device.memory_bytes", "device.link_fraction"]


def test_wrong_figures_are_named_all_together() -> None:
    with pytest.raises(ConfigError) as caught:
        load_device({"base": "l4", "memory_bandwith": 3, "link_fraction": 2, "memory_bandwidth": -1})
    text = str(caught.value)
    assert "device.memory_bandwith: is not known. Did you mean 'memory_bandwidth'?" in text
    assert "device.link_fraction" in text
    assert "device.memory_bandwidth" in text
    with pytest.raises(
        ConfigError, match=r"device\.memory_bytes: Input should be less than or equal to 9223372036854775807"
    ):
        load_device({"base": "l4", "memory_bytes": 10**400})
    with pytest.raises(ConfigError, match=r"unknown dtype \('bf16'\)"):
        load_device({"base": "l4", "peak_flops": {"bf16": 1e12}})


def test_devices_cross_process_boundaries() -> None:
    device = load_device("l4")
    assert pickle.loads(pickle.dumps(device)) == device
    assert json.loads(json.dumps(DeviceConfig(base="l4").model_dump()))["base"] == "l4"
