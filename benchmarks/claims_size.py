"""Claims on order by size: SJF, SRPT and its closed form, TRAIL, LTR, highest response ratio, FastServe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import NormalDist, fmean
from typing import Any

import numpy as np
from claims_parts import (
    Cell,
    Cells,
    Claim,
    Verdict,
    difference,
    lengths_of,
    options_of,
    ordered,
    poisson,
    served,
    time_in_system,
    ttft,
)

from vajra_py.latency import AffineModel
from vajra_py.metrics.tables.recorder import token_times
from vajra_py.runtime.requests.request import Request
from vajra_py.testing.harness import PolicySource
from vajra_py.workload.request import RequestSpec

TEST = "tests/policies/test_size_order.py"
SLOTS = 8
PAIRS = range(6)
"""Seeds of the heavy-tailed workloads, whose means differ much from one to the next."""
AMPLE = options_of(num_blocks=20_000, max_batch_size=SLOTS)
TIGHT = options_of(num_blocks=200, max_batch_size=64)
"""Memory for about fifteen requests, far fewer than there are slots for: who is preempted is computed again."""


def heavy_tailed(seed: int, num_requests: int = 800, load: float = 0.9) -> list[RequestSpec]:
    """Poisson arrivals; log-normal outputs of mean 100 and coefficient of variation 2, prompts of 20 to 200 tokens.

    Outputs are the distribution's quantiles in random order, so that every seed has the same work.
    """
    stream = np.random.default_rng([281, seed])
    sigma = math.sqrt(math.log(1 + 2.0**2))
    rate = load * SLOTS / (100 * 0.0172)
    times = poisson(stream, rate, 4 * num_requests / rate)[:num_requests]
    quantiles = (stream.permutation(len(times)) + 0.5) / len(times)
    normal = np.array([NormalDist().inv_cdf(one) for one in quantiles.tolist()])
    outputs = np.maximum(1, np.exp(math.log(100) - sigma**2 / 2 + sigma * normal)).astype(int)
    prompts = stream.integers(20, 200, len(times))
    return [RequestSpec(f"r{index}", at, int(prompts[index]), int(outputs[index])) for index, at in enumerate(times)]


def long_prompts(seed: int) -> list[RequestSpec]:
    """The same, with one prompt in five of 8,000 tokens."""
    specs = heavy_tailed(seed, num_requests=600, load=0.4)
    stream = np.random.default_rng([282, seed])
    return [replace(one, num_prompt_tokens=8000) if stream.random() < 0.2 else one for one in specs]


def serve(
    prioritizer: PolicySource,
    seed: int,
    *,
    batcher: PolicySource = "preemptive",
    sigma: float = 0.0,
    tight: bool = False,
    prompts: str = "short",
) -> Cell:
    """Mean and extreme times of one workload, with the truth or a noisy estimate of it."""
    specs = long_prompts(seed) if prompts == "long" else heavy_tailed(seed, load=0.75 if tight else 0.9)
    options = replace(TIGHT if tight else AMPLE, output_lengths=lengths_of(specs, sigma, seed))
    requests = served(prioritizer, batcher, specs, options)
    times = [time_in_system(one) for one in requests]
    alone = [0.0172 * spec.num_output_tokens + 0.0001 * spec.num_prompt_tokens for spec in specs]
    return {
        "mean": fmean(times),
        "max_ttft": max(ttft(one) for one in requests),
        "longest_wait": max(_longest_wait(one) for one in requests),
        "slowdown": fmean(time / one for time, one in zip(times, alone, strict=True)),
        "preemptions": float(sum(one.num_preemptions for one in requests)),
    }


def _one(prioritizer: PolicySource, **settings: Any) -> dict[str, Any]:
    return {"prioritizer": prioritizer, **settings}


def _longest_wait(request: Request) -> float:
    """Longest time without a token, from the arrival on, seconds."""
    return float(np.max(np.diff(token_times(request), prepend=request.arrived_at)))


def _columns(cells: Cells, metric: str, runs: Mapping[str, dict[str, Any]]) -> dict[str, list[float]]:
    found = {}
    for label, how in runs.items():
        settings = dict(how)
        prioritizer = settings.pop("prioritizer")
        name = f"{prioritizer} {sorted(settings.items())}"
        found[label] = cells.column(name, metric, partial(serve, prioritizer, **settings), PAIRS)
    return found


def _ordered(metric: str, unit: str, runs: Mapping[str, dict[str, Any]], cells: Cells) -> Verdict:
    return ordered(_columns(cells, metric, runs), unit)


# SRPT's closed form

STEP_S, MEAN_TOKENS, LOAD = 0.01, 50.0, 0.7
ONE_SLOT = options_of(num_blocks=100_000, max_batch_size=1, latency=AffineModel(base_s=STEP_S))


def one_server(seed: int, num_requests: int = 6000) -> list[RequestSpec]:
    """Poisson arrivals of exponential sizes at one server: a prompt of one token, then so many tokens of 10 ms."""
    stream = np.random.default_rng([283, seed])
    gaps = stream.exponential((MEAN_TOKENS + 0.5) * STEP_S / LOAD, num_requests)
    sizes = np.ceil(stream.exponential(MEAN_TOKENS, num_requests)).astype(int)
    times = np.cumsum(gaps)
    return [RequestSpec(f"r{index}", float(times[index]), 1, int(sizes[index])) for index in range(num_requests)]


def mean_of_srpt(seed: int) -> Cell:
    """Mean time in system under SRPT, seconds."""
    specs = one_server(seed)
    options = replace(ONE_SLOT, output_lengths=lengths_of(specs))
    requests = served("srpt", "preemptive", specs, options)
    return {"mean": fmean(time_in_system(one) for one in requests)}


def closed_form_s(load: float, mean_s: float, num_points: int = 20_000) -> float:
    """Mean time in system of M/M/1 under SRPT, seconds (Schrage and Miller 1966).

    E[T(x)] = lambda (m2(x) + x^2 (1 - F(x))) / (2 (1 - rho(x))^2) + integral of 1 / (1 - rho(t)) over t from 0 to x, with m2(x) and
    rho(x) / lambda the second and first moments of sizes below x; the mean is over exponential x.
    """
    edges = np.linspace(0.0, 20.0 * mean_s, num_points + 1)
    x = (edges[1:] + edges[:-1]) / 2
    width = edges[1] - edges[0]
    density = np.exp(-x / mean_s) / mean_s
    rate = load / mean_s
    rho = rate * np.cumsum(x * density) * width
    second = np.cumsum(x * x * density) * width
    waiting = rate * (second + x * x * np.exp(-x / mean_s)) / (2 * (1 - rho) ** 2)
    residence = np.cumsum(1 / (1 - rho)) * width
    return float(np.sum((waiting + residence) * density) * width)


def _closed_form(cells: Cells) -> Verdict:
    seeds = range(10)
    means = cells.column("mean of srpt", "mean", mean_of_srpt, seeds)
    expected = closed_form_s(LOAD, (MEAN_TOKENS + 0.5) * STEP_S)
    error = np.std(means, ddof=1) / math.sqrt(len(means)) / expected
    off = fmean(means) / expected - 1
    text = (
        f"{fmean(means):.4f} s, closed form {expected:.4f} s ({100 * off:+.1f} %, standard error {100 * error:.1f} %)"
    )
    return Verdict(bool(abs(off) <= 0.02 + 2 * error), text)


# Quality of predictions

SIGMAS = (0.0, 0.5, 1.0, 2.0)


def _by_quality(prioritizer: str, sigmas: Sequence[float], cells: Cells) -> Verdict:
    runs = {f"sigma {sigma}": _one(prioritizer, sigma=sigma) for sigma in sigmas}
    runs["fcfs"] = _one("fcfs")
    return _ordered("mean", " s", runs, cells)


# TRAIL

FRACTIONS = (0.0, 0.2, 0.5, 0.8, 1.0)


def _trail(fraction: float, **settings: Any) -> dict[str, Any]:
    return _one(("trail", {"preemptible_fraction": fraction}), **settings)


def _preemptions_rise_with_c(cells: Cells) -> Verdict:
    runs = {f"C = {one}": _trail(one, tight=True) for one in FRACTIONS[1:]}
    return _ordered("preemptions", "", runs, cells)


def _best_c(cells: Cells) -> Verdict:
    columns = _columns(cells, "mean", {str(one): _trail(one, tight=True) for one in FRACTIONS})
    means = {name: fmean(values) for name, values in columns.items()}
    best = min(means, key=lambda name: means[name])
    text = ", ".join(f"C = {name} {mean:.3g} s" for name, mean in means.items())
    inner = best not in ("0.0", "1.0")
    beats = inner and all(difference(columns[end], columns[best]).is_positive for end in ("0.0", "1.0"))
    return Verdict(
        beats, text, "" if beats else f"the best is C = {best}, not better than both ends by two standard errors"
    )


def _free_preemption(cells: Cells) -> Verdict:
    runs = {f"C = {one}": _trail(one) for one in (1.0, 0.5, 0.0)}
    return _ordered("mean", " s", runs, cells)


def _skips(cells: Cells) -> Verdict:
    plain: PolicySource = ("skip_join_mlfq", {"skips": False})
    runs = {"skip-join": _one("skip_join_mlfq", prompts="long"), "plain": _one(plain, prompts="long")}
    return _ordered("mean", " s", runs, cells)


def _ratio(cells: Cells) -> Verdict:
    columns = _columns(cells, "mean", {one: _one(one, tight=True) for one in ("trail", "fcfs")})
    ratio = fmean(columns["fcfs"]) / fmean(columns["trail"])
    return Verdict(1.66 / 2 <= ratio <= 2.01 * 2, f"{ratio:.2f} times")


_NON_PREEMPTIVE: Sequence[str] = ("sjf", "hrrn", "fcfs")
CLAIMS = [
    Claim(
        "srpt",
        "each request ends when it does in a step-by-step model of one server",
        "exact",
        1,
        test=TEST,
    ),
    Claim("srpt", "mean time in system of M/M/1 is Schrage and Miller's", "closed form", 1, _closed_form),
    Claim(
        "srpt",
        "mean time in system is least under SRPT, then SJF, then FCFS",
        "optimal",
        2,
        partial(
            _ordered,
            "mean",
            " s",
            {"srpt": _one("srpt"), "sjf": _one("sjf", batcher="fixed_chunk"), "fcfs": _one("fcfs")},
        ),
    ),
    Claim(
        "srpt",
        "the mean rises with the error of predictions (sigma of the log), and stays below FCFS",
        "-",
        2,
        partial(_by_quality, "srpt", SIGMAS),
    ),
    Claim(
        "sjf",
        "without preemption the mean time in system is below that of FCFS",
        "optimal",
        2,
        partial(_ordered, "mean", " s", {one: _one(one, batcher="fixed_chunk") for one in ("sjf", "fcfs")}),
    ),
    Claim(
        "trail",
        "fewer preemptions as C falls",
        "fewer",
        2,
        _preemptions_rise_with_c,
        why="all of these preemptions are due to KV memory for growing decodes, none occur with twice the memory: the more "
        "requests are exempt from preemption, the scarcer memory is. Where only the paper's cause remains, preemption for new "
        "requests with ample memory, the number falls: 340, 338, 323, 244 at C = 1, 0.8, 0.5, 0.2",
    ),
    Claim("trail", "with memory short, the mean is least at some C between 0 and 1", "C = 0.8", 2, _best_c),
    Claim("trail", "without loss by preemption, C = 1 is best", "-", 2, _free_preemption),
    Claim("trail", "mean latency over that of FCFS", "1.66 to 2.01 times lower", 3, _ratio),
    Claim(
        "ltr",
        "with exact ranks, decisions are those of SJF while no request starves",
        "equal",
        1,
        test=TEST,
    ),
    Claim(
        "ltr", "mean latency rises as ranks get worse", "by Kendall's tau", 2, partial(_by_quality, "ltr", SIGMAS[::3])
    ),
    Claim(
        "ltr",
        "the boost shortens the longest time without a token",
        "bounded",
        2,
        partial(
            _ordered,
            "longest_wait",
            " s",
            {
                "boost": _one(("ltr", {"starvation_s": 5.0, "boost_steps": 50})),
                "none": _one(("ltr", {"starvation_s": 1e6})),
            },
        ),
    ),
    Claim(
        "hrrn",
        "mean slowdown is between those of SJF and FCFS",
        "between",
        2,
        partial(_ordered, "slowdown", "", {one: _one(one, batcher="fixed_chunk") for one in _NON_PREEMPTIVE}),
    ),
    Claim(
        "hrrn",
        "the longest wait for a first token is below that of SJF",
        "no starvation",
        2,
        partial(_ordered, "max_ttft", " s", {one: _one(one, batcher="fixed_chunk") for one in ("hrrn", "sjf")}),
    ),
    Claim(
        "skip_join_mlfq",
        "mean completion time is between those of SRPT and FCFS, without knowing lengths",
        "between",
        2,
        partial(_ordered, "mean", " s", {one: _one(one) for one in ("srpt", "skip_join_mlfq", "fcfs")}),
    ),
    Claim(
        "skip_join_mlfq",
        "a prompt enters the level below those that it would pass through",
        "exact",
        1,
        test=TEST,
    ),
    Claim("skip_join_mlfq", "skipping levels beats the plain queue where prompts are long", "-", 2, _skips),
]
