"""`backend: {vllm: …}` in an experiment's file, on a machine that need not have vLLM."""

from __future__ import annotations

import importlib.util
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vajra_py.config import ExperimentConfig, config_from_mapping
from vajra_py.engine.build import Engine
from vajra_py.engine.services import engine_services
from vajra_py.errors import ConfigError
from vajra_py.experiment.measured.validation import check_validation
from vajra_py.plugins import load_registry
from vajra_py.vllm.config import SAID_ELSEWHERE, VllmBackendConfig
from vajra_py.vllm.options import VllmOptions

HAS_VLLM = importlib.util.find_spec("vllm") is not None
WORKLOAD = {
    "type": "synthetic",
    "arrivals": {"type": "poisson", "rate": 1.0},
    "num_requests": 1,
    "prompt_tokens": {"type": "constant", "value": 8},
    "output_tokens": {"type": "constant", "value": 8},
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with a configuration and no weights, which vLLM's own loader would look at."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": {}}))
    return tmp_path


def experiment(model: Path, vllm: dict[str, Any] | None = None, **sections: Any) -> ExperimentConfig:
    replica = {"max_batch_size": 4, **sections.pop("replica", {})}
    replica["memory"] = {"block_size": 32, "num_blocks": 8, **replica.get("memory", {})}
    mapping = {
        "version": 1,
        "preset": "vllm-v1",
        "replica": replica,
        "workload": WORKLOAD,
        "backend": {"vllm": {"model": str(model), **(vllm or {})}},
        **sections,
    }
    return config_from_mapping(mapping)


def problems(config: ExperimentConfig) -> list[str]:
    """What is said before anything is loaded, without what is said for want of a vLLM."""
    settings, replicasets = config.backend.settings, config.effective_replicasets
    found = [*settings.problems(replicasets), *settings.problems_here(replicasets)]
    return [str(one) for one in found if one.where != "vllm"]


def test_a_complete_section_is_taken(model: Path) -> None:
    config = experiment(model, {"engine_args": {"enforce_eager": True}})
    assert config.backend.kind == "vllm"
    assert isinstance(config.backend.settings, VllmBackendConfig)
    assert problems(config) == []


@pytest.mark.parametrize(
    ("vllm", "sections", "where", "said"),
    [
        ({}, {"replica": {"memory": {"block_size": 16}}}, "replica.memory.block_size", "multiple of 32"),
        ({}, {"replica": {"memory": {"host_blocks": 4}}}, "replica.memory.host_blocks", "host memory (got 4)"),
        ({}, {"replica": {"pipeline_stages": 2}}, "replica.pipeline_stages", "one stage here (got 2)"),
        ({}, {"num_replicas": 2}, "backend.vllm.workers", "a process holds one vLLM (got 2 replicas)"),
        ({"tensor_parallel": 2, "workers": "process"}, {}, "backend.vllm.workers", "cannot be started by a worker"),
        (
            {},
            {"scheduling": {"scaling": "target_utilization"}, "elastic": {}},
            "scheduling.scaling",
            "the backend `vllm` neither starts nor stops replicas while it serves (got 'target_utilization')",
        ),
        (
            {"workers": "process"},
            {"pools": {"prefill": {}, "decode": {}}, "links": {"bandwidth_gb_s": 10}},
            "pools",
            "the backend `vllm` has replicas of one pool alone (got prefill, decode)",
        ),
        (
            {},
            {"replica": {"kv_parallel": {"groups": 2, "group_tokens": 64}}},
            "replica.kv_parallel.groups",
            "one KV memory (got 2 groups)",
        ),
        (
            {},
            {"replica": {"memory": {"prefix_cache": {"enabled": True, "unscheduled": "keep"}}}},
            "replica.memory.prefix_cache.unscheduled",
            "never computed",
        ),
    ],
)
def test_what_vllms_workers_cannot_do_is_said_before_they_are_started(
    model: Path, vllm: dict[str, Any], sections: dict[str, Any], where: str, said: str
) -> None:
    found = problems(experiment(model, vllm, **sections))
    assert len(found) == 1
    assert found[0].startswith(f"{where}: ")
    assert said in found[0]
    assert found[0].count("\n") == 0


def test_several_replicas_are_taken_in_processes(model: Path) -> None:
    assert problems(experiment(model, {"workers": "process"}, num_replicas=3)) == []


def test_other_sizes_of_blocks_are_taken_on_a_gpu(model: Path) -> None:
    assert problems(experiment(model, {"device": "cuda"}, replica={"memory": {"block_size": 16}})) == []


def test_a_model_that_is_not_there_is_said(tmp_path: Path) -> None:
    assert "no such directory" in "".join(problems(experiment(tmp_path / "none")))


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is here")
def test_without_vllm_the_run_says_so_on_one_line(model: Path) -> None:
    config = experiment(model)
    with pytest.raises(ConfigError, match="vllm: is not installed") as caught:
        Engine.load(config, engine_services(config, load_registry(), {}))
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("name", sorted(SAID_ELSEWHERE))
def test_arguments_that_other_settings_decide_are_refused(model: Path, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        experiment(model, {"engine_args": {name: 1}})
    assert f"engine_args.{name} is decided by another setting" in str(caught.value)


@pytest.mark.parametrize("name", ["fused", "self_check", "cuda_graphs", "look_ahead", "replicasets"])
def test_settings_of_the_built_in_engine_are_unknown_here(model: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        experiment(model, {name: True})


def test_what_a_worker_loads_can_be_sent_to_a_process(model: Path) -> None:
    config = experiment(
        model,
        {"engine_args": {"quantization": "fp8"}, "tensor_parallel": 2, "random_weights": True, "weights_seed": 5},
        replica={"max_batch_tokens": 64, "max_model_len": 128, "memory": {"memory_fraction": 0.5}},
    )
    options = config.backend.settings.runner_options(config.replica, 1, 3)
    assert options == VllmOptions(
        model=str(model),
        random_weights=True,
        seed=5,
        block_size=32,
        max_model_len=128,
        max_requests=2**16,
        max_step_tokens=64,
        num_threads=3,
        max_batch_size=4,
        memory_fraction=0.5,
        shards=2,
        engine_args={"quantization": "fp8"},
    )
    assert options.num_ranks == 1
    assert pickle.loads(pickle.dumps(options)) == options
    assert replace(options, max_requests=9).shards == 2


def test_vllms_buffers_hold_a_batch_even_where_a_step_has_few_tokens(model: Path) -> None:
    config = experiment(model, replica={"max_batch_size": 64, "max_batch_tokens": 16})
    assert config.backend.settings.runner_options(config.replica, 1, None).max_step_tokens == 64


def test_a_pipeline_of_the_latency_model_is_refused(model: Path) -> None:
    config = experiment(model)
    with pytest.raises(ConfigError, match=r"backend\.vllm\.latency: the latency model has 2 pipeline stages"):
        config.backend.settings.runner_options(config.replica, 2, None)


def test_a_validation_needs_predictions(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"backend\.vllm\.latency: is needed"):
        check_validation(experiment(model))
    check_validation(experiment(model, {"latency": {"type": "constant", "step_time_s": 0.01}}))
