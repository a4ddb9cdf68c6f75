"""Check that an object is a policy of its kind: methods, their arguments, declarations and traits."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import fields

from vajra_py.contract import (
    FallenGroups,
    FallenRequests,
    KeyMotion,
    Layer,
    RoutingPartKind,
    SchedulerTraits,
    SteadyState,
)
from vajra_py.contract.policies import NO_TRAITS
from vajra_py.errors import (
    PluginError,
    did_you_mean,
)
from vajra_py.plugins.registry import kind_of

LAYER_METHODS: Mapping[Layer, Mapping[str, int]] = {
    Layer.REQUEST_PRIORITIZER: {"key": 2},
    Layer.REPLICASET_SCHEDULER: {"assign": 3, "pull": 3},
    Layer.REPLICA_SCHEDULER: {"schedule": 3},
}
"""Methods required by each layer's Protocol, with the number of arguments of each call."""

LISTENING_METHODS: Mapping[str, int] = {
    "on_arrivals": 2,
    "on_admission": 3,
    "on_preemption": 3,
    "on_moved": 4,
    "on_step_end": 1,
    "on_step_run": 1,
    "on_departures": 2,
    "on_program_end": 2,
    "on_wake": 2,
}
"""Optional methods that notify policies of any layer about requests and wake-ups, with their numbers of arguments."""

CACHE_METHODS: Mapping[str, int] = {
    "on_blocks_stored": 3,
    "on_blocks_removed": 3,
    "on_cache_cleared": 2,
    "on_tier_blocks_stored": 4,
    "on_tier_blocks_removed": 4,
    "on_tier_cleared": 3,
}
"""Optional methods that notify policies of any layer about the replicas' caches, with their numbers of arguments."""

PART_METHODS: Mapping[RoutingPartKind, Mapping[str, int]] = {
    RoutingPartKind.PRODUCER: {},
    RoutingPartKind.FILTER: {"keeps": 3},
    RoutingPartKind.SCORER: {"scores": 3},
    RoutingPartKind.PICKER: {"pick": 4},
    RoutingPartKind.DECIDER: {"disaggregates": 3},
}
"""Methods required of each kind of routing part, with the number of arguments of each call."""

OPTIONAL_METHODS: Mapping[Layer, Mapping[str, int]] = {
    Layer.REQUEST_PRIORITIZER: {
        "line": 1,
        "falls_at": 2,
        "key_epoch": 0,
        "slack_s": 2,
        "slack_fraction": 2,
        "group": 1,
        "group_key": 1,
    },
    Layer.REPLICASET_SCHEDULER: {"place_after_prompt": 3, "moves": 2},
    Layer.REPLICA_SCHEDULER: {"solo_chunk_size": 2, "refuses": 3, "evict_adapter": 2},
}
"""Optional methods of each layer's policies, with the number of arguments of each call."""

ADMISSION_METHODS: Mapping[str, int] = {"admit": 3}
"""Methods required of an admission policy, with the number of arguments of each call."""

SCALER_METHODS: Mapping[str, int] = {"targets": 2}
"""Methods required of a scaler, with the number of arguments of each call."""

RETENTION_METHODS: Mapping[str, int] = {"key": 2}
"""Methods required of a retention policy, with the number of arguments of each call."""

RETENTION_OPTIONS: Mapping[str, int] = {
    "line": 1,
    "segment": 1,
    "next_segment": 1,
    "expires_at": 1,
    "pin_s": 2,
    "on_stored": 2,
    "on_used": 2,
    "on_evicted": 2,
    "on_withdrawn": 2,
    "on_cleared": 1,
    **{name: count for name, count in LISTENING_METHODS.items() if name != "on_wake"},
}
"""Optional methods of a retention policy, with the number of arguments of each call; `on_wake` is never called."""

DECLARATIONS: Mapping[Layer, frozenset[str]] = {
    Layer.REQUEST_PRIORITIZER: frozenset({"key_motion", "fallen_groups", "fallen_requests"}),
    Layer.REPLICASET_SCHEDULER: frozenset({"traits"}),
    Layer.REPLICA_SCHEDULER: frozenset({"traits"}),
}
"""Names of attributes by which each layer's policies declare properties of their decisions."""

