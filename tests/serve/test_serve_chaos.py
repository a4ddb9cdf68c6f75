"""Clients vanish, queues overflow, replicas break: is every request accounted for, and every block free in the end?"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engine.fake_runner import runner_that_takes_its_time

SETTINGS = {
    "preset": "vllm-v1-priority",
    "replica": {"max_batch_size": 8, "max_model_len": 256, "memory": {"num_blocks": 24}},
    "admission": {"max_queued_requests": 12},
    "num_replicas": 2,
}


def load_flood(root: Path) -> Any:
    spec = importlib.util.spec_from_file_location("flood", root / "benchmarks" / "flood.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["flood"] = module
    spec.loader.exec_module(module)
    return module


def check_nothing_is_left(server: Any, until: Callable[..., None]) -> None:
    session = server.service.session
    until(lambda: session.controller.num_alive == 0, "every request has ended")
    until(lambda: server.service.num_generating == 0, "every exchange is over")
    assert session.num_open == 0
    session.controller.check_conservation()
    for replica in session.controller.replicas():
        assert replica.memory.free_blocks == replica.memory.num_blocks


def test_chaos_loses_nothing(
    puppet_server: Callable[..., Any], until: Callable[..., None], repository_root: Path
) -> None:
    flood = load_flood(repository_root)
    server = puppet_server(SETTINGS)
    plan = flood.Plan("puppet", num_clients=48, seconds=4.0)
    outcome = asyncio.run(flood.flood(server.url, plan))
    assert outcome.wrong == []
    assert outcome.counts["finished"] > 20
    assert outcome.counts["gone"] > 5
    assert outcome.counts["429"] > 5
    assert set(outcome.counts) <= {"finished", "gone", "429"}
    check_nothing_is_left(server, until)


def test_chaos_with_workers_that_are_killed(
    puppet_server: Callable[..., Any], until: Callable[..., None], repository_root: Path
) -> None:
    flood = load_flood(repository_root)
    recovery = {"backoff_s": 0.0, "max_restarts": 1000}
    engine = {"workers": "process", "recovery": recovery}
    server = puppet_server(SETTINGS, load=runner_that_takes_its_time, engine=engine)
    units = server.service.session.engine.replicas

    def workers() -> list[int]:
        return [unit.worker._processes[0].pid for unit in units.values() if not unit.is_lost]

    plan = flood.Plan("puppet", num_clients=24, seconds=6.0, seed=1, vocab_size=900, kill_every_s=1.0)
    hands = flood.Hands(workers, lambda: flood.resident_bytes(os.getpid()))
    outcome = asyncio.run(flood.flood(server.url, plan, hands=hands))
    flood.check_rest(server.url, outcome)
    assert outcome.wrong == []
    assert set(outcome.counts) <= {"finished", "gone", "429", "503", "error in the stream"}
    assert outcome.counts["finished"] > 20
    assert outcome.num_killed >= 2
    assert all(outcome.rss)
    check_nothing_is_left(server, until)
    stats = server.service.stats.sets["default"]
    assert stats.lost.total() == stats.restored.total() == outcome.num_killed
    assert stats.num_rerun > 0
