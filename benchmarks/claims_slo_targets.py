"""Claims on SLO targets and shares: SLOs-Serve, QLM, Kairos, Ascendra, Equinox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from claims_parts import (
    Cell,
    Cells,
    Claim,
    Knows,
    Verdict,
    lengths_of,
    options_of,
    ordered,
    poisson,
    requests_in,
    served,
    simulate,
    ttft,
)

from vajra_py.runtime.requests.request import Request
from vajra_py.testing.harness import PolicySource
from vajra_py.workload.request import RequestSpec

TEST = "tests/policies/test_slo_targets.py"
EDF: PolicySource = ("edf", {"use_request_deadlines": True})


def kept(specs: Sequence[RequestSpec], requests: Sequence[Request]) -> Cell:
    """Share of first tokens in time."""
    num_kept = sum(ttft(one) <= (spec.ttft_slo_s or 0.0) for spec, one in zip(specs, requests, strict=True))
    return {"kept": num_kept / len(specs)}


# SLOs-Serve: bursts


def burst(seed: int) -> list[RequestSpec]:
    """Chats with a TTFT SLO of one or three seconds; for two seconds, ten times as many arrive."""
    stream = np.random.default_rng([341, seed])
    times = sorted([*poisson(stream, 2.0, 20.0), *(8.0 + one for one in poisson(stream, 20.0, 2.0))])
    return [
        RequestSpec(
            f"r{index}",
            at,
            int(stream.integers(200, 2000)),
            int(stream.integers(20, 100)),
            ttft_slo_s=float(stream.choice([1.0, 3.0])),
        )
        for index, at in enumerate(times)
    ]


PLANS: Mapping[str, tuple[PolicySource, PolicySource]] = {
    "edf": (EDF, ("fixed_chunk", {"chunk_size": 300})),
    "slos_serve": ("fcfs", ("slos_serve", {"step_s": 0.05})),
}


def first_tokens(how: str, seed: int) -> Cell:
    """Share of first tokens in time."""
    specs = burst(seed)
    prioritizer, batcher = PLANS[how]
    requests = served(prioritizer, batcher, specs, options_of(num_blocks=8000, max_batch_size=128))
    return kept(specs, requests)


def _burst(cells: Cells) -> Verdict:
    return ordered(cells.columns("burst", "kept", first_tokens, PLANS))


# QLM and Kairos: two classes in overload


def classes(seed: int) -> list[RequestSpec]:
    """Interactive requests with 3 s to the first token and batch ones with 60 s, in equal parts; load swings about full."""
    stream = np.random.default_rng([342, seed])
    return [
        RequestSpec(
            f"r{index}",
            at,
            int(stream.integers(100, 3000)),
            int(stream.integers(50, 200)),
            ttft_slo_s=float(stream.choice([3.0, 60.0])),
        )
        for index, at in enumerate(poisson(stream, 5.0, 60.0))
    ]


def in_class_time(prioritizer: PolicySource, seed: int) -> Cell:
    """Share of first tokens in time."""
    specs = classes(seed)
    options = options_of(num_blocks=4000, max_batch_size=16, output_lengths=lengths_of(specs))
    requests = served(prioritizer, ("fixed_chunk", {"chunk_size": 512}), specs, options)
    return kept(specs, requests)


def _classes(policies: Mapping[str, PolicySource], cells: Cells) -> Verdict:
    return ordered(
        {name: cells.column(f"classes {one}", "kept", partial(in_class_time, one)) for name, one in policies.items()}
    )


# Ascendra


def urgent_and_long(seed: int) -> list[RequestSpec]:
    """Prompts of very different lengths with 1.5 s to the first token, at about 80 % of what four replicas serve."""
    stream = np.random.default_rng([343, seed])
    return [
        RequestSpec(
            f"r{index}",
            at,
            int(min(8000, stream.lognormal(6.5, 1.2))) + 1,
            int(stream.integers(20, 120)),
            ttft_slo_s=1.5,
        )
        for index, at in enumerate(poisson(stream, 18.0, 40.0))
    ]


HANDED: Mapping[str, PolicySource] = {
    "no hand-over": ("ascendra", {"interval_s": 1e6}),
    "four equal replicas": "least_loaded",
    "ascendra": "ascendra",
}


def handed(how: str, seed: int) -> Cell:
    """Share of first tokens that are late."""
    specs = urgent_and_long(seed)
    options = options_of(num_replicas=4, num_blocks=4000, max_batch_size=32)
    harness = simulate(EDF, ("fixed_chunk", {"chunk_size": 512}), specs, options, HANDED[how])
    late = sum(ttft(one) > 1.5 for one in requests_in(harness, specs))
    return {"late": late / len(specs)}


def _handed(names: tuple[str, ...], cells: Cells) -> Verdict:
    return ordered(cells.columns("handed", "late", handed, names))


# Equinox


def shapes(seed: int) -> list[RequestSpec]:
    """Two backlogged tenants: one with long prompts and short outputs, one the reverse, of equal weighted tokens."""
    stream = np.random.default_rng([344, seed])
    specs = []
    for tenant, prompt, output in (("reads", 1400, 50), ("writes", 100, 375)):
        for index, at in enumerate(poisson(stream, 6.0, 60.0)):
            factor = float(stream.uniform(0.7, 1.3))
            size = int(prompt * factor), int(output * factor)
            specs.append(RequestSpec(f"{tenant}{index}", at, *size, tenant=tenant))
    return sorted(specs, key=lambda spec: spec.arrived_at)


def shared(prioritizer: str, seed: int, knows: Knows = lengths_of) -> Cell:
    """Relative difference of the tenants' device time while both are backlogged."""
    specs = shapes(seed)
    options = options_of(num_blocks=4000, max_batch_size=16, output_lengths=knows(specs))
    requests = served(prioritizer, ("fixed_chunk", {"chunk_size": 512}), specs, options)
    time_s = {"reads": 0.0, "writes": 0.0}
    for spec, one in zip(specs, requests, strict=True):
        if one.ended_at is not None and one.ended_at <= 60.0:
            step_s = (0.015 + 16 * (0.0001 + 2e-7 * (spec.num_prompt_tokens + spec.num_output_tokens / 2))) / 16
            time_s[spec.tenant] += 0.0001 * spec.num_prompt_tokens + step_s * spec.num_output_tokens
    return {"gap": abs(time_s["reads"] - time_s["writes"]) / sum(time_s.values())}


