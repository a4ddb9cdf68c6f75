"""A Ray cluster of several nodes on this machine, and experiments that take a moment."""

from __future__ import annotations

import gzip
import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from vajra_py.metrics.runs.run_data import RunData

STORE_BYTES = 80_000_000
HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500}
"""Health checks that detect a lost node within seconds, after five failures in a row, and tolerate a slow one."""

SWEEP: dict[str, Any] = {
    "version": 1,
    "name": "small",
    "seed": 5,
    "scheduling": {
        "request_prioritizer": "fcfs",
        "replicaset_scheduler": "round_robin",
        "replica_scheduler": {"policy": "fixed_chunk", "params": {"chunk_size": 128}},
    },
    "workload": {"type": "jsonl", "path": "requests.jsonl"},
    "backend": {"simulator": {"latency": {"type": "constant", "step_time_s": 0.01}}},
    "replica": {"max_model_len": 4096, "memory": {"num_blocks": 400}},
    "sweep": {"scheduling.request_prioritizer": ["fcfs", "edf"], "replica.max_batch_size": [4, 8]},
}

ENGINE: dict[str, Any] = {
    "version": 1,
    "name": "engine",
    "seed": 3,
    "num_replicas": 2,
    "scheduling": {
        "request_prioritizer": "fcfs",
        "replicaset_scheduler": "round_robin",
        "replica_scheduler": {"policy": "fixed_chunk", "params": {"chunk_size": 32}},
    },
    "workload": {
        "type": "synthetic",
        "arrivals": {"type": "poisson", "rate": 100},
        "num_requests": 12,
        "prompt_tokens": {"type": "uniform", "min": 8, "max": 60},
        "output_tokens": {"type": "uniform", "min": 4, "max": 12},
    },
    "replica": {"max_batch_size": 8, "max_model_len": 128, "memory": {"num_blocks": 60}},
}


def write_requests(path: Path, count: int = 60) -> None:
    """A trace of `count` requests."""
    rows = [
        f'{{"request_id": "r{index}", "arrived_at": {index * 0.02}, "num_prompt_tokens": {20 + index % 7 * 40}, '
        f'"num_output_tokens": {2 + index % 5 * 6}}}\n'
        for index in range(count)
    ]
    path.write_text("".join(rows))


def results(folder: Path) -> dict[str, bytes]:
    """Every file of every run below a folder, but for machine and time."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "environment.json"
    }


def engine(model: Path, **settings: Any) -> dict[str, Any]:
    """An experiment that an engine computes in a moment."""
    return ENGINE | {"backend": {"engine": {"model": str(model), "self_check": False, **settings}}}


def outputs(run: RunData) -> dict[str, list[int]]:
    """The tokens of every request."""
    with gzip.open(run.path / "outputs.jsonl.gz") as file:
        rows = [json.loads(line) for line in file]
    return {row["request_id"]: row["token_ids"] for row in rows}


def end_node(raylet: int) -> None:
    """End a node as when its machine fails: its raylet, then all the raylet's children."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    for process in (raylet, *(one for one, parent in parents.items() if parent == raylet)):
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)


def raylets_of_ranks() -> list[int]:
    """The raylets under which ranks run."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "cmdline").read_bytes().startswith(b"ray::Rank"):
                found.append(int((path / "stat").read_text().rpartition(")")[2].split()[1]))
        except OSError:
            continue
    return found


class LocalCluster:
    """A head that computes nothing, and nodes of one CPU."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False, "_system_config": HEALTH}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self._cluster.address
        self.nodes = [self.add_node(), self.add_node()]

    def add_node(self, **options: Any) -> Any:
        """Add a node."""
        return self._cluster.add_node(**{"num_cpus": 1, "object_store_memory": STORE_BYTES} | options)

    def kill(self, node: Any) -> None:
        """End a node with all its processes."""
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        """End every node."""
        self._cluster.shutdown()
