from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
from pydantic import model_validator

from vajra_py.config import (
    ExperimentConfig,
    ReplicasetConfig,
    config_from_mapping,
    dump_effective,
    expand_sweep,
    load_config,
    register_backend,
)
from vajra_py.config import choices as choices_module
from vajra_py.config.sections import Section
from vajra_py.contract import KeyMotion, Layer, PolicyConfig, PolicySpec
from vajra_py.errors import ConfigError, PluginError
from vajra_py.plugins import Registry, build_policy, load_registry


def test_a_file_becomes_a_complete_experiment(write: Any, good: str, registry: Registry) -> None:
    config = load_config(write(good, "my exp.yaml"), registry=registry)
    assert (config.name, config.seed, config.num_replicas) == ("my-exp", 42, 1)
    assert config.scheduling is not None
    chosen = {layer.value: config.scheduling.choice(layer) for layer in Layer}
    assert chosen["request_prioritizer"].policy == "lrs"
    assert chosen["request_prioritizer"].params == {"deadline_multiplier": 2.0, "order": "fast"}
    assert chosen["replicaset_scheduler"].params == {}
    assert chosen["replica_scheduler"].params == {"target_batch_time_s": 0.05, "sizes": [1, 2]}
    assert config.backend.kind == "simulator"
    assert config.backend.settings.latency.type == "constant"
    assert config.backend.settings.latency.params == {"step_time_s": 0.5, "num_stages": 1}
    assert config.backend.settings.output_length.type == "none"
    assert config.workload.rate == 4.0  # type: ignore[union-attr]
    assert list(config.effective_replicasets) == ["default"]


def test_the_effective_file_says_the_same(write: Any, good: str, registry: Registry) -> None:
    text = good + "preset: vllm-v1\nobservers: [watch]\nreplicasets: {a: {select: {tenants: [x, '2', '1e3']}}, b: {}}\n"
    config = load_config(write(text), ["name='1e3'", "output.dir='on'"], registry)
    dumped = dump_effective(config)
    again = load_config(write(dumped, "again.yaml"), registry=registry)
    assert again == config
    assert dump_effective(again) == dumped
    assert "deadline_multiplier: 2.0" in dumped
    assert again.replicasets["a"].select.tenants == ("x", "2", "1e3")


def test_a_mapping_reads_like_a_file(write: Any, good: str, registry: Registry) -> None:
    config = load_config(write(good), registry=registry)
    mapping = config.model_dump(mode="json", exclude={"sweep"})
    assert config_from_mapping(mapping, registry=registry) == config
    with pytest.raises(ConfigError) as caught:
        config_from_mapping({**mapping, "seed": -1, "num_replica": 2}, registry=registry)
    assert [problem.where for problem in caught.value.problems] == ["seed", "num_replica"]


def test_the_same_mistake_in_a_mapping_is_told_for_each_place(registry: Registry) -> None:
    mapping = {"version": 1, "replicasets": {name: {"num_replicas": 0} for name in "ab"}}
    with pytest.raises(ConfigError) as caught:
        config_from_mapping(mapping, registry=registry)
    places = [problem.where for problem in caught.value.problems]
    assert "replicasets.a.num_replicas" in places
    assert "replicasets.b.num_replicas" in places


def test_configurations_travel_between_processes(write: Any, good: str, registry: Registry) -> None:
    config = load_config(write(good), ["sweep.seed=[1,2]"], registry)
    assert pickle.loads(pickle.dumps(config)) == config


def test_paths_are_seen_from_the_file_too(write: Any, good: str, registry: Registry, tmp_path: Path) -> None:
    folder = tmp_path / "deep"
    folder.mkdir()
    write("")
    (folder / "steps.csv").write_text("replica_id,step_index,duration_s\n0,0,0.1\n")
    (folder / "exp.yaml").write_text(
        good.replace("type: constant, step_time_s: 0.5", "type: recorded, steps: steps.csv")
    )
    config = load_config(Path("deep") / "exp.yaml", registry=registry)
    assert Path(config.backend.settings.latency.params["steps"]).is_file()


