"""Defaults and limits of the parameters of built-in policies, and presets: experiments that state nothing rely on each.

`parameters.json` holds them, by class of parameters, and `presets.json` by preset; a new class is added, and an old one changes, with
`python -m tests.policies.test_parameter_limits`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
from pathlib import Path
from typing import Any

import pytest

import vajra_policies
from vajra_py.contract import PolicyConfig

FILE, PRESETS_FILE = (Path(__file__).with_name(f"{name}.json") for name in ("parameters", "presets"))
KEPT = ("default", "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "minLength", "minItems", "maxItems")


def found_classes() -> dict[str, type[PolicyConfig]]:
    names = [one.name for one in pkgutil.walk_packages(vajra_policies.__path__, "vajra_policies.")]
    members = [one for name in names for _, one in inspect.getmembers(importlib.import_module(name), inspect.isclass)]
    own = [one for one in members if issubclass(one, PolicyConfig) and one.__module__.startswith("vajra_policies.")]
    return {f"{one.__module__.removeprefix('vajra_policies.')}.{one.__name__}": one for one in own}


def facts_of(config: type[PolicyConfig]) -> dict[str, dict[str, Any]]:
    """Default and limits of each parameter, by its schema; those of alternatives joined."""
    found = {}
    for name, schema in config.model_json_schema()["properties"].items():
        every = [schema, *schema.get("anyOf", ())]
        found[name] = {key: one[key] for one in every for key in KEPT if key in one}
    return found


CLASSES = found_classes()
RECORDED: dict[str, dict[str, dict[str, Any]]] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


@pytest.mark.parametrize("name", RECORDED)
def test_defaults_and_limits_are_as_recorded(name: str) -> None:
    assert facts_of(CLASSES[name]) == RECORDED[name]


@pytest.mark.parametrize("name", RECORDED)
def test_every_default_may_be_stated(name: str) -> None:
    config = CLASSES[name]
    defaults = {field: facts["default"] for field, facts in RECORDED[name].items() if "default" in facts}
    stated = {field: json.loads(json.dumps(default)) for field, default in defaults.items()}
    required = [field for field, info in config.model_fields.items() if info.is_required()]
    if not required:
        assert config.model_validate(stated) == config()


PRESETS: dict[str, Any] = json.loads(PRESETS_FILE.read_text(encoding="utf-8")) if PRESETS_FILE.exists() else {}


def settings_of_presets() -> dict[str, Any]:
    found = {one.name: one.settings for one in vajra_policies.vajra_presets()}
    plain: dict[str, Any] = json.loads(json.dumps(found, default=dict))
    return plain


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_as_recorded(name: str) -> None:
    assert settings_of_presets()[name] == PRESETS[name]


if __name__ == "__main__":
    PRESETS_FILE.write_text(json.dumps(settings_of_presets(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    classes = []
    for name, config in sorted(CLASSES.items()):
        lines = [f"  {json.dumps(field)}: {json.dumps(facts)}" for field, facts in facts_of(config).items()]
        classes.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    FILE.write_text("{\n" + ",\n".join(classes) + "\n}\n", encoding="utf-8")
