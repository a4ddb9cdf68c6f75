"""Small simulated systems for conformance checks of policies outside the three layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vajra_py.config import config_from_mapping
from vajra_py.contract import AnyPolicySpec
from vajra_py.latency import ConstantModel
from vajra_py.latency.services.output_length import NoLengths
from vajra_py.plugins import load_registry
from vajra_py.runtime.serving.build import ModelFacts, Services, build_controller
from vajra_py.runtime.serving.controller import Controller
from vajra_py.runtime.support.seeds import SeedTree
from vajra_py.sim.executor import SimulatedExecutor, predicted_timers
from vajra_py.sim.simulator import SimulationOptions, Simulator
from vajra_py.testing.checking import require
from vajra_py.workload import RequestSpec

STEP_S = 0.02
_ONE_REQUEST = {
    "type": "synthetic",
    "num_requests": 1,
    "arrivals": {"type": "fixed", "rate": 1},
    "prompt_tokens": {"type": "constant", "value": 1},
    "output_tokens": {"type": "constant", "value": 1},
}


def simulated_system(
    spec: AnyPolicySpec, scheduling: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[Controller, Simulator]:
    """Return a system of small replicas with steps of `STEP_S` seconds.

    `scheduling` must select `spec`; layers that it leaves out get plain policies.
    """
    registry = load_registry().with_policies([spec])
    plain = {
        "request_prioritizer": "fcfs",
        "replicaset_scheduler": "least_loaded",
        "replica_scheduler": "fixed_chunk",
    }
    config = config_from_mapping(
        {
            "version": 1,
            "scheduling": {**plain, **scheduling},
            "replica": {"max_batch_size": 8, "max_model_len": 400, "memory": {"num_blocks": 100}},
            **settings,
            "workload": _ONE_REQUEST,
            "backend": {"simulator": {"latency": {"type": "constant", "step_time_s": STEP_S}}},
        },
        registry=registry,
    )
    executor, latency, seeds = SimulatedExecutor(), ConstantModel(STEP_S), SeedTree(3)
    services = Services(
        registry=registry,
        latency=latency,
        output_lengths=NoLengths(),
        seeds=seeds,
        facts=ModelFacts(),
        executor_of=lambda replicaset, replica_id: executor,
        reserves_growth=True,
    )
    controller = build_controller(config, services)
    timers: Callable[[Any], Any] = predicted_timers(latency, seeds.child("steps"))
    return controller, Simulator(controller, executor, timers, SimulationOptions(check_every_steps=1))


def serve(controller: Controller, simulator: Simulator, specs: Sequence[RequestSpec]) -> None:
    """Serve requests to their end. Raises `AssertionError` or `RuntimeError` if a request is left or a block lost."""
    simulator.run(specs)
    controller.check_conservation()
    require(controller.num_alive == 0, f"{controller.num_alive} requests are left")
