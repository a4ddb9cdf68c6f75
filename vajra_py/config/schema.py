"""Schema of experiment files: every section with defaults, limits and units.

The models are frozen and reject unknown keys. Parts defined by plug-ins (parameters of policies, latency models,
predictors and observers) are checked against the installed packages when a file is loaded; constructing these models
directly checks the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from vajra_py.config.capacity import CapacityConfig
from vajra_py.config.costs import CostsConfig
from vajra_py.config.hand_off import HandOffConfig, MigrationConfig
from vajra_py.config.links import LinksConfig
from vajra_py.contract import Layer, PoolRole, RequestView
from vajra_py.contract.latency import LAST_S
from vajra_py.plugins import ADMISSION

if TYPE_CHECKING:
    from vajra_py.workload.config import WorkloadConfig
else:  # validated by the loader; importing it here would load the dependencies of every workload
    WorkloadConfig = Any

Count: TypeAlias = Annotated[int, Field(strict=True, ge=0)]
PositiveCount: TypeAlias = Annotated[int, Field(strict=True, gt=0, le=2**31 - 1)]
ReplicaCount: TypeAlias = Annotated[int, Field(strict=True, gt=0, le=1_000_000)]
StageCount: TypeAlias = Annotated[int, Field(strict=True, gt=0, le=1024)]
BlockSize: TypeAlias = Annotated[int, Field(strict=True, gt=0, le=65_536)]
Seconds: TypeAlias = Annotated[float, Field(strict=True, ge=0, le=LAST_S)]
PositiveSeconds: TypeAlias = Annotated[float, Field(strict=True, gt=0, le=LAST_S)]
Switch: TypeAlias = Annotated[bool, Field(strict=True)]
Text: TypeAlias = Annotated[str, Field(strict=True, min_length=1)]

MAX_REPLICATIONS = 1000
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class Section(BaseModel):
    """Base of all sections: frozen, no extra keys, no NaN, validated defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class Choice(BaseModel):
    """Installed object selected by name."""

    _validated: BaseModel | None = PrivateAttr(None)

    @classmethod
    def of_validated(cls, given: Mapping[str, Any], model: BaseModel) -> Self:
        """Return the choice of `given`, whose parameters have been validated; `model` holds them."""
        choice = cls.model_validate(given)
        choice._validated = model
        return choice

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy like pydantic's; updated parameters have not been validated."""
        copy = super().model_copy(update=update, deep=deep)
        if update:
            copy._validated = None
        return copy


class PolicyChoice(Section, Choice):
    """One layer's policy by name, with its parameters. `lrs` alone is short for `{policy: lrs}`."""

    policy: Text = Field(description="Name (or alias) of an installed policy; `vajra policies` lists them.")
    params: dict[str, Any] = Field(
        default_factory=dict, description="The policy's own parameters; `vajra policies show NAME` lists them."
    )

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"policy": value} if isinstance(value, str) else value

    @property
    def parameters(self) -> Mapping[str, Any] | BaseModel:
        """Parameters for building the policy: its own model if loaded from a file, else the unvalidated `params`."""
        return self.params if self._validated is None else self._validated


class TypedChoice(Choice):
    """Installed object by name, with its parameters: `{type: name, …}`, or just the name."""

    model_config = ConfigDict(frozen=True, extra="allow")

    type: Text = Field(description="Name of what is installed.")

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"type": value} if isinstance(value, str) else value

    @property
    def params(self) -> Mapping[str, Any]:
        """Parameters beside `type`."""
        return self.model_extra or {}

    @property
    def parameters(self) -> Mapping[str, Any] | BaseModel:
        """Parameters for building the object, as for `PolicyChoice`."""
        return self.params if self._validated is None else self._validated


