"""Attacks on a server before authentication, and on its components that may hang.

Every part checks concurrent innocent clients, which must not be affected, and ends with an idle server.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import flood
import httpx
from gauntlet_clients import ATTACKER, JSON, KEY, PATIENCE_S, Tally, innocents, probe
from gauntlet_parts import Attack, Given, Part, end_in_time, serve, sized

LEFT_S = 5.0
"""Seconds within which a request must end after its client has disconnected."""
STUCK = 5
"""Exit code of a server whose engine hangs."""


def beside(given: Given, attack: Callable[[str, float, Tally], Awaitable[None]]) -> Attack:
    """A part in which something goes on beside innocents and a prober: called with URL, when to end, and the tally."""

    def part(process: subprocess.Popen[bytes], url: str, tally: Tally) -> None:
        async def all_of_it() -> None:
            until, over = time.monotonic() + given.seconds, asyncio.Event()
            prober = asyncio.create_task(probe(url, "attack", over, tally, 0.05))
            await asyncio.gather(innocents(url, "tiny", until, tally, given.seed), attack(url, until, tally))
            over.set()
            await prober

        asyncio.run(all_of_it())
        if not tally.innocents:
            tally.wrong.append("no innocent was answered")

    return part


def asks(path: str = "/v1/completions", key: str = KEY, **body: object) -> bytes:
    """A request as bytes."""
    content = json.dumps({"model": "tiny", "prompt": [1, 2, 3], "ignore_eos": True, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content


GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection from the attacker's address."""
    address = httpx.URL(url)
    return await asyncio.open_connection(address.host, address.port, local_addr=(ATTACKER, 0))


async def metric(url: str, name: str) -> float:
    """One of the server's numbers."""
    return (await asyncio.to_thread(flood.numbers, url)).get(name, 0.0)


# Pipelines


def part_pipelines(given: Given) -> Tally:
    """Clients that send something behind a long request and leave, and others that pipeline and stay."""
    stream = given.stream("pipelines")

    async def leaving(url: str, tally: Tally) -> None:
        for _ in range(stream.randrange(20, 60)):
            behind = stream.choice((GET, GET * stream.randrange(2, 4000), asks(max_tokens=8), b"\r\n" * 50, b"GET /"))
            with suppress(OSError):
                _, writer = await connect(url)
                writer.write(asks(max_tokens=400, n=stream.choice((1, 8)), stream=stream.random() < 0.3) + behind)
                with suppress(TimeoutError):  # it may not be read to its end
                    await asyncio.wait_for(writer.drain(), 0.2)
                writer.transport.abort() if stream.random() < 0.3 else writer.close()
            tally.requests["left"] += 1

    async def staying(url: str, tally: Tally) -> None:
        reader, writer = await connect(url)
        lengths = [stream.randrange(1, 6) for _ in range(50)]
        num_gets = stream.randrange(500, 2000)
        writer.write(b"".join(asks(max_tokens=one) for one in lengths) + GET * num_gets + LAST)
        found = await asyncio.wait_for(reader.read(-1), PATIENCE_S)
        writer.close()
        counts = [json.loads(part)["usage"]["completion_tokens"] for part in _bodies(found) if b'"usage"' in part]
        tally.innocents += 1
        if counts != lengths or found.count(b"HTTP/1.1 200 ") != len(lengths) + num_gets + 1:
            tally.harmed.append(f"of {len(lengths)} pipelined requests and {num_gets} more: {counts}, {found[-300:]!r}")

    async def attack(url: str, until: float, tally: Tally) -> None:
        is_first = True
        while is_first or time.monotonic() < until:
            is_first = False
            await leaving(url, tally)
            deadline = time.monotonic() + LEFT_S
            while (held := await metric(url, "vajra:http_requests_open")) > 16 and time.monotonic() < deadline:
                await asyncio.sleep(0.1)
            if held > 16:  # those of innocent clients
                tally.wrong.append(f"{held:g} requests are open {LEFT_S:g} s after their clients left")
            await staying(url, tally)

    return serve(sized(given.model, "--max-concurrent", "256"), beside(given, attack))


