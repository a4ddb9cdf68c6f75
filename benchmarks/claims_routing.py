"""Claims on routing: LMetric, consistent hashing, Mooncake's conductor, Preble, Llumnix, Splitwise, CascadeInfer, routers of systems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

import numpy as np
from claims_parts import (
    SEEDS,
    Cell,
    Cells,
    Claim,
    Knows,
    Verdict,
    options_of,
    ordered,
    poisson,
    served,
    time_in_system,
    ttft,
)

from vajra_py.runtime.kv import PrefixCacheOptions
from vajra_py.testing.harness import PolicySource
from vajra_py.workload.request import PromptContent, RequestSpec

TEST = "tests/policies/test_library_routers.py"
NUM_REPLICAS, NUM_PREFIXES, PREFIX_TOKENS = 8, 40, 2048
OPTIONS = options_of(num_replicas=NUM_REPLICAS, num_blocks=1600, max_batch_size=64, prefix_cache=PrefixCacheOptions())
"""Each replica's cache holds a dozen prefixes."""
LOADS = (10.0, 20.0, 30.0)
WEIGHTS = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


def shared_prefixes(seed: int, rate: float) -> list[RequestSpec]:
    """Poisson arrivals over 30 s; each prompt is one of 40 prefixes, by Zipf's law, and 50 to 500 tokens of its own."""
    stream = np.random.default_rng([288, seed])
    ranks = np.arange(1, NUM_PREFIXES + 1)
    shares = ranks**-1.0 / np.sum(ranks**-1.0)
    specs = []
    for index, at in enumerate(poisson(stream, rate, 30.0)):
        own = int(stream.integers(50, 500))
        name = f"prefix{int(stream.choice(NUM_PREFIXES, p=shares))}"
        content = PromptContent(((name, PREFIX_TOKENS), (f"own{index}", own)))
        output = int(stream.integers(20, 200))
        specs.append(RequestSpec(f"r{index}", at, content.num_tokens, output, content=content, session_id=name))
    return specs


def routed(router: PolicySource, rate: float, seed: int, knows: Knows | None = None) -> Cell:
    """TTFT in the mean and at the 99th percentile, time per output token, and the largest replica's share of requests over the mean."""
    specs = shared_prefixes(seed, rate)
    options = OPTIONS if knows is None else replace(OPTIONS, output_lengths=knows(specs))
    requests = served("fcfs", "fixed_chunk", specs, options, router)
    counts = np.bincount([one.replica_id for one in requests], minlength=NUM_REPLICAS)
    later = [one for one in requests if one.num_output_tokens > 1]
    return {
        "ttft": fmean(ttft(one) for one in requests),
        "ttft_p99": float(np.quantile([ttft(one) for one in requests], 0.99)),
        "tpot": fmean(
            ((one.ended_at or 0.0) - (one.first_token_at or 0.0)) / (one.num_output_tokens - 1) for one in later
        ),
        "imbalance": float(np.max(counts) / np.mean(counts)),
    }


def _column(cells: Cells, router: PolicySource, metric: str, rate: float = 20.0) -> list[float]:
    return cells.column(f"{router} at {rate}", metric, partial(routed, router, rate))


def _below(metric: str, unit: str, routers: dict[str, PolicySource], cells: Cells) -> Verdict:
    return ordered({name: _column(cells, router, metric) for name, router in routers.items()}, unit)


def _weights(cells: Cells) -> Verdict:
    texts, good, best_everywhere = [], True, set(WEIGHTS)
    for rate in LOADS:
        means = {}
        for weight in WEIGHTS:
            mix: PolicySource = ("dynamo_kv_router", {"prefill_load_scale": weight})
            means[weight] = fmean(_column(cells, mix, "ttft", rate))
        own, best = fmean(_column(cells, "lmetric", "ttft", rate)), min(means.values())
        best_everywhere &= {weight for weight, mean in means.items() if mean == best}
        good &= own <= 1.05 * best
        texts.append(f"{100 * (own / best - 1):+.0f} % at {rate:.0f}/s")
    reason = "" if good else "some weight is more than 5 % better at a load"
    return Verdict(
        good and not best_everywhere,
        ", ".join(texts),
        reason or ("one weight is best at all" if best_everywhere else ""),
    )


# Requests that move


