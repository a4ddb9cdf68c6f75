"""Run policies in processes with different hash seeds, which iterate over sets of strings in different orders."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import cloudpickle
from pydantic_core import SchemaError

from vajra_py.contract import Layer, PolicySpec
from vajra_py.testing import scenarios
from vajra_py.testing.subject import UNCOUNTED, Subject

HASH_SEEDS = (3, 6)
"""Hash seeds of the processes.

With these two, sets of two to five replicas, tenants, programs or numbers (as strings) begin with different members.
"""

TIMEOUT_S = 300.0
"""Seconds of real time after which a process is killed."""

_SCENARIOS = (scenarios.LIGHT, scenarios.STARVED, scenarios.SHARED_PREFIXES)
_MANY_REPLICAS = {Layer.REQUEST_PRIORITIZER: 2, Layer.REPLICASET_SCHEDULER: 5, Layer.REPLICA_SCHEDULER: 1}
"""Number of replicas, by layer under test; many for replicaset schedulers: they may iterate over sets of replicas."""

_CHILD = "import sys; from vajra_py.testing.hash_seeds import _child; _child(sys.argv[1], sys.argv[2])"

Policies: TypeAlias = Sequence[tuple[PolicySpec, Mapping[str, Any]]]
"""Policies with their parameters."""
Rows: TypeAlias = dict[str, list[str]]
"""Every decision and every end as text, by scenario."""


def rows_by_hash_seed(policies: Policies) -> list[list[Rows]]:
    """Run policies in one process per hash seed, concurrently. Return for each policy a list of rows, one element per
    hash seed in the order of `HASH_SEEDS`.

    Raises an error of pickling if a policy cannot be sent to another process, and `RuntimeError` if a process fails,
    with the last line that the process printed.
    """
    payload = _payload(policies)
    with TemporaryDirectory(prefix="vajra-conformance-") as folder:
        task = Path(folder, "task")
        task.write_bytes(pickle.dumps(sys.path) + payload)
        results = [Path(folder, f"rows-{seed}") for seed in HASH_SEEDS]
        processes = [_start(seed, task, result) for seed, result in zip(HASH_SEEDS, results, strict=True)]
        errors = [_error_of(process) for process in processes]
        for error in errors:
            if error is not None:
                raise RuntimeError(error)
        runs = [pickle.loads(result.read_bytes()) for result in results]
        return [list(rows) for rows in zip(*runs, strict=True)]


def _payload(policies: Policies) -> bytes:
    """Pickle policies, with their modules by value, so that another process need not be able to import them.

    Modules with nested pydantic models cannot be pickled by value; the other process imports them.
    """
    own = {one.__module__ for spec, _ in policies for one in (spec.build, spec.config)} - {"__main__"}
    modules = [sys.modules[name] for name in own if name in sys.modules and name.partition(".")[0] != "vajra_py"]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        payload: bytes = cloudpickle.dumps(policies)
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
    try:
        pickle.loads(payload)
    except SchemaError:
        payload = cloudpickle.dumps(policies)
    return payload


def _start(seed: int, task: Path, result: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    command = [sys.executable, "-c", _CHILD, str(task), str(result)]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def _error_of(process: subprocess.Popen[bytes]) -> str | None:
    """Wait for a process. Return a message with the last line that it printed if it failed, else None."""
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
    """Return the first decision or end that differs between hash seeds; None if all are the same."""
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
    """Entry point of the processes that `rows_by_hash_seed` starts: run the scenarios and store the rows."""
    with Path(task).open("rb") as file:
        sys.path[:] = pickle.load(file)
        policies = pickle.load(file)
    Path(result).write_bytes(pickle.dumps(_rows_of_all(policies)))


def _rows_of_all(policies: Policies) -> list[Rows]:
    return [_rows_of(spec, params) for spec, params in policies]


def _rows_of(spec: PolicySpec, params: Mapping[str, Any]) -> Rows:
    """Return, as text, each decision of a policy in some scenarios and the end of each request there, under this
    process's hash seed.
    """
    subject = Subject(spec, params)
    rules = replace(UNCOUNTED, num_replicas=_MANY_REPLICAS[spec.layer])
    outcomes = {one.name: subject.run(one, None, rules) for one in _SCENARIOS if subject.suits(one)}
    return {
        name: [*(f"step {row}" for row in one.decisions), *(f"end {row}" for row in one.ends)]
        for name, one in outcomes.items()
    }