def _shared(cells: Cells) -> Verdict:
    return ordered(cells.columns("shapes", "gap", shared, ("equinox", "vtc")))


CLAIMS = [
    Claim(
        "slos_serve",
        "a plan admits as many requests as exhaustive search, and later plans keep them",
        "exact",
        1,
        test=TEST,
    ),
    Claim(
        "slos_serve",
        "in a burst of ten times the load more first tokens are in time than under EDF",
        "2.2 times the capacity",
        2,
        _burst,
    ),
    Claim(
        "qlm",
        "groups are ordered by deadline once one would be late; predicted waits are within a tenth for 60 requests ahead",
        "exact",
        1,
        test=TEST,
    ),
    Claim(
        "qlm",
        "with two classes of SLOs more first tokens are in time than under FCFS",
        "+40 to +90 %",
        2,
        partial(_classes, {"fcfs": "fcfs", "qlm": "qlm"}),
    ),
    Claim("kairos", "of equal deadlines the longer prompt starts first", "exact", 1, test=TEST),
    Claim(
        "kairos",
        "with two classes of SLOs more first tokens are in time than under FCFS",
        "+23.9 %",
        2,
        partial(_classes, {"fcfs": "fcfs", "kairos": "kairos"}),
    ),
    Claim("ascendra", "requests that would be late move to the reserved replica", "exact", 1, test=TEST),
    Claim(
        "ascendra",
        "fewer first tokens are late than without handing over",
        "up to 1.7 times the throughput",
        2,
        partial(_handed, ("ascendra", "no hand-over")),
    ),
    Claim(
        "ascendra",
        "fewer are late than with four equal replicas under EDF",
        "up to 1.7 times the throughput",
        2,
        partial(_handed, ("ascendra", "four equal replicas")),
    ),
    Claim("equinox", "counters combine service received and resources used", "exact", 1, test=TEST),
    Claim(
        "equinox",
        "tenants with opposite ratios of prompt to output tokens differ less in device time than under vtc",
        "13 % more fairness",
        2,
        _shared,
    ),
]
