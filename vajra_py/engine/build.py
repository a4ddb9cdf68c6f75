"""Load workers and build their controller, from an experiment's settings.

Errors that can be detected without a model (settings, policies, files) are raised before a model is loaded.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from msgspec import structs

from vajra_py.config import DEFAULT_POOL, ReplicasetConfig, SystemConfig, system_from_mapping
from vajra_py.contract import Layer, PoolRole
from vajra_py.contract.latency import LatencyModel, OutputLengthPredictor
from vajra_py.engine.ahead import LookAhead, spare_blocks
from vajra_py.engine.clock import EngineClock, WallClock
from vajra_py.engine.compute import LoadRunner, ModelFacts, RunnerOptions
from vajra_py.engine.config import EngineConfig, ModelBackendConfig
from vajra_py.engine.drafts import NgramRules
from vajra_py.engine.executor import EngineExecutor
from vajra_py.engine.kv_transfers import check_transfers
from vajra_py.engine.loop import EngineLoop
from vajra_py.engine.params import PromptLimits
from vajra_py.engine.processes import ProcessWorker
from vajra_py.engine.replica import EngineReplica, LoopOptions
from vajra_py.engine.step_watch import LoadLimit, StepWatch
from vajra_py.engine.supervision import MakeRestarter, Restarter, RestartLimits, Supervisor
from vajra_py.engine.tier_copies import num_host_blocks
from vajra_py.engine.worker import Deliver, ReplicaKey, Worker, checked_facts, close_all, load_in_process
from vajra_py.errors import ConfigError, Problem, VajraError, did_you_mean
from vajra_py.plugins import Registry
from vajra_py.runtime.kv import PrivateBlockHashes
from vajra_py.runtime.records.input_log import Input, PolicyChange
from vajra_py.runtime.requests.request import Request, RequestFacts
from vajra_py.runtime.serving import build as mechanism
from vajra_py.runtime.serving.build import ReplicasetModel, Services, build_controller
from vajra_py.runtime.serving.controller import Controller
from vajra_py.runtime.serving.pools import check_reach
from vajra_py.runtime.support.seeds import SeedTree

PoolSizes: TypeAlias = Mapping[str, mechanism.ModelFacts]
"""Sizes of a replicaset's replicas (number of KV blocks, longest sequence, KV bytes per token), by pool."""

_DRY_RUN_BLOCKS = 1 << 20
_PROBE_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class EngineServices:
    """Services that an engine gets from its caller.

    Attributes:
        registry: installed policies.
        latency: latency model for the policies' predictions.
        latencies: latency models that replace `latency` for single replicasets, by replicaset.
        output_lengths: predictor of output lengths for the policies.
        seeds: seeds of the policies' random streams.
        load: function that creates a worker's runner.
        make_clock: creates the clock; called when everything is loaded.
        threaded: True if an in-process replica computes in its own thread even if it is the only replica.
        make_worker: function that creates a replica's worker; None: `WorkerMaker` chooses its kind by the settings.
        make_restarter: function that creates the object that replaces lost workers; None: a `Supervisor`.
    """

    registry: Registry
    latency: LatencyModel
    output_lengths: OutputLengthPredictor
    seeds: SeedTree
    load: LoadRunner
    make_clock: Callable[[], EngineClock] = WallClock
    threaded: bool = False
    make_worker: Callable[[ReplicaKey, RunnerOptions], Worker] | None = None
    make_restarter: MakeRestarter | None = None
    latencies: Mapping[str, LatencyModel] = field(default_factory=dict)

    def latency_of(self, replicaset: str) -> LatencyModel:
        """Return the latency model of a replicaset's policies."""
        return self.latencies.get(replicaset, self.latency)


