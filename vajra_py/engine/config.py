"""Settings of backends that compute with a model, and of `backend: {engine: …}`: model, device, processes.

Importing this module loads no tensor library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple, Self, TypeAlias

from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from vajra_py.config import ReplicaConfig, ReplicasetConfig, TypedChoice, register_backend
from vajra_py.config.adapters import AdaptersConfig
from vajra_py.config.sections import Count, PositiveCount, Seconds, Section, Switch, Text
from vajra_py.engine.compute import AdapterSource, LoadRunner, RunnerOptions, inspect_model, load_runner
from vajra_py.engine.compute.interface import SamplingParams
from vajra_py.engine.compute.model.adapter_files import inspect_adapter
from vajra_py.engine.params import check_sampling
from vajra_py.engine.refusals import check_replica, check_scaling, check_tiers, replicas_by_place
from vajra_py.errors import ConfigError, Problem, did_you_mean

Number: TypeAlias = Annotated[float, Field(strict=True)]
SLOTS_PER_BATCH_ENTRY = 2
"""Request slots of a worker, as a multiple of the largest batch. With more than 1, requests that skip steps keep their
slots, and need not be sent to the worker again."""

MODEL_BACKENDS = ("engine", "vllm")
"""Names of the backends that compute with a model."""

MAX_GRAPH_ROWS = 256
"""Largest batch of decodes that is captured as a graph; in larger batches, computation exceeds launch overhead by far.
"""

MAX_STEP_TOKENS = 8192
"""Tokens per step for which memory is reserved if the settings give no limit."""


class SamplingConfig(Section):
    """Token sampling of an experiment; greedy unless set otherwise."""

    temperature: Number = Field(0.0, description="Sampling temperature; 0: greedy.")
    top_k: PositiveCount | None = Field(None, description="Sample from the k most likely tokens only; null: all.")
    top_p: Number = Field(
        1.0, description="Sample from the smallest set of most likely tokens whose probabilities reach this sum."
    )
    min_p: Number = Field(
        0.0, description="Sample only from tokens with at least this fraction of the largest probability."
    )
    presence_penalty: Number = Field(0.0, description="Penalty on the logit of every token already generated.")
    frequency_penalty: Number = Field(
        0.0, description="Penalty on a token's logit for each time that it was generated."
    )
    repetition_penalty: Number = Field(
        1.0, description="Factor that reduces the logits of tokens in the prompt or output."
    )
    ignore_eos: Switch = Field(
        True,
        description=(
            "Generate as many tokens as the workload states, ignoring the end-of-sequence token; false: a request ends with that token, or at the workload's length."
        ),
    )

    @model_validator(mode="after")
    def _possible(self) -> SamplingConfig:
        try:
            check_sampling(self.params(1), "sampling")
        except ConfigError as error:
            reasons = [str(one).removeprefix("sampling.").removesuffix(".") for one in error.problems]
            raise ValueError("; ".join(reasons)) from None
        return self

    def params(self, max_tokens: int) -> SamplingParams:
        """Return the sampling parameters of a request that generates up to `max_tokens` tokens."""
        return SamplingParams(max_tokens=max_tokens, **self.model_dump())


def _seen_from_base_folder(model: str, info: ValidationInfo) -> str:
    folder = info.context.get("base_folder") if isinstance(info.context, dict) else None
    if folder is not None and not Path(model).is_absolute() and (Path(folder) / model).exists():
        return str(Path(folder) / model)
    return model


ModelFolder: TypeAlias = Annotated[Text, AfterValidator(_seen_from_base_folder)]
Device: TypeAlias = Annotated[str, Field(strict=True, pattern=r"^(cpu|cuda(:\d+)?)$")]
Dtype: TypeAlias = Literal["auto", "float32", "float16", "bfloat16"]


class PlacementConfig(Section):
    """Placement of a replica's ranks on a cluster; used only with `--on`."""

    cpus_per_rank: PositiveCount = Field(
        1,
        description="Number of CPUs that each rank reserves; it computes with as many threads unless num_threads is given.",
    )
    gpus_per_rank: Annotated[float, Field(strict=True, ge=0)] | None = Field(
        None, description="Number of GPUs that each rank reserves; null: 1 on a CUDA device, else 0."
    )
    strategy: Literal["pack", "spread", "strict_pack", "strict_spread"] = Field(
        "pack",
        description="Ray's placement of one replica's ranks: on one node where possible, on different nodes where possible, on one node, or each on its own.",
    )
    timeout_s: Annotated[float, Field(strict=True, gt=0)] = Field(
        60.0, description="Time that a replica waits for resources of the cluster before its start fails, seconds."
    )

    def resources(self, device: str) -> dict[str, float]:
        """Return the resources that a rank reserves on its node, by Ray's resource names."""
        num_gpus = self.gpus_per_rank
        if num_gpus is None:
            num_gpus = 1.0 if device.startswith("cuda") else 0.0
        return {"CPU": float(self.cpus_per_rank)} | ({"GPU": num_gpus} if num_gpus else {})


