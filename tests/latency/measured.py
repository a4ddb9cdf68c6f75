"""Folders of measured runs with synthetic or simulated times."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from vajra_py.experiment.measured.accuracy import requests_of
from vajra_py.metrics.runs.run_data import RunData

NUM_REQUESTS = 24
MIXTURE = "Qwen/Qwen3-30B-A3B-Instruct-2507"
ENGINE = {
    "model": "meta-llama/Llama-3.1-8B",
    "tensor_parallel_size": 1,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "max_model_len": 4096,
}


def write_run(folder: Path, count: int = NUM_REQUESTS, **meta: Any) -> Path:
    """A measured run whose times are made up, ten requests a second, in pairs with equal prompts."""
    folder.mkdir(parents=True)
    contents = {"model": ENGINE["model"], "vllm_version": "0.19.0", "engine_kwargs": ENGINE, **meta}
    (folder / "meta.json").write_text(json.dumps(contents))
    sizes = np.random.default_rng(3).integers(20, 300, (count, 2))
    with gzip.open(folder / "workload.jsonl.gz", "wt") as workload, (folder / "requests.jsonl").open("w") as requests:
        for index, (prompt, output) in enumerate(sizes.tolist()):
            at = 0.1 * index
            ids = [index // 2] * prompt
            sent = {"input_toks": prompt, "output_toks": output, "arrival_time_ns": int(at * 1e9), "input_tok_ids": ids}
            workload.write(json.dumps(sent) + "\n")
            times = {"arrival_time": 1e9 + at, "queued_ts": 500.0 + at, "scheduled_ts": 500.1 + at}
            ends = {"first_token_ts": 500.2 + at, "last_token_ts": 500.2 + at + 0.01 * (output - 1)}
            row = {"request_id": f"bench-{index}", "input_toks": prompt, "output_toks": output, **times, **ends}
            requests.write(json.dumps(row) + "\n")
    return folder


def as_measured(run: Path, simulated: RunData, slower: float = 1.0) -> None:
    """Replace measured times by simulated ones, with intervals after the first token multiplied by `slower`."""
    served = requests_of(simulated)
    lines = [json.loads(line) for line in (run / "requests.jsonl").read_text().splitlines()]
    assert served.scheduled_at is not None
    for index, row in enumerate(lines):
        row["scheduled_ts"] = 500.0 + served.scheduled_at[index]
        row["first_token_ts"] = 500.0 + served.first_token_at[index]
        spent = served.last_token_at[index] - served.first_token_at[index]
        row["last_token_ts"] = row["first_token_ts"] + slower * spent
    (run / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))


def as_mixture(bundle: Path) -> None:
    """Make the bundle one of a model with experts."""
    tp1, meta = bundle / "tp1", bundle / "meta.yaml"
    (tp1 / "moe.csv").write_text("tokens,activated_experts,time_us\n1,8,50\n2048,8,80\n1,128,800\n2048,128,1000\n")
    meta.write_text(meta.read_text().replace("meta-llama/Llama-3.1-8B", MIXTURE))
    lines = (tp1 / "dense.csv").read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("gate_up", "act_fn", "down"))]
    (tp1 / "dense.csv").write_text("\n".join(kept) + "\n")


def as_shared_prompt(run: Path) -> None:
    """Give all requests of the run one and the same prompt."""
    ids = list(range(1000, 1128))
    sent = [json.loads(line) for line in gzip.decompress((run / "workload.jsonl.gz").read_bytes()).splitlines()]
    got = [json.loads(line) for line in (run / "requests.jsonl").read_text().splitlines()]
    with gzip.open(run / "workload.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({**row, "input_toks": len(ids), "input_tok_ids": ids}) + "\n" for row in sent)
    (run / "requests.jsonl").write_text("".join(json.dumps({**row, "input_toks": len(ids)}) + "\n" for row in got))


def whole_experts_us(tokens: float, activated: float) -> float:
    """Between the rows of `as_mixture`."""
    few, many = 50 + 30 * (tokens - 1) / 2047, 800 + 200 * (tokens - 1) / 2047
    return few + (many - few) * (activated - 8) / 120
