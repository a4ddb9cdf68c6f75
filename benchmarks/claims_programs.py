"""Claims on programs: Autellix, ThunderAgent, least attained service, Justitia, Continuum's order, Parrot's order."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
from claims_parts import Cell, Cells, Claim, Knows, Verdict, lengths_of, options_of, ordered, poisson, served

from vajra_py.runtime.kv import PrefixCacheOptions
from vajra_py.testing.harness import PolicySource
from vajra_py.workload.request import PromptContent, RequestSpec

TEST = "tests/policies/test_program_order.py"
AUTELLIX = "tests/policies/test_program_policies.py"


def completion_times(requests: list[Any]) -> dict[str, float]:
    """Seconds from the arrival of each program's first call to the end of its last."""
    spans: dict[str, list[float]] = defaultdict(lambda: [float("inf"), 0.0])
    for one in requests:
        span = spans[one.program_id]
        span[0], span[1] = min(span[0], one.arrived_at), max(span[1], one.ended_at)
    return {name: last - first for name, (first, last) in spans.items()}


# Programs that have been served much beside short ones

SLOTS = 8


def long_and_short(seed: int) -> list[RequestSpec]:
    """Four programs that send call after call, ten at a time, and short ones of three calls in a row now and then."""
    stream = np.random.default_rng([301, seed])
    specs = []
    for number in range(4):
        for index, at in enumerate(poisson(stream, 1.4, 30.0)):
            name = f"long{number}"
            specs.append(RequestSpec(f"{name} {index}", at, 200, int(stream.integers(40, 160)), program_id=name))
    for number, at in enumerate(poisson(stream, 0.3, 30.0)):
        name = f"short{number}"
        for index in range(3):
            before = f"{name} {index - 1}" if index else None
            specs.append(
                RequestSpec(f"{name} {index}", at, 200, int(stream.integers(20, 60)), program_id=name, follows=before)
            )
    return sorted(specs, key=lambda spec: spec.arrived_at)


def attained(prioritizer: PolicySource, seed: int) -> Cell:
    """Mean completion time of short programs."""
    specs = long_and_short(seed)
    options = options_of(num_blocks=4000, max_batch_size=SLOTS)
    requests = served(prioritizer, "fixed_chunk", specs, options)
    times = completion_times(requests)
    return {
        "short": fmean(time for name, time in times.items() if name.startswith("short")),
    }


def _attained(cells: Cells) -> Verdict:
    return ordered(cells.columns("attained", "short", attained, ("las", "fcfs")), " s")


# Programs of few and many calls


def mixed(seed: int) -> list[RequestSpec]:
    """Programs of 2 to 6 calls in a row, and one in eight of 30 to 60 shorter calls, most of them side by side, near full load."""
    stream = np.random.default_rng([305, seed])
    specs = []
    for number, at in enumerate(poisson(stream, 0.45, 120.0)):
        name = f"program{number}"
        is_wide = stream.random() < 0.125
        count = int(stream.integers(30, 61) if is_wide else stream.integers(2, 7))
        for index in range(count):
            before = f"{name} {max(0, index - 6) if is_wide else index - 1}" if index else None
            output = int(stream.integers(20, 120))
            specs.append(RequestSpec(f"{name} {index}", at, 100, output, program_id=name, follows=before))
    return specs


def in_programs(prioritizer: PolicySource, seed: int) -> Cell:
    """Mean completion time of programs."""
    specs = mixed(seed)
    options = options_of(num_blocks=4000, max_batch_size=SLOTS)
    times = completion_times(served(prioritizer, "preemptive", specs, options))
    return {"mean": fmean(times.values())}


MLFQ: PolicySource = ("skip_join_mlfq", {"skips": False, "quantum_s": 0.02})


def _in_programs(names: dict[str, PolicySource], cells: Cells) -> Verdict:
    columns = {
        name: cells.column(f"mixed {one}", "mean", partial(in_programs, one), AGENT_SEEDS)
        for name, one in names.items()
    }
    return ordered(columns, " s")


