"""Read a `ModelSpec` from a Hugging Face `config.json`.

Keys that determine time or memory are required; a key that is missing, ill-typed or unsupported raises a `ConfigError`
that names file and key. Defaults are those of the model's class in transformers, and only exist for keys that published
files omit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from vajra_py.errors import ConfigError, Problem
from vajra_py.latency.hardware.model_spec import DTYPE_BYTES, Experts, LatentAttention, ModelSpec

_DTYPE_NAMES = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "float8_e4m3fn": "fp8",
    "fp8": "fp8",
}
_RECURRENT_KEYS = (
    "ssm_cfg",
    "mamba_d_state",
    "attn_layer_period",
    "linear_num_key_heads",
    "linear_attn_config",
    "hybrid_override_pattern",
    "mamba_num_heads",
    "ssm_state_size",
)
_RECURRENT = ("belongs to a model with recurrent layers", "Only attention in every layer is supported")
_UNREAD_EXPERT_KEYS = ("moe_num_experts", "interleave_moe_layer_step")
"""Keys by which configurations of ERNIE 4.5 and of Llama 4 are recognised and refused: they describe experts (shared
ones, for example) by names or with meanings that are not read here."""
_NUM_EXPERTS_KEYS = ("num_local_experts", "n_routed_experts", "num_experts")
_LARGEST_COUNT = 2**31 - 1
_MOST_LAYERS = 10_000
"""Upper bound of the number of layers; code that goes through all layers takes long with more."""


class _Family(Struct, frozen=True):
    """Properties of a model family that its configuration files do not state, or may omit."""

    norms_per_layer: int = 2
    norm_parameters: int = 1
    """Number of parameters of a norm per hidden value: 2 for layer norms with a bias."""
    head_norms: bool = False
    """True if queries and keys are normalised per head."""
    qkv_bias: bool = False
    all_biases: bool = False
    mlp_matrices: int = 3
    tied: bool = False
    head_dim: int | None = None
    sliding_every: int = 1
    """Period of the layers with full attention (6: every sixth layer) if the file has a window but no list of
    layer types; 1: every layer has the window."""


_FAMILIES: dict[str, _Family] = {
    "qwen2": _Family(qkv_bias=True),
    "qwen2_moe": _Family(qkv_bias=True),
    "qwen3": _Family(head_norms=True, head_dim=128),
    "qwen3_moe": _Family(head_norms=True),
    "gemma": _Family(tied=True, head_dim=256),
    "gemma2": _Family(norms_per_layer=4, tied=True, head_dim=256, sliding_every=2),
    "gemma3_text": _Family(norms_per_layer=4, head_norms=True, tied=True, head_dim=256, sliding_every=6),
    "cohere": _Family(norms_per_layer=1, tied=True),
    "cohere2": _Family(norms_per_layer=1, tied=True, sliding_every=4),
    "starcoder2": _Family(norm_parameters=2, all_biases=True, mlp_matrices=2, tied=True),
    "gpt_neox": _Family(norm_parameters=2, all_biases=True, mlp_matrices=2),
    "phi": _Family(norms_per_layer=1, norm_parameters=2, all_biases=True, mlp_matrices=2),
    "nemotron": _Family(norm_parameters=2, mlp_matrices=2),
}


class _Keys:
    """Reader of one configuration's keys that collects their problems."""

    def __init__(self, source: str, values: Mapping[str, Any], prefix: str) -> None:
        self.values = values
        self.problems: list[Problem] = []
        self._source = source
        self._prefix = prefix

    def problem(self, key: str, message: str, allowed: str | None = None) -> None:
        self.problems.append(Problem(f"{self._source} {self._prefix}{key}", message, allowed))

    def count(self, *names: str, default: int | None = None, low: int = 1, high: int = _LARGEST_COUNT) -> int:
        """Return the value of the first of `names` that is set, else the default.

        Record a problem if there is neither, or if the value is not an integer from `low` to `high`.
        """
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                self.problem(name, f"is not a whole number of at least {low} ({value!r})")
                return low
            if value > high:
                self.problem(name, "is too large", f"Allowed: at most {high}")
                return low
            return value
        if default is None:
            self.problem(names[0], "is missing", "The key is needed to size the model" + _also(names))
            return low
        return default

    def entries(self, name: str) -> list[Any]:
        """Return the list under `name`, empty if it is not set; record a problem if the value is not a list."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, list | tuple):
            self.problem(name, f"is not a list ({value!r})")
            return []
        return list(value or ())

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            self.problem(name, f"is not true or false ({value!r})")
            return default
        return value


def _also(names: tuple[str, ...]) -> str:
    return f"; {' or '.join(names[1:])} would do as well" if len(names) > 1 else ""


def model_from_config(values: Mapping[str, Any], *, name: str, source: str) -> ModelSpec:
    """Return the model described by the contents of a `config.json`; `source` (a file) is named in errors.

    Raises:
        ConfigError: a required key is missing or ill-typed, or the architecture is not a decoder-only transformer with
            attention in every layer; reports all problems at once.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(Problem(source, f"is not a JSON object ({type(values).__name__})"))
    prefix = ""
    if isinstance(values.get("text_config"), Mapping):
        prefix = "text_config."
        values = {**{k: v for k, v in values.items() if k != "text_config"}, **values["text_config"]}
    keys = _Keys(source, values, prefix)
    spec = _read(keys, name)
    if keys.problems:
        raise ConfigError(keys.problems)
    return spec


