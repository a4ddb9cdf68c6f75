from __future__ import annotations

from enum import Enum
from typing import Literal

import pytest
from pydantic import Field

from vajra_py.contract import Layer, PolicyConfig
from vajra_py.plugins import load_registry, parameters_of


class Mode(Enum):
    FAST = "fast"
    SLOW = "slow"


class Config(PolicyConfig):
    budget_tokens: int = Field(gt=0, le=10, description="A budget.")
    target_batch_time_s: float = 0.05
    bias: float | None = Field(None, ge=0.5)
    mode: Mode = Mode.FAST
    order: Literal["lru", "fifo"] = "lru"
    weights: tuple[float, ...] = (1.0,)


def test_parameters_are_listed_with_types_units_limits_and_defaults() -> None:
    budget, target, bias, mode, order, weights = parameters_of(Config)
    assert (budget.name, budget.type, budget.required, budget.unit) == ("budget_tokens", "int", True, "tokens")
    assert (budget.limits, budget.description) == ("> 0, <= 10", "A budget.")
    assert (target.default, target.unit, target.required) == (0.05, "seconds", False)
    assert (bias.type, bias.default, bias.limits) == ("float | null", None, ">= 0.5")
    assert (mode.type, mode.default) == ("'fast' | 'slow'", "fast")
    assert order.type == "'lru' | 'fifo'"
    assert (weights.type, list(weights.default)) == ("list of float", [1.0])


@pytest.mark.parametrize("layer", Layer)
def test_every_installed_policy_can_be_listed(layer: Layer) -> None:
    for offer in load_registry().policies(layer).values():
        for parameter in parameters_of(offer.spec.config):
            assert parameter.type
            assert parameter.name
