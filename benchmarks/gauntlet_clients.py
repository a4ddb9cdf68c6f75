"""Clients of the gauntlet: innocent ones with known answers, and hostile ones."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flood
import httpx

NUM_INNOCENTS = 4
PATIENCE_S = 60.0
"""Timeout of a well-behaved client, in seconds."""
KEY, ADMIN_KEY = "gauntlet", "gauntlet-admin"
JSON = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
ATTACKER = "127.0.0.2"
"""Source address of connections that are held open, since limits are counted by address."""
SWAPS = ("fixed_chunk", "dynamic_chunk", "vllm_v1")


@dataclass(slots=True)
class Tally:
    """Counts of outcomes in a part of the gauntlet.

    Attributes:
        requests: requests sent, by status or other outcome.
        innocents: number of answers to innocent clients.
        harmed: wrong or missing answers to innocent clients.
        unasked: unexpected answers of status 500 or more.
        wrong: other violations.
        health_ms: longest wait for `/health`, by concurrent attack.
        growth_mib: largest growth of the server's memory, by concurrent attack.
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
        """Return the clients' counts as JSON, with a few of each kind of trouble."""
        lists = {name: getattr(self, name)[:10] for name in ("harmed", "unasked", "wrong")}
        plain = {name: getattr(self, name) for name in ("innocents", "health_ms", "growth_mib", "facts")}
        return {"requests": dict(self.requests), **plain, **lists}

    def note(self, status: int, what: str, allowed: tuple[int, ...] = ()) -> None:
        """Record the answer to a hostile request."""
        self.requests[str(status)] += 1
        if status >= 500 and status not in allowed:
            self.unasked.append(f"{status} to {what}")


# Innocents


def innocent_body(number: int, model: str, seed: int) -> dict[str, Any]:
    """A greedy request; the same one again and again."""
    stream = random.Random(f"{seed}/innocent/{number}")
    prompt = [stream.randrange(1, 1000) for _ in range(stream.randrange(3, 60))]
    more = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": model, "prompt": prompt, "max_tokens": stream.randrange(4, 24), **more}


async def innocents(
    url: str, model: str, until: float, tally: Tally, seed: int, retries: tuple[int, ...] = (429,)
) -> None:
    """Send requests until then; statuses in `retries` are not counted as harm."""
    async with httpx.AsyncClient(base_url=url, headers=JSON, timeout=PATIENCE_S) as client:
        expected: dict[int, list[int]] = {}
        for number in range(NUM_INNOCENTS):
            answer = await client.post("/v1/completions", json=innocent_body(number, model, seed))
            expected[number] = answer.json()["choices"][0]["token_ids"]

        async def one(number: int) -> None:
            while time.monotonic() < until:
                try:
                    answer = await client.post("/v1/completions", json=innocent_body(number, model, seed))
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
    """Request `/health` until `over` is set; record the longest wait."""
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


