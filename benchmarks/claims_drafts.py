"""Claims on drafts: AdaServe."""

from __future__ import annotations

from functools import cache

import numpy as np
from claims_parts import Cell, Cells, Claim, Verdict, options_of, ordered, poisson, served, ttft

from vajra_py.contract.latency import LatencyModel
from vajra_py.plugins import build_latency_model, load_registry
from vajra_py.runtime.step.builder_options import DraftRules
from vajra_py.runtime.support.seeds import SeedTree
from vajra_py.sim.acceptance import RatesByPosition
from vajra_py.workload.request import RequestSpec

TEST = "tests/policies/test_adaserve.py"
PACES_S = (0.0085, 0.05, 0.15)
"""TPOT SLOs, seconds: the first can only be met with drafts, the others are the paper's."""
RATE = 31.0
"""Requests a second: about as many as one replica serves with two drafts each."""


@cache
def device() -> LatencyModel:
    """Step times that rise little up to some 160 tokens: what drafts are for."""
    return build_latency_model("roofline", {"model": "llama-3.1-8b", "device": "a100-80gb-sxm"}, load_registry())


def paces(seed: int) -> list[RequestSpec]:
    """Short prompts with answers of 100 to 300 tokens, a third of them for each pace, for 20 s."""
    stream = np.random.default_rng([345, seed])
    return [
        RequestSpec(
            f"r{index}",
            at,
            int(stream.integers(20, 150)),
            int(stream.integers(100, 300)),
            tpot_slo_s=float(stream.choice(PACES_S)),
        )
        for index, at in enumerate(poisson(stream, RATE, 20.0))
    ]


def missed(how: str | int, seed: int) -> Cell:
    """Share of requests that are slower than their TPOT SLO, or wait more than a second for the first token."""
    specs = paces(seed)
    num_drafts = how if isinstance(how, int) else 0
    options = options_of(
        latency=device(),
        num_blocks=8000,
        max_batch_size=128,
        drafts=DraftRules(num_tokens=num_drafts, max_tokens=8),
        acceptance=RatesByPosition([0.7], SeedTree(seed), endless=True),
    )
    batcher = "fixed_chunk" if isinstance(how, int) else how
    requests = served("fcfs", (batcher, {"chunk_size": 256}), specs, options)
    late = 0
    for spec, one in zip(specs, requests, strict=True):
        assert one.ended_at is not None
        assert one.first_token_at is not None
        assert spec.tpot_slo_s is not None
        pace_s = (one.ended_at - one.first_token_at) / max(1, one.num_output_tokens - 1)
        late += pace_s > spec.tpot_slo_s or ttft(one) > 1.0
    return {"missed": late / len(specs)}


def _paces(cells: Cells) -> Verdict:
    ways: tuple[str | int, ...] = ("adaserve", 1, 2, 3)
    columns = cells.columns("paces with", "missed", missed, ways)
    best = min((1, 2, 3), key=lambda one: sum(columns[one]))
    return ordered({"adaserve": columns["adaserve"], f"the best of 1, 2, 3 drafts ({best})": columns[best]})


CLAIMS = [
    Claim(
        "adaserve", "its greedy choice of drafts, needs first, is as good as exhaustive search", "exact", 1, test=TEST
    ),
    Claim(
        "adaserve",
        "near the capacity fewer requests miss their TPOT SLO than with any fixed number of drafts",
        "up to 4.3 times fewer",
        2,
        _paces,
    ),
]
