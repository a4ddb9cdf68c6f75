"""Write a tiny model directory with random weights and a real tokenizer.

Invariants:
    - The same family, size and seed give the same weights, tokenizer and chat template.
    - Every id of the model's vocabulary has a token in the tokenizer, so that any sampled token can be decoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from vajra_py.errors import ConfigError, Problem, did_you_mean

_BOS, _EOS, _PAD = "<|begin|>", "<|end|>", "<|pad|>"
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
_VOCAB_SIZE = 1024
_CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('Roles are system, user and assistant, not ' + message['role']) }}"
    "{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] | trim }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, slots=True)
class TinySize:
    """Dimensions of a small model: layers, hidden size, inner size of the MLP, query and KV heads, and head width."""

    num_layers: int
    hidden_size: int
    inner_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


SIZES = {
    "1m": TinySize(4, 128, 352, 4, 2, 32),
    "10m": TinySize(8, 320, 896, 8, 2, 40),
    "30m": TinySize(8, 512, 1728, 8, 2, 64),
}
"""Sizes, by the approximate number of parameters of a Llama of this size."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 64},
    "gemma2": {"sliding_window": 64, "query_pre_attn_scalar": 32},
    "gemma3_text": {"sliding_window": 64, "query_pre_attn_scalar": 32, "sliding_window_pattern": 3},
    "phi3": {"pad_token_id": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2},
}
"""Model families that can be written, with the settings that each needs besides its size."""


def write_tiny_model(
    directory: str | Path, family: str = "llama", seed: int = 0, size: str = "1m", max_model_len: int = 2048
) -> Path:
    """Write a small model of random weights, with its tokenizer, as a Hugging Face directory; return the directory.

    Args:
        directory: created if absent; must be empty otherwise.
        family: one of `FAMILIES`.
        seed: seed of the weights.
        size: one of `SIZES`.
        max_model_len: number of positions of the model.

    Raises:
        ConfigError: unknown family or size, or a directory that is not empty.
    """
    folder = Path(directory).expanduser()
    _check(folder, family, size)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from vajra_py.engine.compute.model.loading import quiet

    tokenizer = train_tokenizer(max_model_len)
    widths = SIZES[size]
    shape = {
        "hidden_size": widths.hidden_size,
        "intermediate_size": widths.inner_size,
        "num_hidden_layers": widths.num_layers,
        "num_attention_heads": widths.num_heads,
        "num_key_value_heads": widths.num_kv_heads,
        "head_dim": widths.head_dim,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": max_model_len,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        # This range is wide enough that attention visibly affects the logits of an untrained model.
        "initializer_range": 0.08,
        "tie_word_embeddings": False,
    }
    if family == "qwen3_moe":
        shape["moe_intermediate_size"] = widths.inner_size // 2
    config = AutoConfig.for_model(family, **{**shape, **FAMILIES[family]})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    folder.mkdir(parents=True, exist_ok=True)
    with quiet():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train_tokenizer(max_model_len: int = 2048) -> Any:
    """Return a byte-level BPE tokenizer of 1024 tokens with a chat template, trained on this package's sentences."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    text = resources.files("vajra_py.engine.data").joinpath("sentences.txt").read_text(encoding="utf-8")
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=[_BOS, _EOS, _PAD, *_ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(text.splitlines(), trainer)
    core.post_processor = processors.TemplateProcessing(
        single=f"{_BOS} $A", pair=f"{_BOS} $A $B", special_tokens=[(_BOS, core.token_to_id(_BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=_BOS,
        eos_token=_EOS,
        pad_token=_PAD,
        chat_template=_CHAT_TEMPLATE,
        model_max_length=max_model_len,
        clean_up_tokenization_spaces=False,
    )


def _check(folder: Path, family: str, size: str) -> None:
    problems = []
    if family not in FAMILIES:
        problems.append(Problem("family", f"cannot be written ({family!r})", did_you_mean(family, FAMILIES)))
    if size not in SIZES:
        problems.append(Problem("size", f"not a size ({size!r})", f"Allowed: {', '.join(SIZES)}"))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        problems.append(Problem(str(folder), "this is not an empty directory", "Give a new or empty one"))
    if problems:
        raise ConfigError(problems)
