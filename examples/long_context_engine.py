"""Short chats beside long documents on the engine: requests spread over two KV-parallel groups, and the simulator's prediction.

Run `python examples/long_context_engine.py [FOLDER]`. It writes a tiny model, computes the workload on two processes on CPUs
under three combinations of policies, and prints what came out beside what the simulator predicts. Its step times are fitted
to the steps of the first run alone, so the other two are predicted from a run of other policies.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

import vajra_py as vajra
from vajra_py.engine.tiny import write_tiny_model
from vajra_py.metrics import RunData

POLICIES = (("fcfs", "fixed_chunk"), ("lrs", "dynamic_chunk"), ("lrs", "space_sharing"))
PARAMS: dict[str, Any] = {
    "fixed_chunk": {"chunk_size": 256},
    "dynamic_chunk": {"target_batch_time_s": 0.05},
    "space_sharing": {"target_batch_time_s": 0.05, "long_seq_kv_cache_len_threshold": 1024},
}
ROUGH = {"type": "affine", "base_s": 0.01, "per_token_s": 1e-4}
COLUMNS = (
    ("chats TTFT P50", "by_slo_class.chat.ttft_s.p50"),
    ("chats TTFT P90", "by_slo_class.chat.ttft_s.p90"),
    ("documents TTFT P50", "by_slo_class.document.ttft_s.p50"),
    ("documents E2E P50", "by_slo_class.document.e2e_s.p50"),
)


def settings(policies: tuple[str, str], backend: dict[str, Any]) -> dict[str, Any]:
    """The experiment: a document of up to 3,500 tokens takes both groups, a chat one of them."""
    lengths = {"type": "uniform", "min": 16, "max": 96}
    return {
        "version": 1,
        "seed": 11,
        "scheduling": {
            "request_prioritizer": policies[0],
            "replicaset_scheduler": "round_robin",
            "replica_scheduler": {"policy": policies[1], "params": PARAMS[policies[1]]},
        },
        "replica": {
            "max_model_len": 4096,
            "max_batch_size": 16,
            "kv_parallel": {"groups": 2, "group_tokens": 2048},
            "memory": {"num_blocks": 640, "prefix_cache": {"enabled": False}},
        },
        "workload": {
            "type": "merge",
            "workloads": [
                {
                    "type": "synthetic",
                    "name": "chats",
                    "arrivals": {"type": "poisson", "rate": 3},
                    "num_requests": 30,
                    "prompt_tokens": lengths,
                    "output_tokens": {"type": "uniform", "min": 4, "max": 12},
                    "slo_classes": [{"name": "chat"}],
                },
                {
                    "type": "synthetic",
                    "name": "documents",
                    "arrivals": {"type": "poisson", "rate": 0.4},
                    "num_requests": 4,
                    "prompt_tokens": {"type": "uniform", "min": 1500, "max": 3500},
                    "output_tokens": {"type": "uniform", "min": 4, "max": 12},
                    "slo_classes": [{"name": "document"}],
                },
            ],
        },
        "backend": backend,
    }


def fitted(run: RunData) -> dict[str, Any]:
    """An affine latency model of a run's steps: a part of each, each token, each cached token and each pair of a prompt."""
    steps = run.steps_frame("duration_s", "decode_tokens", "prefill_tokens", "decode_context_tokens")
    tokens = steps["decode_tokens"] + steps["prefill_tokens"]
    pairs = [
        sum(count * before + count * (count + 1) / 2 for _, count, before, _ in row["chunks"] if count > 1)
        for row in run.decisions()
    ]
    terms = np.stack([np.ones(len(steps)), tokens, steps["decode_context_tokens"], np.array(pairs)], 1)
    measured = steps["duration_s"].to_numpy()
    (base, token, context, pair), _ = nnls(
        terms / measured[:, None], np.ones(len(steps))
    )  # errors relative to each step
    times = {"per_token_s": token, "per_decode_context_token_s": context, "per_prefill_pair_s": pair}
    return {"type": "affine", "base_s": base or 1e-6, **times}


def experiment(policies: tuple[str, str], backend: dict[str, Any], folder: Path, name: str) -> RunData:
    """One run under these policies."""
    config = vajra.load(settings(policies, backend), {"output.dir": str(folder), "name": name})
    return vajra.run(config, overwrite=True)


def main() -> None:
    """Run, fit, predict, print."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs") / "long-context-engine"
    model = folder / "model"
    if not model.exists():
        write_tiny_model(model, max_model_len=4096)
    engine = {"engine": {"model": str(model), "num_threads": 1, "latency": ROUGH}}
    latency: dict[str, Any] | None = None
    print("| policies | | " + " | ".join(title + " (s)" for title, _ in COLUMNS) + " |")
    print("|---|---|" + "--:|" * len(COLUMNS))
    for policies in POLICIES:
        name = "-".join(policies)
        computed = experiment(policies, engine, folder, name)
        latency = latency or fitted(computed)
        told = {"simulator": {"latency": latency, "predictions": ROUGH}}
        predicted = experiment(policies, told, folder, f"{name}-simulated")
        for kind, run in (("engine", computed), ("simulator", predicted)):
            values = " | ".join(f"{run.summary.value(path):.3f}" for _, path in COLUMNS)
            print(f"| {' + '.join(policies)} | {kind} | {values} |")


if __name__ == "__main__":
    main()
