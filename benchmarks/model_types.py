"""Which of transformers' causal language models run on this engine?

Makes a very small model of every type with random weights, loads it as the engine would, and prints what the self-check says:
`python benchmarks/model_types.py [TYPE ...]`. The list in docs/models.md comes from here.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from vajra_py.engine.compute import RunnerOptions, load_runner
from vajra_py.engine.compute.loading import quiet
from vajra_py.errors import VajraError

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
    "sliding_window": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_kv_shared_layers": 0,
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
}
"""What keeps a model small. A type takes those of these that its configuration has."""
TIMEOUT_S = 60


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raises TimeoutError when the block takes longer."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def small_config(model_type: str) -> Any:
    """A small configuration of this type."""
    default = AutoConfig.for_model(model_type)
    names = set(dir(default))
    known = {name: value for name, value in SMALL.items() if name in names}
    if "qk_rope_head_dim" in known:  # these derive it
        known.pop("head_dim", None)
        known["num_key_value_heads"] = known["num_attention_heads"]
    return AutoConfig.for_model(model_type, **known)


def attempt(model_type: str) -> tuple[str, str]:
    """("fused", "transformers", "refused" or "skipped", why)."""
    try:
        with quiet(), limited(TIMEOUT_S):
            config = small_config(model_type)
    except Exception as error:
        return "skipped", f"no small configuration ({type(error).__name__}: {str(error)[:80]})"
    with tempfile.TemporaryDirectory() as folder:
        try:
            with quiet(), limited(TIMEOUT_S):
                config.save_pretrained(folder)
                runner = load_runner(RunnerOptions(folder, random_weights=True))
        except VajraError as error:
            return "refused", str(error).partition(": ")[2].replace(folder, "")[:200]
        except Exception as error:
            return "skipped", f"{type(error).__name__}: {str(error)[:100]}"
    return runner.facts.forward, f"{runner.facts.num_layers} layers"


def main() -> None:
    """Print one line a type, then a summary."""
    torch.set_num_threads(1)
    results: dict[str, list[str]] = {}
    for model_type in sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        outcome, reason = attempt(model_type)
        results.setdefault(outcome, []).append(model_type)
        print(f"{model_type:32s} {outcome:12s} {reason}", flush=True)
    print(f"\ntransformers {transformers.__version__}, torch {torch.__version__}")
    for outcome, types in sorted(results.items()):
        print(f"{outcome} ({len(types)}): {', '.join(types)}")


if __name__ == "__main__":
    main()
