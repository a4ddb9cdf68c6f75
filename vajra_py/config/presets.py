"""Expand short forms, presets and inheritance.

Precedence of the values of a key, highest first: the replicaset's own value, the value of the replicaset's preset, the
value at the top level, and the value of the top level's preset. Parameters belong to a policy: if a place of higher
precedence selects another policy, parameters from places of lower precedence are dropped. Pools belong to a preset: a
replicaset with its own preset inherits no pools from the top level's preset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vajra_py.config.places import Entries, Finding, Items, KeyPath, Place, Step, get, locate, merged, put, written_at
from vajra_py.contract import Layer
from vajra_py.errors import UnknownNameError, did_you_mean
from vajra_py.plugins import ADMISSION, RETENTION, SCALER, Registry

CHOICES: Sequence[KeyPath] = tuple(("backend", "simulator", key) for key in ("latency", "predictions", "output_length"))

REPLICASET_CHOICES: KeyPath = ("backend", "simulator", "replicasets")


def long_forms(root: Entries) -> Entries:
    """Return the tree with short forms expanded (`lrs` to `{policy: lrs}`, `none` to `{type: none}`), so that paths can
    address names and parameters.
    """
    layers = [("scheduling", key) for key in (*(layer.value for layer in Layer), SCALER.key, RETENTION.key)]
    own = [(*REPLICASET_CHOICES, name) for name in _names(root, *REPLICASET_CHOICES)]
    policies: list[KeyPath] = [
        *layers,
        *(("replicasets", name, *path) for name in _names(root, "replicasets") for path in layers),
        ("scheduling", ADMISSION.key),
    ]
    policies += [
        (*path, "pools", pool, key)
        for path in replicaset_paths(root)
        for pool in _names(root, *path, "pools")
        for key in (Layer.REPLICA_SCHEDULER.value, RETENTION.key)
    ]
    own += [(*path, "pools", pool) for path in own for pool in _names(root, *path, "pools")]
    typed = [*CHOICES, *((*path, key) for path in own for key in ("latency", "predictions"))]
    observers = get(root, "observers")
    if isinstance(observers, Items):
        typed += [("observers", index) for index in range(len(observers))]
    for key, paths in (("policy", policies), ("type", typed)):
        for path in paths:
            name, section = get(root, *path), get(root, *path[:-1])
            if isinstance(name, str):
                place = section.place_of(path[-1])
                root = put(root, path, Entries({key: name}, place), place)
    return root


def replicaset_paths(root: Entries) -> Sequence[KeyPath]:
    """Return the paths that describe a replicaset: the top level, and each replicaset under `replicasets`."""
    return [(), *(("replicasets", name) for name in _names(root, "replicasets"))]


def _names(root: Entries, *path: Step) -> Sequence[str]:
    section = get(root, *path)
    return list(section) if isinstance(section, Entries) else ()


def without_policies(root: Entries) -> Entries:
    """Return the tree without preset and policies: those of the top level, of replicasets and of pools."""
    root = root.without("preset")
    for path in replicaset_paths(root):
        section = get(root, *path)
        if not isinstance(section, Entries):
            continue
        section = section.without("scheduling")
        for name in _names(section, "pools"):
            pool, at = section["pools"][name], section["pools"].place_of(name)
            if isinstance(pool, Entries):
                own = pool.without(Layer.REPLICA_SCHEDULER.value, RETENTION.key)
                section = put(section, ("pools", name), own, at)
        root = put(root, path, section, locate(root, path))
    return root


def expand(root: Entries, registry: Registry) -> tuple[Entries, list[Finding]]:
    """Return the tree with presets expanded and every replicaset completed; unknown presets are findings."""
    findings: list[Finding] = []
    written, root = root, _with_preset(root, (), registry, findings)
    for name in _names(root, "replicasets"):
        replicasets = root["replicasets"]
        own = replicasets[name]
        if isinstance(own, Entries):
            is_other_system = get(own, "scheduling", "preset") is not None and "pools" not in written
            above = root.without("pools") if is_other_system else root
            own = _with_pools_of_preset(own, written, ("replicasets", name), registry, findings)
            root = put(root, ("replicasets", name), _inherit(own, above, registry), replicasets.place_of(name))
    for path in replicaset_paths(root):
        root = _with_pools_completed(root, path, registry)
    return root, findings


def _with_pools_completed(root: Entries, path: KeyPath, registry: Registry) -> Entries:
    """Complete each pool of a replicaset from the replicaset's `replica` section and replica scheduler."""
    layer = Layer.REPLICA_SCHEDULER
    above = {"replica": get(root, *path, "replica"), layer.value: get(root, *path, "scheduling", layer.value)}
    for name in _names(root, *path, "pools"):
        pool = get(root, *path, "pools", name)
        if not isinstance(pool, Entries):
            continue
        for key, value in above.items():
            mine = pool.get(key)
            if not isinstance(value, Entries) or (mine is not None and not isinstance(mine, Entries)):
                continue
            if mine is None:
                completed, place = value, pool.place
            elif key == layer.value and not _same_policy(layer, mine.get("policy"), value.get("policy"), registry):
                continue
            else:
                completed, place = merged(mine, value), pool.place_of(key)
            root = put(root, (*path, "pools", name, key), completed, place)
    return root