class ReplicasetEngineConfig(Section):
    """Settings of one replicaset that replace those of the section `engine`; null: not replaced (but see `latency`)."""

    model: ModelFolder | None = Field(None, description="Directory of its model.")
    random_weights: Switch | None = Field(None, description="Use random weights instead of reading them.")
    weights_seed: Count | None = Field(None, description="Seed of random weights.")
    device: Device | None = Field(None, description="cpu, cuda or cuda:N.")
    dtype: Dtype | None = Field(None, description="Computing type.")
    num_threads: PositiveCount | None = Field(
        None, description="Number of threads of a replica's computation on a CPU."
    )
    tensor_parallel: PositiveCount | None = Field(
        None, description="Number of devices that each layer is divided among."
    )
    placement: PlacementConfig | None = Field(None, description="Placement of its ranks on a cluster.")
    latency: TypedChoice | None = Field(
        None, description="Latency model of predictions for it; null: none where it has a `model` of its own."
    )


class RecoveryConfig(Section):
    """Handling of a replica whose worker is lost, and of its requests."""

    max_reruns: Count | None = Field(
        None,
        description=(
            "Number of times that a request is computed again, with its tokens so far, after replicas failed while computing it alone; then it ends as failed. The requests of a failed step are computed one by one afterwards, so that only the one at fault counts. null: 3 on a server; in a run, all requests of a failed replica end."
        ),
    )
    max_restarts: Count | None = Field(
        None,
        description=(
            "Number of consecutive failed starts (the replica does not load, or is lost before its first step ends) after which it is given up; a start that computes a step resets the count. null: 8 on a server; in a run, a lost replica is not started again."
        ),
    )
    backoff_s: Seconds = Field(
        0.5, description="Pause before the first start; it doubles with each further loss, up to 30 seconds."
    )
    settled_s: Seconds = Field(60.0, description="Uptime of a replica after which the pauses start over.")
    wait_s: Seconds = Field(
        60.0, description="Time that requests wait while none of their replicas is up before they end as failed."
    )
    step_timeout_s: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] | None = Field(
        None,
        description=(
            "Maximum time of a step; the replica of a worker that takes longer counts as lost, and the worker's process is killed. null: on a server ten times the longest step so far, more for a step of more tokens, and at least 10 seconds (60 on a GPU; 600 for the first eight steps of a worker, 60 once it has been started again); in a run, no limit."
        ),
    )

    def when(self, *, serves: bool) -> Recovery:
        """Return the settings with defaults filled in: those of a server if `serves`, else those of a run."""
        max_restarts = self.max_restarts if self.max_restarts is not None else 8 if serves else 0
        max_reruns = self.max_reruns if self.max_reruns is not None else 3 if serves else None
        watches_steps = serves or self.step_timeout_s is not None
        return Recovery(
            max_reruns, max_restarts, self.backoff_s, self.settled_s, self.wait_s, watches_steps, self.step_timeout_s
        )


class Recovery(NamedTuple):
    """`RecoveryConfig` with defaults filled in.

    `max_reruns` None: requests of a failed replica end, and are not computed again. `step_timeout_s` None: no fixed
    limit; if `watches_steps`, the limit is derived from the times of earlier steps.
    """

    max_reruns: int | None
    max_restarts: int
    backoff_s: float
    settled_s: float
    wait_s: float
    watches_steps: bool
    step_timeout_s: float | None


