"""Is "compare vLLM's scheduler with Vajra's" one line, and does each preset set what its system ships with?"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vajra_policies.systems.presets import PRESETS
from vajra_py.config import config_from_mapping
from vajra_py.config.presets import divided
from vajra_py.errors import ConfigError
from vajra_py.latency import AffineModel
from vajra_py.latency.services.output_length import NoLengths
from vajra_py.plugins import load_registry
from vajra_py.runtime.serving.build import ModelFacts, Services, build_controller
from vajra_py.runtime.support.seeds import SeedTree
from vajra_py.sim.executor import PredictedTimer, SimulatedExecutor
from vajra_py.sim.simulator import SimulationOptions, Simulator
from vajra_py.workload.request import RequestSpec

NAMES = [preset.name for preset in PRESETS]
FACTS = ModelFacts(kv_bytes_per_token=1000)


def experiment(scheduling: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "scheduling": scheduling,
        "workload": {"type": "jsonl", "path": "requests.jsonl"},
        "backend": {"simulator": {"latency": {"type": "affine", "base_s": 0.01}}},
        **more,
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_one_line_and_serves(name: str) -> None:
    sizes = {"replica": {"memory": {"num_blocks": 64}}}
    config = config_from_mapping(experiment({"preset": name}, num_replicas=2, **sizes))
    executor = SimulatedExecutor()
    latency = AffineModel(0.01, 0.0001)
    services = Services(
        load_registry(), latency, NoLengths(), SeedTree(0), FACTS, lambda replicaset, replica_id: executor
    )
    controller = build_controller(config, services)
    workload = [RequestSpec(f"r{i}", 0.01 * i, 40 + 7 * i, 12, max_tokens=12) for i in range(24)]
    timer = PredictedTimer(latency)
    Simulator(controller, executor, lambda replica: timer, SimulationOptions(check_every_steps=1)).run(workload)
    assert sum(controller.num_ended.values()) == 24
    assert {reason.value for reason in controller.num_ended} <= {"length", "stop"}


def test_explicit_settings_win_over_a_preset() -> None:
    config = config_from_mapping(
        experiment(
            {"preset": "vllm-v1", "replica_scheduler": {"policy": "vllm_v1", "params": {"watermark_fraction": 0.1}}},
            replica={"max_batch_tokens": 512},
        )
    )
    assert config.scheduling is not None
    params = config.scheduling.replica_scheduler.params
    assert (params["victim"], params["watermark_fraction"]) == ("latest_admitted", 0.1)
    assert config.replica.max_batch_tokens == 512
    assert config.replica.memory.reservation == "incremental"


def test_presets_differ_in_the_prefix_cache_as_their_systems_do() -> None:
    cache = {name: config_from_mapping(experiment({"preset": name})).replica.memory.prefix_cache for name in NAMES}
    assert cache["vllm-v1"].reuse_order == "lru"
    assert cache["nano-vllm"].publish == "step_end"
    assert cache["nano-vllm-old"].publish == "schedule"
    assert cache["nano-vllm"].reuse_order == cache["minivllm"].reuse_order == "fifo"
    assert not cache["minivllm"].retain_freed
    assert not cache["orca"].enabled
    assert not cache["sarathi"].enabled
    assert all(one.unscheduled == "withdraw" for one in cache.values())


@pytest.mark.parametrize(("count", "sizes"), [(2, (1, 1)), (5, (3, 2)), (8, (4, 4)), (None, (1, 1))])
def test_replicas_are_divided_among_the_pools_of_a_preset(count: int | None, sizes: tuple[int, int]) -> None:
    more = {} if count is None else {"num_replicas": count}
    pools = config_from_mapping(experiment({"preset": "distserve"}, **more)).pools
    assert tuple(pools[name].num_replicas for name in ("prefill", "decode")) == sizes


def test_pools_of_the_file_win_over_those_of_a_preset() -> None:
    pools = config_from_mapping(experiment({"preset": "distserve"}, pools={"prefill": {"num_replicas": 3}})).pools
    assert {name: pool.num_replicas for name, pool in pools.items()} == {"prefill": 3, "decode": 1}


def test_a_preset_with_pools_needs_a_replica_for_each() -> None:
    with pytest.raises(ConfigError, match=r"num_replicas: the preset has the pools prefill, decode, .* \(got 1\)"):
        config_from_mapping(experiment({"preset": "distserve"}, num_replicas=1))


@pytest.mark.parametrize(
    ("top", "own", "pools"),
    [
        ({"preset": "distserve"}, {"num_replicas": 4}, {"prefill": 2, "decode": 2}),
        ({"preset": "distserve", "num_replicas": 6}, {}, {"prefill": 3, "decode": 3}),
        ({"num_replicas": 6}, {"scheduling": {"preset": "distserve"}}, {"prefill": 3, "decode": 3}),
        (
            {"preset": "distserve", "num_replicas": 6},
            {"scheduling": {"preset": "splitwise"}},
            {"prompt": 3, "token": 3},
        ),
        ({"preset": "distserve", "num_replicas": 6}, {"scheduling": {"preset": "vllm-v1"}}, {}),
        ({"pools": {"prefill": {}, "decode": {}}, "preset": "distserve"}, {"num_replicas": 4}, {}),
    ],
)
def test_replicas_of_a_replicaset_are_divided_among_the_pools_of_its_preset(
    top: dict[str, Any], own: dict[str, Any], pools: dict[str, int]
) -> None:
    replicasets = {"a": {"select": {"slo_classes": ["x"]}, **own}, "b": {"scheduling": {"preset": "vllm-v1"}}}
    one = config_from_mapping(experiment({}, replicasets=replicasets, **top)).replicasets["a"]
    assert {name: pool.num_replicas for name, pool in one.pools.items()} == pools
    if not pools:
        assert one.num_replicas == own.get("num_replicas", top.get("num_replicas"))


def test_a_number_of_replicas_out_of_range_is_named_also_where_a_preset_divides_it() -> None:
    with pytest.raises(ConfigError, match=r"pools\.prefill\.num_replicas: must be at most 1000000"):
        config_from_mapping(experiment({"preset": "distserve"}, num_replicas=10**400))


def test_whose_name_is_looked_for_among_policies_is_found_among_presets() -> None:
    layers = {"request_prioritizer": "fcfs", "replicaset_scheduler": "distserve", "replica_scheduler": "fixed_chunk"}
    with pytest.raises(ConfigError, match=r"'distserve'.*whole system: write `preset: distserve`"):
        config_from_mapping(experiment(layers))


@given(st.integers(0, 30), st.dictionaries(st.text(min_size=1), st.integers(1, 9), min_size=1, max_size=6))
def test_shares_are_the_weights_but_for_one_and_no_pool_is_without_a_replica(
    more: int, weights: dict[str, int]
) -> None:
    count = len(weights) + more
    numbers = divided(count, weights)
    assert sum(numbers.values()) == count
    assert min(numbers.values()) >= 1
    for name, number in numbers.items():
        share = count * weights[name] / sum(weights.values())
        assert number <= max(1, share + 1)
