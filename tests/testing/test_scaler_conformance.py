"""`check_scaler` finds scalers that break the contract, and says what they did."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from vajra_py.contract import PolicyConfig, PolicyContext, PoolView, ReplicaState, ScalerSpec
from vajra_py.testing import check_scaler


class NoParameters(PolicyConfig):
    """Nothing."""


class Keeps:
    """Keeps what there is, and looks again every second."""

    def __init__(self, context: PolicyContext) -> None:
        self.wake = context.wake

    def targets(self, pools: Sequence[PoolView], now: float) -> Mapping[str, int]:
        """Every pool at its least, or one replica."""
        self.wake.at(now + 1.0)
        return {pool.name: max(1, pool.min_replicas) for pool in pools}


class AsksTooMuch(Keeps):
    def targets(self, pools: Sequence[PoolView], now: float) -> Mapping[str, int]:
        return {pool.name: pool.max_replicas + 1 for pool in pools}


class AsksForHalves(Keeps):
    def targets(self, pools: Sequence[PoolView], now: float) -> Mapping[str, int]:
        return {pool.name: 1.5 for pool in pools}  # type: ignore[misc]


class InventsPools(Keeps):
    def targets(self, pools: Sequence[PoolView], now: float) -> Mapping[str, int]:
        return {"elsewhere": 1}


class ReadsClocks(Keeps):
    def targets(self, pools: Sequence[PoolView], now: float) -> Mapping[str, int]:
        time.time()
        return super().targets(pools, now)


class Draws(Keeps):
    def targets(self, pools: Sequence[PoolView], now: float) -> Mapping[str, int]:
        random.random()
        return super().targets(pools, now)


class ChangesViews(Keeps):
    def targets(self, pools: Sequence[PoolView], now: float) -> Mapping[str, int]:
        pools[0].replicas[0].state = ReplicaState.DOWN  # type: ignore[misc]
        return {}


COUNT = iter(range(10**9))


class Differs(Keeps):
    def targets(self, pools: Sequence[PoolView], now: float) -> Mapping[str, int]:
        self.wake.at(now + 1.0)
        return {
            pool.name: min(pool.max_replicas, max(1, pool.min_replicas) + (next(COUNT) % 97 < 40)) for pool in pools
        }


class StopsEverything(Keeps):
    def targets(self, pools: Sequence[PoolView], now: float) -> Mapping[str, int]:
        return {pool.name: pool.min_replicas for pool in pools}


class Misspelt(Keeps):
    def on_arrival(self, requests: Any, now: float) -> None:
        """It is `on_arrivals`."""


class HasNoMethod:
    def __init__(self, context: PolicyContext) -> None:
        pass


def spec_of(kind: type[Any]) -> ScalerSpec:
    return ScalerSpec("mine", NoParameters, lambda config, context: kind(context), "Mine.")


def test_a_plain_scaler_passes() -> None:
    check_scaler(spec_of(Keeps))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (AsksTooMuch, "requested 6 replicas of pool 'default'"),
        (AsksForHalves, "requested 1.5 replicas"),
        (InventsPools, "requested replicas of pool 'elsewhere'"),
        (ReadsClocks, "calls time.time"),
        (Draws, "calls random.random"),
        (ChangesViews, "changed what it was shown"),
        (Differs, "two equal runs requested different numbers"),
        (StopsEverything, "down to nothing: .*without an active replica"),
        (Misspelt, "nothing calls 'on_arrival'"),
        (HasNoMethod, "has no method 'targets'"),
    ],
)
def test_a_breach_is_found_and_named(kind: type[Any], said: str) -> None:
    with pytest.raises(AssertionError, match=f"(?s)scaler 'mine' breaks the contract.*{said}"):
        check_scaler(spec_of(kind))
