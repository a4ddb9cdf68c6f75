"""Measure what `vajra route` adds to a request: the same load sent to a fake server directly, and through a router.

python benchmarks/route.py [RATE] [REQUESTS] [TOKENS]: requests arrive evenly at RATE a second, half of them streams, and each has TOKENS
tokens, one every 10 ms. Both loads run at once, in turn request by request, so that the machine's state is the same for both. The
router is a process of its own on one core. Printed: the time to the first byte of streams and to the last one of all, at P50 and P99,
directly and through the router, and the differences.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import numpy as np
from aiohttp import web

_GAP_S = 0.01


async def _complete(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    num_tokens = body["max_tokens"]
    if not body.get("stream"):
        await asyncio.sleep(_GAP_S * num_tokens)
        answer = {"choices": [{"text": "x", "finish_reason": "length"}], "usage": {"completion_tokens": num_tokens}}
        return web.json_response(answer)
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for number in range(num_tokens):
        await asyncio.sleep(_GAP_S)
        reason = "length" if number + 1 == num_tokens else None
        piece = {"id": "cmpl-0", "object": "text_completion", "choices": [{"text": " word", "finish_reason": reason}]}
        await response.write(b"data: " + json.dumps(piece).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


async def _notify(request: web.Request) -> web.Response:
    return web.Response(text="vllm:num_requests_running 1\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.1\n")


def _serve(port: int) -> None:
    app = web.Application()
    app.router.add_post("/v1/completions", _complete)
    app.router.add_get("/metrics", _notify)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


async def _ask(http: aiohttp.ClientSession, url: str, number: int, num_tokens: int) -> tuple[float, float]:
    """Return the times to the first byte, not a number for an answer that is no stream, and to the last one, seconds."""
    is_stream = number % 4 < 2
    body = {"model": "m", "prompt": f"{number} " + "word " * 200, "max_tokens": num_tokens, "stream": is_stream}
    started, first = time.perf_counter(), 0.0
    async with http.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for _ in answer.content.iter_any():
            first = first or time.perf_counter() - started
    return first if is_stream else math.nan, time.perf_counter() - started


async def _load(urls: list[str], rate: float, num_requests: int, num_tokens: int) -> list[np.ndarray]:
    """Send every request to each of the addresses; returns (first byte, last byte) of each request, by address."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        started, tasks = time.perf_counter(), []
        for number in range(num_requests * len(urls)):
            await asyncio.sleep(started + number / (rate * len(urls)) - time.perf_counter())
            which = number % len(urls)
            tasks.append(asyncio.create_task(_ask(http, urls[which], number, num_tokens)))
        found = await asyncio.gather(*tasks)
    skipped = num_requests // 10
    return [np.array(found[which :: len(urls)][skipped:]) for which in range(len(urls))]


def main() -> None:
    """Print the times."""
    rate, num_requests, num_tokens = [int(one) for one in sys.argv[1:]] + [200, 2000, 16][len(sys.argv) - 1 :]
    ports = [18931, 18932, 18930]
    servers = [subprocess.Popen([sys.executable, __file__, "--serve", str(port)]) for port in ports[:2]]
    with tempfile.TemporaryDirectory() as folder:
        places = ", ".join(f'{{url: "http://127.0.0.1:{port}"}}' for port in ports[:2])
        file = Path(folder) / "route.yaml"
        file.write_text(
            "version: 1\npreset: vllm-v1\nscheduling: {replicaset_scheduler: {policy: endpoint_picker}}\nnum_replicas: 2\n"
            f"replica: {{memory: {{num_blocks: 65536, block_size: 16}}}}\nbackend: {{route: {{servers: [{places}]}}}}\n"
        )
        command = "from vajra_py.cli.main import main; main()"
        route = [sys.executable, "-c", command, "route", str(file), "--port", str(ports[2]), "--no-access-log"]
        router = subprocess.Popen(route, preexec_fn=lambda: os.sched_setaffinity(0, {0}))
        try:
            urls = [f"http://127.0.0.1:{port}" for port in (ports[0], ports[2])]
            asyncio.run(_wait_for(urls))
            before = _cpu_s(router.pid)
            asyncio.run(_measure(urls, (rate, num_requests, num_tokens)))
            print(f"CPU time of the router: {1e3 * (_cpu_s(router.pid) - before) / num_requests:.2f} ms a request")
        finally:
            router.terminate()
            router.wait()
            for one in servers:
                one.kill()


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _wait_for(urls: list[str]) -> None:
    async with aiohttp.ClientSession() as http:
        for url in urls:
            for _ in range(600):
                try:
                    async with http.get(f"{url}/metrics") as answer:
                        if answer.status == 200:
                            break
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.1)


async def _measure(urls: list[str], load: tuple[int, int, int]) -> None:
    direct, routed = await _load(urls, *load)
    for column, name in enumerate(("first byte of streams", "last byte")):
        for percent in (50, 99):
            one, other = (1e3 * float(np.nanpercentile(times[:, column], percent)) for times in (direct, routed))
            print(f"{name} P{percent}: {one:.2f} ms directly, {other:.2f} ms routed, {other - one:+.2f} ms")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        _serve(int(sys.argv[2]))
    else:
        main()
