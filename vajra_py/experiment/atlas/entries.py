"""Entries of an atlas: policies by name (joined by `+`) and presets, converted to settings of an experiment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vajra_py.contract import Layer
from vajra_py.errors import ConfigError, Problem, UnknownNameError
from vajra_py.metrics.comparison.policy_map import BASELINE
from vajra_py.plugins import ADMISSION, RETENTION, AnyOffer, Registry

DEFAULT_BASELINE = "fcfs+least_loaded+fixed_chunk"
DEFAULT_POLICIES: Sequence[str] = (
    "vtc",
    "srpt+preemptive",
    "trail+preemptive",
    "ltr",
    "skip_join_mlfq",
    "qoserve+slack_chunk",
    "past_future",
    "scorpio",
    "priority+hygen",
    "atlas",
    "lmetric",
    "preble_e2",
)
"""Published policies of the library, each combined with the policies that its paper uses with it."""

_JOIN = "+"
_BESIDE = (ADMISSION, RETENTION)


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry (row) of an atlas."""

    name: str
    settings: Mapping[str, Any]
    """Settings of the experiment: value by dotted path."""
    parts: Mapping[str, AnyOffer] = field(default_factory=dict)
    """Offers of the named policies, by place. A place is a layer, or a policy kind that belongs to no layer."""
    preset: str = ""
    """Name of the preset; empty if the entry names policies."""


def entries_of(
    policies: Iterable[str], presets: Iterable[str], baseline: str, registry: Registry
) -> tuple[Entry, Sequence[Entry]]:
    """Return the baseline and the other entries of an atlas.

    A place is a layer, or a policy kind that belongs to no layer. Where `baseline` names no policy for a place, that of
    `DEFAULT_BASELINE` is used. An entry in `policies` is one name or several joined by `+`. Each named policy replaces
    the baseline's policy of the same place; a name offered for several layers replaces the policies of all these
    layers. A name offered for no layer may be an admission or retention policy, or a preset.

    Raises:
        UnknownNameError: A name is offered by no installed package.
        ConfigError: Two policies of an entry have the same place, a name belongs to a scaler, a preset is joined with
            policies or given as the baseline, or two entries have the same settings or name.
    """
    parts = {**_named(DEFAULT_BASELINE, registry), **_named(baseline, registry)}
    base = Entry(BASELINE, _settings(parts), {place: offer for place, (_, offer) in parts.items()})
    found = []
    for name in policies:
        if name in registry.presets and not _is_policy(name, registry):
            found.append(_whole(name))
            continue
        own = _named(name, registry)
        found.append(Entry(name, _settings({**parts, **own}), {place: offer for place, (_, offer) in own.items()}))
    for name in presets:
        registry.preset(name)
        found.append(_whole(name))
    _check_distinct(base, found)
    return base, found


def _whole(preset: str) -> Entry:
    return Entry(preset, {"preset": preset}, preset=preset)


def _is_policy(name: str, registry: Registry) -> bool:
    beside = (registry.beside_layers[kind.key] for kind in _BESIDE)
    return any(name in names for names in (*map(registry.policy_names, Layer), *beside))


def _settings(parts: Mapping[str, tuple[str, AnyOffer]]) -> dict[str, Any]:
    return {f"scheduling.{place}": offer.spec.name for place, (_, offer) in parts.items()}


def _named(text: str, registry: Registry) -> dict[str, tuple[str, AnyOffer]]:
    """Return the policies whose names are joined by `+` in `text`: (name, offer) by place. Raises `ConfigError` if two
    of them have the same place.
    """
    parts: dict[str, tuple[str, AnyOffer]] = {}
    for name in text.split(_JOIN):
        for place, offer in _offers(name, registry):
            if place in parts:
                what = f"{parts[place][0]} and {name} are both {_plural(place)}"
                raise ConfigError(Problem(f"policy {text!r}", what, "One policy for each place"))
            parts[place] = name, offer
    return parts


def _plural(place: str) -> str:
    words = place.replace("_", " ")
    return f"{words} policies" if place in {kind.key for kind in _BESIDE} else f"{words}s"


def _offers(name: str, registry: Registry) -> list[tuple[str, AnyOffer]]:
    """Return the offers with this name, each with its place under `scheduling`. Raises `UnknownNameError` for an
    unknown name, and `ConfigError` for a scaler or a preset.
    """
    found: list[tuple[str, AnyOffer]] = [
        (layer.value, registry.policy(layer, name)) for layer in Layer if name in registry.policy_names(layer)
    ]
    if found:
        return found
    for kind in _BESIDE:
        offers: Mapping[str, AnyOffer] = registry.beside_layers[kind.key]
        if name in offers:
            return [(kind.key, offers[name])]
    where = f"policy {name!r}"
    if name in registry.scalers:
        message = "is a scaler, but all systems of an atlas have the same replicas"
        raise ConfigError(Problem(where, message, "Compare scalers by a sweep of `scheduling.scaling`"))
    if name in registry.presets:
        raise ConfigError(Problem(where, "is a preset, and takes all places", "A preset is a row of its own"))
    names = {known for layer in Layer for known in registry.policy_names(layer)}
    raise UnknownNameError("policy", name, names.union(*(registry.beside_layers[kind.key] for kind in _BESIDE)))


def _check_distinct(base: Entry, others: Sequence[Entry]) -> None:
    """Raise `ConfigError` for an entry with the settings or the name of another entry."""
    for position, entry in enumerate(others):
        for other in (base, *others[:position]):
            if entry.settings == other.settings or entry.name == other.name:
                what = "the baseline" if other is base else repr(other.name)
                message = f"repeats {what}" if entry.settings == other.settings else f"has the name of {what}"
                raise ConfigError(Problem(f"policy {entry.name!r}", message, "Each policy once, without the baseline"))