def _read(keys: _Keys, name: str) -> ModelSpec:
    family = _FAMILIES.get(str(keys.values.get("model_type", "")), _Family())
    layer_types = keys.entries("layer_types")
    _refuse_unsupported(keys, layer_types)
    hidden = keys.count("hidden_size")
    num_layers = keys.count("num_hidden_layers", high=_MOST_LAYERS)
    num_heads = keys.count("num_attention_heads")
    num_kv_heads = keys.count("num_key_value_heads", default=1 if keys.values.get("multi_query") is True else num_heads)
    latent = _latent(keys)
    head_dim = keys.count("head_dim", default=family.head_dim or max(1, hidden // num_heads))
    if latent is None and num_heads % num_kv_heads:
        keys.problem("num_key_value_heads", f"does not divide num_attention_heads ({num_kv_heads} and {num_heads})")
    experts, intermediate = _feed_forward(keys, num_layers)
    window, num_sliding = _sliding(keys, family, num_layers, layer_types)
    dtype = _dtype(keys)
    query, key_value = num_heads * head_dim, num_kv_heads * head_dim
    extra = family.norms_per_layer * family.norm_parameters * hidden + (2 * head_dim if family.head_norms else 0)
    if latent is not None:
        extra += latent.kv_rank + (latent.q_rank or 0)
    elif family.qkv_bias or family.all_biases or keys.flag("attention_bias", False):
        extra += query + 2 * key_value + (0 if family.qkv_bias else hidden)
    if family.all_biases or keys.flag("mlp_bias", False):
        extra += (family.mlp_matrices - 1) * intermediate + hidden
    return ModelSpec(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden,
        vocab_size=keys.count("vocab_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        max_model_len=keys.count("max_position_embeddings", "max_sequence_length", "seq_length"),
        tied_embeddings=keys.flag("tie_word_embeddings", family.tied),
        mlp_matrices=family.mlp_matrices,
        extra_layer_parameters=extra,
        sliding_window=window,
        num_sliding_layers=num_sliding,
        experts=experts,
        latent=latent,
        dtype=dtype,
        kv_dtype="bfloat16" if dtype == "fp8" else dtype,
    )


def _refuse_unsupported(keys: _Keys, layer_types: list[Any]) -> None:
    if keys.values.get("is_encoder_decoder") is True:
        keys.problem("is_encoder_decoder", "is true", "Only decoder-only models are supported")
    known = ("full_attention", "sliding_attention")
    unknown = sorted({str(kind) for kind in layer_types} - set(known))
    if unknown:
        keys.problem(
            "layer_types",
            f"has layers that are not attention as known here ({', '.join(unknown)})",
            f"Allowed: {', '.join(known)}",
        )
    for key in _RECURRENT_KEYS:
        if keys.values.get(key) is not None:
            keys.problem(key, *_RECURRENT)
    if any(kind != 1 for kind in keys.entries("attn_type_list")):
        keys.problem("attn_type_list", *_RECURRENT)
    for key in _UNREAD_EXPERT_KEYS:
        if keys.values.get(key):
            keys.problem(
                key, "describes experts in a form that is not supported", f"Allowed: {', '.join(_NUM_EXPERTS_KEYS)}"
            )


def _latent(keys: _Keys) -> LatentAttention | None:
    if keys.values.get("kv_lora_rank") is None:
        return None
    return LatentAttention(
        kv_rank=keys.count("kv_lora_rank"),
        rope_head_dim=keys.count("qk_rope_head_dim"),
        nope_head_dim=keys.count("qk_nope_head_dim"),
        v_head_dim=keys.count("v_head_dim"),
        q_rank=keys.count("q_lora_rank") if keys.values.get("q_lora_rank") is not None else None,
    )


def _feed_forward(keys: _Keys, num_layers: int) -> tuple[Experts | None, int]:
    """Return the experts (None if there are none), and the width of the dense layers (0 if every layer has experts)."""
    values = keys.values
    num_experts = next((values[k] for k in _NUM_EXPERTS_KEYS if values.get(k)), 0)
    if num_experts in (0, 1):
        return None, keys.count("intermediate_size")
    count = keys.count(*_NUM_EXPERTS_KEYS)
    per_token = keys.count("num_experts_per_tok", "num_experts_per_token", "moe_topk")
    if per_token > count:
        keys.problem("num_experts_per_tok", f"is larger than the number of experts ({per_token} of {count})")
    width = keys.count("moe_intermediate_size", "intermediate_size")
    shared = keys.count("n_shared_experts", default=0, low=0) * width
    shared = shared or keys.count("shared_expert_intermediate_size", default=0, low=0)
    num_moe = _num_expert_layers(keys, num_layers)
    return (
        Experts(
            num_layers=num_moe,
            num_experts=count,
            experts_per_token=per_token,
            intermediate_size=width,
            shared_intermediate_size=shared,
            gates_shared=values.get("shared_expert_intermediate_size") is not None,
        ),
        keys.count("intermediate_size") if num_moe < num_layers else 0,
    )


def _num_expert_layers(keys: _Keys, num_layers: int) -> int:
    first_dense = keys.count("first_k_dense_replace", default=0, low=0)
    every = keys.count("decoder_sparse_step", default=keys.count("moe_layer_freq", default=1))
    only_dense = keys.entries("mlp_only_layers")
    qwen = "decoder_sparse_step" in keys.values
    return sum(
        1
        for layer in range(num_layers)
        if layer >= first_dense and layer not in only_dense and (layer + int(qwen)) % every == 0
    )


def _sliding(keys: _Keys, family: _Family, num_layers: int, layer_types: list[Any]) -> tuple[int | None, int]:
    """Return (window in tokens, number of layers with this window); (None, 0) without a window."""
    values = keys.values
    if layer_types and len(layer_types) != num_layers:
        message = f"does not have one type per layer ({len(layer_types)} of {num_layers})"
        keys.problem("layer_types", message, f"As many types as num_hidden_layers: {num_layers}")
    if values.get("sliding_window") is None or values.get("use_sliding_window") is False:
        return None, 0
    window = keys.count("sliding_window")
    if layer_types:
        num_sliding = sum(1 for kind in layer_types if kind == "sliding_attention")
    elif values.get("use_sliding_window") is True:
        num_sliding = max(0, num_layers - keys.count("max_window_layers", default=0, low=0))
    else:
        every = keys.count("sliding_window_pattern", "_sliding_window_pattern", default=family.sliding_every)
        num_sliding = num_layers - (num_layers // every if every > 1 else 0)
    return (window, num_sliding) if num_sliding else (None, 0)


def _dtype(keys: _Keys) -> str:
    quantization = keys.values.get("quantization_config")
    if isinstance(quantization, Mapping):
        method = quantization.get("quant_method")
        if method != "fp8":
            keys.problem(
                "quantization_config.quant_method",
                f"is not supported ({method!r})",
                "Allowed: fp8, or no quantization_config",
            )
        return "fp8"
    key = "dtype" if keys.values.get("dtype") is not None else "torch_dtype"
    given = keys.values.get(key)
    if given is None:
        return "bfloat16"
    name = _DTYPE_NAMES.get(str(given).removeprefix("torch."))
    if name is None:
        keys.problem(key, f"is not supported ({given!r})", f"Allowed: {', '.join(DTYPE_BYTES)}")
        return "bfloat16"
    return name