def heavy_tailed(seed: int, rate: float, prompt: int) -> list[RequestSpec]:
    """600 requests with log-normal prompts of this median, and outputs of median 300."""
    stream = np.random.default_rng([289, seed])
    times = np.cumsum(stream.exponential(1.0 / rate, 600))
    prompts, outputs = (
        np.minimum(3000, stream.lognormal(np.log(one), 1.0, 600)).astype(int) + 1 for one in (prompt, 300)
    )
    rows = enumerate(zip(times.tolist(), prompts.tolist(), outputs.tolist(), strict=True))
    return [RequestSpec(f"r{index}", at, prompt, output) for index, (at, prompt, output) in rows]


MEMORY, PROMPTS, AMPLE = (28.0, 100, 600), (18.0, 400, 600), (16.0, 400, 4000)
"""Requests a second, median prompt and KV blocks of each of twelve replicas: memory is short for outputs, for prompts, or not at all."""


def moved(world: tuple[float, int, int], router: PolicySource, seed: int) -> Cell:
    """Preemptions, the P99 of times to first tokens, and the mean time in system; moves take no time."""
    rate, prompt, num_blocks = world
    specs = heavy_tailed(seed, rate, prompt)
    options = options_of(num_replicas=12, num_blocks=num_blocks, max_batch_size=64)
    requests = served("fcfs", "fixed_chunk", specs, options, router)
    return {
        "preemptions": float(sum(one.num_preemptions for one in requests)),
        "ttft_p99": float(np.quantile([ttft(one) for one in requests], 0.99)),
        "mean": fmean(time_in_system(one) for one in requests),
    }


def _columns(
    world: tuple[float, int, int],
    metric: str,
    routers: dict[str, PolicySource],
    cells: Cells,
    seeds: Sequence[int] = SEEDS,
) -> dict[str, list[float]]:
    return {
        name: cells.column(f"moved {world} {one}", metric, partial(moved, world, one), seeds)
        for name, one in routers.items()
    }


def _preemptions(cells: Cells) -> dict[str, list[float]]:
    """Preemptions of twelve seeds, since single ones differ by much."""
    return _columns(MEMORY, "preemptions", {"with moves": "llumnix", "dispatch alone": DISPATCH}, cells, range(12))


def _moved(
    world: tuple[float, int, int], metric: str, unit: str, routers: dict[str, PolicySource], cells: Cells
) -> Verdict:
    return ordered(_columns(world, metric, routers, cells), unit)


def _half(cells: Cells) -> Verdict:
    columns = _preemptions(cells)
    doubled = {
        "2 x with moves": [2 * one for one in columns["with moves"]],
        "dispatch alone": columns["dispatch alone"],
    }
    return ordered(doubled)


