"""Body of `POST /admin/policy`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

LayerName = Literal["request_prioritizer", "replicaset_scheduler", "replica_scheduler"]
_MOST_PARAMS = 64
_LARGEST = 2**63 - 1
_Name = Annotated[str, Field(strict=True, min_length=1, max_length=256)]


def _params(given: Any) -> Any:
    """Check the number of parameters, the length of their names, and the size of their integers."""
    if not isinstance(given, dict):
        return given
    if len(given) > _MOST_PARAMS:
        raise ValueError(f"has {len(given)} entries. Allowed: up to {_MOST_PARAMS}")
    for name in given:
        if len(name) > 256:
            raise ValueError(f"has a name of {len(name)} characters. Allowed: up to 256")
    large = next((name for name, value in given.items() if _is_large(value)), None)
    if large is not None:
        raise ValueError(f"{large} has an integer that is too large. Allowed: -2^63 to 2^63 - 1")
    return given


def _is_large(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_is_large, value))
    if isinstance(value, dict):
        return any(map(_is_large, value.values()))
    return isinstance(value, int) and not -_LARGEST - 1 <= value <= _LARGEST


class PolicyBody(BaseModel):
    """Policy to swap in, and its layer."""

    model_config = ConfigDict(extra="forbid")

    layer: LayerName
    policy: _Name = Field(description="Name of an installed policy.")
    params: Annotated[dict[str, Any], BeforeValidator(_params)] = Field(
        default_factory=dict, description="Parameters of the policy; those left out have their defaults."
    )
    replicaset: _Name | None = Field(
        None, description="Name of the replicaset; may be left out where there is only one."
    )