@dataclass(frozen=True, slots=True)
class WorkerMaker:
    """Creates the workers of an engine: all at start-up, and a new one when one is lost.

    Attributes:
        services: services of the engine.
        options: options of the runner of each replica's worker.
        ordinals: index of the first device of each replica.
        in_process: True if workers compute in this process.
    """

    services: EngineServices
    options: Mapping[ReplicaKey, RunnerOptions]
    ordinals: Mapping[ReplicaKey, int]
    in_process: bool

    @classmethod
    def of(
        cls, settings: ModelBackendConfig, replicasets: Mapping[str, ReplicasetConfig], services: EngineServices
    ) -> WorkerMaker:
        """Return the maker for these settings."""
        options = _options_by_replica(settings, replicasets, services)
        ordinals: dict[ReplicaKey, int] = {}
        ordinal = 0
        for key, one in options.items():
            ordinals[key] = ordinal
            ordinal += one.num_ranks
        return cls(services, options, ordinals, settings.workers == "in_process")

    def begin(self, replica: ReplicaKey) -> Worker:
        """Return a worker that is loaded, or still loading in its own processes; the caller calls `wait_loaded`."""
        services, options, ordinal = self.services, self.options[replica], self.ordinals[replica]
        if services.make_worker is not None:
            return services.make_worker(replica, options)
        if self.in_process and options.num_ranks == 1:
            threaded = services.threaded or len(self.ordinals) > 1
            return load_in_process(replica, options, ordinal, threaded, services.load)
        return ProcessWorker(replica, options, ordinal, services.load)