DISPATCH: PolicySource = ("llumnix", {"migrates": False})
LLUMNIX, SYSTEMS = "tests/policies/test_llumnix.py", "tests/policies/test_routers_of_systems.py"
AFFINITY: PolicySource = ("consistent_hashing", {"max_load_factor": None})
BOUNDED: PolicySource = "consistent_hashing"
CLAIMS = [
    Claim("lmetric", "rescaling tokens or requests changes no choice", "exact", 1, test=TEST),
    Claim(
        "lmetric",
        "mean TTFT is below that of the shortest queue",
        "-92 % (of vLLM)",
        2,
        partial(_below, "ttft", " s", {"lmetric": "lmetric", "shortest queue": "least_loaded"}),
    ),
    Claim(
        "lmetric",
        "time per output token is below that of the shortest queue",
        "-24 % (of vLLM)",
        2,
        partial(_below, "tpot", " s", {"lmetric": "lmetric", "shortest queue": "least_loaded"}),
    ),
    Claim(
        "lmetric",
        "loads are more even than under pure affinity",
        "-",
        2,
        partial(_below, "imbalance", "", {"lmetric": "lmetric", "affinity": AFFINITY}),
    ),
    Claim(
        "lmetric",
        "mean TTFT is within 5 % of the best of nine linear weights at each of three loads, and no weight is best at all",
        "-39 % (a tuned mix)",
        2,
        _weights,
        why="at 20 requests/s any weight is better that follows prefixes more: the best of the nine is the largest, 16, since a prefix of "
        "2,048 tokens takes 0.2 s and replicas are not full. With prefixes of 512 tokens it is within 5 %: 0.0591 s, 0.0576 s",
    ),
    Claim(
        "consistent_hashing",
        "only the keys of a removed replica move; no replica exceeds the bound",
        "exact",
        1,
        test=TEST,
    ),
    Claim(
        "consistent_hashing",
        "with bounded loads the mean TTFT under skewed keys is below that without",
        "-",
        2,
        partial(_below, "ttft", " s", {"bounded": BOUNDED, "plain": AFFINITY}),
        why="at 20 requests/s the fullest replica of the plain ring, with twice the mean, still keeps up, and whoever spills over computes "
        "a prefix of 0.2 s again. At 40/s it does not, and the claim holds: 0.222 s, 1.08 s",
    ),
    Claim("mooncake_conductor", "the least predicted time to first token wins", "exact", 1, test=TEST),
    Claim(
        "mooncake_conductor",
        "mean TTFT is below that of load balance by tokens, which is below random",
        "3.07, 5.27, 19.65 s",
        2,
        partial(
            _below,
            "ttft",
            " s",
            {"conductor": "mooncake_conductor", "load": ("least_loaded", {"by": "tokens"}), "random": "random"},
        ),
    ),
    Claim("preble_e2", "a prefix longer than the rest of the prompt goes to a holder", "exact", 1, test=SYSTEMS),
    Claim(
        "preble_e2",
        "P99 of TTFT is below that of the shortest queue",
        "2 to 10 times lower P99",
        2,
        partial(_below, "ttft_p99", " s", {"preble_e2": "preble_e2", "shortest queue": "least_loaded"}),
    ),
    Claim(
        "preble_e2",
        "and below that of pure affinity",
        "2 to 10 times lower P99",
        2,
        partial(_below, "ttft_p99", " s", {"preble_e2": "preble_e2", "affinity": AFFINITY}),
    ),
    Claim(
        "power_of_two",
        "mean time in system is below that of one random choice, above that of the shortest queue",
        "between",
        2,
        partial(
            _moved,
            AMPLE,
            "mean",
            " s",
            {"shortest queue": "least_loaded", "power_of_two": "power_of_two", "random": "random"},
        ),
    ),
    Claim("dynamo_kv_router", "costs, credits and loads are those of a manual calculation", "exact", 1, test=SYSTEMS),
    Claim(
        "sglang_cache_aware",
        "prefix matches decide unless loads are imbalanced by its thresholds",
        "exact",
        1,
        test=SYSTEMS,
    ),
    Claim(
        "llumnix",
        "freeness, pairs and migrations are those of its code; no request migrates if loads are balanced",
        "exact",
        1,
        test=LLUMNIX,
    ),
    Claim(
        "llumnix",
        "fewer preemptions than under dispatch alone",
        "fewer",
        2,
        lambda cells: ordered(_preemptions(cells)),
    ),
    Claim(
        "llumnix",
        "less than half of them",
        "fewer",
        2,
        _half,
        why="half are left, at 25, 28 and 31 requests/s alike: memory is often short everywhere. Of those left in four seeds, 117 of 320 come "
        "while no other replica is above the threshold for taking a request; under dispatch alone it is 43 of 551",
    ),
    Claim(
        "llumnix",
        "P99 of TTFT is below that of dispatch alone",
        "up to 15 times lower P99",
        2,
        partial(_moved, PROMPTS, "ttft_p99", " s", {"with moves": "llumnix", "dispatch alone": DISPATCH}),
    ),
    Claim(
        "splitwise_mixed_pool",
        "decodes are placed by memory, prompts by pending tokens; a borrowed replica returns when idle; waits in bursts are shorter than with fixed pools",
        "exact",
        1,
        test="tests/policies/test_splitwise_mixed_pool.py",
    ),
    Claim(
        "mooncake",
        "predicted times are those of a manual calculation; predicting the load at a prompt's end damps load oscillation",
        "exact",
        1,
        test="tests/policies/test_admission_policies.py",
    ),
    Claim(
        "cascadeinfer",
        "ranges and their replicas have the least cost; requests that have outgrown their range migrate",
        "exact",
        1,
        test="tests/policies/test_cascadeinfer.py",
    ),
    Claim(
        "cascadeinfer",
        "mean time in system is below that of the shortest queue by tokens",
        "-67 %",
        2,
        partial(
            _moved,
            AMPLE,
            "mean",
            " s",
            {"cascadeinfer": "cascadeinfer", "shortest queue": ("least_loaded", {"by": "tokens"})},
        ),
        why="step times here are linear in the sum of contexts, so that like lengths gain nothing, and loads are less even. With attention "
        "that reads for each decode as much as for the longest it holds: 9.76 s, 10.3 s at 14/s, 10.5 s, 11.5 s at 20/s (4 seeds)",
    ),
]
