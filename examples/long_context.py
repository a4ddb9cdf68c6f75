"""Do long documents hold up short chats? Six combinations of policies on Medha's setting, beside the paper's claim.

Run `python examples/long_context.py [FOLDER]`; the experiment is `examples/long_context.yaml`. It prints the table that
`docs/evidence/long-context.md` shows, and writes a report.
"""

from __future__ import annotations

import sys
from pathlib import Path

import vajra_py as vajra
from vajra_py.metrics import RunData

HERE = Path(__file__).parent
COLUMNS = (
    ("chats TTFT P50 (s)", "by_slo_class.chat.ttft_s.p50"),
    ("chats TTFT P99 (s)", "by_slo_class.chat.ttft_s.p99"),
    ("chats E2E P50 (s)", "by_slo_class.chat.e2e_s.p50"),
    ("chats E2E P99 (s)", "by_slo_class.chat.e2e_s.p99"),
    ("documents TTFT P50 (s)", "by_slo_class.document.ttft_s.p50"),
    ("documents TTFT P99 (s)", "by_slo_class.document.ttft_s.p99"),
)
PAPER = (
    "The paper (arXiv 2409.17264 v5): median latency 30 times and P99 latency 174 times lower than without preemption."
)


def name_of(run: RunData) -> str:
    """The policies that this run tried."""
    scheduling = run.config["scheduling"]
    return f"{scheduling['request_prioritizer']['policy']} + {scheduling['replica_scheduler']['policy']}"


def table(runs: list[RunData]) -> str:
    """The runs as a Markdown table."""
    lines = ["| policies | " + " | ".join(title for title, _ in COLUMNS) + " |", "|---|" + "--:|" * len(COLUMNS)]
    for run in runs:
        values = (run.summary.value(path) for _, path in COLUMNS)
        lines.append(f"| {name_of(run)} | " + " | ".join(f"{value:,.2f}" for value in values) + " |")
    return "\n".join(lines)


def ratios(runs: list[RunData]) -> str:
    """Describe the reduction of the chats' latencies from the first run to the last."""
    first, last = runs[0], runs[-1]
    parts = []
    for title, path in COLUMNS[:4]:
        ratio = first.summary.value(path) / last.summary.value(path)
        parts.append(f"{title.removeprefix('chats ').removesuffix(' (s)')} {ratio:,.0f} times")
    return f"{name_of(last)} against {name_of(first)}, chats: {', '.join(parts)} lower."


def main() -> None:
    """Run, print, write the report."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs")
    config = vajra.load(HERE / "long_context.yaml", {"output.dir": str(folder)})
    runs = list(vajra.sweep(config, overwrite=True).runs)
    print(table(runs))
    print(ratios(runs))
    print(PAPER)
    print(f"report: {vajra.report(runs, folder / 'long-context.html')}")


if __name__ == "__main__":
    main()
