"""Settings under `workload:`.

Each class is one `type`. Options common to all types are applied in this order, regardless of their order in the file:
cut by time (`start_s`, `end_s`), `skip`, limits on lengths, for files `bootstrap`, `thin` and `window`, then `first`,
the pace (`rate` or `time_scale`), `max_tokens`, `priorities`, `tenants`, `slo_classes`. Relative paths start at the
folder `base_folder` of pydantic's validation context, by default at the current folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    create_model,
    field_validator,
    model_serializer,
    model_validator,
)

from vajra_py.contract.facts import FACTS, FactKind
from vajra_py.workload.arrivals import ArrivalProcess, AtOnce, PiecewiseConstant
from vajra_py.workload.cells import TimeUnit
from vajra_py.workload.distributions import NonNegative, Positive
from vajra_py.workload.programs import ContextRule, ProgramCalls
from vajra_py.workload.sessions import Sessions
from vajra_py.workload.stated import CSV_FIELDS
from vajra_py.workload.synthetic import ClosedLoop, Lengths

__all__ = [
    "SAMPLING_OPTIONS",
    "AgenticConfig",
    "AzureConfig",
    "BootstrapConfig",
    "BurstGptConfig",
    "CsvConfig",
    "JsonlConfig",
    "LengthsConfig",
    "MergeConfig",
    "MooncakeConfig",
    "PriorityShare",
    "ProfileConfig",
    "ProgramFileConfig",
    "ProgramsConfig",
    "SessionsConfig",
    "SloClassConfig",
    "SyntheticConfig",
    "TenantShares",
    "ThinConfig",
    "WorkloadConfig",
    "WorkloadOptions",
]

_Count: TypeAlias = Annotated[int, Field(ge=1, le=1_000_000_000)]
_Priority: TypeAlias = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
if TYPE_CHECKING:
    CsvField: TypeAlias = str
else:
    CsvField = Literal[CSV_FIELDS]
ProfileName: TypeAlias = Literal[
    "agentic_coding", "agentic_coding_sessions", "arxiv_summarization", "azure2023_code", "azure2023_conv", "mooncake_conversation",
    "mooncake_conversation_sessions", "mooncake_synthetic", "mooncake_toolagent", "servegen_deepseek_r1", "servegen_m_large",
    "servegen_m_mid", "servegen_m_small", "servegen_mm_image", "sharegpt300", "vtc_arena",
]  # fmt: skip


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False)


class PriorityShare(_Config):
    """Client priority, and the share of requests that have it."""

    priority: _Priority = Field(description="The priority; lower is more urgent.")
    share: Positive = Field(description="Share of the requests, relative to the other priorities'.")


class TenantShares(_Config):
    """Tenants of the requests: given names with shares, or a number of tenants with Zipf-distributed shares."""

    shares: dict[str, Positive] | None = Field(
        None, min_length=1, description="Share of each tenant by name, relative to the others'."
    )
    count: _Count | None = Field(
        None, description="Number of tenants, named tenant-0, tenant-1, …, in place of `shares`."
    )
    zipf_exponent: NonNegative = Field(
        1.0, description="With `count`: the k-th tenant sends in proportion to 1 / k^exponent."
    )

    @model_validator(mode="after")
    def _one_of_two(self) -> TenantShares:
        if (self.shares is None) == (self.count is None):
            raise ValueError("needs either shares or count. Allowed: one of the two")
        return self


class _ClassShare(_Config):
    name: str = Field(min_length=1, description="The class's name.")
    share: Positive = Field(1.0, description="Share of the requests, relative to the other classes'.")


if TYPE_CHECKING:
    _ClassDurations: TypeAlias = _ClassShare
else:
    _ClassDurations = create_model(
        "_ClassDurations",
        __base__=_ClassShare,
        __module__=__name__,
        **{
            fact.name: (Positive | None, Field(None, description=f"{fact.meaning}, in seconds."))
            for fact in FACTS
            if fact.kind is FactKind.DURATION
        },
    )


class SloClassConfig(_ClassDurations):
    """SLO class: the share of its requests, their priority, and their objectives."""

    priority: _Priority | None = Field(
        None, description="Client priority of the class, lower is more urgent; null leaves the requests' own."
    )

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        unstated = [fact.name for fact in FACTS if fact.is_only_where_stated and data.get(fact.name, 0) is None]
        return {name: value for name, value in data.items() if name not in unstated}


class WorkloadOptions(_Config):
    """Options of every kind of workload."""

    name: str | None = Field(
        None,
        min_length=1,
        description="Name in tables, and before the ids in a merged workload; null: from the source.",
    )
    start_s: NonNegative | None = Field(
        None, description="Leave out requests that arrive before this time, in the source's seconds; it becomes time 0."
    )
    end_s: NonNegative | None = Field(
        None, description="Leave out requests that arrive at this time or later, in the source's seconds."
    )
    skip: int = Field(
        0, ge=0, description="Number of requests to leave out at the start; time then starts at the first one kept."
    )
    first: _Count | None = Field(
        None, description="Number of requests to keep, after `skip` and the limits of length; null: all."
    )
    max_prompt_tokens: _Count | None = Field(None, description="Longest prompt in tokens; null: no limit.")
    max_total_tokens: int | None = Field(
        None, ge=2, description="Maximum total of prompt and output, tokens; null: no limit."
    )
    too_long: Literal["drop", "clip", "error"] = Field(
        "drop",
        description="Treatment of requests over a limit of length: left out, shortened (prompt first), or an error.",
    )
    rate: Positive | None = Field(
        None,
        description=(
            "Mean rate in requests per second, to which all arrival times are scaled by one factor; arrivals drawn by the seed have this rate on average."
        ),
    )
    time_scale: Positive | None = Field(
        None, description="Factor of arrival and think times (2 halves the rate); not with `rate`."
    )
    max_tokens: _Count | None = Field(
        None, description="Maximum number of output tokens that every client requests; null: as in the source."
    )
    priorities: tuple[PriorityShare, ...] = Field(
        (), description="Client priorities to draw from, per session where there are sessions."
    )
    tenants: TenantShares | None = Field(
        None, description="Tenants to draw from, per session where there are sessions."
    )
    slo_classes: tuple[SloClassConfig, ...] = Field(
        (), description="Service classes to draw from, per session where there are sessions."
    )

    @model_validator(mode="after")
    def _consistent(self) -> WorkloadOptions:
        if self.rate is not None and self.time_scale is not None:
            raise ValueError("rate and time_scale both set the pace. Allowed: one of the two")
        if self.start_s is not None and self.end_s is not None and self.start_s >= self.end_s:
            raise ValueError(
                f"start_s is not before end_s ({self.start_s:g} and {self.end_s:g}). Allowed: start_s < end_s"
            )
        for what, names in (
            ("priorities", [str(entry.priority) for entry in self.priorities]),
            ("slo_classes", [entry.name for entry in self.slo_classes]),
        ):
            if len(set(names)) < len(names):
                raise ValueError(f"{what} name one twice ({', '.join(names)}). Allowed: each once")
        return self


class BootstrapConfig(_Config):
    """Block bootstrap: replace a trace by blocks of it drawn with the seed. Requests of one session stay together."""

    block_s: Positive | None = Field(None, description="Length of a block, in the source's seconds.")
    block_requests: _Count | None = Field(
        None, description="Length of a block in requests (in sessions, where there are any)."
    )

    @model_validator(mode="after")
    def _one_of_two(self) -> BootstrapConfig:
        if (self.block_s is None) == (self.block_requests is None):
            raise ValueError("needs either block_s or block_requests. Allowed: one of the two")
        return self


class ThinConfig(_Config):
    """Thinning: keep a random part of a trace, drawn with the seed. Requests of one session stay together."""

    rate: Positive | None = Field(
        None, description="Requests per second (of the source's) that are left on average; below the trace's own rate."
    )
    fraction: float | None = Field(None, gt=0, lt=1, description="Fraction of the requests that is kept on average.")

    @model_validator(mode="after")
    def _one_of_two(self) -> ThinConfig:
        if (self.rate is None) == (self.fraction is None):
            raise ValueError("needs either rate or fraction. Allowed: one of the two")
        return self


class FileOptions(WorkloadOptions):
    path: str = Field(min_length=1, description="The file, plain or gzip'd.")
    window: Literal["random"] | None = Field(
        None,
        description="random: the requests that `first` or `window_s` keep begin at a position drawn by the seed; null: at the start.",
    )
    window_s: Positive | None = Field(None, description="Length of a random window, in the source's seconds.")
    bootstrap: BootstrapConfig | None = Field(
        None,
        description="Concatenate blocks of the trace, drawn by the seed, to one of the same length; null: the trace as it is.",
    )
    thin: ThinConfig | None = Field(None, description="Keep requests drawn by the seed; null: all.")

    @field_validator("path")
    @classmethod
    def _seen_from_base_folder(cls, path: str, info: ValidationInfo) -> str:
        folder = info.context.get("base_folder") if isinstance(info.context, dict) else None
        if folder is not None and not Path(path).is_absolute() and (Path(folder) / path).exists():
            return str(Path(folder) / path)
        return path

    @model_validator(mode="after")
    def _sampled_in_one_way(self) -> FileOptions:
        if self.window is not None and (self.first is None) == (self.window_s is None):
            given = f"first: {self.first}, window_s: {self.window_s}".replace("None", "null")
            raise ValueError(
                f"window: random needs one length (got {given}). Allowed: first, in requests, or window_s, in seconds"
            )
        if self.window is None and self.window_s is not None:
            message = f"window_s is the length of a window that is not there (got {self.window_s:g})"
            raise ValueError(f"{message}. Allowed: together with window: random")
        if self.window is not None and self.bootstrap is not None:
            raise ValueError("window and bootstrap both make another sample of the trace. Allowed: one of the two")
        if self.thin is not None and self.rate is not None:
            raise ValueError("thin and rate both set the pace. Allowed: one of the two")
        return self


SAMPLING_OPTIONS = frozenset({"window", "window_s", "bootstrap", "thin"})
"""Options of file types that replace the trace by a random sample of it."""


class _TraceOptions(FileOptions):
    sort: bool = Field(False, description="Sort requests by arrival; otherwise times out of order are an error.")
    drop_empty: bool = Field(
        False,
        description="Leave out requests of 0 prompt or output tokens and report their number; otherwise they are an error.",
    )


class AzureConfig(_TraceOptions):
    """An Azure LLM inference trace (2023, 2024): CSV with TIMESTAMP, ContextTokens, GeneratedTokens."""

    type: Literal["azure"]


class MooncakeConfig(_TraceOptions):
    """A Mooncake trace: JSON lines with timestamp (ms), input_length, output_length, hash_ids (prefix blocks)."""

    type: Literal["mooncake"]
    block_tokens: _Count = Field(512, description="Tokens of a hashed block.")
    tick_s: NonNegative = Field(
        0.0,
        description="Seconds after its timestamp over which each request is spread uniformly (conversation trace: 3).",
    )


class BurstGptConfig(_TraceOptions):
    """A BurstGPT trace: CSV with Timestamp, Model, Request tokens, Response tokens, Total tokens, Log Type."""

    type: Literal["burstgpt"]
    drop_empty: bool = Field(
        True, description="Leave out failures (0 response tokens) and report their number; otherwise they are an error."
    )
    model: str | None = Field(
        None, description="Keep the requests to this model only (as in the file: ChatGPT, GPT-4)."
    )
    log_type: str | None = Field(
        None, description="Keep the requests of this kind only (as in the file: Conversation log, API log)."
    )


class LengthsConfig(_TraceOptions):
    """A CSV file of prompt and output lengths, such as those made from ShareGPT, with or without arrivals and tenants."""

    type: Literal["lengths"]
    arrivals: ArrivalProcess | None = Field(None, description="Arrival process; null: the file's column.")
    num_requests: _Count | None = Field(
        None, description="Number of requests: the file's first rows, or rows drawn from it; null: all rows."
    )
    sample: bool = Field(
        False, description="Draw rows at random, with replacement, in place of the file's order; needs arrivals."
    )
    columns: dict[CsvField, str] = Field({}, description="Column names of fields whose names are not recognized.")

    @model_validator(mode="after")
    def _sampled_with_arrivals(self) -> LengthsConfig:
        if self.sample and self.arrivals is None:
            raise ValueError("sample mixes up the file's arrivals. Allowed: sample together with arrivals")
        return self


class JsonlConfig(FileOptions):
    """A workload in this project's own format: JSON Lines with one request per line."""

    type: Literal["jsonl"]
    sort: bool = Field(False, description="Sort requests by arrival; otherwise times out of order are an error.")


