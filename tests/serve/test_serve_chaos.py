"""Clients vanish, queues overflow, replicas break: is every request accounted for, and every block free in the end?"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

SETTINGS = {
    "preset": "vllm-v1-priority",
    "replica": {"max_batch_size": 8, "max_model_len": 256, "memory": {"num_blocks": 24}},
    "admission": {"max_queued_requests": 12},
    "num_replicas": 2,
}


def load_chaos(root: Path) -> Any:
    spec = importlib.util.spec_from_file_location("serving_chaos", root / "benchmarks" / "serving_chaos.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["serving_chaos"] = module
    spec.loader.exec_module(module)
    return module


def check_nothing_is_left(server: Any, until: Callable[..., None]) -> None:
    session = server.service.session
    until(lambda: session.controller.num_alive == 0, "every request has ended")
    until(lambda: server.service.num_exchanges == 0, "every exchange is over")
    assert session.num_open == 0
    session.controller.check_conservation()
    for replica in session.controller.replicas():
        assert replica.memory.free_blocks == replica.memory.num_blocks


def test_chaos_loses_nothing(
    puppet_server: Callable[..., Any], until: Callable[..., None], repository_root: Path
) -> None:
    chaos = load_chaos(repository_root)
    server = puppet_server(SETTINGS)
    plan = chaos.Plan("puppet", num_clients=48, seconds=4.0)
    outcome = asyncio.run(chaos.chaos(server.url, plan))
    assert outcome.wrong == []
    assert outcome.counts["finished"] > 20
    assert outcome.counts["gone"] > 5
    assert outcome.counts["429"] > 5
    assert set(outcome.counts) <= {"finished", "gone", "429"}
    check_nothing_is_left(server, until)


def test_chaos_with_a_replica_that_breaks(
    puppet_server: Callable[..., Any], until: Callable[..., None], repository_root: Path
) -> None:
    chaos = load_chaos(repository_root)
    server = puppet_server(SETTINGS)
    units = list(server.service.session.engine.units.values())

    def break_one() -> None:
        until(lambda: server.strings.num_steps > 200, "it is busy")
        units[0].worker._runner.run = None  # what is called next raises, as a broken device would

    breaker = threading.Thread(target=break_one)
    breaker.start()
    outcome = asyncio.run(chaos.chaos(server.url, chaos.Plan("puppet", num_clients=32, seconds=4.0, seed=1)))
    breaker.join(60)
    assert outcome.wrong == []
    assert set(outcome.counts) <= {"finished", "gone", "429", "503", "error in the stream"}
    assert outcome.counts["503"] + outcome.counts["error in the stream"] > 0
    assert server.service.num_replicas_up == 1
    assert server.post().status_code == 200  # the other one goes on
    check_nothing_is_left(server, until)
