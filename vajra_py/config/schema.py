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
from vajra_py.config.drafts import SimulatedDraftsConfig
from vajra_py.config.hand_off import HandOffConfig, MigrationConfig
from vajra_py.config.links import LinksConfig
from vajra_py.contract import PoolRole, RequestView
from vajra_py.plugins import ADMISSION

if TYPE_CHECKING:
    from vajra_py.workload.config import WorkloadConfig
else:  # the loader validates workloads; importing the type would load the dependencies of every workload
    WorkloadConfig = Any

from vajra_py.config.replica import (
    DEFAULT_POOL,
    ElasticConfig,
    PoolConfig,
    Pools,
    ReplicaConfig,
    check_elastic,
    check_pools,
    role_of,
)
from vajra_py.config.sections import (
    MAX_REPLICATIONS,
    NAME_PATTERN,
    Count,
    PolicyChoice,
    PositiveCount,
    PositiveSeconds,
    ReplicaCount,
    SchedulingConfig,
    Seconds,
    Section,
    Seed,
    Switch,
    Text,
    TypedChoice,
)


class SelectConfig(Section):
    """Conditions that select the requests of a replicaset: a request must meet all of them.

    Without any condition, all requests are selected that no earlier replicaset selects.
    """

    tenants: tuple[str, ...] | None = Field(None, min_length=1, description="Tenants.")
    slo_classes: tuple[str, ...] | None = Field(None, min_length=1, description="Classes of service.")
    models: tuple[str, ...] | None = Field(
        None, min_length=1, description="Models, as in the request metadata `model`."
    )
    min_prompt_tokens: PositiveCount | None = Field(None, description="Shortest prompt, tokens.")
    max_prompt_tokens: PositiveCount | None = Field(None, description="Longest prompt, tokens.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_prompt_tokens and self.max_prompt_tokens and self.min_prompt_tokens > self.max_prompt_tokens:
            raise ValueError("min_prompt_tokens is above max_prompt_tokens, so no request matches")
        return self

    def matches(self, request: RequestView) -> bool:
        """Return True if the request meets every condition."""
        return self.matches_labels(request) and self.matches_length(request.num_prompt_tokens)

    def matches_length(self, num_prompt_tokens: int) -> bool:
        """Return True if a prompt of this length meets the conditions on length."""
        return (self.min_prompt_tokens is None or num_prompt_tokens >= self.min_prompt_tokens) and (
            self.max_prompt_tokens is None or num_prompt_tokens <= self.max_prompt_tokens
        )

    def matches_labels(self, request: RequestView) -> bool:
        """Return True if the request meets all conditions except those on the length of its prompt."""
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


class ReplicasetConfig(Section):
    """One of several replicasets. Missing keys are taken from the top level of the file."""

    select: SelectConfig = Field(
        default_factory=SelectConfig,
        description="Requests that it serves; the first replicaset that matches a request serves it.",
    )
    scheduling: SchedulingConfig = Field(description="Policies of this replicaset.")
    replica: ReplicaConfig = Field(default_factory=ReplicaConfig, description="Sizes of its replicas.")
    num_replicas: ReplicaCount = Field(1, description="Number of replicas; with a scaler, at the start.")
    elastic: ElasticConfig | None = Field(None, description="As at the top level.")
    pools: Pools = Field(default_factory=dict, description="As at the top level.")
    hand_off: HandOffConfig = Field(default_factory=HandOffConfig, description="As at the top level.")
    links: LinksConfig = Field(default_factory=LinksConfig, description="As at the top level.")
    migration: MigrationConfig = Field(default_factory=MigrationConfig, description="As at the top level.")
    view_interval_s: Seconds = Field(0.0, description="As at the top level.")
    kv_event_lag_s: Seconds = Field(0.0, description="As at the top level.")

    @model_validator(mode="after")
    def _sized(self) -> Self:
        if self.pools:
            check_pools(self.pools, self.num_replicas)
        check_elastic(self.scheduling, self.elastic, self.effective_pools)
        return self

    @property
    def effective_pools(self) -> Mapping[str, PoolConfig]:
        """Pools in the order of their replicas' ids; one pool of mixed replicas if the file names none."""
        if self.pools:
            return self.pools
        only = PoolConfig(role="mixed", num_replicas=self.num_replicas, replica=self.replica, elastic=self.elastic)
        return {DEFAULT_POOL: only}

    def role_of(self, pool: str) -> PoolRole:
        """Return the role of a pool."""
        return role_of(pool, self.effective_pools[pool])

    @property
    def total_replicas(self) -> int:
        """Number of replicas of all pools; with a scaler, the maximum number that the scaler may choose."""
        return sum(pool.most_replicas for pool in self.effective_pools.values())


class AdmissionConfig(Section):
    """Bounds of the queues; requests that exceed them are rejected."""

    max_queued_requests: PositiveCount | None = Field(
        None, description="Maximum number of waiting requests; null: no limit."
    )
    max_queued_tokens: PositiveCount | None = Field(
        None, description="Maximum number of waiting prompt tokens; null: no limit."
    )


class PoolSimulatorConfig(Section):
    """Settings of one pool that override its replicaset's settings, such as another device or parallelism."""

    latency: TypedChoice | None = Field(None, description="Latency model of its replicas; null: the replicaset's.")
    predictions: TypedChoice | None = Field(
        None,
        description="Latency model for the predictions of its replicas' policies; null: its own `latency` where it has one.",
    )


class ReplicasetSimulatorConfig(Section):
    """Settings of one replicaset that override the simulator's settings, such as another model or device."""

    latency: TypedChoice | None = Field(None, description="Latency model of its replicas; null: the simulator's.")
    predictions: TypedChoice | None = Field(
        None,
        description="Latency model for its policies' predictions; null: its own `latency` where it has one, else as for the others.",
    )
    pools: dict[str, PoolSimulatorConfig] = Field(
        default_factory=dict, description="Latency models by pool, where pools have different devices."
    )


class SimulatorConfig(Section):
    """Settings of the simulator, which predicts step durations and executes nothing."""

    latency: TypedChoice = Field(description="Latency model: `{type: roofline, …}`.")
    predictions: TypedChoice | None = Field(
        None, description="Latency model for policies' predictions; null: `latency`, whose predictions are then exact."
    )
    replicasets: dict[str, ReplicasetSimulatorConfig] = Field(
        default_factory=dict,
        description="Latency models by replicaset, where they have different models or devices (`default` names the only one of a file without names).",
    )
    output_length: TypedChoice = Field(
        default_factory=lambda: TypedChoice(type="none"), description="Predictor of output lengths for policies."
    )
    horizon_s: PositiveSeconds | None = Field(
        None,
        description="Simulated time after which no request arrives, seconds; null: all requests arrive. Without `drain`, the run also ends at this time.",
    )
    warmup_s: Seconds = Field(
        0.0, description="Time before which arriving requests are served but not counted, seconds."
    )
    warmup_requests: Count | Literal["auto"] = Field(
        0,
        description="Number of first requests that are served but not counted; auto: determined by MSER-5 from end-to-end latencies.",
    )
    drain: Switch = Field(True, description="Go on after the last arrival until all requests are served.")
    scheduling_overhead_s: Seconds = Field(0.0, description="Time to schedule a step, seconds.")
    drafts: SimulatedDraftsConfig | None = Field(
        None, description="Acceptance of the drafts of `replica.draft`; required where it has any."
    )

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit `drafts` if unset, so that the written form of older files stays the same."""
        data: dict[str, Any] = handler(self)
        if self.drafts is None:
            data.pop("drafts", None)
        return data


class BackendConfig(BaseModel):
    """Backend that runs the experiment: exactly one key, which is the backend's name."""

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


class ProgramsConfig(Section):
    """Settings for programs. A program is the set of calls of one agent, workflow or task (`program_id`)."""

    idle_s: PositiveSeconds | None = Field(
        3600.0,
        description="Time without calls after which a program has ended, seconds; null: it ends when its client reports it.",
    )


class OutputConfig(Section):
    """Output of a run: its files and folder."""

    dir: Text = Field("runs", description="Folder in which each run gets a folder.")
    decision_log: Switch = Field(True, description="Write every scheduling decision.")
    steps: Switch = Field(True, description="Write the table of steps.")


Sweep: TypeAlias = dict[str, Any] | list[dict[str, Any]]


class SystemConfig(Section):
    """One system: policies, the replicas that they schedule, and the backend. An experiment adds a workload."""

    version: Literal[1] = Field(description="Version of this schema.")
    name: str = Field("experiment", pattern=NAME_PATTERN, description="Name of the experiment and of its folder.")
    description: Text | None = Field(
        None, description="Purpose of the experiment, in a sentence or two; its report begins with it."
    )
    seed: Seed = Field(0, description="Seed of every random stream.")
    preset: Text | None = Field(
        None, description="Preset with the settings of a whole system; explicit keys override it."
    )
    scheduling: SchedulingConfig | None = Field(
        None, description="Policies of the three layers; may be left out when every replicaset names its own."
    )
    replica: ReplicaConfig = Field(default_factory=ReplicaConfig, description="Sizes and memory of each replica.")
    num_replicas: ReplicaCount = Field(
        1, description="Replicas of the single replicaset; with a scaler those at the start."
    )
    elastic: ElasticConfig | None = Field(
        None,
        description="Range of the number of replicas that a scaler (`scheduling.scaling`) may choose; null: always `num_replicas`.",
    )
    pools: Pools = Field(
        default_factory=dict,
        description="Pools of the single replicaset by name, where its replicas are of several kinds.",
    )
    hand_off: HandOffConfig = Field(
        default_factory=HandOffConfig, description="Hand-off of requests from one pool to another with their KV."
    )
    links: LinksConfig = Field(
        default_factory=LinksConfig, description="Links between replicas, over which KV goes in a simulation."
    )
    migration: MigrationConfig = Field(
        default_factory=MigrationConfig,
        description="Migration of running requests, where the replicaset scheduler migrates any.",
    )
    view_interval_s: Seconds = Field(
        0.0,
        description=(
            "Maximum age of the loads by which the replicaset scheduler assigns a request, as for a router that polls, seconds; 0: current loads."
        ),
    )
    kv_event_lag_s: Seconds = Field(
        0.0,
        description=(
            "Delay after which policies see changes of the replicas' prefix caches, as for routers that follow KV events, seconds; 0: at once."
        ),
    )
    replicasets: dict[str, ReplicasetConfig] = Field(
        default_factory=dict,
        description="Replicasets by name, where there are several; each takes the settings that it leaves out from the top level.",
    )
    admission: AdmissionConfig = Field(default_factory=AdmissionConfig, description="Limits of the queues.")
    programs: ProgramsConfig = Field(default_factory=ProgramsConfig, description="End of programs of calls.")
    backend: BackendConfig = Field(description="Backend that executes the experiment.")
    policy_timeout_s: PositiveSeconds | None = Field(
        60.0,
        description=(
            "Real time after which a policy call that has not returned is an error, seconds: a run ends with the policy's name, a server takes its replicaset out of service; null: no limit."
        ),
    )
    observers: tuple[TypedChoice, ...] = Field((), description="Installed observers that watch the run.")
    output: OutputConfig = Field(default_factory=OutputConfig, description="Files that a run writes.")
    costs: CostsConfig = Field(default_factory=CostsConfig, description="Prices and power of the devices.")

    _admission_policy: PolicyChoice | None = PrivateAttr(None)
    """Value of the property `admission_policy`."""
    _source: Any = PrivateAttr(None)
    """Origin of the settings (`load.Source`); None if the object was not loaded from a file or mapping."""

    @model_validator(mode="wrap")
    @classmethod
    def _with_admission_policy(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Move `scheduling.admission` out of `scheduling`, because one admission policy serves the whole system."""
        scheduling = value.get("scheduling") if isinstance(value, Mapping) else None
        if not isinstance(scheduling, Mapping) or ADMISSION.key not in scheduling:
            return handler(value)
        layers = {key: one for key, one in scheduling.items() if key != ADMISSION.key}
        choice = scheduling[ADMISSION.key]
        made = handler({**value, "scheduling": layers or None})
        made._admission_policy = None if choice is None else PolicyChoice.model_validate(choice)
        return made

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Put `scheduling.admission` back, and omit `programs` at its defaults, so that the written form of older files
        stays the same.
        """
        data: dict[str, Any] = handler(self)
        if self.programs == ProgramsConfig():
            data.pop("programs", None)
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
                    f"{name!r} accepts every request, so {names[index + 1]!r} never receives one; put it last"
                )
        return replicasets

    @model_validator(mode="after")
    def _decided(self) -> Self:
        if self.scheduling is None and not self.replicasets:
            raise ValueError("scheduling is missing, and there are no replicasets that have their own")
        if self.pools:
            check_pools(self.pools, self.num_replicas)
        if not self.replicasets:
            only = {DEFAULT_POOL: PoolConfig(num_replicas=self.num_replicas, elastic=self.elastic)}
            check_elastic(self.scheduling, self.elastic, self.pools or only)
        return self

    def __eq__(self, other: object) -> bool:
        """Compare the settings; the tree that a configuration was loaded from does not count."""
        return type(other) is type(self) and self.model_dump() == other.model_dump()

    @property
    def admission_policy(self) -> PolicyChoice | None:
        """Admission policy of the system (`scheduling.admission`); None: every request is accepted."""
        return self._admission_policy

    @property
    def effective_replicasets(self) -> Mapping[str, ReplicasetConfig]:
        """Replicasets of the run, in the order in which they select requests; only `default` if the file names none."""
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
            kv_event_lag_s=self.kv_event_lag_s,
        )
        return {"default": only}

    @property
    def replica_settings(self) -> list[ReplicaConfig]:
        """Replica settings of every pool, over all replicasets."""
        return [pool.replica for one in self.effective_replicasets.values() for pool in one.effective_pools.values()]

    @property
    def output_dir(self) -> Path:
        """Folder for the runs."""
        return Path(self.output.dir)


class ExperimentConfig(SystemConfig):
    """One experiment: a system, its workload, and the settings of the run or runs."""

    workload: WorkloadConfig = Field(description="Requests: when they arrive and how long they are.")
    sweep: Sweep | None = Field(
        None, description="Values to try: a grid `path: [values]`, `zip: {…}`, or a list of points `- {path: value}`."
    )
    replications: Annotated[int, Field(strict=True, gt=0, le=MAX_REPLICATIONS)] = Field(
        1,
        description=(
            "Number of runs of each setting, with the seeds `seed`, `seed` + 1, …: the same for every point of a sweep, so that settings are compared in pairs."
        ),
    )
    capacity: CapacityConfig | None = Field(
        None, description="Question about capacity that `vajra capacity` answers; `vajra run` ignores it."
    )

    @property
    def is_single(self) -> bool:
        """True if the experiment is a single run, with neither a sweep nor replications."""
        return self.sweep is None and self.replications == 1
