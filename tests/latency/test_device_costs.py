"""Prices and power of the described devices, and a user's changes to them."""

from __future__ import annotations

import pytest

from vajra_py.latency import RooflineConfig, device_names
from vajra_py.latency.hardware.catalog import read_device_file
from vajra_py.latency.hardware.device_costs import POWER_FIELDS, DeviceCosts, device_costs


@pytest.mark.parametrize("name", device_names())
def test_every_figure_has_a_source_and_every_price_a_date(name: str) -> None:
    costs, raw = device_costs(name), read_device_file(name).get("operation", {})
    assert set(costs.sources) == set(raw)
    assert all(len(source) >= len("assumption") for source in costs.sources.values())
    if costs.price_per_hour is not None:
        assert costs.price_per_hour > 0
        assert raw["price_per_hour"]["date"].endswith(("2025", "2026"))
    if costs.power is not None:
        assert 0 < costs.power.idle_w < costs.power.decode_w < costs.power.prefill_w
        assert costs.power.saturating_tokens > 1


def test_a_gpu_has_a_price_and_power_and_a_stranger_nothing() -> None:
    assert device_costs("H100") == device_costs("h100-sxm")
    assert device_costs("h100").power is not None
    assert device_costs("tpu-v9") == DeviceCosts("tpu-v9")


def test_given_figures_replace_those_of_the_description_and_name_their_source() -> None:
    known = device_costs("a100")
    changed = known.changed({"price_per_hour": 0.9, "idle_w": 40.0}, "our contract, May 2026")
    assert changed.price_per_hour == 0.9
    assert changed.power is not None
    assert known.power is not None
    assert (changed.power.idle_w, changed.power.prefill_w) == (40.0, known.power.prefill_w)
    assert changed.sources["price_per_hour"] == changed.sources["idle_w"] == "our contract, May 2026"
    assert changed.sources["prefill_w"] == known.sources["prefill_w"]


def test_power_of_a_stranger_needs_every_figure() -> None:
    partly = DeviceCosts("own").changed({"idle_w": 10.0}, "measured")
    assert partly.power is None
    whole = DeviceCosts("own").changed(dict.fromkeys(POWER_FIELDS, 10.0), "measured")
    assert whole.power is not None


def test_changes_to_a_described_device_cost_what_it_costs() -> None:
    def priced_as(device: object) -> str | None:
        return RooflineConfig.model_validate({"device": device}).build().describe().device

    assert priced_as("h100") == "h100-sxm"
    assert priced_as({"base": "h100", "name": "capped"}) == "h100"
