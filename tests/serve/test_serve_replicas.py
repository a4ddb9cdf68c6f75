"""Two replicas of a real model in processes of their own: does it matter to anybody if one of them is killed?"""

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


@pytest.mark.long
def test_answers_are_what_they_would_have_been_without_the_kill(
    tiny_model: Path, start_server_process: Callable[..., Any], until: Callable[..., None]
) -> None:
    flags = ["--num-gpu-blocks-override", "256", "--max-model-len", "1024", "-dp", "2"]
    server = start_server_process("--model", str(tiny_model), *flags)
    common = {"model": "tiny", "max_tokens": 300, "ignore_eos": True, "return_token_ids": True}
    bodies: list[dict[str, Any]] = [
        {**common, "prompt": [5] * 8, "temperature": 0},
        {**common, "prompt": [6] * 30, "temperature": 0},
        {**common, "prompt": [7] * 8, "temperature": 0.8, "seed": 11},
        {**common, "prompt": [8] * 30, "temperature": 1.2, "top_p": 0.9, "presence_penalty": 0.5, "seed": 12},
    ]

    def ask(body: dict[str, Any]) -> list[int]:
        response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=240)
        assert response.status_code == 200, response.text
        tokens: list[int] = response.json()["choices"][0]["token_ids"]
        return tokens

    try:
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 200, "the server is ready", 240)
        alone = [ask(body) for body in bodies]
        results: dict[int, list[int]] = {}

        def keep(number: int) -> None:
            results[number] = ask(bodies[number])

        threads = [threading.Thread(target=keep, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        until(
            lambda: all(
                f'num_requests_running{{model_name="tiny",replica="{one}",replicaset="default"}} 2.0' in numbers(server)
                for one in (0, 1)
            ),
            "they run",
        )
        killed = worker_pids(server.process.pid)[0]
        os.kill(killed, signal.SIGKILL)
        for thread in threads:
            thread.join(240)
        assert [results[number] for number in range(4)] == alone
        assert "vajra:requests_rerun_total{" in numbers(server)
        until(lambda: httpx.get(f"{server.url}/ready").json()["replicas_up"] == 2, "it came back", 240)
        assert killed not in worker_pids(server.process.pid)
    finally:
        assert server.terminate() == 0, "".join(server.log)


def numbers(server: Any) -> str:
    return httpx.get(f"{server.url}/metrics").text