def large_bodies(model: str, stream: random.Random) -> dict[str, tuple[str, bytes]]:
    """Bodies of 8 MiB: (path, content) by name."""
    letter, word = stream.choice("abcdefgh").encode(), "".join(stream.choices("abcdefgh", k=3)).encode()
    emoji, token = stream.choice("🚀😀🐍🌍").encode(), b"%d," % stream.randrange(100, 1000)
    negative = b"-%d" % stream.randrange(1, 2**31)
    most = 8 * 2**20 - 512
    head = b'{"model":"%s",' % model.encode()

    def filled(before: bytes, element: bytes, after: bytes) -> bytes:
        return head + before + b",".join([element] * (most // (len(element) + 1))) + after

    prompt, chat = "/v1/completions", "/v1/chat/completions"
    part = b'"messages":[{"role":"user","content":['
    digits = bytes(stream.choices(b"123456789", k=5000))
    return {
        "negative tokens": (prompt, filled(b'"prompt":[', negative, b"]}")),
        "empty arrays": (prompt, filled(b'"prompt":[', b"[]", b"]}")),
        "empty objects": (chat, filled(b'"messages":[', b"{}", b"]}")),
        "empty parts": (chat, filled(part, b"{}", b"]}]}")),
        "messages": (chat, filled(b'"messages":[', b'{"role":"user","content":"a"}', b"]}")),
        "parts": (chat, filled(part, b'{"type":"text","text":"a"}', b"]}]}")),
        "tokens": (prompt, head + b'"prompt":[' + token * 500_000 + b"1]}"),
        "text": (prompt, head + b'"prompt":"' + (letter + b" ") * (most // 2) + b'"}'),
        "one word": (prompt, head + b'"prompt":"' + letter * most + b'"}'),
        "escapes": (prompt, head + b'"prompt":"' + b"\\u00e9" * (most // 6) + b'"}'),
        "emoji": (prompt, head + b'"prompt":"' + emoji * (most // 4) + b'"}'),
        "text of a message": (
            chat,
            head + b'"messages":[{"role":"user","content":"' + (word + b" ") * (most // 4) + b'"}]}',
        ),
        "nesting": (prompt, head + b'"prompt":' + b"[" * most),
        "digits": (prompt, filled(b'"prompt":[', digits, b"]}")),
        "one number": (prompt, head + b'"prompt":' + b"9" * most + b"}"),
        "fields": (prompt, head + b",".join(b'"%d":1' % number for number in range(700_000)) + b"}"),
        "stop strings": (prompt, filled(b'"prompt":[1],"stop":[', b'"a"', b"]}")),
    }


async def bodies(url: str, pid: int, model: str, rounds: int, stream: random.Random, tally: Tally) -> None:
    """Send every body alone, with a concurrent client of `/health`; first that client alone, to compare."""
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(3.0, over.set)
    await probe(url, "nothing", over, tally, 0.002)
    for name, (path, content) in large_bodies(model, stream).items():
        for _ in range(rounds):
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # reset the peak
            before, over = flood.resident_bytes(pid), asyncio.Event()
            prober = asyncio.create_task(probe(url, name, over, tally, 0.002))
            process = await asyncio.create_subprocess_exec(  # a separate client, since sending takes time too
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


async def hostile(url: str, model: str, until: float, seed: str, tally: Tally) -> None:
    """Send completions with parameters at the limits of their ranges."""
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


async def slow(url: str, model: str, until: float, seed: str, tally: Tally) -> None:
    """Open connections that send partial requests or random bytes, and clients that do not read."""
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
    """Swap the policy every second."""
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
    """Send requests generated from the server's OpenAPI description."""
    command = [
        str(Path(sys.executable).absolute().with_name("schemathesis")),
        "run",
        f"{url}/openapi.json",
        "--no-color",
    ]
    command += ["--checks", "not_a_server_error", "-H", f"authorization: Bearer {KEY}", "--max-time", str(int(seconds))]
    command += ["--continue-on-failure", "--request-timeout", str(PATIENCE_S), "--max-examples", "1000000"]
    command += ["--exclude-path", "/admin/policy"]  # excluded: it could swap in policies that cannot serve
    with tempfile.TemporaryDirectory() as folder:  # it stores its findings in the current folder
        process = await asyncio.create_subprocess_exec(
            *command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        out, _ = await process.communicate()
    text = out.decode("utf-8", "replace")
    found = re.search(r"(\d[\d,]*) generated", text)
    tally.facts["schemathesis cases"] = 0 if found is None else int(found[1].replace(",", ""))
    if process.returncode:
        tally.unasked.append("schemathesis: " + text[-3000:])


async def siege(url: str, model: str, seconds: float, seed: int, tally: Tally) -> None:
    """Run all attacks at once."""
    until, over = time.monotonic() + seconds, asyncio.Event()
    prober = asyncio.create_task(probe(url, "siege", over, tally, 0.05))
    await asyncio.gather(
        innocents(url, model, until, tally, seed),
        *(hostile(url, model, until, f"{seed}/hostile/{number}", tally) for number in range(6)),
        *(slow(url, model, until, f"{seed}/slow/{number}", tally) for number in range(24)),
        swaps(url, until, tally),
        schemathesis(url, seconds, tally),
    )
    over.set()
    await prober
