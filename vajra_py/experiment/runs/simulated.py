"""Run an experiment in the simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vajra_py.config import ExperimentConfig, TypedChoice
from vajra_py.contract.latency import LatencyModel
from vajra_py.errors import ConfigError, Problem
from vajra_py.experiment.device_figures import latency_models, model_key
from vajra_py.experiment.runs.backend import Outcome, Run, WriteTables
from vajra_py.experiment.runs.results import write_results
from vajra_py.latency import (
    HasHostOverhead,
    ReplaysDurations,
    StepTimes,
    VariesSteps,
    combined_step_times,
    description_of,
)
from vajra_py.plugins import OutputLengthInputs, Registry, build_latency_model, build_output_lengths
from vajra_py.runtime.records.decision_log import DecisionLog
from vajra_py.runtime.serving.build import ModelFacts, ReplicasetModel, Services, build_controller
from vajra_py.runtime.serving.replica import Replica
from vajra_py.runtime.support.clock import to_seconds
from vajra_py.runtime.support.seeds import SeedTree
from vajra_py.sim.acceptance import AcceptanceModel, acceptance_model
from vajra_py.sim.executor import RecordedTimer, SimulatedExecutor, StepTimer, predicted_timers
from vajra_py.sim.simulator import SimulationOptions, Simulator


class SimulatedRun:
    """Run of an experiment in the discrete-event simulator."""

    decision_log: type[DecisionLog] = DecisionLog
    write: WriteTables = staticmethod(write_results)

    def __init__(self, run: Run) -> None:
        settings = run.config.backend.settings
        self.workload = run.workload
        """The simulated requests."""
        latency = build_latency_model(settings.latency.type, settings.latency.parameters, run.registry)
        latencies = latency_models(run.config, run.registry, latency)
        self.latency_models = latencies
        """See `Backend`."""
        predictions = _predictions(latency, settings.predictions, run.registry, "backend.simulator")
        models = _by_replicaset(run, latencies, predictions)
        _check_kv_groups(run.config, latencies)
        seeds = run.seeds.child("policies")
        inputs = OutputLengthInputs(seeds.child("output_lengths").stream, run.workload.true_lengths())
        predictor = build_output_lengths(
            settings.output_length.type, settings.output_length.parameters, inputs, run.registry
        )
        acceptance = _acceptance(run)
        executor = SimulatedExecutor(acceptance)
        request_overhead = _intake(latency)
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
            draft_times_s=(settings.drafts.step_s, settings.drafts.token_s) if settings.drafts else (0.0, 0.0),
        )
        self.controller = build_controller(run.config, services)
        self.options = options = SimulationOptions(
            horizon_s=settings.horizon_s,
            drain=settings.drain,
            tenant_salt=any(one.memory.tenant_salt for one in run.config.replica_settings),
            policy_timeout_s=run.config.policy_timeout_s,
            **request_overhead,
        )
        seeds = run.seeds.child("steps")
        timers = {name: _timers(one, settings.scheduling_overhead_s, seeds) for name, one in latencies.items()}
        self._simulator = Simulator(
            self.controller,
            executor,
            lambda replica: timers.get(model_key(replica.replicaset, replica.parts.pool), timers[replica.replicaset])(
                replica
            ),
            options,
            _counting(run, len(run.workload)),
        )

    @property
    def step_times(self) -> StepTimes:
        """See `Backend`: the origin stated by the latency models, with their counts so far."""
        return combined_step_times(self.latency_models)

    @property
    def varies_steps(self) -> bool:
        """True if the durations of equal steps vary randomly."""
        return any(isinstance(one, VariesSteps) and one.variation is not None for one in self.latency_models.values())

    def prepare(self, folder: Path) -> None:
        """Do nothing; a simulation can be repeated and needs no recording."""

    def close(self) -> None:
        """Do nothing; a simulation has no resources."""

    def start(self) -> Outcome:
        """Simulate the whole workload."""
        simulator = self._simulator
        simulator.run(self.workload)
        return Outcome(to_seconds(simulator.now), simulator.num_steps)

    def position(self) -> tuple[float, int]:
        """Return (simulated seconds, number of steps) so far."""
        return to_seconds(self._simulator.now), self._simulator.num_steps


def _acceptance(run: Run) -> AcceptanceModel | None:
    """Return the acceptance model of draft tokens; None without drafts. Raises `ConfigError` if its settings are
    missing, or cover fewer draft positions than a replica may use.
    """
    settings = run.config.backend.settings.drafts
    most = max(one.draft.most_tokens for one in run.config.replica_settings)
    if not most:
        return None
    if settings is None:
        message = "is missing, and replica.draft enables drafts"
        raise ConfigError(Problem("backend.simulator.drafts", message, "Such as {rate: 0.7}"))
    model = acceptance_model(settings, run.seeds.child("drafts"))
    if model.max_tokens is not None and most > model.max_tokens:
        message = f"allows more drafts than backend.simulator.drafts has positions (got {most})"
        raise ConfigError(Problem("replica.draft", message, f"Allowed: 0 to {model.max_tokens}"))
    return model


def _by_replicaset(
    run: Run, latencies: Mapping[str, LatencyModel], predictions: LatencyModel
) -> dict[str, ReplicasetModel]:
    """Return the models of those replicasets that have settings of their own."""
    models = {}
    for name, own in run.config.backend.settings.replicasets.items():
        where = f"backend.simulator.replicasets.{name}"
        has_own = own.latency is not None or own.predictions is not None
        asked = _predictions(latencies[name], own.predictions, run.registry, where) if has_own else predictions
        pools = {}
        for pool, of_pool in own.pools.items():
            latency = latencies.get(model_key(name, pool), latencies[name])
            is_other = of_pool.latency is not None or of_pool.predictions is not None
            place = f"{where}.pools.{pool}"
            of_its_own = _predictions(latency, of_pool.predictions, run.registry, place) if is_other else asked
            pools[pool] = ReplicasetModel(of_its_own, model_facts(latency))
        models[name] = ReplicasetModel(asked, model_facts(latencies[name]), pools)
    return models


def _check_kv_groups(config: ExperimentConfig, latencies: Mapping[str, LatencyModel]) -> None:
    """Raise `ConfigError` for KV parallelism that the latency model of a replicaset or pool does not support."""
    problems = []
    for name, replicaset in config.effective_replicasets.items():
        for pool, own in replicaset.effective_pools.items():
            key = model_key(name, pool) if replicaset.pools else name
            groups = own.replica.kv_parallel.groups
            most = description_of(latencies.get(key, latencies[name])).max_kv_groups
            if most is not None and groups > most:
                merged = f"attention merged over {groups} KV-parallel groups"
                message = f"the latency model of {key} has no times for {merged}"
                allowed = f"Allowed: {most}" if most == 1 else f"Allowed: 1 to {most}"
                problems.append(Problem("replica.kv_parallel.groups", message, allowed))
    if problems:
        raise ConfigError(problems)


def _predictions(latency: LatencyModel, choice: TypedChoice | None, registry: Registry, where: str) -> LatencyModel:
    """Return the model that gives policies their predictions. Raises `ConfigError` if its number of pipeline stages
    differs from that of `latency`, unless `latency` replays durations.
    """
    if choice is None:
        return latency
    predictions = build_latency_model(choice.type, choice.parameters, registry)
    if predictions.num_stages != latency.num_stages and not isinstance(latency, ReplaysDurations):
        message = f"is of {predictions.num_stages} pipeline stages, and the latency model of {latency.num_stages}"
        raise ConfigError(Problem(f"{where}.predictions", message, "Allowed: a model of as many"))
    return predictions


def model_facts(latency: LatencyModel) -> ModelFacts:
    """Return a latency model's description of memory and lengths."""
    described = description_of(latency)
    return ModelFacts(described.kv_blocks, described.max_model_len, described.kv_bytes_per_token, described.num_layers)


def _intake(latency: LatencyModel) -> dict[str, Any]:
    """Return simulation options that model how requests reach the modelled engine's scheduler."""
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
