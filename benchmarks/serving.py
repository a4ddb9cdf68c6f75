"""Measure what HTTP and streaming add to the engine's own throughput, and to the time to the first token.

`python benchmarks/serving.py [MODEL]` (without a model one of `--size` is written). For each of `--streams`, the same requests
go to the engine in a process of its own, at most so many of them at a time, and over HTTP to a server process, where each
stream that ends is followed by another; alternately in one run. The clients are a third process (this one), which shares the
machine's cores with the server. Compared are the times and, since a shared host takes cores away for seconds, the CPU seconds:
of the server with its clients, over the engine's. `--burst` sends as many requests as there are streams, all at once: the
beginning, when not all are there yet, is a large part of it. TTFT at low load: what clients measure less what the engine
measures.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Any, cast

import httpx

NUM_STREAMS = 64
PROMPT_TOKENS = 32
OUTPUT_TOKENS = range(64, 193)
"""Lengths of the outputs, so that streams end one by one."""
ROUNDS = 5
NUM_LONE = 40
READ_EVERY_S = 0.01
"""Interval between reads of the clients; long, so that they use little of the cores that they share with the server."""
FLAGS = {"max-num-seqs": NUM_STREAMS, "max-model-len": 512, "num-gpu-blocks-override": 1024, "block-size": 16}
MAIN = "from vajra_py.cli.main import main; main()"


@dataclass(slots=True)
class Served:
    """The server process and its address."""

    process: subprocess.Popen[str]
    host: str
    port: int

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"http://{self.host}:{self.port}"


def flags_for(num_streams: int) -> dict[str, int]:
    """Flags of an engine that runs so many requests at once."""
    return {**FLAGS, "max-num-seqs": num_streams, "num-gpu-blocks-override": 16 * num_streams}


def start_server(model: Path, num_streams: int = NUM_STREAMS) -> Served:
    """A server of the model, ready."""
    flags = [part for name, value in flags_for(num_streams).items() for part in (f"--{name}", str(value))]
    flags.append("--no-access-log")
    command = [sys.executable, "-P", "-c", MAIN, "serve", "--model", str(model), "--port", "0", *flags]
    process = subprocess.Popen([*command, "--served-model-name", "m"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = next(line for line in process.stderr if "listening on " in line)
    url = httpx.URL(line.split("listening on ")[1].split()[0])
    served = Served(process, url.host, url.port or 80)
    for _ in range(3000):
        if httpx.get(f"{served.url}/ready").status_code == 200:
            return served
        time.sleep(0.1)
    raise TimeoutError("the server did not become ready")


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: its prompt, and how many tokens it wants."""

    prompt: list[int]
    max_tokens: int


def asked(round_number: int, num_requests: int) -> list[Asked]:
    """Requests whose prompts no other round shares a prefix with."""
    return [
        Asked(
            [3 + (17 * round_number + 5 * k + j * j) % 900 for j in range(PROMPT_TOKENS)],
            OUTPUT_TOKENS[37 * k % len(OUTPUT_TOKENS)],
        )
        for k in range(num_requests)
    ]


def engine_alone(model: Path, num_streams: int, num_requests: int) -> None:
    """Run in a separate process: for each line on standard input, run the round's requests and print their duration."""
    from vajra_py.engine.compute import SamplingParams
    from vajra_py.engine.llm import LLM
    from vajra_py.serve.session.configure import ModelFlags

    given: dict[str, Any] = {name.replace("-", "_"): value for name, value in flags_for(num_streams).items()}
    with LLM(model, ModelFlags(model=str(model), **given).mapping()) as llm:
        print("ready", flush=True)
        for line in sys.stdin:
            wanted = asked(int(line), num_requests)
            params = [SamplingParams(max_tokens=one.max_tokens, temperature=0.0, ignore_eos=True) for one in wanted]
            started = time.perf_counter()
            llm.generate([one.prompt for one in wanted], params)
            print(time.perf_counter() - started, flush=True)


def begin_stream(served: Served, wanted: Asked) -> socket.socket:
    """Ask for a streamed completion over a bare connection."""
    body = {
        "model": "m",
        "prompt": wanted.prompt,
        "max_tokens": wanted.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    payload = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {served.host}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(payload)}\r\nconnection: close\r\n\r\n"
    )
    connection = socket.create_connection((served.host, served.port))
    connection.sendall(head.encode() + payload)
    return connection


def first_token_s(served: Served, prompt: list[int]) -> float:
    """Seconds until a lone request's first token is there."""
    started = time.perf_counter()
    with begin_stream(served, Asked(prompt, 2)) as connection:
        received = b""
        while b"data: " not in received:
            received += connection.recv(65536)
        seconds = time.perf_counter() - started
        assert received.startswith(b"HTTP/1.1 200"), received
        while connection.recv(65536):
            continue
    return seconds


