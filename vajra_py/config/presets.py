"""Expand short forms, presets and inheritance.

Precedence, at every level: a replicaset's own keys, its preset, the top's keys, the top's preset. The parameters of a
policy belong to it: where a more explicit place names another policy, parameters given for the less explicit one are
left behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vajra_py.config.nodes import Finding, KeyPath, Node, Place, merged, node_of
from vajra_py.contract import Layer
from vajra_py.errors import UnknownNameError, did_you_mean
from vajra_py.plugins import Registry

CHOICES: Sequence[KeyPath] = tuple(("backend", "simulator", key) for key in ("latency", "predictions", "output_length"))

REPLICASET_CHOICES: KeyPath = ("backend", "simulator", "replicasets")


def long_forms(root: Node) -> Node:
    """The tree with `lrs` written as `{policy: lrs}` and `none` as `{type: none}`, so that paths lead into both."""
    if root.entries is None:
        return root
    root = _long_scheduling(root)
    replicasets = root.get("replicasets")
    if replicasets is not None and replicasets.entries is not None:
        entries = {name: _long_scheduling(node) for name, node in replicasets.entries.items()}
        root = root.with_entry("replicasets", replace(replicasets, value=entries))
    own = root.get("backend", "simulator", "replicasets")
    names = () if own is None or own.entries is None else tuple(own.entries)
    nested = ((*REPLICASET_CHOICES, name, key) for name in names for key in ("latency", "predictions"))
    for path in (*CHOICES, *nested):
        node = root.get(*path)
        if node is not None and isinstance(node.value, str):
            root = root.put(path, replace(node, value={"type": node}))
    observers = root.get("observers")
    if observers is not None and observers.items is not None:
        items = [
            replace(node, value={"type": node}) if isinstance(node.value, str) else node for node in observers.items
        ]
        root = root.with_entry("observers", replace(observers, value=items))
    return root


def _long_scheduling(section: Node) -> Node:
    for layer in Layer:
        choice = section.get("scheduling", layer.value)
        if choice is not None and isinstance(choice.value, str):
            section = section.put(("scheduling", layer.value), replace(choice, value={"policy": choice}))
    return section


def expand(root: Node, registry: Registry) -> tuple[Node, list[Finding]]:
    """The tree with presets expanded and every replicaset complete; unknown presets are findings."""
    findings: list[Finding] = []
    root = _with_preset(root, (), registry, findings)
    replicasets = root.get("replicasets")
    if replicasets is None or replicasets.entries is None:
        return root, findings
    entries = {}
    for name, own in replicasets.entries.items():
        if own.entries is None:
            entries[name] = own
            continue
        own = _with_preset(own, ("replicasets", name), registry, findings)
        entries[name] = _inherit(own, root, registry)
    return root.with_entry("replicasets", replace(replicasets, value=entries)), findings


def _inherit(own: Node, root: Node, registry: Registry) -> Node:
    for key in ("scheduling", "replica", "num_replicas", "view_interval_s"):
        above = root.get(key)
        if above is None:
            continue
        if key == "scheduling" and above.entries is not None and own.get("scheduling", "preset") is not None:
            above = above.without("preset")
        mine = own.get(key)
        below = (
            above
            if mine is None
            else _merged_scheduling(mine, above, registry)
            if key == "scheduling"
            else merged(mine, above)
        )
        own = own.with_entry(key, below)
    return own


def _with_preset(section: Node, path: KeyPath, registry: Registry, findings: list[Finding]) -> Node:
    """A section (the root, or a replicaset) completed from the preset that it names at its top or under `scheduling`."""
    named = [(key, node) for key in (("preset",), ("scheduling", "preset")) if (node := section.get(*key)) is not None]
    named = [(key, node) for key, node in named if isinstance(node.value, str) and not (path and key == ("preset",))]
    if not named:
        return section
    key, name = named[0]
    if len(named) == 2 and named[1][1].value != name.value:
        other = named[1][1]
        message = f"is another preset than at the top (got {other.value!r} and {name.value!r})"
        findings.append(Finding(other.place, (*path, *named[1][0]), message, "Name one of them"))
        return section
    try:
        offer = registry.preset(name.value)
    except UnknownNameError as error:
        message = f"no installed package offers a preset of that name (got {name.value!r})"
        findings.append(Finding(name.place, (*path, *key), message, did_you_mean(error.name, error.choices)))
        return section
    place = Place(f"preset {offer.spec.name} of {offer.package} {offer.version}")
    given = long_forms(node_of({"scheduling": offer.spec.scheduling, "replica": offer.spec.replica}, place))
    scheduling = section.get("scheduling")
    below = given.get("scheduling") or given
    if scheduling is not None and scheduling.value is not None:
        below = _merged_scheduling(scheduling, below, registry)
    section = section.with_entry("scheduling", below)
    replica = section.get("replica")
    sizes = given.get("replica") or given
    return section.with_entry("replica", sizes if replica is None or replica.value is None else merged(replica, sizes))


def _merged_scheduling(over: Node, under: Node, registry: Registry) -> Node:
    """Merged like anything else, but for layers where `over` names another policy: those stand alone."""
    if over.entries is None or under.entries is None:
        return over
    for layer in Layer:
        mine, theirs = over.get(layer.value, "policy"), under.get(layer.value, "policy")
        if mine is not None and theirs is not None and not _same_policy(layer, mine.value, theirs.value, registry):
            under = under.without(layer.value)
    return merged(over, under)


def _same_policy(layer: Layer, first: object, second: object, registry: Registry) -> bool:
    return canonical(layer, first, registry) == canonical(layer, second, registry)


def canonical(layer: Layer, name: object, registry: Registry) -> object:
    """The policy's name when `name` is an alias; unknown names stay as they are."""
    try:
        return registry.policy(layer, str(name)).spec.name
    except UnknownNameError:
        return name
