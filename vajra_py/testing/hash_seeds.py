"""Runs of a policy in processes of different hash seeds, in which sets of strings are iterated in different orders."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import cloudpickle

from vajra_py.contract import PolicySpec

HASH_SEEDS = (0, 1, 2)
TIMEOUT_S = 300.0
"""Real time after which a process is given up."""

_CHILD = "import sys; from vajra_py.testing.hash_seeds import _child; _child(sys.argv[1], sys.argv[2])"

Rows: TypeAlias = dict[str, list[str]]
"""Every decision and every end in words, by scenario."""


def rows_by_hash_seed(spec: PolicySpec, params: Mapping[str, Any]) -> list[Rows]:
    """Run the policy under each of `HASH_SEEDS`, in a process for each, side by side; returns the decisions of each.

    Raises `pickle.PicklingError` or another error of pickling where the policy cannot be handed to another process, and
    `RuntimeError` with the process's last line where one fails.
    """
    own = {spec.build.__module__, spec.config.__module__} - {"__main__"}
    modules = [sys.modules[name] for name in own if name in sys.modules and name.partition(".")[0] != "vajra_py"]
    for module in modules:  # by value, so that modules of tests and scripts need not be importable there
        cloudpickle.register_pickle_by_value(module)
    try:
        payload = cloudpickle.dumps((spec, dict(params)))
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
    with TemporaryDirectory(prefix="vajra-conformance-") as folder:
        task = Path(folder, "task")
        task.write_bytes(pickle.dumps(sys.path) + payload)
        results = [Path(folder, f"rows-{seed}") for seed in HASH_SEEDS]
        processes = [_start(seed, task, result) for seed, result in zip(HASH_SEEDS, results, strict=True)]
        errors = [_error_of(process) for process in processes]
        for error in errors:
            if error is not None:
                raise RuntimeError(error)
        return [pickle.loads(result.read_bytes()) for result in results]


def _start(seed: int, task: Path, result: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    command = [sys.executable, "-c", _CHILD, str(task), str(result)]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def _error_of(process: subprocess.Popen[bytes]) -> str | None:
    """Wait for a process; its last line if it failed."""
    try:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"a process of another hash seed did not end within {TIMEOUT_S:.0f} s"
    if process.returncode == 0:
        return None
    lines = errors.decode(errors="replace").strip().splitlines() or ["it printed nothing"]
    return f"a process of another hash seed failed: {lines[-1]}"


def first_difference(runs: Sequence[Rows]) -> str | None:
    """The first decision or end that is not the same under every hash seed; None where all are."""
    first = runs[0]
    for other in runs[1:]:
        for scenario, rows in first.items():
            for before, now in zip(rows, other[scenario], strict=False):
                if before != now:
                    return f"{before} and then {now} ({scenario})"
            if len(rows) != len(other[scenario]):
                return f"{len(rows)} decisions and ends, and then {len(other[scenario])} ({scenario})"
    return None


def _child(task: str, result: str) -> None:
    """Run the scenarios in this process; what `rows_by_hash_seed` starts."""
    with Path(task).open("rb") as file:
        sys.path[:] = pickle.load(file)
        spec, params = pickle.load(file)
    from vajra_py.testing.conformance import rows_of  # after the path is set, and never in the other direction

    Path(result).write_bytes(pickle.dumps(rows_of(spec, params)))
