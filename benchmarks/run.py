"""Every benchmark in one run: `make bench` prints the figures, writes `benchmarks/latest.json` and keeps a history.

Figures named `_x_` are ratios taken in this run and may be compared between machines; the others belong to this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import queues  # noqa: E402
import simulate  # noqa: E402
import startup  # noqa: E402
import steps  # noqa: E402

from vajra_py import __version__  # noqa: E402


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="also a million requests on a thousand replicas")
    parser.add_argument("--output", type=Path, default=HERE, help="folder of latest.json and history.jsonl")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    for name, measure in (
        ("steps", steps.measure),
        ("queues", lambda: {f"queue_{key}": value for key, value in queues.measure().items()}),
        ("simulation", lambda: simulate.measure(options.large)),
        ("startup", startup.measure),
    ):
        print(f"-- {name}", flush=True)
        own = measure()
        for key, value in own.items():
            print(f"{key:56} {value:12,.3f}", flush=True)
        figures |= own
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "latest.json").write_text(json.dumps(figures, indent=1) + "\n")
    entry = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "figures": figures,
    }
    with (options.output / "history.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")
    print(f"written: {options.output / 'latest.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
