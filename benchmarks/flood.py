"""Flood a server with random requests whose clients partly go away, and kill its workers meanwhile.

Every request must end in exactly one of: finished, given up by its client, or an explicit error. `check_rest` looks for what is left
when the flood is over: nothing runs or waits, no KV block is used, and every replica that was lost came back.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx
import numpy as np

EXPLICIT = frozenset({400, 408, 429, 503})
STARTUP_S = 300.0
PATIENCE_S = 300.0
"""Seconds that a client that stays connected waits for the next byte."""


@dataclass(slots=True)
class Outcome:
    """Outcomes of the requests.

    Attributes:
        counts: how many ended in which way: "finished", "gone" (the client went away), "429", "503", …
        wrong: what must not happen, in words.
        num_killed: workers killed.
        rss: the server's resident bytes, in the order in which they were read.
    """

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_killed: int = 0
    rss: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Plan:
    """Load and disturbances of the flood.

    Attributes:
        num_clients: clients at once.
        seconds: how long they go on.
        gone_fraction: of the clients, how many go away at a random moment.
        max_prompt_tokens: longest prompt.
        max_tokens: longest output.
        vocab_size: tokens of the model.
        seed: of what they ask.
        kill_every_s: mean time between two kills, where there is a process to kill.
    """

    model: str
    num_clients: int = 64
    seconds: float = 120.0
    gone_fraction: float = 0.33
    max_prompt_tokens: int = 96
    max_tokens: int = 48
    vocab_size: int = 1000
    seed: int = 0
    kill_every_s: float = 8.0


@dataclass(frozen=True, slots=True)
class Hands:
    """Actions on a server from outside.

    Attributes:
        workers: process ids of workers that may be killed now.
        rss: its resident bytes now.
    """

    workers: Callable[[], list[int]]
    rss: Callable[[], int]


async def flood(url: str, plan: Plan, api_key: str | None = None, hands: Hands | None = None) -> Outcome:
    """Flood the server at `url`, and kill its workers if `hands` is given; return the outcome."""
    outcome = Outcome()
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=plan.num_clients)
    until = time.monotonic() + plan.seconds
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=PATIENCE_S) as client:

        async def one(number: int) -> None:
            stream = np.random.default_rng([plan.seed, number])
            while time.monotonic() < until:
                await _one_request(client, plan, stream, outcome)

        others = [] if hands is None else [_kill(plan, hands, outcome, until), _weigh(hands, outcome, until)]
        await asyncio.gather(*(one(number) for number in range(plan.num_clients)), *others)
    return outcome


async def _kill(plan: Plan, hands: Hands, outcome: Outcome, until: float) -> None:
    """Kill one worker after another, at random."""
    stream = np.random.default_rng([plan.seed, plan.num_clients])
    while True:
        await asyncio.sleep(plan.kill_every_s * float(stream.uniform(0.5, 1.5)))
        if time.monotonic() > until:
            return
        alive = await asyncio.to_thread(hands.workers)
        if alive:
            os.kill(alive[int(stream.integers(len(alive)))], signal.SIGKILL)
            outcome.num_killed += 1


async def _weigh(hands: Hands, outcome: Outcome, until: float) -> None:
    while time.monotonic() < until:
        outcome.rss.append(hands.rss())
        await asyncio.sleep(0.25)


async def _one_request(client: httpx.AsyncClient, plan: Plan, stream: np.random.Generator, outcome: Outcome) -> None:
    length = int(stream.integers(1, plan.max_prompt_tokens + 1))
    body = {
        "model": plan.model,
        "prompt": stream.integers(1, plan.vocab_size, length).tolist(),
        "max_tokens": int(stream.integers(1, plan.max_tokens + 1)),
        "stream": bool(stream.integers(2)),
        "priority": int(stream.integers(-2, 3)),
        "ignore_eos": True,
        "return_token_ids": True,
    }
    began = time.monotonic()
    patience_s = float(stream.exponential(0.05)) if stream.random() < plan.gone_fraction else None
    try:
        async with asyncio.timeout(patience_s):
            how = await _ask(client, body)
    except TimeoutError:
        how = "gone"
    except httpx.HTTPError as error:
        how = "broken"
        after_s = time.monotonic() - began
        outcome.wrong.append(f"{type(error).__name__} after {after_s:.3f} s: {error!r}, from {error.__cause__!r}")
    if how.startswith("wrong"):
        outcome.wrong.append(how)
    outcome.counts[how.split(":")[0]] += 1


async def _ask(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    if not body["stream"]:
        response = await client.post("/v1/completions", json=body)
        if response.status_code != 200:
            return _status(response.status_code, response.text)
        answer = response.json()["choices"][0]
        return _judged(len(answer["token_ids"]), answer["finish_reason"], body)
    async with client.stream("POST", "/v1/completions", json=body) as streamed:
        if streamed.status_code != 200:
            await streamed.aread()
            return _status(streamed.status_code, streamed.text)
        text = (await streamed.aread()).decode()
    events = [
        line.removeprefix("data: ") for line in text.split("\n") if line
    ]  # U+2028 and similar characters are not line ends
    if not events or events[-1] != "[DONE]":
        return f"wrong: a stream ended without [DONE] ({events[-1:]})"
    pieces = [json.loads(event) for event in events[:-1]]
    if "error" in pieces[-1]:
        return "error in the stream"
    choices = [piece["choices"][0] for piece in pieces]
    num_tokens = sum(len(choice["token_ids"]) for choice in choices)
    return _judged(num_tokens, choices[-1]["finish_reason"], body)


def _status(status: int, text: str) -> str:
    return str(status) if status in EXPLICIT else f"wrong: status {status} ({text[:200]})"


def _judged(num_tokens: int, reason: str, body: dict[str, Any]) -> str:
    if num_tokens == body["max_tokens"] and reason == "length":
        return "finished"
    return f"wrong: {num_tokens} tokens and {reason!r} where {body['max_tokens']} were to come"


# A server of its own


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return 0 if found is None else 1024 * int(found[1])


def worker_pids(pid: int) -> list[int]:
    """Processes that a server's replicas run in."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in file.read_text().split():
            try:
                is_worker = b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
            except OSError:  # ended meanwhile
                continue
            if is_worker:
                found.append(int(child))
    return found