class SchedulingConfig(Section):
    """Scheduling policies: one for each layer."""

    preset: Text | None = Field(None, description="Named settings of a whole system; explicit keys win over it.")
    request_prioritizer: PolicyChoice = Field(description="How urgent is a request?")
    replicaset_scheduler: PolicyChoice = Field(description="Which replica takes a request?")
    replica_scheduler: PolicyChoice = Field(description="What runs in a step?")
    scaling: PolicyChoice | None = Field(
        None, description="How many replicas are there? A scaler by name; null: always `num_replicas`."
    )

    def choice(self, layer: Layer) -> PolicyChoice:
        """Return the policy of a layer."""
        choice: PolicyChoice = getattr(self, layer.value)
        return choice


class PrefixCacheConfig(Section):
    """Sharing of KV blocks between requests with equal prefixes."""

    enabled: Switch = Field(True, description="Share KV blocks of equal prefixes.")
    publish: Literal["schedule", "step_end"] = Field(
        "schedule", description="When a full block can be hit: once its step is formed, or once the step has come back."
    )
    reuse_order: Literal["lru", "fifo"] = Field(
        "lru",
        description="Which idle block is overwritten first: the least recently used, or the first that was freed.",
    )
    release_order: Literal["tail_first", "head_first"] = Field(
        "tail_first", description="In which order a request's blocks become idle; tail first keeps prefixes longest."
    )
    retain_freed: Switch = Field(True, description="Freed blocks can still be hit until they are overwritten.")
    duplicates: Literal["keep_first", "keep_last"] = Field(
        "keep_first", description="Which of two blocks with the same content answers later hits."
    )
    unscheduled: Literal["withdraw", "keep"] = Field(
        "withdraw",
        description=(
            "What becomes of blocks published by a request that is preempted before its step runs; `keep` is vLLM's way and lets "
            "others read blocks that were never computed."
        ),
    )


class MemoryConfig(Section):
    """KV memory of one replica."""

    block_size: BlockSize = Field(16, description="Tokens of a KV block.")
    num_blocks: PositiveCount | None = Field(
        None, description="KV blocks of a replica; null: what model and device leave."
    )
    memory_fraction: float = Field(
        0.9,
        strict=True,
        gt=0,
        le=1,
        description="Part of the device's memory that weights and KV blocks may take, fraction.",
    )
    reservation: Literal["prompt", "incremental"] = Field(
        "prompt",
        description="Blocks taken at admission: for the whole known sequence, or for the tokens of the first step.",
    )
    watermark_fraction: float = Field(
        0.01, strict=True, ge=0, lt=1, description="Part of the KV blocks that admission leaves free, fraction."
    )
    host_blocks: Count = Field(0, description="KV blocks in host memory that preempted requests can be swapped to.")
    tenant_salt: Switch = Field(False, description="Tenants never share cached prefixes with each other.")
    prefix_cache: PrefixCacheConfig = Field(default_factory=PrefixCacheConfig, description="Sharing of equal prefixes.")


class KvParallelConfig(Section):
    """KV parallelism: one long sequence spread over several groups of devices."""

    groups: PositiveCount = Field(1, description="KV-parallel groups of a replica; 1: none.")
    group_tokens: PositiveCount | None = Field(
        None, description="Tokens of one request that one group holds, tokens; needed with more than one group."
    )
    busy_tokens: PositiveCount = Field(
        500, description="Query tokens in a step from which on a group takes no further request, tokens."
    )

    @model_validator(mode="after")
    def _sized(self) -> Self:
        if self.groups > 1 and self.group_tokens is None:
            raise ValueError(f"group_tokens is needed with more than one group (got groups: {self.groups})")
        return self


class ReplicaConfig(Section):
    """Sizes of each replica."""

    max_batch_size: PositiveCount = Field(128, description="Most requests in one step.")
    max_batch_tokens: PositiveCount | None = Field(None, description="Most tokens in one step; null: no limit.")
    max_model_len: PositiveCount | None = Field(
        None, description="Most tokens of a request, prompt and output; null: what the model was trained for."
    )
    pipeline_stages: StageCount | None = Field(None, description="Pipeline stages; null: what the latency model has.")
    kv_parallel: KvParallelConfig = Field(default_factory=KvParallelConfig, description="KV parallelism.")
    memory: MemoryConfig = Field(default_factory=MemoryConfig, description="KV memory.")


