"""Claims on work that shares replicas: ConServe, DynaServe, KVFlow."""

from __future__ import annotations

from functools import partial
from statistics import fmean

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
    served,
    simulate,
    time_in_system,
)

from vajra_py.metrics.tables.recorder import token_times
from vajra_py.testing.harness import PolicySource
from vajra_py.workload.request import RequestSpec

# ConServe

SECONDS = 40.0
TPOT_S = 0.045


def bursts(seed: int, *, with_offline: bool) -> list[RequestSpec]:
    """Chats in bursts of two seconds in every eight, a TPOT SLO of 45 ms, and more offline requests than fit beside them."""
    stream = np.random.default_rng([331, seed])
    online = [
        RequestSpec(f"chat{index}", at, int(stream.integers(50, 500)), int(stream.integers(20, 120)), tpot_slo_s=TPOT_S)
        for index, at in enumerate(one for one in poisson(stream, 12.0, SECONDS) if one % 8.0 < 2.0)
    ]
    offline = [RequestSpec(f"batch{index}", 0.0, 500, 100, priority=1) for index in range(400 if with_offline else 0)]
    return [*offline, *online]


CO_SERVED: dict[str, PolicySource] = {
    "alone": "conserve",
    "conserve": "conserve",
    "co-served by priority": ("fixed_chunk", {"chunk_size": 2048}),
}


def harvested(how: str, seed: int) -> Cell:
    """P99 of the time between online tokens, and tokens a second of all while online requests arrive."""
    specs = bursts(seed, with_offline=how != "alone")
    options = options_of(num_blocks=2000, max_batch_size=64, keeps_steps=True)
    harness = simulate("priority", CO_SERVED[how], specs, options)
    online = [harness.request(spec.request_id) for spec in specs if spec.priority == 0]
    gaps = np.concatenate([np.diff(token_times(one)) for one in online])
    num_tokens = sum(step.num_tokens for step in harness.steps if step.ended_at <= SECONDS)
    return {"p99_tbt": float(np.quantile(gaps, 0.99)), "tokens_per_s": num_tokens / SECONDS}


def _between_tokens(cells: Cells) -> Verdict:
    columns = cells.columns("harvested", "p99_tbt", harvested, CO_SERVED)
    return ordered({how: columns[how] for how in ("conserve", "co-served by priority")}, " s")


def _harvest(cells: Cells) -> Verdict:
    columns = cells.columns("harvested", "tokens_per_s", harvested, ("alone", "conserve"))
    ratio = fmean(columns["conserve"]) / fmean(columns["alone"])
    verdict = ordered(columns, " tokens/s", 4)
    return Verdict(verdict.holds and ratio >= 2.35 / 2, f"{verdict.ours}: {ratio:.2f} times", verdict.reason)


# DynaServe


def uneven(seed: int) -> list[RequestSpec]:
    """Few and large requests of very different shapes, at about 70 % of what two replicas serve."""
    stream = np.random.default_rng([332, seed])
    specs = []
    for index, at in enumerate(poisson(stream, 1.1, 60.0)):
        is_long = stream.random() < 0.3
        prompt = int(stream.integers(6000, 12000)) if is_long else int(stream.integers(100, 1000))
        specs.append(RequestSpec(f"r{index}", at, prompt, int(stream.integers(20, 300))))
    return specs


SPLITS: dict[str, tuple[PolicySource, PolicySource]] = {
    "shortest queue": (("least_loaded", {"by": "tokens"}), ("fixed_chunk", {"chunk_size": 512})),
    "dynaserve": ("dynaserve", ("micro_requests", {"chunk_size": 512})),
}


def divided(how: str, seed: int, knows: Knows = lengths_of) -> Cell:
    """Mean time in system, and the P99 between tokens."""
    specs = uneven(seed)
    router, batcher = SPLITS[how]
    options = options_of(num_replicas=2, num_blocks=8000, max_batch_size=64, output_lengths=knows(specs))
    requests = served("fcfs", batcher, specs, options, router)
    gaps = np.concatenate([np.diff(token_times(one)) for one in requests])
    return {"mean": fmean(map(time_in_system, requests)), "p99_tbt": float(np.quantile(gaps, 0.99))}


def _divided(metric: str, cells: Cells) -> Verdict:
    return ordered(cells.columns("divided", metric, divided, ("dynaserve", "shortest queue")), " s")


CLAIMS = [
    Claim(
        "conserve",
        "offline requests fill the time that the tightest SLO leaves; with checkpoints in a tier, a preemption costs at most a block",
        "no copy, little lost",
        1,
        test="tests/policies/test_conserve.py",
    ),
    Claim(
        "conserve",
        "P99 between online tokens is below that of chunks of 2k with priority for online work",
        "84 times lower P99",
        2,
        _between_tokens,
    ),
    Claim("conserve", "tokens a second are a multiple of those of online work alone", "2.35 times", 3, _harvest),
    Claim(
        "dynaserve",
        "after each placement two replicas have the same work up to a token, or the request is not cut",
        "closed form",
        1,
        test="tests/policies/test_dynaserve.py",
    ),
    Claim(
        "dynaserve",
        "mean time in system of few large requests is below that of the shortest queue by tokens",
        "1.15 to 3.07 times the capacity",
        2,
        partial(_divided, "mean"),
        why="a second part waits for its first one, and the shortest queue is as even at any load from 0.7 to 2.4 requests/s. Against a "
        "replica for prompts and one for decodes it holds once these are uneven: 6.29 s, 7.28 s at 2.6/s (4 seeds)",
    ),
    Claim(
        "kvflow",
        "n agents in a circle, room for n - 1 prefixes: (n - 2) / (n - 1) of the turns hit, as many as any rule can; under LRU none",
        "closed form",
        1,
        test="tests/policies/test_kvflow.py",
    ),
]
