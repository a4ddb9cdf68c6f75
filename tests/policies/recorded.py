"""Recorded decisions of every built-in policy: `python -m tests.policies.recorded --write` records them anew.

Each policy runs in small worlds with its default parameters, with some that fit worlds so small, and with each parameter changed by itself.
What is changed, and where, is found when it is recorded: the first value and world in which decisions change. Parameters that
change nothing are printed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined

from tests.policies.recorded_settings import FITTING, MORE, NEEDS, PROFILES, WORLDS, without_lengths
from tests.policies.recorded_worlds import DEEP, PLAIN, World, merged, record
from tests.records import Record, read_records, write_records
from vajra_py.contract import Layer, RoutingPartKind
from vajra_py.errors import VajraError
from vajra_py.plugins import load_registry

FILE = Path(__file__).with_name("recorded.json")
COMMAND = "python -m tests.policies.recorded --write"
PACKAGE = "vajra-py"
APPROXIMATE, PRECISE = "approx-prefix-cache-producer", "precise-prefix-cache-producer"
"""Producers that may take each other's place."""


@dataclass(frozen=True)
class Subject:
    """A policy, a part of a router or a preset."""

    kind: str
    name: str
    config: type[BaseModel] | None
    """Its parameters; None: a preset, which has none."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    @property
    def worlds(self) -> Mapping[str, World]:
        """The worlds that it is run in."""
        worlds = WORLDS.get(str(self)) or WORLDS.get(self.name) or WORLDS[self.kind]
        if self.config is not None and "default_output_tokens" in self.config.model_fields:
            return {**worlds, "unknown": without_lengths(worlds["chats"])}
        return worlds

    @property
    def fitting(self) -> DEEP:
        """Parameters with which its rules bite in worlds so small."""
        return FITTING.get(self.name, {})

    def settings(self, params: DEEP) -> dict[str, Any]:
        """Settings that name it."""
        return merged(_naming(self.kind, self.name, params), NEEDS.get(str(self)) or NEEDS.get(self.name, {}))


def _naming(kind: str, name: str, params: DEEP) -> DEEP:
    if kind == "preset":
        return {"preset": name}
    if kind in {one.value for one in RoutingPartKind}:
        part = {kind: name, "params": params}
        several = {"producer": "producers", "filter": "filters", "scorer": "scorers"}
        given: DEEP = {several[kind]: [part]} if kind in several else {kind: part}
        if kind == "decider":
            given = {"disaggregation": {"decider": part}, "profiles": PROFILES}
        return {"scheduling": {"replicaset_scheduler": {"policy": "endpoint_picker", "params": given}}}
    return {"scheduling": {kind: {"policy": name, "params": params}}}


def subjects() -> list[Subject]:
    """Every built-in policy, part and preset."""
    registry = load_registry()
    offers: list[tuple[str, Any]] = []
    for layer in Layer:
        offers += [(layer.value, one) for one in registry.policies(layer).values()]
    offers += [("admission", one) for one in registry.admission_policies.values()]
    offers += [("retention", one) for one in registry.retention_policies.values()]
    offers += [("scaling", one) for one in registry.scalers.values()]
    for kind in RoutingPartKind:
        offers += [(kind.value, one) for one in registry.routing_parts(kind).values()]
    offers += [("preset", one) for one in registry.presets.values()]
    return [
        Subject(kind, offer.spec.name, getattr(offer.spec, "config", None))
        for kind, offer in offers
        if offer.package == PACKAGE
    ]


DEFAULTS, FIT = "defaults", "fit"


def key_of(world: str, change: DEEP) -> str:
    """Return the key of a run with changes beside fitting parameters."""
    return " ".join([world, *(f"{name}={json.dumps(value, separators=(',', ':'))}" for name, value in change.items())])


def run(subject: Subject, key: str) -> Record:
    """Run what a key of the file names: a world, and `defaults`, `fit`, or parameters that are changed beside fitting ones.

    What is changed is run as most runs are, with decodes worked out at once; the others step by step.
    """
    name, *changed = key.split(" ")
    every_step = changed in ([DEFAULTS], [FIT])
    params = {} if changed == [DEFAULTS] else dict(subject.fitting)
    if not every_step:
        params.update({name: json.loads(value) for name, _, value in (one.partition("=") for one in changed)})
    world = subject.worlds[name]
    base = {} if subject.kind == "preset" else PLAIN
    settings = merged(base, world.settings, subject.settings(params))
    return record(settings, world.requests(), every_step=every_step)


def plain_keys(subject: Subject) -> list[str]:
    """Runs with default parameters (in two worlds, if there are fitting ones), and with fitting ones in each."""
    worlds = list(subject.worlds)
    if not subject.fitting:
        return [f"{world} {DEFAULTS}" for world in worlds]
    with_defaults = [] if _needs_parameters(subject) else worlds[:2]
    return [*(f"{world} {DEFAULTS}" for world in with_defaults), *(f"{world} {FIT}" for world in worlds)]


def _needs_parameters(subject: Subject) -> bool:
    if subject.config is None:
        return False
    try:
        subject.config()
    except ValidationError:
        return True
    return False


def changes(subject: Subject) -> Iterator[list[DEEP]]:
    """Changes of parameters, each in several ways of which the first one counts that changes decisions."""
    if subject.config is None:
        return
    told = MORE.get(subject.name, ())
    yield from ([one] for one in told)
    for name, field in subject.config.model_fields.items():
        if any(name in one for one in told):
            continue
        default = field.get_default(call_default_factory=True)
        old = subject.fitting.get(name, default)
        guessed = [PRECISE] if old == APPROXIMATE else _others(field.annotation, old)
        if name in subject.fitting and default is not PydanticUndefined:
            guessed = [default, *guessed]
        values = [one for one in guessed if one != old and _is_valid(subject, {name: one})]
        ways = [{name: one} for index, one in enumerate(values) if one not in values[:index]]
        if get_origin(field.annotation) is Literal:
            yield from ([one] for one in ways)
        else:
            yield ways or [{name: None}]


def _others(annotation: Any, old: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return sorted(get_args(annotation))
    if isinstance(old, bool):
        return [not old]
    if isinstance(old, int):
        return [old // 4, old * 4, old // 32, old // 300, old + 1, old - 1, 1, 0]
    if isinstance(old, float):
        values = (old / 4, old * 4, old / 30, old / 300, old * 30, old + 0.3, old - 0.3, 0.0, 1.0)
        return [float(f"{one:.1g}") for one in values]
    return []


def _is_valid(subject: Subject, changed: DEEP) -> bool:
    assert subject.config is not None
    try:
        subject.config.model_validate({**subject.fitting, **changed})
    except ValidationError:
        return False
    return True


def recorded(subject: Subject) -> tuple[dict[str, Record], list[str]]:
    """Run a policy in all its worlds; return the records, and changes of parameters that change no decision."""
    plain = {key: run(subject, key) for key in plain_keys(subject)}
    records = {
        key: one for key, one in plain.items() if one != plain.get(key.replace(DEFAULTS, FIT)) or key.endswith(FIT)
    }
    tried: dict[str, Record | None] = {}

    def of(world: str, change: DEEP) -> Record | None:
        """Return the record of a change; None where it is refused."""
        key = key_of(world, change)
        if key not in tried:
            tried[key] = _try(subject, key) if _is_valid(subject, change) else None
        return tried[key]

    def bites(change: DEEP, world: str) -> bool:
        new = of(world, change)
        return new is not None and all(new != of(world, one) for one in _with_one_less(change))

    idle = []
    for ways in changes(subject):
        found = next((one for one in product(ways, subject.worlds) if bites(*one)), None)
        if found is None:
            idle.append(" ".join(ways[0]))
            found = next((one for one in product(ways, subject.worlds) if of(one[1], one[0])), None)
        if found is not None:
            change, world = found
            records[key_of(world, change)] = run(subject, key_of(world, change))
    return records, idle


def _with_one_less(change: DEEP) -> list[DEEP]:
    return [{name: value for name, value in change.items() if name != one} for one in change]


def _try(subject: Subject, key: str) -> Record | None:
    try:
        return run(subject, key)
    except VajraError:
        return None


def differences(subject: Subject, rows: Mapping[str, Record]) -> list[str]:
    """Run a policy as recorded, and return what it does otherwise, a line for each run."""
    told = {key: old.difference(run(subject, key)) for key, old in rows.items()}
    return [f"{subject} decides otherwise in {key}: {text}" for key, text in told.items() if text]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file, or compare with it; exit code 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="record anew; else compare")
    parser.add_argument("--only", default="", help="policies whose kind and name contain this")
    options = parser.parse_args(arguments)
    chosen = [one for one in subjects() if options.only in str(one)]
    old = read_records(FILE)
    if not options.write:
        found = [text for one in chosen for text in differences(one, old.get(str(one), {}))]
        print("\n".join(found) or "nothing differs")
        return int(bool(found))
    new = {}
    for subject in chosen:
        try:
            new[str(subject)], idle = recorded(subject)
        except Exception as error:
            error.add_note(str(subject))
            raise
        for name in idle:
            print(f"{subject}: {name} changes nothing in these worlds", flush=True)
    write_records(FILE, {**(old if options.only else {}), **new})
    return 0


if __name__ == "__main__":
    sys.exit(main())
