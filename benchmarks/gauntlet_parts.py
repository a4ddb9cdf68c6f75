"""Parts of the gauntlet: each has a server of its own, clients of its own, and the same checks in its end.

A part is an entry of a list, so that a file of further attacks needs nothing but a list of its own.
"""

from __future__ import annotations

import random
import resource
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import flood
import httpx
from gauntlet_clients import KEY, Tally
from gauntlet_memory import Sample, growth, own_bytes, weighed

MAX_GROWTH_MIB = 128
"""Most memory that a server may have in the end above what it had when it was ready; see `gauntlet_memory` for leaks."""
NO_KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0", "LRU_CACHE_CAPACITY": "1"}
"""Environment of servers whose memory is judged. oneDNN and PyTorch each keep up to 1,024 kernels, one for each number of rows
that a weight was multiplied with: hundreds of MiB that come with new batch sizes and would hide a leak."""
GRACE_S = 5.0
END_S = 9.0
"""Seconds after its grace period within which a server must exit; see `docs/serving.md`."""


@dataclass(frozen=True, slots=True)
class Given:
    """Input of a part.

    Attributes:
        model: directory of a tiny model.
        seconds: about how long it goes on, without starting its server.
        seed: of everything that it draws; the same seed draws the same.
    """

    model: str
    seconds: float
    seed: int

    def stream(self, *names: object) -> random.Random:
        """A random stream of its own for each name."""
        return random.Random("/".join(map(str, (self.seed, *names))))


@dataclass(frozen=True, slots=True)
class Part:
    """A part by name, and its share of the time (of all parts' shares together)."""

    name: str
    share: float
    run: Callable[[Given], Tally]


Attack = Callable[[subprocess.Popen[bytes], str, Tally], None]
"""Function of a server's process, its URL and the tally to fill in."""


def serve(
    flags: list[str],
    part: Attack,
    file_limit: int | None = None,
    *,
    rests: bool = True,
    code: int = 0,
    with_workers: bool = False,
) -> Tally:
    """Run a part of the gauntlet against a server of its own, look at what is left, and end it by SIGTERM.

    Without `rests` the part leaves something behind on purpose. The process has to end with `code` in time. Memory is the server's
    and, `with_workers`, that of its worker processes, which then have to live as long as it does.
    """
    tally = Tally()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, before[1]))  # inherited by servers
    flags = [*flags, "--api-key", KEY, "--served-model-name", "tiny", "--no-access-log", "--grace", f"{GRACE_S:g}"]
    with flood.own_server(flags, NO_KERNEL_CACHES) as (process, url):
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        watched = [process.pid, *(flood.worker_pids(process.pid) if with_workers else ())]
        before_mib = round(sum(map(flood.resident_bytes, watched)) / 2**20)
        with weighed(lambda: answered(url, tally), lambda: sum(map(own_bytes, watched))) as samples:
            part(process, url, tally)
        note_growth(tally, samples)
        if rests:
            outcome = flood.Outcome(num_killed=10**9)
            found = flood.check_rest(url, outcome)
            tally.wrong += outcome.wrong
            tally.facts["blocks in use in the end"] = found.get("vajra:kv_cache_usage_perc", -1.0)
        if process.poll() is None:
            note_memory(tally, before_mib, round(sum(map(flood.resident_bytes, watched)) / 2**20))
            end_in_time(process, tally)
    if process.returncode != code:
        tally.wrong.append(f"the server ended with {process.returncode}")
    return tally


def end_in_time(process: subprocess.Popen[bytes], tally: Tally) -> None:
    """Send SIGTERM, and record if the process outlives its grace period."""
    began = time.monotonic()
    process.terminate()
    try:
        process.wait(GRACE_S + END_S)
    except subprocess.TimeoutExpired:
        tally.wrong.append(f"{GRACE_S + END_S:g} s after SIGTERM with --grace {GRACE_S:g} the server is still there")
        process.kill()
    tally.facts["seconds from SIGTERM to the end"] = round(time.monotonic() - began, 1)


def note_memory(tally: Tally, before_mib: int, after_mib: int) -> None:
    """Record a server's memory before and after, and excessive growth."""
    tally.facts["memory before, MiB"], tally.facts["memory after, MiB"] = before_mib, after_mib
    grown = after_mib - before_mib
    if grown > MAX_GROWTH_MIB:
        tally.wrong.append(f"memory grew by {grown} MiB; at most {MAX_GROWTH_MIB} are allowed")


def answered(url: str, tally: Tally) -> float | None:
    """Requests that a server has answered so far, or connections that it was sent, whichever are more; None: unknown."""
    try:
        return max(flood.numbers(url).get("vajra:http_answers_total", 0.0), sum(dict(tally.requests).values()))
    except httpx.HTTPError:
        return None


def note_growth(tally: Tally, samples: Sequence[Sample]) -> None:
    """Record the growth of memory per request after warm-up, and a leak."""
    if (found := growth(samples)) is None:
        return
    tally.facts["requests after warm-up"] = round(found.requests)
    tally.facts["memory after warm-up, bytes a request"] = round(found.bytes_per_request)
    tally.facts["smallest leak that would be found, bytes a request"] = round(found.least_found)
    if found.is_leak:
        tally.wrong.append(f"memory leaks {found.bytes_per_request:.0f} bytes a request after warm-up")


def sized(model: str, *more: str) -> list[str]:
    """Flags of a small server."""
    sizes = ["--max-model-len", "512", "--num-gpu-blocks-override", "256", "--block-size", "16"]
    return ["--model", model, *sizes, "--max-num-seqs", "16", *more]
