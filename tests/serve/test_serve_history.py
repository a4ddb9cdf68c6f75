"""The last hour of numbers that a dashboard opens with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx

from vajra_py.serve.observe.history import NUM_KEPT, History


def test_samples_are_kept_for_an_hour_and_given_from_a_time_on() -> None:
    times = iter(float(k) for k in range(10**6))
    running = iter(range(10**6))
    history = History(lambda: {"running": next(running)}, lambda: next(times))
    for _ in range(NUM_KEPT + 5):
        history.sample()
    everything = history.since(0)
    assert everything["columns"] == ("at", "running")
    assert len(everything["rows"]) == NUM_KEPT
    assert everything["rows"][-1] == (NUM_KEPT + 4.0, NUM_KEPT + 4)
    assert history.since(NUM_KEPT + 2.0)["rows"] == everything["rows"][-2:]
    unloaded = History(lambda: None, lambda: 0.0)
    unloaded.sample()
    assert unloaded.since(0)["rows"] == []


async def page_of(server: Any) -> Any:
    """What the page gets, without a connection."""
    transport = httpx.ASGITransport(app=server.server.config.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://page") as client:
        return (await client.get("/dashboard/data")).json()


def test_the_page_gets_health_history_events_and_errors(puppet_server: Callable[..., Any]) -> None:
    server = puppet_server(max_concurrent=1, admin=True, engine={"recovery": {"max_restarts": 0}})
    assert server.post().status_code == 200
    change = {"layer": "replica_scheduler", "policy": "fixed_chunk", "params": {"chunk_size": 64}}
    assert httpx.post(f"{server.url}/admin/policy", json=change).status_code == 200
    server.service.history.sample()
    shown = httpx.get(f"{server.url}/dashboard/data").json()
    assert (shown["status"], shown["level"]) == ("ready", "good")
    row = dict(zip(shown["history"]["columns"], shown["history"]["rows"][-1], strict=True))
    assert (row["finished"], row["decode_tokens"], row["prefill_tokens"], row["errors"]) == (1, 3, 3, 0)
    assert shown["now"]["finished"] == 1
    assert shown["events"][0][1:] == ["swap", "default replica_scheduler: vllm_v1 → fixed_chunk"]
    later = httpx.get(f"{server.url}/dashboard/data", params={"since": shown["history"]["rows"][-1][0] + 3600}).json()
    assert later["history"]["rows"] == []
    server.strings.hold()
    server.strings.step()
    body = {"model": "puppet", "prompt": [1], "max_tokens": 50, "stream": True, "return_token_ids": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines)
        assert server.post().status_code == 429
        server.strings.breaks = True
        server.strings.let_go()
        assert any('"error"' in line for line in lines)
    now = asyncio.run(page_of(server))  # the server itself may have ended
    assert now["level"] == "bad"
    assert now["detail"]
    assert now["now"]["errors"] == 2  # the refused request, and the interrupted stream
    assert [kind for _, kind, _ in now["events"]][1] == "failure"