# Agents with calls side by side


AGENT_SEEDS = range(8)
"""Seeds of agents, whose completion times differ much from one to the next."""


def agents(seed: int) -> list[RequestSpec]:
    """Agents of 2 to 12 calls side by side; one in five has outputs of 400 tokens or so, the others of 60."""
    stream = np.random.default_rng([302, seed])
    specs = []
    for number, at in enumerate(poisson(stream, 0.6, 80.0)):
        width = int(stream.integers(2, 13))
        mean = 400 if stream.random() < 0.2 else 60
        for index in range(width):
            output = int(mean * stream.uniform(0.7, 1.3))
            name = f"agent{number}"
            specs.append(
                RequestSpec(f"{name} {index}", at, 300, output, program_id=name, tenant=name, num_program_calls=width)
            )
    return specs


def pampered(prioritizer: PolicySource, seed: int, knows: Knows = lengths_of) -> Cell:
    """Completion times of agents."""
    specs = agents(seed)
    options = options_of(num_blocks=400, max_batch_size=16, output_lengths=knows(specs))
    times = list(completion_times(served(prioritizer, "fixed_chunk", specs, options)).values())
    return {"mean": fmean(times), "max": max(times)}


def _pampered(metric: str, names: tuple[str, ...], cells: Cells) -> Verdict:
    return ordered(cells.columns("pampered", metric, pampered, names, AGENT_SEEDS), " s")


def _ratio(cells: Cells) -> Verdict:
    columns = cells.columns("pampered", "mean", pampered, ("justitia", "vtc"), AGENT_SEEDS)
    saved = 1.0 - fmean(columns["justitia"]) / fmean(columns["vtc"])
    return Verdict(
        0.3 <= saved <= 1.0, f"{-100 * saved:.0f} %", "" if saved >= 0.3 else "less than half of it is saved"
    )


# Turns of programs with tools between them


def turns(seed: int) -> list[RequestSpec]:
    """Programs of eight turns, whose prompts grow by earlier answers; tools take half a second. Memory is short."""
    stream = np.random.default_rng([303, seed])
    specs = []
    for number, at in enumerate(poisson(stream, 0.55, 60.0)):
        name = f"program{number}"
        segments: tuple[tuple[Any, int], ...] = ((f"{name} task", int(stream.integers(500, 1500))),)
        for index in range(8):
            output = int(stream.integers(20, 80))
            content = PromptContent(segments)
            specs.append(
                RequestSpec(
                    f"{name} {index}",
                    at,
                    content.num_tokens,
                    output,
                    content=content,
                    program_id=name,
                    follows=f"{name} {index - 1}" if index else None,
                    think_time_s=0.5 if index else 0.0,
                    is_last_call=index == 7,
                )
            )
            segments = (
                *segments,
                (("out", f"{name} {index}"), output),
                (f"{name} tool {index}", int(stream.integers(100, 400))),
            )
    return specs


def continued(prioritizer: PolicySource, seed: int) -> Cell:
    """Mean completion time of programs, and cached tokens a call."""
    specs = turns(seed)
    options = options_of(num_blocks=700, max_batch_size=8, prefix_cache=PrefixCacheOptions())
    requests = served(prioritizer, "fixed_chunk", specs, options)
    return {
        "mean": fmean(completion_times(requests).values()),
        "hits": fmean(one.num_cached_tokens for one in requests),
    }


def _continued(metric: str, names: tuple[str, ...], unit: str, cells: Cells) -> Verdict:
    return ordered(cells.columns("turns", metric, continued, names), unit)


# Chains


def chains(seed: int) -> list[RequestSpec]:
    """Chains of three calls, at nine tenths of what eight slots serve."""
    stream = np.random.default_rng([304, seed])
    return [
        RequestSpec(
            f"chain{number} {index}",
            at,
            100,
            int(stream.integers(50, 100)),
            program_id=f"chain{number}",
            follows=f"chain{number} {index - 1}" if index else None,
        )
        for number, at in enumerate(poisson(stream, 0.9 * SLOTS / (3 * 75 * 0.0172), 60.0))
        for index in range(3)
    ]


