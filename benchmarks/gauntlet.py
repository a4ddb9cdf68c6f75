"""Run a real server through everything that may harm it, and count the innocent clients that were harmed.

`make gauntlet SECONDS=600` runs, with a tiny model: any body of 8 MiB beside a client that asks for `/health`; a siege by hostile
requests, slow clients, broken bytes, schemathesis and policy swaps while the disk is full; killed workers under a flood; and
every preset under a flood. Innocent clients ask for greedy outputs that are known beforehand: another answer, an error or no
answer is harm. The exit code is 1 when an innocent was harmed, when a status of 500 or more was not asked for, when anything is left
in the end, or when a server's memory grew by more than `MAX_GROWTH_MIB`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flood
import httpx

NUM_INNOCENTS = 4
PATIENCE_S = 60.0
"""How long an innocent waits."""
MAX_GROWTH_MIB = 128
"""A server that has more memory than this in the end than when it was ready has a leak; caches and reused heaps stay below."""
KEY, ADMIN_KEY = "gauntlet", "gauntlet-admin"
JSON = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
ATTACKER = "127.0.0.2"
"""Connections that are held open come from here: limits are counted by address."""
PRESETS = (
    "minivllm",
    "nano-vllm",
    "nano-vllm-old",
    "nano-vllm-rs",
    "orca",
    "sarathi",
    "vajra",
    "vllm-v1",
    "vllm-v1-priority",
)
SWAPS = ("fixed_chunk", "dynamic_chunk", "vllm_v1")


@dataclass(slots=True)
class Tally:
    """What happened in a part of the gauntlet.

    Attributes:
        requests: requests sent, by status or by what else came of them.
        innocents: answers that innocents waited for.
        harmed: what innocents got instead.
        unasked: answers of status 500 or more that nobody asked for.
        wrong: what else must not be.
        health_ms: longest wait for `/health`, by what went on meanwhile.
        growth_mib: largest growth of the server's memory, by what went on meanwhile.
        facts: further figures.
    """

    requests: Counter[str] = field(default_factory=Counter)
    innocents: int = 0
    harmed: list[str] = field(default_factory=list)
    unasked: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    health_ms: dict[str, float] = field(default_factory=dict)
    growth_mib: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def shown(self) -> dict[str, Any]:
        """As JSON, with a few of each kind of trouble."""
        lists = {name: getattr(self, name)[:10] for name in ("harmed", "unasked", "wrong")}
        plain = {name: getattr(self, name) for name in ("innocents", "health_ms", "growth_mib", "facts")}
        return {"requests": dict(self.requests), **plain, **lists}

    def note(self, status: int, what: str, allowed: tuple[int, ...] = ()) -> None:
        """An answer to a hostile request."""
        self.requests[str(status)] += 1
        if status >= 500 and status not in allowed:
            self.unasked.append(f"{status} to {what}")


# Innocents


def innocent_body(number: int, model: str) -> dict[str, Any]:
    """A greedy request; the same one again and again."""
    stream = random.Random(number)
    prompt = [stream.randrange(1, 1000) for _ in range(stream.randrange(3, 60))]
    more = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": model, "prompt": prompt, "max_tokens": stream.randrange(4, 24), **more}


async def innocents(url: str, model: str, until: float, tally: Tally, retries: tuple[int, ...] = (429,)) -> None:
    """Ask again and again until then; statuses in `retries` are no harm."""
    async with httpx.AsyncClient(base_url=url, headers=JSON, timeout=PATIENCE_S) as client:
        expected: dict[int, list[int]] = {}
        for number in range(NUM_INNOCENTS):
            answer = await client.post("/v1/completions", json=innocent_body(number, model))
            expected[number] = answer.json()["choices"][0]["token_ids"]

        async def one(number: int) -> None:
            while time.monotonic() < until:
                try:
                    answer = await client.post("/v1/completions", json=innocent_body(number, model))
                except httpx.HTTPError as error:
                    tally.harmed.append(repr(error))
                    continue
                tally.requests[str(answer.status_code)] += 1
                if answer.status_code in retries:
                    await asyncio.sleep(0.2)
                    continue
                tally.innocents += 1
                if answer.status_code != 200:
                    tally.harmed.append(f"{answer.status_code}: {answer.text[:200]}")
                elif answer.json()["choices"][0]["token_ids"] != expected[number]:
                    tally.harmed.append(f"another output of innocent {number}")

        await asyncio.gather(*(one(number) for number in range(NUM_INNOCENTS)))


async def probe(url: str, name: str, over: asyncio.Event, tally: Tally, pause_s: float = 0.01) -> None:
    """Ask for `/health` until it is over; keep the longest wait."""
    longest = 0.0
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        await client.get("/health")
        while not over.is_set():
            began = time.perf_counter()
            answer = await client.get("/health")
            longest = max(longest, time.perf_counter() - began)
            if answer.status_code != 200:
                tally.harmed.append(f"/health: {answer.status_code}")
            await asyncio.sleep(pause_s)
    tally.health_ms[name] = round(max(longest * 1000, tally.health_ms.get(name, 0.0)), 1)


# Any body of 8 MiB


def large_bodies(model: str) -> dict[str, tuple[str, bytes]]:
    """Bodies of 8 MiB: (path, content) by name."""
    most = 8 * 2**20 - 512
    head = b'{"model":"%s",' % model.encode()

    def filled(before: bytes, element: bytes, after: bytes) -> bytes:
        return head + before + b",".join([element] * (most // (len(element) + 1))) + after

    prompt, chat = "/v1/completions", "/v1/chat/completions"
    part = b'"messages":[{"role":"user","content":['
    return {
        "-1 as tokens": (prompt, filled(b'"prompt":[', b"-1", b"]}")),
        "empty arrays": (prompt, filled(b'"prompt":[', b"[]", b"]}")),
        "empty objects": (chat, filled(b'"messages":[', b"{}", b"]}")),
        "empty parts": (chat, filled(part, b"{}", b"]}]}")),
        "messages": (chat, filled(b'"messages":[', b'{"role":"user","content":"a"}', b"]}")),
        "parts": (chat, filled(part, b'{"type":"text","text":"a"}', b"]}]}")),
        "tokens": (prompt, head + b'"prompt":[' + b"123," * 500_000 + b"1]}"),
        "text": (prompt, head + b'"prompt":"' + b"a " * (most // 2) + b'"}'),
        "one word": (prompt, head + b'"prompt":"' + b"a" * most + b'"}'),
        "escapes": (prompt, head + b'"prompt":"' + b"\\u00e9" * (most // 6) + b'"}'),
        "emoji": (prompt, head + b'"prompt":"' + "🚀".encode() * (most // 4) + b'"}'),
        "text of a message": (chat, head + b'"messages":[{"role":"user","content":"' + b"a b " * (most // 4) + b'"}]}'),
        "nesting": (prompt, head + b'"prompt":' + b"[" * most),
        "digits": (prompt, filled(b'"prompt":[', b"9" * 5000, b"]}")),
        "one number": (prompt, head + b'"prompt":' + b"9" * most + b"}"),
        "fields": (prompt, head + b",".join(b'"%d":1' % number for number in range(700_000)) + b"}"),
        "stop strings": (prompt, filled(b'"prompt":[1],"stop":[', b'"a"', b"]}")),
    }


async def bodies(url: str, pid: int, model: str, rounds: int, tally: Tally) -> None:
    """Send every body alone, with a client beside it that asks for `/health`; first that client alone, to compare."""
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(3.0, over.set)
    await probe(url, "nothing", over, tally, 0.002)
    for name, (path, content) in large_bodies(model).items():
        for _ in range(rounds):
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
            before, over = flood.resident_bytes(pid), asyncio.Event()
            prober = asyncio.create_task(probe(url, name, over, tally, 0.002))
            process = await asyncio.create_subprocess_exec(  # a client of its own: sending takes time too
                *(sys.executable, "-c", _SEND, url + path, KEY),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            out, _ = await process.communicate(content)
            over.set()
            await prober
            status = int(out)
            tally.note(status, name)
            if status not in (400, 429):
                tally.wrong.append(f"{status} to a body of {name}")
            grown = (_peak_bytes(pid) - before) / 2**20
            tally.growth_mib[name] = round(max(grown, tally.growth_mib.get(name, 0.0)), 1)


_SEND = """
import sys, httpx
url, key = sys.argv[1:]
headers = {"content-type": "application/json", "authorization": "Bearer " + key}
print(httpx.post(url, content=sys.stdin.buffer.read(), headers=headers, timeout=120).status_code)
"""


def _peak_bytes(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return 0 if found is None else 1024 * int(found[1])


# The siege


EDGES: dict[str, tuple[Any, ...]] = {
    "temperature": (1e-320, 5e-324, 1e-45, 1e-38, 100, -0.0, 1e308, "x"),
    "repetition_penalty": (1e-320, 1e-45, 1e-40, 100, 1e38),
    "top_p": (1e-320, 1e-45, 1, 1e-9),
    "min_p": (1, 1e-320),
    "top_k": (-1, 0, 1, 2**31 - 1, 2**31),
    "presence_penalty": (2, -2, 2.0000001),
    "frequency_penalty": (2, -2),
    "seed": (0, 2**63 - 1, -(2**63), 2**63),
    "logprobs": (0, 1, 20, 100, 101),
    "n": (1, 2, 16, 64, 65),
    "max_tokens": (1, 400, 2**31 - 1, 0, None),
    "min_tokens": (0, 400),
    "stop": ("a", ["a"] * 16, ["a"] * 17, [""], "\ud7ff\U0001f680"),
    "stop_token_ids": ([0], [2**31 - 1], list(range(64))),
    "priority": (-(2**31), 2**31 - 1, 2**31),
    "expires_after_ms": (1e-9, 1e12),
    "deadline_ms": (1e-9, 1e12),
    "prompt": ([2**31 - 1], [0] * 600, "", "\0", "🚀" * 100, "é" * 3000, [[1]] * 64, ["a", 1]),
    "echo": (True, False),
    "return_token_ids": (True,),
    "user": ("x" * 256, "x" * 257),
    "metadata": ({"a": "b"}, {"a": 1}),
    "stream_options": ({"include_usage": True}, {"a": 1}),
}


async def hostile(url: str, model: str, until: float, seed: int, tally: Tally) -> None:
    """Completions with parameters at the edge of what there is."""
    stream = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, headers=JSON, timeout=PATIENCE_S) as client:
        while time.monotonic() < until:
            body: dict[str, Any] = {"model": model, "prompt": [1, 2, 3], "max_tokens": 8}
            for name in stream.sample(list(EDGES), stream.randrange(1, 5)):
                body[name] = stream.choice(EDGES[name])
            body["stream"] = stream.random() < 0.4
            content = json.dumps(body).encode()
            if stream.random() < 0.1:
                place = stream.randrange(len(content))
                content = content[:place] + stream.randbytes(3) + content[place + 2 :]
            try:
                async with asyncio.timeout(stream.expovariate(10) if stream.random() < 0.2 else PATIENCE_S):
                    answer = await client.post("/v1/completions", content=content)
            except TimeoutError:
                tally.requests["gone"] += 1
                continue
            except httpx.HTTPError as error:
                tally.requests["broken"] += 1
                tally.wrong.append(f"{error!r} to {content[:300]!r}")
                continue
            tally.note(answer.status_code, content[:300].decode("utf-8", "replace"))
            if b'"server_error"' in answer.content or b"replica_failed" in answer.content:
                tally.unasked.append(f"in a stream, to {content[:300]!r}: {answer.text[-300:]}")


_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer " + KEY.encode() + b"\r\n"
_ASKS = b'{"model":"%s","prompt":[1,2,3],"max_tokens":200,"n":16,"stream":true,"logprobs":20,"ignore_eos":true}'


async def slow(url: str, model: str, until: float, seed: int, tally: Tally) -> None:
    """Connections that say half of something, bytes that mean nothing, and clients that do not read."""
    stream, address = random.Random(seed), httpx.URL(url)
    asks = _ASKS % model.encode()
    whole = _HEAD + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(asks) + asks
    while time.monotonic() < until:
        sent = stream.choice(
            (
                b"",
                b"GET / HTTP",
                _HEAD,
                _HEAD + b"content-length: 1000\r\n\r\n{",
                _HEAD + b"transfer-encoding: chunked\r\n\r\nffffff\r\n{",
                _HEAD + b"x: " + b"y" * 200_000,
                stream.randbytes(200),
                b"\r\n" * 1000,
                b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 500,
                whole,
                whole,
            )
        )
        tally.requests["held open"] += 1
        with suppress(OSError):
            _, writer = await asyncio.open_connection(address.host, address.port, local_addr=(ATTACKER, 0), limit=1024)
            writer.write(sent)
            await asyncio.sleep(stream.uniform(0.1, 8.0))
            writer.transport.abort()


async def swaps(url: str, until: float, tally: Tally) -> None:
    """Another policy every second."""
    number = 0
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE_S) as client:
        while time.monotonic() < until:
            number += 1
            body = {"layer": "replica_scheduler", "policy": SWAPS[number % len(SWAPS)]}
            answer = await client.post("/admin/policy", json=body)
            tally.note(answer.status_code, "a policy swap")
            tally.facts["policy swaps"] = tally.facts.get("policy swaps", 0) + (answer.status_code == 200)
            await asyncio.sleep(1.0)


async def schemathesis(url: str, seconds: float, tally: Tally) -> None:
    """What follows from the server's own description."""
    command = [
        str(Path(sys.executable).absolute().with_name("schemathesis")),
        "run",
        f"{url}/openapi.json",
        "--no-color",
    ]
    command += ["--checks", "not_a_server_error", "-H", f"authorization: Bearer {KEY}", "--max-time", str(int(seconds))]
    command += ["--continue-on-failure", "--request-timeout", str(PATIENCE_S), "--max-examples", "1000000"]
    command += ["--exclude-path", "/admin/policy"]  # it would swap policies that cannot serve, as it may
    with tempfile.TemporaryDirectory() as folder:  # it keeps what it finds where it runs
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = await asyncio.create_subprocess_exec(*command, cwd=folder, **pipes)
        out, _ = await process.communicate()
    text = out.decode("utf-8", "replace")
    found = re.search(r"(\d[\d,]*) generated", text)
    tally.facts["schemathesis cases"] = 0 if found is None else int(found[1].replace(",", ""))
    if process.returncode:
        tally.unasked.append("schemathesis: " + text[-3000:])