class ModelBackendConfig(Section):
    """Settings of every backend that computes steps with a model instead of predicting their durations."""

    kind: ClassVar[str]
    """The backend's name."""
    can_swap: ClassVar[bool]
    """True if KV blocks can be copied to host memory and back."""
    can_move_kv: ClassVar[bool]
    """True if KV blocks can be copied from one replica to another."""

    model: ModelFolder = Field(
        description="Directory of a Hugging Face model; `vajra model tiny DIR` writes a small one."
    )
    random_weights: Switch = Field(
        False, description="Use random weights for the directory's config.json, drawn with weights_seed."
    )
    weights_seed: Count = Field(0, description="Seed of random weights.")
    device: Device = Field("cpu", description="cpu, cuda (replicas take the devices in turn) or cuda:N.")
    dtype: Dtype = Field("auto", description="Computing type; auto: the checkpoint's, float32 on a CPU.")
    num_threads: PositiveCount | None = Field(
        None,
        description="Number of threads of a replica's computation on a CPU; null: the cores divided among the replicas.",
    )
    tensor_parallel: PositiveCount = Field(
        1, description="Number of devices (on a CPU: processes) that each layer is divided among."
    )
    workers: Literal["in_process", "process"] = Field(
        "in_process",
        description="Thread or process in which a replica computes; several ranks (tensor_parallel, replica.pipeline_stages, replica.kv_parallel) always have a process each.",
    )
    placement: PlacementConfig = Field(
        default_factory=lambda: PlacementConfig(), description="Placement of a replica's ranks on a cluster (`--on`)."
    )
    sampling: SamplingConfig = Field(
        default_factory=lambda: SamplingConfig(), description="Sampling of tokens, and end of requests."
    )
    time_scale: Annotated[float, Field(strict=True, gt=0)] = Field(
        1.0, description="Factor of the workload's arrival and think times."
    )
    latency: TypedChoice | None = Field(
        None, description="Latency model for policies' predictions; null: policies that need one cannot be used."
    )
    output_length: TypedChoice = Field(
        default_factory=lambda: TypedChoice(type="none"), description="Predictor of output lengths for policies."
    )
    recovery: RecoveryConfig = Field(
        default_factory=lambda: RecoveryConfig(),
        description="Recovery of a replica whose worker is lost, and of its requests.",
    )
    warmup_s: Seconds = Field(
        0.0, description="Time before which arriving requests are served but not counted, seconds."
    )
    warmup_requests: Count = Field(0, description="Number of first requests that are served but not counted.")

    @property
    def own_settings(self) -> Mapping[str, ReplicasetEngineConfig]:
        """Settings of replicasets that override those of the backend, by replicaset."""
        return {}

    @property
    def begins_ahead(self) -> bool | None:
        """True if steps begin before the previous step's tokens are available; None: True on a GPU, else False."""
        return False

    def of(self, replicaset: str) -> Self:
        """Return the settings that apply to one replicaset."""
        return self

    def served_models(self, replicasets: Iterable[str]) -> dict[str, str]:
        """Return the model of each replicaset, by replicaset name.

        Replicasets of different models cannot serve the same request, since its token ids are valid for one model only.
        """
        return {name: str(self.of(name).model) for name in replicasets}

    def problems(self, replicasets: Mapping[str, ReplicasetConfig]) -> list[Problem]:
        """Return a problem for each setting of a replicaset that this backend does not support on any machine."""
        raise NotImplementedError

    def problems_here(self, replicasets: Mapping[str, ReplicasetConfig]) -> list[Problem]:
        """Return a problem for each requirement that this machine lacks, such as model files or a package.

        Loads no model.
        """
        raise NotImplementedError

    def runner_options(self, replica: ReplicaConfig, num_stages: int, num_threads: int | None) -> RunnerOptions:
        """Return the options of the runner that a replica's worker loads. For the device `cuda`, `worker.placed` chooses
        the GPU later.
        """
        raise NotImplementedError

    @property
    def load(self) -> LoadRunner:
        """Return the function that creates a worker's runner from its options."""
        raise NotImplementedError


