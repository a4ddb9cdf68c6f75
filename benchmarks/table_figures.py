"""Figures of devices, and the cost of several prompts in a batch, from the operator tables of `aiconfigurator-core`.

python benchmarks/table_figures.py [--tables FOLDER]

The newest vLLM tables of each system and the newest NCCL. Prints a row for each device: what its largest operators reach of the data sheet's
peaks (docs/reference/devices.md); then how well one chunk with as many query-key pairs stands for several prompts in a batch.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from vajra_py.latency.hardware.devices import DeviceSpec, load_device
from vajra_py.latency.operators.operator_config import AiconfiguratorConfig
from vajra_py.latency.operators.operator_tables import tables_folder, version_key
from vajra_py.latency.operators.profile_bundle import one_chunk

SYSTEMS = ("a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "l40s", "rtx_pro_6000_server")
"""Systems, by their names in the tables."""
SIDE = 4096
"""Side of the matrices whose product counts."""
PROMPT = 8192
"""Tokens of the prompt whose attention counts: 32 heads, 8 KV heads of 128."""
MIN_MATRIX_BYTES = 2.5e8
"""Least size of the matrices that are multiplied with one vector, bytes: far more than caches hold."""
SUM_BYTES = (2**23, 2**25)
"""Sizes of the all-reduces that count, bytes; the mean of both is taken."""


def newest(folder: Path, name: str) -> pd.DataFrame:
    """The table of that name in the folder of the newest version."""
    files = folder.glob(f"*/{name}.parquet")
    return pd.read_parquet(max(files, key=lambda file: version_key(file.parent.name)))


def attention(folder: Path) -> pd.DataFrame:
    """Attention of prompts without context and window, in bfloat16."""
    table = newest(folder / "attention/vllm", "context_attention_perf")
    table = table[(table["step"] == 0) & (table.attn_dtype == "bfloat16") & (table.kv_cache_dtype == "bfloat16")]
    return table[table.window_size == 0] if "window_size" in table else table


def reached(folder: Path, device: DeviceSpec) -> list[str]:
    """Shares of the peaks in products, attention, memory bandwidth and link, and an all-reduce of 4 KB in microseconds."""
    peak = device.peak_flops["bfloat16"]
    products = newest(folder / "gemm/vllm", "gemm_perf")
    products = products[products.gemm_dtype == "bfloat16"]
    square = products[(products.m == SIDE) & (products.n == SIDE) & (products.k == SIDE)].latency.min()
    vectors = products[(products.m == 1) & (2 * products.n * products.k > MIN_MATRIX_BYTES)]
    bandwidth = (2 * vectors.n * vectors.k / vectors.latency).median() * 1e3
    chosen = attention(folder).query(
        f"num_heads == 32 and num_key_value_heads == 8 and head_dim == 128 and batch_size == 1 and isl == {PROMPT}"
    )
    pairs = PROMPT * (PROMPT + 1) / 2
    shares = (2e3 * SIDE**3 / square, 4e3 * 128 * 32 * pairs / chosen.latency.min())
    cells = [f"{share / peak:.2f}" for share in shares] + [f"{bandwidth / device.memory_bandwidth:.2f}"]
    sums = newest(folder / "comm/nccl", "nccl_perf").query("op_name == 'all_reduce' and nccl_dtype == 'half'")
    small = newest(folder / "comm/vllm", "custom_allreduce_perf").query(
        "backend == 'vllm_graph' and message_size == 2048"
    )
    for ranks in (2, 8):
        times = sums[sums.num_gpus == ranks].groupby("message_size").latency.min()  # sizes in elements of two bytes
        bus = float(np.mean([2e3 * (ranks - 1) / ranks * size / times[size // 2] for size in SUM_BYTES]))
        cells += [f"{bus / device.link_bandwidth:.2f}", f"{1e3 * small[small.num_gpus == ranks].latency.min():.1f}"]
    return cells


def several(folder: Path) -> tuple[int, float, float, float]:
    """(number, median, median of absolute values) of the errors when one chunk with the same pairs stands for 2 to 8 equal prompts.

    The fourth is the median error of as many times one prompt alone.
    """
    errors, apart = [], []
    for _, group in attention(folder).groupby(["num_heads", "num_key_value_heads", "head_dim"]):
        alone = group[group.batch_size == 1].groupby("isl").latency.mean()
        rows: Any = group[(group.batch_size > 1) & (group.batch_size <= 8) & (group.isl >= 128)].itertuples()
        for row in rows:
            tokens = row.batch_size * row.isl
            if tokens > PROMPT or row.isl not in alone.index:
                continue
            chunk, _ = one_chunk(tokens, row.batch_size * row.isl * (row.isl + 1) / 2)
            if alone.index.min() <= chunk <= alone.index.max():
                errors.append(float(np.interp(chunk, alone.index, alone)) / row.latency - 1.0)
                apart.append(row.batch_size * float(alone[row.isl]) / row.latency - 1.0)
    return len(errors), median(errors), median(map(abs, errors)), median(apart)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tables", help="Folder with the tables; default: of the installed package.")
    folder = tables_folder(parser.parse_args().tables) / "data"
    print(
        "| device | products | attention | memory | link, 2 | 4 KB, µs | link, 8 | 4 KB, µs |\n|---|---|---|---|---|---|---|---|"
    )
    systems = {AiconfiguratorConfig(system=system).device_name: system for system in SYSTEMS}
    for name, system in systems.items():
        print(f"| {name} | {' | '.join(reached(folder / system, load_device(name)))} |")
    print("\n| device | batches | median error | absolute, median | each prompt alone |\n|---|---|---|---|---|")
    for name, system in systems.items():
        number, middle, absolute, apart = several(folder / system)
        print(f"| {name} | {number} | {100 * middle:+.0f} % | {100 * absolute:.0f} % | {100 * apart:+.0f} % |")


if __name__ == "__main__":
    main()
