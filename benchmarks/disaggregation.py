"""Published results about split pools, held against the simulator: paired seeds, with a margin of two standard errors.

- DistServe (OSDI'24): with tight SLOs for both TTFT and TPOT, split pools meet more of them than chunked prefill on the same GPUs; with a
  loose TPOT they do not.
- Mooncake (FAST'25; arXiv 2407.00079): early rejection by the present load lets the load of the decode replicas swing; by the predicted load it
  swings less.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from claims_parts import Difference, difference

from vajra_py.config import config_from_mapping
from vajra_py.contract import RequestView
from vajra_py.contract.observer import EndReason, Observer
from vajra_py.experiment.runs.backend import Run
from vajra_py.experiment.runs.simulated import SimulatedRun
from vajra_py.plugins import load_registry
from vajra_py.runtime.support.seeds import SeedTree
from vajra_py.workload import build_workload

NUM_SEEDS = 5
LAYERS = {"request_prioritizer": "fcfs", "replicaset_scheduler": "least_loaded"}
MODEL: Mapping[str, Any] = {
    "replica": {"max_batch_size": 256},
    "backend": {"simulator": {"latency": {"type": "roofline", "model": "llama-3.1-8b", "device": "a100-80gb-sxm"}}},
}


@dataclass
class Served(Observer):
    """Record of when each request had its first token, came to a decode replica and ended, seconds."""

    rows: list[tuple[float, float, int]] = field(default_factory=list)
    """TTFT, TPOT and output tokens of those that finished."""
    decoding: list[tuple[float, int]] = field(default_factory=list)
    """Requests come to the decode replicas (1) and leave them (-1)."""
    _there: set[str] = field(default_factory=set)
    _first: dict[str, float] = field(default_factory=dict)

    def on_first_token(self, request: RequestView, now: float) -> None:
        """See `Observer`."""
        self._first[request.request_id] = now

    def on_held(self, request: RequestView, replica_id: int, now: float) -> None:
        """See `Observer`."""
        self._there.add(request.request_id)
        self.decoding.append((now, 1))

    def on_ended(self, request: RequestView, reason: EndReason, detail: str, now: float) -> None:
        """See `Observer`."""
        if request.request_id in self._there:
            self.decoding.append((now, -1))
        if reason is EndReason.REJECTED:
            return
        first, count = self._first[request.request_id], request.num_output_tokens
        self.rows.append((first - request.arrived_at, (now - first) / max(1, count - 1), count))

    def attainment(self, ttft_s: float, tpot_s: float) -> float:
        """Return the fraction of requests that met both SLOs."""
        return mean(ttft <= ttft_s and tpot <= tpot_s for ttft, tpot, _ in self.rows)

    def swing(self, begin_s: float, end_s: float) -> float:
        """Standard deviation over time of the number of requests on the decode replicas, as a part of its mean."""
        times, steps = (np.array(one) for one in zip(*self.decoding, strict=True))
        numbers = np.cumsum(steps)
        moments = np.arange(begin_s, end_s, 0.5)
        there = numbers[np.searchsorted(times, moments, "right") - 1]
        return float(there.std() / there.mean())


def requests(num: int, rate: float, prompts: tuple[int, int], outputs: tuple[int, int]) -> dict[str, Any]:
    """Poisson arrivals a second, with tokens between these bounds."""
    lengths = {
        name: {"type": "uniform", "min": low, "max": high}
        for name, (low, high) in {"prompt_tokens": prompts, "output_tokens": outputs}.items()
    }
    return {"type": "synthetic", "num_requests": num, "arrivals": {"type": "poisson", "rate": rate}, **lengths}


def simulated(mapping: Mapping[str, Any], seed: int) -> Served:
    """Run once."""
    config = config_from_mapping({"version": 1, "seed": seed, **mapping})
    seeds = SeedTree(config.seed)
    workload = build_workload(config.workload, seeds.child("workload").stream, Path.cwd())
    run, served = SimulatedRun(Run(config, load_registry(), workload, seeds)), Served()
    run.controller.watch([served])
    run.start()
    return served


# DistServe

TTFT_S = 0.4
TPOT_S = {"tight": 0.015, "loose": 0.1}


def of_distserve(*, is_split: bool) -> dict[str, Any]:
    """Four GPUs: two for prompts and two for decodes, or chunked prefill on each."""
    replicas: dict[str, Any] = {"num_replicas": 4}
    if is_split:
        replicas = {
            "pools": {"prefill": {"num_replicas": 2}, "decode": {"num_replicas": 2}},
            "hand_off": "distserve",
            "links": {"bandwidth_gb_s": 50, "latency_s": 0.0005},
        }
    return {
        "scheduling": {**LAYERS, "replica_scheduler": {"policy": "fixed_chunk", "params": {"chunk_size": 1024}}},
        **MODEL,
        **replicas,
        "workload": requests(1500, rate=24.0, prompts=(500, 1500), outputs=(50, 250)),
    }


# Mooncake


def of_mooncake(rule: str) -> dict[str, Any]:
    """More long prompts than the decode replicas can take, and early rejection by a rule."""
    params = {"rule": rule, "ttft_slo_s": 30.0, "tbt_slo_s": 0.025, "decode_s": 4.0}
    return {
        "scheduling": {
            **LAYERS,
            "replica_scheduler": {"policy": "fixed_chunk", "params": {"chunk_size": 4096}},
            "admission": {"policy": "mooncake", "params": params},
        },
        **MODEL,
        "pools": {"prefill": {"num_replicas": 48}, "decode": {"num_replicas": 4}},
        "hand_off": "distserve",
        "links": {"bandwidth_gb_s": 100},
        "workload": requests(1600, rate=9.0, prompts=(24_000, 40_000), outputs=(100, 200)),
    }


MOONCAKE_TTFT_S, MOONCAKE_TPOT_S = 30.0, 0.025
WINDOW_S = (20.0, 170.0)
"""Requests arrive for longer; the beginning is no steady state."""


@dataclass(frozen=True)
class Claim:
    """A published result: one figure is larger than another, on every pair of runs with one seed."""

    text: str
    larger: Sequence[float]
    smaller: Sequence[float]

    @property
    def difference(self) -> Difference:
        """The paired differences."""
        return difference(self.larger, self.smaller)

    def __str__(self) -> str:
        """The claim with its figures."""
        verdict = "holds" if self.difference.is_positive else "DOES NOT HOLD"
        means = f"{mean(self.larger):8.3f} {mean(self.smaller):8.3f}"
        return f"{self.text:76} {means}  {self.difference.mean:+.3f} ± {self.difference.error:.3f}  {verdict}"


def distserve_claims(seeds: Sequence[int]) -> list[Claim]:
    """Split pools against chunked prefill, four GPUs each."""
    split, chunked = ([simulated(of_distserve(is_split=one), seed) for seed in seeds] for one in (True, False))

    def kept(runs: Sequence[Served], slo: str) -> list[float]:
        return [run.attainment(TTFT_S, TPOT_S[slo]) for run in runs]

    return [
        Claim("DistServe, tight TPOT: attainment, split over chunked", kept(split, "tight"), kept(chunked, "tight")),
        Claim("DistServe, loose TPOT: attainment, chunked over split", kept(chunked, "loose"), kept(split, "loose")),
    ]


def mooncake_claims(seeds: Sequence[int]) -> list[Claim]:
    """Early rejection by the present load against the predicted one."""
    present, predicted = ([simulated(of_mooncake(rule), seed) for seed in seeds] for rule in ("load", "predicted_load"))

    def kept(runs: Sequence[Served]) -> list[float]:
        return [run.attainment(MOONCAKE_TTFT_S, MOONCAKE_TPOT_S) * len(run.rows) for run in runs]

    def swings(runs: Sequence[Served]) -> list[float]:
        return [run.swing(*WINDOW_S) for run in runs]

    return [
        Claim("Mooncake: variation of the decode load, present over predicted", swings(present), swings(predicted)),
        Claim("Mooncake: requests that met their SLOs, predicted over present", kept(predicted), kept(present)),
    ]


def main() -> int:
    """Print each claim with its figures; exit code 1 if one does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="seeds from 0 on, at least 2")
    seeds = range(max(2, parser.parse_args().seeds))
    print(f"{'':76} {'larger':>8} {'smaller':>8}  difference ± standard error of {len(seeds)} pairs")
    claims = []
    for measure in (distserve_claims, mooncake_claims):
        for claim in measure(seeds):
            print(claim, flush=True)
            claims.append(claim)
    return 0 if all(claim.difference.is_positive for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
