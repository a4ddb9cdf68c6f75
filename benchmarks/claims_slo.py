"""Claims on SLOs and admission: QoServe, SlidingServe, Past-Future, HyGen, SCORPIO."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
from claims_parts import (
    Cell,
    Cells,
    Claim,
    Knows,
    Verdict,
    difference,
    lengths_of,
    options_of,
    ordered,
    poisson,
    requests_in,
    served,
    simulate,
    time_in_system,
    ttft,
)

from vajra_py.metrics.tables.recorder import token_times
from vajra_py.testing.harness import PolicySource
from vajra_py.workload.request import RequestSpec

TEST = "tests/policies/test_slo_policies.py"

# QoServe

TIERS: Mapping[str, dict[str, Any]] = {
    "interactive": {"ttft_slo_s": 6.0, "tbt_slo_s": 0.05},
    "soon": {"deadline_s": 20.0},
    "batch": {"deadline_s": 60.0},
}
"""The paper's three tiers, one third of the requests each; ends of 600 s and 1800 s are cut to a thirtieth, as is the run."""
EDF: PolicySource = ("edf", {"use_request_deadlines": True})
SYSTEMS: Mapping[str, tuple[PolicySource, PolicySource]] = {
    "qoserve": ("qoserve", "slack_chunk"),
    "sliding_serve": ("qoserve", "sliding_serve"),
    "edf": (EDF, ("fixed_chunk", {"chunk_size": 256})),
    "fcfs": ("fcfs", ("fixed_chunk", {"chunk_size": 256})),
}
"""Baselines are Sarathi's schedulers with the chunk of 256 tokens that keeps 50 ms between tokens."""
QOSERVE_SECONDS = 80.0


def tiers(seed: int, rate: float) -> list[RequestSpec]:
    """Poisson arrivals; prompts log-normal around 1,500 tokens, outputs around 150."""
    stream = np.random.default_rng([284, seed])
    specs = []
    for index, at in enumerate(poisson(stream, rate, QOSERVE_SECONDS)):
        prompt = int(min(8000, max(50, stream.lognormal(math.log(1500), 0.9))))
        output = int(min(1000, max(5, stream.lognormal(math.log(150), 0.7))))
        tier = list(TIERS)[int(stream.integers(3))]
        specs.append(RequestSpec(f"r{index}", at, prompt, output, slo_class=tier, **TIERS[tier]))
    return specs


def missed(system: str, rate: float, seed: int) -> Cell:
    """Share of requests that miss an SLO: of the first token, of more than a tenth of the later tokens, or of the end."""
    specs = tiers(seed, rate)
    prioritizer, batcher = SYSTEMS[system]
    options = options_of(num_blocks=20_000, max_batch_size=256)
    requests = served(prioritizer, batcher, specs, options)
    late = 0
    for spec, request in zip(specs, requests, strict=True):
        if spec.deadline_s is not None:
            late += time_in_system(request) > spec.deadline_s
            continue
        times = token_times(request) - request.arrived_at
        due = max(times[0], 6.0) + 0.05 * np.arange(len(times))
        late += times[0] > 6.0 or float(np.mean(times > due + 1e-9)) > 0.1
    return {"missed": late / len(specs)}


RATES = (2.5, 3.0, 3.5, 4.0, 5.0)
MOST_MISSED = 0.1
"""The paper allows 1 %; so short a run has bursts that miss more at any load worth the name."""


def _capacity(system: str, cells: Cells) -> list[float]:
    """Highest rate at which at most a tenth miss, of each seed, interpolated between the rates that were tried."""
    found = []
    shares = cells.columns(f"{system} at", "missed", partial(missed, system), RATES)
    for seed in range(len(shares[RATES[0]])):
        best = RATES[0]
        for low, high in pairwise(RATES):
            before, after = shares[low][seed], shares[high][seed]
            if after > MOST_MISSED:
                best = low + (high - low) * (MOST_MISSED - before) / (after - before) if before <= MOST_MISSED else best
                break
            best = high
        found.append(best)
    return found


