"""Cards of an atlas: descriptions of its policies from their own declarations."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

from vajra_py.experiment.atlas.entries import Entry
from vajra_py.metrics.comparison.table_model import Table, table_of_texts
from vajra_py.metrics.report.atlas import Card, CardPart
from vajra_py.metrics.runs.differences import flatten
from vajra_py.plugins import AnyOffer, Registry, parameters_of

_CONTRACT = "vajra_py.contract"


def cards_of(entries: Sequence[Entry], registry: Registry) -> list[Card]:
    """Return a card for each entry."""
    return [Card(entry.name, _parts(entry, registry)) for entry in entries]


def _parts(entry: Entry, registry: Registry) -> list[CardPart]:
    if entry.preset:
        offer = registry.preset(entry.preset)
        preset = offer.spec
        table = table_of_texts(("setting", "value"), list(flatten(preset.settings).items()))
        return [
            CardPart(
                preset.name, "preset", _package(offer.package, offer.version), preset.summary, preset.source, "", table
            )
        ]
    return [_part(place, offer) for place, offer in entry.parts.items()]


def _part(place: str, offer: AnyOffer) -> CardPart:
    spec = offer.spec
    package = _package(offer.source.package, offer.source.version)
    statement = statement_of(spec.build)
    return CardPart(
        spec.name,
        place.replace("_", " "),
        package,
        spec.summary,
        spec.source,
        statement,
        _parameters(spec.config),
        spec.advice,
    )


def _package(name: str, version: str) -> str:
    return f"{name} {version}"


def _parameters(config: Any) -> Table:
    rows = [
        (
            one.name,
            "required" if one.required else str(one.default),
            one.unit,
            ", ".join(filter(None, (one.type, one.limits))),
            one.description,
        )
        for one in parameters_of(config)
    ]
    return table_of_texts(("parameter", "default", "unit", "type", "meaning"), rows)


def statement_of(build: Any) -> str:
    """Return the docstring of the class that `build` creates. This class is `build` itself or, if `build` is a
    function, its return annotation. If the class is unknown or belongs to the contract, return the docstring of the
    module that contains `build`.
    """
    while isinstance(build, functools.partial):
        build = build.func
    made = build if isinstance(build, type) else getattr(build, "__annotations__", {}).get("return")
    if isinstance(made, str):
        made = getattr(build, "__globals__", {}).get(made)
    if not isinstance(made, type) or made.__module__.startswith(_CONTRACT):
        made = inspect.getmodule(build)
    return inspect.cleandoc(getattr(made, "__doc__", None) or "")
