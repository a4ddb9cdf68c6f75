"""Run a real server through everything that may harm it, and count the innocent clients that were harmed.

`make gauntlet SECONDS=600` runs, with a tiny model: any body of 8 MiB beside a client that asks for `/health`; a siege by hostile
requests, slow clients, broken bytes, schemathesis and policy swaps while the disk is full; killed workers under a flood; and
every preset under a flood. Innocent clients ask for greedy outputs that are known beforehand: another answer, an error or no
answer is harm. The exit code is 1 when an innocent was harmed, when a status of 500 or more was not asked for, when anything is left
in the end, or when a server's memory grew by more than `MAX_GROWTH_MIB` or leaks (see `gauntlet_memory`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import flood
import gauntlet_doors
import gauntlet_fields
import httpx
from gauntlet_clients import ADMIN_KEY, KEY, Tally, bodies, innocents, siege
from gauntlet_parts import Given, Part, serve, sized

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


def part_bodies(given: Given) -> Tally:
    """See `bodies`."""

    def part(process: subprocess.Popen[bytes], url: str, tally: Tally) -> None:
        rounds = max(1, round(given.seconds / 20))
        asyncio.run(bodies(url, process.pid, "tiny", rounds, given.stream("bodies"), tally))

    return serve(sized(given.model), part)


def part_siege(given: Given) -> Tally:
    """See `siege`; the disk is full soon after it begins."""
    limits = ["--header-timeout", "2", "--body-timeout", "3", "--send-timeout", "3", "--max-connections", "512"]
    admin = ["--admin", "--admin-api-key", ADMIN_KEY]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        flags = sized(given.model, "--preset", "vllm-v1-priority", *admin, "--save-run", str(run), *limits)

        def part(process: subprocess.Popen[bytes], url: str, tally: Tally) -> None:
            asyncio.run(siege(url, "tiny", given.seconds, given.seed, tally))

        tally = serve(flags, part, file_limit=128 * 1024)
        manifest = json.loads((run / "manifest.json").read_text())
        tally.facts["recording"] = f"{manifest['status']}: {manifest.get('error', '')}"[:120]
        if "stopped" not in manifest.get("error", ""):
            tally.wrong.append(f"the disk was full, and the recording says {manifest['status']}")
    return tally


def part_kills(given: Given) -> Tally:
    """Two replicas in processes, of which one is killed every few seconds."""
    flags = ["--model", given.model, "-dp", "2", "--max-model-len", "256", "--num-gpu-blocks-override", "48"]
    flags += ["--max-num-seqs", "8", "--max-num-queued-reqs", "24", "--preset", "vllm-v1-priority"]
    flags += ["--set", "backend.engine.recovery.settled_s=2", "--set", "backend.engine.recovery.max_restarts=1000"]

    def part(process: subprocess.Popen[bytes], url: str, tally: Tally) -> None:
        def workers() -> list[int]:
            is_any_up = flood.numbers(url)["vajra:replicas_up"] > 0
            return flood.worker_pids(process.pid) if is_any_up else []

        hands = flood.Hands(workers, lambda: flood.resident_bytes(process.pid))
        plan = flood.Plan("tiny", 48, given.seconds, seed=given.seed)
        outcome = asyncio.run(flood.flood(url, plan, KEY, hands))
        tally.requests += outcome.counts
        tally.innocents = outcome.counts["finished"]
        tally.harmed += outcome.wrong
        tally.facts["workers killed"] = outcome.num_killed
        before, after = flood.growth(outcome.rss)
        tally.facts["memory of the second and last quarter, MiB"] = [round(one / 2**20) for one in (before, after)]

    return serve(flags, part)


def part_preset(preset: str, given: Given) -> Tally:
    """A flood and innocents under one preset."""

    def part(process: subprocess.Popen[bytes], url: str, tally: Tally) -> None:
        async def both() -> flood.Outcome:
            until = time.monotonic() + given.seconds
            plan = flood.Plan("tiny", 24, given.seconds, seed=given.seed)
            found, _ = await asyncio.gather(
                flood.flood(url, plan, KEY), innocents(url, "tiny", until, tally, given.seed), return_exceptions=False
            )
            return found

        outcome = asyncio.run(both())
        tally.requests += outcome.counts
        tally.harmed += outcome.wrong

    flags = ["--set", "admission.max_queued_requests=64"]
    if preset == "vajra":  # its policy needs predictions of step times
        flags += ["--set", "backend.engine.latency={type: constant, step_time_s: 0.01}"]
    return serve([*sized(given.model, "--preset", preset), *flags], part)


def part_soak(given: Given) -> Tally:
    """Ordinary requests alone, as many as two replicas in processes answer: what each of them leaves in memory shows."""

    def part(process: subprocess.Popen[bytes], url: str, tally: Tally) -> None:
        plan = flood.Plan(
            "tiny", 16, given.seconds, gone_fraction=0.0, max_prompt_tokens=24, max_tokens=2, seed=given.seed
        )
        outcome = asyncio.run(flood.flood(url, plan, KEY))
        tally.requests += outcome.counts
        tally.innocents = outcome.counts["finished"]
        tally.harmed += outcome.wrong

    return serve(sized(given.model, "-dp", "2"), part, with_workers=True)


def part_end(given: Given) -> Tally:
    """A server whose only worker is killed and does not come back ends with an error."""
    tally = Tally()
    flags = ["--set", "backend.engine.workers=process", "--set", "backend.engine.recovery.max_restarts=0"]
    with suppress(RuntimeError), flood.own_server(sized(given.model, *flags, "--no-access-log")) as (process, _):
        os.kill(flood.worker_pids(process.pid)[0], signal.SIGKILL)
        process.wait(60)
    tally.facts["exit code"] = process.returncode
    if not process.returncode:
        tally.wrong.append("a server that can serve nothing ended well")
    return tally


PARTS = [
    Part("bodies", 0.1, part_bodies),
    Part("siege", 0.4, part_siege),
    Part("soak", 0.1, part_soak),
    Part("kills", 0.2, part_kills),
    Part("end", 0.0, part_end),
    *gauntlet_doors.PARTS,
    *gauntlet_fields.PARTS,
    *(Part(preset, 0.3 / len(PRESETS), partial(part_preset, preset)) for preset in PRESETS),
]
"""Parts in the order in which they run; a file of further parts adds its own list here."""


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="about how long, without starting servers")
    parser.add_argument("--only", help="parts, divided by commas: " + ", ".join(part.name for part in PARTS))
    parser.add_argument("--seed", type=int, help="of everything that is drawn; left out: a new one, which is printed")
    parser.add_argument("--output", type=Path, help="file that gets the figures as JSON")
    given = parser.parse_args()
    seed = secrets.randbelow(2**31) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    by_name = {part.name: part for part in PARTS}
    wanted = list(by_name) if given.only is None else given.only.split(",")
    if unknown := set(wanted) - set(by_name):
        parser.error(f"no such parts: {', '.join(sorted(unknown))}")
    of_all = sum(part.share for part in PARTS)
    with tempfile.TemporaryDirectory() as folder:
        model = f"{folder}/tiny"
        make = [sys.executable, "-P", "-c", "from vajra_py.cli.main import main; main()", "model", "tiny", model]
        subprocess.run(make, check=True, capture_output=True)
        tallies = {}
        for part in (by_name[name] for name in wanted):
            try:
                tallies[part.name] = part.run(Given(model, given.seconds * part.share / of_all, seed))
            except (RuntimeError, httpx.TransportError) as error:  # a server that did not start, or is gone
                tallies[part.name] = Tally(wrong=[repr(error)])
            print(f"{part.name}: {json.dumps(tallies[part.name].shown())}", flush=True)
    return report(tallies, given.output, seed)


def report(tallies: dict[str, Tally], output: Path | None, seed: int) -> int:
    """Print the results and return the exit code."""
    every = tallies.values()
    total: dict[str, Any] = {
        "seed": seed,
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
        "memory after warm-up, bytes a request": {
            name: one.facts["memory after warm-up, bytes a request"]
            for name, one in tallies.items()
            if "memory after warm-up, bytes a request" in one.facts
        },
        "blocks in use in the end": sum(one.facts.get("blocks in use in the end", 0.0) for one in every),
        "seconds from SIGTERM to the end": max(
            (one.facts.get("seconds from SIGTERM to the end", 0.0) for one in every), default=0.0
        ),
    }
    print(json.dumps(total, indent=1))
    if output is not None:
        parts = {name: one.shown() for name, one in tallies.items()}
        output.write_text(json.dumps({"total": total, "parts": parts}, indent=1, default=str) + "\n")
    return 1 if any(one.harmed or one.unasked or one.wrong for one in every) else 0


if __name__ == "__main__":
    raise SystemExit(main())
