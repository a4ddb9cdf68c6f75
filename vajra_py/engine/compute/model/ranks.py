"""The ranks that compute one replica together, and each rank's part of a step.

A replica consists of KV-parallel groups, each group of pipeline stages, each stage of tensor-parallel ranks. Every rank
receives the same steps in the same order and computes its part: a stage computes its layers, and a group computes the
requests of which it holds KV.

Invariants:
    - The shapes and the order of exchanged tensors are not sent: each rank derives them from the step.
    - A token is sampled only on the last stage, in the group that holds the request's newest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import distributed

from vajra_py.engine.compute.interface import Chunk, RunnerOptions, StepInput
from vajra_py.engine.compute.model.attention import LayerFacts
from vajra_py.engine.compute.model.kv_groups import GroupLinks
from vajra_py.engine.compute.model.shard import Shard
from vajra_py.engine.compute.model.stage import Stage
from vajra_py.errors import ConfigError, ExecutorError, Problem


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank's position in its replica, and its connections to the other ranks."""

    shard: Shard = field(default_factory=Shard)
    stage: Stage = field(default_factory=Stage)
    groups: GroupLinks | None = None
    """Links to the other KV-parallel groups; None without KV parallelism."""

    @property
    def is_alone(self) -> bool:
        """True if this rank computes the whole replica."""
        return self.shard.size == 1 and self.stage.count == 1 and self.groups is None

    @property
    def divides_layers(self) -> bool:
        """True if this rank holds only a part of the model."""
        return self.shard.size > 1 or self.stage.count > 1

    def own_layers(self, layers: Sequence[LayerFacts]) -> list[LayerFacts]:
        """Return the facts of this rank's layers, numbered from 0."""
        own = [layers[index] for index in self.stage.layers(len(layers))]
        return [replace(self.shard.layer(one), layer_index=index) for index, one in enumerate(own)]

    def part(self, step: StepInput) -> StepInput:
        """Return this rank's part of a step; `samples` stays set only in chunks whose token is sampled on this rank."""
        groups = self.groups
        if groups is None and self.stage.is_last:
            return step
        chunks = step.chunks if groups is None else [one for one in step.chunks if groups.own in one.groups]
        return replace(
            step,
            chunks=[self._chunk(one) for one in chunks],
            tables=step.tables if groups is None else [one for one in step.tables if one.group == groups.own],
        )

    def _chunk(self, chunk: Chunk) -> Chunk:
        is_newest = self.groups is None or chunk.groups[-1] == self.groups.own
        if self.stage.is_last and is_newest:
            return chunk
        return replace(chunk, samples=False, followers=())


def join_ranks(options: RunnerOptions) -> Ranks:
    """Connect to the other ranks, if any, and return this rank's position.

    Raises:
        ConfigError: the rendezvous is missing, or the ranks cannot connect.
    """
    rank, size = options.rank, options.num_ranks
    if size == 1:
        return Ranks()
    if options.rendezvous is None:
        raise ConfigError(Problem("rendezvous", f"missing for {size} ranks", "Give tcp://host:port or file:///path"))
    backend = "nccl" if options.device.startswith("cuda") else "gloo"
    try:
        distributed.init_process_group(backend, init_method=options.rendezvous, rank=rank, world_size=size)
        shared, parallel = _own_groups(options)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(Problem("rendezvous", f"rank {rank} of {size} does not meet the others ({error})")) from error
    group, stage, tensor_rank = options.kv_group, options.stage, options.tensor_rank
    last = options.pipeline_stages - 1
    return Ranks(
        Shard(tensor_rank, options.tensor_parallel_size, shared),
        Stage(
            stage,
            options.pipeline_stages,
            options.rank_of(group, stage - 1, tensor_rank) if stage else None,
            options.rank_of(group, stage + 1, tensor_rank) if stage < last else None,
        ),
        None
        if options.kv_groups == 1
        else GroupLinks(
            group,
            options.kv_group_tokens,
            [options.rank_of(one, stage, tensor_rank) for one in range(options.kv_groups)],
            parallel,
        ),
    )


def _own_groups(
    options: RunnerOptions,
) -> tuple[distributed.ProcessGroup | None, distributed.ProcessGroup | None]:
    """Return this rank's two process groups: the ranks that share its layers, and the ranks of all KV groups with the
    same stage and tensor-parallel rank.

    A process group of a single rank is None.

    Every rank creates every group, in the same order, as torch requires.
    """
    shared = parallel = None
    tensor, stages, groups = options.tensor_parallel_size, options.pipeline_stages, options.kv_groups
    if tensor > 1:
        for group in range(groups):
            for stage in range(stages):
                members = [options.rank_of(group, stage, one) for one in range(tensor)]
                made = distributed.new_group(members)
                shared = made if options.rank in members else shared
    if groups > 1:
        for stage in range(stages):
            for one in range(tensor):
                members = [options.rank_of(group, stage, one) for group in range(groups)]
                made = distributed.new_group(members)
                parallel = made if options.rank in members else parallel
    return shared, parallel


def leave_ranks() -> None:
    """Leave the replica's process groups, if this rank has joined any."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def swap_file(options: RunnerOptions) -> str:
    """Return the path of a file for swapped-out KV blocks; the ranks of all KV groups with the same layers share it.

    Raises:
        ExecutorError: the rendezvous is a network address, so the ranks do not necessarily share a file system.
    """
    scheme, _, path = (options.rendezvous or "").partition("://")
    if scheme != "file":
        raise ExecutorError(
            f"KV memory: swapping between KV-parallel groups needs shared files (rendezvous {options.rendezvous}). "
            "Use a file:///path, or no host blocks."
        )
    return f"{path}.swap-{options.stage}-{options.tensor_rank}"
