"""How much of a step does the engine spend on anything but computing, at batch 64 of a model of about 1.2 billion parameters?

`python benchmarks/engine_overhead.py [--dtype float32]`: weights are made at random from a Llama 3.2 1B's sizes, 64 requests arrive
at once and decode together; what forming steps and taking in their results takes is held against the whole time of the steps.
Needs some 10 GB of memory in float32, and a minute or two.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from vajra_py.config import config_from_mapping
from vajra_py.experiment.run import run_experiment

BATCH = 64
PROMPT_TOKENS = 8
OUTPUT_TOKENS = 12
SIZES = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
POLICIES = {
    "fcfs, fixed_chunk": {"request_prioritizer": "fcfs", "replica_scheduler": "fixed_chunk"},
    "lrs, dynamic_chunk": {
        "request_prioritizer": "lrs",
        "replica_scheduler": {"policy": "dynamic_chunk", "params": {"target_batch_time_s": 2.0}},
    },
}


def measure(folder: Path, policy: str, dtype: str) -> dict[str, float]:
    """Milliseconds of a step and of what is not computing in it, and the part that this is."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(SIZES))
    config = config_from_mapping(
        {
            "version": 1,
            "name": "overhead",
            "scheduling": {"replicaset_scheduler": "round_robin", **POLICIES[policy]},
            "replica": {"max_batch_size": BATCH, "max_model_len": 128, "memory": {"num_blocks": 8 * BATCH}},
            "workload": {
                "type": "synthetic",
                "arrivals": {"type": "at_once"},
                "num_requests": BATCH,
                "prompt_tokens": {"type": "constant", "value": PROMPT_TOKENS},
                "output_tokens": {"type": "constant", "value": OUTPUT_TOKENS},
            },
            "backend": {
                "engine": {
                    "model": str(model),
                    "random_weights": True,
                    "self_check": False,
                    "dtype": dtype,
                    "latency": {"type": "affine", "base_s": 0.2, "per_token_s": 0.004},
                }
            },
        }
    )
    run = run_experiment(config, folder=folder / "run", overwrite=True)
    num_steps, engine = run.manifest["num_steps"], run.manifest["engine"]
    return {
        "num_steps": num_steps,
        "step_ms": engine["busy_s"] / num_steps * 1e3,
        "not_computing_ms": (engine["busy_s"] - engine["compute_s"]) / num_steps * 1e3,
        "fraction": engine["overhead_fraction"],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--policies", choices=tuple(POLICIES), action="append", help="default: all")
    options = parser.parse_args()
    for policy in options.policies or POLICIES:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(Path(folder), policy, options.dtype)
        print(
            f"{policy}, {options.dtype}: {found['num_steps']} steps of {found['step_ms']:.0f} ms on average, of which "
            f"{found['not_computing_ms']:.2f} ms are not computing ({found['fraction']:.2%})",
            flush=True,
        )


if __name__ == "__main__":
    main()