def over_http(served: Served, wanted: Sequence[Asked], num_streams: int = NUM_STREAMS) -> float:
    """Seconds that the requests take as streams, so many of them at a time."""
    started = time.perf_counter()
    selector = selectors.DefaultSelector()
    following = iter(wanted)

    def begin(most: int) -> None:
        for one in islice(following, most):
            selector.register(begin_stream(served, one), selectors.EVENT_READ, bytearray())

    begin(num_streams)
    while selector.get_map():
        time.sleep(READ_EVERY_S)
        for key, _ in selector.select():
            connection = cast(socket.socket, key.fileobj)
            piece = connection.recv(65536)
            key.data[:] = key.data[-64:] + piece
            if not piece:
                assert b"[DONE]" in key.data
                selector.unregister(connection)
                connection.close()
                begin(1)
    return time.perf_counter() - started


def cpu_s(process: subprocess.Popen[str]) -> float:
    """CPU seconds of a process so far, all threads together."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def engine_ttft(served: Served) -> tuple[float, float]:
    """(sum, count) of the TTFTs that the engine has measured."""
    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    values = [
        next(float(line.split()[-1]) for line in lines if line.startswith(f"vajra:time_to_first_token_seconds_{what}"))
        for what in ("sum", "count")
    ]
    return values[0], values[1]


def lone_requests(served: Served) -> float:
    """Return the seconds that HTTP adds to the mean TTFT of sequential requests."""
    first_token_s(served, [7] * PROMPT_TOKENS)
    total, count = engine_ttft(served)
    measured = [first_token_s(served, [9 + number] * PROMPT_TOKENS) for number in range(NUM_LONE)]
    later, count_later = engine_ttft(served)
    assert count_later - count == NUM_LONE
    return mean(measured) - (later - total) / NUM_LONE


def measure(model: Path, num_streams: int, num_requests: int, rounds: int) -> dict[str, Any]:
    """Return the figures."""
    served = start_server(model, num_streams)
    command = [sys.executable, "-P", __file__, "--engine", str(model)]
    command += ["--streams", str(num_streams), "--requests", str(num_requests)]
    engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert engine.stdin is not None
    assert engine.stdout is not None
    try:
        assert engine.stdout.readline().strip() == "ready"
        alone, http, shares = [], [], []
        for round_number in range(rounds + 1):
            engine_cpu, server_cpu, clients_cpu = cpu_s(engine), cpu_s(served.process), time.process_time()
            engine.stdin.write(f"{round_number}\n")
            engine.stdin.flush()
            alone.append(float(engine.stdout.readline()))
            http.append(over_http(served, asked(round_number, num_requests), num_streams))
            serving = cpu_s(served.process) - server_cpu + time.process_time() - clients_cpu
            shares.append(serving / (cpu_s(engine) - engine_cpu))
        added_s = lone_requests(served)
    finally:
        engine.stdin.close()
        engine.wait(60)
        served.process.terminate()
        served.process.wait(60)
    ratios = [one / other for one, other in zip(http[1:], alone[1:], strict=True)]  # the first round warms up
    tokens = sum(one.max_tokens for one in asked(0, num_requests))
    return {
        "streams": num_streams,
        "engine_tokens_per_s": round(tokens / median(alone[1:]), 1),
        "http_tokens_per_s": round(tokens / median(http[1:]), 1),
        "http_of_engine_throughput": round(1 / median(ratios), 3),
        "http_over_engine_time": round(median(ratios), 3),
        "http_over_engine_time_of_rounds": [round(one, 3) for one in ratios],
        "http_over_engine_cpu": round(median(shares[1:]), 3),
        "added_ttft_ms": round(1e3 * added_s, 2),
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, help="model directory; without one a model is made")
    parser.add_argument("--size", default="10m", help="of the model that is made: 1m, 10m or 30m")
    parser.add_argument(
        "--streams", type=int, nargs="+", default=[64], help="requests at a time; several: one after another"
    )
    parser.add_argument("--requests", type=int, help="of one round; three times the streams unless said otherwise")
    parser.add_argument("--burst", action="store_true", help="as many requests as streams")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--engine", action="store_true", help="only the engine, without a server")
    options = parser.parse_args()
    if options.model is not None and not (options.model / "config.json").is_file():
        parser.error(f"{options.model}: not a model directory (config.json is missing)")
    if options.engine and options.model is None:
        parser.error("--engine: needs a model directory")
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if model is None:
            model = Path(folder) / "tiny"
            made = [sys.executable, "-P", "-c", MAIN, "model", "tiny", str(model), "--size", options.size]
            subprocess.run(made, check=True)
        for num_streams in options.streams:
            num_requests = options.requests or num_streams * (1 if options.burst else 3)
            if options.engine:
                engine_alone(model, num_streams, num_requests)
            else:
                print(json.dumps(measure(model, num_streams, num_requests, options.rounds), indent=1), flush=True)


if __name__ == "__main__":
    main()
