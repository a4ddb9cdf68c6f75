"""Schema of `capacity:`: the SLO, the search space, and the required precision."""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from vajra_py.config.slo import parse_slo

_REPLICASET = re.compile(r"replicasets\.[^.]+\.num_replicas")
"""Path of the number of replicas of a whole replicaset, not of one of its pools."""

_Positive = Annotated[float, Field(strict=True, gt=0)]
_Count = Annotated[int, Field(strict=True, ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class RateSearch(_Section):
    """Range in which the highest rate that meets the SLO is searched."""

    path: str = Field("workload.rate", min_length=1, description="Setting to search: a rate of requests.")
    min: _Positive = Field(0.01, description="Lowest rate to try, requests per second.")
    max: _Positive = Field(10_000.0, description="Highest rate to try, requests per second.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min >= self.max:
            raise ValueError(f"min must be below max (got {self.min:g} and {self.max:g})")
        return self


class ReplicaSearch(_Section):
    """Range in which the cheapest number of replicas that meets the SLO is searched."""

    min: Annotated[int, Field(strict=True, ge=0)] = Field(
        1,
        description="Minimum number of replicas; 0 (for a named replicaset): it may be left out, and others serve its requests.",
    )
    max: _Count = Field(description="Maximum number of replicas.")
    cost: _Positive | None = Field(
        None,
        description=(
            "Cost of one replica, in any unit; given for all kinds of replicas or for none (the prices of their devices then, "
            "or where one is not known, the same for all)."
        ),
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min must not be above max (got {self.min} and {self.max})")
        return self


class CapacityConfig(_Section):
    """Search of `vajra capacity`: the highest rate, or the cheapest numbers of replicas, at which an SLO holds."""

    slo: str = Field(
        description="Condition on metrics, such as `p99(ttft) <= 0.5 and attainment >= 0.95`; times in seconds."
    )
    rate: RateSearch | None = Field(None, description="Search the highest rate.")
    replicas: dict[str, ReplicaSearch] | None = Field(
        None,
        min_length=1,
        description="Search the cheapest numbers of replicas, by path: `num_replicas: {max: 16}`, or several `replicasets.NAME.num_replicas`.",
    )
    precision_fraction: Annotated[float, Field(strict=True, gt=0, lt=1)] = Field(
        0.02, description="Precision of a rate: half the width of its interval, as a fraction of the rate."
    )
    replications: Annotated[int, Field(strict=True, ge=2, le=1000)] = Field(
        5,
        description=(
            "Number of seeds under which every decisive setting is run (`seed`, `seed` + 1, …); at least five for a rate, as an interval needs, unless `max_replications` is less."
        ),
    )
    max_replications: Annotated[int, Field(strict=True, ge=2, le=1000)] = Field(
        20, description="Maximum number of seeds for a rate whose interval is wider than `precision_fraction`."
    )
    curve: tuple[_Positive, ...] = Field(
        (0.5, 0.75, 0.9, 1.1, 1.25), description="Further points of the curve, as multiples of the capacity found."
    )

    @field_validator("slo")
    @classmethod
    def _readable(cls, text: str) -> str:
        parse_slo(text)
        return text

    @model_validator(mode="before")
    @classmethod
    def _something(cls, value: Any) -> Any:
        if isinstance(value, dict) and not value.get("rate") and not value.get("replicas"):
            return {**value, "rate": {}}
        return value

    @model_validator(mode="after")
    def _one_question(self) -> Self:
        if self.rate is not None and self.replicas is not None:
            raise ValueError("rate and replicas are two different searches. Allowed: one of the two")
        for path, one in (self.replicas or {}).items():
            if one.min == 0 and not _REPLICASET.fullmatch(path):
                raise ValueError(
                    f"min: 0 applies only to one of several replicasets (got {path}). Allowed here: at least 1"
                )
        given = {one.cost is None for one in (self.replicas or {}).values()}
        if len(given) > 1:
            raise ValueError("cost is given for some replicas only. Allowed: for all of them, or for none")
        if self.max_replications < self.replications:
            raise ValueError(
                f"max_replications must not be below replications (got {self.max_replications} and {self.replications})"
            )
        return self
