"""Find the causal language models of transformers that run on this engine.

Makes a very small model of every type with random weights, loads it as the engine would, and prints the result of the self-check:
`python benchmarks/model_types.py [TYPE ...]`; `--write docs/reference/models.md` makes the page of it. Takes some ten minutes.
"""

from __future__ import annotations

import argparse
import re
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from vajra_py.engine.compute import RunnerOptions, load_runner
from vajra_py.engine.compute.model.loading import quiet
from vajra_py.errors import ConfigError, VajraError

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
    "num_kv_shared_layers": 2,
    "n_shared_experts": 1,
    "attention_chunk_size": 16,
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "vocab_size_per_layer_input": 128,
}
"""Settings that keep a model small; only those that a type's configuration has are used."""
USUAL: dict[str, dict[str, Any]] = {
    name: {"layer_types": ["conv", "full_attention", "conv", "full_attention"]} for name in ("lfm2", "lfm2_moe")
} | {
    "phi4_multimodal": {  # encoders that are not used for text: 850 million parameters by default
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        "audio_config": {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2},
    }
}
"""Settings of published models of a type that differ from its defaults."""
CPU_LIMIT_S = 60
FUSED, MODULES, REFUSED, UNTRIED = "fused", "transformers", "refused", "untried"
_NOT_MADE = ("transformers cannot make this model", "transformers cannot read this configuration")


class OutOfTimeError(BaseException):
    """A type took too long. Not an `Exception`, so that nothing takes it for the model's own failure."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise `OutOfTimeError` if the block takes more processor time than this."""

    def stop(*_: object) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def small_config(model_type: str) -> Any:
    """A small configuration of this type: everything of `SMALL` that it takes."""
    default = AutoConfig.for_model(model_type)
    known = {name: value for name, value in SMALL.items() if takes(default, name)} | USUAL.get(model_type, {})
    if "qk_rope_head_dim" in known:  # these derive it
        known.pop("head_dim", None)
        known["num_key_value_heads"] = known["num_attention_heads"]
    while True:
        try:
            return AutoConfig.for_model(model_type, **known)
        except (AttributeError, NotImplementedError) as error:  # derived settings: they have no setter
            named = [name for name in known if re.search(rf"['`]{name}\b", str(error))]
            if not named:
                raise
            del known[named[0]]


def takes(config: Any, name: str) -> bool:
    """Return True if a configuration has a setting of that name."""
    try:
        getattr(config, name)
    except AttributeError:
        return False
    except RuntimeError:  # it has one for each layer
        return False
    return True


def attempt(model_type: str) -> tuple[str, str]:
    """Return the outcome for a type (one of the four), and its reason."""
    folder = ""
    try:
        with quiet(), limited(CPU_LIMIT_S), tempfile.TemporaryDirectory() as folder:
            try:
                small_config(model_type).save_pretrained(folder)
            except Exception as error:
                return UNTRIED, f"no small configuration of it could be made ({one_line(error)})"
            runner = load_runner(RunnerOptions(folder, random_weights=True))
            return runner.facts.forward, ""
    except ConfigError as error:
        reason = error.problems[0].message.replace(folder, "")
        return (UNTRIED if reason.startswith(_NOT_MADE) else REFUSED), reason.partition(f"({model_type}): ")[
            2
        ] or reason
    except (VajraError, OutOfTimeError) as error:
        return UNTRIED, one_line(error) or f"took more than {CPU_LIMIT_S} s"


def one_line(error: BaseException) -> str:
    """The beginning of an error's text."""
    return " ".join(str(error).split())[:120]


def page(results: Mapping[str, tuple[str, str]]) -> str:
    """docs/reference/models.md."""
    by_outcome: dict[str, list[str]] = {FUSED: [], MODULES: [], REFUSED: [], UNTRIED: []}
    for model_type, (outcome, _) in results.items():
        by_outcome[outcome].append(model_type)

    def names(outcome: str) -> str:
        return ", ".join(f"`{name}`" for name in by_outcome[outcome])

    def by_initial(outcome: str) -> str:
        groups = groupby(sorted(by_outcome[outcome]), key=lambda name: name[0])
        return "\n".join(f"- {', '.join(f'`{name}`' for name in group)}" for _, group in groups)

    def table(outcome: str) -> str:
        rows = (f"| `{name}` | {results[name][1].replace('|', '/')} |" for name in by_outcome[outcome])
        return "\n".join(["| type | reason |", "|---|---|", *rows])

    return PAGE.format(
        date=datetime.now(UTC).date(),
        transformers=transformers.__version__,
        torch=torch.__version__,
        num_types=len(results),
        num_modules=len(by_outcome[MODULES]),
        num_refused=len(by_outcome[REFUSED]),
        fused=names(FUSED),
        modules=by_initial(MODULES),
        refused=table(REFUSED),
        untried=table(UNTRIED),
    )


PAGE = """# Models

This page lists the types of causal language models of transformers that the [engine](../engine.md)
runs. A model's attention must go through transformers' attention interface.

At each load, a self-check computes a few steps with requests of different lengths over paged KV
memory, and compares the logits with those of the model's own eager attention. If they differ, the
model is refused with the reason. So types that are not listed here may run too.

In the self-check of a mixture of experts, every token goes to the experts that the model's own
forward pass chose for the token. Otherwise, with 16-bit weights, rounding could change the choice
between experts with almost equal router scores.

Multimodal models are refused; use the directory of the text model. Quantized checkpoints
(`quantization_config` in `config.json`) are refused.

The lists were made with transformers {transformers} and torch {torch} ({date}). For each of the {num_types}
types in transformers, a small model with random weights was loaded.
`python benchmarks/model_types.py --write docs/reference/models.md` writes this page.

## Tested families

These types run on the engine's own forward pass: {fused}. Tests compare their logits and tokens with those
of transformers, over schedules with chunks, mixed steps, preemptions and swaps.

## Passed, on transformers' modules ({num_modules})

{modules}

## Notes

Multi-head latent attention (`deepseek_v2`, `deepseek_v3` and others) runs as attention over full
keys and values, not over the latent vector. So the KV of a token of DeepSeek-V3 takes 61 layers ×
128 heads × (192 + 128) × 2 bytes = 5.0 MB in bfloat16. This is 71 times the size of the token's
latent vectors.

For every type that runs, tests compare greedy tokens with those of transformers, over random
schedules of chunks, decodes, preemptions, swaps and shared prefixes. Run more schedules with
`VAJRA_FUZZ_SCHEDULES=20 pytest tests/engine/compute/test_compute_all_families.py`. Replicas of
[several ranks](../engine.md#spread-a-replica-over-several-ranks) support some types only.

## Refused ({num_refused})

{refused}

## Not tried

No small model of these types could be made with transformers' defaults.

{untried}
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line a type, then a summary; or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="default: all")
    parser.add_argument("--write", type=Path, help="the page to write")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results: dict[str, tuple[str, str]] = {}
    for model_type in options.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        results[model_type] = attempt(model_type)
        print(f"{model_type:32s} {results[model_type][0]:12s} {results[model_type][1]}", flush=True)
    print(f"\ntransformers {transformers.__version__}, torch {torch.__version__}")
    if options.write is not None:
        options.write.write_text(page(results))


if __name__ == "__main__":
    main()
