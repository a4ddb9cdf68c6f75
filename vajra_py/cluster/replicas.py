"""Engine replicas on a cluster: each rank is an actor, placed by the replica's placement group.

The controller stays in this process. If a node dies, all replicas with ranks on it are lost; the engine's `recovery`
settings determine how their requests are treated and whether they restart elsewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, TypeAlias

from vajra_py.cluster.connect import RayCluster
from vajra_py.cluster.rank import WATCH, Rank
from vajra_py.config import SystemConfig
from vajra_py.engine.compute import LoadAdapter, LoadRunner, LookaheadStep, ModelFacts, RunnerOptions, StepInput
from vajra_py.engine.config import MODEL_BACKENDS, ModelBackendConfig, PlacementConfig
from vajra_py.engine.kv_copy import KvExport, KvMove, RankCopy
from vajra_py.engine.rank_answers import RankAnswers
from vajra_py.engine.worker import Deliver, Finished, KvTask, ReplicaKey, Worker, described, facts_of_ranks
from vajra_py.errors import ConfigError, ExecutorError, Problem
from vajra_py.experiment.runs.backend import Backend, MakeBackend, Run
from vajra_py.experiment.runs.backends import make_backend

MakeWorker: TypeAlias = Callable[[ReplicaKey, RunnerOptions], Worker]


def engine_on(cluster: RayCluster) -> MakeBackend:
    """Return a factory of backends whose engine replicas are on the cluster."""

    def make(run: Run) -> Backend:
        from vajra_py.experiment.runs.engined import EngineRun

        if run.config.backend.kind not in MODEL_BACKENDS:
            return make_backend(run)
        return EngineRun(run, make_worker=workers_on(cluster, run.config))

    return make


def workers_on(cluster: RayCluster, config: SystemConfig) -> MakeWorker:
    """Return a factory of workers for the experiment's replicas on the cluster. Raises `ConfigError` for replicas with
    a memory tier.
    """
    settings: ModelBackendConfig = config.backend.settings
    if any(one.memory.tiers is not None for one in config.replica_settings):
        message = "content cannot be kept in a host tier where replicas run on a cluster"
        raise ConfigError(Problem("replica.memory.tiers", message, "Allowed: null, or a run without --on"))

    def make(replica: ReplicaKey, options: RunnerOptions) -> Worker:
        if options.adapters:
            message = f"workers on a cluster compute the base model only (got {len(options.adapters)} adapters)"
            raise ConfigError(Problem("replica.adapters", message, "Allowed: null, or without a cluster"))
        own = settings.of(replica[0])
        num_threads = own.num_threads or own.placement.cpus_per_rank
        return RayWorker(cluster, replica, replace(options, num_threads=num_threads), own.placement, settings.load)

    return make


class RayWorker:
    """Worker of one replica, whose ranks are actors on the cluster."""

    def __init__(
        self,
        cluster: RayCluster,
        replica: ReplicaKey,
        options: RunnerOptions,
        placement: PlacementConfig,
        load: LoadRunner,
    ) -> None:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if not cluster.is_there:
            raise ExecutorError("--on: the cluster is lost.")
        self._cluster, self._ray = cluster, cluster.ray
        ray = cluster.ray
        self._replica = replica
        self._options = options
        self._placement = placement
        self._facts: ModelFacts | None = None
        self._answers: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()
        self._exported: dict[tuple[int, int], Any] = {}
        """References to exported KV, by (rank, transfer number)."""
        self._receiver: threading.Thread | None = None
        self._closes = threading.Lock()
        resources, ranks = placement.resources(options.device), range(options.num_ranks)
        self._needs = f"{len(ranks)} x {resources}"
        self._group = placement_group([resources for _ in ranks], strategy=placement.strategy.upper())
        actor = ray.remote(num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0), concurrency_groups={WATCH: 1})(
            Rank
        )
        self._actors = [
            actor.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank),
                max_restarts=0,
            ).remote(replace(options, rank=rank), load)
            for rank in ranks
        ]
        rendezvous = self._actors[0].rendezvous.remote() if len(ranks) > 1 else None
        self._loading = [one.load.remote(rendezvous) for one in self._actors]

    def wait_loaded(self) -> None:
        """Wait until all ranks are placed on the cluster and have loaded the model; see `Worker`.

        Raises `ExecutorError` if placement takes too long.
        """
        ready, _ = self._ray.wait([self._group.ready()], timeout=self._placement.timeout_s)
        if not ready:
            what = f"replica {self._replica[1]} of {self._replica[0]} needs {self._needs}"
            free = {name: self._ray.available_resources().get(name, 0.0) for name in ("CPU", "GPU")}
            raise ExecutorError(
                f"placement: {what}, and the cluster has no such room after {self._placement.timeout_s:g} s (free: {free}). "
                "Allowed: fewer replicas or ranks, more nodes, another backend.engine.placement."
            )
        self._facts = facts_of_ranks(self._all(self._loading))

    @property
    def facts(self) -> ModelFacts:
        """Facts of the loaded model; see `Worker`."""
        assert self._facts is not None
        return self._facts

    def profile_num_blocks(self, memory_fraction: float) -> int:
        """Return the minimum number of KV blocks over all ranks; ranks on one device share its memory. See `Worker`."""
        devices = self.facts.device_ids  # one device id per rank
        return int(
            min(
                self._all(
                    [
                        actor.call.remote("profile_num_blocks", memory_fraction / devices.count(device))
                        for actor, device in zip(self._actors, devices, strict=True)
                    ]
                )
            )
        )

    def start(self, num_blocks: int, num_host_blocks: int, deliver: Deliver) -> None:
        """Allocate KV blocks on all ranks, and start to deliver results; see `Worker`."""
        blocks = num_blocks // self._options.kv_groups
        self._all([one.call.remote("allocate", blocks, num_host_blocks) for one in self._actors])
        for rank, one in enumerate(self._actors):
            self._expect(rank, one.watch.remote())
        name = f"vajra-ray-{self._replica[1]}"
        self._receiver = threading.Thread(target=self._receive, args=(deliver,), name=name, daemon=True)
        self._receiver.start()

    def submit(self, step: StepInput | LookaheadStep) -> None:
        """Send the step to all ranks; see `Worker`."""
        name = "run" if isinstance(step, StepInput) else "run_ahead"
        for rank, one in enumerate(self._actors):
            self._expect(rank, one.call.remote(name, step))

    def load_adapter(self, load: LoadAdapter) -> None:
        """Raise `ExecutorError`; not reached, since adapters are rejected before workers are created on a cluster."""
        raise ExecutorError("a worker on a cluster has no slots for adapters")

    def copy_kv(self, copy: KvTask) -> None:
        """Start a copy of KV; see `Worker`. KV goes from rank to rank through the object store, not this process."""
        for rank, one in enumerate(self._actors):
            if isinstance(copy, KvExport):
                done, content = one.export_kv.remote(copy.number, copy.block_ids)
                self._exported[rank, copy.number] = content
            elif isinstance(copy, KvMove):  # not reached: `workers_on` rejects memory tiers
                raise ExecutorError("a rank on a cluster has no memory tier")
            else:
                done = one.import_kv.remote(copy.number, copy.block_ids, copy.copies, [copy.content[rank]])
            self._expect(rank, done)

    def close(self) -> None:
        """End the actors, and release the resources that the placement group reserves for them; see `Worker`."""
        from ray.util.placement_group import remove_placement_group

        with self._closes:
            self._answers.put(None)
            if self._receiver is not None:
                self._receiver.join()
            self._receiver = None
            if self._cluster.is_there:
                with suppress(Exception):  # if the cluster was lost since the check, it has no actors
                    for one in self._actors:
                        self._ray.kill(one)
                    remove_placement_group(self._group)
            self._actors = []

    def discard(self) -> None:
        """End the actors, as `close` does; see `Worker`."""
        self.close()

    def _all(self, references: Sequence[Any]) -> list[Any]:
        """Return each rank's result. Raise the first error at once, since other ranks may wait forever for a failed
        rank.
        """
        waiting = list(references)
        while waiting:
            done, waiting = self._ray.wait(waiting)
            for one in done:
                self._answer(one)
        return [self._answer(one) for one in references]

    def _answer(self, reference: Any) -> Any:
        """Return an actor's response. Raises the error in the response, or `ExecutorError` if the actor is gone."""
        try:
            answer = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            raise ExecutorError(_gone(error)) from None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _expect(self, rank: int, reference: Any) -> None:
        """Queue a rank's result for the receiver once it is ready."""
        reference.future().add_done_callback(lambda done: self._answers.put((rank, done)))

    def _receive(self, deliver: Deliver) -> None:
        """Deliver steps as they complete, until a rank is lost or the worker is closed."""
        answers = RankAnswers(self._replica, self._options)
        while (item := self._answers.get()) is not None:
            rank, done = item
            try:
                answer = done.result()
            except Exception as error:  # the actor is gone
                answer = ExecutorError(_gone(error))
            if isinstance(answer, RankCopy) and answer.part is not None:
                answer = replace(answer, part=self._exported.pop((rank, answer.number)))
            if isinstance(answer, BaseException):
                deliver(Finished(self._replica, None, described(answer)))
                return
            for one in answers.take(rank, answer):
                deliver(one)


def _gone(error: Exception) -> str:
    """Return the one line of Ray's error that explains why an actor does not respond."""
    lines = [one.strip() for one in str(error).splitlines() if one.strip()]
    return f"a rank on the cluster is gone ({lines[0] if lines else type(error).__name__})"