def _bodies(found: bytes) -> list[bytes]:
    """The bodies of answers that came one behind another."""
    bodies = []
    while found:
        head, _, rest = found.partition(b"\r\n\r\n")
        lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        size = int(lengths[0]) if lengths else len(rest)
        bodies.append(rest[:size])
        found = rest[size:]
    return bodies


# Stop strings


def part_stops(given: Given) -> Tally:
    """Requests whose stop strings hold back all of a known output."""
    stream = given.stream("stops")

    async def attack(url: str, until: float, tally: Tally) -> None:
        async with httpx.AsyncClient(base_url=url, headers=JSON, timeout=PATIENCE_S) as client:
            is_first = True
            while is_first or time.monotonic() < until:
                is_first = False
                body = {"model": "tiny", "prompt": [stream.randrange(1, 1000) for _ in range(4)], "ignore_eos": True}
                body |= {"max_tokens": 400, "temperature": 0}
                answer = await client.post("/v1/completions", json=body)
                text = answer.json()["choices"][0]["text"][: stream.randrange(200, 1000)]
                num_wrong = min(15, 3000 // len(text))
                stops = [text[:1] + str(number) + text for number in range(num_wrong)] + [text + "x"]
                answer = await client.post(
                    "/v1/completions", json={**body, "n": stream.randrange(2, 17), "stop": stops}
                )
                tally.note(answer.status_code, "stop strings")
                if answer.status_code not in (200, 429):
                    tally.wrong.append(f"{answer.status_code} to stop strings: {answer.text[:200]}")
                answer = await client.post(
                    "/v1/completions", json={**body, "stop": ["a" * stream.randrange(1025, 9999)]}
                )
                tally.note(answer.status_code, "a long stop string")
                if answer.status_code != 400:
                    tally.wrong.append(f"{answer.status_code} to a stop string that is too long")

    return serve(sized(given.model), beside(given, attack))


# Data with and after bodies


def part_trailers(given: Given) -> Tally:
    """Trailers, extensions of chunks, bodies behind a 401, and empty lines, all without a key and without an end."""
    stream = given.stream("trailers")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    chunked = head + b"transfer-encoding: chunked\r\n\r\n"

    def endless() -> tuple[bytes, bytes]:
        name, size = bytes(stream.choices(b"abcdef", k=stream.randrange(1, 9))), stream.randrange(1, 200)
        return stream.choice(
            (
                (chunked + b"0\r\n", name + b":" + b"b" * size + b"\r\n"),
                (chunked + b"0\r\n" + name + b": ", b"b" * size),
                (chunked + b"5;" + name, b"=" + b"b" * size),
                (chunked, b"1;" + b"b" * size + b"\r\nx\r\n"),
                (chunked, b"%x\r\n%s\r\n" % (size, b" " * size)),
                (head + b"content-length: 8000000\r\n\r\n", b" " * size),
                (GET, b"\r\n" * size),
            )
        )

    async def one(url: str, tally: Tally) -> None:
        first, again = endless()
        _, writer = await connect(url)
        writer.write(first)
        num_sent, deadline = 0, time.monotonic() + 30.0
        try:
            while time.monotonic() < deadline and not writer.transport.is_closing():
                writer.write(again * (2**16 // len(again)))
                num_sent += 2**16
                await asyncio.wait_for(writer.drain(), 30.0)
                await asyncio.sleep(0)
            if not writer.transport.is_closing():
                tally.wrong.append(f"{num_sent} bytes of {again[:40]!r} behind {first[-40:]!r} are read in 30 s")
        except (OSError, TimeoutError):
            pass
        tally.requests["endless"] += 1
        tally.facts["MiB sent"] = tally.facts.get("MiB sent", 0) + num_sent // 2**20
        writer.transport.abort()

    async def attack(url: str, until: float, tally: Tally) -> None:
        async def again() -> None:
            is_first = True
            while is_first or time.monotonic() < until:
                is_first = False
                with suppress(OSError):
                    await one(url, tally)
                await asyncio.sleep(0.2)

        await asyncio.gather(*(again() for _ in range(2)))

    return serve(sized(given.model), beside(given, attack))


# Handshakes


def part_handshakes(given: Given) -> Tally:
    """More sockets than there are descriptors, which never begin their TLS handshake or break it off."""
    stream = given.stream("handshakes")
    with tempfile.TemporaryDirectory() as folder:
        key, certificate = f"{folder}/key.pem", f"{folder}/certificate.pem"
        make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        make += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
        subprocess.run(make, check=True, capture_output=True)
        context = ssl.create_default_context(cafile=certificate)

        async def ask(url: str, until: float, tally: Tally) -> None:
            while time.monotonic() < until:
                try:
                    async with httpx.AsyncClient(verify=context, timeout=PATIENCE_S) as client:
                        status = (await client.get(f"{url}/health")).status_code
                        tally.innocents += 1
                        if status != 200:
                            tally.harmed.append(f"/health: {status}")
                except httpx.HTTPError as error:
                    tally.harmed.append(repr(error))
                await asyncio.sleep(0.05)

        async def besiege(url: str, until: float, tally: Tally) -> None:
            held: list[asyncio.StreamWriter] = []
            while time.monotonic() < until:
                with suppress(OSError):
                    _, writer = await connect(url)
                    held.append(writer)
                    tally.requests["silent"] += 1
                    if stream.random() < 0.3:
                        writer.write(stream.choice((GET, stream.randbytes(200), b"\x16\x03\x01")))
                if len(held) > 700:
                    held.pop(stream.randrange(len(held))).transport.abort()
                await asyncio.sleep(0.001 if len(held) < 700 else 0.02)
            for writer in held:
                writer.transport.abort()

        def part(process: subprocess.Popen[bytes], url: str, tally: Tally) -> None:
            async def both() -> None:
                until = time.monotonic() + given.seconds
                await asyncio.gather(ask(url, until, tally), besiege(url, until, tally))

            asyncio.run(both())
            num_open = len(os.listdir(f"/proc/{process.pid}/fd"))
            tally.facts["descriptors in the end"] = num_open

        flags = ["--ssl-keyfile", key, "--ssl-certfile", certificate, "--header-timeout", "3"]
        flags += ["--max-connections", "600", "--max-connections-per-client", "400"]
        return serve(sized(given.model, *flags), part, rests=False)


# Hangs


def part_hangs(given: Given) -> Tally:
    """Two replicas in processes, of which one is stopped again and again; in the end it is, when SIGTERM comes."""
    stream = given.stream("hangs")
    flags = ["--model", given.model, "-dp", "2", "--max-model-len", "512", "--num-gpu-blocks-override", "256"]
    flags += ["--max-num-seqs", "16", "--set", "backend.engine.recovery.settled_s=2"]
    flags += ["--set", "backend.engine.recovery.max_restarts=1000"]

    def part(process: subprocess.Popen[bytes], url: str, tally: Tally) -> None:
        async def hang(until: float) -> None:
            num_lost = 0
            while num_lost == 0 or time.monotonic() < until:
                await asyncio.sleep(stream.uniform(1.0, 3.0))
                workers = flood.worker_pids(process.pid)
                os.kill(workers[stream.randrange(len(workers))], signal.SIGSTOP)
                num_lost += 1
                deadline = time.monotonic() + 120.0
                while await metric(url, "vajra:replica_restarts_total") < num_lost:
                    if time.monotonic() > deadline:
                        tally.wrong.append("a worker that was stopped 120 s ago is not replaced")
                        return
                    await asyncio.sleep(0.2)
            tally.facts["workers stopped"] = num_lost

        async def both() -> None:
            over = asyncio.Event()
            until = time.monotonic() + given.seconds
            hanging = asyncio.create_task(hang(until))
            hanging.add_done_callback(lambda _: over.set())
            while not over.is_set():
                await innocents(url, "tiny", min(time.monotonic() + 3.0, until + 120.0), tally, given.seed)
            await hanging

        asyncio.run(both())
        if not tally.innocents:
            tally.wrong.append("no innocent was answered")
        outcome = flood.Outcome(num_killed=10**9)
        flood.check_rest(url, outcome)
        tally.wrong += outcome.wrong
        os.kill(flood.worker_pids(process.pid)[0], signal.SIGSTOP)

    return serve(flags, part, rests=False)


POLICY = """
import re, time
from vajra_py.contract import KeyMotion, Layer, PolicyConfig, PolicySpec, hookimpl

class Hostile:
    key_motion = KeyMotion.STATIC
    def key(self, request, now):
        if request.priority == 13:
            time.sleep(10000)
        if request.priority == 14:
            raise SystemExit(request.priority)
        if request.priority == 15:
            raise KeyboardInterrupt
        return float(request.priority)

@hookimpl
def vajra_policies():
    return [PolicySpec("hostile", Layer.REQUEST_PRIORITIZER, PolicyConfig, lambda c, x: Hostile(), "Hangs or leaves.")]
"""


def part_blocked(given: Given) -> Tally:
    """A policy that tries to end the process, and one that is blocked when SIGTERM comes."""
    stream = given.stream("blocked")

    def part(process: subprocess.Popen[bytes], url: str, tally: Tally) -> None:
        def ask(tenant: str, priority: int) -> httpx.Response:
            prompt = [stream.randrange(1, 1000) for _ in range(5)]
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 5, "user": tenant, "priority": priority}
            return httpx.post(f"{url}/v1/completions", json=body, headers=JSON, timeout=PATIENCE_S)

        swap = {"layer": "request_prioritizer", "replicaset": "gold", "policy": "hostile"}
        headers = {"authorization": "Bearer gauntlet-admin"}
        for _ in range(stream.randrange(2, 5)):
            priority = stream.choice((14, 15))
            if ask("gold", priority).status_code != 503:
                tally.wrong.append("a policy that ends the process is not named")
            if ask("gold", 0).status_code != 503:
                tally.wrong.append("a replicaset whose policy left takes requests")
            tally.innocents += 1
            if (answer := ask("other", 0)).status_code != 200:
                tally.harmed.append(f"{answer.status_code} beside a policy that left: {answer.text[:200]}")
            if httpx.post(f"{url}/admin/policy", json=swap, headers=headers).status_code != 200:
                tally.wrong.append("the policy cannot be put in again")
        with suppress(httpx.TransportError):
            httpx.post(
                f"{url}/v1/completions",
                json={"model": "tiny", "prompt": [1], "user": "gold", "priority": 13},
                headers=JSON,
                timeout=0.5,
            )
        deadline = time.monotonic() + 30.0
        while httpx.get(f"{url}/ready").status_code != 503:
            if time.monotonic() > deadline:
                tally.wrong.append("/ready is 200 although the policy is blocked for 30 s")
                break
            time.sleep(0.1)
        end_in_time(process, tally)

    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        (site / "hostile-1.0.dist-info").mkdir(parents=True)
        (site / "hostile.py").write_text(POLICY)
        (site / "hostile-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: hostile\nVersion: 1.0\n")
        (site / "hostile-1.0.dist-info" / "entry_points.txt").write_text("[vajra]\nhostile = hostile\n")
        file, run = Path(folder) / "served.yaml", Path(folder) / "run"
        file.write_text(
            "version: 1\npreset: vllm-v1\npolicy_timeout_s: 1.0\nreplica: {max_model_len: 512, memory: {num_blocks: 64}}\n"
            "replicasets:\n  gold:\n    select: {tenants: [gold]}\n"
            "    scheduling: {request_prioritizer: hostile}\n  rest: {}\n"
            f"backend: {{engine: {{model: {given.model}}}}}\n"
        )
        flags = [str(file), "--admin", "--admin-api-key", "gauntlet-admin", "--save-run", str(run)]
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = str(site)
        try:
            tally = serve(flags, part, rests=False, code=STUCK)
        finally:
            del os.environ["PYTHONPATH"]
            if before is not None:
                os.environ["PYTHONPATH"] = before
        manifest = json.loads((run / "manifest.json").read_text())
        if "does not stop" not in manifest.get("error", ""):
            tally.wrong.append(f"the recording of a server that hung says {manifest['status']}")
    return tally


PARTS = [
    Part("pipelines", 0.05, part_pipelines),
    Part("stops", 0.05, part_stops),
    Part("trailers", 0.05, part_trailers),
    Part("handshakes", 0.05, part_handshakes),
    Part("hangs", 0.1, part_hangs),
    Part("blocked", 0.0, part_blocked),
]
"""See `gauntlet.PARTS`."""
