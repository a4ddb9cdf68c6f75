"""Prompts and decodes on replicas of their own beside chunked prefill in one pool: the same eight GPUs, five loads, one picture.

Run `python examples/disaggregation.py [FOLDER]`; the experiment is `examples/disaggregation.yaml`. It prints the load that each way keeps up
with and what its pools did there, and draws `disaggregation.png`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import vajra_py as vajra
from vajra_py.metrics import RunData

HERE = Path(__file__).parent
KEPT_FRACTION = 0.9
"""A load is kept up with if so many requests meet their SLOs."""


def way_of(run: RunData) -> str:
    """Describe how this run splits its replicas."""
    return " + ".join(f"{pool['num_replicas']} {name}" for name, pool in run.config["pools"].items())


def by_way(runs: Sequence[RunData]) -> dict[str, list[RunData]]:
    """Runs of each way, by rising load."""
    ways: dict[str, list[RunData]] = {}
    for run in sorted(runs, key=rate_of):
        ways.setdefault(way_of(run), []).append(run)
    return ways


def rate_of(run: RunData) -> float:
    """Requests per second that were asked for."""
    return float(run.config["workload"]["arrivals"]["rate"])


def attainment(run: RunData) -> float:
    """Fraction of the requests that met their SLOs."""
    return float(run.summary.value("overall.slo.overall.attainment_fraction"))


def goodput_per_gpu(run: RunData) -> float:
    """Requests per second that met their SLOs, for each GPU."""
    num_gpus = sum(pool["num_replicas"] for pool in run.summary.data["pools"].values())
    return float(run.summary.value("overall.goodput.requests_per_s")) / num_gpus


def highest_kept(runs: Sequence[RunData]) -> RunData | None:
    """The run under the highest load that this way keeps up with; None if there is none."""
    kept = [run for run in runs if attainment(run) >= KEPT_FRACTION]
    return max(kept, key=rate_of, default=None)


def what_to_see(runs: Sequence[RunData]) -> list[str]:
    """Describe the load that each way keeps up with, how busy its pools are there, and what the way between them takes."""
    lines = [f"Highest load at which {KEPT_FRACTION:.0%} of the requests meet their SLOs:"]
    for way, own in by_way(runs).items():
        best = highest_kept(own)
        if best is None:
            lines.append(f"  {way:<22} none")
            continue
        pools: Mapping[str, Any] = best.summary.data["pools"]
        busy = ", ".join(f"{name} {pool['busy_fraction']:.0%} busy" for name, pool in pools.items())
        transfer_s = best.summary.value("movement.transfer_s.p50")
        moved = "" if transfer_s is None else f"; a hand-off takes {1000 * transfer_s:.1f} ms"
        lines.append(f"  {way:<22} {rate_of(best):g} requests/s ({busy}{moved})")
    return lines


def draw(runs: Sequence[RunData], path: Path) -> None:
    """Draw attainment, and goodput of a GPU, against the load."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9.0, 3.6), layout="constrained")
    for way, own in by_way(runs).items():
        style = {"marker": "o" if "+" in way else "s", "linestyle": "-" if "+" in way else "--", "label": way}
        rates = [rate_of(run) for run in own]
        left.plot(rates, [100 * attainment(run) for run in own], **style)
        right.plot(rates, [goodput_per_gpu(run) for run in own], **style)
    left.axhline(100 * KEPT_FRACTION, color="0.6", linewidth=1)
    left.set_ylabel("requests that meet their SLOs (%)")
    right.set_ylabel("goodput (requests/s per GPU)")
    for axes in (left, right):
        axes.set_xlabel("offered load (requests/s)")
        axes.set_ylim(bottom=0)
        axes.grid(color="0.9")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run, print, draw."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs")
    config = vajra.load(HERE / "disaggregation.yaml", {"output.dir": str(folder)})
    runs = list(vajra.sweep(config).runs)
    print("\n".join(what_to_see(runs)))
    draw(runs, folder / "disaggregation.png")
    print(f"picture: {folder / 'disaggregation.png'}")
    print(f"report: {vajra.report(runs, folder / 'disaggregation.html')}")


if __name__ == "__main__":
    main()
