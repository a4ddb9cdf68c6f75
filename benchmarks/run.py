"""Every benchmark in one run: `make bench` prints the figures, writes `latest.json` and keeps a history, in `runs/bench` or a given folder.

Figures named `_x_` are ratios taken in this run and may be compared between machines; the others belong to this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import queues  # noqa: E402
import routing  # noqa: E402
import simulate  # noqa: E402
import startup  # noqa: E402
import steps  # noqa: E402
from machine import processor  # noqa: E402

from vajra_py import __version__  # noqa: E402

TARGETS: Mapping[str, tuple[float, str]] = {
    "step_x_bare_running_256": (3.0, "steady step at 256 running, over a bare loop of 256 appends"),
    "step_1024_x_256": (4.5, "steady step at 1,024 running, over 256"),
    "step_waiting_100000_x_empty": (1.1, "steady step with 100,000 waiting, over none"),
    "step_lrs_x_fcfs_waiting_100000": (2.0, "100,000 waiting behind a full batch: LRS over FCFS"),
    "step_admitting_lrs_x_fcfs_waiting_100000": (2.0, "100,000 waiting, one admitted a step: LRS over FCFS"),
    "step_admitting_vtc_x_fcfs_waiting_10000_of_1000_tenants": (
        2.0,
        "10,000 waiting of 1,000 tenants, one admitted a step: VTC over FCFS",
    ),
    "abort_us_waiting_100000": (20.0, "abort one of 100,000 waiting, microseconds"),
    "placement_us_four_scorers_1000_replicas": (500.0, "placement by four scorers among 1,000 replicas, microseconds"),
    "sim_1_replica_2000_cpu_s": (0.15, "2,000 requests on 1 replica, CPU seconds"),
    "sim_8_replicas_16000_cpu_s": (1.2, "16,000 requests on 8 replicas, CPU seconds"),
    "sim_1000_replicas_1000000_cpu_s": (600.0, "1,000,000 requests on 1,000 replicas, CPU seconds"),
    "sim_1000_replicas_1000000_peak_memory_mb": (4096.0, "the same, peak memory in MB"),
    "sim_agents_cpu_s_a_day": (180.0, "a day of agents: 300,000 calls on 16 replicas, CPU seconds"),
    "sim_outputs_x_none": (1.5, "time of a run with decision log and steps table, over one without"),
    "sim_two_pools_x_one": (1.5, "64 replicas, 16,000 requests: two pools with a hand-off of each, over one pool"),
    "startup_help_s": (0.3, "vajra --help, seconds"),
    "startup_import_s": (0.2, "import vajra_py, seconds"),
    "startup_first_event_s": (1.0, "first event of a small simulation, seconds"),
    "startup_run_cpu_x_python": (22.5, "CPU time of `vajra run` of ten requests, over that of `python -c pass`"),
}
"""Upper bound of each figure, and its description."""


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="also a million requests on a thousand replicas")
    parser.add_argument(
        "--output", type=Path, default=Path("runs") / "bench", help="folder of latest.json and history.jsonl"
    )
    parser.add_argument("--record", action="store_true", help=f"write to {HERE.name}/ instead, which is committed")
    options = parser.parse_args()
    if options.record:
        options.output = HERE
    figures: dict[str, float] = {}
    for name, measure in (
        ("steps", steps.measure),
        ("queues", queues.measure),
        ("routing", routing.measure),
        ("simulation", lambda: simulate.measure(options.large)),
        ("startup", startup.measure),
    ):
        print(f"-- {name}", flush=True)
        own = measure()
        for key, value in own.items():
            print(f"{key:56} {value:12,.3f}", flush=True)
        figures |= own
    print("-- targets")
    for name, (most, text) in TARGETS.items():
        if name in figures:
            verdict = "reached" if figures[name] <= most else f"missed by {figures[name] / most:.2f} times"
            print(f"{text:64} {figures[name]:10,.3f} of {most:8,.2f}  {verdict}")
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "latest.json").write_text(json.dumps(figures, indent=1) + "\n")
    entry = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "python": platform.python_version(),
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "figures": figures,
    }
    with (options.output / "history.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")
    print(f"written: {options.output / 'latest.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
