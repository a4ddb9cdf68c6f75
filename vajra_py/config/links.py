"""Schema of `links:`: the network over which KV goes from one replica to another."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from vajra_py.contract.latency import LAST_S

_Bandwidth = Annotated[float, Field(strict=True, ge=1e-9, le=1e9)]


class LinksConfig(BaseModel):
    """Bandwidth and latency of the links between replicas, and how transfers share them."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    bandwidth_gb_s: _Bandwidth | None = Field(
        None,
        description="Bandwidth of a replica's link, each way, GB/s (of 10^9 bytes); null: no limit.",
        json_schema_extra={"unit": "GB/s"},
    )
    shared_bandwidth_gb_s: _Bandwidth | None = Field(
        None,
        description="Bandwidth that all transfers of the network share, GB/s (of 10^9 bytes); null: no limit.",
        json_schema_extra={"unit": "GB/s"},
    )
    latency_s: Annotated[float, Field(strict=True, ge=0, le=LAST_S)] = Field(
        0.0,
        description="Time from a transfer's start until its first byte flows, seconds.",
        json_schema_extra={"unit": "seconds"},
    )
    contention: Literal["max_min", "none", "fixed_share", "exclusive"] = Field(
        "max_min",
        description=(
            "Effect of transfers on one link on each other: they share it fairly at every moment; none; they take an equal share that is fixed when a transfer starts; or they go one after the other."
        ),
    )