@contextmanager
def own_server(
    arguments: list[str], variables: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`vajra serve` with these arguments and further environment variables, ready; its process and its URL."""
    command = [sys.executable, "-P", "-c", "from vajra_py.cli.main import main; main()", "serve", "--port", "0"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, *arguments], stderr=log, env={**os.environ, **(variables or {})})
        try:
            yield process, _ready_url(process, log)
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait(60)
            if process.returncode:
                log.seek(0)
                sys.stderr.write(log.read()[-4000:].decode("utf-8", "replace"))


def _ready_url(process: subprocess.Popen[bytes], log: IO[bytes]) -> str:
    deadline = time.monotonic() + STARTUP_S
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
        said = re.search(rb"listening on (\S+)", os.pread(log.fileno(), 10_000, 0))
        with suppress(httpx.TransportError):  # it may end while it loads
            if said is not None and httpx.get(f"{said[1].decode()}/ready", verify=False).status_code == 200:
                return said[1].decode()
    raise RuntimeError("the server did not become ready")


def numbers(url: str) -> dict[str, float]:
    """Sums over labels of a server's numbers."""
    found: defaultdict[str, float] = defaultdict(float)
    for line in httpx.get(f"{url}/metrics", verify=False).text.splitlines():
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            found[name.split("{")[0]] += float(value)
    return dict(found)


def check_rest(url: str, outcome: Outcome, within_s: float = 300.0) -> dict[str, float]:
    """Wait until the server is idle with all its replicas, and record every condition that is not met."""
    deadline = time.monotonic() + within_s
    while True:
        found, health = numbers(url), httpx.get(f"{url}/health").json()
        wrong = [
            f"{name} is {found.get(name)} in the end"
            for name in ("vajra:num_requests_running", "vajra:num_requests_waiting", "vajra:kv_cache_usage_perc")
            if found.get(name) != 0
        ]
        if health["replicas_up"] != health["replicas"]:
            wrong.append(f"{health['replicas_up']} of {health['replicas']} replicas are up in the end")
        lost, back = (found.get(f"vajra:replica_{what}_total", 0) for what in ("failures", "restarts"))
        if lost != back or lost > outcome.num_killed:
            wrong.append(f"{outcome.num_killed} workers were killed; {lost} replicas were lost, and {back} came back")
        if not wrong or time.monotonic() > deadline:
            outcome.wrong += wrong
            return found
        time.sleep(0.5)


def growth(rss: list[int]) -> tuple[int, int]:
    """Largest resident size in the second and in the last quarter."""
    quarter = max(1, len(rss) // 4)
    return max(rss[quarter : 2 * quarter] or rss), max(rss[-quarter:])
