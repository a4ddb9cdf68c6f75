from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import create_model

from vajra_py import config as public
from vajra_py.config import json_schema, load_config, run_manifest
from vajra_py.config.manifest import git_state
from vajra_py.contract import Layer, PolicyConfig, PolicySpec
from vajra_py.plugins import Registry


@pytest.fixture(scope="module")
def cache() -> dict[str, Any]:
    return {}


@pytest.fixture
def schema(cache: dict[str, Any], registry: Registry) -> Any:
    if not cache:
        cache.update(json_schema(registry))
    return cache


def walk(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from walk(child)


def test_the_schema_is_json_and_its_references_lead_somewhere(schema: Any) -> None:
    assert json.loads(json.dumps(schema)) == schema
    references = {node["$ref"] for node in walk(schema) if isinstance(node.get("$ref"), str)}
    assert references
    for reference in references:
        assert reference.removeprefix("#/$defs/") in schema["$defs"]


def test_policies_are_offered_by_layer_with_their_own_parameters(schema: Any, registry: Registry) -> None:
    layers = schema["$defs"]["SchedulingConfig"]["properties"]
    for layer in Layer:
        short, *variants = layers[layer.value]["oneOf"]
        assert short["enum"] == list(registry.policy_names(layer))
        assert [each["title"] for each in variants] == list(registry.policies(layer))
    (lrs,) = [each for each in layers["request_prioritizer"]["oneOf"] if each["title"] == "lrs"]
    assert lrs["properties"]["policy"]["enum"] == ["lrs", "lars"]
    assert lrs["description"] == "About lrs. (test-lab 1.2)"
    params = lrs["properties"]["params"]
    assert params["properties"]["deadline_multiplier"]["exclusiveMinimum"] == 0
    assert params["additionalProperties"] is False
    (fixed,) = [each for each in layers["replica_scheduler"]["oneOf"] if each["title"] == "fixed_chunk"]
    assert fixed["required"] == ["policy", "params"]


def test_models_observers_workloads_and_presets_are_offered(schema: Any, registry: Registry) -> None:
    simulator = schema["$defs"]["SimulatorConfig"]["properties"]
    types = [each["properties"]["type"]["const"] for each in simulator["latency"]["oneOf"][1:]]
    assert types == list(registry.latency_models)
    assert schema["properties"]["observers"]["items"]["oneOf"][1]["properties"]["every_s"]["default"] == 1.0
    assert schema["properties"]["preset"]["enum"] == ["broken", "vllm-v1", None]
    assert "azure" in json.dumps(schema["properties"]["workload"])
    assert schema["$defs"]["BackendConfig"]["additionalProperties"] is False


def test_every_key_is_described(schema: Any) -> None:
    silent = [
        f"{name}.{key}"
        for name, body in [("top", schema), *schema["$defs"].items()]
        if name == "top" or name in public.__all__
        for key, value in body.get("properties", {}).items()
        if not value.get("description")
    ]
    assert silent == []


def check(value: Any, schema: Any, root: Any) -> bool:
    """As much of JSON schema as the schema uses."""
    if "$ref" in schema:
        return check(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root)
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    if "const" in schema and value != schema["const"]:
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "oneOf" in schema and sum(check(value, each, root) for each in schema["oneOf"]) != 1:
        return False
    if "anyOf" in schema and not any(check(value, each, root) for each in schema["anyOf"]):
        return False
    kind = schema.get("type")
    if kind in kinds and not isinstance(value, kinds[kind]):
        return False
    if kind in ("integer", "number") and (isinstance(value, bool) or not isinstance(value, int | float)):
        return False
    if isinstance(value, dict) and ("properties" in schema or "additionalProperties" in schema):
        properties = schema.get("properties", {})
        extra = schema.get("additionalProperties", True)
        if not set(schema.get("required", ())) <= set(value):
            return False
        return all(
            check(child, properties[key], root) if key in properties else extra is True or (isinstance(extra, dict) and check(child, extra, root))
            for key, child in value.items()
        )  # fmt: skip
    return not isinstance(value, list) or all(check(each, schema.get("items", {}), root) for each in value)


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({}, True),
        ({"preset": "vllm-v1", "scheduling": {"request_prioritizer": "lars"}}, True),
        ({"observers": ["watch", {"type": "watch", "every_s": 2}]}, True),
        ({"sweep": {"seed": [1], "zip": {"seed": [1]}}}, True),
        ({"replicasets": {"a": {"num_replicas": 2}}}, True),
        ({"scheduling": {"request_prioritizer": {"policy": "lrs", "params": {"order": "slow"}}}}, True),
        ({"scheduling": {"request_prioritizer": {"policy": "lrs", "params": {"ordr": "slow"}}}}, False),
        ({"scheduling": {"request_prioritizer": "pull"}}, False),
        ({"scheduling": {"replica_scheduler": "vllm", "x": 1}}, False),
        ({"preset": "vllm-v2"}, False),
        ({"num_replica": 2}, False),
        ({"backend": {"simulater": {}}}, False),
        ({"backend": {"simulator": {"latency": {"type": "constant", "model": "x"}}}}, False),
        ({"workload": {"type": "synthetic", "rate": "x"}}, False),
        ({"observers": ["watsh"]}, False),
    ],
)
def test_an_editor_agrees_with_the_loader(schema: Any, change: dict[str, Any], fits: bool) -> None:
    experiment = {
        "version": 1,
        "scheduling": {"request_prioritizer": "lrs", "replicaset_scheduler": "pull", "replica_scheduler": "vllm"},
        "workload": {"type": "synthetic", "rate": 4},
        "backend": {"simulator": {"latency": {"type": "constant", "step_time_s": 0.5}}},
        **change,
    }
    assert check(experiment, schema, schema) is fits


