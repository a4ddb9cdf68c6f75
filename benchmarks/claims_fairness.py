"""Claims on fair shares: VTC, deficit round robin, and the control without a lift."""

from __future__ import annotations

from functools import partial

import numpy as np
from claims_parts import (
    GPU_7B,
    SEEDS,
    Cell,
    Cells,
    Claim,
    Verdict,
    options_of,
    ordered,
    service_gap,
    simulate,
)

from vajra_py.testing.harness import Harness
from vajra_py.workload.request import RequestSpec

SLOTS, LENGTH = 16, 256
KV_TOKENS = SLOTS * 2 * LENGTH
OPTIONS = options_of(num_blocks=KV_TOKENS // 16, max_batch_size=SLOTS, latency=GPU_7B, keeps_steps=True)
"""Every batch of the suite fits into memory, so that no request is preempted, as in the paper."""
TENANTS = ("small", "large")
SECONDS = 200.0
RATE = 3.6
"""Requests a second that a full batch serves."""
U = max(1.0 * LENGTH, 2.0 * KV_TOKENS)
"""The paper's U = max(w_p * longest prompt, w_q * M)."""


def overload(seed: int) -> list[RequestSpec]:
    """The paper's overload suite: tenants that ask for 1.2 and 2.4 times half of the replica; up to 256 tokens in and out."""
    return [*_sent(seed, TENANTS[0], 0.6, 0.0), *_sent(seed, TENANTS[1], 1.2, 0.0)]


def returning(seed: int) -> list[RequestSpec]:
    """Either tenant asks for more than all of the replica: one throughout, the other from 60 s on."""
    return [*_sent(seed, TENANTS[0], 1.3, 60.0), *_sent(seed, TENANTS[1], 1.3, 0.0)]


def _sent(seed: int, tenant: str, load: float, first_s: float) -> list[RequestSpec]:
    """One tenant's requests at equal gaps; lengths are uniform from 80 to 100 % of 256 tokens."""
    stream = np.random.default_rng([28, seed, TENANTS.index(tenant)])
    gap = 1.0 / (RATE * load)
    specs = []
    for index in range(int((SECONDS - first_s) / gap)):
        prompt, output = (max(1, int(LENGTH * part)) for part in stream.uniform(0.8, 1.0, 2))
        specs.append(RequestSpec(f"{tenant}{index}", first_s + (index + 0.5) * gap, prompt, output, tenant=tenant))
    return specs


def _arrival(spec: RequestSpec) -> float:
    return spec.arrived_at


def gaps(prioritizer: str, seed: int) -> Cell:
    """Widest gap of the overload suite, and tokens a second while requests arrive."""
    specs = sorted(overload(seed), key=_arrival)
    harness = simulate(prioritizer, "fixed_chunk", specs, OPTIONS)
    widest = service_gap(harness, specs, TENANTS, 1.0, 2.0)
    num_tokens = sum(step.num_tokens for step in harness.steps if step.ended_at <= SECONDS)
    return {"widest": widest, "tokens_per_s": num_tokens / SECONDS}


def share_after_return(prioritizer: str, seed: int) -> Cell:
    """Share of the tenant that stayed in what is admitted from 10 s to 30 s after the other's return."""
    specs = sorted(returning(seed), key=_arrival)
    harness = simulate(prioritizer, "fixed_chunk", specs, OPTIONS)
    return {"share": _share(harness, {spec.request_id: spec for spec in specs}, 70.0, 90.0)}


def _share(harness: Harness, specs: dict[str, RequestSpec], first_s: float, last_s: float) -> float:
    admitted = [
        entry.request_id
        for step in harness.steps
        if first_s <= step.formed_at < last_s
        for entry in step.entries
        if entry.kind == "admitted"
    ]
    return sum(specs[one].tenant == "large" for one in admitted) / len(admitted)


def _bound(prioritizer: str, bound: float, cells: Cells) -> Verdict:
    widest = max(cells.column(f"overload {prioritizer}", "widest", partial(gaps, prioritizer)))
    return Verdict(widest <= bound, f"widest {widest:,.0f} of {bound:,.0f}, {len(SEEDS)} seeds")


def _gap_of_fcfs(prioritizer: str, cells: Cells) -> Verdict:
    columns = cells.columns("overload", "widest", gaps, (prioritizer, "fcfs"))
    return ordered({f"10 x {prioritizer}": [10 * one for one in columns[prioritizer]], "fcfs": columns["fcfs"]})


def _work(cells: Cells) -> Verdict:
    columns = cells.columns("overload", "tokens_per_s", gaps, ("vtc", "fcfs"))
    ratio = sum(columns["vtc"]) / sum(columns["fcfs"])
    return Verdict(abs(ratio - 1.0) <= 0.01, f"{100 * (ratio - 1):+.2f} % of fcfs")


def _control(cells: Cells) -> Verdict:
    columns = cells.columns("share of who stayed,", "share", share_after_return, ("least_counter_first", "vtc"))
    verdict = ordered({"lcf": columns["least_counter_first"], "vtc": columns["vtc"]})
    near_half = all(abs(one - 0.5) <= 0.1 for one in columns["vtc"])
    return verdict if near_half else Verdict(False, verdict.ours, "vtc is not near one half")


CLAIMS = [
    Claim(
        "vtc",
        "backlogged tenants differ by at most 2 U in every window",
        "bound 2 U",
        1,
        partial(_bound, "vtc", 2 * U),
    ),
    Claim(
        "vtc",
        "the bound, on random workloads, and the lift",
        "bound 2 U",
        1,
        test="tests/policies/test_fairness.py",
    ),
    Claim("vtc", "the gap of FCFS grows to over ten times as much", "unbounded", 2, partial(_gap_of_fcfs, "vtc")),
    Claim("vtc", "throughput is that of FCFS, within 1 %", "equal", 2, _work),
    Claim(
        "least_counter_first",
        "without the lift, a tenant that stayed is blocked when another returns; with it, each has half",
        "-",
        2,
        _control,
    ),
    Claim(
        "deficit_round_robin",
        "backlogged tenants differ by at most 2 (U + Q) in every window",
        "-",
        1,
        partial(_bound, "deficit_round_robin", 2 * (U + KV_TOKENS / 20)),
    ),
    Claim(
        "deficit_round_robin",
        "the gap of FCFS is over ten times as much",
        "-",
        2,
        partial(_gap_of_fcfs, "deficit_round_robin"),
    ),
]
