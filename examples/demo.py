"""Compare 3 x 2 x 3 policy combinations on an embedded workload, and write a report to look at.

Run it with `make demo`, or `python examples/demo.py [FOLDER]`. The experiment itself is `examples/demo.yaml`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from vajra_py.cli.main import main

HERE = Path(__file__).parent

if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs")
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "demo.html"
    main(["run", str(HERE / "demo.yaml"), "--set", f"output.dir={folder}", "--report", str(report), "--overwrite"])