TRAITS: Mapping[Layer, frozenset[str]] = {
    Layer.REQUEST_PRIORITIZER: frozenset(),
    Layer.REPLICASET_SCHEDULER: frozenset({"reads_load", "is_work_conserving"}),
    Layer.REPLICA_SCHEDULER: frozenset({"repeats_decodes", "needs_slack", "is_work_conserving"}),
}
"""Fields of `SchedulerTraits` that apply to each layer."""

_TRAIT_NAMES = frozenset(field.name for field in fields(SchedulerTraits))

_NEAR = 0.9
"""Similarity to a hook's name (0 to 1) above which another name counts as a misspelling of it."""


def check_part_shape(kind: RoutingPartKind, part: object, what: str, plugin: str) -> None:
    """Check that an object is a routing part of the kind.

    Raises `PluginError` that names the plug-in and the first problem.
    """
    if isinstance(part, type):
        raise PluginError(plugin, f"{what}: build returned the class {part.__name__} itself; expected an instance")
    check_methods(part, PART_METHODS[kind], what, plugin)
    optional = {**LISTENING_METHODS, **CACHE_METHODS, "on_placement": 3}
    check_methods(part, {name: count for name, count in optional.items() if _has(part, name)}, what, plugin)
    _check_step_runs(part, what, plugin)
    for name in dir(part):
        if name.startswith("on_") and name not in optional:
            allowed = did_you_mean(name, optional)
            raise PluginError(plugin, f"{what}: nothing calls {name!r}. {allowed}. Other names begin with '_'")


def _has(target: object, name: str) -> bool:
    return getattr(target, name, None) is not None


def check_policy_shape(layer: Layer, policy: object, what: str, plugin: str) -> None:
    """Check that an object is a policy of the layer.

    Raises `PluginError` that names the plug-in and the first problem.
    """
    if isinstance(policy, type):
        raise PluginError(plugin, f"{what}: build returned the class {policy.__name__}; expected an instance")
    check_methods(policy, LAYER_METHODS[layer], what, plugin)
    optional = {**LISTENING_METHODS, **CACHE_METHODS, **OPTIONAL_METHODS[layer]}
    present = {name: count for name, count in optional.items() if _has(policy, name)}
    check_methods(policy, present, what, plugin)
    _check_step_runs(policy, what, plugin)
    _check_names(layer, policy, what, plugin)
    _check_traits(policy, what, plugin)
    if layer is Layer.REQUEST_PRIORITIZER:
        _check_key_motion(policy, what, plugin)
        _check_groups(policy, what, plugin)
        _check_named_falls(policy, what, plugin)


def check_admission_shape(policy: object, what: str, plugin: str) -> None:
    """Check that an object is an admission policy. Raises `PluginError` like `check_policy_shape`."""
    _check_shape_beside(policy, ADMISSION_METHODS, what, plugin)


def check_scaler_shape(scaler: object, what: str, plugin: str) -> None:
    """Check that an object is a scaler. Raises `PluginError` like `check_policy_shape`."""
    _check_shape_beside(scaler, SCALER_METHODS, what, plugin)


def check_retention_shape(policy: object, what: str, plugin: str) -> None:
    """Check that an object is a retention policy. Raises `PluginError` like `check_policy_shape`."""
    _check_shape_beside(policy, RETENTION_METHODS, what, plugin, RETENTION_OPTIONS)
    _check_key_motion(policy, what, plugin)
    motion = getattr(policy, "key_motion", None)
    if motion in (KeyMotion.NAMED_FALLS, KeyMotion.PREFIX_HITS):
        raise PluginError(plugin, f"{what}: {motion} is for request prioritizers")
    if _has(policy, "segment") != _has(policy, "next_segment"):
        raise PluginError(plugin, f"{what}: segment and next_segment belong together, and it has one of them")