async def siege(url: str, model: str, seconds: float, tally: Tally) -> None:
    """Everything at once."""
    until, over = time.monotonic() + seconds, asyncio.Event()
    prober = asyncio.create_task(probe(url, "siege", over, tally, 0.05))
    await asyncio.gather(
        innocents(url, model, until, tally),
        *(hostile(url, model, until, seed, tally) for seed in range(6)),
        *(slow(url, model, until, seed, tally) for seed in range(24)),
        swaps(url, until, tally),
        schemathesis(url, seconds, tally),
    )
    over.set()
    await prober


# Servers


def serve(
    flags: list[str], part: Callable[[subprocess.Popen[bytes], str, Tally], None], file_limit: int | None = None
) -> Tally:
    """Run a part of the gauntlet against a server of its own, and look at what is left in the end."""
    tally = Tally()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, before[1]))  # servers inherit it
    flags = [*flags, "--api-key", KEY, "--served-model-name", "tiny", "--no-access-log"]
    with flood.own_server(flags) as (process, url):
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        before_mib = round(flood.resident_bytes(process.pid) / 2**20)
        part(process, url, tally)
        outcome = flood.Outcome(num_killed=10**9)
        found = flood.check_rest(url, outcome)
        tally.wrong += outcome.wrong
        note_memory(tally, before_mib, round(flood.resident_bytes(process.pid) / 2**20))
        tally.facts["blocks in use in the end"] = found.get("vajra:kv_cache_usage_perc", -1.0)
    if process.returncode != 0:
        tally.wrong.append(f"the server ended with {process.returncode}")
    return tally


