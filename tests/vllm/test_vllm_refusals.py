"""What a vLLM is asked for and this scheduler cannot do is refused before a model is loaded, in one line for each option."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1 import kv_cache_interface as kv

from tests.vllm.core import kv_cache, vllm_config
from vajra_py.config import system_from_mapping
from vajra_py.errors import ConfigError
from vajra_py.plugins import load_registry
from vajra_py.vllm import Scheduler
from vajra_py.vllm.mechanism import check_policies
from vajra_py.vllm.plugin import abort_at_once, check_early
from vajra_py.vllm.support import check_cache, check_options

OWN = "Leave --scheduler-cls out to use vLLM's own scheduler"


@pytest.fixture
def model(tiny_model: str, tmp_path: Path) -> Path:
    """A model without weights: whoever loads it fails otherwise."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in Path(tiny_model).iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's configurations are checked as they are made, as its plug-in does it."""
    monkeypatch.setattr(EngineArgs, "create_engine_config", EngineArgs.create_engine_config)
    check_early()


def refusal(caught: pytest.ExceptionInfo[ConfigError], option: str) -> str:
    """The one line about this option."""
    lines = str(caught.value).splitlines()
    (line,) = (one for one in lines if one.startswith(f"{option}: "))
    assert OWN in line
    return line


BY_ARGUMENTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "drafts by batch size": (
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 2,
                "prompt_lookup_max": 3,
                "num_speculative_tokens_per_batch_size": [[1, 8, 2], [9, 256, 1]],
            }
        },
        "--speculative-config",
        "left to policies",
    ),
    "a threshold within a decode with drafts": (
        {
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3},
            "long_prefill_token_threshold": 4,
        },
        "--long-prefill-token-threshold",
        "got 4",
    ),
    "pooling": ({"runner": "pooling"}, "--runner", "'pooling'"),
    "data parallelism": ({"data_parallel_size": 2}, "--data-parallel-size", "route between them"),
    "pipeline parallelism": ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size", "got 2"),
    "prompt embeddings": ({"enable_prompt_embeds": True}, "--enable-prompt-embeds", "tokens"),
}


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("what", BY_ARGUMENTS)
def test_an_argument_of_the_engine_is_refused_before_weights_are_looked_for(model: Path, what: str) -> None:
    arguments, option, word = BY_ARGUMENTS[what]
    with pytest.raises(ConfigError) as caught:
        vllm_config(str(model), max_model_len=256, scheduler_cls="vajra_py.vllm.Scheduler", **arguments)
    assert word in refusal(caught, option)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("what", BY_ARGUMENTS)
def test_vllms_own_scheduler_takes_the_same(model: Path, what: str) -> None:
    """So that the refusal is this scheduler's, and not vLLM's own."""
    assert vllm_config(str(model), max_model_len=256, **BY_ARGUMENTS[what][0]) is not None


class Changed:
    """An object with some attributes that are others."""

    def __init__(self, base: Any, **given: Any) -> None:
        self._base = base
        self.__dict__.update(given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


BY_CONFIGURATION: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "context parallelism, decodes": (
        "parallel_config",
        {"decode_context_parallel_size": 2},
        "--decode-context-parallel-size",
        "block tables",
    ),
    "context parallelism, prompts": (
        "parallel_config",
        {"prefill_context_parallel_size": 2},
        "--prefill-context-parallel-size",
        "block tables",
    ),
    "multimodal inputs": ("model_config", {"supports_multimodal_inputs": True}, "model", "multimodal"),
    "hybrid models": ("model_config", {"is_hybrid": True}, "--enable-prefix-caching", "hybrid"),
    "states beside attention": ("model_config", {"has_inner_state": True}, "--enable-prefix-caching", "hybrid"),
    "encoder-decoders": ("model_config", {"is_encoder_decoder": True}, "model", "encoder"),
    "diffusion": ("model_config", {"is_diffusion": True}, "model", "diffusion"),
    "sampling masks": ("model_config", {"return_sampling_mask": True}, "--return-sampling-mask", "not passed on"),
}


@pytest.mark.parametrize("what", BY_CONFIGURATION)
def test_a_configuration_is_refused(tiny_model: str, what: str) -> None:
    """What this machine cannot make a real configuration of."""
    part, given, option, word = BY_CONFIGURATION[what]
    config = vllm_config(tiny_model, max_model_len=256)
    with pytest.raises(ConfigError) as caught:
        check_options(Changed(config, **{part: Changed(getattr(config, part), **given)}))
    assert word in refusal(caught, option)
    assert str(caught.value).count("\n") == 0


def test_a_backend_refuses_windows_and_a_scheduler_does_not(tiny_model: str) -> None:
    config = vllm_config(tiny_model, max_model_len=256)
    windowed = Changed(config, model_config=Changed(config.model_config, get_sliding_window=lambda: 64))
    check_options(windowed)
    with pytest.raises(ConfigError, match="model: has a sliding window of 64 tokens"):
        check_options(windowed, has_core=False)


def test_a_hybrid_is_taken_without_prefix_caching_drafts_and_connectors(tiny_model: str) -> None:
    config = vllm_config(tiny_model, max_model_len=256, enable_prefix_caching=False)
    hybrid = Changed(config, model_config=Changed(config.model_config, is_hybrid=True))
    check_options(hybrid)
    with pytest.raises(ConfigError, match="model: is a hybrid"):
        check_options(hybrid, has_core=False)
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    given: dict[str, Any] = {
        "speculative_config": drafts,
        "kv_transfer_config": KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both"),
    }
    config = vllm_config(tiny_model, max_model_len=256, enable_prefix_caching=False, **given)
    with pytest.raises(ConfigError) as caught:
        check_options(Changed(config, model_config=Changed(config.model_config, is_hybrid=True)))
    assert "hybrid" in refusal(caught, "--speculative-config")
    assert "hybrid" in refusal(caught, "--kv-transfer-config")