def _check_shape_beside(
    policy: object, methods: Mapping[str, int], what: str, plugin: str, optional: Mapping[str, int] = LISTENING_METHODS
) -> None:
    if isinstance(policy, type):
        raise PluginError(plugin, f"{what}: build returned the class {policy.__name__}; expected an instance")
    check_methods(policy, methods, what, plugin)
    present = {name: count for name, count in optional.items() if _has(policy, name)}
    check_methods(policy, present, what, plugin)
    _check_step_runs(policy, what, plugin)
    hooks = frozenset((*methods, *optional))
    layers = [one for one in _layers_served(policy) if not LAYER_METHODS[one].keys() <= methods.keys()]
    own = frozenset().union(*map(hooks_of, layers))
    for name in dir(policy):
        if name.startswith("_") or name in own or name in hooks:
            continue
        near = difflib.get_close_matches(name, hooks, n=1, cutoff=_NEAR)
        if name.startswith("on_") or (near and not hasattr(policy, near[0])):
            allowed = did_you_mean(name, hooks)
            raise PluginError(plugin, f"{what}: nothing calls {name!r}. {allowed}. Other names begin with '_'")


def _check_step_runs(policy: object, what: str, plugin: str) -> None:
    if _has(policy, "on_step_run") and not _has(policy, "on_step_end"):
        raise PluginError(
            plugin, f"{what}: on_step_run reports some steps, on_step_end the others, and on_step_end is missing"
        )


def hooks_beside(methods: Mapping[str, int]) -> frozenset[str]:
    """Return the names of all methods that the mechanism calls on a policy that belongs to no layer.

    `methods` are the methods that its kind requires.
    """
    return frozenset((*methods, *LISTENING_METHODS))


def hooks_of(layer: Layer) -> frozenset[str]:
    """Return the names of all attributes that the mechanism reads or calls on a policy of the layer."""
    return DECLARATIONS[layer].union(LAYER_METHODS[layer], OPTIONAL_METHODS[layer], LISTENING_METHODS, CACHE_METHODS)


def _check_names(layer: Layer, policy: object, what: str, plugin: str) -> None:
    """Reject attributes that look like hooks but would never be called: misspelt hooks, and hooks of another layer.

    A name that is similar to a hook's name counts as a misspelling unless the policy has that hook as well.
    """
    hooks, everywhere = hooks_of(layer), frozenset().union(*map(hooks_of, Layer))
    own = frozenset().union(*map(hooks_of, _layers_served(policy)))
    for name in dir(policy):
        if name.startswith("_") or name in own or name in hooks:
            continue
        if name in _TRAIT_NAMES:
            where = f"Declare traits = SchedulerTraits({name}=...)"
            raise PluginError(plugin, f"{what}: nothing reads {name!r} of a policy. {where}")
        if name in everywhere:
            layers = ", ".join(kind_of(other) for other in Layer if name in hooks_of(other))
            raise PluginError(
                plugin, f"{what}: {name!r} is never called on a {kind_of(layer)}. It applies to a {layers}"
            )
        near = difflib.get_close_matches(name, hooks, n=1, cutoff=_NEAR)
        if name.startswith("on_") or (near and not hasattr(policy, near[0])):
            allowed = did_you_mean(name, hooks)
            raise PluginError(plugin, f"{what}: nothing calls {name!r}. {allowed}. Other names begin with '_'")


def _layers_served(policy: object) -> list[Layer]:
    """Return the layers whose required methods the object has; there may be several."""
    return [layer for layer in Layer if all(hasattr(policy, name) for name in LAYER_METHODS[layer])]


def _check_traits(policy: object, what: str, plugin: str) -> None:
    traits = getattr(policy, "traits", NO_TRAITS)
    if not isinstance(traits, SchedulerTraits):
        raise PluginError(plugin, f"{what}: traits is {traits!r}; expected a SchedulerTraits")
    steady: object = traits.repeats_decodes  # a plug-in may declare anything
    if not isinstance(steady, frozenset) or not all(isinstance(one, SteadyState) for one in steady):
        expected = ", ".join(f"SteadyState.{one.name}" for one in SteadyState)
        raise PluginError(plugin, f"{what}: traits.repeats_decodes is {steady!r}; expected a frozenset of {expected}")
    known = frozenset().union(*(TRAITS[layer] for layer in _layers_served(policy)))
    for field in fields(traits):
        value = getattr(traits, field.name)
        if isinstance(field.default, bool) and not isinstance(value, bool):
            raise PluginError(plugin, f"{what}: traits.{field.name} is {value!r}; expected True or False")
        if value != field.default and field.name not in known:
            layers = " and ".join(kind_of(layer) for layer in Layer if field.name in TRAITS[layer])
            raise PluginError(plugin, f"{what}: traits.{field.name} applies only to a {layers} (got {value!r})")


