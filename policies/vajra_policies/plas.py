"""Program-level attained service: calls of the program that has run least so far go first."""

from __future__ import annotations

from vajra_policies.attained_service import AttainedService, AttainedServiceConfig
from vajra_py.contract import Layer, PolicyContext, PolicySpec, RequestView


class PlasConfig(AttainedServiceConfig):
    """Parameters of `plas`."""


class Plas(AttainedService):
    """Key = running time of the program's ended calls when the call arrived (or the queue that this falls into).

    Short programs go before long ones, although nobody knows their lengths: a program sinks as it is served. With `queue_bounds_s` a
    call also sinks by its own running time. A request without a program is a program of its own.

    Source: Autellix (arXiv:2502.13965), Algorithm 1, PLAS for programs of one thread.
    """

    def __init__(self, config: PlasConfig) -> None:
        super().__init__(config, _attained_s)


def _attained_s(request: RequestView) -> float:
    return 0.0 if request.program is None else request.program.run_s


def _build(config: PlasConfig, context: PolicyContext) -> Plas:
    return Plas(config)


SPEC = PolicySpec(
    name="plas",
    layer=Layer.REQUEST_PRIORITIZER,
    config=PlasConfig,
    build=_build,
    summary="Calls of the program with the least attained service first.",
    source="Autellix (arXiv:2502.13965), PLAS",
)
