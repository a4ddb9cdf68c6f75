"""Two replicas in processes of their own: what if one of them is killed?"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest


def worker_pids(server_pid: int) -> list[int]:
    """Processes of the server's replicas."""
    children = Path(f"/proc/{server_pid}/task").glob("*/children")
    pids = [int(pid) for file in children for pid in file.read_text().split()]
    return [pid for pid in pids if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.slow
def test_a_killed_worker_ends_its_own_requests_only(
    tiny_model: Path, start_server_process: Callable[..., Any], until: Callable[..., None]
) -> None:
    flags = ["--num-gpu-blocks-override", "128", "--max-model-len", "1024", "-dp", "2"]
    server = start_server_process("--model", str(tiny_model), *flags)
    try:
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 200, "the server is ready", 240)
        assert httpx.get(f"{server.url}/ready").json()["replicas_up"] == 2
        body = {"model": "tiny", "prompt": [5] * 8, "max_tokens": 900, "ignore_eos": True, "temperature": 0}
        results: list[httpx.Response] = []

        def ask() -> None:
            results.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=240))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        until(
            lambda: 'num_requests_running{model_name="tiny",replica="1",replicaset="default"} 2.0' in numbers(server),
            "they run",
        )
        os.kill(worker_pids(server.process.pid)[0], signal.SIGKILL)
        for thread in threads:
            thread.join(240)
        assert sorted(result.status_code for result in results) == [200, 200, 503, 503]
        error = next(result for result in results if result.status_code == 503).json()["error"]
        assert "killed by signal 9" in error["message"]
        assert httpx.get(f"{server.url}/ready").json()["replicas_up"] == 1
        after = httpx.post(f"{server.url}/v1/completions", json={**body, "max_tokens": 4}, timeout=240)
        assert after.status_code == 200
    finally:
        assert server.terminate() == 0, "".join(server.log)


def numbers(server: Any) -> str:
    return httpx.get(f"{server.url}/metrics").text