def note_memory(tally: Tally, before_mib: int, after_mib: int) -> None:
    """Keep a server's memory before and after, and whether it grew too much."""
    tally.facts["memory before, MiB"], tally.facts["memory after, MiB"] = before_mib, after_mib
    grown = after_mib - before_mib
    if grown > MAX_GROWTH_MIB:
        tally.wrong.append(f"memory grew by {grown} MiB; at most {MAX_GROWTH_MIB} are allowed")


def sized(model: str, *more: str) -> list[str]:
    """Flags of a small server."""
    sizes = ["--max-model-len", "512", "--num-gpu-blocks-override", "256", "--block-size", "16"]
    return ["--model", model, *sizes, "--max-num-seqs", "16", *more]


def part_bodies(model: str, rounds: int) -> Tally:
    """See `bodies`."""

    def part(process: subprocess.Popen[bytes], url: str, tally: Tally) -> None:
        asyncio.run(bodies(url, process.pid, "tiny", rounds, tally))

    return serve(sized(model), part)


def part_siege(model: str, seconds: float) -> Tally:
    """See `siege`; the disk is full soon after it begins."""
    limits = ["--header-timeout", "2", "--body-timeout", "3", "--send-timeout", "3", "--max-connections", "512"]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        flags = sized(
            model,
            "--preset",
            "vllm-v1-priority",
            "--admin",
            "--admin-api-key",
            ADMIN_KEY,
            "--save-run",
            str(run),
            *limits,
        )

        def part(process: subprocess.Popen[bytes], url: str, tally: Tally) -> None:
            asyncio.run(siege(url, "tiny", seconds, tally))

        tally = serve(flags, part, file_limit=128 * 1024)
        manifest = json.loads((run / "manifest.json").read_text())
        tally.facts["recording"] = f"{manifest['status']}: {manifest.get('error', '')}"[:120]
        if "stopped" not in manifest.get("error", ""):
            tally.wrong.append(f"the disk was full, and the recording says {manifest['status']}")
    return tally


