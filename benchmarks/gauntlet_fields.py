"""A part of the gauntlet: fields, headers and names at their edges, against innocents whose own requests are constrained.

Values are drawn anew from the gauntlet's seed. Whatever is wrong has to be refused with a small error, and soon.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from gauntlet_clients import ADMIN_KEY, JSON, PATIENCE_S, Tally, innocent_body, innocents
from gauntlet_parts import Given, Part, serve, sized

MOST_ERROR_CHARACTERS = 2000
"""Largest size of an error message, for requests of any size."""
SLOW_S = 30.0
TENANT_KEYS = {"gauntlet-alice": "alice", "gauntlet-bob": "bob"}
_BAD_TEXTS = ("", " ", "\x00", "\ud800", "\u2028", "a" * 300, "\U0001f600" * 200, "\n", "<|end|>")


def _value(stream: random.Random, depth: int = 0) -> Any:
    """Return a random JSON value."""
    kinds = 9 if depth < 3 else 7
    kind = stream.randrange(kinds)
    if kind == 7:
        return [_value(stream, depth + 1) for _ in range(stream.randrange(6))]
    if kind == 8:
        return {str(stream.choice((*range(5), 2**40, "x", ""))): _value(stream, depth + 1) for _ in range(4)}
    numbers = (0, -1, 1, 0.5, -100, 101, 1023, 1024, 2**31, 2**63, -(2**70), 1e-320, 1e300)
    return (None, True, False, stream.choice(numbers), stream.choice(_BAD_TEXTS), stream.choice(numbers), "x")[kind]


def _many(stream: random.Random) -> Any:
    """Return a large list or mapping."""
    count = stream.choice((300, 5_000, 40_000))
    one: Any = stream.choice((1, "x", 1024, [], -1, 1.5, None))
    return [one] * count if stream.random() < 0.6 else {str(k): one for k in range(count)}


FIELDS = (
    "add_special_tokens", "add_generation_prompt", "continue_final_message", "include_stop_str_in_output",
    "skip_special_tokens", "bad_words", "allowed_token_ids", "logit_bias", "prompt_logprobs", "cache_salt",
    "return_tokens_as_token_ids", "truncate_prompt_tokens", "best_of", "detokenize", "structural_tag", "request_id",
    "min_tokens", "stop", "stop_token_ids", "echo", "logprobs", "stream", "n",
)  # fmt: skip


def _fine(stream: random.Random) -> dict[str, Any]:
    """Return valid constraints, which may still leave no token."""
    tokens = stream.sample(range(1024), stream.randrange(1, 40))
    return stream.choice(
        (
            {"allowed_token_ids": tokens},
            {"logit_bias": {str(token): stream.uniform(-100, 100) for token in tokens}},
            {"bad_words": ["".join(stream.choices("abcde ", k=5)) + "x" for _ in range(20)]},
            {"allowed_token_ids": tokens[:2], "bad_words": list("abcdefghij"), "min_tokens": 4},
            {"prompt_logprobs": stream.randrange(20), "echo": True, "logprobs": 3},
            {"cache_salt": str(stream.random()), "skip_special_tokens": False, "temperature": 2.0},
        )
    )


def body_of(stream: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    """A request: (path, body)."""
    path = stream.choice(("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"))
    body: dict[str, Any] = {"model": model, "max_tokens": stream.randrange(1, 8)}
    if path == "/detokenize":
        return path, {"tokens": stream.choice(([1, 2, 3], _many(stream), _value(stream)))}
    if path != "/v1/completions" and stream.random() < 0.7:
        role = stream.choice(("user", "developer", "assistant", "nobody"))
        body["messages"] = [{"role": role, "content": stream.choice(("hi", *_BAD_TEXTS))}]
    else:
        body["prompt"] = stream.choice(("hello there", [5, 6, 7], *_BAD_TEXTS))
    if path == "/tokenize":
        body.pop("max_tokens")
    if stream.random() < 0.4:
        return path, {**body, **_fine(stream)}
    for _ in range(stream.randrange(1, 4)):
        body[stream.choice(FIELDS)] = _many(stream) if stream.random() < 0.15 else _value(stream)
    return path, body


async def hostile(url: str, model: str, until: float, stream: random.Random, tally: Tally) -> None:
    """Send bodies of every kind, one after another."""
    keys = [JSON["authorization"], *(f"Bearer {key}" for key in TENANT_KEYS)]
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        while time.monotonic() < until:
            path, body = body_of(stream, model)
            content = json.dumps(body).encode("ascii")
            headers = {**JSON, "authorization": stream.choice(keys)}
            if stream.random() < 0.3:
                headers["x-llm-d-inference-fairness-id"] = stream.choice(("alice", "bob", "x"))
            began = time.monotonic()
            answer = await client.post(path, content=content, headers=headers)
            what = f"{path} {content[:300].decode()}"
            tally.note(answer.status_code, what)
            if answer.status_code >= 400 and len(answer.content) > MOST_ERROR_CHARACTERS:
                tally.wrong.append(f"an error of {len(answer.content)} bytes to {what}")
            if time.monotonic() - began > SLOW_S:
                tally.wrong.append(f"{time.monotonic() - began:.0f} s for {what}")


async def swaps(url: str, until: float, stream: random.Random, tally: Tally) -> None:
    """Hostile bodies for `/admin/policy`; none of them may put a policy in force."""
    headers = {**JSON, "authorization": f"Bearer {ADMIN_KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE_S) as client:
        while time.monotonic() < until:
            nested: Any = stream.choice(("256", 2**70, _value(stream), {"y": 1}))
            for _ in range(stream.choice((1, 70, 900))):
                nested = [nested]
            params = stream.choice(({"chunk_size": nested}, {f"p{k}": k for k in range(stream.choice((3, 60_000)))}))
            body = {"layer": "replica_scheduler", "policy": "fixed_chunk", "params": params}
            answer = await client.post("/admin/policy", content=json.dumps(body).encode())
            tally.note(answer.status_code, f"a swap to {str(params)[:200]}")
            if answer.status_code == 200:
                tally.wrong.append(f"a policy with {str(params)[:200]} is in force")
            await asyncio.sleep(0.1)


async def heads(url: str, until: float, stream: random.Random, tally: Tally) -> None:
    """Heads whose host, forwarded address and path are whatever; the names that are not the server's get in nowhere."""
    address = httpx.URL(url)
    while time.monotonic() < until:
        hosts = stream.choice((("127.0.0.1",), (), ("127.0.0.1", "127.0.0.1"), ("evil.example",), ("a b",), ("",)))
        path = "/v1/models" + "".join(stream.choices(("%1b[31m", "%E2%80%A8", "%0a", "x" * 2000, "%c2%85"), k=3))
        path = stream.choice((path, "/health"))
        head = f"GET {path} HTTP/1.1\r\n" + "".join(f"host: {host}\r\n" for host in hosts)
        head += (
            f"x-forwarded-for: {stream.choice(('6.6.6.6', 'GET /admin 200', 'y' * 3000))}\r\norigin: http://evil\r\n"
        )
        is_called = hosts == ("127.0.0.1",)
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(head.encode() + b"connection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
            status = int(answer.split(b" ", 2)[1])
            tally.note(status, head[:200])
            if (status == 400) is is_called:
                tally.wrong.append(f"{status} to {head[:200]!r}")
            if b"access-control" in answer.lower():
                tally.wrong.append("a page of another origin may read answers")
        await asyncio.sleep(0.02)


async def constrained(url: str, model: str, until: float, seed: int, tally: Tally) -> None:
    """An innocent whose requests allow, favour and forbid tokens, and whose answers are known from before."""
    stream = random.Random(f"{seed}/constrained")
    few = sorted(stream.sample(range(1024), 300))
    kinds: tuple[dict[str, Any], ...] = (
        {"allowed_token_ids": few},
        {"logit_bias": {str(token): 5.0 for token in few[:50]}},
        {"bad_words": ["the", "a b", "river"], "prompt_logprobs": 1},
    )
    bodies = [innocent_body(k, model, seed) | one for k, one in enumerate(kinds)]
    async with httpx.AsyncClient(base_url=url, headers=JSON, timeout=PATIENCE_S) as client:
        expected = [(await client.post("/v1/completions", json=body)).json()["choices"][0] for body in bodies]
        number = 0
        while time.monotonic() < until:
            number = (number + 1) % len(bodies)
            answer = await client.post("/v1/completions", json=bodies[number])
            tally.requests[str(answer.status_code)] += 1
            if answer.status_code == 429:
                await asyncio.sleep(0.2)
                continue
            tally.innocents += 1
            if answer.status_code != 200:
                tally.harmed.append(f"{answer.status_code}: {answer.text[:200]}")
            elif answer.json()["choices"][0]["token_ids"] != expected[number]["token_ids"]:
                tally.harmed.append(f"another output of the innocent with {list(kinds[number])}")


def part_fields(given: Given) -> Tally:
    """Run all attacks of this file at once."""

    def part(process: subprocess.Popen[bytes], url: str, tally: Tally) -> None:
        async def everything() -> None:
            until = time.monotonic() + given.seconds
            await asyncio.gather(
                innocents(url, "tiny", until, tally, given.seed),
                constrained(url, "tiny", until, given.seed, tally),
                *(hostile(url, "tiny", until, given.stream("fields", number), tally) for number in range(3)),
                swaps(url, until, given.stream("swaps"), tally),
                heads(url, until, given.stream("heads"), tally),
            )

        asyncio.run(everything())

    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text("".join(f"{key} {tenant}\n" for key, tenant in TENANT_KEYS.items()))
        doors = ["--api-key-file", str(keys), "--allowed-hosts", "127.0.0.1", "--allowed-hosts", "localhost"]
        admin = ["--admin", "--admin-api-key", ADMIN_KEY]
        return serve(sized(given.model, *doors, *admin), part)


PARTS = [Part("fields", 0.05, part_fields)]