def _goodput(cells: Cells) -> Verdict:
    columns = {system: _capacity(system, cells) for system in ("fcfs", "edf", "qoserve")}
    return ordered(columns, " requests/s")


def _goodput_ratio(cells: Cells) -> Verdict:
    ratio = fmean(_capacity("qoserve", cells)) / fmean(_capacity("edf", cells)) - 1
    return Verdict(0.1 <= ratio <= 0.8, f"{100 * ratio:+.0f} %")


def _overload(cells: Cells) -> Verdict:
    at = RATES[-1]
    return ordered(
        {one: cells.columns(f"{one} at", "missed", partial(missed, one), [at])[at] for one in ("qoserve", "edf")}
    )


def _sliding_goodput(cells: Cells) -> Verdict:
    return ordered({system: _capacity(system, cells) for system in ("qoserve", "sliding_serve")}, " requests/s")


def _sliding_overload(cells: Cells) -> Verdict:
    at = RATES[-1]
    columns = {
        one: cells.columns(f"{one} at", "missed", partial(missed, one), [at])[at]
        for one in ("sliding_serve", "qoserve")
    }
    return ordered(columns)


# Past-Future

MODEL_LENGTH = 1100


def growing(seed: int, num_requests: int = 400) -> list[RequestSpec]:
    """Offline requests that grow to several times their prompts: 50 to 150 tokens in, up to 900 out."""
    stream = np.random.default_rng([285, seed])
    outputs = np.clip(stream.lognormal(math.log(250), 0.6, num_requests), 5, 900).astype(int)
    prompts = stream.integers(50, 150, num_requests)
    times = poisson(stream, 8.0, 4.0 * num_requests)[:num_requests]
    return [
        RequestSpec(f"r{index}", times[index], int(prompts[index]), int(outputs[index]), max_tokens=900)
        for index in range(num_requests)
    ]


ADMISSION: Mapping[str, PolicySource] = {
    "conservative": ("past_future", {"lengths": "longest"}),
    "past_future": "past_future",
    "aggressive": "fixed_chunk",
}
ADMITTED: Mapping[str, PolicySource] = {**ADMISSION, "predicted": ("past_future", {"lengths": "predicted"})}


def admitted(how: str, seed: int, knows: Knows = lengths_of) -> Cell:
    """Evictions a request, tokens held and the rate of requests within 10 s to the first token and 50 ms a token."""
    specs = growing(seed)
    options = options_of(
        num_blocks=500,
        max_batch_size=256,
        keeps_steps=True,
        max_model_len=MODEL_LENGTH,
        output_lengths=knows(specs),
    )
    harness = simulate("fcfs", ADMITTED[how], specs, options)
    requests = requests_in(harness, specs)
    end = max(one.ended_at or 0.0 for one in requests)
    busy = [step for step in harness.steps if step.num_waiting]
    good = sum(ttft(one) <= 10.0 and _slowest_gap(one) <= 0.5 for one in requests)
    return {
        "evictions": sum(one.num_preemptions for one in requests) / len(requests),
        "held": fmean(1.0 - step.free_blocks / 500 for step in busy) if busy else 0.0,
        "goodput": good / end,
    }


def _slowest_gap(request: Any) -> float:
    times = token_times(request)
    return float(np.max(np.diff(times))) if len(times) > 1 else 0.0


def _admission(metric: str, order: tuple[str, ...], cells: Cells) -> Verdict:
    return ordered(cells.columns("admission", metric, admitted, order))


def _evictions(cells: Cells) -> Verdict:
    columns = cells.columns("admission", "evictions", admitted, ADMISSION)
    verdict = ordered({how: columns[how] for how in ("past_future", "aggressive")}, " a request")
    none = not any(columns["conservative"])
    few = fmean(columns["past_future"]) <= 0.1 * fmean(columns["aggressive"])
    reason = verdict.reason or ("" if few else "more than a tenth of the aggressive rule's")
    text = f"conservative {fmean(columns['conservative']):.2g}, {verdict.ours}"
    return Verdict(verdict.holds and none and few, text, reason)


# HyGen

BUDGETS = (0.02, 0.03, 0.045)
HYGEN_SECONDS = 40.0