def part_kills(model: str, seconds: float) -> Tally:
    """Two replicas in processes, of which one is killed every few seconds."""
    flags = ["--model", model, "-dp", "2", "--max-model-len", "256", "--num-gpu-blocks-override", "48"]
    flags += ["--max-num-seqs", "8", "--max-num-queued-reqs", "24", "--preset", "vllm-v1-priority"]
    flags += ["--set", "backend.engine.recovery.settled_s=2", "--set", "backend.engine.recovery.max_restarts=1000"]

    def part(process: subprocess.Popen[bytes], url: str, tally: Tally) -> None:
        def workers() -> list[int]:
            is_any_up = flood.numbers(url)["vajra:replicas_up"] > 0
            return flood.worker_pids(process.pid) if is_any_up else []

        hands = flood.Hands(workers, lambda: flood.resident_bytes(process.pid))
        plan = flood.Plan("tiny", 48, seconds)
        outcome = asyncio.run(flood.flood(url, plan, KEY, hands))
        tally.requests += outcome.counts
        tally.innocents = outcome.counts["finished"]
        tally.harmed += outcome.wrong
        tally.facts["workers killed"] = outcome.num_killed
        before, after = flood.growth(outcome.rss)
        tally.facts["memory of the second and last quarter, MiB"] = [round(one / 2**20) for one in (before, after)]

    return serve(flags, part)


