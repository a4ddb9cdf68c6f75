from __future__ import annotations

from dataclasses import dataclass
from math import exp, log
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vajra_py.contract.latency import LengthEstimate, OutputLengthPredictor
from vajra_py.errors import ConfigError
from vajra_py.latency import BUILTIN_OUTPUT_LENGTHS
from vajra_py.latency.services.output_length import refuse_oracle
from vajra_py.testing.harness import Harness, HarnessOptions

SPECS = {spec.name: spec for spec in BUILTIN_OUTPUT_LENGTHS}


@dataclass
class Request:
    request_id: str = "r0"
    num_output_tokens: int = 0
    max_tokens: int = 100_000
    tenant: str = ""


def build(kind: str, truth: dict[str, int] | None = None, seed: int = 0, **parameters: Any) -> OutputLengthPredictor:
    spec = SPECS[kind]

    def stream(name: str) -> np.random.Generator:
        return np.random.default_rng([seed, len(name)])

    return spec.build(spec.config(**parameters), stream, truth or {})


def test_all_predictors_are_offered() -> None:
    assert set(SPECS) == {"none", "constant", "histogram", "history", "oracle", "noisy_oracle"}


def test_none_knows_nothing() -> None:
    assert build("none").predict(Request()) is None


def test_a_constant_stays_between_generated_and_allowed() -> None:
    predictor = build("constant", mean_tokens=100.0, p90_tokens=300.0)
    assert predictor.predict(Request()) == LengthEstimate(100, 100, 300)
    assert predictor.predict(Request(num_output_tokens=150)) == LengthEstimate(150, 150, 300)
    assert predictor.predict(Request(max_tokens=50)) == LengthEstimate(50, 50, 50)


@pytest.mark.parametrize("kind", ["oracle", "noisy_oracle"])
def test_an_oracle_is_refused_where_clients_send_requests(kind: str) -> None:
    message = (
        f"backend.engine.output_length: the output lengths .*got '{kind}'.* Allowed: none, constant, histogram, history"
    )
    with pytest.raises(ConfigError, match=message):
        refuse_oracle(kind, "backend.engine.output_length")
    refuse_oracle("history", "backend.engine.output_length")


def test_history_is_of_the_same_tenant_and_of_the_last_requests() -> None:
    harness = Harness(
        "fcfs", "round_robin", "fixed_chunk", HarnessOptions(output_lengths=build("history", window=3, by_tenant=True))
    )
    predict = harness.options.output_lengths.predict
    first = harness.submit("probe", 5, 1, tenant="a")
    assert predict(first) is None, "nothing has ended yet"
    for index, length in enumerate((50, 2, 4, 9)):
        harness.submit(f"r{index}", 5, length, tenant="a")
        harness.submit(f"other{index}", 5, 30, tenant="b")
        harness.steps_until_idle()
    assert predict(Request(tenant="a")) == LengthEstimate(5.0, 4.0, 9.0)
    assert predict(Request(tenant="b")) == LengthEstimate(30.0, 30.0, 30.0)
    assert predict(Request(tenant="c")) is None
    assert predict(Request(tenant="a", num_output_tokens=3)) == LengthEstimate(6.5, 4.0, 9.0)
    assert predict(Request(tenant="a", num_output_tokens=9)) is None


def test_the_oracle_tells_the_truth_and_only_of_what_it_knows() -> None:
    predictor = build("oracle", {"r0": 42})
    assert predictor.predict(Request()) == LengthEstimate(42, 42, 42)
    assert predictor.predict(Request("r1")) is None
    assert predictor.predict(Request(max_tokens=10)) == LengthEstimate(10, 10, 10)


def test_quantiles_give_the_distributions_mean_and_percentiles() -> None:
    uniform = build("histogram", quantiles={0.0: 0.0, 1.0: 1000.0})
    estimate = uniform.predict(Request())
    assert estimate is not None
    assert (estimate.mean_tokens, estimate.p50_tokens, estimate.p90_tokens) == pytest.approx((500, 500, 900))
    later = uniform.predict(Request(num_output_tokens=600))
    assert later is not None
    assert (later.mean_tokens, later.p50_tokens, later.p90_tokens) == pytest.approx((800, 800, 960))
    outlived = uniform.predict(Request(num_output_tokens=2000))
    assert outlived == LengthEstimate(2000, 2000, 2000)


def test_quantiles_with_many_requests_at_one_length() -> None:
    # Half of the requests generate 100 tokens exactly; once one has passed that, it is among the longer half.
    predictor = build("histogram", quantiles={0.0: 100.0, 0.5: 100.0, 1.0: 300.0})
    first, later = predictor.predict(Request()), predictor.predict(Request(num_output_tokens=100))
    assert first is not None
    assert later is not None
    assert first.mean_tokens == pytest.approx(150)
    assert later.mean_tokens == pytest.approx(200)


@given(generated=st.integers(0, 5000), more=st.integers(0, 500))
def test_estimates_rise_with_what_is_generated_and_stay_in_order(generated: int, more: int) -> None:
    predictor = build("histogram")
    before, after = (predictor.predict(Request(num_output_tokens=n)) for n in (generated, generated + more))
    assert before is not None
    assert after is not None
    assert generated <= before.p50_tokens <= before.p90_tokens
    assert after.mean_tokens >= before.mean_tokens - 1e-9
    assert after.p90_tokens >= before.p90_tokens - 1e-9


@pytest.mark.parametrize(
    "quantiles", [{0.1: 1.0, 1.0: 2.0}, {0.0: 1.0}, {0.0: 5.0, 1.0: 2.0}, {0.0: -1.0, 1.0: 2.0}, {0.0: 1.0, 2.0: 2.0}]
)
def test_quantiles_that_are_no_distribution_are_refused(quantiles: dict[float, float]) -> None:
    with pytest.raises(ValidationError, match="Allowed"):
        build("histogram", quantiles=quantiles)


def test_noise_depends_on_seed_and_request_alone() -> None:
    truth = {f"r{i}": 100 for i in range(2000)}
    one, same, other = (build("noisy_oracle", truth, seed, sigma=0.5) for seed in (1, 1, 2))
    forward = [one.predict(Request(name)) for name in truth]
    backward = [same.predict(Request(name)) for name in reversed(truth)]
    assert forward == backward[::-1]
    assert forward != [other.predict(Request(name)) for name in truth]
    errors = np.array([log(estimate.p50_tokens / 100) for estimate in forward if estimate])
    assert errors.mean() == pytest.approx(0, abs=0.05)
    assert errors.std() == pytest.approx(0.5, rel=0.1)
    first = forward[0]
    assert first is not None
    assert first.p90_tokens == pytest.approx(first.p50_tokens * exp(0.5 * 1.2815515655))


def test_without_noise_the_noisy_oracle_is_the_oracle() -> None:
    truth = {"r0": 7}
    assert build("noisy_oracle", truth, sigma=0.0).predict(Request()) == build("oracle", truth).predict(Request())
