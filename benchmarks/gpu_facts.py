"""GPU, driver, versions and date of measured figures."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def use_checkout() -> None:
    """Make the kernels of this checkout importable without installation."""
    sys.path.insert(0, str(ROOT / "kernels"))


def require_gpu(program: str) -> None:
    """Exit with code 2 and one line if torch finds no CUDA device."""
    import torch

    if not torch.cuda.is_available():
        print(
            f"{program}: torch {torch.__version__} sees no CUDA device. Run it on a machine with an NVIDIA GPU and a CUDA "
            "build of torch; on other machines `pytest tests/kernels` checks the kernels in the interpreter.",
            file=sys.stderr,
        )
        raise SystemExit(2)


def output_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the argument for the output file; by default an untracked file."""
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / name, help="where the JSON goes")
    record = f"write it to {RESULTS.relative_to(ROOT)}/{name} instead, which is tracked"
    parser.add_argument("--record", dest="output", action="store_const", const=RESULTS / name, help=record)


def machine() -> dict[str, Any]:
    """Chip, driver, versions and date."""
    import torch
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "chip": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "num_sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _commit(),
    }


def write_results(path: Path, content: dict[str, Any]) -> None:
    """Write one JSON file and create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _commit() -> str | None:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