def part_preset(model: str, preset: str, seconds: float) -> Tally:
    """A flood and innocents under one preset."""

    def part(process: subprocess.Popen[bytes], url: str, tally: Tally) -> None:
        async def both() -> flood.Outcome:
            until = time.monotonic() + seconds
            plan = flood.Plan("tiny", 24, seconds)
            found, _ = await asyncio.gather(
                flood.flood(url, plan, KEY), innocents(url, "tiny", until, tally), return_exceptions=False
            )
            return found

        outcome = asyncio.run(both())
        tally.requests += outcome.counts
        tally.harmed += outcome.wrong

    flags = ["--set", "admission.max_queued_requests=64"]
    if preset == "vajra":  # its policy asks how long steps take
        flags += ["--set", "backend.engine.latency={type: constant, step_time_s: 0.01}"]
    return serve([*sized(model, "--preset", preset), *flags], part)


def part_end(model: str) -> Tally:
    """A server whose only worker is killed and does not come back ends with an error."""
    tally = Tally()
    flags = sized(model, "--set", "backend.engine.workers=process", "--set", "backend.engine.recovery.max_restarts=0")
    flags.append("--no-access-log")
    with suppress(RuntimeError), flood.own_server(flags) as (process, _):
        os.kill(flood.worker_pids(process.pid)[0], signal.SIGKILL)
        process.wait(60)
    tally.facts["exit code"] = process.returncode
    if not process.returncode:
        tally.wrong.append("a server that can serve nothing ended well")
    return tally


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="about how long, without starting servers")
    parser.add_argument("--only", help="parts, divided by commas: bodies, siege, kills, end, or presets by name")
    parser.add_argument("--output", type=Path, help="file that gets the figures as JSON")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = f"{folder}/tiny"
        make = [sys.executable, "-P", "-c", "from vajra_py.cli.main import main; main()", "model", "tiny", model]
        subprocess.run(make, check=True, capture_output=True)
        seconds = given.seconds
        parts: dict[str, Callable[[], Tally]] = {
            "bodies": lambda: part_bodies(model, max(1, round(seconds / 200))),
            "siege": lambda: part_siege(model, 0.4 * seconds),
            "kills": lambda: part_kills(model, 0.2 * seconds),
            "end": lambda: part_end(model),
            **{one: lambda one=one: part_preset(model, one, 0.3 * seconds / len(PRESETS)) for one in PRESETS},  # type: ignore[misc]
        }
        wanted = list(parts) if given.only is None else given.only.split(",")
        tallies = {}
        for name in wanted:
            try:
                tallies[name] = parts[name]()
            except (RuntimeError, httpx.TransportError) as error:  # a server that did not start, or is gone
                tallies[name] = Tally(wrong=[repr(error)])
            print(f"{name}: {json.dumps(tallies[name].shown())}", flush=True)
    return report(tallies, given.output)


