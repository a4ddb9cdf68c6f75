"""Two vLLMs, one for prompts and one for decodes, behind a router: their own schedulers, KV through shared storage."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.route.route_harness import Router, replayed, system
from tests.vllm.test_vllm_serve import command, environment

DEADLINE_S = 480.0
"""Two servers start at once, on whatever cores there are."""
POOLS = {"prefill": {"num_replicas": 1, "role": "prefill"}, "decode": {"num_replicas": 1, "role": "decode"}}


@contextmanager
def vllms(model: str, folder: Path, roles: list[str]) -> Iterator[list[str]]:
    """vLLM servers with these roles, which share KV in a folder; yields their addresses."""
    processes, urls = [], []
    for role in roles:
        own = folder / role
        own.mkdir()
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        transfer = {
            "kv_connector": "ExampleConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"shared_storage_path": str(folder / "kv")},
        }
        given = ["serve", model, "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
        given += ["--max-model-len", "512", "--enforce-eager", "--dtype", "float32", "--block-size", "32"]
        given += ["--num-gpu-blocks-override", "64", "--kv-transfer-config", json.dumps(transfer)]
        with (own / "log").open("wb") as out:
            processes.append(
                subprocess.Popen(
                    command(*given),
                    env=environment(own, PYTHONHASHSEED="0", OMP_NUM_THREADS="1"),
                    cwd=own,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        urls.append(f"http://127.0.0.1:{port}")
    try:
        end = time.monotonic() + DEADLINE_S
        for role, url, process in zip(roles, urls, processes, strict=True):
            while not _is_healthy(url):
                log = (folder / role / "log").read_text()[-3000:]
                assert process.poll() is None, log
                assert time.monotonic() < end, log
                time.sleep(0.5)
        yield urls
    finally:
        for one in processes:
            with suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGTERM)
        for one in processes:
            try:
                one.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(one.pid, signal.SIGKILL)
                one.wait()


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def _body(number: int) -> dict[str, Any]:
    prompt = [20 + (7 * number + one) % 60 for one in range(100)]
    return {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.mark.long
def test_a_pair_gives_the_tokens_of_one_server(tiny_model: str, tmp_path: Path) -> None:
    with vllms(tiny_model, tmp_path, ["kv_producer", "kv_consumer"]) as (prefill, decode):
        servers = [{"url": prefill, "pool": "prefill"}, {"url": decode, "pool": "decode"}]
        replica = {"memory": {"num_blocks": 64, "block_size": 32}}
        router = Router(system(servers, pools=POOLS, hand_off="vllm-pd", replica=replica), tmp_path / "run")
        try:
            through = [router.client.post("/v1/completions", json=_body(number)) for number in range(6)]
            with router.client.stream("POST", "/v1/completions", json={**_body(6), "stream": True}) as stream:
                lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
        finally:
            router.close()
        assert [one.status_code for one in through] == [200] * 6
        assert {one.headers["x-vajra-server"] for one in through} == {"default/1"}
        direct = [httpx.post(f"{prefill}/v1/completions", json=_body(number), timeout=60).json() for number in range(7)]
        said = [one.json()["choices"][0]["text"] for one in through]
        said.append("".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]))
        assert said == [one["choices"][0]["text"] for one in direct]
        metrics = httpx.get(f"{decode}/metrics").text
        hits = [line for line in metrics.splitlines() if line.startswith("vllm:external_prefix_cache_hits_total")]
        assert float(hits[0].split()[-1]) >= 7 * 64
    report = replayed(tmp_path / "run")
    assert report.is_equal, report.difference