def test_preset_gives_defaults_and_explicit_keys_win_at_every_level(write: Any, good: str, registry: Registry) -> None:
    text = good.replace("  replicaset_scheduler: pull\n", "") + "replica: {memory: {host_blocks: 7}}\n"
    for preset in ("preset: vllm-v1\n", ""):
        place = text + preset if preset else text.replace("scheduling:\n", "scheduling:\n  preset: vllm-v1\n")
        config = load_config(write(place), registry=registry)
        assert config.scheduling is not None
        assert config.scheduling.request_prioritizer.params["deadline_multiplier"] == 2.0
        assert config.scheduling.replicaset_scheduler.policy == "round_robin"
        assert config.scheduling.replica_scheduler.policy == "dynamic_chunk"
        assert config.replica.max_batch_size == 256
        assert config.replica.memory.watermark_fraction == 0.0
        assert config.replica.memory.host_blocks == 7
        assert config.replica.memory.prefix_cache.reuse_order == "fifo"


def test_a_policys_parameters_go_with_it(write: Any, good: str, registry: Registry) -> None:
    rest = good[good.index("workload") :]
    only_preset = f"version: 1\npreset: vllm-v1\n{rest}"
    kept = load_config(write(only_preset), ["scheduling.request_prioritizer.params.order=slow"], registry)
    assert kept.scheduling is not None
    assert kept.scheduling.request_prioritizer.params == {"deadline_multiplier": 4.0, "order": "slow"}
    same = load_config(write(only_preset), ["scheduling.request_prioritizer=lars"], registry)
    assert same.scheduling is not None
    assert same.scheduling.request_prioritizer.params["deadline_multiplier"] == 4.0
    other = load_config(write(only_preset), ["scheduling.request_prioritizer=fcfs"], registry)
    assert other.scheduling is not None
    assert other.scheduling.request_prioritizer.params == {}


def test_replicasets_take_from_the_top_what_they_leave_out(write: Any, good: str, registry: Registry) -> None:
    text = good + (
        "num_replicas: 3\nreplica: {max_batch_size: 9, memory: {block_size: 32}}\nreplicasets:\n"
        "  chat: {select: {slo_classes: [chat], max_prompt_tokens: 100}, num_replicas: 1}\n"
        "  long: {select: {min_prompt_tokens: 101}, scheduling: {request_prioritizer: fcfs}, replica: {max_batch_size: 2}}\n"
        "  rest: {scheduling: {preset: vllm-v1}}\n"
    )
    sets = load_config(write(text), registry=registry).effective_replicasets
    assert list(sets) == ["chat", "long", "rest"]
    assert [each.num_replicas for each in sets.values()] == [1, 3, 3]
    assert sets["chat"].scheduling.request_prioritizer.params["deadline_multiplier"] == 2.0
    assert sets["long"].scheduling.request_prioritizer.policy == "fcfs"
    assert sets["long"].scheduling.replicaset_scheduler.policy == "pull"
    assert (sets["long"].replica.max_batch_size, sets["long"].replica.memory.block_size) == (2, 32)
    assert sets["rest"].scheduling.replica_scheduler.policy == "vllm"
    assert sets["rest"].replica.max_batch_size == 256


class Request:
    tenant, slo_class, metadata, num_prompt_tokens = "t", "chat", {"model": "m"}, 50


@pytest.mark.parametrize(
    ("select", "taken"),
    [
        ({}, True),
        ({"tenants": ["t"], "slo_classes": ["chat"], "models": ["m"]}, True),
        ({"tenants": ["u"]}, False),
        ({"slo_classes": ["code"]}, False),
        ({"models": ["n"]}, False),
        ({"min_prompt_tokens": 50, "max_prompt_tokens": 50}, True),
        ({"min_prompt_tokens": 51}, False),
        ({"max_prompt_tokens": 49}, False),
    ],
)
def test_a_replicaset_selects_requests(select: dict[str, Any], taken: bool, good: str, registry: Registry) -> None:
    scheduling = {layer.value: {"policy": "x"} for layer in Layer}
    replicaset = ReplicasetConfig.model_validate({"select": select, "scheduling": scheduling})
    assert replicaset.select.matches(Request()) is taken  # type: ignore[arg-type]