def chained(prioritizer: PolicySource, seed: int) -> Cell:
    """Mean completion time of chains."""
    options = options_of(num_blocks=4000, max_batch_size=SLOTS)
    return {"mean": fmean(completion_times(served(prioritizer, "fixed_chunk", chains(seed), options)).values())}


def _chains(cells: Cells) -> Verdict:
    return ordered(cells.columns("chains", "mean", chained, ("parrot", "fcfs"), AGENT_SEEDS), " s")


def _short_programs_first(policy: str) -> list[Claim]:
    """Return the claims of Autellix on a workload, for one of its two policies."""
    return [
        Claim(
            policy,
            "mean completion time of programs of few and many calls is below FCFS's",
            "15 times lower latency",
            2,
            partial(_in_programs, {policy: policy, "fcfs": "fcfs"}),
        ),
        Claim(
            policy,
            "and below MLFQ's by calls",
            "5.5 times lower latency",
            2,
            partial(_in_programs, {policy: policy, "mlfq": MLFQ}),
        ),
    ]


CLAIMS = [
    Claim("plas", "the paper's four programs wait at most 14 steps in all, under FCFS 18", "12, 18", 1, test=AUTELLIX),
    *_short_programs_first("plas"),
    Claim(
        "atlas",
        "among parallel calls the longest chain counts; for single chains the policy equals plas",
        "exact",
        1,
        test=AUTELLIX,
    ),
    *_short_programs_first("atlas"),
    Claim(
        "thunderagent",
        "programs keep their replica if contexts fit; otherwise whole programs are paused, and resumed after the timeout",
        "exact",
        1,
        test=AUTELLIX,
    ),
    Claim(
        "least_attained_service",
        "service decays with its half-life; the score is that of a manual calculation",
        "half-life",
        1,
        test=TEST,
    ),
    Claim(
        "least_attained_service",
        "mean completion time of short programs among long ones is below FCFS's",
        "newcomers first",
        2,
        _attained,
    ),
    Claim(
        "justitia",
        "finish tags are in the order of ends under even sharing; in that order, no agent ends later by more than the largest agent",
        "bounded by a constant",
        1,
        test=TEST,
    ),
    Claim(
        "justitia",
        "mean completion time of agents is below vtc's, by agent",
        "-60 %",
        2,
        partial(_pampered, "mean", ("justitia", "vtc")),
    ),
    Claim(
        "justitia",
        "the same, as a ratio",
        "-60 %",
        3,
        _ratio,
    ),
    Claim(
        "justitia",
        "the longest completion time of an agent is below SJF's by calls",
        "worst case bounded",
        2,
        partial(_pampered, "max", ("justitia", "sjf")),
    ),
    Claim(
        "continuum",
        "calls within their pin's time go first, the others by their program's arrival; slow tools get no pin",
        "exact",
        1,
        test=TEST,
    ),
    Claim(
        "continuum",
        "its order alone, without pins, shortens mean completion times of programs against FCFS by calls",
        "1.12 to 3.66 times (with pins)",
        2,
        partial(_continued, "mean", ("continuum", "fcfs"), " s"),
    ),
    Claim(
        "continuum",
        "cached tokens a call are above those under FCFS",
        "-",
        2,
        partial(_continued, "hits", ("fcfs", "continuum"), " tokens"),
    ),
    Claim(
        "parrot",
        "N chains of two unit calls on one server: mean completion time N + 1, in order of arrival (3 N + 1) / 2",
        "closed form",
        1,
        test=TEST,
    ),
    Claim(
        "parrot",
        "mean completion time of chains of three calls of about equal length is below FCFS's",
        "up to 11.7 times (with placement)",
        2,
        _chains,
    ),
]
