"""Cost and energy of a run: by hand, with several replicasets, and where figures are missing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vajra_py.latency.hardware.device_costs import DeviceCosts, DevicePower
from vajra_py.metrics.summary.costs import ReplicasetDevices, cost_sections
from vajra_py.metrics.tables.steps import StepRow, StepsBuilder

POWER = DevicePower(idle_w=50, decode_w=200, prefill_w=400, saturating_tokens=101)
DEVICE = DeviceCosts("gpu", 3.6, POWER, {"price_per_hour": "here"})


def steps(*rows: tuple[str, float, float, int, int]) -> pa.Table:
    """Rows of (replicaset, formed, duration, decode tokens, prefill tokens)."""
    builder = StepsBuilder()
    for i, (name, formed_at, duration_s, decodes, prefill) in enumerate(rows):
        builder.append(
            StepRow(name, 0, i, formed_at, duration_s, decodes, int(prefill > 0), decodes, prefill, 0, 1, 0, 9, 0.1, 0, 0)
        )  # fmt: skip
    return builder.to_table()


def summary(
    duration_s: float = 100.0,
    requests: float = 2.0,
    output: float = 50.0,
    prompt: float = 150.0,
    last_arrival_at: float | None = None,
) -> Any:
    throughput = {"requests_per_s": requests, "output_tokens_per_s": output, "prompt_tokens_per_s": prompt}
    window, rates = {"start_s": 0.0, "end_s": duration_s}, {"last_arrival_at": last_arrival_at}
    return {"window": window, "rates": rates, "overall": {"throughput": throughput}}


def test_cost_is_the_price_of_all_devices_over_the_window() -> None:
    two_of_four = {"default": ReplicasetDevices(DEVICE, devices_per_replica=4, num_replicas=2)}
    cost = cost_sections(two_of_four, summary(), steps())["cost"]
    assert cost["per_hour"] == pytest.approx(8 * 3.6)
    assert cost["run"] == pytest.approx(8 * 3.6 * 100 / 3600)
    assert cost["per_request"] == pytest.approx(0.8 / 200)
    assert cost["per_million_output_tokens"] == pytest.approx(0.8 / 5000 * 1e6)
    assert cost["per_million_tokens"] == pytest.approx(0.8 / 20000 * 1e6)
    assert cost["devices"]["default"]["count"] == 8


def test_energy_is_that_of_the_steps_and_idle_for_the_rest() -> None:
    one = {"default": ReplicasetDevices(DEVICE, 1, 1)}
    rows = steps(("default", 0.0, 10.0, 1, 0), ("default", 10.0, 10.0, 51, 0), ("default", 20.0, 10.0, 10, 500))
    energy = cost_sections(one, summary(), rows)["energy"]
    joules = 10 * 200 + 10 * 300 + 10 * 400 + 70 * 50
    assert energy["run_kwh"] == pytest.approx(joules / 3.6e6)
    assert energy["mean_w"] == pytest.approx(joules / 100)
    assert energy["per_output_token_j"] == pytest.approx(joules / 5000)
    assert energy["per_token_j"] == pytest.approx(joules / 20000)
    assert energy["per_request_j"] == pytest.approx(joules / 200)


def test_only_the_window_counts() -> None:
    one = {"default": ReplicasetDevices(DEVICE, 1, 1)}
    rows = steps(("default", -5.0, 10.0, 1, 0), ("default", 95.0, 10.0, 1, 0), ("default", 200.0, 5.0, 1, 0))
    energy = cost_sections(one, summary(), rows)["energy"]
    assert energy["run_kwh"] * 3.6e6 == pytest.approx(10 * 200 + 90 * 50)


def test_a_run_pays_for_its_drain_and_a_token_does_not() -> None:
    one = {"default": ReplicasetDevices(DEVICE, 1, 1)}
    rows = steps(("default", 0.0, 50.0, 51, 0), ("default", 50.0, 50.0, 1, 0))
    short, long = (cost_sections(one, summary(end, last_arrival_at=50.0), rows) for end in (100.0, 400.0))
    assert long["cost"]["run"] == pytest.approx(4 * short["cost"]["run"])
    assert long["energy"]["run_kwh"] > short["energy"]["run_kwh"] * 1.5
    assert long["cost"]["per_million_output_tokens"] == short["cost"]["per_million_output_tokens"]
    assert long["energy"]["mean_w"] == short["energy"]["mean_w"] == pytest.approx(300)
    assert long["energy"]["per_output_token_j"] == pytest.approx(300 / 50)


def test_a_step_of_a_pipeline_occupies_one_stage_at_a_time() -> None:
    rows = steps(("default", 0.0, 10.0, 1, 0), ("default", 5.0, 10.0, 1, 0))
    piped = {"default": ReplicasetDevices(DEVICE, 2, 1, num_stages=2)}
    energy = cost_sections(piped, summary(), rows)["energy"]
    assert energy["run_kwh"] * 3.6e6 == pytest.approx(20 * 200 + 180 * 50)


def test_replicasets_of_several_devices_add_up() -> None:
    cheap = DeviceCosts("small", 1.0, DevicePower(10, 20, 30, 100))
    both = {"a": ReplicasetDevices(DEVICE, 1, 1), "b": ReplicasetDevices(cheap, 1, 3)}
    found = cost_sections(both, summary(), steps(("a", 0.0, 10.0, 1, 0), ("b", 0.0, 10.0, 1, 0)))
    assert found["cost"]["per_hour"] == pytest.approx(6.6)
    by_replicaset = found["energy"]["by_replicaset_kwh"]
    assert by_replicaset["a"] * 3.6e6 == pytest.approx(10 * 200 + 90 * 50)
    assert by_replicaset["b"] * 3.6e6 == pytest.approx(10 * 20 + 290 * 10)
    assert found["energy"]["run_kwh"] == pytest.approx(sum(by_replicaset.values()))


@pytest.mark.parametrize("missing", ["price", "power"])
def test_what_one_replicaset_does_not_know_the_run_does_not_know(missing: str) -> None:
    unknown = DeviceCosts("odd", None if missing == "price" else 1.0, None if missing == "power" else POWER)
    both = {"a": ReplicasetDevices(DEVICE, 1, 1), "b": ReplicasetDevices(unknown, 1, 1)}
    found = cost_sections(both, summary(), steps(("a", 0.0, 1.0, 1, 0), ("b", 0.0, 1.0, 1, 0)))
    assert (found["cost"]["run"] is None) == (missing == "price")
    assert (found["energy"]["run_kwh"] is None) == (missing == "power")


def test_an_idle_replicaset_draws_idle_power() -> None:
    both = {"a": ReplicasetDevices(DEVICE, 1, 1), "b": ReplicasetDevices(DEVICE, 1, 2)}
    found = cost_sections(both, summary(), steps(("a", 0.0, 1.0, 1, 0)))["energy"]
    assert found["by_replicaset_kwh"]["b"] * 3.6e6 == pytest.approx(2 * 100 * POWER.idle_w)
    assert found["run_kwh"] == pytest.approx(sum(found["by_replicaset_kwh"].values()))


def test_nothing_completed_has_a_cost_and_no_cost_a_request() -> None:
    found = cost_sections({"default": ReplicasetDevices(DEVICE, 1, 1)}, summary(100, 0, 0, 0), steps())
    assert found["cost"]["run"] > 0
    assert found["cost"]["per_request"] is None
    assert found["energy"]["run_kwh"] is None  # no steps were kept


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
def test_power_rises_with_the_tokens_and_stays_between_its_figures(tokens: list[int]) -> None:
    power = POWER.of_steps(np.array(sorted(tokens)))
    assert (np.diff(power) >= 0).all()
    assert power.min() >= POWER.decode_w
    assert power.max() <= POWER.prefill_w
