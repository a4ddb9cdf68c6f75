"""Do replicasets of one engine run models of their own, and does the simulator repeat what such an engine did?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vajra_py.config import config_from_mapping
from vajra_py.engine.build import Engine
from vajra_py.engine.config import EngineConfig
from vajra_py.engine.llm import llm_config
from vajra_py.engine.services import engine_services
from vajra_py.engine.tiny import write_tiny_model
from vajra_py.errors import ConfigError
from vajra_py.experiment.runs.replay import replay
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.plugins import load_registry


def two_models(folder: Path, **engine: Any) -> dict[str, Any]:
    for seed, name in enumerate(("small", "large")):
        write_tiny_model(folder / name, family="llama", size="1m", seed=seed)
    return {
        "version": 1,
        "name": "two",
        "preset": "vllm-v1",
        "replicasets": {
            "small": {
                "select": {"max_prompt_tokens": 20},
                "replica": {"max_model_len": 128, "memory": {"num_blocks": 12}},
            },
            "large": {"replica": {"max_batch_size": 4, "memory": {"num_blocks": 40, "block_size": 8}}},
        },
        "workload": {
            "type": "synthetic",
            "arrivals": {"type": "at_once"},
            "num_requests": 10,
            "prompt_tokens": {"type": "uniform", "min": 10, "max": 30},
            "output_tokens": {"type": "constant", "value": 6},
        },
        "backend": {
            "engine": {
                "model": str(folder / "small"),
                "replicasets": {"large": {"model": str(folder / "large")}},
                **engine,
            }
        },
    }


def test_each_replicaset_runs_its_model_and_the_run_replays(tmp_path: Path) -> None:
    config = config_from_mapping(two_models(tmp_path))
    folder = tmp_path / "run"
    run = run_experiment(config, folder=folder)
    taken = {row["replicaset"] for row in run.requests().to_pylist()}
    assert taken == {"small", "large"}
    assert replay(folder).difference is None


def test_sizes_are_those_of_the_replicasets_own_model(tmp_path: Path) -> None:
    mapping = two_models(tmp_path)
    write_tiny_model(tmp_path / "larger", family="qwen3", size="10m", seed=1)
    mapping["backend"]["engine"]["replicasets"]["large"]["model"] = str(tmp_path / "larger")
    config = config_from_mapping(mapping)
    engine = Engine.load(config, engine_services(config, load_registry(), {}))
    try:
        small, large = engine.models["small"], engine.models["large"]
        assert (small.model_type, large.model_type) == ("llama", "qwen3")
        assert small.kv_bytes_per_token != large.kv_bytes_per_token
        limits = {name: one.replicas[0].limits for name, one in engine.controller.replicasets.items()}
        assert limits["small"].bytes_per_block == 16 * small.kv_bytes_per_token
        assert limits["large"].bytes_per_block == 8 * large.kv_bytes_per_token
    finally:
        engine.close()


def test_settings_are_the_engines_where_a_replicaset_says_nothing() -> None:
    settings = EngineConfig.model_validate(
        {
            "model": "a",
            "dtype": "float32",
            "latency": {"type": "constant", "step_time_s": 1.0},
            "replicasets": {"b": {"model": "b"}, "c": {"device": "cuda:1"}},
        }
    )
    assert settings.of("a") == settings
    assert (settings.of("b").model, settings.of("b").dtype) == ("b", "float32")
    assert settings.of("b").latency is None  # predictions are of the other model
    assert (settings.of("c").model, settings.of("c").device) == ("a", "cuda:1")
    assert settings.of("c").latency == settings.latency


def test_a_name_that_is_no_replicasets_is_refused(tmp_path: Path) -> None:
    mapping = two_models(tmp_path, replicasets={"lrage": {"model": str(tmp_path / "nowhere")}})
    config = config_from_mapping(mapping)
    with pytest.raises(ConfigError, match=r"backend.engine.replicasets: names no replicaset \('lrage'\).*large"):
        Engine.load(config, engine_services(config, load_registry(), {}))


def test_a_scaler_is_refused_by_name(tmp_path: Path) -> None:
    mapping = two_models(tmp_path)
    mapping["replicasets"]["large"] |= {"elastic": {"max_replicas": 2}}
    scheduling = {**mapping.get("scheduling", {}), **mapping["replicasets"]["large"].get("scheduling", {})}
    mapping["replicasets"]["large"]["scheduling"] = scheduling | {"scaling": "dynamo_planner"}
    config = config_from_mapping(mapping)
    said = r"replicasets\.large\.scheduling\.scaling: the backend `engine` neither starts nor stops .*'dynamo_planner'"
    with pytest.raises(ConfigError, match=said):
        Engine.load(config, engine_services(config, load_registry(), {}))


def test_pools_are_those_of_one_replicaset(tmp_path: Path) -> None:
    mapping = two_models(tmp_path)
    stages = {"prefill": {}, "decode": {"num_replicas": 2, "replica": {"pipeline_stages": 2}}}
    mapping["replicasets"]["large"] |= {"pools": stages}
    config = config_from_mapping(mapping)
    said = r"replicasets\.large\.pools: KV does not move between replicas of different pipeline_stages"
    with pytest.raises(ConfigError, match=said):
        Engine.load(config, engine_services(config, load_registry(), {}))


def test_an_llm_is_one_model() -> None:
    with pytest.raises(ConfigError, match="an LLM is one model"):
        llm_config("a", {"backend": {"engine": {"replicasets": {"b": {"model": "b"}}}}})