def _inherit(own: Entries, root: Entries, registry: Registry) -> Entries:
    moved = ("pools", "hand_off", "links", "migration")
    for key in ("scheduling", "replica", "num_replicas", "elastic", *moved, "view_interval_s", "kv_event_lag_s"):
        by_pool = key in ("num_replicas", "elastic") and "pools" in own
        if key not in root or by_pool or (key == "pools" and "num_replicas" in own):
            continue
        above, place = root[key], root.place_of(key)
        if key == "scheduling" and isinstance(above, Entries):
            above = above.without(ADMISSION.key)
            if get(own, "scheduling", "preset") is not None:
                above = above.without("preset")
        if key in own:
            above, place = _completed(own[key], above, registry), own.place_of(key)
        own = own.replaced(key, above, place)
    return own


def _with_preset(section: Entries, path: KeyPath, registry: Registry, findings: list[Finding]) -> Entries:
    """Complete the root or a replicaset from its preset. The preset is named under `scheduling`; the root may also name
    it at the top level.
    """
    keys: list[KeyPath] = [("scheduling", "preset")] if path else [("preset",), ("scheduling", "preset")]
    named = {key: name for key in keys if isinstance(name := get(section, *key), str)}
    if not named:
        return section
    key, name = next(iter(named.items()))
    for other, another in named.items():
        if another != name:
            message = f"differs from the preset at the top level (got {another!r} and {name!r})"
            findings.append(Finding(locate(section, other), (*path, *other), message, "Name one of them"))
            return section
    try:
        offer = registry.preset(name)
    except UnknownNameError as error:
        message = f"no installed package offers a preset of that name (got {name!r})"
        allowed = did_you_mean(error.name, error.choices)
        findings.append(Finding(locate(section, key), (*path, *key), message, allowed))
        return section
    place = Place(f"preset {offer.spec.name} of {offer.package} {offer.version}")
    given = long_forms(written_at(place, offer.spec.settings))
    if path:
        given = given.replaced("scheduling", given["scheduling"].without(ADMISSION.key), place)
    section, given = _with_replicas_divided(section, given, path, findings)
    for part, below in given.items():
        mine = section.get(part)
        written = place if mine is None else section.place_of(part)
        section = section.replaced(part, below if mine is None else _completed(mine, below, registry), written)
    return section


def _with_pools_of_preset(
    own: Entries, top: Entries, path: KeyPath, registry: Registry, findings: list[Finding]
) -> Entries:
    """Complete a replicaset from its own preset; without one, divide the replicaset's `num_replicas` among the pools of
    the top level's preset, if that preset has pools.
    """
    has_pools = "pools" in own or "pools" in top
    if get(own, "scheduling", "preset") is not None:
        if "num_replicas" in top and "num_replicas" not in own and not has_pools:
            own = own.replaced("num_replicas", top["num_replicas"], top.place_of("num_replicas"))
        return _with_preset(own, path, registry, findings)
    if has_pools or "num_replicas" not in own:
        return own
    above = _with_preset(top.without("num_replicas"), (), registry, [])
    own, above = _with_replicas_divided(own, above, path, findings)
    return own if "num_replicas" in own else own.replaced("pools", above["pools"], above.place_of("pools"))


def _with_replicas_divided(
    section: Entries, given: Entries, path: KeyPath, findings: list[Finding]
) -> tuple[Entries, Entries]:
    """Return the section without `num_replicas`, and the preset's keys (`given`) with this number divided among pools.

    Returns both unchanged if the section has no `num_replicas` or has its own pools, or if the preset has no pools.
    """
    count, pools = section.get("num_replicas"), given.get("pools")
    if not isinstance(pools, Entries) or "pools" in section or not isinstance(count, int):
        return section, given
    if count < len(pools):
        message = f"the preset has the pools {', '.join(pools)}, and each needs a replica (got {count})"
        allowed = f"Allowed: {len(pools)} or more"
        findings.append(Finding(locate(section, ("num_replicas",)), (*path, "num_replicas"), message, allowed))
        return section.without("num_replicas"), given
    place = section.place_of("num_replicas")
    for name, number in divided(count, {name: get(pools, name, "num_replicas") or 1 for name in pools}).items():
        given = put(given, ("pools", name, "num_replicas"), number, place)
    return section.without("num_replicas"), given


def divided(count: int, weights: Mapping[str, int]) -> Mapping[str, int]:
    """Divide `count` in proportion to the weights, by largest remainders, with at least one for each name.

    Requires positive weights, and a `count` of at least the number of names.
    """
    total = sum(weights.values())
    numbers = {name: max(1, count * weight // total) for name, weight in weights.items()}
    while sum(numbers.values()) != count:
        step = 1 if sum(numbers.values()) < count else -1
        open_ = [name for name in numbers if numbers[name] + step]
        numbers[max(open_, key=lambda name: step * (count * weights[name] - total * numbers[name]))] += step
    return numbers


def _completed(over: Any, under: Any, registry: Registry) -> Any:
    """Return `over` completed from `under`. A layer (or admission, scaling or retention) for which `over` and `under`
    have different policies is taken from `over` alone.
    """
    for layer in Layer:
        mine, theirs = get(over, layer.value, "policy"), get(under, layer.value, "policy")
        if mine is not None and theirs is not None and not _same_policy(layer, mine, theirs, registry):
            under = under.without(layer.value)
    for kind in (ADMISSION, SCALER, RETENTION):
        mine, theirs = get(over, kind.key, "policy"), get(under, kind.key, "policy")
        if mine is not None and theirs is not None and mine != theirs:
            under = under.without(kind.key)
    return merged(over, under)


def _same_policy(layer: Layer, first: object, second: object, registry: Registry) -> bool:
    return canonical(layer, first, registry) == canonical(layer, second, registry)


def canonical(layer: Layer, name: object, registry: Registry) -> object:
    """Return the policy's name for a name or an alias; an unknown name is returned unchanged."""
    try:
        return registry.policy(layer, str(name)).spec.name
    except UnknownNameError:
        return name