def co_located(seed: int, *, with_offline: bool) -> list[RequestSpec]:
    """Chats at about 40 % of what the replica serves, and more offline requests than fit beside them."""
    stream = np.random.default_rng([286, seed])
    online = [
        RequestSpec(f"chat{index}", at, int(stream.integers(50, 500)), int(stream.integers(20, 200)))
        for index, at in enumerate(poisson(stream, 5.0, HYGEN_SECONDS))
    ]
    offline = [RequestSpec(f"batch{index}", 0.0, 500, 50, priority=1) for index in range(400 if with_offline else 0)]
    return [*offline, *online]


def hygen(budget_s: float, seed: int) -> Cell:
    """P99 of the time between online tokens, and tokens a second of all while online requests arrive; budget 0: online alone."""
    specs = co_located(seed, with_offline=budget_s > 0)
    options = options_of(num_blocks=4000, max_batch_size=64, keeps_steps=True)
    batcher: PolicySource = ("hygen", {"latency_budget_s": budget_s or 1.0, "chunk_size": 320})
    harness = simulate("priority", batcher, specs, options)
    online = [harness.request(spec.request_id) for spec in specs if spec.priority == 0]
    gaps = np.concatenate([np.diff(token_times(one)) for one in online])
    num_tokens = sum(step.num_tokens for step in harness.steps if step.ended_at <= HYGEN_SECONDS)
    return {"p99_tbt": float(np.quantile(gaps, 0.99)), "tokens_per_s": num_tokens / HYGEN_SECONDS}


def _budget_is_kept(cells: Cells) -> Verdict:
    columns = cells.columns("hygen", "p99_tbt", hygen, (0.0, *BUDGETS))
    worst = {budget: max(columns[budget]) for budget in BUDGETS}
    alone = max(columns[0.0])
    text = ", ".join(f"{1e3 * p99:.1f} of {1e3 * budget:.0f} ms" for budget, p99 in worst.items())
    return Verdict(
        all(p99 <= 1.05 * max(budget, alone) for budget, p99 in worst.items()), f"{text}; alone {1e3 * alone:.1f} ms"
    )


def _throughput(cells: Cells) -> Verdict:
    columns = cells.columns("hygen", "tokens_per_s", hygen, (0.0, *BUDGETS))
    ratio = fmean(columns[BUDGETS[-1]]) / fmean(columns[0.0])
    verdict = ordered(
        {"alone": columns[0.0], **{f"{1e3 * one:.0f} ms": columns[one] for one in BUDGETS}}, " tokens/s", 4
    )
    return Verdict(verdict.holds and ratio >= 3.87 / 2, f"{verdict.ours}: {ratio:.2f} times", verdict.reason)


# SCORPIO

CLASSES = (0.03, 0.06, 0.12)


def mixed_slos(seed: int, load: float) -> list[RequestSpec]:
    """Three classes of 30, 60 and 120 ms a token and 2 s to the first one, in equal parts; about 5 requests a second are full load."""
    stream = np.random.default_rng([287, seed])
    return [
        RequestSpec(
            f"r{index}",
            at,
            int(stream.integers(100, 1000)),
            int(stream.integers(50, 400)),
            ttft_slo_s=2.0,
            tpot_slo_s=CLASSES[int(stream.integers(3))],
        )
        for index, at in enumerate(poisson(stream, 5.0 * load, 80.0))
    ]


def attained(load: float, how: str, seed: int) -> Cell:
    """Share of requests that meet both SLOs; steps of at most 128 tokens, which the tightest SLO allows."""
    specs = mixed_slos(seed, load)
    prioritizer, batcher = (EDF, "scorpio") if how == "scorpio" else ("fcfs", "fixed_chunk")
    options = options_of(num_blocks=4000, max_batch_size=128, output_lengths=lengths_of(specs))
    requests = served(prioritizer, (batcher, {"chunk_size": 128}), specs, options)
    kept = 0
    for spec, one in zip(specs, requests, strict=True):
        times = token_times(one)
        if not one.num_output_tokens or ttft(one) > 2.0:
            continue
        kept += len(times) < 2 or (times[-1] - times[0]) / (len(times) - 1) <= (spec.tpot_slo_s or 0.0)
    return {"attained": kept / len(specs)}