def test_an_encoder_connector_is_refused(tiny_model: str) -> None:
    config = vllm_config(tiny_model, max_model_len=256)
    with pytest.raises(ConfigError) as caught:
        check_options(Changed(config, ec_transfer_config=SimpleNamespace()))
    refusal(caught, "--ec-transfer-config")


def test_every_option_has_its_line(tiny_model: str) -> None:
    config = vllm_config(tiny_model, max_model_len=256)
    parallel = Changed(config.parallel_config, data_parallel_size=2, pipeline_parallel_size=4)
    with pytest.raises(ConfigError) as caught:
        check_options(Changed(config, parallel_config=parallel))
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == [
        "--data-parallel-size",
        "--pipeline-parallel-size",
    ]


MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "a hybrid": (
        {"architectures": ["BambaForCausalLM"], "model_type": "bamba", "attn_layer_indices": [1], "mamba_n_heads": 4},
        "hybrid",
    ),
    "states alone": ({"architectures": ["MambaForCausalLM"], "model_type": "mamba", "state_size": 16}, "hybrid"),
    "multimodal inputs": (
        {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "d_model": 64}
        | {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")},
        "multimodal",
    ),
}


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize(  # vLLM examines each model in a process of its own, which takes long to start
    "what", [pytest.param(one, marks=[] if one == "multimodal inputs" else [pytest.mark.long]) for one in MODELS]
)
def test_a_model_is_refused_by_what_its_configuration_says(model: Path, what: str) -> None:
    change, word = MODELS[what]
    config = json.loads((model / "config.json").read_text()) | change
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as caught:
        vllm_config(str(model), max_model_len=256, scheduler_cls="vajra_py.vllm.Scheduler", enable_prefix_caching=True)
    line = next(one for one in str(caught.value).splitlines() if word in one)
    assert line.startswith("--enable-prefix-caching: " if word == "hybrid" else "model: ")
    assert OWN in line


def group(spec: Any) -> kv.KVCacheGroupSpec:
    return kv.KVCacheGroupSpec(["layer"], spec)


SIZES: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
FULL = kv.FullAttentionSpec(**SIZES)
WINDOW = kv.SlidingWindowSpec(**SIZES, sliding_window=64)
CACHES = {
    "several groups": ([group(FULL), group(FULL)], "2 groups"),
    "hybrid": ([group(FULL), group(WINDOW)], "FullAttentionSpec, SlidingWindowSpec"),
    "windows alone": ([group(WINDOW)], "another kind than full attention"),
    "full attention that has windows": (
        [group(kv.FullAttentionSpec(**SIZES, sliding_window=64))],
        "another kind than full attention",
    ),
    "no attention": ([], "0 groups"),
}


@pytest.mark.parametrize("what", CACHES)
def test_a_cache_of_another_kind_is_refused(what: str) -> None:
    groups, word = CACHES[what]
    cache = kv.KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=groups)
    with pytest.raises(ConfigError) as caught:
        check_cache(cache)
    assert word in refusal(caught, "model")
    assert str(caught.value).count("\n") == 0


def test_one_group_of_full_attention_is_taken() -> None:
    check_cache(kv_cache(10, 16))


@pytest.mark.usefixtures("checked")
def test_a_policy_that_misses_a_setting_is_refused_before_weights_are_looked_for(model: Path, tmp_path: Path) -> None:
    (tmp_path / "experiment.yaml").write_text("version: 1\npreset: sarathi\nscheduling: {request_prioritizer: edf}\n")
    wanted = {"vajra": {"experiment": str(tmp_path / "experiment.yaml")}}
    with pytest.raises(ConfigError, match=r"^backend\.vllm\.latency: is missing"):
        vllm_config(str(model), max_model_len=256, scheduler_cls="vajra_py.vllm.Scheduler", additional_config=wanted)


class Subclass(Scheduler):
    """A user's scheduler, given by name."""


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("name", ["vajra_py.vllm.Scheduler", f"{__name__}.Subclass"])
def test_a_recording_gets_time_to_end(model: Path, tmp_path: Path, name: str) -> None:
    """vLLM's own types keep the time as it is sent to the process that schedules."""
    given: dict[str, Any] = {"max_model_len": 256, "scheduler_cls": name}
    recorded = vllm_config(str(model), additional_config={"vajra": {"save_run": str(tmp_path / "run")}}, **given)
    sent = pickle.loads(pickle.dumps(recorded))
    assert sent.shutdown_timeout > 10
    abort_at_once(sent)
    assert sent.shutdown_timeout == 0
    assert vllm_config(str(model), **given).shutdown_timeout == 0


def test_an_admission_policy_is_refused_by_name() -> None:
    layers = {
        "request_prioritizer": "fcfs",
        "replicaset_scheduler": "round_robin",
        "replica_scheduler": "fixed_chunk",
        "admission": "token_bucket",
    }
    mapping = {"version": 1, "scheduling": layers, "replica": {"memory": {"num_blocks": 10}}}
    config = system_from_mapping({**mapping, "backend": {"vllm": {"model": "anywhere"}}})
    with pytest.raises(ConfigError, match=r"scheduling\.admission: vLLM admits a request before .*token_bucket"):
        check_policies(config, load_registry(), 100)
