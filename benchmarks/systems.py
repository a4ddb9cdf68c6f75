"""Compare the schedulers of other systems on the same requests; draw the figure and fill the tables of docs/evidence/systems.md.

python benchmarks/systems.py --trace AzureLLMInferenceTrace_conv.csv

Every system is its preset, on the same simulated devices with the same KV memory. What a preset's own limits would refuse of
this trace is let in: model lengths, and the token limit of MinivLLM's example.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import vajra_py as vajra
from vajra_py.config import config_from_mapping
from vajra_py.metrics import RunData

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "systems.md"
FIGURE = ROOT / "docs" / "figures" / "systems-batch-composition.svg"

PRESETS = (
    "orca",
    "sarathi",
    "vllm-v1",
    "vllm-v1-priority",
    "nano-vllm-old",
    "nano-vllm",
    "minivllm",
    "nano-vllm-rs",
    "vajra",
)
BLOCK_TOKENS: Mapping[str, int] = {"nano-vllm": 256, "nano-vllm-old": 256, "minivllm": 256}
LATENCY = {"type": "roofline", "model": "llama-3.1-8b", "device": "a100-80gb-sxm"}
MAX_MODEL_LEN = 16_384
MAX_TOKENS = 1000
"""Longest answer of the Azure trace; what every client asks for at most, so that memory can be set aside for it."""
STARVED_KV_TOKENS = 24_576
FIGURE_KV_TOKENS = 12_288

COLUMNS: Sequence[tuple[str, str, float, int]] = (
    ("TTFT p50 (s)", "overall.ttft_s.p50", 1.0, 3),
    ("TTFT p99 (s)", "overall.ttft_s.p99", 1.0, 2),
    ("TBT p50 (ms)", "overall.tbt_s.p50", 1e3, 1),
    ("TBT p99 (ms)", "overall.tbt_s.p99", 1e3, 1),
    ("E2E p50 (s)", "overall.e2e_s.p50", 1.0, 2),
    ("E2E p99 (s)", "overall.e2e_s.p99", 1.0, 1),
    ("preemptions", "overall.preemptions.count", 1.0, 0),
)


def experiment(preset: str, workload: Mapping[str, Any], out: Path, **more: Any) -> dict[str, Any]:
    """One system on a workload; `kv_tokens` limits its KV memory, else the device does."""
    replica: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN}
    if preset == "minivllm":
        replica["max_batch_tokens"] = MAX_MODEL_LEN
    kv_tokens = more.pop("kv_tokens", None)
    if kv_tokens is not None:
        replica["memory"] = {"num_blocks": kv_tokens // BLOCK_TOKENS.get(preset, 16)}
    return {
        "version": 1,
        "name": preset,
        "preset": preset,
        "replica": replica,
        "workload": dict(workload),
        "backend": {"simulator": {"latency": LATENCY}},
        "output": {"dir": str(out), "decision_log": False},
        **more,
    }


def run(mapping: Mapping[str, Any]) -> RunData:
    """Run it, unless a finished run of the same settings is there."""
    sys.stderr.write(f"{mapping['output']['dir']}/{mapping['name']}\n")
    return vajra.run(config_from_mapping(mapping))


def draw(out: Path) -> None:
    """Batch composition over time of all systems on 240 requests that press on memory."""
    workload = {
        "type": "synthetic",
        "arrivals": {"type": "poisson", "rate": 60.0},
        "num_requests": 240,
        "prompt_tokens": {"type": "mixture", "parts": [
            {"weight": 0.93, "mu": 4.2, "sigma": 0.4},
            {"weight": 0.07, "mu": 7.2, "sigma": 0.2},
        ]},
        "output_tokens": {"type": "uniform", "min": 60, "max": 200},
        "max_tokens": 400,
        "priorities": [{"priority": 0, "share": 1.0}, {"priority": 1, "share": 1.0}],
    }  # fmt: skip
    runs = [run(experiment(name, workload, out / "figure", kv_tokens=FIGURE_KV_TOKENS, seed=5)) for name in PRESETS]
    figure = vajra.plots.batch_composition(runs)
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE, metadata={"Date": None, "Creator": None})


def azure_runs(trace: Path, out: Path) -> list[RunData]:
    """The whole Azure conversation trace of 2023 on two replicas."""
    workload = {"type": "azure", "path": str(trace), "max_tokens": MAX_TOKENS}
    return [run(experiment(name, workload, out / "azure", num_replicas=2)) for name in PRESETS]


def starved_runs(trace: Path, out: Path) -> list[RunData]:
    """The trace's first two thousand requests, at two a second, on one replica with little KV memory."""
    workload = {
        "type": "azure",
        "path": str(trace),
        "max_tokens": MAX_TOKENS,
        "first": 2000,
        "rate": 2.5,
        "priorities": [{"priority": 0, "share": 1.0}, {"priority": 1, "share": 1.0}],
    }
    return [run(experiment(name, workload, out / "starved", kv_tokens=STARVED_KV_TOKENS)) for name in PRESETS]


def table(runs: Sequence[RunData]) -> str:
    """Results as a Markdown table, a row a system."""
    lines = [
        "| preset | served | " + " | ".join(title for title, *_ in COLUMNS) + " |",
        "|---|---:|" + "---:|" * len(COLUMNS),
    ]
    for one in runs:
        summary = one.summary
        cells = [str(summary.value("overall.counts.completed"))]
        for _, path, scale, digits in COLUMNS:
            value = summary.value(path)
            cells.append("–" if value is None else f"{value * scale:,.{digits}f}")
        lines.append(f"| `{one.name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def fill(name: str, text: str) -> None:
    """Put a text between the document's markers of that name."""
    document = DOCUMENT.read_text()
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = document.partition(begin)
    _, _, after = rest.partition(end)
    if not rest or not after:
        raise SystemExit(f"{DOCUMENT}: the markers {begin} and {end} are missing")
    DOCUMENT.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="AzureLLMInferenceTrace_conv.csv; without it, the figure alone")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "systems", help="folder of the runs")
    chosen = parser.parse_args()
    draw(chosen.out)
    if chosen.trace is not None:
        fill("memory-starved", table(starved_runs(chosen.trace, chosen.out)))
        fill("azure", table(azure_runs(chosen.trace, chosen.out)))


if __name__ == "__main__":
    main()