class CsvConfig(_TraceOptions):
    """Any CSV file with a header; columns are found by the names of the fields, the usual names, or `columns`."""

    type: Literal["csv"]
    columns: dict[CsvField, str] = Field({}, description="Column name of each field whose column has another name.")
    time_unit: TimeUnit = Field(
        "s", description="Unit of the arrivals; datetime: date and time, the clock then starts at the first."
    )
    metadata: tuple[str, ...] = Field((), description="Columns kept as metadata of the requests.")


class AgenticConfig(FileOptions):
    """Recorded sessions of coding agents (JSON lines), whose prompts repeat earlier turns."""

    type: Literal["agentic"]
    arrivals: ArrivalProcess = Field(description="Arrival process of sessions (rates in sessions per second).")
    num_sessions: _Count | None = Field(None, description="Number of sessions, the first of the file; null: all.")
    mode: Literal["closed", "open", "programs"] = Field(
        "closed",
        description=(
            "closed: a turn arrives a think time after the end of the one before; open: turns arrive at their recorded times; programs: as closed, and each session is a program that states its calls."
        ),
    )


class SyntheticConfig(WorkloadOptions, Lengths):
    """Requests with drawn lengths that arrive independently, or from users in a closed loop."""

    type: Literal["synthetic"]
    arrivals: Annotated[ArrivalProcess | ClosedLoop, Field(discriminator="type")] = Field(
        description="Arrival process."
    )
    num_requests: _Count | None = Field(None, description="Number of requests; null: as many as arrive in duration_s.")
    duration_s: Positive | None = Field(
        None, description="Seconds for which requests arrive; null: until num_requests."
    )

    @model_validator(mode="after")
    def _ends(self) -> SyntheticConfig:
        if isinstance(self.arrivals, ClosedLoop) and (self.num_requests is None or self.duration_s is not None):
            raise ValueError("closed_loop arrivals need num_requests and no duration_s. Allowed: num_requests")
        _check_end(self.arrivals, self.num_requests, self.duration_s, "num_requests")
        return self