@dataclass(slots=True)
class Engine:
    """Loaded workers and their controller; `close` releases them.

    Attributes:
        models: facts of the model that each replicaset loaded.
    """

    controller: Controller
    replicas: Mapping[ReplicaKey, EngineReplica]
    models: Mapping[str, ModelFacts]
    tenant_salt: bool
    config: SystemConfig
    maker: WorkerMaker
    restarter: Restarter | None = None
    watch: StepWatch | None = None
    load_s: float = 0.0
    """Duration of loading, in seconds."""
    _restarted: dict[ReplicaKey, Worker] = field(default_factory=dict)  # workers that the loop may not have yet
    _is_closed: bool = False

    @classmethod
    def load(cls, config: SystemConfig, services: EngineServices) -> Engine:
        """Check the settings, load the workers, and build the engine.

        Raises `ConfigError` for errors in settings or model, `ExecutorError` if a worker fails.
        """
        settings: ModelBackendConfig = config.backend.settings
        lacking = settings.problems_here(config.effective_replicasets)
        cls.check(config, services, lacking)
        maker = WorkerMaker.of(settings, config.effective_replicasets, services)
        began = time.monotonic()
        workers = _load_workers(maker)
        load_s = time.monotonic() - began
        try:
            engine = cls._built(config, maker, workers)
            engine.load_s = load_s
            return engine
        except BaseException:
            close_all(workers.values())
            raise

    @staticmethod
    def check(config: SystemConfig, services: EngineServices, lacking: Sequence[Problem] = ()) -> None:
        """Check that replicas and policies can be built; no model is loaded.

        `lacking` holds problems found earlier. Raises `ConfigError` for these and for errors in the settings.
        """
        settings: ModelBackendConfig = config.backend.settings
        replicasets = config.effective_replicasets
        problems = [*settings.problems(replicasets), *lacking]
        if problems:
            raise ConfigError(problems)
        unknown = mechanism.ModelFacts(lambda block_size, fraction: _DRY_RUN_BLOCKS, kv_bytes_per_token=1)
        dry = {name: dict.fromkeys(one.effective_pools, unknown) for name, one in replicasets.items()}
        controller = _dry_controller(config, services, dry)
        check_transfers(controller, settings)
        check_reach(config, controller)
        _probe(controller)

    @classmethod
    def _built(cls, config: SystemConfig, maker: WorkerMaker, workers: Mapping[ReplicaKey, Worker]) -> Engine:
        services = maker.services
        replicasets = config.effective_replicasets
        models = {name: _facts_of(name, one, workers) for name, one in replicasets.items()}
        sizes = {name: _sizes(name, one, workers) for name, one in replicasets.items()}
        executors = {key: _executor(maker.options[key], config.backend.settings) for key in workers}
        all_services = _services(services, sizes, lambda name, replica_id: executors[name, replica_id])
        served = config.backend.settings.served_models(replicasets)
        controller = build_controller(config, structs.replace(all_services, records_copies=True, served_models=served))
        replicas = {
            key: EngineReplica(controller.replicasets[key[0]].replicas[key[1]], executor, workers[key])
            for key, executor in executors.items()
        }
        for key, one in replicas.items():
            if maker.options[key].spare_blocks and not maker.options[key].max_drafts:
                one.ahead = LookAhead(one.replica, one.executor)
        salted = any(one.memory.tenant_salt for one in config.replica_settings)
        return cls(controller, replicas, models, salted, config, maker)

    @property
    def facts(self) -> ModelFacts:
        """Facts of the model; only for an engine with one model."""
        return next(iter(self.models.values()))

    @property
    def vocab_size(self) -> int:
        """Number of token ids that are valid in every model: the smallest vocabulary size."""
        return min(facts.vocab_size for facts in self.models.values())

    def model_of(self, request: RequestFacts) -> ModelFacts:
        """Return the model facts of the replicaset that takes this request. Raises `ConfigError` if none does."""
        return self.models[self.controller.select(request)]

    def check_change(self, replicaset: str, layer: Layer, policy: str, params: Mapping[str, Any]) -> PolicyChange:
        """Return a validated change of policy for the loop: names and parameters are checked, defaults filled in.

        Raises `ConfigError`, or the error that the policy raises when it is built or called with a synthetic request.
        Thread-safe.
        """
        if replicaset not in self.models:
            message = f"there is no such replicaset ({replicaset!r})"
            raise ConfigError(Problem("replicaset", message, did_you_mean(replicaset, self.models)))
        settings = self.config.model_dump(mode="json", by_alias=True, exclude={"sweep"})
        scheduling = {}
        for name, one in self.controller.replicasets.items():
            assert one.policies is not None
            scheduling[name] = {
                other.value: choice.model_dump() for other, choice in one.policies.common_choices().items()
            }
        scheduling[replicaset][layer.value] = {"policy": policy, "params": dict(params)}
        for name, each in scheduling.items():
            (settings["replicasets"][name] if settings.get("replicasets") else settings)["scheduling"] = each
        config = system_from_mapping(settings, (), self.maker.services.registry)
        sizes = {name: self._sizes_in_force(name) for name in self.models}
        _probe(_dry_controller(config, self.maker.services, sizes), strict=True)
        return PolicyChange(replicaset, layer, config.effective_replicasets[replicaset].scheduling.choice(layer))

    def start(
        self,
        *,
        serves: bool = False,
        note: Callable[[Input], None] | None = None,
        check_every_steps: int = 0,
        isolates_policies: bool = False,
    ) -> EngineLoop:
        """Allocate KV memory and create the loop; its clock starts now. May be called only once."""
        settings: ModelBackendConfig = self.config.backend.settings
        recovery = settings.recovery.when(serves=serves)
        options = LoopOptions(
            serves=serves,
            tenant_salt=self.tenant_salt,
            check_every_steps=check_every_steps,
            max_reruns=recovery.max_reruns,
            wait_s=recovery.wait_s,
            isolates_policies=isolates_policies,
            policy_timeout_s=self.config.policy_timeout_s,
        )
        loop = EngineLoop(self.controller, self.replicas, self.maker.services.make_clock(), options, note)
        if recovery.watches_steps:
            self.watch = StepWatch(recovery.step_timeout_s)
        for key, one in self.replicas.items():
            self._allocate(key, one.worker, loop)
            one.watch = self.watch
        make_restarter = self.maker.services.make_restarter or Supervisor
        limits = RestartLimits(recovery.max_restarts, recovery.backoff_s, recovery.settled_s)
        load_limit = LoadLimit(self.load_s)

        def finish(replica: ReplicaKey, worker: Worker) -> None:
            load_limit.wait_loaded(worker)
            checked_facts([self.models[replica[0]], worker.facts])
            self._allocate(replica, worker, loop)
            self._restarted[replica] = worker

        loop.restarter = self.restarter = make_restarter(limits, self.maker.begin, finish, loop.inbox.put)
        return loop

    def _allocate(self, replica: ReplicaKey, worker: Worker, loop: EngineLoop) -> None:
        one = self.replicas[replica].replica
        put: Deliver = loop.inbox.put
        deliver = put if self.watch is None else self.watch.watched(replica, worker, put)
        worker.start(one.limits.num_blocks, num_host_blocks(one), deliver)

    def prompt_limits(self) -> PromptLimits:
        """Return the prompt limits of the replicaset with the smallest `max_request_tokens`."""
        return min(map(self.prompt_limits_of, self.models), key=lambda limits: limits.max_request_tokens)

    def prompt_limits_of(self, replicaset: str) -> PromptLimits:
        """Return the prompt limits of this replicaset."""
        facts = self.models[replicaset]
        longest = self.controller.replicasets[replicaset].bounds.max_request_tokens
        return PromptLimits(facts.vocab_size, facts.max_model_len, longest)

    def description(self) -> dict[str, object]:
        """Return the type and sizes of each replicaset's model, for replays and for readers of the results."""
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
                **self._described_pools(name),
            }
            for name, facts in self.models.items()
        }

    def _described_pools(self, replicaset: str) -> dict[str, object]:
        """Return the number of KV blocks of each replica; with named pools, that number and `max_model_len` by pool."""
        replicas = {one.parts.pool: one for one in reversed(self.controller.replicasets[replicaset].replicas)}
        if not self.config.effective_replicasets[replicaset].pools:
            return {"num_blocks": replicas[DEFAULT_POOL].limits.num_blocks}
        pools = {
            name: {"num_blocks": one.limits.num_blocks, "max_model_len": one.limits.max_model_len}
            for name, one in reversed(replicas.items())
        }
        return {"pools": pools}

    def _sizes_in_force(self, replicaset: str) -> PoolSizes:
        """Return the sizes that the running replicas were built with, by pool."""
        facts, pools = self.models[replicaset], self.config.effective_replicasets[replicaset].effective_pools
        replicas = {one.parts.pool: one for one in self.controller.replicasets[replicaset].replicas}
        return {
            name: _sizes_of(facts, one.limits.num_blocks + pools[name].replica.adapter_blocks, one.limits.max_model_len)
            for name, one in replicas.items()
        }

    def discard_workers(self) -> None:
        """Kill the workers without waiting. Thread-safe. Steps in flight are lost."""
        for one in self.replicas.values():
            threading.Thread(target=one.worker.discard, name="vajra-discard", daemon=True).start()

    def close(self) -> None:
        """Release memory and processes; may be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.restarter is not None:
            self.restarter.close()  # a load may wait for a hanging step, which only the watch can end
        if self.watch is not None:
            self.watch.close()
        close_all(dict.fromkeys([*(one.worker for one in self.replicas.values()), *self._restarted.values()]))


def _dry_controller(config: SystemConfig, services: EngineServices, sizes: Mapping[str, PoolSizes]) -> Controller:
    """Build the controller without workers."""
    executor = EngineExecutor(1)
    return build_controller(config, _services(services, sizes, lambda name, replica_id: executor))


def _probe(controller: Controller, *, strict: bool = False) -> None:
    """Call every policy with a synthetic request, so that missing settings are reported at start-up.

    Raises a policy's `ConfigError`. Other errors of a policy are raised only if `strict` is set; otherwise they are
    ignored, since the run raises them if they occur again.
    """
    for name, replicaset in controller.replicasets.items():
        num_tokens = max(1, min(_PROBE_TOKENS, replicaset.bounds.max_model_len - 1))
        request = Request(RequestFacts("probe", num_tokens), 0, 0.0, 1)
        request.replicaset = name
        request.hashes = PrivateBlockHashes("probe")
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
            if strict:
                raise


def _services(
    services: EngineServices,
    sizes: Mapping[str, PoolSizes],
    executor_of: Callable[[str, int], EngineExecutor],
) -> Services:
    models = {}
    for name, pools in sizes.items():
        latency = services.latency_of(name)
        by_pool = {pool: ReplicasetModel(latency, facts) for pool, facts in pools.items()}
        models[name] = ReplicasetModel(latency, next(iter(pools.values())), by_pool)
    return Services(
        registry=services.registry,
        latency=services.latency,
        output_lengths=services.output_lengths,
        seeds=services.seeds,
        facts=next(iter(models.values())).facts,
        executor_of=executor_of,
        models=models,
    )


def _sizes_of(facts: ModelFacts, num_blocks: int, max_model_len: int) -> mechanism.ModelFacts:
    return mechanism.ModelFacts(
        num_blocks=lambda block_size, fraction: num_blocks,
        max_model_len=max_model_len,
        kv_bytes_per_token=facts.kv_bytes_per_token,
    )


def _sizes(replicaset: str, settings: ReplicasetConfig, workers: Mapping[ReplicaKey, Worker]) -> PoolSizes:
    sizes = {}
    for pool, replica_ids in replica_ids_of(settings).items():
        keys = [(replicaset, one) for one in replica_ids]
        facts = workers[keys[0]].facts
        sizes[pool] = mechanism.ModelFacts(
            num_blocks=partial(_profiled_blocks, keys, workers),
            max_model_len=facts.max_model_len,
            kv_bytes_per_token=facts.kv_bytes_per_token,
        )
    return sizes


def _facts_of(replicaset: str, settings: ReplicasetConfig, workers: Mapping[ReplicaKey, Worker]) -> ModelFacts:
    """Return a replicaset's model facts; `max_model_len` is the largest among pools in which requests can end."""
    facts = checked_facts([worker.facts for key, worker in workers.items() if key[0] == replicaset])
    ids = replica_ids_of(settings)
    ending = [pool for pool in ids if settings.role_of(pool) is not PoolRole.PREFILL]
    longest = max(workers[replicaset, ids[pool].start].facts.max_model_len for pool in ending)
    return replace(facts, max_model_len=longest)


