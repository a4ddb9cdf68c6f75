"""Chats beside documents under three policies: run them, draw latency against rate, and print what there is to see.

Run it with `make demo`, or `python examples/demo.py [FOLDER]`; the experiment is `examples/demo.yaml`. It writes `demo.html` (the report) and `demo.png` (its first
picture) into the folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

import vajra_py as vajra
from vajra_py.cli.main import main
from vajra_py.metrics.comparison.metrics import BY_KEY, error_text, metric_text

HERE = Path(__file__).parent


def what_to_see(comparison: vajra.Comparison) -> list[str]:
    """Describe the chats' waiting times under each policy at the highest rate, with intervals over the seeds."""
    metric, scope = BY_KEY["ttft_p99_s"], comparison.scope("chat")
    position = comparison.by_load()[-1]
    lines = [f"P99 time to first token of chats under the highest load ({comparison.loads[position]} requests/s):"]
    for i in comparison.of_load(position):
        interval = comparison.interval(metric.key, i, scope)
        error = "" if interval is None else f" ± {error_text(metric, interval.half_width)}"
        lines.append(
            f"  {comparison.names[i]:<24}{metric_text(metric, comparison.values[scope][metric.key][i])}{error} s"
        )
    return lines


def show(folder: Path) -> None:
    """Print what the finished runs show, and draw the picture."""
    runs = vajra.open_runs([folder / "demo"])
    print("\n".join(what_to_see(vajra.compare(runs))))
    vajra.plots.class_latency_by_rate(runs, classes=["chat"]).savefig(folder / "demo.png", dpi=110)
    print(f"picture: {folder / 'demo.png'}")
    print(
        f"your own policy in it: `vajra new-plugin my-policies`, then its name in the two lists of {HERE / 'demo.yaml'}"
    )


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "runs")
    target.mkdir(parents=True, exist_ok=True)
    report = target / "demo.html"
    arguments = ["run", str(HERE / "demo.yaml"), "--set", f"output.dir={target}", "--report", str(report), "--quiet"]
    try:
        main(arguments)
    except SystemExit as ended:
        if ended.code:
            raise
    show(target)
