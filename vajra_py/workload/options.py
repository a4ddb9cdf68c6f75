"""Options common to all kinds of workload.

They are applied in this order, regardless of their order in the file: cut by time (`start_s`, `end_s`), `skip`, limits
on lengths, `bootstrap`, `thin` and `window` (only for files), `first`, the pace (`rate` or `time_scale`), `max_tokens`,
`priorities`, `tenants`, `slo_classes`.
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    create_model,
    model_serializer,
    model_validator,
)

from vajra_py.contract.facts import FACTS, FactKind
from vajra_py.workload.arrivals import AtOnce, PiecewiseConstant
from vajra_py.workload.distributions import NonNegative, Positive
from vajra_py.workload.synthetic import RngFor
from vajra_py.workload.workload import Workload

__all__ = [
    "Count",
    "PriorityShare",
    "SloClassConfig",
    "TenantShares",
    "WorkloadOptions",
    "WorkloadSection",
    "check_end",
]

Count: TypeAlias = Annotated[int, Field(ge=1, le=1_000_000_000)]
_Share: TypeAlias = Annotated[Positive, Field(le=1e12)]
_Priority: TypeAlias = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]


class WorkloadSection(BaseModel):
    """Base of the sections of a workload: frozen, no extra keys, no NaN, no infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False)


class PriorityShare(WorkloadSection):
    """Client priority, and the share of requests that have it."""

    priority: _Priority = Field(description="The priority; lower is more urgent.")
    share: _Share = Field(description="Share of the requests, relative to the other priorities'.")


class TenantShares(WorkloadSection):
    """Tenants of the requests: given names with shares, or a number of tenants with Zipf-distributed shares."""

    shares: dict[str, _Share] | None = Field(
        None, min_length=1, description="Share of each tenant by name, relative to the others'."
    )
    count: int | None = Field(
        None, ge=1, le=1_000_000, description="Number of tenants, named tenant-0, tenant-1, …, in place of `shares`."
    )
    zipf_exponent: NonNegative = Field(
        1.0, description="With `count`: the k-th tenant sends in proportion to 1 / k^exponent."
    )

    @model_validator(mode="after")
    def _one_of_two(self) -> TenantShares:
        if (self.shares is None) == (self.count is None):
            raise ValueError("needs either shares or count. Allowed: one of the two")
        return self


class _ClassShare(WorkloadSection):
    name: str = Field(min_length=1, description="The class's name.")
    share: _Share = Field(1.0, description="Share of the requests, relative to the other classes'.")


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
    """SLO class: its share of the requests, and the priority and objectives of these requests."""

    priority: _Priority | None = Field(
        None, description="Client priority of the class, lower is more urgent; null leaves the requests' own."
    )

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        unstated = [fact.name for fact in FACTS if fact.is_only_where_stated and data.get(fact.name, 0) is None]
        return {name: value for name, value in data.items() if name not in unstated}


class WorkloadOptions(WorkloadSection):
    """Options of every kind of workload."""

    starts_sessions_at_rate: ClassVar[bool] = False
    """True if the source itself starts sessions at the configured `rate`, so that time is not stretched to reach this
    rate.
    """

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
        0,
        ge=0,
        le=1_000_000_000,
        description="Number of requests to leave out at the start; time then starts at the first one kept.",
    )
    first: Count | None = Field(
        None, description="Number of requests to keep, after `skip` and the limits of length; null: all."
    )
    max_prompt_tokens: Count | None = Field(None, description="Longest prompt in tokens; null: no limit.")
    max_total_tokens: int | None = Field(
        None, ge=2, le=2**32, description="Maximum total of prompt and output, tokens; null: no limit."
    )
    too_long: Literal["drop", "clip", "error"] = Field(
        "drop",
        description=(
            "Treatment of requests over a limit of length: left out, an error, or shortened: prompts to `max_prompt_tokens` and to `max_total_tokens` - 1, then outputs to what the prompt leaves of `max_total_tokens`."
        ),
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
    max_tokens: Count | None = Field(
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

    @abstractmethod
    def source(self, rng_for: RngFor, base_dir: Path) -> Workload:
        """Return the requests before these options are applied; arguments and errors are those of `build_workload`."""

    def mean_rate(self) -> float | None:
        """Return the mean rate of the source over all seeds, in requests per second, before these options are applied;
        None if it is unknown, or if the rate changes over time and the source is cut (`is_cut`).

        If the mean rate is known, the option `rate` stretches the workloads of all seeds by the same factor. If it is
        unknown, each seed's workload is stretched by its own factor. These factors are equal for a file, because its
        arrivals are the same for every seed.
        """
        return None

    @property
    def is_cut(self) -> bool:
        """True if only requests of a part of the source's time are kept."""
        return self.start_s is not None or self.end_s is not None or self.first is not None or self.skip > 0


def check_end(arrivals: object, number: int | None, duration_s: float | None, name: str) -> None:
    """Raise ValueError if endless arrivals have no bound: neither `number` (the value of the option `name`) nor
    `duration_s`.

    Arrivals at once always need `number`.
    """
    if isinstance(arrivals, AtOnce):
        if number is None:
            raise ValueError(f"at_once arrivals have no end. Allowed: {name}")
    elif (
        number is None and duration_s is None and not (isinstance(arrivals, PiecewiseConstant) and not arrivals.repeat)
    ):
        raise ValueError(f"the arrivals have no end. Allowed: {name} or duration_s")