def replica_ids_of(settings: ReplicasetConfig) -> dict[str, range]:
    """Return the ids of each pool's replicas."""
    found: dict[str, range] = {}
    first = 0
    for name, pool in settings.effective_pools.items():
        found[name] = range(first, first := first + pool.most_replicas)
    return found


def _options_by_replica(
    settings: ModelBackendConfig, replicasets: Mapping[str, ReplicasetConfig], services: EngineServices
) -> dict[ReplicaKey, RunnerOptions]:
    options: dict[ReplicaKey, RunnerOptions] = {}
    for name, one in replicasets.items():
        own = settings.of(name)
        for pool, replica_ids in replica_ids_of(one).items():
            replica = one.effective_pools[pool].replica
            num_stages = replica.pipeline_stages or services.latency_of(name).num_stages
            of_pool = own.runner_options(replica, num_stages, own.num_threads)
            asked: bool | None = settings.begins_ahead
            if asked or (asked is None and of_pool.device.startswith("cuda")):
                of_pool = replace(of_pool, spare_blocks=spare_blocks(of_pool.max_requests))
            options |= {(name, replica_id): of_pool for replica_id in replica_ids}
    num_workers = sum(one.num_ranks for one in options.values())
    if num_workers == 1:
        return options
    num_threads = max(1, _usable_cores() // num_workers)
    return {key: replace(one, num_threads=one.num_threads or num_threads) for key, one in options.items()}


def _executor(options: RunnerOptions, settings: ModelBackendConfig) -> EngineExecutor:
    ngrams = None
    if options.max_drafts and isinstance(settings, EngineConfig):
        ngrams = NgramRules(settings.ngram.min_tokens, settings.ngram.max_tokens, options.max_drafts)
    is_spread = options.pipeline_stages > 1 or options.kv_groups > 1
    return EngineExecutor(options.max_requests, options.block_size, sends_tokens=is_spread, ngrams=ngrams)


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _load_workers(maker: WorkerMaker) -> dict[ReplicaKey, Worker]:
    workers: dict[ReplicaKey, Worker] = {}
    try:
        for key in maker.ordinals:
            workers[key] = maker.begin(key)
        for worker in workers.values():
            worker.wait_loaded()
    except BaseException:
        close_all(workers.values())
        raise
    return workers


def _profiled_blocks(
    pool: Sequence[ReplicaKey], workers: Mapping[ReplicaKey, Worker], block_size: int, fraction: float
) -> int:
    """Return the number of KV blocks that each replica of a pool can hold. Replicas on one device share its memory."""
    devices = {key: set(worker.facts.device_ids) for key, worker in workers.items()}
    sharing = Counter(name for names in devices.values() for name in names)
    return min(workers[key].profile_num_blocks(fraction / max(sharing[one] for one in devices[key])) for key in pool)
