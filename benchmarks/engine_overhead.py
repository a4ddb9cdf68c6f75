"""Measure the engine's time outside of computing.

`python benchmarks/engine_overhead.py [--dtype float32]`: weights are made at random from a Llama 3.2 1B's sizes, 64 requests arrive
at once and decode together; what forming steps and taking in their results takes is held against the whole time of the steps.
Needs some 10 GB of memory in float32, and a minute or two.

`python benchmarks/engine_overhead.py --controller`: the controller's CPU time a decode step at 32, 64 and 256 requests, with a
runner that computes nothing, a tokenizer of bytes and one whose tokens change beside others; text is read at the end, read at
every step, or searched for a stop string (half a minute).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vajra_py import LLM, SamplingParams
from vajra_py.config import config_from_mapping
from vajra_py.contract import EndReason
from vajra_py.engine.compute import RunnerOptions, StepInput, StepOutput
from vajra_py.engine.outputs import Submission
from vajra_py.engine.tiny import write_tiny_model
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.runtime.requests.request import Request

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "engine"))
from fake_runner import FakeRunner

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
POLICIES: dict[str, dict[str, Any]] = {
    "fcfs, fixed_chunk": {"request_prioritizer": "fcfs", "replica_scheduler": "fixed_chunk"},
    "lrs, dynamic_chunk": {
        "request_prioritizer": "lrs",
        "replica_scheduler": {"policy": "dynamic_chunk", "params": {"target_batch_time_s": 2.0}},
    },
}


def measure(folder: Path, policy: str, dtype: str) -> dict[str, float]:
    """Return milliseconds of a step, milliseconds of it outside of computing, and their ratio."""
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


class EmptyRunner:
    """A runner that computes nothing; every token is one of the vocabulary, in turn."""

    def __init__(self, options: RunnerOptions) -> None:
        self._fake = FakeRunner(options)
        self._num_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fake, name)

    def run(self, step: StepInput) -> StepOutput:
        """Return the next tokens without computing."""
        self._num_steps += 1
        slots = [*step.decodes, *(chunk.slot for chunk in step.chunks if chunk.samples)]
        tokens = [100 + (7 * slot + 13 * self._num_steps) % 800 for slot in slots]
        return StepOutput(slots, tokens, 0.0)


def read_text(submission: Submission, request: Request, reason: EndReason | None) -> None:
    """Read a request's text so far, as a client does that streams it."""
    _ = submission.output.text


def controller_ms(folder: Path, batch: int, reads: str, num_steps: int = 256) -> float:
    """Milliseconds of the controller's CPU time a decode step of so many requests."""
    replica = {"max_batch_size": batch, "max_model_len": 1024, "memory": {"num_blocks": 80 * batch}}
    prompts = [[3 + index] * 4 for index in range(batch)]
    stop = ("no output has this",) if reads == "a stop string" else ()
    costs = []
    with LLM(folder, {"replica": replica}, load=EmptyRunner) as llm:
        for count in (num_steps // 4, num_steps + num_steps // 4):
            params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, stop=stop)
            made = list(llm._made(prompts, params, 1))
            if reads == "every step":
                for one in made:
                    one.on_progress = read_text
            start = time.process_time()
            llm._run(made)
            costs.append(time.process_time() - start)
    return (costs[1] - costs[0]) / num_steps * 1e3


def write_tokenizers(place: Path) -> dict[str, Path]:
    """Model folders whose tokenizers write tokens as bytes, and as SentencePiece does."""
    folders = {"bytes": place / "bytes", "beside others": place / "beside"}
    for folder in folders.values():
        write_tiny_model(folder)
    path = folders["beside others"] / "tokenizer.json"
    content = json.loads(path.read_text())
    content["decoder"] = {"type": "Sequence", "decoders": [content["decoder"], {"type": "Fuse"}]}
    path.write_text(json.dumps(content))
    return folders


def measure_controller() -> None:
    """Print the controller's cost a step."""
    with tempfile.TemporaryDirectory() as place:
        for name, folder in write_tokenizers(Path(place)).items():
            for reads in ("the end", "every step", "a stop string"):
                costs = [min(controller_ms(folder, batch, reads) for _ in range(3)) for batch in (32, 64, 256)]
                shown = ", ".join(f"{cost:.2f}" for cost in costs)
                print(f"tokenizer: {name}; text read: {reads}: {shown} ms at 32, 64, 256 requests", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--policies", choices=tuple(POLICIES), action="append", help="default: all")
    parser.add_argument("--controller", action="store_true", help="the controller's CPU time a step, without a model")
    options = parser.parse_args()
    if options.controller:
        measure_controller()
        return
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