def _attainment(load: float, cells: Cells) -> dict[str, list[float]]:
    return cells.columns(f"at {load}", "attained", partial(attained, load), ("fcfs", "scorpio"))


def _at_high_load(cells: Cells) -> Verdict:
    return ordered(_attainment(1.5, cells))


def _at_low_load(cells: Cells) -> Verdict:
    columns = _attainment(0.3, cells)
    worse = difference(columns["fcfs"], columns["scorpio"])
    text = ", ".join(f"{how} {fmean(values):.3f}" for how, values in columns.items())
    return Verdict(worse.mean <= 0.02, text, "" if worse.mean <= 0.02 else "more than 2 % worse")


_AS_MUCH = (
    "equal within 1 %: where step times are linear in tokens, two chunks compute as much as one. Where a chunk of n tokens takes "
    "0.2 n² µs more, fewer miss: 0.183, 0.201 at 3 requests/s, 0.162, 0.174 at 2.5/s (4 seeds)"
)
CLAIMS = [
    Claim("qoserve", "alpha = 0 is EDF, a large alpha shortest remaining prompt first", "exact", 1, test=TEST),
    Claim("qoserve", "highest load with at most 10 % missed: above EDF, which is above FCFS", "above", 2, _goodput),
    Claim("qoserve", "the same, over EDF", "+20 to +40 % (at 1 %)", 3, _goodput_ratio),
    Claim("qoserve", "in overload fewer miss than under EDF", "fewer", 2, _overload),
    Claim(
        "slack_chunk",
        "a chunk's step ends before the tightest decode is due, or the chunk has the smallest size",
        "exact",
        1,
        test=TEST,
    ),
    Claim(
        "sliding_serve",
        "two steps compute as much as exhaustive search finds, up to the grain size; the largest number of prompts in time is chosen",
        "exact",
        1,
        test=TEST,
    ),
    Claim(
        "sliding_serve",
        "highest load with at most 10 % missed: above QoServe, with its order of prompts",
        "+9.7 to +30 %",
        2,
        _sliding_goodput,
        why=_AS_MUCH,
    ),
    Claim(
        "sliding_serve",
        "in overload fewer miss than under QoServe",
        "-16 to -53 %",
        2,
        _sliding_overload,
        why=_AS_MUCH,
    ),
    Claim("past_future", "the formula is the peak of memory, 20,000 random batches", "exact", 1, test=TEST),
    Claim(
        "past_future",
        "evictions: none if conservative, few under past_future, many if aggressive",
        "near 0",
        2,
        _evictions,
    ),
    Claim(
        "past_future",
        "memory in use: above the conservative rule's",
        "near the greedy rule's",
        2,
        partial(_admission, "held", ("conservative", "past_future", "aggressive")),
    ),
    Claim(
        "past_future",
        "goodput (first token within 10 s, no gap above 0.5 s) is highest",
        "2 to 3 times",
        2,
        partial(_admission, "goodput", ("conservative", "past_future")),
    ),
    Claim(
        "past_future",
        "goodput is above that of aggressive admission",
        "2 to 3 times",
        2,
        partial(_admission, "goodput", ("aggressive", "past_future")),
    ),
    Claim(
        "hygen",
        "P99 between online tokens is within 5 % of the budget, or of online requests alone where these take longer",
        "5 %",
        2,
        _budget_is_kept,
    ),
    Claim("hygen", "tokens a second rise with the budget, to a multiple of online alone", "3.87 times", 3, _throughput),
    Claim(
        "scorpio",
        "a request with k times the tightest TPOT SLO runs in every k-th step",
        "exact",
        1,
        test=TEST,
    ),
    Claim(
        "scorpio",
        "at 1.5 times full load more requests meet both SLOs than under FCFS",
        "up to +46.5 %",
        2,
        _at_high_load,
    ),
    Claim("scorpio", "at low load the number is equal within 2 %", "slightly worse", 2, _at_low_load),
]
