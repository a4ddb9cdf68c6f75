from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vajra_py.errors import ConfigError
from vajra_py.latency import load_model, model_names
from vajra_py.latency.hardware.hf_config import model_from_config

PUBLISHED_PARAMETERS = {
    # As stored in the checkpoints on the Hugging Face hub.
    "DeepSeek-V2-Lite": 15_706_484_224,
    "Gemma-2-9B": 9_241_705_984,
    "Llama-2-7B": 6_738_415_616,
    "Llama-3-70B": 70_553_706_496,
    "Llama-3-8B": 8_030_261_248,
    "Llama-3.1-405B": 405_853_388_800,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.1-8B": 8_030_261_248,
    "Mistral-7B": 7_241_732_096,
    "Mixtral-8x7B": 46_702_792_704,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Yi-34B": 34_388_917_248,
}


def tiny(**changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 1000,
        "max_position_embeddings": 512,
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value is not ...}


def problems(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        model_from_config(tiny(**changes), name="tiny", source="config.json")
    return str(caught.value)


def test_every_described_model_has_the_published_number_of_parameters() -> None:
    assert {name: load_model(name).parameters for name in model_names()} == PUBLISHED_PARAMETERS


@pytest.mark.parametrize(
    ("name", "active_billions"),
    [
        ("Mixtral-8x7B", 12.9),
        ("Qwen3-30B-A3B", 3.3),
        ("Qwen3-235B-A22B", 22.0),
        ("DeepSeek-V2-Lite", 2.4),
        ("Llama-3.1-8B", 8.03),
    ],
)
def test_active_parameters_are_those_that_the_makers_state(name: str, active_billions: float) -> None:
    # The makers round, and some leave out an embedding table.
    assert load_model(name).active_parameters / 1e9 == pytest.approx(active_billions, rel=0.13)


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [
        ("Llama-3.1-8B", 131_072),  # 128 KiB a token: 32 layers x 2 x 8 heads x 128 x 2 bytes
        ("Llama-3.1-70B", 327_680),
        ("Llama-2-7B", 524_288),  # every head has its own keys
        ("Qwen3-30B-A3B", 98_304),
        ("DeepSeek-V2-Lite", 31_104),  # 27 layers x (512 + 64) x 2 bytes
    ],
)
def test_kv_bytes_per_token(name: str, kv_bytes: int) -> None:
    assert load_model(name).kv_bytes_per_token == kv_bytes


def test_layers_with_a_window_are_counted() -> None:
    mistral, gemma = load_model("Mistral-7B"), load_model("Gemma-2-9B")
    assert mistral.num_sliding_layers == 32
    assert gemma.num_sliding_layers == 21


def test_a_model_is_found_by_name_organisation_file_and_folder(tmp_path: Path) -> None:
    assert load_model("qwen3-8b") == load_model("Qwen/Qwen3-8B") == load_model("Qwen3-8B")
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny()))
    by_folder, by_file = load_model(folder), load_model(str(folder / "config.json"))
    assert by_folder == by_file
    assert by_folder.name == "my-model"
    assert by_folder.num_layers == 4


def test_an_unknown_name_gets_the_nearest_and_the_list() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'Llama-3.1-8B'\?.*Qwen3-32B.*config\.json"):
        load_model("Llama-3.1-8b-")


def test_a_folder_without_a_config_and_broken_json_say_where(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{\n  "hidden_size": 64,\n  oops\n}')
    with pytest.raises(ConfigError, match=r"config\.json:3: is not JSON"):
        load_model(tmp_path)


def test_all_missing_and_ill_typed_keys_are_named_at_once() -> None:
    text = problems(hidden_size=..., vocab_size="many", num_hidden_layers=0, max_position_embeddings=...)
    assert "config.json hidden_size: is missing" in text
    assert "config.json vocab_size: is not a whole number of at least 1 ('many')" in text
    assert "config.json num_hidden_layers: is not a whole number of at least 1 (0)" in text
    assert "config.json max_position_embeddings: is missing" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_encoder_decoder": True}, "is_encoder_decoder: is true. Only decoder-only"),
        ({"layer_types": ["full_attention", "linear_attention"] * 2}, "linear_attention"),
        (
            {"layer_types": ["sliding_attention"] * 12, "sliding_window": 8},
            "layer_types: does not have one type per layer (12 of",
        ),
        ({"layer_types": 5}, "layer_types: is not a list (5)"),
        ({"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": 3}, "mlp_only_layers: is not a list (3)"),
        ({"num_key_value_heads": 3}, "does not divide num_attention_heads (3 and 8)"),
        ({"num_local_experts": 4}, "num_experts_per_tok: is missing"),
        ({"num_local_experts": 4, "num_experts_per_tok": 5}, "larger than the number of experts (5 of 4)"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "quantization_config.quant_method: is not supported ('awq')",
        ),
        ({"torch_dtype": "int3"}, "torch_dtype: is not supported ('int3')"),
        ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern: belongs to a model with recurrent layers"),
        ({"mamba_num_heads": 8}, "mamba_num_heads: belongs to a model with recurrent layers"),
        ({"ssm_state_size": 8}, "ssm_state_size: belongs to a model with recurrent layers"),
        ({"linear_attn_config": {}}, "linear_attn_config: belongs to a model with recurrent layers"),
        ({"attn_type_list": [0, 0, 0, 1]}, "attn_type_list: belongs to a model with recurrent layers"),
        ({"moe_num_experts": 64, "moe_k": 6}, "moe_num_experts: describes experts in a form that is not supported"),
        (
            {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2},
            "interleave_moe_layer_step: describes experts in a form that is not supported",
        ),
        ({"vocab_size": 10**320}, "vocab_size: is too large. Allowed: at most 2147483647"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers: is too large. Allowed: at most 10000"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: is not true or false ('yes')"),
    ],
)
def test_unsupported_configurations_are_refused_with_the_key(changes: dict[str, Any], message: str) -> None:
    assert message in problems(**changes)


def test_a_list_of_attention_in_every_layer_changes_nothing() -> None:
    listed = model_from_config(tiny(attn_type_list=[1] * 4), name="tiny", source="-")
    assert listed == model_from_config(tiny(), name="tiny", source="-")


def test_multimodal_files_are_read_from_their_text_part() -> None:
    wrapped = {"model_type": "gemma3", "vision_config": {}, "text_config": tiny(model_type="gemma3_text", head_dim=16)}
    model = model_from_config(wrapped, name="wrapped", source="config.json")
    assert (model.num_layers, model.head_dim, model.tied_embeddings) == (4, 16, True)
    with pytest.raises(ConfigError, match=r"config\.json text_config\.vocab_size: is missing"):
        model_from_config({"text_config": tiny(vocab_size=...)}, name="wrapped", source="config.json")


def test_tying_and_eight_bit_weights_change_size_as_they_should() -> None:
    free = model_from_config(tiny(), name="free", source="-")
    tied = model_from_config(tiny(tie_word_embeddings=True), name="tied", source="-")
    assert free.parameters - tied.parameters == 1000 * 64
    quantized = model_from_config(tiny(quantization_config={"quant_method": "fp8"}), name="q", source="-")
    assert (quantized.dtype, quantized.kv_dtype) == ("fp8", "bfloat16")
    assert quantized.weight_bytes * 2 == free.weight_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PUBLISHED_PARAMETERS))
def test_transformers_builds_the_same_number_of_parameters(name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from importlib import resources

    values = json.loads((resources.files("vajra_py.latency") / "models" / f"{name}.json").read_text("utf-8"))
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in module.parameters()) == load_model(name).parameters
