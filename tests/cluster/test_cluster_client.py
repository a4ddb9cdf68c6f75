"""Ray Client: commands on a machine that is no node of the cluster."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.nodes import SWEEP, LocalCluster, engine, outputs, results, write_requests
from tests.serve.processes import STARTUP_S, wait_until
from vajra_py.experiment.runs.replay import replay
from vajra_py.metrics.runs.run_data import RunData

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client_address(cluster: LocalCluster) -> Iterator[str]:
    """Of a Ray Client server of the cluster; one at a time on a machine, since each begins with the same ports for its clients."""
    with (Path(tempfile.gettempdir()) / "vajra-ray-client.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield from _serving(cluster)


def _serving(cluster: LocalCluster) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-m", "ray.util.client.server", "--address", cluster.address, "--host", "127.0.0.1"]
    process = subprocess.Popen([*command, "--port", str(port)], start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: _listens(port), "Ray Client's server listens", STARTUP_S)
        yield f"ray://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def run(folder: Path, experiment: dict[str, Any], *arguments: str) -> None:
    folder.mkdir(exist_ok=True)
    write_requests(folder / "requests.jsonl")
    (folder / "experiment.yaml").write_text(json.dumps(experiment))  # which is YAML
    command = [sys.executable, "-c", "from vajra_py.cli.main import main; main()", "run", "experiment.yaml", "-q"]
    done = subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_a_sweep_through_ray_client_gives_the_bytes_of_one_machine(
    client_address: str, expected: dict[str, bytes], tmp_path: Path
) -> None:
    run(tmp_path / "there", SWEEP, "--on", client_address)
    assert results(tmp_path / "there/runs") == expected


@pytest.mark.long
def test_an_engine_is_led_through_ray_client_and_computes_on_two_nodes_what_one_machine_computes(
    client_address: str, model: Path, here: dict[str, list[int]], tmp_path: Path
) -> None:
    run(tmp_path, engine(model), "--on", client_address)
    there = RunData.load(tmp_path / "runs/engine")
    assert outputs(there) == here
    assert sum(map(len, here.values())) > 40
    assert there.manifest["num_ended"] == {"stop": 12}
    assert json.loads((there.path / "engine.json").read_text())["default"]["device"].startswith("cpu of node ")
    assert replay(there.path).is_equal
