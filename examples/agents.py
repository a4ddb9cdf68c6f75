"""Agents beside chats under six pairs of policies: run them, draw the programs' makespans, and print who serves both.

Run it with `python examples/agents.py [FOLDER]`; the experiment is `examples/agents.yaml`. It writes `agents.html` (the report) and
`agents.png` (makespans and slowdowns of the programs by policy) into the folder. Under two minutes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import vajra_py as vajra
from vajra_py.metrics.comparison.metrics import BY_KEY, metric_text

HERE = Path(__file__).parent
SHOWN = (
    ("makespan_mean_s", "", "makespan, mean (s)"),
    ("program_slo_attainment_fraction", "", "programs in time (%)"),
    ("program_prefix_hit_fraction", "", "hits (%)"),
    ("ttft_p99_s", "chat", "chats: TTFT P99 (s)"),
    ("ttft_slo_attainment_fraction", "chat", "chats in time (%)"),
)
"""Metric, class of service (empty: everybody) and heading of each column."""


def table(comparison: vajra.Comparison) -> list[str]:
    """A line for each pair of policies."""
    lines = [f"{'':<24}" + "".join(f"{heading:>22}" for _, _, heading in SHOWN)]
    for i, name in enumerate(comparison.names):
        cells = []
        for key, slo_class, _ in SHOWN:
            values = comparison.values[comparison.scope(slo_class) if slo_class else "overall"][key]
            cells.append(f"{metric_text(BY_KEY[key], values[i]):>22}")
        lines.append(f"{name:<24}" + "".join(cells))
    return lines


def main() -> None:
    """Run, print, draw."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs")
    config = vajra.load(HERE / "agents.yaml", {"output.dir": str(folder)})
    runs = list(vajra.sweep(config).runs)
    print("\n".join(table(vajra.compare(runs))))
    vajra.plots.program_makespans(runs).savefig(folder / "agents.png", dpi=110)
    print(f"picture: {folder / 'agents.png'}")
    print(f"report: {vajra.report(runs, folder / 'agents.html')}")


if __name__ == "__main__":
    main()
