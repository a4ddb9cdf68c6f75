"""Run an experiment in the simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from vajra_py.config import TypedChoice
from vajra_py.contract.latency import LatencyModel
from vajra_py.errors import ConfigError, Problem
from vajra_py.experiment.runs.backend import Outcome, Run, WriteTables
from vajra_py.experiment.runs.results import write_results
from vajra_py.latency import (
    HasHostOverhead,
    OperatorTablesModel,
    ProfileBundleModel,
    ReplaysDurations,
    RooflineModel,
    StepTimes,
    VariesSteps,
    combined_step_times,
    step_times_of,
)
from vajra_py.plugins import Registry, Truth, build_latency_model, build_output_lengths
from vajra_py.runtime.records.decision_log import DecisionLog
from vajra_py.runtime.serving.build import ModelFacts, ReplicasetModel, Services, build_controller
from vajra_py.runtime.serving.replica import Replica
from vajra_py.runtime.support.clock import to_seconds
from vajra_py.runtime.support.seeds import SeedTree
from vajra_py.sim.executor import RecordedTimer, SimulatedExecutor, StepTimer, predicted_timers
from vajra_py.sim.simulator import SimulationOptions, Simulator


class SimulatedRun:
    """An experiment on the discrete-event simulator."""

    decision_log: type[DecisionLog] = DecisionLog
    write: WriteTables = staticmethod(write_results)

    def __init__(self, run: Run) -> None:
        settings = run.config.backend.settings
        self.workload = run.workload
        """Simulated workload."""
        latency = build_latency_model(settings.latency.type, settings.latency.parameters, run.registry)
        predictions = _prediction_model(latency, settings.predictions, run.registry, "backend.simulator")
        latencies, models = _by_replicaset(run, latency, predictions)
        self._latencies = latencies
        seeds = run.seeds.child("policies")
        truth = Truth(seeds.child("output_lengths").stream, run.workload.true_lengths())
        predictor = build_output_lengths(
            settings.output_length.type, settings.output_length.parameters, truth, run.registry
        )
        executor = SimulatedExecutor()
        request_overhead = _request_overhead(latency)
        services = Services(
            registry=run.registry,
            latency=predictions,
            output_lengths=predictor,
            seeds=seeds,
            facts=model_facts(latency),
            executor_of=lambda replicaset, replica_id: executor,
            reserves_growth=True,
            holds_ended_slots=request_overhead.get("asynchronous", False),
            models=models,
        )
        self.controller = build_controller(run.config, services)
        memories = [one.replica.memory for one in run.config.effective_replicasets.values()]
        self.options = options = SimulationOptions(
            horizon_s=settings.horizon_s,
            drain=settings.drain,
            tenant_salt=any(one.tenant_salt for one in memories),
            policy_timeout_s=run.config.policy_timeout_s,
            **request_overhead,
        )
        seeds = run.seeds.child("steps")
        timers = {name: _timers(one, settings.scheduling_overhead_s, seeds) for name, one in latencies.items()}
        self._simulator = Simulator(
            self.controller,
            executor,
            lambda replica: timers[replica.replicaset](replica),
            options,
            _counting(run, len(run.workload)),
        )

    @property
    def step_times(self) -> StepTimes:
        """See `Backend`: the latency models', with what their fallbacks answered."""
        return combined_step_times({name: _origin(latency) for name, latency in self._latencies.items()})

    @property
    def varies_steps(self) -> bool:
        """True if the durations of equal steps vary by seed."""
        return any(isinstance(one, VariesSteps) and one.variation is not None for one in self._latencies.values())

    def prepare(self, folder: Path) -> None:
        """Do nothing: a simulation needs no recording, as it can be repeated."""

    def close(self) -> None:
        """Do nothing: no resources are held."""

    def start(self) -> Outcome:
        """Simulate the whole workload."""
        simulator = self._simulator
        simulator.run(self.workload)
        return Outcome(to_seconds(simulator.now), simulator.num_steps)

    def position(self) -> tuple[float, int]:
        """Simulated seconds and steps so far."""
        return to_seconds(self._simulator.now), self._simulator.num_steps


def _origin(latency: LatencyModel) -> StepTimes:
    num_fallback = latency.num_fallback if isinstance(latency, ProfileBundleModel) else 0
    filled = latency.filled_fraction if isinstance(latency, OperatorTablesModel) else 0.0
    return replace(step_times_of(latency), num_fallback=num_fallback, filled_fraction=filled)


def _by_replicaset(
    run: Run, latency: LatencyModel, predictions: LatencyModel
) -> tuple[dict[str, LatencyModel], dict[str, ReplicasetModel]]:
    """Return the latency model of each replicaset, and the model descriptions of those that override it."""
    settings = run.config.backend.settings
    latencies = dict.fromkeys(run.config.effective_replicasets, latency)
    models = {}
    for name, own in settings.replicasets.items():
        where = f"backend.simulator.replicasets.{name}"
        if own.latency is not None:
            latencies[name] = build_latency_model(own.latency.type, own.latency.parameters, run.registry)
        has_own = own.latency is not None or own.predictions is not None
        own_predictions = _prediction_model(latencies[name], own.predictions, run.registry, where) if has_own else predictions
        models[name] = ReplicasetModel(own_predictions, model_facts(latencies[name]))
    return latencies, models


def _prediction_model(
    latency: LatencyModel, choice: TypedChoice | None, registry: Registry, where: str
) -> LatencyModel:
    """Return the latency model for policies' predictions, in place of the simulated one. Raises `ConfigError` if the
    two cannot describe one replica.
    """
    if choice is None:
        return latency
    predictions = build_latency_model(choice.type, choice.parameters, registry)
    if predictions.num_stages != latency.num_stages and not isinstance(latency, ReplaysDurations):
        message = f"is of {predictions.num_stages} pipeline stages, and the latency model of {latency.num_stages}"
        raise ConfigError(Problem(f"{where}.predictions", message, "Allowed: a model of as many"))
    return predictions


def model_facts(latency: LatencyModel) -> ModelFacts:
    """Return the latency model's facts about memory and lengths."""
    if isinstance(latency, RooflineModel):
        model = latency.deployment.model
    elif isinstance(latency, ProfileBundleModel):
        model = latency.model
    else:
        return ModelFacts()
    return ModelFacts(
        num_blocks=latency.kv_blocks,
        max_model_len=model.max_model_len,
        kv_bytes_per_token=model.kv_bytes_per_token,
    )


def _request_overhead(latency: LatencyModel) -> dict[str, Any]:
    """Return the controller options that model the host overhead per request; empty if the model has none."""
    if not isinstance(latency, HasHostOverhead):
        return {}
    return {"arrival_delay_s": latency.host.request_s, "asynchronous": latency.host.asynchronous}


def _timers(latency: LatencyModel, overhead_s: float, seeds: SeedTree) -> Callable[[Replica], StepTimer]:
    if isinstance(latency, ReplaysDurations):
        latency.restart()
        return lambda replica: RecordedTimer(latency.next_duration_s)
    return predicted_timers(latency, seeds, overhead_s)


def _counting(run: Run, total: int) -> Callable[[int, float], None] | None:
    report = run.progress
    if report is None:
        return None
    done = 0

    def count(num_ended: int, now: float) -> None:
        nonlocal done
        done += num_ended
        report(done, total, now)

    return count