def params_with(field: str) -> type[PolicyConfig]:
    """Parameters whose nested models have the same names whatever their innermost field is called."""
    inner = create_model("Inner", __base__=PolicyConfig, **{field: (int, 0)})  # type: ignore[call-overload]
    outer = create_model("Outer", __base__=PolicyConfig, inner=inner)
    return create_model("Params", __base__=PolicyConfig, outer=outer)


def test_nested_parameters_of_equal_names_are_kept_apart(registry: Registry) -> None:
    def never_built(config: Any, context: Any) -> Any:
        raise NotImplementedError

    def spec(field: str) -> PolicySpec:
        return PolicySpec(f"with_{field}", Layer.REQUEST_PRIORITIZER, params_with(field), never_built, "One.")

    both = json_schema(registry.with_policies([spec("a"), spec("b")]))
    kind = both["$defs"]["SchedulingConfig"]["properties"]["request_prioritizer"]
    for policy, field, fits in (("a", "a", True), ("b", "b", True), ("a", "b", False), ("b", "a", False)):
        choice = {"policy": f"with_{policy}", "params": {"outer": {"inner": {field: 3}}}}
        assert check(choice, kind, both) is fits


def test_a_manifest_says_who_made_the_policies(write: Any, good: str, registry: Registry) -> None:
    config = load_config(write(good), registry=registry)
    manifest = run_manifest(config, registry)
    assert json.loads(json.dumps(manifest)) == manifest
    environment = manifest.pop("environment")
    assert environment["num_cpus"] >= 1
    assert "started_at" in environment
    again = run_manifest(config, registry)
    assert {**again, "environment": None} == {**manifest, "environment": None}
    assert manifest["seed"] == 42
    assert manifest["config"]["workload"]["rate"] == 4.0
    (plugin,) = manifest["plugins"]
    assert plugin == {"entry_point": "lab", "package": "test-lab", "version": "1.2", "code": "none"}
    lrs = manifest["policies"]["default"]["request_prioritizer"]
    assert lrs == {"policy": "lrs", "package": "test-lab", "version": "1.2"}
    assert {"vajra-py", "python", "numpy"} <= set(manifest["versions"])


def test_a_manifest_knows_the_commit_and_whether_files_were_changed(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
        subprocess.run(["git", *identity, "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / "policy.py").write_text("a = 1\n")
    git("add", ".")
    git("commit", "-m", "first")
    clean = git_state(tmp_path)
    assert clean is not None
    assert len(clean["commit"]) == 40
    assert clean["uncommitted_changes"] is None
    (tmp_path / "policy.py").write_text("a = 2\n")
    changed = git_state(tmp_path)
    assert changed is not None
    assert changed["commit"] == clean["commit"]
    assert changed["uncommitted_changes"]


def test_sections_are_complete_when_they_are_imported() -> None:
    sections = (
        public.ExperimentConfig,
        public.ReplicaConfig,
        public.PoolConfig,
        public.LinksConfig,
        public.TypedChoice,
    )
    assert all(section.__pydantic_complete__ for section in sections), (
        "a deferred schema is made once more by its parent"
    )


def test_facades_have_what_they_name_and_import_nothing_heavy() -> None:
    from vajra_py import plugins

    for module in (public, plugins):
        assert len(module.__all__) == len(set(module.__all__))
        assert all(hasattr(module, name) for name in module.__all__)
    program = "import sys, vajra_py.config, vajra_py.plugins; print(sorted({'numpy', 'ruamel.yaml', 'jinja2', 'torch', 'pandas'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
