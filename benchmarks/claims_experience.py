"""Claims on deadlines and experience: JITServe, Andes, PolyServe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean

import numpy as np
from claims_parts import (
    Cell,
    Cells,
    Claim,
    Knows,
    Verdict,
    options_of,
    ordered,
    poisson,
    requests_in,
    served,
    simulate,
    time_in_system,
)

from vajra_policies.slo.reading import Reading
from vajra_py.latency.services.output_length import OracleLengths
from vajra_py.metrics.tables.recorder import token_times
from vajra_py.testing.harness import PolicySource
from vajra_py.workload.request import RequestSpec

TEST = "tests/policies/test_experience.py"

# JITServe

SLOTS = 8
STEP_S = 0.0172


def with_deadlines(seed: int) -> list[RequestSpec]:
    """Outputs of 20 to 400 tokens with a deadline of 2 to 6 times the time alone, at 1.5 times full load."""
    stream = np.random.default_rng([321, seed])
    specs = []
    for index, at in enumerate(poisson(stream, 1.5 * SLOTS / (135 * STEP_S), 60.0)):
        output = int(np.clip(stream.lognormal(np.log(110), 0.8), 20, 400))
        alone_s = STEP_S * output
        specs.append(RequestSpec(f"r{index}", at, 100, output, deadline_s=float(stream.uniform(2, 6)) * alone_s))
    return specs


def upper_bounds(seed: int, specs: Sequence[RequestSpec]) -> OracleLengths:
    """Lengths up to a factor of 1 to 2."""
    stream = np.random.default_rng([322, seed])
    return OracleLengths({spec.request_id: int(spec.num_output_tokens * stream.uniform(1, 2)) for spec in specs})


def in_time(prioritizer: PolicySource, seed: int, knows: Knows | None = None) -> Cell:
    """Share of output tokens that are of requests which ended in time; lengths are known up to a factor of 1 to 2."""
    specs = with_deadlines(seed)
    lengths = upper_bounds(seed, specs) if knows is None else knows(specs)
    options = options_of(num_blocks=20_000, max_batch_size=SLOTS, output_lengths=lengths)
    requests = served(prioritizer, "preemptive", specs, options)
    good = sum(
        spec.num_output_tokens
        for spec, one in zip(specs, requests, strict=True)
        if time_in_system(one) <= (spec.deadline_s or 0.0)
    )
    return {"goodput": good / sum(spec.num_output_tokens for spec in specs)}


EDF: PolicySource = ("edf", {"use_request_deadlines": True})


def _in_time(policies: Mapping[str, PolicySource], cells: Cells) -> Verdict:
    return ordered(
        {name: cells.column(f"in time {one}", "goodput", partial(in_time, one)) for name, one in policies.items()},
    )


# Andes


def streams(seed: int) -> list[RequestSpec]:
    """Chats to be read at 5 tokens a second from 1 s on, for 30 s half again as many as the replica serves."""
    stream = np.random.default_rng([323, seed])
    return [
        RequestSpec(
            f"r{index}",
            at,
            int(stream.integers(50, 300)),
            int(stream.integers(80, 400)),
            ttft_slo_s=1.0,
            tpot_slo_s=0.2,
        )
        for index, at in enumerate(poisson(stream, 1.5 * 16 / (240 * 0.02), 30.0))
    ]


def read(prioritizer: PolicySource, seed: int) -> Cell:
    """Mean quality of experience, and output tokens a second over the whole run."""
    specs = streams(seed)
    options = options_of(num_blocks=4000, max_batch_size=16)
    requests = served(prioritizer, "preemptive", specs, options)
    qualities = []
    for one in requests:
        reading = Reading(5.0, 1.0)
        for at in (token_times(one) - one.arrived_at).tolist():
            reading.receive(at, 1)
        qualities.append(reading.qoe())
    end = max(one.ended_at or 0.0 for one in requests)
    return {"qoe": fmean(qualities), "tokens_per_s": sum(spec.num_output_tokens for spec in specs) / end}


def _read(cells: Cells) -> Verdict:
    return ordered(cells.columns("read", "qoe", read, ("fcfs", "andes")))


def _read_ratio(cells: Cells) -> Verdict:
    ratios = {}
    for metric in ("qoe", "tokens_per_s"):
        columns = cells.columns("read", metric, read, ("fcfs", "andes"))
        ratios[metric] = fmean(columns["andes"]) / fmean(columns["fcfs"])
    gain, loss = ratios["qoe"] - 1.0, 1.0 - ratios["tokens_per_s"]
    return Verdict(gain >= 0.2 and loss <= 0.1, f"QoE {100 * gain:+.0f} %, tokens/s {-100 * loss:+.1f} %")


# PolyServe

NUM_REPLICAS = 8
TIERS = (0.03, 0.05, 0.1)
POLYSERVE: PolicySource = ("polyserve", {"tiers_s": TIERS, "default_output_tokens": 150.0})


def tiered(seed: int) -> list[RequestSpec]:
    """Three tiers of 30, 50 and 100 ms a token, 2 s to the first one, at half of what eight replicas serve or less."""
    stream = np.random.default_rng([324, seed])
    return [
        RequestSpec(
            f"r{index}",
            at,
            int(stream.integers(50, 400)),
            int(stream.integers(50, 250)),
            ttft_slo_s=2.0,
            tpot_slo_s=TIERS[int(stream.integers(3))],
        )
        for index, at in enumerate(poisson(stream, 12.0, 30.0))
    ]


def graded(router: PolicySource, seed: int) -> Cell:
    """Replicas that are idle for more than nine tenths of the time, and the share of requests that meet both SLOs."""
    specs = tiered(seed)
    options = options_of(num_replicas=NUM_REPLICAS, num_blocks=4000, max_batch_size=64, keeps_steps=True)
    harness = simulate("fcfs", ("fixed_chunk", {"chunk_size": 128}), specs, options, router)
    busy_s = [0.0] * NUM_REPLICAS
    for step in harness.steps:
        if step.formed_at < 30.0:
            busy_s[step.replica_id] += step.duration_s
    kept = 0
    for spec, one in zip(specs, requests_in(harness, specs), strict=True):
        times = token_times(one) - one.arrived_at
        kept += times[0] <= 2.0 and (times[-1] - times[0]) / max(len(times) - 1, 1) <= (spec.tpot_slo_s or 0.0)
    return {"idle": float(sum(one < 3.0 for one in busy_s)), "kept": kept / len(specs)}


def _gradient(cells: Cells) -> Verdict:
    columns = {
        name: cells.column(f"graded {one}", "idle", partial(graded, one))
        for name, one in (("shortest queue", "least_loaded"), ("polyserve", POLYSERVE))
    }
    return ordered(columns, " idle replicas")


def _kept(cells: Cells) -> Verdict:
    kept = fmean(cells.column(f"graded {POLYSERVE}", "kept", partial(graded, POLYSERVE)))
    return Verdict(kept >= 0.99, f"{100 * kept:.1f} %", "" if kept >= 0.99 else "fewer meet their SLOs")


CLAIMS = [
    Claim(
        "jitserve",
        "priority is reward over remaining time; the lateness exponent has no effect among requests in time",
        "exact",
        1,
        test=TEST,
    ),
    Claim(
        "jitserve",
        "share of tokens in time at 1.5 times full load, lengths known up to a factor of 1 to 2: above EDF",
        "1.4 to 6.3 times",
        2,
        partial(_in_time, {"edf": EDF, "jitserve": "jitserve"}),
    ),
    Claim(
        "jitserve",
        "the same: above SRPT",
        "1.4 to 6.3 times",
        2,
        partial(_in_time, {"srpt": "srpt", "jitserve": "jitserve"}),
    ),
    Claim("andes", "QoE is that of a manual calculation; a stream that is never late has QoE 1", "exact", 1, test=TEST),
    Claim("andes", "mean QoE at half again full load is above FCFS", "up to 4.7 times", 2, _read),
    Claim("andes", "at least 20 % above, at a loss of at most 10 % of throughput", "up to 4.7 times", 3, _read_ratio),
    Claim(
        "polyserve",
        "a tier fills one replica before the next; no request is placed in a looser tier",
        "exact",
        1,
        test=TEST,
    ),
    Claim(
        "polyserve",
        "at half load some replicas stay idle, under the shortest queue none",
        "load gradient",
        2,
        _gradient,
    ),
    Claim("polyserve", "both SLOs are met for 99 % of the requests", "92.5 % of the optimal goodput", 2, _kept),
]