def report(tallies: dict[str, Tally], output: Path | None) -> int:
    """Say what came of it; the exit code."""
    every = tallies.values()
    total = {
        "requests sent": sum(sum(one.requests.values()) for one in every)
        + sum(one.facts.get("schemathesis cases", 0) for one in every),
        "innocent answers": sum(one.innocents for one in every),
        "innocents harmed": sum(len(one.harmed) for one in every),
        "5xx not asked for": sum(len(one.unasked) for one in every),
        "else wrong": sum(len(one.wrong) for one in every),
        "longest wait for /health, ms": {
            name: max(one.health_ms.values()) for name, one in tallies.items() if one.health_ms
        },
        "largest growth of memory, MiB": {
            name: max(one.growth_mib.values()) for name, one in tallies.items() if one.growth_mib
        },
        "memory before and after, MiB": {
            name: [one.facts["memory before, MiB"], one.facts["memory after, MiB"]]
            for name, one in tallies.items()
            if "memory before, MiB" in one.facts
        },
        "blocks in use in the end": sum(one.facts.get("blocks in use in the end", 0.0) for one in every),
    }
    print(json.dumps(total, indent=1))
    if output is not None:
        parts = {name: one.shown() for name, one in tallies.items()}
        output.write_text(json.dumps({"total": total, "parts": parts}, indent=1, default=str) + "\n")
    return 1 if any(one.harmed or one.unasked or one.wrong for one in every) else 0


if __name__ == "__main__":
    raise SystemExit(main())
