"""How do an experiment's settings become loaded workers with a controller over them?

What can be wrong without a model (settings, policies, files) is found before one is loaded.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

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
from vajra_py.errors import ConfigError, Problem, VajraError, did_you_mean
from vajra_py.plugins import Registry
from vajra_py.runtime import assembly
from vajra_py.runtime.assembly import ReplicasetModel, Services, build_controller
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
        latencies: the same for replicasets that have another one.
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
    latencies: Mapping[str, LatencyModel] = field(default_factory=dict)

    def latency_of(self, replicaset: str) -> LatencyModel:
        """What a replicaset's policies ask."""
        return self.latencies.get(replicaset, self.latency)


@dataclass(slots=True)
class Engine:
    """Loaded workers and the controller over them; `close` gives everything back.

    Attributes:
        models: what each replicaset loaded.
    """

    controller: Controller
    units: Mapping[ReplicaKey, Unit]
    models: Mapping[str, ModelFacts]
    tenant_salt: bool
    make_clock: Callable[[], EngineClock]
    _workers: list[Worker] = field(default_factory=list)

    @classmethod
    def load(cls, config: ExperimentConfig, services: EngineServices) -> Engine:
        """Check, load, build.

        Raises `ConfigError` for what is wrong with settings or model, `ExecutorError` when a worker fails.
        """
        settings: EngineConfig = config.backend.settings
        replicasets = config.effective_replicasets
        _check(settings, replicasets)
        executor = EngineExecutor(1)
        dry = {
            name: assembly.ModelFacts(num_blocks=lambda block_size, fraction: _DRY_RUN_BLOCKS) for name in replicasets
        }
        _probe(build_controller(config, _services(services, dry, lambda name, replica_id: executor)))
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
        replicasets = config.effective_replicasets
        models = {name: checked_facts([workers[key] for key in workers if key[0] == name]) for name in replicasets}
        sizes = {name: _sizes(name, facts, workers) for name, facts in models.items()}
        executors = {
            (name, replica_id): EngineExecutor(options[name].max_requests)
            for name, one in replicasets.items()
            for replica_id in range(one.num_replicas)
        }
        all_services = _services(services, sizes, lambda name, replica_id: executors[name, replica_id])
        controller = build_controller(config, replace(all_services, records_copies=True))
        units = {
            key: Unit(controller.replicasets[key[0]].replicas[key[1]], executor, workers[key])
            for key, executor in executors.items()
        }
        salted = any(one.replica.memory.tenant_salt for one in replicasets.values())
        return cls(controller, units, models, salted, services.make_clock, list(workers.values()))

    @property
    def facts(self) -> ModelFacts:
        """The model, where there is only one."""
        return next(iter(self.models.values()))

    @property
    def vocab_size(self) -> int:
        """Tokens that every model knows."""
        return min(facts.vocab_size for facts in self.models.values())

    def model_of(self, request: RequestFacts) -> ModelFacts:
        """The model of the replicaset that takes this request. Raises `ConfigError` when none does."""
        return self.models[self.controller.select(request)]

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
        return min(map(self.prompt_limits_of, self.models), key=lambda limits: limits.max_request_tokens)

    def prompt_limits_of(self, replicaset: str) -> PromptLimits:
        """What a prompt may be there."""
        facts = self.models[replicaset]
        longest = max_request_tokens(self.controller.replicasets[replicaset].replicas[0])
        return PromptLimits(facts.vocab_size, facts.max_model_len, longest)

    def description(self) -> dict[str, object]:
        """By replicaset, sizes and names that a replay and a reader of the results need."""
        return {
            name: {
                "model_type": facts.model_type,
                "num_parameters": facts.num_parameters,
                "dtype": facts.dtype,
                "device": facts.device,
                "forward": facts.forward,
                "max_model_len": facts.max_model_len,
                "kv_bytes_per_token": facts.kv_bytes_per_token,
                "vocab_size": facts.vocab_size,
                "num_blocks": self.controller.replicasets[name].replicas[0].limits.num_blocks,
            }
            for name, facts in self.models.items()
        }

    def close(self) -> None:
        """Give back memory and processes; may be called twice."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close()


def _check(settings: EngineConfig, replicasets: Mapping[str, ReplicasetConfig]) -> None:
    problems = [
        Problem("backend.engine.replicasets", f"names no replicaset ({name!r})", did_you_mean(name, replicasets))
        for name in settings.replicasets
        if name not in replicasets
    ]
    models: dict[tuple[str, bool], None] = {}
    for name, one in replicasets.items():
        where = "replica" if len(replicasets) == 1 else f"replicasets.{name}.replica"
        problems += check_replica(where, one.replica)
        own = settings.of(name)
        models[own.model, own.random_weights] = None
    for model, random_weights in models:
        try:
            inspect_model(model, random_weights)
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


def _services(
    services: EngineServices,
    sizes: Mapping[str, assembly.ModelFacts],
    executor_of: Callable[[str, int], EngineExecutor],
) -> Services:
    return Services(
        registry=services.registry,
        latency=services.latency,
        output_lengths=services.output_lengths,
        seeds=services.seeds,
        facts=next(iter(sizes.values())),
        executor_of=executor_of,
        models={name: ReplicasetModel(services.latency_of(name), facts) for name, facts in sizes.items()},
    )


def _sizes(replicaset: str, facts: ModelFacts, workers: Mapping[ReplicaKey, Worker]) -> assembly.ModelFacts:
    return assembly.ModelFacts(
        num_blocks=lambda block_size, fraction: _profiled_blocks(replicaset, workers, fraction),
        max_model_len=facts.max_model_len,
        kv_bytes_per_token=facts.kv_bytes_per_token,
    )


def _options_by_replicaset(
    settings: EngineConfig, replicasets: Mapping[str, ReplicasetConfig]
) -> dict[str, RunnerOptions]:
    own = {name: settings.of(name) for name in replicasets}
    num_workers = sum(one.num_replicas * own[name].tensor_parallel for name, one in replicasets.items())
    num_threads = max(1, _usable_cores() // num_workers) if num_workers > 1 else None
    return {
        name: own[name].runner_options(one.replica, own[name].num_threads or num_threads)
        for name, one in replicasets.items()
    }


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
    threaded = services.threaded or len(keys) > 1
    workers: dict[ReplicaKey, Worker] = {}
    starting: list[ProcessWorker] = []
    ordinal = 0
    try:
        for key in keys:
            one = options[key[0]]
            if services.make_worker is not None:
                workers[key] = services.make_worker(key, one)
            elif settings.workers == "in_process" and one.tensor_parallel_size == 1:
                workers[key] = load_in_process(key, one, ordinal, threaded, services.load)
            else:
                workers[key] = worker = ProcessWorker(key, one, ordinal, services.load)
                starting.append(worker)
            ordinal += one.tensor_parallel_size
        for worker in starting:
            worker.wait_loaded()
    except BaseException:
        for started in workers.values():
            started.close()
        raise
    return workers


def _profiled_blocks(replicaset: str, workers: Mapping[ReplicaKey, Worker], fraction: float) -> int:
    """Blocks that every replica of a replicaset has room for; replicas on one device share its memory."""
    sharing = Counter(worker.facts.device for worker in workers.values())
    return min(
        worker.profile_num_blocks(fraction / sharing[worker.facts.device])
        for (name, _), worker in workers.items()
        if name == replicaset
    )
