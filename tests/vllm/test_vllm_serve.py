"""`vllm serve` and `vllm.LLM` with their own processes: the experiment file reaches the one that schedules."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.vllm.plugins import install, install_broken, install_own_doors, python_path
from vajra_py.vllm.settings import EXPERIMENT_VARIABLE

TEMPLATE = "[vajra]\nvajra_example_policies = vajra_example_policies\n"
EXPERIMENT = """
version: 1
policy_timeout_s: 5
scheduling:
  request_prioritizer: {policy: example_aging_shortest, params: {forgiven_tokens: 64}}
  replicaset_scheduler: example_prefix_affinity
  replica_scheduler: {policy: breaks, params: {at_step: 1500}}
"""
DEADLINE_S = 240.0


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Variables of a process that finds this package, its template's and the broken policies, and vLLM under its own name."""
    site = folder / "site"
    site.mkdir()
    install_broken(site)
    install_own_doors(site)
    install(site, "vajra-example-policies", TEMPLATE)
    stub = (
        site / "vllm-0.32.0.dist-info"
    )  # `vllm` reads the version of a package `vllm`, but the build for CPUs has another name
    stub.mkdir()
    (stub / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    own = {"PYTHONPATH": python_path(site), "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    return {**os.environ, **own, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **more}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", *arguments]


@dataclass
class Server:
    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def post(self, **body: Any) -> httpx.Response:
        given = {"model": "tiny", "prompt": list(range(20, 60)), "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        return httpx.post(f"{self.url}/v1/completions", json=given | body, timeout=DEADLINE_S)


@contextmanager
def serving(model: str, folder: Path, experiment: str, *arguments: str, **variables: str) -> Iterator[Server]:
    """A server that schedules by an experiment, in a process group of its own, which is stopped by SIGTERM unless it has ended."""
    file, log = folder / "experiment.yaml", folder / "log"
    file.write_text(experiment)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    given = ["serve", model, "--served-model-name", "tiny", "--scheduler-cls", "vajra_py.vllm.Scheduler"]
    given += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "1024", "--enforce-eager"]
    given += ["--dtype", "float32", "--max-num-seqs", "16", *arguments]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command(*given),
            env=environment(folder, **{EXPERIMENT_VARIABLE: str(file)}, **variables),
            cwd=folder,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    found = Server(f"http://127.0.0.1:{port}", log, process)
    try:
        _wait(found)
        yield found
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tiny_model, tmp_path_factory.mktemp("serve"), EXPERIMENT) as found:
        yield found


def _wait(server: Server) -> None:
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        assert server.process.poll() is None, server.log.read_text()[-3000:]
        try:
            if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise AssertionError(server.log.read_text()[-3000:])


def test_requests_over_http_are_answered(server: Server) -> None:
    one = server.post(logprobs=1, priority=3, vllm_xargs={"vajra_ttft_slo_s": 0.5, "vajra_tenant": "a"})
    assert one.status_code == 200, one.text
    choices = one.json()["choices"]
    assert len(choices[0]["logprobs"]["tokens"]) == 16
    assert len(server.post(n=3, temperature=0.8, seed=1).json()["choices"]) == 3
    assert {choice["finish_reason"] for choice in choices} == {"length"}
    again = server.post()
    assert again.json()["choices"][0]["text"] == choices[0]["text"]
    stopped = server.post(stop=[choices[0]["text"][3:6]]).json()["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert choices[0]["text"].startswith(stopped["text"])


def test_a_stream_that_its_client_leaves_holds_nothing(server: Server) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True, "temperature": 0}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=DEADLINE_S) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        assert json.loads(next(lines).removeprefix("data: "))["choices"]
    end = time.monotonic() + 60
    while metric(server, "vllm:num_requests_running") + metric(server, "vllm:kv_cache_usage_perc") > 0:
        assert time.monotonic() < end
        server.post(max_tokens=1)


def metric(server: Server, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))


def test_wrong_objectives_are_an_error_of_that_request(server: Server) -> None:
    answer = server.post(vllm_xargs={"vajra_ttft_slo_s": -1.0})
    assert answer.status_code == 400
    assert "vajra_ttft_slo_s" in answer.json()["error"]["message"]
    answer = server.post(vllm_xargs={"vajra_tttft_slo_s": 1.0})
    assert answer.status_code == 400
    assert "vajra_ttft_slo_s" in answer.json()["error"]["message"], "the name that was meant"
    assert server.post().status_code == 200


def test_a_policy_that_breaks_the_contract_ends_requests_and_not_the_server(server: Server) -> None:
    answers = [server.post(max_tokens=900).status_code for _ in range(2)]
    assert answers[-1] == 500
    assert server.post().status_code == 500  # the file names no fallback, so later requests are refused too
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
    log = server.log.read_text()
    assert "policy breaks" in log
    assert "ZeroDivisionError: a slip" in log
    assert "Traceback" not in log


OFFLINE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, options = sys.argv[1], json.loads(sys.argv[2])
    llm = LLM(model, dtype="float32", max_model_len=512, enforce_eager=True, num_gpu_blocks_override=12, max_num_seqs=16, **options)
    prompts = [{"prompt_token_ids": [(7 * i + j) % 900 + 3 for j in range(20 + 9 * i)]} for i in range(12)]
    params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    print("OUT", json.dumps([(o.outputs[0].finish_reason, list(o.outputs[0].token_ids)) for o in outputs]))
"""


def offline(model: str, options: dict[str, Any], folder: Path, known: dict[str, str]) -> tuple[list[Any], str]:
    """What a `vllm.LLM` in a process of its own puts out, and all that it said."""
    script = folder / "offline.py"
    script.write_text(OFFLINE)
    command = [sys.executable, str(script), model, json.dumps(options)]
    done = subprocess.run(command, env=known, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    said = next(line for line in done.stdout.splitlines() if line.startswith("OUT "))
    return json.loads(said[4:]), done.stderr + done.stdout


@pytest.mark.long
def test_offline_with_processes_of_its_own_a_fallback_finishes_what_runs(tiny_model: str, tmp_path: Path) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text(EXPERIMENT.replace("1500", "9") + "backend: {vllm: {fallback: vllm-v1}}\n")
    ours = {"scheduler_cls": "vajra_py.vllm.Scheduler", "additional_config": {"vajra": {"experiment": str(file)}}}
    runs, known = [], environment(tmp_path)
    for options in (ours, {}):
        outputs, log = offline(tiny_model, options, tmp_path, known)
        runs.append(outputs)
        if options:
            assert "policy breaks" in log
    assert [reason for reason, _ in runs[0]] == ["length"] * 12
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("option", "change", "words"),
    [
        (["--pipeline-parallel-size", "2"], {}, ("--pipeline-parallel-size", "vLLM's own scheduler")),
        (["--additional-config", '{"vajra": {"experiment": "absent.yaml"}}'], {}, ("absent.yaml",)),
    ],
)
def test_what_cannot_be_scheduled_is_refused_in_a_line_before_the_model_is_loaded(
    tiny_model: str, tmp_path: Path, option: list[str], change: dict[str, Any], words: tuple[str, ...]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in Path(tiny_model).iterdir():
        if file.suffix != ".safetensors":  # so that loading it would be another error
            (model / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | change))
    done = subprocess.run(
        command("serve", str(model), "--scheduler-cls", "vajra_py.vllm.Scheduler", "--port", "0", *option),
        env=environment(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert all(word in last for word in words), done.stderr[-3000:]
    assert "Traceback" not in done.stderr