class SessionsConfig(WorkloadOptions, Sessions):
    """Conversations whose prompts grow turn by turn and share system prompts."""

    type: Literal["sessions"]
    arrivals: ArrivalProcess = Field(description="Arrival process of sessions (rates in sessions per second).")
    num_sessions: _Count | None = Field(None, description="Number of sessions; null: as many as start in duration_s.")
    duration_s: Positive | None = Field(None, description="Seconds for which sessions start; null: until num_sessions.")

    @model_validator(mode="after")
    def _ends(self) -> SessionsConfig:
        _check_end(self.arrivals, self.num_sessions, self.duration_s, "num_sessions")
        return self


class ProfileConfig(WorkloadOptions):
    """A built-in workload fitted to a public trace.

    A profile of sessions starts them at `rate` divided by the mean number of turns.
    """

    type: Literal["profile"]
    profile: ProfileName = Field(description="Name of the built-in workload.")
    num_requests: _Count = Field(1000, description="Number of requests.")


class ProgramsConfig(WorkloadOptions, ProgramCalls):
    """Programs of calls with drawn graphs: chains, fork-join, trees, random graphs.

    A call is sent once all its parents have ended.
    """

    type: Literal["programs"]
    arrivals: ArrivalProcess = Field(description="Arrival process of programs (rates in programs per second).")
    num_programs: _Count | None = Field(None, description="Number of programs; null: as many as start in duration_s.")
    duration_s: Positive | None = Field(None, description="Seconds for which programs start; null: until num_programs.")

    @model_validator(mode="after")
    def _ends(self) -> ProgramsConfig:
        _check_end(self.arrivals, self.num_programs, self.duration_s, "num_programs")
        return self


