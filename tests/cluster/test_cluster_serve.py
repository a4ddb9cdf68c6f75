"""`vajra serve --on`: one HTTP server over replicas on several nodes."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.nodes import LocalCluster, end_node, raylets_of_ranks
from tests.serve.processes import SOON_S, STARTUP_S, start_server, wait_until
from vajra_py.experiment.runs.replay import replay

pytestmark = pytest.mark.slow

NUM_REQUESTS, NUM_TOKENS = 8, 200


def ask(url: str, number: int, answers: dict[int, Any], first: threading.Event) -> None:
    """Stream one completion; `first` is set when it has begun."""
    prompt = [number + 3, 5, 7]
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True, "stream": True}
    body |= {"model": "tiny", "temperature": 0}
    tokens: list[int] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=STARTUP_S) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                tokens += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
                first.set()
    answers[number] = response.status_code, tokens


def answers_of(url: str, lose_node: bool) -> dict[int, Any]:
    """What clients get who ask at once; with `lose_node` a node dies when all have been answered something."""
    answers: dict[int, Any] = {}
    began = [threading.Event() for _ in range(NUM_REQUESTS)]
    clients = [
        threading.Thread(target=ask, args=(url, number, answers, first), daemon=True)
        for number, first in enumerate(began)
    ]
    for client in clients:
        client.start()
    if lose_node:
        for first in began:
            assert first.wait(SOON_S)
        end_node(raylets_of_ranks()[0])
    for client in clients:
        client.join(STARTUP_S)
    return answers


@pytest.mark.long
def test_a_node_dies_under_a_server_and_no_request_is_lost(cluster: LocalCluster, model: Path, tmp_path: Path) -> None:
    flags = ["--model", str(model), "--served-model-name", "tiny", "-dp", "2", "--max-model-len", "256"]
    flags += ["--set", "backend.engine.self_check=false"]
    flags += ["--num-gpu-blocks-override", "200", "--max-num-seqs", "8", "--save-run", str(tmp_path / "session")]
    server = start_server(*flags, "--on", cluster.address)
    try:
        wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 200, "the server is ready", STARTUP_S)
        calm = answers_of(server.url, lose_node=False)
        shaken = answers_of(server.url, lose_node=True)
    finally:
        code = server.terminate()
        cluster.add_node()
    assert code == 0, "".join(server.log)
    assert [calm[number][0] for number in range(NUM_REQUESTS)] == [200] * NUM_REQUESTS
    assert {len(tokens) for _, tokens in calm.values()} == {NUM_TOKENS}
    assert shaken == calm
    manifest = json.loads((tmp_path / "session/manifest.json").read_text())
    assert [one["what"] for one in manifest["changes"]][:1] == ["lost"]
    assert manifest["num_ended"] == {"length": 2 * NUM_REQUESTS}
    assert replay(tmp_path / "session").is_equal
