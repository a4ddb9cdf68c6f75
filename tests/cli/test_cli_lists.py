"""What is installed, what are its parameters, and how does one write one's own?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vajra_py.config import load_config
from vajra_py.contract import Layer, RoutingPartKind
from vajra_py.latency import load_device, load_model
from vajra_py.plugins import load_registry

Vajra = Callable[..., Any]


def test_policies_are_listed_by_layer(vajra: Vajra) -> None:
    said = vajra("policies")
    assert said.code == 0
    heads = [line.strip().split("  ")[0] for line in said.out.splitlines() if "──" not in line]
    assert heads[0] == "layer"
    registry = load_registry()
    assert set(heads[1:]) == {*registry.others, *(layer.value for layer in Layer), "preset"}
    listed = json.loads(vajra("policies", "--json").out)
    offers = [*(registry.policies(layer) for layer in Layer), *registry.others.values(), registry.presets]
    assert len(listed) == sum(map(len, offers))
    assert {"layer", "name", "package", "version", "summary"} == set(listed[0])


@pytest.mark.parametrize(
    "name",
    [
        *(name for layer in Layer for name in load_registry().policies(layer)),
        *(name for offers in load_registry().others.values() for name in offers),
    ],
)
def test_every_policy_can_be_shown(name: str, vajra: Vajra) -> None:
    said = vajra("policies", "show", name)
    assert said.code == 0
    assert said.out.startswith(name)
    assert "  source: " in said.out
    assert "  parameters:" in said.out


def test_a_preset_is_shown_with_all_that_it_sets(vajra: Vajra) -> None:
    said = vajra("policies", "show", "distserve")
    assert said.code == 0
    assert said.out.startswith("distserve, preset, from vajra-py ")
    assert "  source: DistServe (OSDI'24)" in said.out
    assert "    pools.prefill.num_replicas: 1" in said.out
    assert "    hand_off: distserve" in said.out


PARTS = sorted({name for kind in RoutingPartKind for name in load_registry().routing_parts(kind)})


@pytest.mark.parametrize("name", PARTS)
def test_every_routing_part_can_be_shown(name: str, vajra: Vajra) -> None:
    said = vajra("policies", "show", name)
    assert said.code == 0
    assert said.out.startswith(f"{name}, routing ")
    assert "  source: " in said.out


def test_an_unknown_routing_part_is_guessed(vajra: Vajra) -> None:
    said = vajra("policies", "show", "queue-scorers")
    assert said.code == 2
    assert "Did you mean 'queue-scorer'?" in said.err


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


LLM_D = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: queue-scorer}
- {type: topology-affinity-scorer}
"""


SIMULATED = "backend: {simulator: {latency: {type: roofline, model: llama-3.1-8b, device: a100-80gb-sxm}}}\n"


def test_a_file_of_llm_d_becomes_yaml_that_runs(vajra: Vajra, tmp_path: Path) -> None:
    theirs, ours = tmp_path / "epp.yaml", tmp_path / "ours.yaml"
    theirs.write_text(LLM_D)
    said = vajra("check", "--llm-d", str(theirs))
    assert said.code == 0
    assert "topology-affinity-scorer has no meaning here: replicas have no place in a topology" in said.out
    ours.write_text(f"version: 1\n{said.out}{SIMULATED}")
    assert vajra("check", str(ours)).code == 0


def test_a_broken_file_of_llm_d_is_told_with_lines(vajra: Vajra, tmp_path: Path) -> None:
    broken = tmp_path / "epp.yaml"
    broken.write_text(LLM_D.replace("queue-scorer", "queue-scorers"))
    said = vajra("check", "--llm-d", str(broken))
    assert (said.code, said.out) == (2, "")
    assert f"{broken}:4: plugins.0.type: is no plug-in that is known here" in said.err
    assert "Did you mean 'queue-scorer'?" in said.err
    assert vajra("check", "--llm-d", "--effective", str(broken)).code == 2


@pytest.mark.parametrize("kind", ["scorer", "filter", "picker", "decider"])
def test_a_new_routing_part_is_written(kind: str, vajra: Vajra, tmp_path: Path) -> None:
    said = vajra("new-plugin", "my-lab", "--kind", kind, "--directory", str(tmp_path))
    assert said.code == 0
    package = tmp_path / "my-lab" / "src" / "my_lab"
    assert {one.name for one in package.iterdir()} == {"__init__.py", f"{kind}.py", "py.typed"}
    assert vajra("new-plugin", "other", "--kind", "scorers", "--directory", str(tmp_path)).code == 2
