"""Compare whole runs of this simulator with BLIS, the simulator of inference-sim (Go): CPU time of processes, in alternating rounds.

python benchmarks/peer.py --blis FOLDER [--azure AzureLLMInferenceTrace_conv.csv]

FOLDER is a checkout of https://github.com/inference-sim/inference-sim with its program built there: `go build -o blis .`. Both read the
same requests from a file and simulate Llama-3.1-8B on A100s with round-robin routing, at most 128 requests and 512 tokens a step and the
same KV memory, by latency models of their own. Each writes its default files: BLIS a summary and its results by request, this simulator
also every step and decision.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from machine import processor
from simulate import drawn, experiment

from vajra_py.config import config_from_mapping
from vajra_py.runtime.support.seeds import SeedTree
from vajra_py.workload import Workload, build_workload

Case = tuple[dict[str, Any], int]
"""Workload and number of replicas."""

BATCH, CHUNK, BLOCKS, BLOCK_SIZE = 128, 512, 20_000, 16
ROW: Mapping[str, str | int] = {
    **{"request_id": 0, "client_id": "c", "tenant_id": "", "slo_class": "", "session_id": "", "round_index": 0},
    **{"prefix_group": "", "prefix_length": 0, "streaming": "false", "input_tokens": 0, "output_tokens": 0},
    **{"text_tokens": 0, "image_tokens": 0, "audio_tokens": 0, "video_tokens": 0, "reason_ratio": 0, "model": ""},
    **{"deadline_us": 0, "server_input_tokens": 0, "arrival_time_us": 0, "send_time_us": 0, "first_chunk_time_us": 0},
    **{"last_chunk_time_us": 0, "num_chunks": 0, "status": "ok", "error_message": "", "finish_reason": ""},
}
"""A line of BLIS's trace, version 3: columns in order, with values that are the same for all requests."""
HEADER = "trace_version: 3\ntime_unit: microseconds\nmode: generated\nwarm_up_requests: 0\n"


def cases(azure: Path | None) -> dict[str, Case]:
    """Return the measured runs by name."""
    found: dict[str, Case] = {
        "2,000 requests, 1 replica": (drawn(2_000, 5.5), 1),
        "16,000 requests, 8 replicas": (drawn(16_000, 44.5), 8),
    }
    if azure is not None:
        found["Azure conversations, 4 replicas"] = ({"type": "azure", "path": str(azure.resolve())}, 4)
    return found


def write_files(folder: Path, case: Case) -> None:
    """The requests for both, and this simulator's experiment."""
    source, num_replicas = case
    config = config_from_mapping(experiment(source, num_replicas))
    workload: Workload = build_workload(config.workload, SeedTree(0).child("workload").stream, Path.cwd())
    columns = workload.columns
    rows = [
        (round(float(at) * 1e6), int(prompt), int(output))
        for at, prompt, output in zip(
            columns.arrived_at, columns.num_prompt_tokens, columns.num_output_tokens, strict=True
        )
    ]
    with (folder / "requests.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("arrived_at", "num_prompt_tokens", "num_output_tokens"))
        writer.writerows((at / 1e6, prompt, output) for at, prompt, output in rows)
    (folder / "trace.yaml").write_text(HEADER)
    with (folder / "trace.csv").open("w", newline="") as file:
        lines = csv.DictWriter(file, list(ROW))
        lines.writeheader()
        for index, (at, prompt, output) in enumerate(rows):
            sizes = {"request_id": index, "input_tokens": prompt, "output_tokens": output}
            lines.writerow({**ROW, **sizes, "arrival_time_us": at, "send_time_us": at})
    mapping = experiment({"type": "csv", "path": "requests.csv"}, num_replicas)
    mapping["replica"] = {
        "max_batch_size": BATCH,
        "max_batch_tokens": CHUNK,
        "memory": {"num_blocks": BLOCKS, "block_size": BLOCK_SIZE},
    }
    mapping["backend"]["simulator"]["latency"]["model"] = "llama-3.1-8b"
    (folder / "experiment.json").write_text(json.dumps(mapping))


def own_command(folder: Path, number: int) -> list[str]:
    """`vajra run` with default outputs."""
    arguments = ["run", str(folder / "experiment.json"), "--set", f"output.dir={folder}/run-{number}", "--quiet"]
    return [sys.executable, "-c", f"from vajra_py.cli.main import main; main({arguments!r})"]


def peers_command(blis: Path, folder: Path, num_replicas: int) -> list[str]:
    """`blis replay` of the same requests with a file of results."""
    return [
        str((blis / "blis").resolve()),
        *("replay", "--trace-header", str(folder / "trace.yaml"), "--trace-data", str(folder / "trace.csv")),
        *("--model", "meta-llama/llama-3.1-8b-instruct", "--hardware", "A100-80", "--tp", "1"),
        *("--model-config-folder", "model_configs/llama-3.1-8b-instruct", "--hardware-config", "hardware_config.json"),
        *("--latency-model", "trained-physics", "--num-instances", str(num_replicas)),
        *(
            "--cache-signal-delay",
            "0",
        ),  # else it copies the prefix cache's index every 50 ms, for scorers that are not used
        *("--max-num-seqs", str(BATCH), "--max-num-batched-tokens", str(CHUNK)),
        *("--total-kv-blocks", str(BLOCKS), "--block-size-in-tokens", str(BLOCK_SIZE)),
        *("--horizon", str(10**15), "--results-path", str(folder / "blis.json")),
    ]


def cpu_s(command: Sequence[str], folder: Path) -> float:
    """Run a command and return the CPU seconds, user and system, of it and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blis", type=Path, required=True, help="checkout of inference-sim, built")
    parser.add_argument("--azure", type=Path, help="the Azure conversation trace of 2023")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    print(f"{processor()}, {os.cpu_count()} cores; CPU seconds of whole processes, median of {given.rounds} rounds")
    for name, case in cases(given.azure).items():
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            write_files(folder, case)
            peers = peers_command(given.blis, folder, case[1])
            pairs = [(cpu_s(own_command(folder, n), folder), cpu_s(peers, given.blis)) for n in range(given.rounds)]
            own, other = (statistics.median(times) for times in zip(*pairs, strict=True))
            speed = statistics.median(theirs / ours for ours, theirs in pairs)
            print(f"{name}: {own:.2f} s, BLIS {other:.2f} s: {speed:.2f} times its speed", flush=True)


if __name__ == "__main__":
    main()
