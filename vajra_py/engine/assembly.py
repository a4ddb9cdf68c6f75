"""How do an experiment's settings become loaded workers with a controller over them?

What can be wrong without a model (settings, policies, files) is found before one is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vajra_py.config import ExperimentConfig, ReplicasetConfig
from vajra_py.contract import LatencyModel, OutputLengthPredictor
from vajra_py.engine.clock import EngineClock, WallClock
from vajra_py.engine.compute import ModelFacts, RunnerOptions, load_runner
from vajra_py.engine.compute.inspect import inspect_model
from vajra_py.engine.config import EngineConfig, check_replica
from vajra_py.engine.executor import EngineExecutor
from vajra_py.engine.loop import EngineLoop, LoopOptions, Unit
from vajra_py.engine.params import PromptLimits
from vajra_py.engine.processes import ProcessWorker
from vajra_py.engine.worker import LoadRunner, ReplicaKey, Worker, checked_facts, load_in_process
from vajra_py.errors import ConfigError, Problem, VajraError
from vajra_py.plugins import Registry
from vajra_py.runtime import assembly
from vajra_py.runtime.assembly import Services, build_controller
from vajra_py.runtime.controller import Controller
from vajra_py.runtime.input_log import Input
from vajra_py.runtime.kv import PrivateKeys
from vajra_py.runtime.replicaset import max_request_tokens
from vajra_py.runtime.request import Request, RequestFacts
from vajra_py.runtime.seeds import SeedTree

_DRY_RUN_BLOCKS = 1 << 20
_PROBE_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class EngineServices:
    """What a run brings along.

    Attributes:
        registry: installed policies.
        latency: what policies ask for predictions.
        output_lengths: likewise for output lengths.
        seeds: of the policies' random streams.
        load: how a worker's runner is made.
        make_clock: how time is kept; called when everything is loaded.
        threaded: whether every in-process replica computes in a thread of its own, even a lone one.
        make_worker: makes a replica's worker in place of all that.
    """

    registry: Registry
    latency: LatencyModel
    output_lengths: OutputLengthPredictor
    seeds: SeedTree
    load: LoadRunner = load_runner
    make_clock: Callable[[], EngineClock] = WallClock
    threaded: bool = False
    make_worker: Callable[[ReplicaKey, RunnerOptions], Worker] | None = None


@dataclass(slots=True)
class Engine:
    """Loaded workers and the controller over them; `close` gives everything back."""

    controller: Controller
    units: Mapping[ReplicaKey, Unit]
    facts: ModelFacts
    tenant_salt: bool
    make_clock: Callable[[], EngineClock]
    model_facts: assembly.ModelFacts
    _workers: list[Worker] = field(default_factory=list)

    @classmethod
    def load(cls, config: ExperimentConfig, services: EngineServices) -> Engine:
        """Check, load, build.

        Raises `ConfigError` for what is wrong with settings or model, `ExecutorError` when a worker fails.
        """
        settings: EngineConfig = config.backend.settings
        replicasets = config.effective_replicasets
        _check(settings, replicasets)
        _probe(build_controller(config, _services(services, _dry_facts(), EngineExecutor(1))))
        options = _options_by_replicaset(settings, replicasets)
        workers = _load_workers(settings, options, replicasets, services)
        try:
            return cls._built(config, services, options, workers)
        except BaseException:
            for worker in workers.values():
                worker.close()
            raise

    @classmethod
    def _built(
        cls,
        config: ExperimentConfig,
        services: EngineServices,
        options: Mapping[str, RunnerOptions],
        workers: Mapping[ReplicaKey, Worker],
    ) -> Engine:
        facts = checked_facts(list(workers.values()))
        sizes = assembly.ModelFacts(
            num_blocks=lambda block_size, fraction: _profiled_blocks(workers, options, block_size, fraction),
            max_model_len=facts.max_model_len,
            kv_bytes_per_token=facts.kv_bytes_per_token,
        )
        replicasets = config.effective_replicasets
        executors = {
            (name, replica_id): EngineExecutor(options[name].max_requests)
            for name, one in replicasets.items()
            for replica_id in range(one.num_replicas)
        }
        all_services = Services(
            registry=services.registry,
            latency=services.latency,
            output_lengths=services.output_lengths,
            seeds=services.seeds,
            facts=sizes,
            executor_of=lambda name, replica_id: executors[name, replica_id],
            records_copies=True,
        )
        controller = build_controller(config, all_services)
        units = {
            key: Unit(controller.replicasets[key[0]].replicas[key[1]], executor, workers[key])
            for key, executor in executors.items()
        }
        salted = any(one.replica.memory.tenant_salt for one in replicasets.values())
        return cls(controller, units, facts, salted, services.make_clock, sizes, list(workers.values()))

    def start(
        self, *, serves: bool = False, note: Callable[[Input], None] | None = None, check_every_steps: int = 0
    ) -> EngineLoop:
        """Make KV memory and the loop; its clock starts now. Once."""
        options = LoopOptions(serves, self.tenant_salt, check_every_steps)
        loops: list[EngineLoop] = []
        for unit in self.units.values():
            limits = unit.replica.limits
            unit.worker.start(limits.num_blocks, limits.host_blocks, lambda finished: loops[0].inbox.put(finished))
        loops.append(EngineLoop(self.controller, self.units, self.make_clock(), options, note))
        return loops[0]

    def prompt_limits(self) -> PromptLimits:
        """What a prompt may be, on the replicaset that takes the shortest ones."""
        replicas = [one.replicas[0] for one in self.controller.replicasets.values()]
        longest = min(map(max_request_tokens, replicas))
        return PromptLimits(self.facts.vocab_size, self.facts.max_model_len, longest)

    def description(self) -> dict[str, object]:
        """Sizes and names that a replay and a reader of the results need."""
        facts = self.facts
        return {
            "model_type": facts.model_type,
            "num_parameters": facts.num_parameters,
            "dtype": facts.dtype,
            "device": facts.device,
            "forward": facts.forward,
            "max_model_len": facts.max_model_len,
            "kv_bytes_per_token": facts.kv_bytes_per_token,
            "vocab_size": facts.vocab_size,
            "num_blocks": {
                name: one.replicas[0].limits.num_blocks for name, one in self.controller.replicasets.items()
            },
        }

    def close(self) -> None:
        """Give back memory and processes; may be called twice."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close()