def test_the_top_may_be_silent_when_every_replicaset_decides(write: Any, good: str, registry: Registry) -> None:
    rest = good[good.index("workload") :]
    text = f"version: 1\n{rest}scheduling: {{request_prioritizer: fcfs}}\nreplicasets: {{a: {{scheduling: {{preset: vllm-v1}}}}}}\n"
    config = load_config(write(text), registry=registry)
    assert config.scheduling is None
    assert config.effective_replicasets["a"].scheduling.request_prioritizer.policy == "lrs"
    assert load_config(write(dump_effective(config), "again.yaml"), registry=registry).replicasets == config.replicasets
    with pytest.raises(ConfigError, match=r"replicasets\.a\.scheduling\.replica_scheduler: is missing"):
        load_config(write(text.replace("preset: vllm-v1", "")), registry=registry)


class EngineSection(Section):
    num_workers: int = 1


def test_another_backend_can_be_registered(
    write: Any, good: str, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices_module, "_BACKENDS", {})
    text = good[: good.index("backend")] + "backend: {cluster: {num_workers: 3}}\n"
    with pytest.raises(ConfigError, match=r"exp.yaml:11: backend\.cluster: no such backend\. .*simulator"):
        load_config(write(text), registry=registry)
    register_backend("cluster", EngineSection)
    config = load_config(write(text), registry=registry)
    assert (config.backend.kind, config.backend.settings) == ("cluster", EngineSection(num_workers=3))
    assert load_config(write(dump_effective(config)), registry=registry) == config
    with pytest.raises(ConfigError, match="must be an integer"):
        load_config(write(text), ["backend.cluster.num_workers=x"], registry)
    with pytest.raises(ConfigError, match="exactly one backend"):
        load_config(write(text), ["backend.simulator.latency=constant"], registry)
    with pytest.raises(ValueError, match="registered already"):
        register_backend("cluster", Section)


def test_a_model_that_crashes_is_the_plugins_fault(write: Any, good: str, registry: Registry) -> None:
    with pytest.raises(PluginError, match=r"'lab' of test-lab 1\.2: checking .*ZeroDivisionError"):
        load_config(write(good), ["scheduling.request_prioritizer=crashing"], registry)


def test_parameters_are_validated_once(write: Any, good: str) -> None:
    """Loading makes the model that the policy is built from: also in a sweep, and in another process."""
    validated: list[int] = []

    class Counted(PolicyConfig):
        size: int = 1

        @model_validator(mode="after")
        def _count(self) -> Self:
            validated.append(self.size)
            return self

    class Policy:
        key_motion = KeyMotion.STATIC

        def __init__(self, config: Any, context: Any) -> None:
            self.config = config

        def key(self, request: Any, now: float) -> float:
            return 0.0

    prioritizer = Layer.REQUEST_PRIORITIZER
    with_own = load_registry().with_policies([PolicySpec("counted", prioritizer, Counted, Policy, "Counts.")])
    rest = "workload: {type: synthetic, rate: 4.0}\nbackend: {simulator: {latency: constant}}\n"
    layers = "request_prioritizer: counted, replicaset_scheduler: pull, replica_scheduler: fixed_chunk"
    text = (
        f"version: 1\nscheduling: {{{layers}}}\n{rest}sweep: {{scheduling.request_prioritizer.params.size: [2, 3]}}\n"
    )
    points = expand_sweep(load_config(write(text), registry=with_own), with_own)
    assert validated == [2, 3]
    for size, (_, config) in zip((2, 3), points, strict=True):
        assert config.scheduling is not None
        choice = config.scheduling.request_prioritizer
        policy: Any = build_policy(prioritizer, choice.policy, choice.parameters, SimpleNamespace(), with_own)  # type: ignore[arg-type]
        assert policy.config.size == size
    assert validated == [2, 3]


def test_experiments_are_frozen(write: Any, good: str, registry: Registry) -> None:
    config = load_config(write(good), registry=registry)
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3  # type: ignore[misc]
    assert isinstance(config, ExperimentConfig)