class ProgramFileConfig(FileOptions):
    """Programs read from CSV, JSON Lines or Parquet: one row per call, with its program, parents and delay."""

    type: Literal["program_file"]
    arrivals: ArrivalProcess | None = Field(
        None, description="Arrival process of programs (rates in programs per second); null: the file's `arrived_at`."
    )
    num_programs: _Count | None = Field(None, description="Number of programs, the first of the file; null: all.")
    context: ContextRule = Field(
        "none",
        description=(
            "grow: a prompt begins with that of its first parent and its parents' answers, up to its length; none: prompts share nothing."
        ),
    )


class MergeConfig(WorkloadOptions):
    """Several workloads merged on one clock."""

    type: Literal["merge"]
    workloads: tuple[WorkloadConfig, ...] = Field(
        min_length=1, description="Merged workloads, each with its own options."
    )
    share_content: bool = Field(
        False, description="Equal segment ids in different parts are the same content, so prefixes are shared."
    )


WorkloadConfig: TypeAlias = Annotated[
    AgenticConfig
    | AzureConfig
    | BurstGptConfig
    | CsvConfig
    | JsonlConfig
    | LengthsConfig
    | MergeConfig
    | MooncakeConfig
    | ProfileConfig
    | ProgramFileConfig
    | ProgramsConfig
    | SessionsConfig
    | SyntheticConfig,
    Field(discriminator="type"),
]
"""Any kind of workload, distinguished by `type`."""


def _check_end(arrivals: object, number: int | None, duration_s: float | None, name: str) -> None:
    if isinstance(arrivals, AtOnce):
        if number is None:
            raise ValueError(f"at_once arrivals have no end. Allowed: {name}")
    elif (
        number is None and duration_s is None and not (isinstance(arrivals, PiecewiseConstant) and not arrivals.repeat)
    ):
        raise ValueError(f"the arrivals have no end. Allowed: {name} or duration_s")
