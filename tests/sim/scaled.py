"""A simulated replicaset whose scaler is written in the test, built from settings as a run is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vajra_py.config import config_from_mapping
from vajra_py.contract import PolicyConfig, PolicyContext, PoolView, ReplicaState, ScalerSpec
from vajra_py.contract.observer import EndReason, Observer
from vajra_py.latency import ConstantModel
from vajra_py.latency.services.output_length import NoLengths
from vajra_py.plugins import load_registry
from vajra_py.runtime.records.input_log import Input
from vajra_py.runtime.serving.build import ModelFacts, Services, build_controller
from vajra_py.runtime.serving.controller import Controller
from vajra_py.runtime.support.seeds import SeedTree
from vajra_py.sim.executor import SimulatedExecutor, predicted_timers
from vajra_py.sim.simulator import SimulationOptions, Simulator
from vajra_py.workload import RequestSpec

STEP_S = 0.01
Answer = Callable[[Sequence[PoolView], float], Mapping[str, int]]


class NoParameters(PolicyConfig):
    """Nothing."""


class Scripted:
    """Asks for a number of replicas from each of some times on."""

    def __init__(self, context: PolicyContext, script: Mapping[float, int]) -> None:
        self.script = dict(script)
        for at in self.script:
            context.wake.at(at, f"at {at}")

    def targets(self, pools: Sequence[PoolView], now: float) -> Mapping[str, int]:
        """The latest number."""
        due = [count for at, count in sorted(self.script.items()) if at <= now]
        return {pools[0].name: due[-1]} if due else {}


@dataclass
class Watcher(Observer):
    """Keeps states of replicas, ends and where requests were admitted."""

    states: list[tuple[float, int, str]] = field(default_factory=list)
    ends: list[tuple[str, str, float]] = field(default_factory=list)
    admitted: list[tuple[str, int, float]] = field(default_factory=list)
    wants_step_ends: bool = False

    def on_replica_state(self, replicaset: str, replica_id: int, state: ReplicaState, now: float) -> None:
        """See `Observer`."""
        self.states.append((now, replica_id, state.value))

    def on_ended(self, request: Any, reason: EndReason, detail: str, now: float) -> None:
        """See `Observer`."""
        self.ends.append((request.request_id, reason.value, now))

    def on_admitted(self, request: Any, replica_id: int, now: float) -> None:
        """See `Observer`."""
        self.admitted.append((request.request_id, replica_id, now))

    def changes(self) -> list[tuple[float, int, str]]:
        """States after those at the start."""
        return [row for row in self.states if row[0] > 0]


@dataclass
class Scaled:
    """A replicaset with a scaler, ready to run."""

    controller: Controller
    simulator: Simulator
    watcher: Watcher
    noted: list[Input]

    def run(self, specs: Iterable[RequestSpec]) -> Watcher:
        """Simulate, and check that nothing was lost."""
        self.simulator.run(specs)
        self.controller.check_conservation()
        assert not self.controller.num_alive
        return self.watcher


def scaled(
    make: Callable[[PolicyContext], Any],
    *,
    num_replicas: int = 1,
    elastic: Mapping[str, Any] | None = None,
    options: SimulationOptions | None = None,
    seed: int = 0,
    **settings: Any,
) -> Scaled:
    """Build it; `settings` are keys of an experiment beside the usual ones."""
    spec = ScalerSpec("tested", NoParameters, lambda config, context: make(context), "Scales as the test says.")
    registry = load_registry().with_policies([spec])
    scheduling = {
        "request_prioritizer": "fcfs",
        "replicaset_scheduler": settings.pop("chooser", "least_loaded"),
        "replica_scheduler": "fixed_chunk",
        "scaling": "tested",
    }
    replica = {"max_batch_size": 4, "max_model_len": 400, "memory": {"num_blocks": 60}}
    config = config_from_mapping(
        {
            "version": 1,
            "scheduling": scheduling,
            **({} if "pools" in settings else {"num_replicas": num_replicas, "elastic": dict(elastic or {})}),
            "replica": settings.pop("replica", replica),
            "workload": {
                "type": "synthetic",
                "num_requests": 1,
                "arrivals": {"type": "fixed", "rate": 1},
                "prompt_tokens": {"type": "constant", "value": 1},
                "output_tokens": {"type": "constant", "value": 1},
            },
            "backend": {"simulator": {"latency": {"type": "constant", "step_time_s": STEP_S}}},
            **settings,
        },
        registry=registry,
    )
    executor, latency, seeds = SimulatedExecutor(), ConstantModel(STEP_S), SeedTree(seed)
    services = Services(
        registry=registry,
        latency=latency,
        output_lengths=NoLengths(),
        seeds=seeds.child("policies"),
        facts=ModelFacts(),
        executor_of=lambda replicaset, replica_id: executor,
        reserves_growth=True,
    )
    controller = build_controller(config, services)
    watcher, noted = Watcher(), list[Input]()
    controller.watch((watcher,))
    timers = predicted_timers(latency, seeds.child("steps"))
    simulator = Simulator(controller, executor, timers, options or SimulationOptions(check_every_steps=1))
    simulator._driver._note = noted.append
    return Scaled(controller, simulator, watcher, noted)


def requests(count: int, *, every_s: float = 0.0, prompt: int = 20, output: int = 10) -> list[RequestSpec]:
    """Equal requests, one every so many seconds."""
    return [RequestSpec(f"r{index}", index * every_s, prompt, output) for index in range(count)]
