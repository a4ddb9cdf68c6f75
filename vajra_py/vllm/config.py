"""Settings under `backend: {vllm: …}`.

Importing this loads neither vLLM nor a tensor library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from vajra_py.config import ReplicaConfig, ReplicasetConfig, register_backend
from vajra_py.config.sections import Text
from vajra_py.engine.compute import LoadRunner
from vajra_py.engine.compute.model.inspect import read_model_config
from vajra_py.engine.config import MAX_STEP_TOKENS, ModelBackendConfig
from vajra_py.engine.refusals import check_pools, check_replica, check_scaling, where_of
from vajra_py.errors import ConfigError, Problem
from vajra_py.vllm.options import VllmOptions
from vajra_py.vllm.support import check_version, installed_version

_NUM_SLOTS = 2**16
"""Request slots of a replica; a slot takes no memory here, so there are enough that no request should lose its slot. If
it did, vLLM's workers would get its output as part of the prompt, and penalties would no longer count this output."""

SAID_ELSEWHERE: Mapping[str, str] = {
    "async_scheduling": "Leave it out: this backend executes one step after another",
    "block_size": "Use replica.memory.block_size",
    "dtype": "Use dtype",
    "enable_prefix_caching": "Use replica.memory.prefix_cache.enabled",
    "gpu_memory_utilization": "Use replica.memory.memory_fraction",
    "max_model_len": "Use replica.max_model_len",
    "max_num_batched_tokens": "Use replica.max_batch_tokens",
    "max_num_seqs": "Use replica.max_batch_size",
    "model": "Use model",
    "num_gpu_blocks_override": "Use replica.memory.num_blocks",
    "scheduler_cls": "Use scheduling",
    "scheduling_policy": "Use scheduling",
    "seed": "Use weights_seed",
    "tensor_parallel_size": "Use tensor_parallel",
}
"""Arguments that `engine_args` may not contain because this backend sets them, each with the advice for the error
message.
"""

CPU_BLOCK_TOKENS = 32


