"""Server fixtures: a real process with a tiny model, and one in a thread with a scripted runner."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.processes import SOON_S, STARTUP_S, ServerProcess, start_server, wait_until
from vajra_py.engine.compute import ModelFacts, RunnerOptions, StepInput, StepOutput, TokenLogprobs
from vajra_py.plugins import load_registry


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    return wait_until


def _is_ready(server: ServerProcess) -> bool:
    assert server.process.poll() is None, "".join(server.log)
    return httpx.get(f"{server.url}/ready").status_code == 200


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    script = "from vajra_py.cli.main import main; main()"
    subprocess.run([sys.executable, "-P", "-c", script, "model", "tiny", str(folder)], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def tiny_server(tiny_model: Path) -> Iterator[ServerProcess]:
    """A server process with a tiny model; priorities count, one replica."""
    flags = ["--num-gpu-blocks-override", "512", "--block-size", "16", "--max-model-len", "512", "--max-num-seqs", "16"]
    server = start_server("--model", str(tiny_model), "--scheduling-policy", "priority", *flags)
    try:
        wait_until(lambda: _is_ready(server), "the server is ready", STARTUP_S)
        yield server
    finally:
        assert server.terminate() == 0, "".join(server.log)


@pytest.fixture(scope="session")
def start_server_process() -> Callable[..., ServerProcess]:
    return start_server


@pytest.fixture(scope="session")
def tls_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A key and a certificate of 127.0.0.1."""
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return key, certificate


# A scripted runner: no tensors, and steps run when the test permits them.


@dataclass
class Strings:
    """Controls of a test: permitted steps, failing replicas, and observations."""

    may_step: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    runs_freely: bool = True
    num_steps: int = 0
    breaks: bool = False
    prompts: list[Sequence[int]] = field(default_factory=list)

    def hold(self) -> None:
        self.runs_freely = False

    def step(self, count: int = 1) -> None:
        self.may_step.release(count)

    def let_go(self) -> None:
        self.runs_freely = True
        self.may_step.release(8)  # one per possible replica


class Puppet:
    """`ModelRunner` whose k-th token of any request is 10 + (position % 50)."""

    def __init__(self, options: RunnerOptions, strings: Strings) -> None:
        self._strings = strings
        self._lengths: dict[int, int] = {}
        self._wants: dict[int, bool] = {}
        self.facts = ModelFacts(
            model_type="puppet",
            num_parameters=1,
            weight_bytes=4,
            num_layers=1,
            num_query_heads=1,
            num_kv_heads=1,
            head_dim=1,
            kv_bytes_per_token=8,
            block_size=options.block_size,
            max_model_len=options.max_model_len or 1024,
            vocab_size=1000,
            eos_token_ids=(0,),
            dtype="float32",
            device="cpu",
            forward="puppet",
        )

    def profile_num_blocks(self, memory_fraction: float) -> int:
        return 1024

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        pass

    def run(self, step: StepInput) -> StepOutput:
        if not self._strings.runs_freely:
            self._strings.may_step.acquire()
        self._strings.num_steps += 1
        if self._strings.breaks:
            raise RuntimeError("the puppet is broken")
        for row in step.new:
            self._wants[row.slot] = row.sampling.logprobs is not None
        slots = list(step.decodes)
        for slot in slots:
            self._lengths[slot] += 1
        for chunk in step.chunks:
            self._lengths[chunk.slot] = chunk.num_computed + len(chunk.token_ids)
            self._strings.prompts.append(chunk.token_ids)
            if chunk.samples:
                slots.append(chunk.slot)
        tokens = [10 + self._lengths[slot] % 50 for slot in slots]
        logprobs = {slot: TokenLogprobs(-0.5, 1, ((7, -0.5),)) for slot in slots if self._wants[slot]}
        return StepOutput(slots, tokens, 0.001, logprobs)

    def close(self) -> None:
        pass


@dataclass
class PuppetServer:
    """A server in a thread of the test's own process."""

    url: str
    strings: Strings
    service: Any
    server: Any
    thread: threading.Thread

    def puppet(self, options: RunnerOptions) -> Puppet:
        """Default loader, unless a test sets another."""
        return Puppet(options, self.strings)

    def drain(self) -> None:
        self.server.handle_exit(signal.SIGTERM, None)

    def stop(self) -> None:
        self.strings.let_go()
        self.strings.runs_freely = True
        self.drain()
        self.thread.join(SOON_S)
        assert not self.thread.is_alive()

    def post(self, timeout: float = SOON_S, **body: Any) -> httpx.Response:
        """A completion of token ids."""
        body = {"model": "puppet", "prompt": [1, 2, 3], "max_tokens": 4, **body}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=timeout)

    @contextmanager
    def asked_for_much(self, **body: Any) -> Iterator[socket.socket]:
        """Connection with a small receive buffer and 32 requested long streams that are never read."""
        asked = {"n": 32, "max_tokens": 200, "stream": True, "return_token_ids": True, "logprobs": 5, **body}
        content = json.dumps({"model": "puppet", "prompt": [1, 2, 3], **asked}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(content)}\r\n"
        for listener in self.server.servers[0].sockets:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # inherited by connections
        address = httpx.URL(self.url)
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(SOON_S)
            connection.connect((address.host, address.port))
            connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + content)
            yield connection


PUPPET_CONFIG: dict[str, Any] = {
    "version": 1,
    "name": "puppet",
    "preset": "vllm-v1",
    "replica": {"max_batch_size": 4, "max_model_len": 256, "memory": {"num_blocks": 64}},
}


@pytest.fixture
def puppet_server(tmp_path: Path) -> Iterator[Callable[..., PuppetServer]]:
    """Start a server over a puppet; `settings` go into the experiment, the rest are `ServeOptions`."""
    from vajra_py.config import system_from_mapping
    from vajra_py.experiment.runs.recording import RunRecording
    from vajra_py.serve.app import Service
    from vajra_py.serve.http.options import ServeOptions
    from vajra_py.serve.server import DrainingServer, bind
    from vajra_py.serve.session.session import EngineSession, SessionParts

    folder = tmp_path / "puppet"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 1024}))
    started: list[PuppetServer] = []

    def start(settings: dict[str, Any] | None = None, ready: bool = True, **given: Any) -> PuppetServer:
        strings = given.pop("strings", None) or Strings()
        load = given.pop("load", None) or (lambda options: Puppet(options, strings))
        engine = {"model": str(folder), "random_weights": True, **given.pop("engine", {})}
        mapping = {**PUPPET_CONFIG, **(settings or {}), "backend": {"engine": engine}}
        registry = given.pop("registry", None) or load_registry()
        config = system_from_mapping(mapping, (), registry)
        tracing = given.pop("tracing", None)
        options = ServeOptions(port=0, **given)
        recording = RunRecording(config, registry, options.save_run) if options.save_run is not None else None
        session = EngineSession(SessionParts(config, registry, recording=recording, replaced={"load": load}))
        service = Service(session, options, tracing)
        bound = bind(options.host, options.port)
        server = DrainingServer(service)
        thread = threading.Thread(target=lambda: server.run(sockets=[bound]), daemon=True)
        thread.start()
        url = "http://{}:{}".format(*bound.getsockname())
        one = PuppetServer(url, strings, service, server, thread)
        started.append(one)
        wait_until(lambda: server.started, "the server listens")
        if ready:
            wait_until(lambda: session.is_ready, "the session is ready")
        return one

    yield start
    for one in started:
        if one.thread.is_alive():
            one.stop()
