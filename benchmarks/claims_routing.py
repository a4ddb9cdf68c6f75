"""Claims on routing: LMetric, consistent hashing, Mooncake's conductor."""

from __future__ import annotations

from functools import partial
from statistics import fmean

import numpy as np
from claims_parts import Cell, Cells, Claim, Verdict, options_of, ordered, poisson, served, ttft

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


def routed(router: PolicySource, rate: float, seed: int) -> Cell:
    """Mean TTFT and time per output token, and the largest replica's share of requests over the mean."""
    specs = shared_prefixes(seed, rate)
    requests = served("fcfs", "fixed_chunk", specs, OPTIONS, router)
    counts = np.bincount([one.replica_id for one in requests], minlength=NUM_REPLICAS)
    later = [one for one in requests if one.num_output_tokens > 1]
    return {
        "ttft": fmean(ttft(one) for one in requests),
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
    ),
    Claim(
        "consistent_hashing",
        "the keys of a replica that goes alone move; no replica exceeds the bound",
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
]
