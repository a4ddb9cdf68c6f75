"""What is installed, what are its parameters, and how does one write one's own?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vajra_py.config import load_config
from vajra_py.contract import Layer
from vajra_py.latency import load_device, load_model
from vajra_py.plugins import load_registry

Vajra = Callable[..., Any]


def test_policies_are_listed_by_layer(vajra: Vajra) -> None:
    said = vajra("policies")
    assert said.code == 0
    heads = [line.split()[0] for line in said.out.splitlines() if "──" not in line]
    assert heads[0] == "layer"
    assert set(heads[1:]) == {"admission", "scaling", *(layer.value for layer in Layer)}
    listed = json.loads(vajra("policies", "--json").out)
    registry = load_registry()
    others = len(registry.admission_policies) + len(registry.scalers)
    assert len(listed) == sum(len(registry.policies(layer)) for layer in Layer) + others
    assert {"layer", "name", "package", "version", "summary"} == set(listed[0])


@pytest.mark.parametrize(
    "name", [*(name for layer in Layer for name in load_registry().policies(layer)), *load_registry().scalers]
)
def test_every_policy_can_be_shown(name: str, vajra: Vajra) -> None:
    said = vajra("policies", "show", name)
    assert said.code == 0
    assert said.out.startswith(name)
    assert "  source: " in said.out
    assert "  parameters:" in said.out


def test_a_parameter_has_limits_unit_and_default(vajra: Vajra) -> None:
    assert "min_deadline_s: float, > 0, seconds, default 0.5" in vajra("policies", "show", "lars").out


def test_an_unknown_policy_is_guessed(vajra: Vajra) -> None:
    said = vajra("policies", "show", "round-robbin")
    assert said.code == 2
    assert "Did you mean 'round_robin'?" in said.err


def test_a_name_without_show_is_understood(vajra: Vajra) -> None:
    said = vajra("policies", "lrs")
    assert said.code == 2
    assert "vajra policies show lrs" in said.err


def test_presets_are_listed(vajra: Vajra) -> None:
    assert {one["name"] for one in json.loads(vajra("presets", "--json").out)} == set(load_registry().presets)
    assert "vllm-v1" in vajra("presets").out


def test_whatever_profiles_lists_can_be_used(vajra: Vajra, small: Path) -> None:
    listed = json.loads(vajra("profiles", "--json").out)
    assert vajra("profiles").code == 0
    for name in listed["models"]:
        load_model(name)
    for name in listed["devices"]:
        load_device(name)
    for name in listed["profiles"]:
        load_config(small, [f"workload={{type: profile, profile: {name}, num_requests: 5}}"])


def test_a_workload_is_described(vajra: Vajra, small: Path) -> None:
    said = vajra("workloads", "describe", small)
    assert said.code == 0
    assert said.out.splitlines()[0].split() == ["requests", "12"]
    described = json.loads(vajra("workloads", "describe", small, "--json").out)
    assert described["num_requests"] == 12
    assert vajra("workloads", "describe", small, "--figure", "new/workload.svg").code == 0
    assert "index of dispersion" in Path("new/workload.svg").read_text()
    assert (
        "Allowed: a name that ends in .pdf, .svg, .png"
        in vajra("workloads", "describe", small, "--figure", "a.bmp").err
    )
    assert 20 <= described["prompt"]["min"] <= described["prompt"]["max"] <= 300


def test_the_schema_knows_every_policy(vajra: Vajra) -> None:
    text = vajra("schema").out
    schema = json.loads(text)
    assert schema["required"] == ["version", "backend"]
    assert schema["dependentRequired"]["sweep"] == ["workload"]
    for layer in Layer:
        for name in load_registry().policies(layer):
            assert f'"{name}"' in text


def test_a_new_plugin_is_written_once(vajra: Vajra, tmp_path: Path) -> None:
    said = vajra("new-plugin", "my-policies")
    assert said.code == 0
    assert said.out.splitlines()[0] == "package: my-policies"
    assert (tmp_path / "my-policies" / "src" / "my_policies" / "__init__.py").exists()
    again = vajra("new-plugin", "my-policies")
    assert again.code == 2
    assert "my-policies: is there already" in again.err
    assert vajra("new-plugin", "no name!").code == 2
    assert vajra("new-plugin", "my-policies", "--directory", "elsewhere").code == 0
    assert (tmp_path / "elsewhere" / "my-policies" / "pyproject.toml").exists()
