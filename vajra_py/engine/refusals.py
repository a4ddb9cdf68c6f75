"""Find settings of an experiment that are not supported by backends with a real model."""

from __future__ import annotations

from collections.abc import Mapping

from vajra_py.config import ReplicaConfig, ReplicasetConfig
from vajra_py.errors import Problem
from vajra_py.plugins import SCALER


def where_of(replicaset: str, replicasets: Mapping[str, ReplicasetConfig]) -> str:
    """Return the path of a replicaset's section `replica` in an experiment's file."""
    return f"{section_of(replicaset, replicasets)}replica"


def section_of(replicaset: str, replicasets: Mapping[str, ReplicasetConfig]) -> str:
    """Return the prefix of the paths of a replicaset's settings in an experiment's file."""
    return "" if len(replicasets) == 1 else f"replicasets.{replicaset}."


def replicas_by_place(name: str, replicasets: Mapping[str, ReplicasetConfig]) -> dict[str, ReplicaConfig]:
    """Return the sections `replica` of a replicaset and of its pools, by their paths in an experiment's file."""
    one = replicasets[name]
    pools = {f"{section_of(name, replicasets)}pools.{pool}.replica": one.pools[pool].replica for pool in one.pools}
    return {where_of(name, replicasets): one.replica, **pools}


def check_scaling(backend: str, replicasets: Mapping[str, ReplicasetConfig]) -> list[Problem]:
    """Return a problem for each replicaset with a scaler.

    Backends with a real model start all workers at the beginning and cannot add or remove replicas.
    """
    problems = []
    for name, one in replicasets.items():
        scaler = one.scheduling.scaling
        if scaler is not None:
            message = (
                f"the backend `{backend}` neither starts nor stops replicas while it serves (got {scaler.policy!r})"
            )
            advice = "Allowed: null; simulate it with `simulator`"
            problems.append(Problem(f"{section_of(name, replicasets)}scheduling.{SCALER.key}", message, advice))
    return problems


def check_pools(backend: str, replicasets: Mapping[str, ReplicasetConfig]) -> list[Problem]:
    """Return a problem for each replicaset with named pools, for a backend whose replicas cannot move KV."""
    problems = []
    for name, one in replicasets.items():
        if one.pools:
            message = f"the backend `{backend}` has replicas of one pool alone (got {', '.join(one.pools)})"
            advice = "Leave it out; `engine` and `simulator` have pools"
            problems.append(Problem(f"{section_of(name, replicasets)}pools", message, advice))
    return problems


def check_replica(where: str, replica: ReplicaConfig, *, has_adapters: bool = False) -> list[Problem]:
    """Return a problem for each setting of a replica that backends with a real model do not support.

    `has_adapters`: True if the backend's workers compute adapters.
    """
    problems = []
    if replica.memory.prefix_cache.enabled and replica.memory.prefix_cache.unscheduled == "keep":
        message = "would let requests read KV blocks that were never computed ('keep')"
        problems.append(Problem(f"{where}.memory.prefix_cache.unscheduled", message, "Allowed: withdraw"))
    if replica.adapters is not None and not has_adapters:
        number = "any" if replica.adapters.models is None else len(replica.adapters.models)
        message = f"steps are computed with the base model only (got {number} adapters)"
        problems.append(Problem(f"{where}.adapters", message, "Allowed: null; simulate them with `simulator`"))
    if replica.draft.pad_admitted:
        message = "positions without drafts are not computed"
        problems.append(Problem(f"{where}.draft.pad_admitted", message, "Allowed: false; simulate it with `simulator`"))
    if replica.memory.swap_link is not None:
        message = "swapped blocks are copied between two steps"
        problems.append(Problem(f"{where}.memory.swap_link", message, "Allowed: null; simulate it with `simulator`"))
    return problems


def check_tiers(where: str, replica: ReplicaConfig) -> list[Problem]:
    """Return problems with memory tiers of a replica: the engine supports one tier per replica, in host memory."""
    tiers = replica.memory.tiers
    if tiers is None:
        return []
    place, problems, simulate = f"{where}.memory.tiers", [], "; simulate it with `simulator`"
    if len(tiers.levels) > 1:
        names = ", ".join(level.name for level in tiers.levels)
        message = f"the engine has one tier, in host memory (got {names})"
        problems.append(Problem(f"{place}.levels", message, f"Allowed: one level{simulate}"))
    for index, level in enumerate(tiers.levels[:1]):
        for key, is_set, what in (
            ("shared", level.shared, "replicas of the engine share no tier"),
            ("exclusive", level.exclusive, "content that is loaded stays in the engine's tier"),
        ):
            if is_set:
                problems.append(Problem(f"{place}.levels.{index}.{key}", what, f"Allowed: false{simulate}"))
    for what, is_so in (
        (f"with {replica.pipeline_stages} pipeline stages", (replica.pipeline_stages or 1) > 1),
        (f"with {replica.kv_parallel.groups} KV-parallel groups", replica.kv_parallel.groups > 1),
    ):
        if is_so:
            message = f"content cannot be kept in a host tier {what}"
            problems.append(Problem(place, message, f"Allowed: null{simulate}"))
    return problems
