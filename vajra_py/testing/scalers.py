"""Conformance checks of scalers, in simulated situations with a load that rises and falls.

In a package's own tests:

    @pytest.mark.parametrize("spec", vajra_scalers(), ids=lambda spec: spec.name)
    def test_keeps_the_contract(spec):
        check_scaler(spec)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from vajra_py.contract import PolicyContext, PoolView, ScalerSpec
from vajra_py.plugins import check_scaler_shape
from vajra_py.testing.arguments import require_spec
from vajra_py.testing.checking import POLICY_TIMEOUT_S, check_situations, require
from vajra_py.testing.simulated import serve, simulated_system
from vajra_py.workload import RequestSpec

SITUATIONS: Mapping[str, Mapping[str, Any]] = {
    "one pool": {"num_replicas": 2, "elastic": {"max_replicas": 5, "startup_s": 3.0}},
    "down to nothing": {"num_replicas": 1, "elastic": {"min_replicas": 0, "max_replicas": 3, "startup_s": 0.5}},
    "two pools": {
        "pools": {
            "small": {"num_replicas": 1, "elastic": {"max_replicas": 3, "startup_s": 1.0}},
            "large": {"num_replicas": 2, "replica": {"memory": {"num_blocks": 200}}},
        }
    },
}
"""Settings of the replicaset in each situation, by name."""

Asked = tuple[float, Mapping[str, int]]


def check_scaler(
    spec: ScalerSpec, params: Mapping[str, Any] | None = None, *, policy_timeout_s: float = POLICY_TIMEOUT_S
) -> None:
    """Run a scaler with its default parameters, or `params`, in every situation.

    Checks that it has the methods of the Protocol, returns whole numbers within the bounds of existing pools, does not
    change its views, reads no clock and no global random numbers, and returns the same in equal runs. Raises
    `AssertionError` with the name of the scaler and the finding.
    """
    require_spec(spec, ScalerSpec)
    what, otherwise = f"scaler {spec.name!r}", "two equal runs requested different numbers"
    check_situations(what, spec, partial(_run, spec, params or {}), SITUATIONS, otherwise, policy_timeout_s)


@dataclass
class _Watched:
    """Wrapper that records the targets of a scaler, and checks that the scaler does not change its views."""

    inner: Any
    asked: list[Asked] = field(default_factory=list)

    def targets(self, pools: Sequence[PoolView], now: float) -> Mapping[str, int]:
        before = _figures(pools)
        answer: Mapping[str, int] = self.inner.targets(pools, now)
        require(_figures(pools) == before, "targets changed what it was shown")
        self.asked.append((now, dict(answer)))
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _figures(pools: Sequence[PoolView]) -> list[Any]:
    return [
        (
            pool.name,
            pool.num_queued,
            [(one.replica_id, one.state, one.num_running, one.free_blocks) for one in pool.replicas],
        )
        for pool in pools
    ]


def _run(spec: ScalerSpec, params: Mapping[str, Any], settings: Mapping[str, Any]) -> list[Asked]:
    """Simulate a load that rises and falls; return the targets. Raises if the scaler breaks the contract."""
    made: list[_Watched] = []

    def build(config: Any, context: PolicyContext) -> _Watched:
        scaler = spec.build(config, context)
        check_scaler_shape(scaler, f"scaler {spec.name!r}", spec.name)
        made.append(_Watched(scaler))
        return made[-1]

    own = replace(spec, name="under_test", build=build)
    scheduling = {"scaling": {"policy": own.name, "params": dict(params)}}
    controller, simulator = simulated_system(own, scheduling, settings)
    serve(controller, simulator, _load())
    return made[-1].asked


def _load() -> list[RequestSpec]:
    """Return two requests per second for 20 s, twenty per second for 10 s, none for 30 s, then two per second again."""
    times = [0.5 * i for i in range(40)] + [20 + 0.05 * i for i in range(200)] + [60 + 0.5 * i for i in range(40)]
    return [RequestSpec(f"r{index}", at, 20 + 7 * (index % 9), 5 + index % 40) for index, at in enumerate(times)]
