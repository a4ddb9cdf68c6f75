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
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import flood
import httpx
from gauntlet_clients import ADMIN_KEY, KEY, Tally, bodies, innocents, siege

MAX_GROWTH_MIB = 128
"""A server that has more memory than this in the end than when it was ready has a leak; caches and reused heaps stay below."""
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
