"""The commands on a vLLM as their user gives them: a server, replicas in processes, a profile and a validation."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from vajra_py.config import load_config
from vajra_py.experiment.runs.replay import replay
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.runtime.records.input_log import INPUTS_FILE
from vajra_py.runtime.records.json_lines import read_rows

STARTUP_S = 400.0
"""Loading vLLM on a busy machine."""
COMMAND = [sys.executable, "-P", "-c", "from vajra_py.cli.main import main; main()"]
EXPERIMENT: dict[str, Any] = {
    "version": 1,
    "preset": "vllm-v1-priority",
    "replica": {
        "max_batch_size": 8,
        "max_batch_tokens": 128,
        "max_model_len": 256,
        "memory": {"block_size": 32, "num_blocks": 24},
    },
    "workload": {
        "type": "synthetic",
        "num_requests": 8,
        "arrivals": {"type": "poisson", "rate": 20},
        "prompt_tokens": {"type": "uniform", "min": 10, "max": 100},
        "output_tokens": {"type": "uniform", "min": 5, "max": 20},
    },
}


def experiment(folder: Path, model: str, **vllm: Any) -> Path:
    """The file of an experiment; JSON is YAML."""
    section = {"model": model, "engine_args": {"enforce_eager": True}, **vllm}
    mapping = {**EXPERIMENT, "output": {"dir": str(folder / "runs")}, "backend": {"vllm": section}}
    (folder / "experiment.yaml").write_text(json.dumps(mapping))
    return folder / "experiment.yaml"


def vajra(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=STARTUP_S)


class Server:
    """`vajra serve` in a process of its own, from its first line to its end."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "serve", "--port", "0", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self.log: list[str] = []
        self.url = self._address()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _address(self) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            found = re.search(r"listening on (\S+)", line)
            if found:
                return found[1]
        raise AssertionError("".join(self.log))

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.log += list(self.process.stderr)

    def wait_ready(self) -> None:
        pause, deadline = threading.Event(), time.monotonic() + STARTUP_S
        while httpx.get(f"{self.url}/ready").status_code != 200:
            assert self.process.poll() is None, "".join(self.log)
            assert time.monotonic() < deadline, "".join(self.log)
            pause.wait(0.2)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self._reader.join(60)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


def test_a_server_gives_objectives_to_the_policies_and_its_session_is_replayed(tiny_model: str, tmp_path: Path) -> None:
    session = tmp_path / "session"
    server = Server(str(experiment(tmp_path, tiny_model)), "--save-run", str(session))
    try:
        server.wait_ready()
        body = {"model": Path(tiny_model).name, "prompt": list(range(30, 90)), "max_tokens": 6, "ignore_eos": True}
        headers = {"x-slo-ttft-ms": "750", "x-slo-tpot-ms": "40", "x-slo-class": "gold"}
        first = httpx.post(
            f"{server.url}/v1/completions",
            json={**body, "temperature": 0, "priority": -3, "logprobs": 2},
            headers=headers,
            timeout=60,
        )
        assert first.status_code == 200, first.text
        choice = first.json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert len(choice["logprobs"]["tokens"]) == 6
        again = httpx.post(f"{server.url}/v1/completions", json={**body, "temperature": 0}, timeout=60)
        assert again.json()["choices"][0]["text"] == choice["text"]
    finally:
        assert server.stop() == 0, "".join(server.log)
    arrivals = [row for row in read_rows(session / INPUTS_FILE) if "request_id" in json.dumps(row)]
    said = json.dumps(arrivals[0])
    assert all(one in said for one in ("0.75", "0.04", "gold", "-3")), said
    report = replay(session)
    assert report.difference is None
    assert report.num_requests == 2


def test_replicas_in_processes_are_replayed(tiny_model: str, tmp_path: Path) -> None:
    file = experiment(tmp_path, tiny_model, workers="process")
    done = vajra("run", str(file), "-q", "--set", "num_replicas=2", "--set", "scheduling.replicaset_scheduler=pull")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "experiment"
    run = RunData.load(folder)
    assert run.requests().num_rows == 8
    assert set(run.requests().column("reason").to_pylist()) == {"stop"}
    assert {0, 1} == set(run.steps().column("replica_id").to_pylist())
    again = vajra("replay", str(folder))
    assert again.returncode == 0
    assert again.stdout.startswith("equal:")


def test_a_profile_predicts_what_validation_compares(tiny_model: str, tmp_path: Path) -> None:
    file, profile = experiment(tmp_path, tiny_model), tmp_path / "profile.json"
    made = vajra("profile", "--config", str(file), "-o", str(profile), "--passes", "1", "--random", "2", "-q")
    assert made.returncode == 0, made.stderr
    latency = json.dumps({"type": "profiled", "path": str(profile)})
    done = vajra("run", str(file), "-q", "--validate", "--set", f"backend.vllm.latency={latency}")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ *ttft_p50_ms +[\d.]+ +[\d.]+ ", done.stdout, re.MULTILINE), done.stdout
    run = tmp_path / "runs" / "experiment"
    assert RunData.load(run / "simulated").is_finished
    assert load_config(run / "config.yaml").backend.settings.latency.type == "profiled"


def test_what_vllm_does_not_take_is_one_line(tiny_model: str, tmp_path: Path) -> None:
    done = vajra("run", str(experiment(tmp_path, tiny_model, engine_args={"enforce_eagre": True})), "-q")
    assert done.returncode == 2, done.stderr
    said = "backend.vllm.engine_args.enforce_eagre: vLLM has none of that name. Did you mean 'enforce_eager'?"
    lines = [line for line in done.stderr.splitlines() if said in line]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
