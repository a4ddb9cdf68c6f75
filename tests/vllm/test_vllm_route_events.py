"""A router that follows the KV events of a vLLM, whose prompts it tokenizes as the server does."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.route.route_harness import FakeServer, LoopThread, Router, replayed, system
from tests.route.test_route import until
from tests.route.test_route_core import PRECISE
from tests.vllm.test_vllm_serve import DEADLINE_S, serving

COMPLETION = {"prompt": "The scheduler gives every request its blocks. " * 8, "max_tokens": 4}
PARTS = [{"type": "text", "text": "Which of the servers holds it? " * 6}, {"type": "text", "text": "Say why. " * 8}]
CHAT = {"messages": [{"role": "system", "content": "You route."}, {"role": "user", "content": PARTS}], "max_tokens": 4}
SALTED = {"prompt": "A prompt that its tenant alone has cached. " * 8, "max_tokens": 4, "cache_salt": "tenant"}
ASKED = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT), ("/v1/completions", SALTED)]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.long
def test_prompts_go_to_the_vllm_that_holds_them(tiny_model: str, tmp_path: Path) -> None:
    ports = free_port(), free_port()
    reported = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{ports[0]}"}
    options = ["--block-size", "32", "--num-gpu-blocks-override", "64", "--kv-events-config"]
    options.append(json.dumps({**reported, "replay_endpoint": f"tcp://*:{ports[1]}"}))
    folder = tmp_path / "vllm"
    folder.mkdir()
    thread = LoopThread()
    fake = FakeServer(thread)
    experiment = "version: 1\npreset: vllm-v1\n"
    with serving(tiny_model, folder, experiment, *options, VLLM_SERVER_DEV_MODE="1") as vllm:
        for path, body in ASKED:  # not by the router
            answer = httpx.post(vllm.url + path, json={"model": "tiny", **body}, timeout=DEADLINE_S)
            assert answer.status_code == 200, answer.text
        events = {
            "endpoint": f"tcp://127.0.0.1:{ports[0]}",
            "replay_endpoint": f"tcp://127.0.0.1:{ports[1]}",
        }
        servers = [{"url": fake.url}, {"url": vllm.url, "kv_events": events}]
        replica = {"memory": {"num_blocks": 64, "block_size": 32}}
        settings = system(servers, {"tokenizer": tiny_model}, scheduling=PRECISE, replica=replica)
        router = Router(settings, tmp_path / "run")
        memory: Any = router.session.controller.replicasets["default"].replicas[1].memory
        try:
            until(lambda: memory.reported)
            for path, body in ASKED:
                answer = router.client.post(path, json={"model": "tiny", **body})
                assert answer.headers["x-vajra-server"] == "default/1"
                assert answer.status_code == 200, answer.text
            assert httpx.post(f"{vllm.url}/reset_prefix_cache").status_code == 200
            short = {"model": "tiny", "prompt": "Less than a block", "max_tokens": 2}  # events come with steps
            assert httpx.post(f"{vllm.url}/v1/completions", json=short, timeout=DEADLINE_S).status_code == 200
            until(lambda: memory.reported == {})
        finally:
            router.close()
            fake.kill()
            thread.close()
    placed = replayed(tmp_path / "run")
    assert placed.is_equal, placed.difference
    rows = [one for one in _rows(tmp_path / "run") if one["what"] == "sent"]
    assert [one["num_cached_tokens"] > 64 for one in rows] == [True] * 3


def _rows(folder: Path) -> list[dict[str, Any]]:
    from vajra_py.route.records import PLACEMENTS_FILE
    from vajra_py.runtime.records.json_lines import read_rows

    return list(read_rows(folder / PLACEMENTS_FILE))