class NgramConfig(Section):
    """Drafts by n-gram lookup: tokens that followed an earlier occurrence of the newest tokens in prompt or output."""

    min_tokens: PositiveCount = Field(2, description="Length of the shortest n-gram to look up, tokens.")
    max_tokens: PositiveCount = Field(
        5, description="Length of the longest n-gram to look up, tokens; it is tried first."
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is above max_tokens ({self.min_tokens} of {self.max_tokens})")
        return self


class EngineConfig(ModelBackendConfig):
    """Compute steps with a real model instead of predicting their durations."""

    kind: ClassVar[str] = "engine"
    can_swap: ClassVar[bool] = True
    can_move_kv: ClassVar[bool] = True

    self_check: Switch = Field(True, description="Check the attention against that of transformers while loading.")
    fused: Switch = Field(True, description="Use this package's own forward pass where it knows the model.")
    cuda_graphs: Switch = Field(
        True,
        description="On a GPU, run batches of up to 256 decodes as captured graphs (not with several ranks).",
    )
    look_ahead: Switch | None = Field(
        None,
        description=(
            "Begin the next step of decodes before this one's tokens are known, where the policy repeats decodes; changes neither decisions nor tokens. null: on a GPU only. On a CPU it is faster only with `workers: process`."
        ),
    )
    ngram: NgramConfig = Field(default_factory=NgramConfig, description="Lookup of the drafts of `replica.draft`.")
    replicasets: dict[str, ReplicasetEngineConfig] = Field(
        default_factory=dict,
        description="Settings of a replicaset that differ, by its name: several models in one engine.",
    )

    @property
    def own_settings(self) -> Mapping[str, ReplicasetEngineConfig]:
        """See `ModelBackendConfig`."""
        return self.replicasets

    @property
    def begins_ahead(self) -> bool | None:
        """See `ModelBackendConfig`."""
        return self.look_ahead

    def of(self, replicaset: str) -> Self:
        """See `ModelBackendConfig`."""
        own = self.replicasets.get(replicaset)
        if own is None:
            return self
        given = {name: getattr(own, name) for name in type(own).model_fields}
        update = {name: value for name, value in given.items() if value is not None}
        # A latency model belongs to one model: a replicaset with another model uses its own latency model, or none.
        if own.model is not None:
            update["latency"] = own.latency
        return self.model_copy(update=update)

    def problems(self, replicasets: Mapping[str, ReplicasetConfig]) -> list[Problem]:
        """See `ModelBackendConfig`."""
        found = [
            Problem("backend.engine.replicasets", f"names no replicaset ({name!r})", did_you_mean(name, replicasets))
            for name in self.replicasets
            if name not in replicasets
        ]
        found += check_scaling(self.kind, replicasets)
        for name in replicasets:
            own = self.of(name)
            for where, replica in replicas_by_place(name, replicasets).items():
                found += check_replica(where, replica, has_adapters=True)
                found += check_tiers(where, replica)
                if replica.adapters is not None:
                    found += own.check_adapters(f"{where}.adapters", replica, replica.adapters)
        return found

    def problems_here(self, replicasets: Mapping[str, ReplicasetConfig]) -> list[Problem]:
        """See `ModelBackendConfig`."""
        found: list[Problem] = []
        own = map(self.of, replicasets)
        for model, random_weights in dict.fromkeys((one.model, one.random_weights) for one in own):
            try:
                inspect_model(model, random_weights)
            except ConfigError as error:
                found += error.problems
        for replica in (one for name in replicasets for one in replicas_by_place(name, replicasets).values()):
            for adapter in () if replica.adapters is None else replica.adapters.models or ():
                try:
                    if adapter.path is not None:
                        inspect_adapter(AdapterSource(adapter.name, adapter.path))
                except ConfigError as error:
                    found += error.problems
        return found

    def check_adapters(self, where: str, replica: ReplicaConfig, adapters: AdaptersConfig) -> list[Problem]:
        """Return the reasons, independent of the machine, why a replica cannot compute its adapters."""
        found = []
        alone = {"tensor_parallel": self.tensor_parallel, "replica.pipeline_stages": replica.pipeline_stages or 1}
        alone["replica.kv_parallel.groups"] = replica.kv_parallel.groups
        for name, number in alone.items():
            if number > 1:
                message = f"are computed by a single rank (got {name} {number})"
                found.append(Problem(where, message, "Allowed: 1, or no adapters"))
        if self.device != "cpu":
            message = f"are computed on a CPU alone (got {self.device}): captured graphs know no slots"
            found.append(Problem(where, message, "Allowed: device cpu, or no adapters"))
        if not self.fused:
            found.append(Problem(where, "need the fused forward pass (got fused false)", "Allowed: fused true"))
        if adapters.models is None:
            found.append(
                Problem(f"{where}.models", "is null, and the engine loads adapters", "Allowed: adapters with paths")
            )
        for index, one in enumerate(adapters.models or ()):
            if one.path is None:
                allowed = "A folder that `peft` wrote; adapters without one are simulated"
                found.append(Problem(f"{where}.models.{index}.path", "is not given", allowed))
        return found

    def runner_options(self, replica: ReplicaConfig, num_stages: int, num_threads: int | None) -> RunnerOptions:
        """See `ModelBackendConfig`."""
        adapters = replica.adapters
        groups = replica.kv_parallel
        return RunnerOptions(
            model=self.model,
            random_weights=self.random_weights,
            seed=self.weights_seed,
            device=self.device,
            dtype=self.dtype,
            block_size=replica.memory.block_size,
            max_model_len=replica.max_model_len,
            max_requests=SLOTS_PER_BATCH_ENTRY * replica.max_batch_size,
            max_step_tokens=replica.max_batch_tokens or MAX_STEP_TOKENS,
            max_drafts=replica.draft.most_tokens,
            max_graph_rows=min(replica.max_batch_size, MAX_GRAPH_ROWS) if self.cuda_graphs else 0,
            num_threads=num_threads,
            tensor_parallel_size=self.tensor_parallel,
            pipeline_stages=num_stages,
            kv_groups=groups.groups,
            kv_group_tokens=(groups.group_tokens or 0) if groups.groups > 1 else 0,
            self_check=self.self_check,
            fused=self.fused,
            adapters=()
            if adapters is None
            else tuple(AdapterSource(one.name, one.path or "") for one in adapters.models or ()),
            max_loras=0 if adapters is None else adapters.max_loras,
        )

    @property
    def load(self) -> LoadRunner:
        """See `ModelBackendConfig`."""
        return load_runner


register_backend("engine", EngineConfig)