def _check_key_motion(policy: object, what: str, plugin: str) -> None:
    motion = getattr(policy, "key_motion", None)
    if not isinstance(motion, KeyMotion):
        choices = ", ".join(f"KeyMotion.{each.name}" for each in KeyMotion)
        raise PluginError(plugin, f"{what}: key_motion is {motion!r}; expected one of {choices}")
    if motion is KeyMotion.TIME_LINEAR:
        check_methods(policy, {"line": 1}, f"{what} (KeyMotion.TIME_LINEAR)", plugin)


def _check_named_falls(policy: object, what: str, plugin: str) -> None:
    motion = getattr(policy, "key_motion", None)
    names = motion is KeyMotion.NAMED_FALLS
    fallen = getattr(policy, "fallen_requests", None)
    if names != isinstance(fallen, FallenRequests):
        raise PluginError(
            plugin, f"{what}: fallen_requests is {fallen!r}; a FallenRequests and KeyMotion.NAMED_FALLS belong together"
        )
    if _has(policy, "falls_at"):
        if not names and motion is not KeyMotion.PREFIX_HITS:
            raise PluginError(plugin, f"{what}: falls_at is for a policy with KeyMotion.NAMED_FALLS or PREFIX_HITS")
        check_methods(policy, {"falls_at": 2}, f"{what} ({motion})", plugin)
    if _has(policy, "key_epoch") and motion not in (KeyMotion.ARBITRARY, KeyMotion.VOLATILE, KeyMotion.PREFIX_HITS):
        raise PluginError(
            plugin, f"{what}: key_epoch is for a policy with KeyMotion.ARBITRARY, VOLATILE or PREFIX_HITS"
        )
    if names and _has(policy, "group"):
        raise PluginError(plugin, f"{what}: KeyMotion.NAMED_FALLS is not for keys by group; they have fallen_groups")


def _check_groups(policy: object, what: str, plugin: str) -> None:
    if _has(policy, "group") != _has(policy, "group_key"):
        raise PluginError(plugin, f"{what}: group and group_key belong together, and it has one of them")
    fallen = getattr(policy, "fallen_groups", None)
    if fallen is None:
        return
    if not isinstance(fallen, FallenGroups):
        raise PluginError(plugin, f"{what}: fallen_groups is {fallen!r}; expected a FallenGroups")
    if not _has(policy, "group"):
        raise PluginError(plugin, f"{what}: fallen_groups is for a policy with group and group_key, and it has neither")


def check_methods(target: object, methods: Mapping[str, int], what: str, plugin: str) -> None:
    """Check that an object has these methods, and that each accepts the given number of arguments.

    Raises `PluginError`.
    """
    for name, num_arguments in methods.items():
        method = getattr(target, name, None)
        if not callable(method):
            kind = type(target).__name__
            state = "has no method" if method is None else "has something that cannot be called as"
            raise PluginError(plugin, f"{what}: {kind} {state} {name!r}")
        if inspect.iscoroutinefunction(method):
            raise PluginError(plugin, f"{what}: {name!r} is a coroutine; expected a plain method")
        try:
            signature = inspect.signature(method)
        except (TypeError, ValueError):
            continue  # written in C: no signature to inspect
        try:
            signature.bind(*range(num_arguments))
        except TypeError as error:
            expected = f"it is called with {num_arguments} arguments"
            raise PluginError(
                plugin, f"{what}: {name}{signature} has the wrong signature ({error}); {expected}"
            ) from error
