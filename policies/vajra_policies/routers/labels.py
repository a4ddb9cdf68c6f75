"""Filters by role and by label; a replica's labels are its pool's name and its role.

Source: llm-d-router, `scheduling/filter/bylabel`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from pydantic import Field, model_validator

from vajra_policies.routers.load_scorers import NoParameters
from vajra_py.contract import (
    PolicyConfig,
    ReplicaLoadView,
    RequestView,
    RoutingContext,
    RoutingPartKind,
    RoutingPartSpec,
)

Label: TypeAlias = Literal["pool", "llm-d.ai/role"]

_ROLES: Mapping[str, frozenset[str]] = {
    "mixed": frozenset({"mixed", "both", "prefill-decode", "encode-prefill-decode"}),
    "prefill": frozenset({"prefill", "encode-prefill"}),
    "decode": frozenset({"decode"}),
}
"""For each role of a replica, the values of llm-d's role label that match it."""


def _values(pool: str, role: str, label: str) -> frozenset[str]:
    if label == "pool":
        return frozenset({pool})
    return _ROLES.get(role, frozenset({role}))


class _ByPool(ABC):
    """Filters replicas by attributes that all replicas of a pool have in common."""

    @abstractmethod
    def may_take(self, pool: str, role: str) -> bool:
        """See `LeavesOutPools`; the result is the same for every request."""

    def keeps(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Sequence[ReplicaLoadView]:
        """Keep the replicas of pools that may take requests."""
        kept = [one for one in replicas if self.may_take(one.pool, one.role)]
        return replicas if len(kept) == len(replicas) else kept


class RoleFilter(_ByPool):
    """Keeps replicas of the given roles."""

    def __init__(self, *roles: str) -> None:
        self._roles = frozenset(roles)

    def may_take(self, pool: str, role: str) -> bool:
        """Return True for pools of the given roles."""
        return role in self._roles


class ByLabelConfig(PolicyConfig):
    """Parameters of `by-label`."""

    label: Label = Field(description="Name of the label.")
    valid_values: list[str] = Field(default_factory=list, description="Values whose replicas are kept.")
    allows_no_label: bool = Field(False, description="Keep replicas without the label; here all have it.")

    @model_validator(mode="after")
    def _keeps_any(self) -> ByLabelConfig:
        if not self.valid_values and not self.allows_no_label:
            raise ValueError("valid_values must not be empty unless allows_no_label is true")
        return self


class ByLabel(_ByPool):
    """Keeps replicas by the value of a label."""

    def __init__(self, config: ByLabelConfig) -> None:
        self._label = config.label
        self._valid = frozenset(config.valid_values)

    def may_take(self, pool: str, role: str) -> bool:
        """Return True for pools whose replicas have one of the label's valid values."""
        return bool(_values(pool, role, self._label) & self._valid)


class Requirement(PolicyConfig):
    """A condition on a label, as in a Kubernetes label selector."""

    key: Label
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _has_values(self) -> Requirement:
        needs = self.operator in ("In", "NotIn")
        if needs != bool(self.values):
            raise ValueError(f"operator {self.operator} takes {'at least one value' if needs else 'no values'}")
        return self

    def holds(self, pool: str, role: str) -> bool:
        """Return True if replicas of the pool fulfil the condition. Every replica has both labels, so `Exists` always
        holds.
        """
        if self.operator in ("Exists", "DoesNotExist"):
            return self.operator == "Exists"
        return bool(_values(pool, role, self.key) & frozenset(self.values)) == (self.operator == "In")


class LabelSelectorConfig(PolicyConfig):
    """Parameters of `label-selector-filter`: a Kubernetes label selector."""

    match_labels: dict[Label, str] = Field(default_factory=dict, description="Value that each label must have.")
    match_expressions: list[Requirement] = Field(default_factory=list, description="Further conditions; all must hold.")


class LabelSelector(_ByPool):
    """Keeps replicas that fulfil all conditions."""

    def __init__(self, config: LabelSelectorConfig) -> None:
        equal = [Requirement(key=key, operator="In", values=[value]) for key, value in config.match_labels.items()]
        self._requirements = [*equal, *config.match_expressions]

    def may_take(self, pool: str, role: str) -> bool:
        """Return True for pools that fulfil all requirements."""
        return all(one.holds(pool, role) for one in self._requirements)


def _decode(config: NoParameters, context: RoutingContext) -> RoleFilter:
    return RoleFilter("decode", "mixed")


def _prefill(config: NoParameters, context: RoutingContext) -> RoleFilter:
    return RoleFilter("prefill", "mixed")


def _by_label(config: ByLabelConfig, context: RoutingContext) -> ByLabel:
    return ByLabel(config)


def _selector(config: LabelSelectorConfig, context: RoutingContext) -> LabelSelector:
    return LabelSelector(config)


SPECS = (
    RoutingPartSpec(
        name="decode-filter",
        kind=RoutingPartKind.FILTER,
        config=NoParameters,
        build=_decode,
        summary="Replicas that decode: of decode and mixed pools.",
        source="llm-d decode-filter",
    ),
    RoutingPartSpec(
        name="prefill-filter",
        kind=RoutingPartKind.FILTER,
        config=NoParameters,
        build=_prefill,
        summary="Replicas that compute prompts: of prefill and mixed pools.",
        source="llm-d prefill-filter",
    ),
    RoutingPartSpec(
        name="by-label",
        kind=RoutingPartKind.FILTER,
        config=ByLabelConfig,
        build=_by_label,
        summary="Replicas by the name of their pool or by role.",
        source="llm-d by-label",
    ),
    RoutingPartSpec(
        name="label-selector-filter",
        kind=RoutingPartKind.FILTER,
        config=LabelSelectorConfig,
        build=_selector,
        summary="Replicas by a label selector over the name of their pool and their role.",
        source="llm-d label-selector-filter",
    ),
)
