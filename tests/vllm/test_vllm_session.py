"""A session of `vllm serve` until SIGTERM, or SIGKILL: what was recorded is whole, or is said to be cut off."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from tests.vllm.test_vllm_serve import DEADLINE_S, Server, environment, metric, offline, serving
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.runtime.records.input_log import INPUTS_FILE, Arrival, read_inputs
from vajra_py.vllm.settings import SAVE_RUN_VARIABLE

pytestmark = pytest.mark.slow
EXPERIMENT = """
version: 1
preset: sarathi
scheduling: {request_prioritizer: edf}
backend: {vllm: {latency: {type: affine, base_s: 0.004, per_token_s: 0.0001}}}
"""
FEW_BLOCKS = ("--num-gpu-blocks-override", "18", "--block-size", "32", "--max-model-len", "512")
NUM_REQUESTS = 25
NUM_SAMPLES = 64


def ask(server: Server, index: int) -> None:
    """One request: plain, with objectives, of several samples, streamed, or left by its client, in turns."""
    prompt = [7 + 3 * (index % 2) + place for place in range(20 + 11 * (index % 7))]
    kind = index % 5
    if kind < 2:
        objectives = {"vajra_ttft_slo_s": 0.2 + index, "vajra_slo_class": "gold"} if kind else {}
        answer = server.post(prompt=prompt, max_tokens=60, priority=-index, vllm_xargs=objectives)
        assert answer.json()["choices"][0]["finish_reason"] == "length"
    elif kind == 2:
        answer = server.post(prompt=prompt, max_tokens=40, n=3, temperature=0.7)
        assert len(answer.json()["choices"]) == 3
    elif kind == 3:
        assert stream(server, prompt, 30)[-1]["choices"][0]["finish_reason"] == "length"
    else:
        stream(server, prompt, 400, leaves=True)


def stream(
    server: Server,
    prompt: list[int],
    max_tokens: int,
    *,
    samples: int = 1,
    leaves: bool = False,
    began: Event | None = None,
) -> list[Any]:
    """What a client reads of a stream; it may leave after the first piece, and tell others that it came."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "n": samples,
    }
    found = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=DEADLINE_S) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                found.append(json.loads(line.removeprefix("data: ")))
                if began is not None:
                    began.set()
                if leaves:
                    break
    return found


def serve_some(server: Server) -> None:
    with ThreadPoolExecutor(8) as clients:
        list(clients.map(lambda index: ask(server, index), range(NUM_REQUESTS)))


def replay(run: Path) -> subprocess.CompletedProcess[str]:
    """`vajra replay`, as whoever has the folder calls it."""
    given = [sys.executable, "-P", "-c", "from vajra_py.cli.main import main; main()", "replay", str(run)]
    return subprocess.run(given, capture_output=True, text=True, timeout=DEADLINE_S)


def test_a_server_that_is_told_to_stop_leaves_a_session_that_replays(tiny_model: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with serving(tiny_model, tmp_path, EXPERIMENT, *FEW_BLOCKS, **{SAVE_RUN_VARIABLE: str(run)}) as server:
        serve_some(server)
        assert RunData.load(run).manifest["status"] == "running"
        began = Event()
        with ThreadPoolExecutor(1) as clients:
            # Many seconds of work, as a busy machine may run this client late.
            answer = clients.submit(stream, server, list(range(9, 40)), 450, samples=NUM_SAMPLES, began=began)
            assert began.wait(DEADLINE_S)
            end = time.monotonic() + DEADLINE_S
            # A busy machine may not have kept requests side by side before.
            while metric(server, "vllm:num_preemptions_total") == 0:
                assert time.monotonic() < end, "nobody was preempted"
            server.process.send_signal(signal.SIGTERM)  # only to the command, which signals its processes
            server.process.wait(60)
        assert answer.exception() is not None or len(answer.result()) < 450 * NUM_SAMPLES
    found = RunData.load(run)
    assert found.is_finished, server.log.read_text()[-3000:]
    done = replay(run)
    assert (done.returncode, done.stdout.partition(":")[0]) == (0, "equal"), done.stdout + done.stderr
    arrivals = [one for one in read_inputs(run / INPUTS_FILE) if isinstance(one, Arrival)]
    assert len(arrivals) == found.requests().num_rows == NUM_REQUESTS * 7 // 5 + NUM_SAMPLES
    facts = [one.facts for one in arrivals]
    assert {one.priority for one in facts} >= {-1, -6, -11}
    assert [one.ttft_slo_s for one in facts if one.slo_class == "gold"].count(1.2) == 1
    reasons = found.requests().column("reason").to_pylist()
    assert set(reasons) == {"aborted", "length"}
    # on a busy machine a stream may end before its client's leave is seen
    assert 1 < reasons.count("aborted") <= NUM_REQUESTS // 5 + NUM_SAMPLES
    assert RunData.load(run).manifest["num_unfinished"] == 0
    assert sum(found.requests().column("num_preemptions").to_pylist()) > 0
    assert sum(found.requests().column("num_cached_tokens").to_pylist()) > 0


def test_of_a_server_that_is_killed_the_record_is_readable_and_said_to_be_cut_off(
    tiny_model: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with serving(tiny_model, tmp_path, EXPERIMENT, *FEW_BLOCKS, **{SAVE_RUN_VARIABLE: str(run)}) as server:
        serve_some(server)
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait(60)
    found = RunData.load(run)
    assert not found.is_finished
    assert found.has_cut_decisions
    steps = list(found.decisions())
    assert len(steps) >= 64
    assert steps[0]["chunks"]
    done = replay(run)
    assert done.returncode != 0
    assert "was cut off" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_llm_whose_process_ends_leaves_a_session_that_replays(tiny_model: str, tmp_path: Path) -> None:
    """Its scheduler is in a process of its own, which vLLM waits for as long as for its workers."""
    known = environment(tmp_path, **{SAVE_RUN_VARIABLE: str(tmp_path / "run")})
    options = {"scheduler_cls": "vajra_py.vllm.Scheduler"}
    outputs, log = offline(tiny_model, options, tmp_path, known)
    assert len(outputs) == 12
    assert RunData.load(tmp_path / "run").is_finished, log[-3000:]
    done = replay(tmp_path / "run")
    assert (done.returncode, done.stdout.partition(":")[0]) == (0, "equal"), done.stdout + done.stderr
