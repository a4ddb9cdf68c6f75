"""SLO expressions: what they say about a run, and what is refused."""

from __future__ import annotations

import math

import pytest

from vajra_py.config.slo import SloMetric, parse_slo


def _slack(text: str, **values: float | None) -> float:
    def value(metric: SloMetric) -> float | None:
        return values[metric.text.replace("(", "_").replace(")", "")]

    return parse_slo(text).slack(value)


def test_conditions_are_joined() -> None:
    both = "p99(ttft) <= 0.5 and attainment >= 0.95"
    assert _slack(both, p99_ttft=0.4, attainment=0.99) >= 0
    assert _slack(both, p99_ttft=0.6, attainment=0.99) < 0
    assert _slack(both, p99_ttft=0.4, attainment=0.90) < 0
    either = "p99(ttft) <= 0.5 or attainment >= 0.95"
    assert _slack(either, p99_ttft=0.6, attainment=0.99) >= 0
    assert _slack(either, p99_ttft=0.6, attainment=0.90) < 0


def test_the_number_may_stand_first() -> None:
    assert _slack("0.5 >= p99(ttft)", p99_ttft=0.4) == _slack("p99(ttft) <= 0.5", p99_ttft=0.4) > 0


def test_slack_is_relative_and_a_missing_value_is_outside() -> None:
    assert _slack("p99(ttft) <= 0.5", p99_ttft=1.0) == pytest.approx(-math.log(2))
    assert _slack("p99(ttft) <= 0.5", p99_ttft=None) == _slack("p99(ttft) <= 0.5", p99_ttft=1e9) == -3.0
    assert _slack("attainment >= 0.9", attainment=0.0) < 0


def test_a_group_is_an_argument() -> None:
    (condition,) = parse_slo('p99(ttft, "long context") < 2').conditions
    assert (condition.metric.path, condition.metric.group) == ("ttft_s.p99", "long context")
    (condition,) = parse_slo("attainment(chat) >= 0.9").conditions
    assert condition.metric.group == "chat"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("p99(tfft) <= 1", "is not a metric (tfft). Did you mean 'ttft'?"),
        ("p98(ttft) <= 1", "is not a statistic (p98)"),
        ("ttft <= 1", "is not a metric (ttft)"),
        ("p99(ttft) <= p50(ttft)", "does not compare with a number"),
        ("p99(ttft)", "is not a condition"),
        ("__import__('os').system('x') <= 1", "is not a metric"),
        ("0.1 <= p99(ttft) <= 1", "is not a condition"),
        ("p99(ttft) <=", "is not an SLO expression"),
        ("p99(ttft) == 1", "is not a condition"),
        ("not p99(ttft) <= 1", "is not a condition"),
        ("attainment >= True", "does not compare with a number"),
        (f"p99(ttft) <= {10**400}", "does not compare with a number"),
    ],
)
def test_what_is_not_an_expression_is_said(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        parse_slo(text)
    assert said in str(error.value)