def _check(settings: EngineConfig, replicasets: Mapping[str, ReplicasetConfig]) -> None:
    problems: list[Problem] = []
    for name, one in replicasets.items():
        where = "replica" if len(replicasets) == 1 else f"replicasets.{name}.replica"
        problems += check_replica(where, one.replica)
    try:
        inspect_model(settings.model, settings.random_weights)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)


def _probe(controller: Controller) -> None:
    """Let every policy decide about one request, on nothing: a setting that one of them lacks shows now.

    Raises the `ConfigError` that a policy met; what else it may raise is the run's business.
    """
    for name, replicaset in controller.replicasets.items():
        num_tokens = max(1, min(_PROBE_TOKENS, replicaset.replicas[0].limits.max_model_len - 1))
        request = Request(RequestFacts("probe", num_tokens), 0, 0.0, 1)
        request.replicaset = name
        request.keys = PrivateKeys("probe")
        try:
            replicaset.accept(request, 0)
            for replica in replicaset.replicas:
                replica.next_plan(0)
        except VajraError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, ConfigError):
                cause = cause.__cause__
            if cause is not None:
                raise cause from None


def _dry_facts() -> assembly.ModelFacts:
    return assembly.ModelFacts(num_blocks=lambda block_size, fraction: _DRY_RUN_BLOCKS)


def _services(services: EngineServices, facts: assembly.ModelFacts, executor: EngineExecutor) -> Services:
    return Services(
        registry=services.registry,
        latency=services.latency,
        output_lengths=services.output_lengths,
        seeds=services.seeds,
        facts=facts,
        executor_of=lambda name, replica_id: executor,
    )


def _options_by_replicaset(
    settings: EngineConfig, replicasets: Mapping[str, ReplicasetConfig]
) -> dict[str, RunnerOptions]:
    num_workers = sum(one.num_replicas for one in replicasets.values()) * settings.tensor_parallel
    num_threads = settings.num_threads
    if num_threads is None and num_workers > 1:
        num_threads = max(1, _usable_cores() // num_workers)
    return {name: settings.runner_options(one.replica, num_threads) for name, one in replicasets.items()}


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _load_workers(
    settings: EngineConfig,
    options: Mapping[str, RunnerOptions],
    replicasets: Mapping[str, ReplicasetConfig],
    services: EngineServices,
) -> dict[ReplicaKey, Worker]:
    keys = [(name, replica_id) for name, one in replicasets.items() for replica_id in range(one.num_replicas)]
    in_process = settings.workers == "in_process" and settings.tensor_parallel == 1
    workers: dict[ReplicaKey, Worker] = {}
    try:
        if services.make_worker is not None:
            return {key: services.make_worker(key, options[key[0]]) for key in keys}
        if in_process:
            threaded = services.threaded or len(keys) > 1
            for ordinal, key in enumerate(keys):
                workers[key] = load_in_process(key, options[key[0]], ordinal, threaded, services.load)
            return workers
        starting: list[ProcessWorker] = []
        for ordinal, key in enumerate(keys):
            worker = ProcessWorker(key, options[key[0]], ordinal * settings.tensor_parallel, services.load)
            workers[key] = worker
            starting.append(worker)
        for worker in starting:
            worker.wait_loaded()
    except BaseException:
        for started in workers.values():
            started.close()
        raise
    return workers


def _profiled_blocks(
    workers: Mapping[ReplicaKey, Worker], options: Mapping[str, RunnerOptions], block_size: int, fraction: float
) -> int:
    """Blocks that every replica with blocks of this size has room for; replicas on one device share its memory."""
    shared = options[next(iter(options))].device != "cuda"
    part = fraction / len(workers) if shared else fraction
    return min(
        worker.profile_num_blocks(part)
        for (name, _), worker in workers.items()
        if options[name].block_size == block_size
    )
