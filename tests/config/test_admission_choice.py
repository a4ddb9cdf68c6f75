"""`scheduling.admission`: one policy for the whole system, checked like the policies of the layers."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from ruamel.yaml import YAML

from vajra_py.config import ExperimentConfig, SystemConfig, config_from_mapping, dump_effective, system_from_mapping
from vajra_py.config.editor_schema import json_schema
from vajra_py.config.load import expand_sweep
from vajra_py.errors import ConfigError
from vajra_py.plugins import load_registry

LAYERS = {"request_prioritizer": "fcfs", "replicaset_scheduler": "round_robin", "replica_scheduler": "fixed_chunk"}
SPLIT = {"a": {"select": {"tenants": ["x"]}, "scheduling": LAYERS}, "b": {"scheduling": LAYERS}}


def system(**sections: Any) -> SystemConfig:
    latency = {"type": "affine", "base_s": 0.01, "per_token_s": 1e-4}
    base = {"version": 1, "backend": {"simulator": {"latency": latency}}, "replica": {"memory": {"num_blocks": 100}}}
    return system_from_mapping({**base, **sections})


def problem(**sections: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        system(**sections)
    return str(raised.value)


@pytest.mark.parametrize(
    "sections",
    [
        {"scheduling": {**LAYERS, "admission": "token_bucket"}},
        {"preset": "vllm-v1", "scheduling": {"admission": {"policy": "token_bucket"}}},
        {"scheduling": {"preset": "vllm-v1", "admission": "token_bucket"}},
        {"scheduling": {"admission": "token_bucket"}, "replicasets": SPLIT},
        {"scheduling": {"admission": "token_bucket", **LAYERS}, "replicasets": {**SPLIT, "b": {}}},
    ],
)
def test_it_is_taken_wherever_the_layers_come_from(sections: dict[str, Any]) -> None:
    config = system(**sections)
    choice = config.admission_policy
    assert choice is not None
    assert (choice.policy, choice.params["capacity"]) == ("token_bucket", 10_000.0)
    assert all(not hasattr(one.scheduling, "admission") for one in config.effective_replicasets.values())
    again = system_from_mapping(YAML(typ="safe").load(dump_effective(config)))
    assert again == config
    assert again.admission_policy == choice
    assert pickle.loads(pickle.dumps(config)).admission_policy == choice
    assert config.model_copy(update={"seed": 4}).admission_policy == choice


def test_without_one_nothing_is_written_of_it() -> None:
    config = system(scheduling=LAYERS)
    assert config.admission_policy is None
    assert "admission" not in config.model_dump(mode="json")["scheduling"]
    assert system(scheduling={**LAYERS, "admission": None}) == config


@pytest.mark.parametrize(
    ("admission", "complaint"),
    [
        ("token_buket", "no installed package offers an admission policy of that name (got 'token_buket')"),
        ("fcfs", "no installed package offers an admission policy of that name (got 'fcfs')"),
        (3, "scheduling.admission: must be a policy's name, or a mapping of policy and params (got 3)"),
        ({"params": {}}, "scheduling.admission.policy: is missing"),
        ({"policy": "token_bucket", "parms": {}}, "scheduling.admission.parms: unknown key"),
        ({"policy": "token_bucket", "params": 3}, "scheduling.admission.params: must be a mapping"),
        ({"policy": "token_bucket", "params": {"capcity": 3}}, "scheduling.admission.params.capcity: unknown key"),
        ({"policy": "token_bucket", "params": {"capacity": -1}}, "scheduling.admission.params.capacity"),
        ({"policy": "priority_holdback", "params": {"min_ceiling": 0.9, "max_ceiling": 0.8}}, "must be below max_ceiling"),
        ({"policy": "priority_holdback", "params": {"ceilings": {0: 0.5, 1: 0.9}}}, "must not increase"),
    ],
)  # fmt: skip
def test_mistakes_are_named_where_they_are(admission: Any, complaint: str) -> None:
    assert complaint in problem(scheduling={**LAYERS, "admission": admission})


def test_a_near_name_is_suggested() -> None:
    assert "token_bucket" in problem(scheduling={**LAYERS, "admission": "token_buket"}).partition("Did you mean")[2]


def test_a_replicaset_has_none_of_its_own() -> None:
    own = {**SPLIT, "b": {"scheduling": {**LAYERS, "admission": "token_bucket"}}}
    message = problem(replicasets=own)
    assert "replicasets.b.scheduling.admission: one admission policy serves the whole system" in message
    assert "Allowed: scheduling.admission at the top of the file" in message


def test_it_can_be_swept_and_overridden() -> None:
    mapping = {
        "version": 1,
        "scheduling": {**LAYERS, "admission": "token_bucket"},
        "replica": {"memory": {"num_blocks": 100}},
        "backend": {"simulator": {"latency": {"type": "constant", "step_time_s": 0.01}}},
        "workload": {"type": "synthetic", "rate": 4.0},
        "sweep": {"scheduling.admission": ["max_load", {"policy": "token_bucket", "params": {"capacity": 7}}, None]},
    }
    points: list[tuple[Any, ExperimentConfig]] = expand_sweep(config_from_mapping(mapping))
    choices = [config.admission_policy for _, config in points]
    assert [None if one is None else one.policy for one in choices] == ["max_load", "token_bucket", None]
    assert choices[1] is not None
    assert choices[1].params["capacity"] == 7
    single = {key: value for key, value in mapping.items() if key != "sweep"}
    overridden = config_from_mapping(single, ["scheduling.admission.params.refill_per_s=5"])
    assert overridden.admission_policy is not None
    assert overridden.admission_policy.params["refill_per_s"] == 5


def test_editors_are_told_of_it_at_the_top_alone() -> None:
    schema = json_schema(load_registry())
    definitions = schema["$defs"]
    top = definitions["SystemSchedulingConfig"]["properties"]
    assert "token_bucket" in top["admission"]["oneOf"][0]["enum"]
    assert "admission" not in definitions["SchedulingConfig"]["properties"]
    assert {"$ref": "#/$defs/SystemSchedulingConfig"} in schema["properties"]["scheduling"]["anyOf"]