class VllmBackendConfig(ModelBackendConfig):
    """Compute steps with a vLLM.

    If vLLM uses this package's scheduler (`--scheduler-cls`), only `latency`, `output_length`, `fallback` and
    `max_idle_steps` are read.
    """

    kind: ClassVar[str] = "vllm"
    can_swap: ClassVar[bool] = False
    can_move_kv: ClassVar[bool] = False

    device: Literal["cpu", "cuda"] = Field("cpu", description="Platform that the installed vLLM is built for.")
    workers: Literal["in_process", "process"] = Field(
        "in_process", description="Thread or process in which vLLM computes; several replicas need a process each."
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Further arguments of vLLM's engine by their names in Python, such as `{enforce_eager: true}`.",
    )
    fallback: Text | None = Field(
        None,
        description="With `--scheduler-cls`: preset whose policies replace one that breaks the contract, so that its requests finish; null: they end with an error.",
    )

    max_idle_steps: int = Field(
        1000,
        ge=1,
        description="With `--scheduler-cls`: maximum number of consecutive calls in which policies may schedule nothing while requests wait and nothing is computed; more break the contract. vLLM calls the scheduler about a thousand times a second.",
    )

    @model_validator(mode="after")
    def _not_set_twice(self) -> VllmBackendConfig:
        for name in self.engine_args:
            if name in SAID_ELSEWHERE:
                raise ValueError(f"engine_args.{name} is decided by another setting. {SAID_ELSEWHERE[name]}")
        return self

    def problems(self, replicasets: Mapping[str, ReplicasetConfig]) -> list[Problem]:
        """See `ModelBackendConfig`."""
        found: list[Problem] = []
        for name, one in replicasets.items():
            where = where_of(name, replicasets)
            found += problems_of(where, one.replica)
            if self.device == "cpu":
                found += _problems_of_blocks(where, one.replica.memory.block_size)
        found += check_scaling(self.kind, replicasets) + check_pools(self.kind, replicasets)
        if self.fallback is not None:
            message = f"applies to a vLLM that schedules by this file, which this one does not (got {self.fallback!r})"
            found.append(Problem("backend.vllm.fallback", message, "Allowed with --scheduler-cls"))
        num_replicas = sum(one.num_replicas for one in replicasets.values())
        if num_replicas > 1 and self.workers == "in_process":
            message = f"a process holds one vLLM (got {num_replicas} replicas)"
            found.append(Problem("backend.vllm.workers", message, "Allowed: process"))
        if self.tensor_parallel > 1 and self.workers == "process":
            message = f"vLLM's own processes cannot be started by a worker process (got {self.tensor_parallel} devices)"
            found.append(Problem("backend.vllm.workers", message, "Allowed with tensor_parallel: in_process"))
        return found

    def problems_here(self, replicasets: Mapping[str, ReplicasetConfig]) -> list[Problem]:
        """See `ModelBackendConfig`; vLLM must be installed in a supported version."""
        found: list[Problem] = []
        for check in (lambda: check_version(installed_version()), lambda: read_model_config(self.model)):
            try:
                check()
            except ConfigError as error:
                found += error.problems
        return found

    def runner_options(self, replica: ReplicaConfig, num_stages: int, num_threads: int | None) -> VllmOptions:
        """See `ModelBackendConfig`."""
        if num_stages > 1:
            message = f"the latency model has {num_stages} pipeline stages, and vLLM's steps have one here"
            raise ConfigError(Problem("backend.vllm.latency", message, "Use replica.pipeline_stages: 1"))
        return VllmOptions(
            model=self.model,
            random_weights=self.random_weights,
            seed=self.weights_seed,
            device=self.device,
            dtype=self.dtype,
            block_size=replica.memory.block_size,
            max_model_len=replica.max_model_len,
            max_requests=max(_NUM_SLOTS, replica.max_batch_size),
            max_step_tokens=max(replica.max_batch_tokens or MAX_STEP_TOKENS, replica.max_batch_size),
            num_threads=num_threads,
            max_batch_size=replica.max_batch_size,
            memory_fraction=replica.memory.memory_fraction,
            shards=self.tensor_parallel,
            engine_args=self.engine_args,
        )

    @property
    def load(self) -> LoadRunner:
        """See `ModelBackendConfig`."""
        from vajra_py.vllm.loading import load_vllm

        return load_vllm


def problems_of(where: str, replica: ReplicaConfig) -> list[Problem]:
    """Return a problem for each setting of a replica that cannot be used with any version of vLLM."""
    found = check_replica(where, replica)
    if replica.memory.tiers is not None:
        names = ", ".join(level.name for level in replica.memory.tiers.levels)
        message = f"cached content stays on the device with vLLM's workers (got tiers {names})"
        advice = "Allowed: null; `engine` has one on the host, `simulator` any"
        found.append(Problem(f"{where}.memory.tiers", message, advice))
    if replica.memory.host_blocks:
        message = f"vLLM's workers do not copy KV blocks to host memory (got {replica.memory.host_blocks})"
        found.append(Problem(f"{where}.memory.host_blocks", message, "Allowed: 0 (preemption recomputes)"))
    if replica.draft.most_tokens:
        message = f"drafts are not planned for vLLM's workers (got {replica.draft.most_tokens})"
        found.append(Problem(f"{where}.draft", message, "Allowed: num_tokens: 0; `engine` and `simulator` have drafts"))
    if (replica.pipeline_stages or 1) > 1:
        message = f"vLLM's steps have one stage here (got {replica.pipeline_stages})"
        found.append(Problem(f"{where}.pipeline_stages", message, "Allowed: 1"))
    if replica.kv_parallel.groups > 1:
        message = f"vLLM's workers have one KV memory (got {replica.kv_parallel.groups} groups)"
        found.append(Problem(f"{where}.kv_parallel.groups", message, "Allowed: 1"))
    return found


def _problems_of_blocks(where: str, block_size: int) -> list[Problem]:
    if block_size % CPU_BLOCK_TOKENS == 0:
        return []
    message = f"vLLM's attention on a CPU needs blocks of a multiple of {CPU_BLOCK_TOKENS} tokens (got {block_size})"
    return [Problem(f"{where}.memory.block_size", message, "Allowed: 32, 64, 128, …")]


register_backend("vllm", VllmBackendConfig)