class ElasticConfig(Section):
    """Number of replicas that a scaler may choose, and how they start and stop."""

    min_replicas: Count = Field(1, description="Fewest replicas, starting or up; 0 lets a scaler stop them all.")
    max_replicas: ReplicaCount | None = Field(None, description="Most replicas, starting or up; null: `num_replicas`.")
    startup_s: Seconds = Field(0.0, description="Time from starting a replica until it takes requests, seconds.")
    startup_spread_s: Seconds = Field(
        0.0, description="Each start takes up to so much longer, drawn uniformly, seconds."
    )
    drain: Literal["wait", "migrate"] = Field(
        "wait",
        description="What becomes of the requests that run on a replica that stops: it waits for them, or they move elsewhere.",
    )


class SelectConfig(Section):
    """Selection of requests that a replicaset serves: those that meet every condition given. No condition: all that are
    left.
    """

    tenants: tuple[str, ...] | None = Field(None, min_length=1, description="Tenants.")
    slo_classes: tuple[str, ...] | None = Field(None, min_length=1, description="Classes of service.")
    models: tuple[str, ...] | None = Field(
        None, min_length=1, description="Models, as in the request's metadata `model`."
    )
    min_prompt_tokens: PositiveCount | None = Field(None, description="Shortest prompt, tokens.")
    max_prompt_tokens: PositiveCount | None = Field(None, description="Longest prompt, tokens.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_prompt_tokens and self.max_prompt_tokens and self.min_prompt_tokens > self.max_prompt_tokens:
            raise ValueError("min_prompt_tokens is above max_prompt_tokens, so that no request is selected")
        return self

    def matches(self, request: RequestView) -> bool:
        """Return whether the request meets every condition."""
        return self.matches_labels(request) and self.matches_length(request.num_prompt_tokens)

    def matches_length(self, num_prompt_tokens: int) -> bool:
        """Return whether the request meets every condition except those on its length."""
        return (self.min_prompt_tokens is None or num_prompt_tokens >= self.min_prompt_tokens) and (
            self.max_prompt_tokens is None or num_prompt_tokens <= self.max_prompt_tokens
        )

    def matches_labels(self, request: RequestView) -> bool:
        """Return whether it meets every condition but those on its length."""
        return (
            (self.tenants is None or request.tenant in self.tenants)
            and (self.slo_classes is None or request.slo_class in self.slo_classes)
            and (self.models is None or request.metadata.get("model") in self.models)
        )

    @property
    def is_by_length(self) -> bool:
        """True if a condition depends on the prompt's length."""
        return self.min_prompt_tokens is not None or self.max_prompt_tokens is not None

    @property
    def takes_all(self) -> bool:
        """True if there is no condition."""
        return self == SelectConfig()


class PoolConfig(Section):
    """One pool of a replicaset: replicas of one kind. Keys of `replica` that it leaves out are the replicaset's."""

    role: Literal["mixed", "prefill", "decode"] | None = Field(
        None,
        description=(
            "Work that its replicas take: prompts, whose requests then leave with their KV; decodes, which come with it; or both. "
            "null: as its name says, if it is one of the three; else mixed."
        ),
    )
    num_replicas: ReplicaCount = Field(1, description="Replicas; with a scaler those at the start.")
    replica: ReplicaConfig = Field(default_factory=ReplicaConfig, description="Sizes of its replicas.")
    replica_scheduler: PolicyChoice | None = Field(
        None, description="What runs in a step of its replicas; null: the replicaset's replica scheduler."
    )
    elastic: ElasticConfig | None = Field(
        None, description="Number of replicas that the replicaset's scaler may choose; null: always `num_replicas`."
    )

    @property
    def most_replicas(self) -> int:
        """Return the most replicas that there may be at once: so many are built."""
        most = None if self.elastic is None else self.elastic.max_replicas
        return most or self.num_replicas


Pools: TypeAlias = dict[Annotated[str, Field(pattern=NAME_PATTERN)], PoolConfig]

DEFAULT_POOL = "default"
"""Name of the only pool of a replicaset without `pools:`."""


def _role_of(name: str, pool: PoolConfig) -> PoolRole:
    roles = {one.value: one for one in PoolRole}
    return roles[pool.role] if pool.role is not None else roles.get(name, PoolRole.MIXED)


def _check_pools(pools: Pools, num_replicas: int) -> None:
    """Raise `ValueError` where prompts or decodes have no pool that takes them, or replicas are counted twice."""
    if num_replicas != 1:
        raise ValueError("num_replicas is the sum over the pools; give each pool its own")
    roles = {_role_of(name, pool) for name, pool in pools.items()}
    if PoolRole.PREFILL in roles and not roles & {PoolRole.DECODE, PoolRole.MIXED}:
        raise ValueError("no pool takes the requests that leave the prefill pool; add one with role decode or mixed")
    if PoolRole.DECODE in roles and not roles & {PoolRole.PREFILL, PoolRole.MIXED}:
        raise ValueError("no pool computes prompts for the decode pool; add one with role prefill or mixed")


def _check_elastic(
    scheduling: SchedulingConfig | None, own: ElasticConfig | None, pools: Mapping[str, PoolConfig]
) -> None:
    """Raise `ValueError` unless there are bounds where there is a scaler, and each fit the number at the start.

    `own` is the replicaset's, which counts where it has no pools of its own.
    """
    bounded = {name: pool.elastic for name, pool in pools.items() if pool.elastic is not None}
    if own is not None and not any(own is one for one in bounded.values()):
        raise ValueError("elastic is for one kind of replicas; give each pool its own")
    has_scaler = scheduling is not None and scheduling.scaling is not None
    if bounded and not has_scaler:
        raise ValueError("elastic has bounds for a scaler, and scheduling.scaling names none")
    if has_scaler and not bounded:
        raise ValueError("scheduling.scaling names a scaler, and elastic has no bounds for it")
    for name, elastic in bounded.items():
        where = "" if name == DEFAULT_POOL else f"pools.{name}."
        if elastic.drain == "migrate":
            message = "running requests do not move between replicas yet (got 'migrate', allowed: 'wait')"
            raise ValueError(f"{where}elastic.drain: {message}")
        low, high, count = elastic.min_replicas, pools[name].most_replicas, pools[name].num_replicas
        if not low <= count <= high:
            raise ValueError(f"{where}num_replicas is not within {where}elastic ({count} of {low} to {high})")


class ReplicasetConfig(Section):
    """One of several replicasets. Missing keys are taken from the top level of the file."""

    select: SelectConfig = Field(
        default_factory=SelectConfig,
        description="Requests that it serves; the first replicaset that matches takes one.",
    )
    scheduling: SchedulingConfig = Field(description="Policies of this replicaset.")
    replica: ReplicaConfig = Field(default_factory=ReplicaConfig, description="Sizes of its replicas.")
    num_replicas: ReplicaCount = Field(1, description="Replicas; with a scaler those at the start.")
    elastic: ElasticConfig | None = Field(None, description="As at the top.")
    pools: Pools = Field(default_factory=dict, description="As at the top.")
    hand_off: HandOffConfig = Field(default_factory=HandOffConfig, description="As at the top.")
    links: LinksConfig = Field(default_factory=LinksConfig, description="As at the top.")
    migration: MigrationConfig = Field(default_factory=MigrationConfig, description="As at the top.")
    view_interval_s: Seconds = Field(0.0, description="As at the top.")

    @model_validator(mode="after")
    def _sized(self) -> Self:
        if self.pools:
            _check_pools(self.pools, self.num_replicas)
        _check_elastic(self.scheduling, self.elastic, self.effective_pools)
        return self

    @property
    def effective_pools(self) -> Mapping[str, PoolConfig]:
        """Pools in the order of their replicas' ids; one of mixed replicas where the file names none."""
        if self.pools:
            return self.pools
        only = PoolConfig(role="mixed", num_replicas=self.num_replicas, replica=self.replica, elastic=self.elastic)
        return {DEFAULT_POOL: only}

    def role_of(self, pool: str) -> PoolRole:
        """Return the work that a pool takes."""
        return _role_of(pool, self.effective_pools[pool])

    @property
    def total_replicas(self) -> int:
        """Replicas of all pools, with a scaler as many as there may be."""
        return sum(pool.most_replicas for pool in self.effective_pools.values())


class AdmissionConfig(Section):
    """Bounds of the queues; requests that exceed them are rejected."""

    max_queued_requests: PositiveCount | None = Field(None, description="Most waiting requests; null: no limit.")
    max_queued_tokens: PositiveCount | None = Field(None, description="Most waiting prompt tokens; null: no limit.")


class PoolSimulatorConfig(Section):
    """Settings of one pool that override those of its replicaset: another device or parallelism."""

    latency: TypedChoice | None = Field(None, description="Latency model of its replicas; null: the replicaset's.")
    predictions: TypedChoice | None = Field(
        None,
        description="Latency model that the policies of its replicas ask; null: its own `latency` where it has one.",
    )


class ReplicasetSimulatorConfig(Section):
    """Settings of one replicaset that override the simulator's section: another model or device."""

    latency: TypedChoice | None = Field(None, description="Latency model of its replicas; null: the simulator's.")
    predictions: TypedChoice | None = Field(
        None,
        description="Latency model that its policies ask; null: its own `latency` where it has one, else as for the others.",
    )
    pools: dict[str, PoolSimulatorConfig] = Field(
        default_factory=dict, description="By pool, where they are not all of one device."
    )


class SimulatorConfig(Section):
    """Prediction of step durations instead of execution."""

    latency: TypedChoice = Field(description="Latency model: `{type: roofline, …}`.")
    predictions: TypedChoice | None = Field(
        None, description="Latency model that policies ask for predictions; null: `latency`, which is then never wrong."
    )
    replicasets: dict[str, ReplicasetSimulatorConfig] = Field(
        default_factory=dict,
        description="By replicaset, where they are not all of one model or device (`default` is the only one of a file without names).",
    )
    output_length: TypedChoice = Field(
        default_factory=lambda: TypedChoice(type="none"), description="What policies are told about output lengths."
    )
    horizon_s: PositiveSeconds | None = Field(
        None, description="Simulated time after which the run ends, seconds; null: when everything is served."
    )
    warmup_s: Seconds = Field(0.0, description="Requests that arrive earlier are served and not counted, seconds.")
    warmup_requests: Count | Literal["auto"] = Field(
        0,
        description="So many first requests are served and not counted; auto: those that MSER-5 finds by their end-to-end latencies.",
    )
    drain: Switch = Field(True, description="Serve what is waiting after the last arrival.")
    scheduling_overhead_s: Seconds = Field(0.0, description="Time that forming a step takes, seconds a step.")


class BackendConfig(BaseModel):
    """Backend that runs the experiment: exactly one, by name."""

    model_config = ConfigDict(frozen=True, extra="allow")

    simulator: SimulatorConfig | None = Field(None, description="The discrete-event simulator.")

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if len(self._given) != 1:
            given = ", ".join(self._given) or "none"
            raise ValueError(f"exactly one backend is needed (got {given})")
        return self

    @property
    def _given(self) -> tuple[str, ...]:
        extra = [name for name, settings in (self.model_extra or {}).items() if settings is not None]
        return (*(["simulator"] if self.simulator is not None else []), *extra)

    @property
    def kind(self) -> str:
        """Name of the backend."""
        return self._given[0]

    @property
    def settings(self) -> Any:
        """Section of the backend: a `SimulatorConfig`, or the model passed to `register_backend`."""
        return getattr(self, self.kind)


class OutputConfig(Section):
    """Output of a run: its files and folder."""

    dir: Text = Field("runs", description="Folder that gets one folder for each run.")
    decision_log: Switch = Field(True, description="Write every scheduling decision.")
    steps: Switch = Field(True, description="Write the table of steps.")


Sweep: TypeAlias = dict[str, Any] | list[dict[str, Any]]


class SystemConfig(Section):
    """One system: the policies, the replicas that they schedule, and the backend. A workload makes it an experiment."""

    version: Literal[1] = Field(description="Version of this schema.")
    name: str = Field("experiment", pattern=NAME_PATTERN, description="Name of the experiment and of its folder.")
    description: Text | None = Field(
        None, description="What the experiment is about, in a sentence or two; its report begins with it."
    )
    seed: Count = Field(0, description="Seed of every random stream.")
    preset: Text | None = Field(None, description="Named settings of a whole system; explicit keys win over it.")
    scheduling: SchedulingConfig | None = Field(
        None, description="Policies of the three layers; may be left out when every replicaset names its own."
    )
    replica: ReplicaConfig = Field(default_factory=ReplicaConfig, description="Sizes and memory of each replica.")
    num_replicas: ReplicaCount = Field(
        1, description="Replicas of the single replicaset; with a scaler those at the start."
    )
    elastic: ElasticConfig | None = Field(
        None,
        description="Number of replicas that a scaler (`scheduling.scaling`) may choose; null: always `num_replicas`.",
    )
    pools: Pools = Field(
        default_factory=dict,
        description="Pools that the single replicaset is made of, by name, where its replicas are not all of one kind.",
    )
    hand_off: HandOffConfig = Field(
        default_factory=HandOffConfig, description="How requests go from one pool to another with their KV."
    )
    links: LinksConfig = Field(default_factory=LinksConfig, description="Links between replicas, over which KV goes.")
    migration: MigrationConfig = Field(
        default_factory=MigrationConfig,
        description="How running requests move, where the replicaset scheduler moves any.",
    )
    view_interval_s: Seconds = Field(
        0.0,
        description=(
            "How old the loads may be by which the replicaset scheduler assigns a request, as those of a router that polls, seconds; "
            "0: as they are now."
        ),
    )
    replicasets: dict[str, ReplicasetConfig] = Field(
        default_factory=dict, description="Several replicasets by name; each takes from the top what it leaves out."
    )
    admission: AdmissionConfig = Field(default_factory=AdmissionConfig, description="Bounds of the queues.")
    backend: BackendConfig = Field(description="What executes it.")
    policy_timeout_s: PositiveSeconds | None = Field(
        60.0,
        description=(
            "Real time after which a policy that has not returned breaks the contract: a run ends with its name, a server takes its "
            "replicaset out of service, seconds; null: it may take for ever."
        ),
    )
    observers: tuple[TypedChoice, ...] = Field((), description="Installed observers that watch the run.")
    output: OutputConfig = Field(default_factory=OutputConfig, description="What a run writes.")
    costs: CostsConfig = Field(default_factory=CostsConfig, description="Prices and power of the devices.")

    _admission_policy: PolicyChoice | None = PrivateAttr(None)
    """See `admission_policy`."""
    _source: Any = PrivateAttr(None)
    """Tree from which the experiment was built; the points of a sweep are built from it too."""

    @model_validator(mode="wrap")
    @classmethod
    def _with_admission_policy(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Take `scheduling.admission` out: it is of the whole system, and the layers' policies are of a replicaset."""
        scheduling = value.get("scheduling") if isinstance(value, Mapping) else None
        if not isinstance(scheduling, Mapping) or ADMISSION.key not in scheduling:
            return handler(value)
        layers = {key: one for key, one in scheduling.items() if key != ADMISSION.key}
        choice = scheduling[ADMISSION.key]
        made = handler({**value, "scheduling": layers or None})
        made._admission_policy = None if choice is None else PolicyChoice.model_validate(choice)
        return made

    @model_serializer(mode="wrap")
    def _written_admission_policy(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        choice = self._admission_policy
        if choice is not None and "scheduling" in data:
            data["scheduling"] = {**(data["scheduling"] or {}), ADMISSION.key: choice.model_dump(mode="json")}
        return data

    @field_validator("replicasets")
    @classmethod
    def _reachable(cls, replicasets: dict[str, ReplicasetConfig]) -> dict[str, ReplicasetConfig]:
        names = list(replicasets)
        for index, (name, replicaset) in enumerate(replicasets.items()):
            if replicaset.select.takes_all and index + 1 < len(names):
                raise ValueError(
                    f"{name!r} takes every request, so that {names[index + 1]!r} never gets one; put it last"
                )
        return replicasets

    @model_validator(mode="after")
    def _decided(self) -> Self:
        if self.scheduling is None and not self.replicasets:
            raise ValueError("scheduling is missing, and there are no replicasets that have their own")
        if self.pools:
            _check_pools(self.pools, self.num_replicas)
        if not self.replicasets:
            only = {DEFAULT_POOL: PoolConfig(num_replicas=self.num_replicas, elastic=self.elastic)}
            _check_elastic(self.scheduling, self.elastic, self.pools or only)
        return self

    def __eq__(self, other: object) -> bool:
        """True for one run: neither a sweep nor replications."""
        return type(other) is type(self) and self.model_dump() == other.model_dump()

    @property
    def admission_policy(self) -> PolicyChoice | None:
        """Admission policy of the system (`scheduling.admission`); None: every request is accepted."""
        return self._admission_policy

    @property
    def effective_replicasets(self) -> Mapping[str, ReplicasetConfig]:
        """Replicasets of the run, in matching order; one named `default` if the file names none."""
        if self.replicasets:
            return self.replicasets
        assert self.scheduling is not None  # validated on construction
        only = ReplicasetConfig(
            scheduling=self.scheduling,
            replica=self.replica,
            elastic=self.elastic,
            **({"pools": self.pools} if self.pools else {"num_replicas": self.num_replicas}),
            hand_off=self.hand_off,
            links=self.links,
            migration=self.migration,
            view_interval_s=self.view_interval_s,
        )
        return {"default": only}

    @property
    def output_dir(self) -> Path:
        """Folder for the runs."""
        return Path(self.output.dir)


class ExperimentConfig(SystemConfig):
    """One experiment: a system, the workload that it serves, and the settings under which both are tried."""

    workload: WorkloadConfig = Field(description="Requests: when they arrive and how long they are.")
    sweep: Sweep | None = Field(
        None, description="Values to try: a grid `path: [values]`, `zip: {…}`, or a list of points `- {path: value}`."
    )
    replications: Annotated[int, Field(strict=True, gt=0, le=MAX_REPLICATIONS)] = Field(
        1,
        description=(
            "Runs of each setting, under the seeds `seed`, `seed` + 1, …: the same ones for every point of a sweep, so that settings are "
            "compared in pairs."
        ),
    )
    capacity: CapacityConfig | None = Field(
        None, description="Question about capacity that `vajra capacity` answers; a plain run leaves it aside."
    )

    @property
    def is_single(self) -> bool:
        """Return whether it is one run: neither a sweep nor replications."""
        return self.sweep is None and self.replications == 1
